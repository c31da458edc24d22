"""Processors on an executor of the user's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.dispatch import receiver

from django_dbtaskqueue import Fixed, processor, signals
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.conftest import ProcessDatabase
from tests.processing import pools
from tests.processing.conftest import QUEUE, Site, both
from tests.support import PATIENCE, until
from tests.testapp.models import Booking

database = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
SOON = Fixed(timedelta(milliseconds=20), jitter=0)


@dataclass
class Letter:
    text: str


class Crowded(ThreadPoolExecutor):
    """Says two, and is made with one thread: the second call waits inside."""

    slots = 2


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as made:
        yield made
        pools.close_connections(made, 2)


@contextmanager
def polling(site: Site, *held: threading.Event, threads: int = 2) -> Iterator[Poller]:
    """A poller for a ``with`` block. At its end what the events hold goes on, and the poller is closed."""
    poller = Poller({QUEUE: 1}, Options(threads=threads), using=site.alias)
    poller.start()
    try:
        yield poller
    finally:
        for event in held:
            event.set()
        poller.close()


@database
@both
@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_calls_run_there_and_are_settled_here(site: Site, pool: ThreadPoolExecutor, mode: str) -> None:
    @processor(QUEUE, executor=pool, mode=mode)
    def process(task: Lease) -> str:
        Booking.objects.using(site.alias).create(reference=task.reference or "")
        return threading.current_thread().name

    tasks = [site.enqueue(reference=f"r{index}") for index in range(5)]
    site.run()
    assert all(site.task(task).result.startswith("mine") for task in tasks)
    assert Booking.objects.using(site.alias).count() == 5


@database
def test_it_is_given_no_more_than_it_has_slots_and_the_line_keeps_the_rest(
    site: Site, pool: ThreadPoolExecutor
) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    @processor(QUEUE, executor=pool)
    def process(task: Lease) -> None:
        started.release()
        go_on.wait(PATIENCE)

    for _ in range(6):
        site.enqueue()
    with site.poller(threads=8) as poller:
        assert all(started.acquire(timeout=PATIENCE) for _ in range(2))
        until(lambda: poller.queues[QUEUE].next_poll)  # the poller has looked again since
        assert len(poller.running()) == 2 and poller.slots() == 2
        assert site.tasks(status="PROCESSING").count() == 2
        assert not started.acquire(blocking=False)
        go_on.set()
    assert site.tasks(status="COMPLETED").count() == 6


@database
def test_leases_are_renewed_while_it_runs(site: Site, pool: ThreadPoolExecutor) -> None:
    go_on = threading.Event()

    @processor(QUEUE, executor=pool, lease=timedelta(seconds=6))
    def process(task: Lease) -> int:
        go_on.wait(PATIENCE)
        return task.total_attempt

    task = site.enqueue()
    with site.poller():
        until(lambda: site.task(task).status == "PROCESSING")
        first = site.task(task).next_process_time
        until(lambda: site.task(task).next_process_time > first)
        go_on.set()
    assert site.task(task).result == 1


@database
def test_failures_there_and_of_the_executor_fail_the_attempt(site: Site, pool: ThreadPoolExecutor) -> None:
    @processor(QUEUE, executor=pool, max_attempts=2, retry=SOON)
    def process(task: Lease) -> None:
        raise ValueError("there")

    first = site.enqueue()
    site.run()
    assert site.task(first).status == "ERROR"
    assert [attempt.message for attempt in site.attempts(first)] == ["there", "there"]
    pool.shutdown()
    second = site.enqueue()
    site.run()
    assert site.task(second).status == "ERROR"
    assert "after shutdown" in site.attempts(second)[0].message


@database
def test_batches_and_a_limit_of_calls_there(site: Site) -> None:
    running, sizes = threading.Lock(), list[int]()

    @processor(QUEUE, executor="tests.processing.pools.two_threads", batch=3, concurrency=1)
    def process(tasks: list[Lease]) -> None:
        assert running.acquire(blocking=False)
        sizes.append(len(tasks))
        running.release()

    for _ in range(9):
        site.enqueue()
    site.run()
    assert sum(sizes) == 9 and max(sizes) == 3
    assert site.tasks(status="COMPLETED", attempt=1).count() == 9


@database
def test_an_executor_that_runs_a_call_at_once(site: Site) -> None:
    processor(QUEUE, executor=pools.Inline)(lambda task: threading.current_thread().name)
    tasks = [site.enqueue() for _ in range(20)]
    site.run()
    assert {site.task(task).status for task in tasks} == {"COMPLETED"}


@database
def test_two_processors_of_one_executor_share_its_slots(site: Site, pool: ThreadPoolExecutor) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    def process(task: Lease) -> None:
        started.release()
        go_on.wait(PATIENCE)

    processor(QUEUE, executor=pool)(process)
    processor(QUEUE, executor=pool, payload=Letter)(process)
    for _ in range(4):
        site.enqueue()
        site.enqueue(Letter("hello"))
    with site.poller() as poller:
        assert all(started.acquire(timeout=PATIENCE) for _ in range(2))
        until(lambda: poller.queues[QUEUE].next_poll)  # the poller has looked again since
        assert len(poller.running()) == 2
        go_on.set()
    assert site.tasks(status="COMPLETED").count() == 8


@database
def test_what_has_not_begun_at_a_cancel_is_given_back_uncharged(site: Site) -> None:
    begun, go_on, crowded = threading.Event(), threading.Event(), Crowded(1)

    @processor(QUEUE, executor=crowded)
    def process(task: Lease) -> None:
        begun.set()
        go_on.wait(PATIENCE)

    first, second = site.enqueue(), site.enqueue()
    with crowded, polling(site, go_on) as poller:
        assert begun.wait(PATIENCE)
        until(lambda: len(poller.running()) == 2)
        poller.cancel()
        assert poller.wait(PATIENCE)
    assert (site.task(second).status, site.task(second).attempt) == ("CREATED", 0)
    assert (site.task(first).status, site.task(first).attempt) == ("CREATED", 1)
    assert "Cancelled" in (site.task(first).process_result or "")


class SlowToSubmit(Crowded):
    """Waits in the submit of the second call, as a cluster does that is asked over a wire."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls, self.asked, self.go_on = 0, threading.Event(), threading.Event()

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            self.asked.set()
            self.go_on.wait(PATIENCE)
        return super().submit(*args, **kwargs)


