"""Work that really stops: a running task is cancelled, replaced, past its timeout or without its lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from django_dbtaskqueue import DuplicateTask, enqueue, signals
from django_dbtaskqueue.models import Attempt, AuditEntry, Task
from django_dbtaskqueue.operations import lookup
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.poller.processes import alive, lines, polling, runtaskpoller
from tests.support import until
from tests.testapp.models import Booking


@pytest.fixture(autouse=True)
def _environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead the children of pollers in this process to the test's database."""
    name = "process_database" if "process_database" in request.fixturenames else "postgres_process_database"
    for key, value in request.getfixturevalue(name).env.items():
        monkeypatch.setenv(key, value)


@pytest.fixture
def lost() -> Iterator[list[int]]:
    """The tasks whose outcome came too late."""
    found: list[int] = []

    def note(task: Any, **_: Any) -> None:
        found.append(task.id)

    signals.lease_lost.connect(note, weak=False)
    yield found
    signals.lease_lost.disconnect(note)


def held(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Return a payload: it blocks all signals, starts a program, and holds the interpreter in C."""
    return {"do": "hold", "program": str(tmp_path / "program"), "end": str(tmp_path / "end"), **more}


def program(tmp_path: Path) -> int:
    """Wait for the program that a task has started; return its process id."""
    file = tmp_path / "program"
    until(lambda: file.exists() and bool(file.read_text()))
    return int(file.read_text())


def status(task: Task) -> str:
    return Task.objects.get(pk=task.pk).status


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_loop_in_c_ends_when_an_operator_cancels_it(
    postgres_process_database: ProcessDatabase, tmp_path: Path, lost: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Given a task that holds the interpreter and blocks signals, when it is cancelled, then it ends, and so does all
    that it started; the slot is free, and nothing of it is written.
    """
    task = enqueue("apart", "deaf", held(tmp_path, mark=str(tmp_path / "first")))
    with polling({"apart": 1, "aparta": 1}, threads=1):
        started = program(tmp_path)
        after = enqueue("apart", "after", {"mark": str(tmp_path / "mark")})
        call_command("taskqueue", "cancel", "--id", str(task.pk), "--reason", "wrong file", "--yes", stdout=StringIO())
        (child,) = (int(pid) for *_, pid in lines(tmp_path / "first"))
        until(lambda: not alive(started) and not alive(child))
        until(lambda: status(after) == "COMPLETED")
        assert status(task) == "POISON" and "is gone" in caplog.text
        assert AuditEntry.objects.get(verb="cancel").reason == "wrong file"
        # And of an atomic one
        Booking.objects.all().delete()
        (tmp_path / "program").unlink()
        task = enqueue("aparta", "all", held(tmp_path))
        started = program(tmp_path)
        assert lookup.cancel("aparta", "all")
        until(lambda: task.pk in lost)
        until(lambda: not alive(started))
    assert not Booking.objects.exists()
    assert not (tmp_path / "end").exists()


def test_a_timeout_ends_the_code(
    postgres_process_database: ProcessDatabase, tmp_path: Path, clock: SteppedClock
) -> None:
    task = enqueue("apartt", "slow", held(tmp_path))
    clock.stop()
    with polling({"apartt": 1}, threads=1) as poller:
        started = program(tmp_path)
        clock.advance(1)
        until(lambda: status(task) == "ERROR")
        until(lambda: not poller.running() and not alive(started))
    assert "TimeoutError" in Attempt.objects.get(task_id=task.pk).error_type
    assert not (tmp_path / "end").exists()


def test_the_others_of_a_batch_start_again_uncharged(
    postgres_process_database: ProcessDatabase, tmp_path: Path, settings: Any
) -> None:
    slow = {"poll_interval": "5m", "idle_interval": "5m", "lease": "1h"}
    settings.DBTASKQUEUE = {
        **settings.DBTASKQUEUE,
        "QUEUES": {**settings.DBTASKQUEUE.get("QUEUES", {}), "apartb": slow},
    }
    first = enqueue("apartb", "first", {"mark": str(tmp_path / "mark")})
    second = enqueue("apartb", "second", held(tmp_path))
    with polling({"apartb": 1}):
        program(tmp_path)
        assert lookup.cancel("apartb", "second")
        until(lambda: status(first) == "COMPLETED")
    first.refresh_from_db()
    assert (first.attempt, len(lines(tmp_path / "mark")), status(second)) == (1, 2, "POISON")


def test_a_task_that_settled_itself_may_go_on(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    """Given a task whose row is gone by its own doing, when pollers look for lost leases, then its code goes on."""
    files = {name: str(tmp_path / name) for name in ("settled", "until", "end")}
    enqueue("apart", "own", {"do": "linger", **files})
    other = enqueue("apart", "other", {"do": "check", "end": str(tmp_path / "other"), "mark": str(tmp_path / "mark")})
    with polling({"apart": 1}, threads=2):
        until(lambda: bool(lines(tmp_path / "settled")) and bool(lines(tmp_path / "mark")))
        assert lookup.cancel("apart", "other")
        until((tmp_path / "other").exists)
        (tmp_path / "until").touch()
        until((tmp_path / "end").exists)
    assert status(other) == "POISON"


def test_a_task_in_crash_isolation_is_told(
    postgres_process_database: ProcessDatabase, tmp_path: Path, lost: list[int]
) -> None:
    """Given tasks that run apart because their process died before, when they are cancelled, then they stop."""
    do = {"work": {"do": "check", "end": str(tmp_path / "end")}, "aio": {"do": "wait", "until": str(tmp_path / "no")}}
    with polling({"work": 1, "aio": 1}) as poller:
        for queue, payload in do.items():
            mark = tmp_path / queue
            orphan = {"attempt": 1, "next_process_time": timedelta(0), "payload": {**payload, "mark": str(mark)}}
            task = make_task("PROCESSING", queue=queue, **orphan)
            poller.wake(queue)
            until(lambda mark=mark: bool(lines(mark)))
            assert lines(mark)[0][3] != str(os.getpid())
            assert Task.objects.filter(pk=task.pk).cancel() == 1
            until(lambda task=task: task.pk in lost)
            assert status(task) == "POISON"


def test_a_task_that_ends_its_process_is_charged_alone(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    other = enqueue("apart", "other", {"do": "wait", "until": str(gate)})
    deadly = enqueue("apart", "deadly", {"do": "kill"})
    with polling({"apart": 1}, threads=2):
        until(lambda: status(deadly) == "ERROR")
        gate.touch()
        until(lambda: status(other) == "COMPLETED")
    other.refresh_from_db()
    assert other.attempt == 1
    attempts = Attempt.objects.filter(task_id=deadly.pk)
    assert [("ProcessDied" in one.error_type, "SIGKILL" in one.message) for one in attempts] == [(True, True)] * 3


@pytest.mark.parametrize("end", ["second SIGTERM", "SIGKILL"])
def test_children_end_with_their_poller(postgres_process_database: ProcessDatabase, tmp_path: Path, end: str) -> None:
    """Given a task that holds the interpreter, when its poller ends at once or is killed, then the child ends."""
    enqueue("apart", "deaf", held(tmp_path, mark=str(tmp_path / "mark")))
    with runtaskpoller(postgres_process_database, "--queue", "apart") as poller:
        program(tmp_path)
        (child,) = (int(pid) for *_, pid in lines(tmp_path / "mark"))
        if end == "SIGKILL":
            poller.signal(signal.SIGKILL)
        else:
            poller.signal()
            poller.until_logged("Stopping: waiting")
            poller.signal()
            poller.ended()
        until(lambda: not alive(child))
    assert not (tmp_path / "end").exists()


def test_tasks_wait_while_no_child_can_start(
    postgres_process_database: ProcessDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.there_is_no_such_module")
    task = enqueue("apart", "r1")
    with polling({"apart": 1}, threads=1):
        until(lambda: "A process for tasks does not start (exit code 1)" in caplog.text)
        monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
        until(lambda: status(task) == "COMPLETED")
    task.refresh_from_db()
    assert (task.attempt, task.total_attempt) == (1, 1)


def test_children_are_kept_and_replaced_by_count_and_memory(
    postgres_process_database: ProcessDatabase, tmp_path: Path, settings: Any
) -> None:
    settings.DBTASKQUEUE = {"MAX_TASKS_PER_CHILD": 2}
    for number in range(4):
        enqueue("apart", f"r{number}", {"mark": str(tmp_path / "mark"), "result": number})

    def until_done(number: int) -> list[int]:
        until(lambda: Task.objects.filter(status="COMPLETED").count() == number)
        return [int(pid) for *_, pid in lines(tmp_path / "mark")]

    with polling({"apart": 1}, threads=1):
        first, second, third, fourth = until_done(4)
        assert first == second != third == fourth
        settings.DBTASKQUEUE = {"MAX_MEMORY_PER_CHILD": 1}
        for number in range(4, 6):
            enqueue("apart", f"r{number}", {"mark": str(tmp_path / "mark"), "result": number})
        fifth, sixth = until_done(6)[4:]
        assert fifth != sixth
    until(lambda: not any(map(alive, (first, third, fifth, sixth))))
    assert sorted(Task.objects.values_list("result", flat=True)) == [0, 1, 2, 3, 4, 5]


# -- threads and coroutines --------------------------------------------------------------------------------------------


def test_a_task_that_checks_stops_by_itself(process_database: ProcessDatabase, tmp_path: Path, lost: list[int]) -> None:
    with polling({"work": 1, "apart": 1}):
        for queue in ("work", "apart"):
            end, mark = tmp_path / f"end {queue}", tmp_path / queue
            task = enqueue(queue, "kind", {"do": "check", "end": str(end), "mark": str(mark)})
            until(lambda mark=mark: bool(lines(mark)))
            assert lookup.cancel(queue, "kind")
            until(end.exists)
            until(lambda task=task: task.pk in lost)
            assert status(task) == "POISON"
            assert not lookup.cancel(queue, "kind"), "it has ended"


def test_a_thread_is_told_of_its_timeout(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    task = enqueue("timed", "slow", {"do": "check", "end": str(tmp_path / "end")})
    with polling({"timed": 1}):
        until((tmp_path / "end").exists)
    assert status(task) == "ERROR"


def test_a_coroutine_is_cancelled(process_database: ProcessDatabase, tmp_path: Path, lost: list[int]) -> None:
    """Given coroutines, when their leases are ended in any way, then they are cancelled and their outcomes lost."""
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    payload = {"do": "wait", "until": str(gate), "mark": str(mark)}
    cancelled, released, deleted = tasks = [enqueue("aio", verb, payload) for verb in ("cancel", "release", "delete")]
    with polling({"aio": 1}):
        until(lambda: len(lines(mark)) == 3)
        chosen = [Task.objects.filter(pk=task.pk) for task in tasks]
        assert (chosen[0].cancel(), chosen[1].release_all(), chosen[2].purge()) == (1, 1, 1)
        until(lambda: {*lost} == {task.pk for task in tasks})
        gate.touch()
        until(lambda: status(released) == "COMPLETED")
    assert status(cancelled) == "POISON"
    assert not Task.objects.filter(pk=deleted.pk).exists()


# -- replace -----------------------------------------------------------------------------------------------------------


def test_a_running_task_is_replaced_by_its_reference(
    postgres_process_database: ProcessDatabase, tmp_path: Path, lost: list[int]
) -> None:
    task = enqueue("apart", "report", held(tmp_path))
    with polling({"apart": 1}, threads=1):
        started = program(tmp_path)
        with pytest.raises(DuplicateTask, match="replace_running"):
            enqueue("apart", "report", {"result": "new"}, on_duplicate="replace")
        again = enqueue("apart", "report", {"result": "new"}, on_duplicate="replace_running")
        assert (again.pk, again.status, again.attempt) == (task.pk, "CREATED", 0)
        until(lambda: status(task) == "COMPLETED")
        until(lambda: not alive(started))
        assert lost == [task.pk]
    task.refresh_from_db()
    assert (task.result, task.attempt, task.total_attempt) == ("new", 1, 2)


def test_a_replaced_task_keeps_its_due_time_if_asked(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    task = enqueue("aio", "r", {"do": "wait", "until": str(gate), "mark": str(mark)})
    with polling({"aio": 1}):
        until(lambda: bool(lines(mark)))
        enqueue("aio", "r", {"result": 2}, delay=timedelta(hours=1), on_duplicate="replace_running", keep_due=True)
        until(lambda: status(task) == "COMPLETED")
