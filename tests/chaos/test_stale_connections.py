"""An outage costs no task an attempt only because a thread kept a connection from before it."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connections

from django_dbtaskqueue import enqueue_many, queue, registry
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.contrib.spark.executor import perform_rows
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Failed, Release
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Finish, Job
from django_dbtaskqueue.poller.executors.pool import PoolExecutor
from django_dbtaskqueue.poller.executors.process import IsolatedExecutor, ProcessExecutor
from django_dbtaskqueue.poller.executors.thread import AsyncExecutor, ThreadExecutor
from tests.chaos.processes import Configure, Start, on, until_all
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase, _as_default
from tests.poller.processes import lines
from tests.proxy import Proxy
from tests.support import PATIENCE, at_once, until

TASKS = 12


def restart(pg_server: EmbeddedPostgres) -> None:
    pg_server.stop("immediate")
    pg_server.restart()
    connections["default"].close()


@on("crash_database")
def test_an_outage_charges_nobody(pg_server: EmbeddedPostgres, start: Start, queues: Configure, tmp_path: Path) -> None:
    queues(max_attempts=1)
    poller = start("--threads", "4").ready()
    enqueue_many("chaos", [{"payload": {"do": "count", "seconds": 0.2}}] * TASKS)
    until_all("COMPLETED")
    restart(pg_server)
    poller.until_logged("The database is back")
    enqueue_many("chaos", [{"payload": {"do": "count"}}] * TASKS)
    until_all("COMPLETED")
    # When it is restarted while tasks run that have not used their connections yet, then they run again, uncharged
    gate, mark = tmp_path / "gate", tmp_path / "mark"
    enqueue_many("chaos", [{"payload": {"do": "count", "until": str(gate), "mark": str(mark)}}] * 4)
    until(lambda: len(lines(mark)) == 4)
    restart(pg_server)
    gate.touch()
    until_all("COMPLETED")
    assert not Attempt.objects.exists() and set(Task.objects.values_list("attempt", flat=True)) == {1}
    poller.stop()


@pytest.fixture
def wire(database: ProcessDatabase, proxy: Proxy, django_db_blocker: Any, monkeypatch: Any) -> Iterator[Proxy]:
    """The way to the default database. Without it the server cannot be reached, in no thread and no child."""

    async def disconnect() -> None:
        """Forget what an earlier test left in Django's thread for the statements of coroutines."""
        await sync_to_async(lambda: connections["default"].close())()
        await sync_to_async(connections.__delitem__)("default")

    monkeypatch.setenv("DATABASE_URL", proxy.url)
    with _as_default(replace(database, url=proxy.url), django_db_blocker):
        asyncio.run(disconnect())
        yield proxy


THREAD, POOL, LOOP = "a thread of the poller", "another executor", "the event loop"
CHILD, ISOLATED = "a child of the poller", "the process for tasks whose process died"
EXECUTORS: dict[str, Callable[[Finish], Executor]] = {
    THREAD: lambda finish: ThreadExecutor(1, finish, ConcurrencyLimiter()),
    POOL: lambda finish: PoolExecutor(OneThread, finish, ConcurrencyLimiter()),
    LOOP: lambda finish: AsyncExecutor(9, finish, ConcurrencyLimiter()),
    CHILD: lambda finish: ProcessExecutor(1, finish, ConcurrencyLimiter()),
    ISOLATED: lambda finish: IsolatedExecutor(finish, ConcurrencyLimiter()),
}


@contextmanager
def executor_of(where: str) -> Iterator[tuple[Executor, Callable[[], Done]]]:
    done: SimpleQueue[Done] = SimpleQueue()
    executor = EXECUTORS[where](lambda one, *, idle: done.put(one))
    yield executor, partial(done.get, timeout=PATIENCE)
    executor.close()


def ended(leases: list[Lease], processor: Processor, where: str = THREAD) -> list[type]:
    with executor_of(where) as (executor, done):
        executor.submit([Job(leases[0], processor, tuple(leases[1:]))], fast=False)
        return [type(done().settlement) for _ in leases]


def taken(number: int) -> list[Lease]:
    enqueue_many("work", [{"payload": 1}] * number)
    return [lease for _ in range(number) if (lease := queue("work").take())]


class OneThread(ThreadPoolExecutor):
    slots = 1


def count(task: Lease) -> None:
    Task.objects.using(task.port.alias).count()


