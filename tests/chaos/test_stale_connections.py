"""An outage costs no task an attempt only because a thread kept a connection from before it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import pytest
from django.db import connections

from django_dbtaskqueue import enqueue_many, queue, registry
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Finish, Job
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


# The executor of a site, and the process for tasks whose process died, run a job in the same way.
EXECUTORS: dict[str, Callable[[Finish], Executor]] = {
    "a thread of the poller": lambda finish: ThreadExecutor(1, finish, ConcurrencyLimiter()),
    "another executor": lambda finish: PoolExecutor(OneThread, finish, ConcurrencyLimiter()),
}


class OneThread(ThreadPoolExecutor):
    """An executor of a site."""

    slots = 1


@pytest.mark.parametrize("where", EXECUTORS)
def test_an_atomic_task_for_which_there_is_no_connection_is_not_called_and_not_charged(
    crash_database: ProcessDatabase, pg_server: EmbeddedPostgres, where: str
) -> None:
    # Given a task that was taken before the server went away
    enqueue_many("atomic", [{"payload": {"do": "ok"}}])
    lease, processor = queue("atomic").take(), registry.find("atomic", None)
    assert lease is not None
    assert processor is not None
    connections["default"].close()
    pg_server.stop("immediate")

    # When it is to run
    ended: SimpleQueue[Done] = SimpleQueue()
    executor = EXECUTORS[where](lambda done, *, idle: ended.put(done))
    executor.submit([Job(lease, processor)], fast=False)

    # Then it is given back
    assert isinstance(ended.get(timeout=PATIENCE).settlement, Release)
    executor.close()
