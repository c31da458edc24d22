"""An outage costs no task an attempt only because a thread kept a connection from before it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connections

from django_dbtaskqueue import enqueue_many, queue, registry
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.contrib.spark.work import perform_rows
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Failed, Release
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Finish, Job
from django_dbtaskqueue.poller.executors.asyncio import AsyncExecutor
from django_dbtaskqueue.poller.executors.isolated import IsolatedExecutor
from django_dbtaskqueue.poller.executors.pool import PoolExecutor
from django_dbtaskqueue.poller.executors.thread import ThreadExecutor
from tests.chaos.conftest import Start
from tests.chaos.processes import until_all
from tests.chaos.proxy import proxied
from tests.chaos.test_outage import clock_again
from tests.conftest import ProcessDatabase
from tests.patience import PATIENCE

TASKS = 12


def test_the_server_was_restarted_while_the_poller_was_idle(
    crash_database: ProcessDatabase, pg_server: EmbeddedPostgres, start: Start, queues: Callable[..., None]
) -> None:
    # Given threads that have a connection each
    queues(max_attempts=1)
    poller = start(crash_database, "--threads", "4").ready()
    enqueue_many("chaos", [{"payload": {"do": "count", "seconds": 0.2}}] * TASKS)
    until_all("COMPLETED")

    # When the server is restarted, and there is work again
    pg_server.stop("immediate")
    pg_server.restart()
    clock_again()
    poller.until_logged("The database is back")
    enqueue_many("chaos", [{"payload": {"do": "count"}}] * TASKS)

    # Then no task fails
    until_all("COMPLETED")
    assert not Attempt.objects.exists()
    assert set(Task.objects.values_list("attempt", flat=True)) == {1}
    poller.end()


def test_a_connection_that_dies_before_the_first_statement_is_not_the_tasks_fault(
    crash_database: ProcessDatabase, pg_server: EmbeddedPostgres, start: Start, queues: Callable[..., None]
) -> None:
    # Given tasks that run, whose threads have connections, and that have not used them yet
    queues(max_attempts=1, lease="60s")
    poller = start(crash_database, "--threads", "4").ready()
    enqueue_many("chaos", [{"payload": {"do": "count", "seconds": 0.2}}] * 4)
    until_all("COMPLETED")
    enqueue_many("chaos", [{"payload": {"do": "count", "first": 2}}] * 4)
    poller.until_logged("counts soon", times=4)

    # When the server is restarted
    pg_server.stop("immediate")
    pg_server.restart()
    clock_again()

    # Then they run again, uncharged
    until_all("COMPLETED")
    assert not Attempt.objects.exists()
    assert set(Task.objects.values_list("attempt", flat=True)) == {1}
    poller.end()


def test_idle_connections_that_fell_silent_are_replaced(
    postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None]
) -> None:
    # Given threads that have a connection each, and a firewall that forgets all of them
    queues(max_attempts=1, lease="3s")
    with proxied(postgres_process_database.url) as proxy:
        poller = start(replace(postgres_process_database, url=proxy.url), "--threads", "2").ready()
        enqueue_many("chaos", [{"payload": {"do": "count", "seconds": 0.2}}] * TASKS)
        until_all("COMPLETED")
        proxy.swallow()
        poller.until_logged("Polling failed")

        # When there is work again, then no task waits for a dead connection
        enqueue_many("chaos", [{"payload": {"do": "count"}}] * TASKS)
        until_all("COMPLETED")
        assert not Attempt.objects.exists()
        poller.end()


EXECUTORS: dict[str, Callable[[Finish], Executor]] = {
    "a thread of the poller": lambda finish: ThreadExecutor(1, finish, ConcurrencyLimiter()),
    "another executor": lambda finish: PoolExecutor(OneThread, finish, ConcurrencyLimiter()),
    "the event loop": lambda finish: AsyncExecutor(9, finish, ConcurrencyLimiter()),
    "the process for tasks whose process died": lambda finish: IsolatedExecutor(finish, ConcurrencyLimiter()),
}


class OneThread(ThreadPoolExecutor):
    """An executor of a site."""

    slots = 1


def count(task: Lease) -> None:
    """Use the task's database first."""
    Task.objects.using(task.port.alias).count()


def count_elsewhere(task: Lease) -> None:
    """Use another database first."""
    connections.settings["elsewhere"] = connections.settings["default"]
    try:
        Task.objects.using("elsewhere").count()
    finally:
        del connections.settings["elsewhere"], connections["elsewhere"]


def raise_own(task: Lease) -> None:
    """Fail by an error that only looks like the database's."""
    try:
        count(task)
    except OperationalError:
        raise OperationalError("of the processor") from None