@database
def test_what_is_being_submitted_at_a_cancel_is_given_back_uncharged(site: Site) -> None:
    go_on, slow = threading.Event(), SlowToSubmit()
    processor(QUEUE, executor=slow)(lambda task: go_on.wait(PATIENCE))
    first, second = site.enqueue(), site.enqueue()
    with slow, polling(site, slow.go_on, go_on) as poller:
        cancel = threading.Thread(target=poller.cancel)
        assert slow.asked.wait(PATIENCE)
        cancel.start()
        cancel.join(0.1)  # long enough for one that does not wait
        slow.go_on.set()
        cancel.join(PATIENCE)
        assert poller.wait(PATIENCE)
    assert (site.task(second).status, site.task(second).attempt) == ("CREATED", 0)
    assert (site.task(first).status, site.task(first).attempt) == ("CREATED", 1)


@database
def test_a_task_whose_checkout_was_under_way_at_a_cancel_does_not_hold_the_poller_up(site: Site) -> None:
    go_on, cancelled = threading.Event(), threading.Event()

    @receiver(signals.task_checked_out)
    def cancel(**_: Any) -> None:  # on the thread that fetches, before it submits
        poller.cancel()
        cancelled.set()

    processor(QUEUE)(lambda task: go_on.wait(PATIENCE))
    with polling(site, go_on) as poller:
        task = site.enqueue()
        poller.wake(QUEUE)
        assert cancelled.wait(PATIENCE)
        assert poller.wait(PATIENCE / 2)
    assert site.task(task).status == "CREATED"


