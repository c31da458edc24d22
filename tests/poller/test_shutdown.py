"""The end of a poller: drained, cancelled, timed out, or asked for before it began."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Attempt, Poller, Task
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines, runtaskpoller
from tests.support import PATIENCE, until


@pytest.mark.parametrize(("vendor", "number"), [("postgres", signal.SIGTERM), ("sqlite", signal.SIGINT)])
def test_the_first_signal_drains_and_gives_back_what_has_not_started(
    request: pytest.FixtureRequest, tmp_path: Path, vendor: str, number: int
) -> None:
    database: ProcessDatabase = request.getfixturevalue(f"{vendor}_process_database")
    # Given quick tasks, after which the poller takes many ahead, and then slow ones
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    enqueue_many("work", [(f"quick{n}", {}) for n in range(200)])
    enqueue_many("work", [(f"slow{n}", {"do": "wait", "until": str(gate), "mark": str(mark)}) for n in range(50)])
    slow = Task.objects.filter(reference__startswith="slow")
    with runtaskpoller(database, "--queue", "work", "--threads", "1") as poller:
        until(lambda: lines(mark) and slow.filter(status="PROCESSING").count() > 1)
        # When it is asked to stop while one of them runs
        poller.signal(number)
        poller.until_logged("Stopping: waiting at most 30s for 1 running tasks")
        until(lambda: slow.filter(status="PROCESSING").count() == 1)
        gate.touch()
        poller.ended()
    # Then that one is done; the others are as if they had never been taken
    assert slow.filter(status="COMPLETED").count() == len(lines(mark)) == 1
    released = slow.exclude(status="COMPLETED")
    assert set(released.values_list("status", "attempt", "poller_instance")) == {("CREATED", 0, None)}
    assert released.filter(total_attempt=1).exists()
    assert Poller.objects.get().state == "STOPPED"


@pytest.mark.slow  # limits of real connections run out
def test_a_poller_starts_and_ends_while_the_server_is_silent() -> None:
    """As behind a pooler that stands still: it takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        database = ProcessDatabase("postgresql", f"postgresql://postgres:any@127.0.0.1:{port}/postgres")
        with runtaskpoller(database, "--queue", "work", "--shutdown-timeout", "1s") as poller:
            poller.until_logged("not reachable yet")
            poller.signal()
            assert "Stopped: 0 finished" in poller.ended()


def test_the_second_signal_cancels(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    stuck = enqueue("work", "stuck", {"do": "wait", "until": str(tmp_path / "never"), "mark": str(mark)})
    waiting = enqueue("aio", "waiting", {"do": "wait", "until": str(tmp_path / "never"), "mark": str(mark)})
    with runtaskpoller(postgres_process_database, "--queue", "work,aio") as poller:
        until(lambda: len(lines(mark)) == 2)
        poller.signal()
        poller.until_logged("Stopping: waiting")
        poller.signal()
        log = poller.ended(1)
    # The thread had to be left behind, and is named; the coroutine could be ended
    assert f"Task {stuck.pk} of work (stuck) still runs" in log
    assert f"Task {waiting.pk} of aio (waiting) still runs" not in log
    for task in (stuck, waiting):
        task.refresh_from_db()
        assert (task.status, task.attempt) == ("CREATED", 1)
        assert "Cancelled" in Attempt.objects.get(task_id=task.pk).message


def test_coroutines_alone_can_be_cancelled_cleanly(sqlite_process_database: ProcessDatabase, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    enqueue("aio", "waiting", {"do": "wait", "until": str(tmp_path / "never"), "mark": str(mark)})
    with runtaskpoller(sqlite_process_database, "--queue", "aio") as poller:
        until(lambda: lines(mark))
        poller.signal()
        poller.until_logged("Stopping: waiting")
        poller.signal()
        poller.ended(0)


def test_after_the_shutdown_timeout_what_runs_is_reported_and_left(
    sqlite_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    task = enqueue("work", "stuck", {"do": "wait", "until": str(tmp_path / "never"), "mark": str(mark)})
    with runtaskpoller(sqlite_process_database, "--queue", "work", "--shutdown-timeout", "300ms") as poller:
        until(lambda: lines(mark))
        poller.signal()
        log = poller.ended(1)
    assert f"Task {task.pk} of work (stuck) still runs" in log
    task.refresh_from_db()
    assert (task.status, task.attempt) == ("PROCESSING", 1)  # the lease decides when somebody else may have it


@pytest.mark.slow
def test_a_signal_at_any_moment_of_the_start_loses_and_charges_nothing(
    postgres_process_database: ProcessDatabase,
) -> None:
    enqueue_many("work", [(None, {"do": "ok"})] * 500)
    for moment in range(8):
        with runtaskpoller(postgres_process_database, "--queue", "work") as poller:
            starting, at = psutil.Process(poller.process.pid), moment / 8  # seconds of work
            until(lambda p=poller, one=starting, at=at: sum(one.cpu_times()[:2]) >= at or "Queues" in p.log)
            poller.signal()
            assert poller.process.wait(PATIENCE) in (0, -signal.SIGTERM), poller.log
            assert "Traceback" not in poller.log
    assert not Task.objects.exclude(status__in=["CREATED", "COMPLETED"]).exists()
    assert set(Task.objects.filter(status="CREATED").values_list("attempt", flat=True)) <= {0}
    assert set(Task.objects.filter(status="COMPLETED").values_list("attempt", flat=True)) <= {1}
