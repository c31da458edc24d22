"""The end of a poller: drained, cancelled, timed out, asked for before it began, or when nothing is left to do."""

import signal
import socket
import threading
from typing import Any

import psutil
import pytest

from django_dbtaskqueue import chain, enqueue, enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Attempt, Poller, Task
from django_dbtaskqueue.poller import loop
from django_dbtaskqueue.poller.queue_state import Options
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.poller.processes import SELDOM, Gate, Start, manage, polling, runtaskpoller
from tests.support import PATIENCE, until

committed = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])


def test_the_first_signal_drains_and_gives_back_what_has_not_started(process_database: Any, gate: Gate) -> None:
    """Given quick tasks, after which the poller takes many ahead, and then slow ones."""
    enqueue_many("work", [(f"quick{n}", {}) for n in range(200)])
    enqueue_many("work", [(f"slow{n}", gate.payload) for n in range(50)])
    slow = Task.objects.filter(reference__startswith="slow")
    number = {"postgresql": signal.SIGTERM, "sqlite": signal.SIGINT}[process_database.vendor]
    with runtaskpoller(process_database, "--queue", "work", "--threads", "1") as poller:
        until(lambda: gate.starts() and slow.filter(status="PROCESSING").count() > 1)
        poller.signal(number)
        poller.until_logged("Stopping: waiting at most 30s for 1 running tasks")
        until(lambda: slow.filter(status="PROCESSING").count() == 1)
        gate.open()
        poller.ended()
    assert slow.filter(status="COMPLETED").count() == len(gate.starts()) == 1
    released = slow.exclude(status="COMPLETED")
    assert set(released.values_list("status", "attempt", "poller_instance")) == {("CREATED", 0, None)}
    assert released.filter(total_attempt=1).exists() and Poller.objects.get().state == "STOPPED"


@pytest.mark.slow  # limits of real connections run out
def test_a_poller_starts_and_ends_while_the_server_is_silent() -> None:
    """As behind a pooler that stands still: it takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        database = ProcessDatabase("postgresql", f"postgresql://postgres:any@127.0.0.1:{port}/postgres")
        with runtaskpoller(database, "--queue", "work", "--shutdown-timeout", "1s") as poller:
            poller.until_logged("not reachable yet")
            assert "Stopped: 0 completed" in poller.stop()


def test_the_second_signal_cancels(start: Start, gate: Gate) -> None:
    stuck, waiting = enqueue("work", "stuck", gate.payload), enqueue("aio", "waiting", gate.payload)
    with start("--queue", "work,aio") as poller:
        gate.until_started(2)
        log = poller.stop_at_once(1)
    # The thread had to be left behind, and is named; the coroutine could be ended
    assert f"Task {stuck.pk} of work (stuck) still runs" in log
    assert f"Task {waiting.pk} of aio (waiting) still runs" not in log
    for task in (stuck, waiting):
        task.refresh_from_db()
        assert (task.status, task.attempt) == ("CREATED", 1)
        assert "Cancelled" in Attempt.objects.get(task_id=task.pk).message


def test_coroutines_alone_can_be_cancelled_cleanly(start_on_sqlite: Start, gate: Gate) -> None:
    enqueue("aio", "waiting", gate.payload)
    with start_on_sqlite("--queue", "aio") as poller:
        gate.until_started()
        poller.stop_at_once()


def test_after_the_shutdown_timeout_what_runs_is_reported_and_left(start_on_sqlite: Start, gate: Gate) -> None:
    task = enqueue("work", "stuck", gate.payload)
    with start_on_sqlite("--queue", "work", "--shutdown-timeout", "300ms") as poller:
        gate.until_started()
        poller.signal()
        assert f"Task {task.pk} of work (stuck) still runs" in poller.ended(1)
    task.refresh_from_db()
    assert (task.status, task.attempt) == ("PROCESSING", 1)  # the lease decides when somebody else may have it


@pytest.mark.slow
def test_a_signal_at_any_moment_of_the_start_loses_and_charges_nothing(postgres_process_database: Any) -> None:
    enqueue_many("work", [{}] * 500)
    for moment in range(8):
        with manage(postgres_process_database, "runtaskpoller", "--queue", "work") as poller:
            starting, at = psutil.Process(poller.pid), moment / 8  # seconds of work
            until(lambda p=poller, one=starting, at=at: sum(one.cpu_times()[:2]) >= at or "Queues" in p.log)
            poller.signal()
            until(lambda p=poller: p.code is not None)
            assert poller.code in (0, -signal.SIGTERM), poller.log
            assert "Traceback" not in poller.log
            assert "Stopped" in poller.log or "Queues" not in poller.log
    assert set(Task.objects.values_list("status", "attempt")) <= {("CREATED", 0), ("COMPLETED", 1)}


@committed
def test_slow_first_calls_do_not_keep_batches_small(clock: SteppedClock, taskqueue_registry: None) -> None:
    calls: list[Any] = []

    def cold(task: Any) -> None:
        calls.append(task.id)
        if len(calls) <= 4:  # as a call that imports and connects
            clock.advance(0.05)

    registry.register("cold", cold)
    enqueue_many("cold", [{}] * 1500)
    clock.stop()
    with polling({"cold": 1}, threads=2):
        until(lambda: clock.advance(0.001) or len(calls) == 1500)
    assert Task.objects.values("start_time").distinct().count() <= 18


@committed
def test_a_draining_poller_ends_soon_after_its_last_task(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"long": SELDOM}}
    go = threading.Event()
    registry.register("long", lambda task: go.wait(PATIENCE) and None)
    enqueue("long")
    poller = loop.Poller({"long": 1}, Options(drain=True))
    poller.start()
    until(lambda: poller.running() and poller.queues["long"].idle_pause)
    go.set()
    until(lambda: poller.wait(0))
    poller.close()


@committed
@pytest.mark.parametrize("feeds", ["enqueues", "is the parent"])
def test_a_draining_run_takes_what_a_queue_brings_another(alias: str, feeds: str, taskqueue_registry: None) -> None:
    go, names = threading.Event(), ("first", "second", "third")

    def process(task: Lease) -> None:
        go.wait(PATIENCE)
        if feeds == "enqueues" and task.queue != "third":
            enqueue(names[names.index(task.queue) + 1], using=alias)

    for queue in names:
        registry.register(queue, process)
    if feeds == "enqueues":
        enqueue("first", using=alias)
    else:
        chain(*({"queue": queue} for queue in names), using=alias)
    poller = loop.Poller(dict.fromkeys(reversed(names), 1), Options(drain=True, threads=1), using=alias)
    poller.start()
    until(lambda: poller.queues["second"].exhausted and poller.queues["third"].exhausted)
    go.set()
    assert poller.wait(PATIENCE)
    poller.close()
    rows = Task.objects.using(alias).order_by("pk").values_list("queue", "status")
    assert dict(rows) == dict.fromkeys(names, "COMPLETED") and len(rows) == 3
