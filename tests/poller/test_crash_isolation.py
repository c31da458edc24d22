"""Crash isolation: a task that may have killed its process runs alone, and soon."""

import resource
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import Reenqueue, enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Release
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Job
from django_dbtaskqueue.poller.executors.process import RESTART_SECONDS, IsolatedExecutor
from tests.clock import SteppedClock
from tests.factories import make_task
from tests.poller.processes import Held, completed, keep_full, let_others_start, polling
from tests.support import PATIENCE, until, with_settings
from tests.testapp import tasks

pytestmark = pytest.mark.usefixtures("postgres_process_database")
_settings = with_settings("taskqueue_registry", QUEUES={"flood": {}})


def orphan(**columns: Any) -> Task:
    return make_task("PROCESSING", queue="flood", attempt=1, next_process_time=timedelta(0), **columns)


def test_it_is_not_put_off_while_there_is_plenty_to_do() -> None:
    ran: list[object] = []
    registry.register("flood", lambda task: ran.append(task.payload))
    waiting = Task.objects.filter(status="CREATED")
    keep_full("flood")
    with polling({"flood": 1}):
        until(lambda: ran)
        task = orphan(ready_time=timedelta(hours=-1), payload="orphan")  # behind the watermark
        until(lambda: keep_full("flood") or "orphan" in ran)
        assert waiting.exists()
        until(lambda: not waiting.exists())
    task.refresh_from_db()
    assert task.total_attempt < 10  # taken with many and released, then taken alone; not again and again


@pytest.mark.parametrize("kind", ["released by an operator", "reenqueued"])
def test_a_task_whose_attempt_ended_without_a_crash_is_not_isolated(kind: str) -> None:
    together, first = threading.Barrier(8), Held()

    def run(task: Lease) -> object:
        if task.total_attempt == 1:
            return Reenqueue(timedelta(0), keep_attempts=True) if kind == "reenqueued" else first(task)
        together.wait(PATIENCE)
        return None

    registry.register("flood", run)
    enqueue_many("flood", [{}] * 8)
    with polling({"flood": 1}, threads=16):
        if kind == "released by an operator":
            first.until_started(8)
            assert Task.objects.all().release_all() == 8
        until(lambda: completed() == 8)
        first.go_on.set()


def test_a_task_that_was_reenqueued_before_its_process_died_is_isolated() -> None:
    alone, met = threading.Lock(), list[object]()

    def run(task: object) -> None:
        if not alone.acquire(blocking=False):
            met.append(task)
            return
        let_others_start()
        alone.release()

    registry.register("flood", run)
    for _ in range(4):
        orphan(reenqueue_attempt=3)
    with polling({"flood": 1}, threads=8):
        until(lambda: completed() == 4)
    assert not met


# -- the processes of those that another process can run ---------------------------------------------------------------
class Isolated(IsolatedExecutor):
    def __init__(self) -> None:
        self.ends = list[Done]()
        super().__init__(lambda done, *, idle: self.ends.append(done), ConcurrencyLimiter())


@pytest.fixture
def executor(children_here: None) -> Iterator[Isolated]:
    made = Isolated()
    yield made
    made.close()


def one_job() -> list[Job]:
    enqueue_many("flood", [{}])
    [lease] = Task.objects.checkout("flood", poller_instance="poller")
    return [Job(lease, Processor("flood", tasks.run))]


def test_a_process_ends_when_it_has_had_no_task_for_a_while(executor: Isolated) -> None:
    executor.linger = 0.01
    for number in (1, 2):
        executor.submit(one_job(), fast=False)
        until(lambda number=number: len(executor.ends) == number)
        until(lambda: not any(executor._workers))
    assert {one.settlement for one in executor.ends} == {Complete()}


def test_a_job_starts_one_process_however_many_polls_come_while_it_loads(executor: Isolated) -> None:
    executor.submit(one_job(), fast=False)
    until(lambda: executor.nudge() or executor.ends)
    assert len([worker for worker in executor._workers if worker is not None]) == 1


def test_a_process_that_the_system_refuses_is_tried_again(executor: Isolated, clock: SteppedClock, caplog: Any) -> None:
    jobs, before = one_job(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # no pipe to it
    try:
        executor.submit(jobs, fast=False)
        until(lambda: "A process for tasks does not start" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    clock.advance(RESTART_SECONDS[0])
    until(lambda: executor.ends)
    assert executor.ends[0].settlement == Complete()


def test_where_no_process_starts_the_poller_s_own_is_used(executor: Isolated, clock: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.there_is_no_such_module")
    executor.submit(one_job(), fast=False)
    until(lambda: clock.advance(0.1) or executor.ends)
    assert (executor.ends[0].settlement, executor.works) == (Release(), False)
