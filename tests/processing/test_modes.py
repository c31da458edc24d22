"""``separate``: at least once. ``atomic``: writes and outcome are one transaction. Batches: up to n tasks in a call."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core import checks
from django.db import DatabaseError, connections, transaction

from django_dbtaskqueue import LeaseLost, enqueue, enqueue_many, processor, registry, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Fail, Poison, Reenqueue
from tests.poller.processes import Held, cut_connections
from tests.processing.conftest import QUEUE, SOON, Crate, Site, both, on_real_connections
from tests.support import PATIENCE, actors, backend_pid, sql, until
from tests.testapp.models import Booking

pytestmark = on_real_connections
ONCE: dict[str, Any] = {"max_attempts": 1}


@both
@pytest.mark.parametrize(("mode", "left"), [("separate", ["a"]), ("atomic", [])])
def test_what_an_exception_leaves_behind(site: Site, mode: str, left: list[str]) -> None:
    processor(QUEUE, mode=mode, **ONCE)(lambda task: site.book("a") / 0)
    task = site.ran()
    assert site.booked() == left and task.status == "ERROR"
    assert [attempt.message for attempt in site.attempts(task)] == ["division by zero"]


@both
@pytest.mark.parametrize("batch", [None, 3])
def test_atomic_outcome_and_writes_become_visible_together(site: Site, held: Held, batch: int | None) -> None:
    def write(tasks: list[Lease]) -> list[str]:
        for task in tasks:
            site.book(task.reference)
        held(tasks[0])
        return [f"{task.reference}!" for task in tasks]

    processor(QUEUE, mode="atomic", batch=batch)(write if batch else lambda task: write([task])[0])
    names = [f"r{number}" for number in range(batch or 1)]
    enqueue_batch(site, len(names))
    with site.poller():
        held.until_started()
        assert ({*site.values("status")}, site.booked()) == ({"PROCESSING"}, []), "only its checkout is committed"
        held.go_on.set()
    assert (site.values("result"), site.booked()) == ([f"{name}!" for name in names], names)


@both
def test_atomic_a_returned_outcome_commits_with_the_writes_and_one_without_due_time_does_not(site: Site) -> None:
    outcomes = {"fail": Fail("no", retry=False), "complete": Complete(1), "reenqueue": Reenqueue()}

    @processor(QUEUE, mode="atomic", **ONCE)
    def write(task: Lease) -> Any:
        site.book(task.reference)
        return outcomes[str(task.reference)]

    for name in outcomes:
        site.enqueue(reference=name)
    site.run()
    assert site.values("status") == ["ERROR", "COMPLETED", "ERROR"] and sorted(site.booked()) == ["complete", "fail"]


@both
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize(
    ("end", "left"),
    [
        (lambda own: own.cancel(), ["POISON"]),
        (lambda own: own.purge(), []),
        (lambda own: enqueue(QUEUE, "r0", 2, using=own.db, on_duplicate="replace_running"), ["COMPLETED"]),
    ],
)
def test_atomic_writes_commit_with_the_end_of_the_own_task(site: Site, end: Any, left: Any, batch: int | None) -> None:
    def work(tasks: list[Lease]) -> None:
        for task in tasks:
            site.book(str(task.payload))
            if task.payload == 0:
                end(site.tasks(reference="r0"))

    processor(QUEUE, mode="atomic", batch=batch)(work if batch else lambda task: work([task]))
    enqueue_batch(site, 2)
    site.drain()
    assert [status for name, status in site.values("reference", "status") if name == "r0"] == left
    assert sorted(site.booked()) == ["0", "1", *(["2"] if left == ["COMPLETED"] else [])]


def test_atomic_steps_and_progress_lock_no_row_that_others_need(site: Site, held: Held) -> None:
    @processor(QUEUE, mode="atomic")
    def work(task: Lease) -> Any:
        task.report_progress(0.5)
        task.step("book", site.book, "a")
        held(task)
        return task.wait_for("go")

    task = site.enqueue()
    with site.poller():
        held.until_started()
        try:
            with transaction.atomic():
                site.tasks(pk=task.pk).select_for_update(nowait=True).get()
            assert not signal(task, "go", 1)
        finally:
            held.go_on.set()
    assert (site.task(task).result, site.booked()) == (1, ["a"])


@pytest.mark.parametrize("batch", [None, 3])
def test_atomic_a_lease_lost_meanwhile_rolls_the_writes_back(site: Site, batch: int | None) -> None:
    """The others of a batch are not lost with it: each runs again, alone."""
    calls: list[int] = []

    def write(tasks: list[Lease]) -> None:
        calls.append(len(tasks))
        for task in tasks:
            site.book(task.reference)
        if len(calls) == 1:  # an operator revokes the lease; SQLite lets nobody else write meanwhile
            with actors(1) as (operator,):
                operator.do(site.tasks(reference="r0").release_all).result(PATIENCE)

    processor(QUEUE, mode="atomic", batch=batch)(write if batch else lambda task: write([task]))
    enqueue_batch(site, batch or 1)
    assert (calls, site.run().counts.outcomes["lost"]) == ([3, 1, 1, 1, 1] if batch else [1, 1], 1)
    assert site.values("status") == ["COMPLETED"] * (batch or 1)
    assert sorted(site.booked()) == [f"r{number}" for number in range(batch or 1)]


@both
def test_atomic_an_outcome_rolled_back_with_a_savepoint_is_settled_by_what_is_returned(site: Site) -> None:
    @processor(QUEUE, mode="atomic", **ONCE)
    def change_of_mind(task: Lease) -> str:
        site.book("a")
        with suppress(ValueError), transaction.atomic(using=task.port.alias):
            task.complete("first")
            raise ValueError("not this way")
        return "second"

    site.ran()
    assert (site.values("status", "result", "total_attempt"), site.booked()) == ([("COMPLETED", "second", 1)], ["a"])


@both
def test_atomic_a_lost_lease_that_is_hushed_up_rolls_the_writes_back_all_the_same(site: Site) -> None:
    @processor(QUEUE, mode="atomic", **ONCE)
    def hush_up(task: Lease) -> None:
        site.book("a")
        task.total_attempt -= 1  # as if somebody else held it by now
        with suppress(LeaseLost):
            task.complete()

    site.enqueue()
    assert (site.drain().lost, site.booked()) == (1, [])


LEFT_OPEN: dict[str, Callable[[str], Any]] = {
    "a transaction": lambda alias: transaction.atomic(using=alias).__enter__(),
    "no autocommit": lambda alias: transaction.set_autocommit(False, using=alias),
}


@both
@pytest.mark.parametrize("how", LEFT_OPEN)
def test_separate_what_a_processor_left_open_reaches_no_other_task(site: Site, how: str) -> None:
    """It leaves its connection in a broken transaction, and the next task has one of its own."""

    @processor(QUEUE, **ONCE)
    def leave_open(task: Lease) -> None:
        if task.payload == "next":
            site.book("next")
            return
        LEFT_OPEN[how](site.alias)
        site.book("left")
        with suppress(DatabaseError):
            sql("SELECT 1 FROM nowhere", alias=site.alias)

    site.fill("left", "next")
    site.run(threads=1)
    assert (site.values("status"), site.booked()) == (["COMPLETED"] * 2, ["next"])


# How a task changes what belongs to its session, and a query that shows it.
LEFT_ON_THE_SESSION: dict[str, tuple[str, str, str]] = {
    "read only": ("default", "SET default_transaction_read_only = on", "SHOW default_transaction_read_only"),
    "a timeout": ("default", "SELECT set_config('statement_timeout', '1h', false)", "SHOW statement_timeout"),
    "a schema": ("default", "/* tenant */ set search_path = nowhere", "SELECT to_regclass('testapp_booking')::text"),
    "a role": ("default", "SET ROLE pg_monitor", "SELECT current_user"),
    "an isolation level": (
        "default",
        "SELECT 1; SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "SHOW default_transaction_isolation",
    ),
    "a temporary table": ("default", "CREATE TEMPORARY TABLE mine (a int)", "SELECT to_regclass('mine')::text"),
    "a cursor": ("default", "DECLARE left_over CURSOR WITH HOLD FOR SELECT 1", "SELECT count(*) FROM pg_cursors"),
    "a plan": ("default", "PREPARE p AS SELECT 1", "SELECT count(*) FROM pg_prepared_statements WHERE from_sql"),
    "a block": ("default", "DO $$ BEGIN SET search_path = nowhere; END $$", "SHOW search_path"),
    "a lock": ("default", "SELECT pg_advisory_lock(7)", "SELECT count(*) FROM pg_locks WHERE objid = 7"),
    "a PRAGMA": ("sqlite", "PRAGMA query_only = on", "PRAGMA query_only"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("what", LEFT_ON_THE_SESSION)
def test_what_a_task_changes_in_its_session_reaches_no_other_task(what: str, is_async: bool) -> None:
    alias, change, show = LEFT_ON_THE_SESSION[what]

    def process(task: Lease) -> Any:
        before = sql(show, alias=alias)[0][0]
        if task.payload == "changes":
            sql(change, alias=alias)
        return Complete(before)

    site = Site(alias)
    processor(QUEUE, **ONCE)(sync_to_async(process) if is_async else process)
    site.fill("looks", "changes", "looks")
    site.run(threads=1, coroutines=1)
    assert len({str(one) for one in site.values("result")}) == 1 and site.values("status") == ["COMPLETED"] * 3


@both
def test_a_setting_that_nothing_announces_costs_at_most_one_attempt(site: Site) -> None:
    """The driver's own cursor tells Django nothing; the first task that fails by it ends its connection."""
    read_only = {"default": "SET default_transaction_read_only = on", "sqlite": "PRAGMA query_only = on"}

    @processor(QUEUE, mode="atomic", retry=SOON, max_attempts=2)
    def process(task: Lease) -> None:
        site.book(task.payload)

    @processor(QUEUE, payload=Crate)
    def change(task: Lease) -> None:
        connections[site.alias].ensure_connection()
        connections[site.alias].connection.execute(read_only[site.alias])

    site.fill(Crate(1), "a", "b", "c")
    site.run(threads=1)
    assert site.values("status") == ["COMPLETED"] * 4 and sorted(site.booked()) == ["a", "b", "c"]
    assert sum(site.values("attempt")) <= 4 + 1


