"""Heartbeat, rescue, unparking, timeouts, and an event loop that stands still."""

import gc
import logging
import os
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue import __version__, enqueue, enqueue_many, registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.checkout import ScanCursor
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.models import Attempt, Poller, Task
from django_dbtaskqueue.operations import doctor
from django_dbtaskqueue.poller import heartbeat, loop
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter
from django_dbtaskqueue.poller.executors.thread import BLOCKED_AFTER_LOOKS, AsyncExecutor
from django_dbtaskqueue.poller.queue_state import QueueState
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.poller import processes
from tests.poller.processes import Gate, Start, completed, counted_queries, manage, polling, status_of
from tests.support import PATIENCE, until
from tests.testapp.tasks import NEW_RELEASE, Order

QUICK = {"HEARTBEAT": "100ms"}


def spent(**columns: Any) -> Task:
    """A task on its last attempt, whose lease ran out."""
    ago = -timedelta(seconds=1)
    given = {"queue": "brief", "max_attempts": 3, "attempt": 3, "total_attempt": 3, "ready_time": ago, **columns}
    return make_task("PROCESSING", next_process_time=ago, **given)


def state_of(queue: str) -> QueueState:
    return QueueState(queue, conf.default_settings(queue), SettlePort("default"), ScanCursor(queue))


def test_the_row_says_what_the_poller_does(process_database: ProcessDatabase, gate: Gate, settings: Any) -> None:
    settings.DBTASKQUEUE = QUICK
    task = enqueue("work", "running", gate.payload)
    with polling({"work": 2, "other": 1}, threads=3, name="here") as poller:
        until(lambda: Poller.objects.filter(state="RUNNING").exclude(running=[]).exists())
        row = Poller.objects.get()
        assert row.instance == poller.instance and row.instance.startswith("here:")
        assert (row.state, row.slots, row.held, row.version) == ("RUNNING", 3, 1, __version__)
        assert [(one["queue"], one["weight"]) for one in row.queues] == [("work", 2), ("other", 1)]
        assert all(one["idle_seconds"] < 60 for one in row.queues)
        (run,) = row.running
        assert run.pop("seconds") >= 0 and not run.pop("given_up")
        assert run.items() >= {"task_id": task.pk, "queue": "work", "reference": "running", "attempt": 1}.items()
        until(lambda: Poller.objects.get().heartbeat_time > row.heartbeat_time)
        assert Poller.objects.get(heartbeat_time__lte=Now()).start_time == row.start_time
        gate.open()
    row.refresh_from_db()
    assert (row.state, row.finished, row.held, row.running) == ("STOPPED", 1, 0, [])


def test_a_heartbeat_is_one_statement(process_database: ProcessDatabase) -> None:
    """Unless there is a command, which it runs, or the row is gone, which it writes anew."""

    def report() -> list[str]:
        with CaptureQueriesContext(connection) as seen:
            reporter._report("default")
        return [query["sql"].partition(" ")[0] for query in seen]

    poller = loop.Poller({"work": 1})
    reporter, rows = heartbeat.Heartbeat(poller), Poller.objects.filter(pk=poller.instance)
    assert len(report()) > 1
    assert report() == ["UPDATE"]
    rows.delete()
    assert len(report()) > 1 and rows.exists()
    for command, paused in (("pause", True), ("start", False)):
        rows.update(requested_command=command)
        report()
        assert (poller.paused, rows.get().requested_command) == (paused, "")
    rows.update(requested_command="pause")
    reporter.jobs.ending.set()
    reporter._report("default")
    assert (poller.paused, rows.get().state) == (False, "STOPPED")


def test_rows_of_pollers_long_dead_go(process_database: ProcessDatabase) -> None:
    for instance, hours in (("yesterday", 25), ("today", 23)):
        Poller.objects.create(instance=instance, heartbeat_time=Now() - timedelta(hours=hours))
    with polling({"work": 1}) as poller:
        until(lambda: not Poller.objects.filter(instance="yesterday").exists())
    assert set(Poller.objects.values_list("instance", flat=True)) == {"today", poller.instance}


def test_a_poller_works_in_debug_and_leaves_no_failed_task_in_cycles(process_database: Any, settings: Any) -> None:
    settings.DEBUG = True
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    with polling({"work": 1, "other": 1}):
        enqueue("work", "good")
        enqueue("other", "bad", {"do": "raise"})
        until(lambda: set(Task.objects.values_list("status", flat=True)) == {"COMPLETED", "ERROR"})
    gc.collect()
    gc.set_debug(0)
    left, gc.garbage[:] = [one for one in gc.garbage if isinstance(one, Lease)], []
    assert not left, "a payload would stay in memory until there are thousands of other objects"


