"""Two connections want the same row: who comes second waits, passes by, or finds the fence closed."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.db.utils import OperationalError

from django_dbtaskqueue import Complete, DuplicateTask, enqueue, enqueue_many, queue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import CompleteDelete, Fail, Outcome, Poison, Release
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import groups, move, rescue, retention, settle
from django_dbtaskqueue.flow.checkout import MIN_SHARED_ROWS, START, Checkout, Optimistic, QueueShare, ScanCursor
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.flow.run import decide
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.operations import actions
from django_dbtaskqueue.operations.actions import ActionRequest
from django_dbtaskqueue.operations.permissions import Actor as Operator
from django_dbtaskqueue.operations.verbs import DELETE, RELEASE, TaskVerb
from django_dbtaskqueue.poller.held_leases import renew
from tests.factories import LEASE, age, make_task
from tests.support import PATIENCE, Actor, actors, backend_pid, minute_counts, sql, until_blocked

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("parcels", "audit")]
Act = Callable[[], Any]


@pytest.fixture
def other() -> Iterator[Actor]:
    with actors(1) as (actor,):
        yield actor


def checkout(limit: int = 1, poller: str = "first") -> list[Lease]:
    return Task.objects.checkout("parcels", poller_instance=poller, limit=limit, lease=LEASE)


def taken(**columns: Any) -> Lease:
    make_task(**columns)
    (lease,) = checkout()
    return lease


def settles(lease: Lease) -> bool:
    return lease.id in settle.settle(Session.on("default"), [(lease, Complete())])


def status() -> str:
    return str(Task.objects.get().status)


def while_we_hold(act: Act, other: Actor, does: Act, then: Act = lambda: None) -> Future[Any]:
    """Do ``act`` in a transaction; the other begins and is seen waiting for a lock of ours; do ``then``, and commit."""
    pid = other.do(backend_pid).result(PATIENCE)
    with transaction.atomic():
        act()
        answer = other.do(does)
        until_blocked(pid)
        assert not answer.done()
        then()
    return answer


def test_skip_locked_passes_over_what_another_is_taking(other: Actor) -> None:
    ids = [make_task().pk for _ in range(6)]
    with transaction.atomic():
        ours = checkout(3)
        theirs = other.do(checkout, 5, "second").result(PATIENCE)
        assert [lease.id for lease in ours] == ids[:3] and [lease.id for lease in theirs] == ids[3:]


def test_beside_others_a_large_checkout_passes_what_is_held_and_what_was_given_up_is_found(other: Actor) -> None:
    gave_up, held, free = (make_task().pk for _ in range(3))
    line = ScanCursor("parcels", watermarks={0: START}, may_full_scan=1e9, next_full_scan=1e9, others=1)
    shares = [QueueShare(line, MIN_SHARED_ROWS, port=SettlePort("default")) for _ in range(2)]
    with suppress(ValueError), transaction.atomic():
        raise ValueError(Task.objects.select_for_update(no_key=True).get(pk=gave_up))
    with transaction.atomic():
        Task.objects.select_for_update(no_key=True).get(pk=held)
        other.do(lambda: Checkout(Session.on("default"), "second", LEASE).take(shares[:1], 100)).result(PATIENCE)
    line.may_full_scan = 0.0
    Checkout(Session.on("default"), "first", LEASE).take(shares[1:], 100)
    first, second = ({lease.id for lease in share.taken} for share in shares)
    # Whether the first has the one that was given up, depends on what else runs on the server.
    assert (first | {gave_up}, first | second, first & second) == ({gave_up, free}, {gave_up, held, free}, set())


def after_candidates(act: Act) -> AbstractContextManager[None]:
    """Let others act, once, between an optimistic checkout's look and its grab."""
    acts = [act]

    def run(execute: Any, sql: str, *rest: Any) -> Any:
        answer = execute(sql, *rest)
        if sql == Session.on("default").sql.candidates and acts:
            acts.pop()()
        return answer

    return connection.execute_wrapper(run)


def optimistic(line: ScanCursor, limit: int) -> list[Lease]:
    share = QueueShare(line, limit, port=SettlePort("default"), strategy=Optimistic())
    return Checkout(Session.on("default"), "first", LEASE).take([share], limit)