def test_what_ends_with_its_transaction_keeps_the_connection(site: Site) -> None:
    changes = ["SET LOCAL jit = off", "SELECT set_config('jit', 'off', true)", "SET CONSTRAINTS ALL DEFERRED"]

    @processor(QUEUE)
    def process(task: Lease) -> int:
        with transaction.atomic():
            for change in changes:
                sql(change)
            Booking.objects.update(reference="set role")
            return backend_pid()

    site.fill(*[None] * 3)
    site.run(threads=1)
    assert len(set(site.values("result"))) == 1


def test_async_a_lost_connection_costs_one_attempt_not_every_one(site: Site) -> None:
    """Nobody closes the one connection of Django's async ORM, as the end of a request does elsewhere."""

    @processor(QUEUE, retry=SOON, max_attempts=3)
    async def count(task: Lease) -> int:
        return await Booking.objects.acount()

    with site.poller():
        site.until(site.enqueue())
        cut_connections()
        site.fill(*[None] * 3)
    assert site.values("status") == ["COMPLETED"] * 4


def book(task: Lease) -> None: ...


def test_an_atomic_processor_of_another_database_is_a_system_check_error(settings: Any) -> None:
    for mode, using in (("separate", "sqlite"), ("atomic", "default"), ("atomic", None)):
        processor(QUEUE, mode=mode, using=using)(book)
        assert checks.run_checks(tags=["dbtaskqueue"]) == []
        registry.unregister(QUEUE)
    processor(QUEUE, mode="atomic", using="sqlite")(book)
    (error,) = checks.run_checks(tags=["dbtaskqueue"])
    assert error.id == "dbtaskqueue.E004"
    assert "book" in error.msg and "'sqlite'" in error.msg and "'default'" in error.msg
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"database": "sqlite"}}}
    assert checks.run_checks(tags=["dbtaskqueue"]) == []


