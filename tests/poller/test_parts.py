"""Parts of a poller by themselves: free slots, the hand-over to an idle thread, periodic jobs, wake-ups."""

import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Job, thread
from django_dbtaskqueue.poller.executors.pool import PoolExecutor
from django_dbtaskqueue.poller.heartbeat import PeriodicJob, PeriodicThread
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import WOKEN_LOOK_SECONDS, Options, QueueState
from tests.clock import SteppedClock
from tests.support import PATIENCE, until

pytestmark = pytest.mark.django_db


def test_fetches_under_way_count_for_max_tasks() -> None:
    fetcher = Poller({"work": 1, "other": 1}, Options(max_tasks=5, threads=20)).fetcher
    assert sum(chosen[1] for chosen in iter(fetcher.choose, None)) == 5


@pytest.mark.parametrize(("limit", "slots"), [({}, 100), ({"max_running": 5000}, 1), ({"rate": "5000/s"}, 1)])
def test_what_waits_in_memory_lasts_all_slots_a_tenth_of_a_second(
    limit: dict[str, Any], slots: int, settings: Any
) -> None:
    """Where all pollers count what waits: one slot."""
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "QUEUES": {"work": limit}}
    poller = Poller({"work": 1}, Options(threads=100))
    poller.queues["work"].run_seconds = 0.05
    assert sum(chosen[1] for chosen in iter(poller.fetcher.choose, None)) == 100 + 2 * slots


def test_calls_that_wait_for_their_limit_last_all_of_it_a_tenth_of_a_second(taskqueue_registry: None) -> None:
    processor, lease = registry.register("calls", print, concurrency=10), cast("Lease", None)
    poller = Poller({"calls": 1}, Options(threads=100))
    poller.executors.limiter.admit([Job(lease, processor)])
    poller.executors.limiter.release(processor, 0.05)
    poller.queues["calls"].run_seconds = 0.05
    assert sum(chosen[1] for chosen in iter(poller.fetcher.choose, None)) == 10 + 20


EXECUTORS: dict[str, Callable[..., Executor]] = {
    "threads": lambda finish: thread.ThreadExecutor(1, finish, ConcurrencyLimiter()),
    "coroutines": lambda finish: thread.AsyncExecutor(1, finish, ConcurrencyLimiter()),
    "another executor": lambda finish: PoolExecutor("tests.processing.named.two_threads", finish, ConcurrencyLimiter()),
}


@pytest.mark.parametrize("where", EXECUTORS)
def test_leases_that_ran_out_in_memory_leave_their_batch(where: str) -> None:
    ended, ran = list[Done](), list[int]()
    enqueue_many("work", [{}] * 4)
    good, *late = Task.objects.checkout("work", limit=4, poller_instance="poller")
    for lease in late:
        lease.deadline = clock.monotonic() - 1

    async def process(given: list[Lease]) -> None:
        ran.extend(lease.id for lease in given)

    processor = Processor("work", process if where == "coroutines" else async_to_sync(process), batch=2)
    executor = EXECUTORS[where](lambda done, idle: ended.append(done))
    executor.submit([Job(late[0], processor, (late[1],)), Job(late[2], processor, (good,))], fast=False)
    until(lambda: len(ended) == 4)
    executor.close()
    assert ran == [good.id]
    assert {done.lease.id for done in ended if done.settlement == Release()} == {lease.id for lease in late}


def test_an_executor_is_closed_while_a_thread_of_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = thread.ThreadExecutor(1, lambda done, idle: None, ConcurrencyLimiter())
    closing, start = threading.Thread(target=executor.close), threading.Thread.start

    def start_late(started: threading.Thread) -> None:
        if started is not closing:
            closing.start()
            closing.join(timeout=1)  # it waits for the start
        start(started)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    executor._wake(1)
    closing.join()
    until(lambda: [one.ended for one in executor.threads] == [True])


def test_the_task_starts_before_the_thread_that_fetched_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a fetch thread that would keep the interpreter, when it hands a task over, then an idle thread has it."""
    monkeypatch.setattr(thread, "HAND_OVER_SECONDS", PATIENCE)
    ran, ended = list[int](), list[Done]()
    processor = Processor("work", lambda task: ran.append(task.id))
    executor = thread.ThreadExecutor(2, lambda done, idle: ended.append(done), ConcurrencyLimiter())

    def hand_over() -> Lease:
        enqueue("work")
        [lease] = Task.objects.checkout("work", poller_instance="poller")
        executor.submit([Job(lease, processor)], fast=False)
        return lease

    interval = sys.getswitchinterval()
    try:
        first = hand_over()
        until(lambda: ended and executor._idle)
        sys.setswitchinterval(PATIENCE)
        second = hand_over()
        assert ran == [first.id, second.id]
    finally:
        sys.setswitchinterval(interval)
        executor.close()


@pytest.mark.django_db(transaction=True)
def test_a_job_that_fails_is_tried_again_after_a_pause() -> None:
    def fail() -> float:
        raise ValueError("as asked")

    job = PeriodicJob("default", "failing", fail)
    jobs = PeriodicThread("Jobs", "test-jobs", [job], retry=(600.0, 600.0), timeout=60.0)
    jobs.start()
    until(lambda: job.due)
    assert job.due > clock.monotonic()
    jobs.stop()


# -- when wake-ups lead to a look into the table, also when somebody sends them without end: every role may NOTIFY -----
FLOOD = 100


@pytest.fixture
def queue(clock: SteppedClock) -> QueueState:
    clock.stop()
    return Poller({"work": 1}).queues["work"]


def look(queue: QueueState, *, got: int = 0, woken: bool = True) -> float:
    """Look once, and be woken meanwhile and after it; return the seconds until the next look."""
    wakes = queue.wakes
    if woken:
        queue.wake()
    queue.fetched(got=got, asked=10, wakes=wakes, next_due=None)
    if woken:
        queue.wake()
    return queue.next_poll - clock.monotonic()


def test_vain_wake_ups_lead_to_one_look_in_five_milliseconds_and_looks_unasked_for_are_no_flood(
    queue: QueueState,
) -> None:
    wakes = queue.wakes
    queue.wake()
    queue.fetched(got=0, asked=10, wakes=wakes, next_due=None)
    assert queue.next_poll <= clock.monotonic(), "one during a fetch leads to another at once"
    assert look(queue) <= 0, "the first ones, too"
    assert [look(queue) for _ in range(FLOOD)][-1] == pytest.approx(WOKEN_LOOK_SECONDS)
    assert look(queue, got=1) <= 0
    for _ in range(FLOOD):
        look(queue, woken=False)
        queue.vain_look_at -= 1
    queue.wake()
    assert queue.next_poll <= clock.monotonic()