def test_an_optimistic_checkout_takes_nothing_that_changed_since_it_looked(other: Actor) -> None:
    ids = [make_task().pk for _ in range(10)]
    line = ScanCursor("parcels")
    with after_candidates(lambda: other.do(checkout, 4, "second").result(PATIENCE)):
        ours = optimistic(line, 10)
    assert [lease.id for lease in ours] == ids[4:] and line.lost_races == 4


CHANGES: dict[str, Act] = {
    "taken and given back": lambda: settle.settle(Session.on("default"), [(checkout(1, "second")[0], Release())]),
    "cancelled": lambda: Task.objects.cancel(),
    "deleted": lambda: Task.objects.purge(),
    "put off": lambda: enqueue("parcels", "r", delay=timedelta(hours=1), on_duplicate="replace"),
    "completed": lambda: checkout(1, "second")[0].complete(),
    "paused": lambda: Queue.objects.create(name="parcels", paused_time=Now()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_optimistic_checkout_tests_everything_again(other: Actor, change: str) -> None:
    make_task(reference="r")
    with after_candidates(lambda: other.do(CHANGES[change]).result(PATIENCE)):
        assert optimistic(ScanCursor("parcels"), 1) == []


def test_after_a_lost_race_it_picks_among_the_candidates_and_still_gets_all(other: Actor) -> None:
    ids = {make_task().pk for _ in range(120)}
    line, batches = ScanCursor("parcels"), list[list[int]]()
    line.lost_races = 1
    while batch := [lease.id for lease in optimistic(line, 3)]:
        batches.append(batch)
        line.lost_races, line.next_full_scan = 1, 0.0
    assert max(map(len, batches)) <= 3 and set(chain.from_iterable(batches)) == ids
    assert batches != sorted(batches)


def test_a_late_settle_waits_for_the_take_over_and_writes_nothing(other: Actor) -> None:
    lease = taken()
    age(2 * LEASE)
    assert while_we_hold(lambda: checkout(poller="second"), other, lambda: settles(lease)).result(PATIENCE) is False
    row = Task.objects.get()
    assert (row.status, row.total_attempt, row.poller_instance) == (PROCESSING, 2, "second")


@pytest.mark.parametrize("take", [lambda: checkout(1, "second"), lambda: optimistic(ScanCursor("parcels"), 1)])
def test_a_take_over_passes_over_a_row_that_is_being_settled(other: Actor, take: Callable[[], list[Lease]]) -> None:
    lease = taken()
    age(2 * LEASE)
    with transaction.atomic():
        assert settles(lease)
        assert other.do(take).result(PATIENCE) == []
    assert other.do(take).result(PATIENCE) == []
    assert status() == COMPLETED


def test_renewal_never_waits_for_the_handler_s_own_row_lock(other: Actor) -> None:
    make_task()
    make_task()
    busy, free = checkout(2)
    ends = dict(Task.objects.values_list("pk", "next_process_time"))
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=busy.id)
        lost = other.do(lambda: renew(Session.on("default"), [busy, free], 600.0)).result(PATIENCE)
    assert lost == []
    rows = dict(Task.objects.values_list("pk", "next_process_time"))
    assert rows[busy.id] == ends[busy.id] and rows[free.id] > ends[free.id] + timedelta(minutes=5)


def test_rescue_passes_over_a_holder_that_is_settling_and_ends_one_that_comes_later(other: Actor) -> None:
    lease = taken(attempt=4)
    age(2 * LEASE)
    with transaction.atomic():
        assert settles(lease)
        assert other.do(lambda: rescue.exhausted(Session.on("default"), "parcels")).result(PATIENCE) == []
    assert status() == COMPLETED
    Task.objects.all().delete()
    late = taken(attempt=4)
    age(2 * LEASE)

    def end_it() -> None:
        session = Session.on("default")
        (row,) = rescue.exhausted(session, "parcels")
        copy = Lease(*row, late.port, 0.0)
        assert settle.settle(session, [(copy, decide(copy, Fail("died", retry=False)))]) == {late.id}

    assert while_we_hold(end_it, other, lambda: settles(late)).result(PATIENCE) is False
    assert status() == ERROR


@pytest.mark.parametrize(("act", "end"), [(Task.objects.release_all, [CREATED]), (Task.objects.purge, [])])
def test_an_operator_and_a_settle_wait_and_judge_then(other: Actor, act: Callable[[], int], end: list[str]) -> None:
    lease = taken()
    assert while_we_hold(act, other, lambda: settles(lease)).result(PATIENCE) is False
    assert list(Task.objects.values_list("status", flat=True)) == end
    purged = not end
    assert sum(minute_counts("deletion").values_list("count", flat=True)) == purged
    Task.objects.all().delete()
    lease = taken()
    assert while_we_hold(lambda: settles(lease), other, act).result(PATIENCE) == purged
    assert Task.objects.filter(status=COMPLETED).count() == (not purged)


def test_replace_waits_for_a_checkout_and_a_checkout_passes_over_what_is_being_replaced(other: Actor) -> None:
    make_task(reference="r", payload="old")
    answer = while_we_hold(checkout, other, lambda: enqueue("parcels", "r", "new", on_duplicate="replace"))
    with pytest.raises(DuplicateTask, match="PROCESSING"):
        answer.result(PATIENCE)
    assert Task.objects.get().payload == "old"
    make_task(reference="s", payload="old")
    with transaction.atomic():
        enqueue("parcels", "s", "new", on_duplicate="replace")
        assert other.do(checkout, 1, "second").result(PATIENCE) == []
    (lease,) = other.do(checkout, 1, "second").result(PATIENCE)
    assert lease.payload == "new"


def test_two_operators_kick_no_task_twice_and_housekeep_leaves_what_they_put_back(other: Actor) -> None:
    for _ in range(5):
        make_task(POISON)
    with transaction.atomic():
        assert Task.objects.kick(2) == 2
        assert other.do(lambda: Task.objects.kick(2)).result(PATIENCE) == 2
    assert Task.objects.filter(status=CREATED).count() == 4
    make_task(ERROR)
    with transaction.atomic():
        assert Task.objects.reprocess() == 1
        keep_house = partial(Task.objects.filter(status=ERROR).housekeep, older_than=timedelta(0))
        assert other.do(keep_house).result(PATIENCE) == 0
    assert Task.objects.filter(status=CREATED).count() == 5


def test_housekeeping_judges_a_task_again_when_it_locks_it(other: Actor) -> None:
    make_task(ERROR)
    cursor = retention.RetentionCursor("parcels", ERROR)
    answer = while_we_hold(
        lambda: Session.on("default").run("LOCK TABLE dbtaskqueue_task IN EXCLUSIVE MODE", {}),  # to read is allowed
        other,
        lambda: retention.housekeep_batch(Session.on("default"), cursor, older_than=timedelta(0)),
        lambda: Task.objects.reprocess(),
    )
    assert answer.result(PATIENCE) == 0
    assert status() == CREATED


@pytest.mark.parametrize("outcome", [Complete(), Complete("a"), CompleteDelete(), Fail("no"), Poison("no")], ids=str)
def test_a_settle_locks_its_rows_by_id(other: Actor, outcome: Outcome) -> None:
    """Two that lock rows in different orders make a deadlock: so whoever waits for a row holds none behind it."""
    enqueue_many("parcels", [{}] * 2000)  # reading all costs more than two rows by their keys
    sql("ANALYZE dbtaskqueue_task")  # so that the planner finds rows by their keys
    first, second = sorted(checkout(2), key=lambda lease: lease.id)
    answer = while_we_hold(
        lambda: Task.objects.select_for_update().get(pk=first.id),
        other,
        lambda: settle.settle(Session.on("default"), [(lease, decide(lease, outcome)) for lease in (second, first)]),
        lambda: Task.objects.select_for_update(nowait=True).get(pk=second.id),
    )
    assert answer.result(PATIENCE) == {first.id, second.id}


GROUPED = {"status": PROCESSING, "group_key": "UA", "attempt": 1}
PAST = timedelta(minutes=-5)


def acts(verb: TaskVerb) -> int:
    ids = list(Task.objects.values_list("pk", flat=True))
    return actions.act_on_ids(Task.objects.all(), ids, ActionRequest(verb, "test"), Operator()).changed


def lock_group() -> None:
    groups.lock(Session.on("default"), "parcels", ["UA"])


IN_ORDER: dict[str, tuple[dict[str, Any], Act]] = {
    "the release of an operator": (GROUPED, lambda: acts(RELEASE)),
    "the deletion of an operator": (GROUPED, lambda: acts(DELETE)),
    "the deletion of a consumer": (GROUPED, lambda: queue("parcels").truncate()),
    "the drop of a queue": ({**GROUPED, "next_process_time": PAST}, lambda: queue("parcels").drop()),
    "a kick of the queryset": ({"status": POISON, "group_key": "UA"}, lambda: Task.objects.kick(1)),
    "a kick of a consumer": ({"status": POISON, "group_key": "UA"}, lambda: queue("parcels").kick(1)),
    "a rescue": (
        {**GROUPED, "max_attempts": 1, "next_process_time": PAST},
        lambda: len(rescue.rescue(Session.on("default"), "parcels", SettlePort("default"))),
    ),
    "an unpark": (
        {"group_key": "UA", "parked_by": "no handler for payload type x", "payload_type": "x"},
        lambda: move.unpark(Session.on("default"), "parcels", ["x"]),
    ),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_who_waits_for_a_group_holds_none_of_its_rows(other: Actor, name: str) -> None:
    """A settle locks a group, then writes rows of it. A row that is locked before its group makes a deadlock."""
    columns, changes = IN_ORDER[name]
    task = make_task(**columns)
    free = Task.objects.select_for_update(nowait=True)
    assert while_we_hold(lock_group, other, changes, lambda: free.get(pk=task.pk)).result(PATIENCE) == 1


CHANGES_GROUP: dict[str, Callable[[Lease], Any]] = {
    "enqueue": lambda _: enqueue("parcels", group="UA"),
    "enqueue_many": lambda _: enqueue_many("parcels", [{"group": "UA"}, {"group": "UA"}]),
    "settle": settles,
}


@pytest.mark.parametrize("name", CHANGES_GROUP)
def test_whoever_changes_a_group_waits_for_its_lock(other: Actor, name: str) -> None:
    lease = taken(group_key="UA")
    while_we_hold(lock_group, other, lambda: CHANGES_GROUP[name](lease)).result(PATIENCE)
    assert Task.objects.filter(ready_time__isnull=False).count() == (name != "settle")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("verb", ["enqueue", "kick"])
def test_a_task_replaces_no_head_that_is_just_being_taken(other: Actor, settings: Any, number: int, verb: str) -> None:
    """It goes before that head in the order. It waits all the same, because the head runs."""
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"max_running_per_group": number}}}
    if verb == "kick":
        make_task(status=POISON, group_key="UA")
    enqueue_many("parcels", [{"group": "UA"}] * number)
    heads: list[Lease] = []
    enter = Task.objects.kick if verb == "kick" else lambda _: enqueue("parcels", group="UA", priority=-1)
    while_we_hold(lambda: heads.extend(checkout(number)), other, lambda: enter(1)).result(PATIENCE)
    assert checkout() == []
    assert settles(heads[0])
    assert len(checkout()) == 1


def test_an_outcome_that_could_not_wait_is_written_later(other: Actor) -> None:
    """Given a row that somebody holds, and a server that lets nobody wait, then the lease stands and can be settled."""
    lease = taken()

    def impatient(limit: str) -> set[int]:
        with closing(Session.open("default")) as session, suppress(OperationalError):
            session.run(f"SET {limit} = '50ms'", {})
            return settle.settle_surely(session, [(lease, Complete())])
        return set()

    with transaction.atomic():
        Task.objects.select_for_update().get()
        for limit in ("lock_timeout", "statement_timeout"):
            assert other.do(impatient, limit).result(PATIENCE) == set()
    assert status() == PROCESSING
    assert other.do(impatient, "lock_timeout").result(PATIENCE) == {lease.id}
    assert status() == COMPLETED