@pytest.mark.slow
@pytest.mark.usefixtures("postgres_process_database")
def test_it_outlives_the_loss_of_every_connection_and_says_so_once(settings: Any, caplog: Any) -> None:
    settings.DBTASKQUEUE = QUICK
    with polling({"work": 1}), caplog.at_level(logging.INFO):
        until(Poller.objects.exists)
        processes.cut_connections()
        until(lambda: "Heartbeat and rescue work again" in caplog.messages)
        before = Poller.objects.get().heartbeat_time
        until(lambda: Poller.objects.get().heartbeat_time > before)
    assert sum("Heartbeat and rescue fail" in message for message in caplog.messages) == 1


def test_the_end_comes_within_a_fifth_of_the_lease() -> None:
    for queue in (state_of("brief"), state_of("work")):
        lease = queue.settings.lease.total_seconds()

        def waits(left: float | None, queue: QueueState = queue) -> list[float]:
            return [heartbeat.rescue_due(Session.on("default"), queue, left, None) for _ in range(100)]

        for left in (0.001, lease / 2, lease):
            assert all(0 < wait < left + lease / 5 for wait in waits(left))
        # Leases that begin later run out later than the next look. Many pollers share the looks
        for queue.cursor.others, least in ((0, 0), (11, min(3 * heartbeat.RESCUE_SECONDS, lease / 5))):
            assert all(least < wait <= lease / 3 for wait in waits(None))


def test_more_tasks_than_one_batch_are_rescued_at_one_go(process_database: ProcessDatabase) -> None:
    task, *_ = [spent() for _ in range(130)]
    heartbeat.Rescuer([state_of("brief")]).look()
    assert Counter(Task.objects.values_list("status", flat=True)) == {"ERROR": 130}
    assert Attempt.objects.count() == 130
    task.refresh_from_db()
    assert (task.attempt, task.total_attempt, task.ready_time) == (3, 3, None)
    assert task.finish_time and "died or never answered during attempt 3 of 3" in (task.process_result or "")
    attempt = Attempt.objects.values_list("total_attempt", "poller_instance", "error_type").get(task_id=task.pk)
    assert attempt == (3, task.poller_instance, "django_dbtaskqueue.core.exceptions.ProcessDied")


def test_many_queues_are_looked_into_at_once(process_database: ProcessDatabase, django_assert_num_queries: Any) -> None:
    """Given more queues than one statement takes, then in each what is dead is found, and nothing else."""
    at_once = heartbeat.MAX_QUEUES_PER_RESCUE
    queues = [state_of("brief") for _ in range(at_once + 5)]
    for number, queue in enumerate(queues):
        queue.name = f"brief-{number:03}"
    with django_assert_num_queries(1 if connection.vendor == "postgresql" else at_once):
        heartbeat.Rescuer(queues).look()
    dead = [spent(queue=queues[number].name) for number in (0, 7, at_once + 3)]
    make_task("PROCESSING", queue="brief-009", max_attempts=1, attempt=1, next_process_time=timedelta(minutes=5))
    rescuer = heartbeat.Rescuer(queues)
    rescuer.look()
    assert rescuer.look() > 0
    assert list(Task.objects.filter(status="ERROR").order_by("pk")) == dead


@pytest.mark.usefixtures("postgres_process_database")
def test_a_thread_over_time_fails_at_once_and_frees_its_slot_later(gate: Gate, tmp_path: Path, settings: Any) -> None:
    settings.DBTASKQUEUE = QUICK
    task = enqueue("timed", "slow", gate.payload, priority=-1)
    other = enqueue("aiotimed", "slow", {"do": "wait", "until": str(tmp_path / "never")})
    with polling({"timed": 1, "aiotimed": 1}, threads=1) as poller:
        gate.until_started()
        after = enqueue("timed", "next", gate.payload)
        until(lambda: status_of(task) == status_of(other) == "ERROR")
        for one in (task, other):
            assert "TimeoutError" in Attempt.objects.get(task_id=one.pk).error_type
        until(lambda: [run.job.lease.id for run in poller.running()] == [task.pk])
        assert len(gate.starts()) == 1
        until(lambda: [run["given_up"] for run in Poller.objects.get().running] == [True])
        # And the slot is free when it really ends; what it returns changes nothing
        gate.open()
        until(lambda: status_of(after) == "COMPLETED")
    assert status_of(task) == "ERROR"


def test_an_idle_poller_asks_little(process_database: ProcessDatabase, clock: SteppedClock) -> None:
    clock.stop()
    with counted_queries() as seen, polling({"work": 1, "other": 1}) as poller:
        queues = poller.queues.values()

        def grown() -> bool:
            clock.advance(0.5)
            return min(*(queue.idle_pause for queue in queues), *(queue.unpark_pause for queue in queues)) >= 4

        until(grown)
        del seen[:]
        begun = clock.monotonic()
        until(lambda: clock.advance(0.25) or clock.monotonic() > begun + 20)
        # Two or three a second, of which each may fall into a window once more than its share: SQLite asks by queue.
        assert len(seen) <= 3 * (clock.monotonic() - begun) + len(set(seen)), Counter(seen)


