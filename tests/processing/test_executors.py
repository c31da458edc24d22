"""Processors on an executor of the user's own."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.dispatch import receiver

from django_dbtaskqueue import enqueue_many, processor, queue, signals
from django_dbtaskqueue.core.lease import LEASED, Lease
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.poller.executors import Job
from django_dbtaskqueue.poller.executors.pool import PoolExecutor, portable
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.conftest import REPOSITORY
from tests.poller.processes import Held
from tests.processing import named
from tests.processing.conftest import QUEUE, SOON, Letter, Site, both, on_real_connections
from tests.support import PATIENCE, until
from tests.testapp.models import Booking

pytestmark = on_real_connections


class Crowded(ThreadPoolExecutor):
    """Says two, and is made with one thread: the second call waits inside."""

    slots = 2


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as made:
        yield made
        named.close_connections(made, 2)


@contextmanager
def polling(site: Site, *events: threading.Event, threads: int = 2) -> Iterator[Poller]:
    """A poller for a ``with`` block. At its end what the events hold goes on, and the poller is closed."""
    poller = Poller({QUEUE: 1}, Options(threads=threads), using=site.alias)
    poller.start()
    try:
        yield poller
    finally:
        for event in events:
            event.set()
        poller.close()


@both
@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_calls_run_there_and_are_settled_here(site: Site, pool: ThreadPoolExecutor, mode: str) -> None:
    @processor(QUEUE, executor=pool, mode=mode)
    def process(task: Lease) -> str:
        site.book(task.reference)
        return threading.current_thread().name

    for number in range(5):
        site.enqueue(reference=str(number))
    site.run()
    assert all(result.startswith("mine") for result in site.values("result")) and len(site.booked()) == 5


def test_it_is_given_no_more_than_it_has_slots_and_the_line_keeps_the_rest(site: Site, pool: Any, held: Held) -> None:
    processor(QUEUE, executor=pool)(held)
    processor(QUEUE, executor=pool, payload=Letter)(held)
    site.fill(*(None, Letter("hello")) * 3)
    with site.poller(threads=8) as poller:
        held.until_started(2)
        until(lambda: poller.queues[QUEUE].next_poll)  # the poller has looked again since
        assert len(poller.running()) == 2 and poller.slots() == 2
        assert site.tasks(status="PROCESSING").count() == 2
        assert not held.started.acquire(blocking=False)
        held.go_on.set()
    assert site.tasks(status="COMPLETED").count() == 6


def test_leases_are_renewed_while_it_runs(site: Site, pool: ThreadPoolExecutor, held: Held) -> None:
    processor(QUEUE, executor=pool, lease=timedelta(seconds=6))(held)
    task = site.enqueue()
    with site.poller():
        held.until_started()
        first = site.task(task).next_process_time
        until(lambda: site.task(task).next_process_time > first)
        held.go_on.set()
    assert site.values("status", "total_attempt") == [("COMPLETED", 1)]


def test_failures_there_and_of_the_executor_fail_the_attempt(site: Site, pool: ThreadPoolExecutor) -> None:
    processor(QUEUE, executor=pool, max_attempts=2, retry=SOON)(lambda task: 1 / 0)
    first = site.enqueue()
    site.run()
    pool.shutdown()
    second = site.enqueue()
    site.run()
    assert site.values("status") == ["ERROR", "ERROR"]
    assert [attempt.message for attempt in site.attempts(first)] == ["division by zero"] * 2
    assert "after shutdown" in site.attempts(second)[0].message


def test_batches_and_a_limit_of_calls_there(site: Site) -> None:
    running, sizes = threading.Lock(), list[int]()

    @processor(QUEUE, executor="tests.processing.named.two_threads", batch=3, concurrency=1)
    def process(tasks: list[Lease]) -> None:
        assert running.acquire(blocking=False)
        sizes.append(len(tasks))
        running.release()

    enqueue_many(QUEUE, [{}] * 9, using=site.alias)
    site.run()
    assert sum(sizes) == 9 and max(sizes) == 3
    assert site.values("status", "attempt") == [("COMPLETED", 1)] * 9


def test_an_executor_that_runs_a_call_at_once(site: Site) -> None:
    processor(QUEUE, executor=named.Inline)(lambda task: None)
    enqueue_many(QUEUE, [{}] * 20, using=site.alias)
    site.run()
    assert site.values("status") == ["COMPLETED"] * 20


def test_what_has_not_begun_at_a_cancel_is_given_back_uncharged(site: Site, held: Held) -> None:
    crowded = Crowded(1)
    processor(QUEUE, executor=crowded)(held)
    first, _ = site.fill(None, None)
    with crowded, polling(site, held.go_on) as poller:
        held.until_started()
        until(lambda: len(poller.running()) == 2)
        poller.cancel()
        assert poller.wait(PATIENCE)
    assert site.values("status", "attempt") == [("CREATED", 1), ("CREATED", 0)]
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


def test_what_is_being_submitted_at_a_cancel_is_given_back_uncharged(site: Site, held: Held) -> None:
    slow = SlowToSubmit()
    processor(QUEUE, executor=slow)(held)
    site.fill(None, None)
    with slow, polling(site, slow.go_on, held.go_on) as poller:
        assert slow.asked.wait(PATIENCE)
        [pool] = [one for one in poller.executors.all if isinstance(one, PoolExecutor)]
        cancel = threading.Thread(target=poller.cancel)
        cancel.start()
        until(lambda: pool._closed)  # the next that it does is to wait for the submit
        slow.go_on.set()
        cancel.join(PATIENCE)
        assert poller.wait(PATIENCE)
    assert site.values("status", "attempt") == [("CREATED", 1), ("CREATED", 0)]


def test_a_task_whose_checkout_was_under_way_at_a_cancel_does_not_hold_the_poller_up(site: Site, held: Held) -> None:
    cancelled = threading.Event()

    @receiver(signals.task_checked_out)
    def cancel(**_: Any) -> None:  # on the thread that fetches, before it submits
        poller.cancel()
        cancelled.set()

    processor(QUEUE)(held)
    with polling(site, held.go_on) as poller:
        site.enqueue()
        poller.wake(QUEUE)
        assert cancelled.wait(PATIENCE)
        assert poller.wait(PATIENCE / 2)
    assert site.values("status") == ["CREATED"]


def test_a_checkout_under_way_at_a_stop_delays_what_is_given_back_and_no_outcome(site: Site, held: Held) -> None:
    processor(QUEUE)(lambda task: held(task) if task.payload == "slow" else None)
    enqueue_many(QUEUE, [{}] * 200, using=site.alias)  # quick ones, after which the poller takes many ahead
    first, second = site.fill("slow", "slow")
    with polling(site, held.go_on, threads=1) as poller:
        queues = list(poller.queues.values())
        held.until_started()
        site.until(second, "PROCESSING")
        poller.fetcher.reserve(queues, 1)  # as a checkout does that waits for its answer
        poller.stop()
        until(lambda: not poller.executors.waiting())
        held.go_on.set()
        site.until(first)
        assert site.task(second).status == "PROCESSING"  # given back now, that checkout would take it
        poller.fetcher.reserve(queues, -1)
        assert poller.wait(PATIENCE)
    assert (site.task(second).status, site.task(second).attempt) == ("CREATED", 0)


@pytest.mark.django_db
def test_another_process_gets_the_row_of_a_task_and_not_the_pool(site: Site, pool: ThreadPoolExecutor) -> None:
    site.enqueue({"n": 1}, context={"request": "4711"})
    lease = queue(QUEUE, using=site.alias).take()
    job = Job(lease, Processor(QUEUE, named.where, executor=pool))
    observe.started(lease, job.processor)
    lease.touched, lease.lost = True, "touch"
    sent = pickle.loads(pickle.dumps(portable(job))).lease  # noqa: S301 -- our own
    assert all(getattr(sent, column.leased) == getattr(lease, column.leased) for column in LEASED)
    assert (sent.port.alias, sent.deadline) == (site.alias, lease.deadline)
    assert (sent.processor, sent.touched, sent.lost) == (None, False, "")


@pytest.mark.parametrize("alias", ["sqlite"])  # PostgreSQL: test_suspended
def test_children_use_the_databases_and_the_middleware_of_a_test(site: Site, settings: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("DATABASE_URL", settings.SERVER_URL)  # of another database than the test's
    processor(QUEUE, executor="process", mode="atomic", middleware=["tests.processing.named.with_process"])(named.book)
    pid, booked = site.ran(reference="r1").result
    assert booked["pid"] == pid != os.getpid() and Booking.objects.using(site.alias).get().reference == "r1"


@pytest.mark.slow
def test_calls_in_other_processes_and_after_one_died(site: Site, process_database: Any, monkeypatch: Any) -> None:
    for name, value in process_database.env.items():
        monkeypatch.setenv(name, value)
    processor(QUEUE, executor="tests.processing.named.two_processes", max_attempts=1)(named.where)
    well = site.enqueue({"n": 1}, context={"request": "4711"})
    ill = site.enqueue({"do": "raise"})
    site.run()
    result = site.task(well).result
    assert result["pid"] != os.getpid()
    assert (result["payload"], result["context"]) == ({"n": 1}, {"request": "4711"})
    (attempt,) = site.attempts(ill)
    assert attempt.message.startswith("asked to fail elsewhere")
    assert "in where" in attempt.traceback  # of the place where it happened
    # A process that dies fails its attempt, and the next task finds a new one
    deadly = site.enqueue({"do": "die"})
    with site.poller():
        site.until(deadly, "ERROR")
        site.until(site.enqueue({"n": 2}))
    assert "BrokenProcessPool" in site.attempts(deadly)[0].error_type
    connections.close_all()


NO_EXECUTORS = [
    (SimpleNamespace(submit=print), "attribute slots"),
    (lambda: 5, "no submit"),
    ("tests.processing.named.nowhere", "cannot be imported"),
]


@pytest.mark.django_db
@pytest.mark.parametrize(("given", "why"), NO_EXECUTORS)
def test_what_turns_out_to_be_no_executor_is_said_when_the_poller_looks(given: Any, why: str) -> None:
    processor(QUEUE, executor=given)(lambda task: None)
    if isinstance(given, str):  # the system check tries the import
        (error,) = checks.run_checks(tags=["dbtaskqueue"])
        assert error.id == "dbtaskqueue.E005" and "nowhere" in error.msg
    poller = Poller({QUEUE: 1})
    with pytest.raises(ImproperlyConfigured, match=why):
        poller.slots()
    poller.close()


def test_a_child_process_is_entered_before_any_model_is_imported() -> None:
    """It sets Django up only after this import, and a model that comes earlier would end it."""
    program = "import sys, django_dbtaskqueue.poller.executors.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "django_dbtaskqueue.models" not in done.stdout.split()