def test_a_processor_that_hangs_with_its_row_locked_stops_nobody_else(site: Site, held: Held) -> None:
    @processor(QUEUE, mode="atomic", **ONCE)
    def hang(task: Lease) -> None:
        if task.payload == "hangs":
            site.tasks(pk=task.id).update(tag=None)
            held(task)

    hanging = site.enqueue("hangs")
    with site.poller(threads=4) as poller:
        held.until_started()
        object.__setattr__(registry.find(QUEUE, None), "timeout", timedelta(milliseconds=50))  # it has locked its row
        site.fill(*[None] * 20)
        until(lambda: poller.overdue() or site.tasks(finish_time__isnull=False).count() == 20)  # or failed, if slow
        assert site.task(hanging).status == "PROCESSING"
        held.go_on.set()
    assert site.task(hanging).status in ("COMPLETED", "ERROR")


either = pytest.mark.parametrize("is_async", [False, True])


def enqueue_batch(site: Site, number: int) -> None:
    enqueue_many(QUEUE, [(f"r{index}", index) for index in range(number)], using=site.alias)


def register(work: Callable[[list[Lease]], Any], *, is_async: bool = False, batch: int = 10, **options: Any) -> None:
    async def process(tasks: list[Lease]) -> Any:
        return work(tasks)

    processor(QUEUE, batch=batch, **options)(process if is_async else work)


@either
def test_whole_batches_are_handed_over_and_each_task_has_its_own_outcome(site: Site, is_async: bool) -> None:
    sizes: list[int] = []
    register(lambda tasks: sizes.append(len(tasks)) or [task.reference for task in tasks], is_async=is_async)
    enqueue_batch(site, 45)
    site.run(threads=1, coroutines=1)
    assert site.values("result") == site.values("reference")
    assert sum(sizes) == 45 and max(sizes) == 10
    assert len(sizes) <= 9  # a queue that is full makes full batches