@pytest.mark.slow
def test_an_idle_poller_needs_little_of_the_processor(start: Start) -> None:
    with start("--queue", "work") as poller:
        until(Poller.objects.exists)
        process = psutil.Process(poller.pid)

        def wakes() -> int:  # how often its threads were given a core
            return sum(sum(psutil.Process(one.id).num_ctx_switches()) for one in process.threads())

        def at_the_next_heartbeat() -> int:
            last = Poller.objects.get().heartbeat_time
            until(lambda: Poller.objects.get().heartbeat_time > last)
            return wakes()

        before = at_the_next_heartbeat()
        assert at_the_next_heartbeat() - before <= 200
        poller.stop()
    assert not Task.objects.filter(total_attempt__gt=F("attempt")).exists()


# -- a coroutine that blocks the event loop: its poller takes no more for it, gives back the rest, and says so ---------
TASKS = 6


@pytest.mark.usefixtures("process_database", "taskqueue_registry")
@pytest.mark.parametrize("options", [{}, {"concurrency": 1}, {"batch": 2}], ids=["plain", "limited", "in batches"])
def test_a_blocked_loop_takes_no_more(clock: SteppedClock, caplog: Any, settings: Any, options: dict[str, Any]) -> None:
    settings.DBTASKQUEUE = {"HEARTBEAT": "1s"}
    began, go_on = threading.Event(), threading.Event()

    async def process(given: Lease | list[Lease]) -> None:
        began.set()
        go_on.wait(PATIENCE)  # it does not await, so nothing else runs

    registry.register("letters", process, **options)
    enqueue_many("letters", [{}] * TASKS)
    held, running = Task.objects.filter(status="PROCESSING"), options.get("batch", 1)
    with polling({"letters": 1}):
        began.wait(PATIENCE)
        until(lambda: clock.advance(1) or (held.count() == running and Poller.objects.filter(state="BLOCKED").exists()))
        enqueue_many("letters", [{}])
        assert set(Task.objects.exclude(pk__in=held).values_list("attempt", flat=True)) == {0}
        [finding] = [one for one in doctor.examine() if one.id == "poller.blocked"]
        assert finding.queues == ("letters",)
        [blocked] = [one for one in caplog.records if "event loop" in one.message]
        assert f"Task {held.order_by('pk')[0].pk} of letters" in blocked.message and "go_on.wait" in blocked.message
        assert not Task.objects.filter(total_attempt__gt=1).exists(), "what was given back was taken again"
        go_on.set()
        until(lambda: completed() == TASKS + 1 and Poller.objects.filter(state="RUNNING").exists())


def test_an_answer_that_comes_while_the_loop_is_asked_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = AsyncExecutor(1, lambda *_, **__: None, ConcurrencyLimiter())
    executor.threads = [WatchedThread(target=int, name="loop")]
    monkeypatch.setattr(executor._loop, "call_soon_threadsafe", lambda answer: answer())
    for _ in range(2 * BLOCKED_AFTER_LOOKS):
        executor.look()
    assert not executor.blocked
    executor._loop.close()


# -- a rolling release: pollers whose code lacks a payload type run beside one that has it -----------------------------
def test_tasks_of_a_new_type_start_at_once_beside_old_pollers(postgres_process_database: Any, caplog: Any) -> None:
    """Two pollers are of the old release, and one of the new one, which alone has a processor for orders."""
    assert not registry.payload_types("work")
    new = replace(postgres_process_database, extra={NEW_RELEASE: "1"})
    with polling({"work": 1}), polling({"work": 1}), manage(new, "runtaskpoller", "--queue", "work") as newest:
        until(Poller.objects.filter(state="RUNNING").exclude(pid=os.getpid()).exists)
        with caplog.at_level(logging.WARNING, "django_dbtaskqueue"):
            enqueue_many("work", [Order(number) if number % 2 else {"payload": {}} for number in range(200)])
            until(lambda: completed() == 200)
        assert not [message for message in caplog.messages if "parked" in message]
        assert "are ready again" not in newest.log and not Task.objects.exclude(attempt=1).exists()
        newest.stop()


def test_what_another_poller_has_is_parked_once_that_poller_is_gone(process_database: ProcessDatabase) -> None:
    types = {"queue": "work", "weight": 1, "idle_seconds": 0, "types": ["tests.testapp.tasks.Order"]}
    Poller.objects.create(instance="new", state="RUNNING", queues=[types])
    with polling({"work": 1}) as poller:
        order = enqueue("work", payload=Order(1))
        until(lambda: poller.queues["work"].foreign_types)
        until(Task.objects.filter(pk=order.pk, status="CREATED", parked_by=None, attempt=0).exists)
        Poller.objects.filter(pk="new").update(state="STOPPED")
        poller.queues["work"].foreign_until = 0.0
        poller.wake("work")
        until(lambda: Task.objects.get(pk=order.pk).parked_by is not None)