def raise_own(task: Lease) -> None:
    """Fail by an error that only looks like the database's."""
    try:
        count(task)
    except OperationalError:
        raise OperationalError("of the processor") from None


async def acount(task: Lease) -> None:
    await Task.objects.using(task.port.alias).acount()


async def acount_all(tasks: list[Lease]) -> None:
    await acount(tasks[0])


CASES: tuple[tuple[tuple[str, ...], Callable[..., Any], dict[str, Any], type], ...] = (
    ((THREAD, POOL), count, {"mode": "atomic"}, Release),
    ((THREAD, POOL), count, {}, Release),
    ((THREAD, POOL), lambda tasks: count(tasks[0]), {"batch": 2}, Release),
    ((THREAD, POOL), lambda task: Task.objects.using("elsewhere").count(), {}, Failed),
    ((THREAD, POOL), raise_own, {}, Failed),
    ((LOOP,), acount, {"is_async": True}, Release),
    ((LOOP,), acount_all, {"is_async": True, "batch": 2}, Release),
    ((ISOLATED,), acount, {"is_async": True}, Release),
)


def test_a_server_that_is_away_at_the_first_statement_charges_no_task(wire: Proxy, monkeypatch: Any) -> None:
    monkeypatch.setitem(connections.settings, "elsewhere", connections.settings["default"])
    calls = [
        (taken(options.get("batch", 1)), Processor("work", function, **options), where, end)
        for places, function, options, end in CASES
        for where in places
    ]
    wire.stop()
    found = at_once(len(calls), lambda index: ended(*calls[index][:3]))
    assert found == [[end] * len(leases) for leases, _, _, end in calls]


def test_coroutines_are_not_charged_when_a_shared_connection_ends_before_their_first_statement(wire: Proxy) -> None:
    began, gate = SimpleQueue[None](), Event()

    async def use(task: Lease) -> None:
        if task.payload == "soon":
            await acount(task)
        began.put(None)
        while not gate.is_set():
            await asyncio.to_thread(gate.wait, PATIENCE)
        await acount(task)

    enqueue_many("work", [{"payload": "soon"}, {"payload": "later"}, {"payload": "later"}])
    leases = [lease for _ in range(3) if (lease := queue("work").take())]
    with executor_of(LOOP) as (executor, done):
        executor.submit([Job(lease, Processor("work", use, is_async=True)) for lease in leases], fast=False)
        for _ in leases:
            began.get(timeout=PATIENCE)
        # When the connection is cut, then those are given back, or found a new connection
        wire.cut()
        gate.set()
        ends = {one.lease.id: type(one.settlement) for one in (done() for _ in leases)}
    assert {ends[lease.id] for lease in leases[1:]} <= {Release, Complete}


def test_a_task_on_a_spark_worker_is_not_charged_for_a_connection_dead_before_its_first_statement(wire: Proxy) -> None:
    def lose_first(task: Lease) -> None:
        wire.stop()
        count(task)

    leases = taken(1)
    before = registry.snapshot()
    registry.unregister("work")
    registry.register("work", lose_first)
    try:
        (row,) = perform_rows([{"number": 1, "leases": pickle.dumps(leases)}], again=False, places={})
    finally:
        registry.restore(before)
    (answer,) = pickle.loads(row["answers"])  # noqa: S301 -- our own
    assert answer.outcome == Release()  # as the poller will give it back


def test_a_task_that_loses_its_server_after_a_statement_is_charged(wire: Proxy) -> None:
    def lose(task: Lease) -> None:
        count(task)
        connections["default"].close()
        wire.stop()
        count(task)

    assert ended(taken(1), Processor("work", lose)) == [Failed]


@pytest.mark.parametrize("where", [THREAD, CHILD])
def test_no_task_starts_after_its_lease_on_a_wire_that_is_silent(wire: Proxy, clock: SteppedClock, where: str) -> None:
    processor = Processor("work", count, executor="process" if where == CHILD else None)
    first, second = taken(2)
    with executor_of(where) as (executor, done):
        executor.submit([Job(first, processor)], fast=False)
        assert done().settlement == Complete()
        until(lambda: executor._idle)
        liveness.outages.seen += 1
        wire.stall(on=True)
        # When it asks its connection for longer than the next task's lease, then another poller may have the task
        executor.submit([Job(second, processor)], fast=False)
        assert wire.held.wait(PATIENCE)
        clock.advance(second.deadline - clock.monotonic())
        wire.stall(on=False)
        assert done().settlement == Release()