@pytest.mark.parametrize(
    ("value", "outcomes"),
    [
        (None, [("COMPLETED", None)] * 4),
        (Complete("same"), [("COMPLETED", "same")] * 4),
        (Poison("bad"), [("POISON", None)] * 4),
        ({"a": 1}, [("COMPLETED", {"a": 1})] * 4),
        (
            [Complete(1), Fail("no", retry=False), Poison("bad"), "plain"],
            [("COMPLETED", 1), ("ERROR", None), ("POISON", None), ("COMPLETED", "plain")],
        ),
    ],
)
def test_one_value_is_the_outcome_of_all_and_a_list_has_one_for_each(site: Site, value: Any, outcomes: Any) -> None:
    register(lambda tasks: value)
    enqueue_batch(site, 4)  # less than a batch, which does not wait for more
    site.run()
    assert site.values("status", "result") == outcomes


@pytest.mark.parametrize(("number", "is_async"), [(0, False), (1, True), (4, False)])
def test_a_wrong_number_of_outcomes_fails_each_task_and_teaches(site: Site, number: int, is_async: bool) -> None:
    register(lambda tasks: [1] * number, is_async=is_async, batch=3, max_attempts=1)
    enqueue_batch(site, 3)
    site.run(threads=1, coroutines=1)
    assert site.values("status") == ["ERROR"] * 3
    (attempt,) = site.attempts(site.tasks().first())
    assert f"got 3 tasks and returned {number} outcomes" in attempt.message and "Complete([...])" in attempt.message


@either
def test_separate_an_exception_fails_each_task_by_its_own_budget(site: Site, is_async: bool) -> None:
    register(lambda tasks: 1 / 0, is_async=is_async, max_attempts=3, retry=SOON)
    enqueue_batch(site, 2)
    site.tasks(reference="r0").update(max_attempts=1)
    site.run()
    assert site.values("status", "total_attempt") == [("ERROR", 1), ("ERROR", 3)]


@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_what_cannot_be_decoded_is_taken_out_before_the_call(site: Site, mode: str) -> None:
    register(lambda tasks: [task.payload.weight for task in tasks], payload=Crate, mode=mode)
    enqueue_many(QUEUE, [Crate(1), Crate(2), Crate(3)], using=site.alias)
    site.tasks(pk=site.values("pk")[1]).update(payload={"weight": "heavy"})
    site.run()
    assert site.values("status", "result") == [("COMPLETED", 1), ("ERROR", None), ("COMPLETED", 3)]


@both
def test_atomic_when_the_batch_fails_each_runs_alone_and_only_the_bad_one_fails(site: Site) -> None:
    calls: list[list[str | None]] = []

    def process(tasks: list[Lease]) -> None:
        calls.append([task.reference for task in tasks])
        for task in tasks:
            site.book(task.reference)
            if task.reference == "r1":
                raise RuntimeError("bad apple")

    register(process, mode="atomic", max_attempts=1)
    enqueue_batch(site, 3)
    site.run()
    assert calls == [["r0", "r1", "r2"], ["r0"], ["r1"], ["r2"]] and site.booked() == ["r0", "r2"]
    # One attempt, however often it was called
    assert site.values("status", "total_attempt") == [("COMPLETED", 1), ("ERROR", 1), ("COMPLETED", 1)]


@both
def test_atomic_a_task_that_settled_itself_in_a_batch_that_failed_is_settled_again(site: Site) -> None:
    register(lambda tasks: tasks[0].complete("own") or (1 / 0 if len(tasks) > 1 else None), mode="atomic")
    enqueue_batch(site, 2)
    site.run()
    assert site.values("result", "attempt") == [("own", 1), ("own", 1)]


@both
def test_if_one_of_an_async_batch_is_cancelled_the_others_are_released(site: Site) -> None:
    begun, calls = threading.Event(), list[list[str | None]]()

    @processor(QUEUE, batch=3)
    async def process(tasks: list[Lease]) -> None:
        calls.append(sorted(str(task.reference) for task in tasks))
        if len(tasks) == 3:
            begun.set()
            await asyncio.sleep(PATIENCE)

    enqueue_batch(site, 3)
    with site.poller():
        assert begun.wait(PATIENCE)
        assert site.tasks(reference="r1").cancel() == 1
        until(lambda: site.tasks(status="COMPLETED").count() == 2)
    assert calls[0] == ["r0", "r1", "r2"] and sorted(chain.from_iterable(calls[1:])) == ["r0", "r2"]
    assert site.values("status") == ["COMPLETED", "POISON", "COMPLETED"]
    assert list(site.tasks(status="COMPLETED").values_list("attempt", flat=True)) == [1, 1]