@database
def test_a_checkout_under_way_at_a_stop_delays_what_is_given_back_and_no_outcome(site: Site) -> None:
    begun, go_on = threading.Event(), threading.Event()

    @processor(QUEUE)
    def process(task: Lease) -> None:
        if task.payload == "slow":
            begun.set()
            go_on.wait(PATIENCE)

    for _ in range(200):  # quick ones, after which the poller takes many ahead
        site.enqueue()
    first, second = site.enqueue("slow"), site.enqueue("slow")
    with polling(site, go_on, threads=1) as poller:
        queues = list(poller.queues.values())
        assert begun.wait(PATIENCE)
        until(lambda: site.task(second).status == "PROCESSING")
        poller.fetcher.reserve(queues, 1)  # as a checkout does that waits for its answer
        poller.stop()
        until(lambda: not poller.executors.waiting())
        go_on.set()
        until(lambda: site.task(first).status == "COMPLETED")
        assert site.task(second).status == "PROCESSING"  # given back now, that checkout would take it
        poller.fetcher.reserve(queues, -1)
        assert poller.wait(PATIENCE)
    assert (site.task(second).status, site.task(second).attempt) == ("CREATED", 0)


# -- other processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def processes(process_database: ProcessDatabase, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name, value in process_database.env.items():
        monkeypatch.setenv(name, value)
    return Site("default")


@database
@pytest.mark.parametrize("alias", ["sqlite"])  # PostgreSQL: test_suspended
def test_children_of_the_poller_use_the_databases_of_the_test_and_run_its_middleware(
    site: Site, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", settings.SERVER_URL)  # of another database than the test's
    around = "tests.processing.around.with_process"
    processor(QUEUE, executor="process", mode="atomic", middleware=[around])(pools.book)
    task = site.enqueue(reference="r1")
    site.run()
    pid, booked = site.task(task).result
    assert booked["pid"] == pid != os.getpid()
    assert Booking.objects.using(site.alias).get().reference == "r1"


@pytest.mark.slow
def test_calls_in_other_processes(processes: Site) -> None:
    processor(QUEUE, executor="tests.processing.pools.two_processes", max_attempts=1)(pools.where)
    well = processes.enqueue({"n": 1}, context={"request": "4711"})
    ill = processes.enqueue({"do": "raise"})
    with processes.poller():
        pass
    result = processes.task(well).result
    assert result["pid"] != os.getpid()
    assert (result["payload"], result["context"]) == ({"n": 1}, {"request": "4711"})
    (attempt,) = processes.attempts(ill)
    assert attempt.message.startswith("asked to fail elsewhere")
    assert "in where" in attempt.traceback  # of the place where it happened
    connections.close_all()


@pytest.mark.slow
def test_a_process_that_dies_fails_the_attempt_and_the_next_one_finds_new_processes(processes: Site) -> None:
    processor(QUEUE, executor="tests.processing.pools.two_processes", max_attempts=1)(pools.where)
    deadly = processes.enqueue({"do": "die"})
    with processes.poller():
        until(lambda: processes.task(deadly).status == "ERROR")
        well = processes.enqueue({"n": 2})
        until(lambda: processes.task(well).status == "COMPLETED")
    assert "BrokenProcessPool" in processes.attempts(deadly)[0].error_type
    connections.close_all()


# -- what cannot work --------------------------------------------------------------------------------------------------


def test_what_is_no_executor_is_refused_at_registration(pool: ThreadPoolExecutor) -> None:
    async def process(task: Lease) -> None: ...

    with pytest.raises(ImproperlyConfigured, match="coroutine that is not awaited"):
        processor(QUEUE, executor=pool)(process)
    with pytest.raises(ImproperlyConfigured, match=r"must be an object with submit\(\)"):
        processor(QUEUE, executor=5)(lambda task: None)


def test_a_path_that_leads_nowhere_is_a_system_check_error() -> None:
    processor(QUEUE, executor="tests.processing.pools.nowhere")(lambda task: None)
    (error,) = checks.run_checks(tags=["dbtaskqueue"])
    assert error.id == "dbtaskqueue.E005" and "nowhere" in error.msg


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (pools.Unsized(), "attribute slots"),
        (lambda: 5, "no submit"),
        ("tests.processing.pools.nowhere", "cannot be imported"),
    ],
)
def test_what_turns_out_to_be_no_executor_is_said_when_the_poller_looks(given: Any, why: str) -> None:
    processor(QUEUE, executor=given)(lambda task: None)
    poller = Poller({QUEUE: 1})
    try:
        with pytest.raises(ImproperlyConfigured, match=why):
            poller.slots()
    finally:
        poller.close()
