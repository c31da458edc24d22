"""Settle: what each verb does to each column, and that nobody but the holder of the newest lease can do it."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.utils import InternalError
from django.utils import timezone

from django_dbtaskqueue import Complete, CompleteDelete, Fail, LeaseLost, Poison, Reenqueue, TaskQueueError
from django_dbtaskqueue.core.failure_signature import signature_of
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, Park, Release, Settlement
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.flow import settle
from django_dbtaskqueue.flow.run import decide
from django_dbtaskqueue.flow.settle import settle_surely
from django_dbtaskqueue.models import Attempt, TaskHistory
from tests.conformance.conftest import SECOND, World
from tests.factories import LEASE, QUEUE
from tests.support import PATIENCE, Unprintable, counted, refused, taken_back
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
SECONDS, HOUR, NO_TIME = timedelta(seconds=1), timedelta(hours=1), timedelta(0)
GIVEN_BACK = {"status": CREATED, "next_process_time": NO_TIME, "poller_instance": None, "attempt": 1}


def is_at(time: datetime, later: timedelta = NO_TIME) -> bool:
    """Whether the database wrote that time in this test: now, or so much later."""
    return abs(time - timezone.now() - later) < timedelta(seconds=PATIENCE)


def over(status: str, text: str | None = None, **columns: Any) -> dict[str, Any]:
    times = {"ready_time": None, "finish_time": NO_TIME}
    return {"status": status, "final_status": status, "process_result": text, **times, **columns}


def back(later: timedelta = NO_TIME, **columns: Any) -> dict[str, Any]:
    times = {"ready_time": later, "next_process_time": later}
    return {"status": CREATED, "poller_instance": None, "process_result": None, **times, **columns}


AGAIN_LATER = back(HOUR / 20, attempt=0, reenqueue_attempt=1)
# An outcome, and the columns it leaves different; all others stay as they were. A time counts from the write.
EFFECTS: dict[str, tuple[Outcome | Settlement, dict[str, Any]]] = {
    "complete": (Complete(), over(COMPLETED)),
    "complete with a result": (Complete({"n": 1}), over(COMPLETED, result={"n": 1})),
    "poison": (Poison(), over(POISON)),
    "poison with a reason": (Poison("no"), over(POISON, "no")),
    "fail, retried by policy": (Fail("no"), back(HOUR, process_result="no")),
    "fail, retried at a given time": (Fail("no", delay=HOUR / 30), back(HOUR / 30, process_result="no")),
    "fail for good": (Fail("no", retry=False), over(ERROR, "no")),
    "reenqueue": (Reenqueue(NO_TIME), back(attempt=0, reenqueue_attempt=1)),
    "reenqueue later": (Reenqueue(HOUR / 20, "half"), {**AGAIN_LATER, "result": "half"}),
    "reenqueue, attempts kept": (Reenqueue(NO_TIME, keep_attempts=True), back(reenqueue_attempt=1)),
    "release": (Release(), GIVEN_BACK),
    "park": (Park("no handler for x"), {**GIVEN_BACK, "ready_time": None, "parked_by": "no handler for x"}),
}


def test_what_each_outcome_writes(world: World, subtests: pytest.Subtests) -> None:
    """Given a task on its second attempt, with traces of the first, taken a while ago. Its time to live moves along."""
    traces = {"payload": [1], "context": {"t": 1}, "priority": -2, "process_result": "before", "expire_time": HOUR}
    for case, (outcome, columns) in EFFECTS.items():
        with subtests.test(case):
            lease = world.take(attempt=1, total_attempt=7, **traces)
            lease.port.retry = lambda attempt, error: HOUR
            world.age(20 * SECONDS)
            before = world.row(lease)
            assert world.settle(lease, outcome)
            after = world.row(lease)
            now = after["last_update_time"]
            wanted = {name: now + one if isinstance(one, timedelta) else one for name, one in columns.items()}
            if "next_process_time" not in wanted and wanted["status"] != COMPLETED:
                wanted["next_process_time"] = before["ready_time"]  # a time to live counts from it after a kick
            if isinstance(outcome, Fail):
                wanted["fingerprint"] = signature_of("no", QUEUE).fingerprint
            if wanted.get("ready_time"):
                added = after["ready_time"] - before["ready_time"]
                assert abs(after["expire_time"] - before["expire_time"] - added) <= SECONDS / 1000
                wanted["expire_time"] = after["expire_time"]
            changed = {name: value for name, value in after.items() if value != before[name]}
            assert changed == {"last_update_time": now, **wanted}
            failures = Attempt.objects.using(world.alias).filter(task_id=lease.id)
            attempts = failures.values_list("attempt", "total_attempt", "message")
            assert list(attempts) == [(2, 8, "no")] * isinstance(outcome, Fail)


VERBS: dict[str, Callable[[Lease], None]] = {
    "complete": lambda lease: lease.complete({"n": 1}),
    "complete_delete": lambda lease: lease.complete_delete(),
    "reenqueue": lambda lease: lease.reenqueue(NO_TIME),
    "fail": lambda lease: lease.fail("no", retry=False),
    "retry": lambda lease: lease.fail("no", delay=timedelta(0)),
    "poison": lambda lease: lease.poison("no"),
    "touch": lambda lease: lease.touch(timedelta(minutes=5)),
    "report_progress": lambda lease: lease.report_progress(0.5, "half"),
}
SETTLEMENTS = {
    "complete": Complete({"n": 1}), "complete without a result": Complete(), "complete_delete": CompleteDelete(),
    "reenqueue": Reenqueue(NO_TIME), "fail": Fail("no", retry=False), "retry": Fail("no", delay=timedelta(0)),
    "poison": Poison("no"), "release": Release(), "park": Park("no handler"),
}  # fmt: skip
GONE: dict[str, Callable[[World, Lease], Any]] = {
    "running elsewhere": lambda world, lease: world.take_over(lease),
    "finished elsewhere": lambda world, lease: world.take_over(lease).complete("by the other"),
    "released": lambda world, lease: world.tasks.filter(pk=lease.id).release_all(),
    "taken again by the same poller": lambda world, lease: (GONE["released"](world, lease), world.checkout()[0]),
    "deleted": lambda world, lease: world.tasks.filter(pk=lease.id).purge(),
    "settled before": lambda world, lease: lease.poison("by ourselves"),
}


@pytest.mark.parametrize("keep", ["keep", "history", "delete"])
def test_a_stale_holder_writes_nothing(world: World, keep: str, subtests: pytest.Subtests) -> None:
    world.configure(keep=keep)
    for case, lose in GONE.items():
        with subtests.test(case):
            lease = world.take()
            lose(world, lease)
            before = world.everything()
            for name, verb in VERBS.items():
                with pytest.raises(LeaseLost) as lost:
                    verb(lease)
                assert (lost.value.task_id, lost.value.total_attempt) == (lease.id, 1), name
            for name, outcome in SETTLEMENTS.items():
                assert not world.settle(lease, outcome), name
            assert world.everything() == before
        world.tasks.purge()


def test_lease_lost_rolls_the_caller_s_writes_back(world: World) -> None:
    lease = world.take()
    world.take_over(lease)
    with pytest.raises(LeaseLost, match=f"Lease 1 of task {lease.id} is gone"), transaction.atomic(using=world.alias):
        Booking.objects.using(world.alias).create(reference="late")
        lease.complete()
    assert not Booking.objects.using(world.alias).exists() and world.row(lease)["status"] == PROCESSING


def test_a_settle_commits_and_rolls_back_with_the_caller(world: World, django_capture_on_commit_callbacks: Any) -> None:
    lease = world.take()
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=world.alias):
        lease.complete("first try")
        raise ZeroDivisionError
    assert world.row(lease)["status"] == PROCESSING and not lease.settled
    with django_capture_on_commit_callbacks(using=world.alias, execute=True), transaction.atomic(using=world.alias):
        Booking.objects.using(world.alias).create(reference="in time")
        lease.complete("second try")
    assert lease.settled and world.row(lease)["result"] == "second try"
    assert Booking.objects.using(world.alias).count() == 1


def test_keep_history_moves_the_row_with_all_it_says(world: World) -> None:
    world.configure(keep="history")
    task = world.enqueue("ref-1", {"n": 1}, priority=4, tag=None, context={"t": 1}, ttl=timedelta(hours=1))
    (lease,) = world.checkout()
    world.age(10 * SECONDS)
    before = world.row(task)
    lease.complete({"sum": 2})
    assert not world.tasks.filter(pk=task.id).exists()
    moved = TaskHistory.objects.using(world.alias).values().get()
    assert (moved["location"], moved["task_id"]) == ("dbtaskqueue.task", task.id)
    changed = {name for name in moved.keys() & before.keys() - {"id"} if moved[name] != before[name]}
    assert changed == {"status", "result", "finish_time", "last_update_time"}
    assert (moved["status"], moved["result"]) == (COMPLETED, {"sum": 2})
    assert is_at(moved["moved_time"]) and is_at(moved["finish_time"])
    assert moved["process_result"] is None, "a result is kept once"
    world.enqueue("ref-1")  # the reference is free again


@pytest.mark.parametrize("keep", ["keep", "history", "delete"])
def test_a_mixed_batch_conserves_and_a_stale_row_holds_up_no_other(world: World, keep: str) -> None:
    world.configure(keep=keep)
    leases, outcomes = world.take_many(19), [*SETTLEMENTS.values(), Complete(), *SETTLEMENTS.values()]
    world.tasks.filter(pk=leases[9].id).release_all()
    pairs = [(lease, decide(lease, outcome)) for lease, outcome in zip(leases, outcomes, strict=True)]
    assert settle.settle(world.session, pairs) == {lease.id for lease in leases} - {leases[9].id}
    assert world.row(leases[9])["status"] == CREATED and counted(world.alias) == 19
    assert world.tasks.filter(status=COMPLETED).count() == (4 if keep == "keep" else 0)
    assert TaskHistory.objects.using(world.alias).count() == (4 if keep == "history" else 0)


def test_what_is_no_outcome_is_refused(world: World) -> None:
    lease = world.take()
    with pytest.raises(TaskQueueError, match="is not an outcome"):
        world.settle(lease, "done")  # type: ignore[arg-type]
    assert world.row(lease)["status"] == PROCESSING


def test_failures_end_in_error_after_the_budget(world: World) -> None:
    task = world.make(max_attempts=3)
    for attempt in (1, 2, 3):
        (lease,) = world.checkout()
        assert lease.attempt == attempt
        lease.fail(ValueError(f"number {attempt}"), delay=NO_TIME)
    row = world.row(task)
    assert (row["status"], row["attempt"], row["total_attempt"]) == (ERROR, 3, 3)
    assert row["process_result"].rstrip().endswith("ValueError: number 3")
    attempts = Attempt.objects.using(world.alias).filter(task_id=task.id).order_by("total_attempt")
    told = [(one.attempt, one.error_type, one.message) for one in attempts]
    assert told == [(number, "builtins.ValueError", f"number {number}") for number in (1, 2, 3)]
    assert all(one.poller_instance and one.start_time <= one.finish_time for one in attempts)
    assert all("Traceback" in one.traceback or one.traceback.endswith(f"{one.message}\n") for one in attempts)


def test_what_is_no_failure_lets_a_task_be_taken_again_even_after_its_last_attempt(world: World) -> None:
    for put_back in (Reenqueue(NO_TIME, keep_attempts=True), Reenqueue(NO_TIME), None):
        lease = world.take(attempt=2, max_attempts=3)
        assert world.settle(lease, put_back) if put_back else world.tasks.filter(pk=lease.id).release_all()
        (again,) = world.checkout()
        assert again.id == lease.id
        again.complete()


class Hostile(Unprintable, Exception):
    __str__ = Unprintable.__repr__


HostileName = type("HostileName", (Exception,), {"__qualname__": "Hostile\0Name\ud800" * 100})


def deep(level: int = 0) -> None:
    deep(level + 1)


def raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def cyclic() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def test_no_error_text_makes_the_failure_write_fail(world: World, subtests: pytest.Subtests) -> None:
    for number, (case, make) in enumerate(
        {
            "NUL": lambda: ValueError("a\0b"),
            "lone surrogate": lambda: ValueError("a\udcffb"),
            "a surrogate pair, apart": lambda: ValueError("\ud83d\ude00"),
            "huge": lambda: ValueError("x" * 5_000_000),
            "huge, of wide characters": lambda: ValueError("\U0001f600" * 500_000),
            "__str__ raises": Hostile,
            "no text": lambda: ValueError(),
            "args that are no text": lambda: ValueError(b"\xff", None, {"a": object()}),
            "an argument whose repr raises": lambda: ValueError(Hostile()),
            "hostile name": lambda: HostileName("x"),
            "recursion": lambda: raised(deep),
            "cyclic cause": cyclic,
            "group": lambda: ExceptionGroup("many", [Hostile(), ValueError("\0")]),
            "syntax error": lambda: raised(lambda: compile("a b\0", "\0file", "exec")),
            "exit": lambda: SystemExit(3),
            "message with NUL": lambda: "a\0b\udc80",
            "empty message": lambda: "",
            "percent and braces": lambda: ValueError("%s %(x)s {0.__class__} '); DROP TABLE x; --"),
        }.items()
    ):
        lease, retry = world.take(), bool(number % 2)
        with subtests.test(case):
            assert world.settle(lease, Fail(make(), retry=retry))
            row = world.row(lease)
            assert row["status"] == (CREATED if retry else ERROR)
            attempt = Attempt.objects.using(world.alias).get(task_id=lease.id)
            for text in (row["process_result"] or "", attempt.message, attempt.error_type, attempt.traceback):
                assert "\0" not in text
                text.encode()
            assert len((row["process_result"] or "").encode()) <= 4000 and len(attempt.error_type) <= 200


def test_a_result_is_kept_whole_and_a_reason_cut_between_characters(world: World) -> None:
    faces, cut_faces = "\U0001f600" * 1500, "\U0001f600" * 1000
    euros, cut_euros = "a" + "€" * 2000, "a" + "€" * 1333
    for text, kept in [(faces, cut_faces), (euros, cut_euros), ("x" * 4001, "x" * 4000)]:
        whole, cut = world.take(), world.take()
        settle.settle(world.session, [(whole, Complete(text)), (cut, Poison(text))])
        assert (world.row(whole)["result"], world.row(whole)["process_result"]) == (text, None)
        assert world.row(cut)["process_result"] == kept
    for result in ("", 0, False, [1, "é"], {"k": [None, "\\", '"\n\x7f']}, 1e300, -0.5, 2**70):
        pair = [(world.take(), Complete(result)) for _ in range(2)]  # several go another way than one
        settle.settle(world.session, pair)
        assert [world.row(lease)["result"] for lease, _ in pair] == [result] * 2


def test_no_result_stays_null(world: World) -> None:
    for with_result, without in ((Complete("x"), Complete()), (Reenqueue(NO_TIME, "x"), Reenqueue(NO_TIME))):
        others, lease = world.take(), world.take()
        settle.settle(world.session, [(others, with_result), (lease, without)])  # both go the same way
        row = world.row(lease)
        assert (row["result"], row["process_result"]) == (None, None)
        assert world.tasks.filter(pk=lease.id, result__isnull=True).exists()
        assert world.row(others)["result"] == "x"
        world.tasks.purge()


def test_what_the_database_refuses_ends_alone_and_no_policy_is_asked_again(world: World) -> None:
    """A batch with a bad row is halved until the row is alone; each failure in it was decided before.

    No check of ours foresees what a user's own trigger refuses.
    """
    asked: list[int] = []
    leases = world.take_many(9)
    for lease in leases:
        lease.port.retry = lambda attempt, error: asked.append(attempt) or timedelta(minutes=1)
    outcomes = [*[Fail("no")] * 3, Complete("x"), *[Complete()] * 4, Complete("x")]
    pairs = [(lease, decide(lease, outcome)) for lease, outcome in zip(leases, outcomes, strict=True)]
    with refused("NEW.result IS NOT NULL AND NEW.status = 'COMPLETED'", world.alias, code="23514"):
        assert settle_surely(world.session, pairs) == {lease.id for lease in leases}
    assert asked == [1, 1, 1]
    rows = [world.row(lease) for lease in leases]
    assert [row["status"] for row in rows] == [*[CREATED] * 3, ERROR, *[COMPLETED] * 4, ERROR]
    assert rows[3]["process_result"] == "Outcome could not be stored: IntegrityError"


def test_resolve_tells_what_became_of_leases(world: World) -> None:
    settled, held, deleted, taken_over = leases = [world.take() for _ in range(4)]
    settled.complete()
    deleted.complete_delete()
    world.age(LEASE)
    world.tasks.filter(pk=held.id).update(next_process_time=timezone.now() + LEASE)
    world.checkout(poller=SECOND)
    assert world.row(taken_over)["total_attempt"] == 2
    assert settle.resolve(world.session, leases) == ({settled.id}, {held.id})


@pytest.mark.parametrize("world", ["postgresql-skip_locked"], indirect=True)
def test_a_read_only_spell_spoils_no_outcome(world: World, caplog: pytest.LogCaptureFixture) -> None:
    taken = world.take_many(3)
    pairs: list[settle.Decided] = [(lease, Complete()) for lease in taken]
    with taken_back(world.alias):
        world.session.run("SET LOCAL transaction_read_only = on", {})
        with pytest.raises(InternalError, match="read-only"):
            settle_surely(world.session, pairs)
    assert "could not be stored" not in caplog.text, "it is not the outcomes' fault"
    assert settle_surely(world.session, pairs) == {lease.id for lease in taken}
    assert {world.row(lease)["status"] for lease in taken} == {COMPLETED}