@pytest.mark.parametrize(
    ("mode", "batch", "function", "charged"),
    [
        ("atomic", None, count, False),
        ("separate", None, count, False),
        ("separate", 2, count, False),
        ("separate", None, count_elsewhere, True),
        ("separate", None, raise_own, True),
    ],
)
@pytest.mark.parametrize("where", ["a thread of the poller", "another executor"])
def test_a_task_whose_database_cannot_be_reached_at_its_first_statement_is_not_charged(
    crash_database: ProcessDatabase,
    pg_server: EmbeddedPostgres,
    mode: str,
    batch: Any,
    function: Any,
    charged: bool,
    where: str,
) -> None:
    # Given a task that was taken before the server went away
    leases = taken(batch or 1)
    connections["default"].close()
    pg_server.stop("immediate")

    # When it runs, then it is given back, or has failed by its own fault
    called = Processor("work", function if batch is None else lambda tasks: function(tasks[0]), mode=mode, batch=batch)
    for settlement in ended(leases, called, where):
        assert isinstance(settlement, Failed if charged else Release)


@pytest.fixture
def coroutines_database(crash_database: ProcessDatabase) -> ProcessDatabase:
    """The database, in Django's thread for the statements of coroutines, too, which an earlier test may have used."""

    async def disconnect() -> None:
        await sync_to_async(lambda: connections["default"].close())()
        await sync_to_async(connections.__delitem__)("default")

    asyncio.run(disconnect())
    return crash_database


async def acount(task: Lease) -> None:
    """Use the task's database first, in a coroutine."""
    await Task.objects.using(task.port.alias).acount()


async def acount_all(tasks: list[Lease]) -> None:
    """The same, for a batch."""
    await acount(tasks[0])


@pytest.mark.parametrize(
    ("batch", "where"),
    [(None, "the event loop"), (2, "the event loop"), (None, "the process for tasks whose process died")],
)
def test_a_coroutine_whose_database_cannot_be_reached_at_its_first_statement_is_not_charged(
    coroutines_database: ProcessDatabase,
    pg_server: EmbeddedPostgres,
    monkeypatch: pytest.MonkeyPatch,
    batch: int | None,
    where: str,
) -> None:
    # Given tasks that were taken before the server went away
    monkeypatch.setenv("DATABASE_URL", coroutines_database.url)
    leases = taken(batch or 1)
    pg_server.stop("immediate")

    # When they run, then they are given back
    called = Processor("work", acount_all if batch else acount, is_async=True, batch=batch)
    assert [type(settlement) for settlement in ended(leases, called, where)] == [Release] * len(leases)


def test_coroutines_that_share_a_connection_are_not_charged_for_its_end_before_their_first_statement(
    coroutines_database: ProcessDatabase, pg_server: EmbeddedPostgres
) -> None:
    # Given three coroutines on one connection, two of which have not used it yet
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
    done: SimpleQueue[Done] = SimpleQueue()
    executor = AsyncExecutor(9, lambda one, *, idle: done.put(one), ConcurrencyLimiter())
    executor.submit([Job(lease, Processor("work", use, is_async=True)) for lease in leases], fast=False)
    for _ in leases:
        began.get(timeout=PATIENCE)

    # When the server is restarted, then those are given back, or found a new connection
    pg_server.stop("immediate")
    pg_server.restart()
    gate.set()
    ends = {one.lease.id: type(one.settlement) for one in (done.get(timeout=PATIENCE) for _ in leases)}
    assert {ends[lease.id] for lease in leases[1:]} <= {Release, Complete}
    executor.close()


def test_a_task_on_a_worker_of_spark_is_not_charged_for_a_connection_that_died_before_its_first_statement(
    crash_database: ProcessDatabase, pg_server: EmbeddedPostgres
) -> None:
    def lose_first(task: Lease) -> None:
        pg_server.stop("immediate")
        count(task)

    # Given a task whose connection dies as it begins, in what a worker runs
    leases = taken(1)
    before = registry.snapshot()
    registry.unregister("work")
    registry.register("work", lose_first)
    try:
        (row,) = perform_rows([{"number": 1, "leases": pickle.dumps(leases)}], again=False, places={})
    finally:
        registry.restore(before)

    # Then the poller, to which the outcome is left, gives it back
    (answer,) = pickle.loads(row["answers"])  # noqa: S301 -- our own
    assert answer.outcome == Release()


def test_a_task_that_loses_its_server_after_a_statement_is_charged(
    crash_database: ProcessDatabase, pg_server: EmbeddedPostgres
) -> None:
    def lose(task: Lease) -> None:
        count(task)
        connections["default"].close()
        pg_server.stop("immediate")
        count(task)

    (settlement,) = ended(taken(1), Processor("work", lose))
    assert isinstance(settlement, Failed)


def taken(number: int) -> list[Lease]:
    """Enqueue tasks, and take them."""
    enqueue_many("work", [{"payload": 1}] * number)
    return [lease for _ in range(number) if (lease := queue("work").take())]


def ended(leases: list[Lease], processor: Processor, where: str = "a thread of the poller") -> list[Any]:
    """Run one call, and return what is to be written."""
    done: SimpleQueue[Done] = SimpleQueue()
    executor = EXECUTORS[where](lambda one, *, idle: done.put(one))
    executor.submit([Job(leases[0], processor, tuple(leases[1:]))], fast=False)
    found = [done.get(timeout=PATIENCE).settlement for _ in leases]
    executor.close()
    return found
