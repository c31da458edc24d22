"""Work that really stops: cancelled, replaced, past its timeout or without its lease; and tasks that fork."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue import DuplicateTask, enqueue, enqueue_many, signals
from django_dbtaskqueue.models import Attempt, AuditEntry, Task
from django_dbtaskqueue.operations import lookup
from django_dbtaskqueue.poller.executors import process
from tests.clock import SteppedClock
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.factories import make_task
from tests.poller.processes import SELDOM, Gate, Start, alive, completed, lines, polling, status_of
from tests.support import PATIENCE, output_of, until
from tests.testapp.models import Booking

pytestmark = pytest.mark.usefixtures("children_here")


@pytest.fixture
def lost() -> Iterator[list[int]]:
    """The tasks whose outcome came too late."""
    found: list[int] = []

    def note(task: Any, **_: Any) -> None:
        found.append(task.id)

    signals.lease_lost.connect(note, weak=False)
    yield found
    signals.lease_lost.disconnect(note)


class Deaf:
    """A task with its payload blocks all signals, starts a program, and holds the interpreter in C."""

    def __init__(self, folder: Path) -> None:
        self._program, self._mark, self.end = folder / "program", folder / "mark", folder / "end"
        files = {"program": self._program, "mark": self._mark, "end": self.end}
        self.payload = {"do": "hold", **{name: str(path) for name, path in files.items()}}

    def started(self) -> tuple[int, int]:
        """Wait for the program; return its process and that of the task."""
        until(lambda: self._program.exists() and self._program.read_text())
        return int(self._program.read_text()), int(lines(self._mark)[0][-1])


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[Deaf]:
    made = Deaf(tmp_path)
    yield made
    assert not made.end.exists()


def test_a_loop_in_c_ends_when_an_operator_cancels_it(deaf: Deaf, caplog: pytest.LogCaptureFixture) -> None:
    task = enqueue("apart", "deaf", deaf.payload)
    with polling({"apart": 1}, threads=1):
        program, child = deaf.started()
        after = enqueue("apart", "after")
        output_of("taskqueue", "cancel", "--id", task.pk, "--reason", "wrong file", "--yes")
        until(lambda: not alive(program) and not alive(child))
        until(lambda: status_of(after) == "COMPLETED")
    assert status_of(task) == "POISON" and "is gone" in caplog.text
    assert AuditEntry.objects.get(verb="cancel").reason == "wrong file"


def test_nothing_is_left_of_an_atomic_task_that_is_cancelled(deaf: Deaf, lost: list[int]) -> None:
    task = enqueue("aparta", "all", deaf.payload)
    with polling({"aparta": 1}, threads=1):
        program, _ = deaf.started()
        assert lookup.cancel("aparta", "all")
        until(lambda: task.pk in lost and not alive(program))
    assert not Booking.objects.exists()


def test_a_timeout_ends_the_code(deaf: Deaf, clock: SteppedClock) -> None:
    task = enqueue("apartt", "slow", deaf.payload)
    clock.stop()
    with polling({"apartt": 1}, threads=1) as poller:
        program, _ = deaf.started()
        clock.advance(1)
        until(lambda: status_of(task) == "ERROR" and not poller.running() and not alive(program))
    assert "TimeoutError" in Attempt.objects.get(task_id=task.pk).error_type


def test_the_others_of_a_batch_start_again_uncharged(deaf: Deaf, gate: Gate, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"apartb": SELDOM}}
    gate.open()
    first, second = enqueue("apartb", "first", gate.payload), enqueue("apartb", "second", deaf.payload)
    with polling({"apartb": 1}, threads=1):
        deaf.started()
        assert lookup.cancel("apartb", "second")
        until(lambda: status_of(first) == "COMPLETED")
    first.refresh_from_db()
    assert (first.attempt, len(gate.starts()), status_of(second)) == (1, 2, "POISON")


def test_a_task_that_settled_itself_may_go_on(tmp_path: Path, lost: list[int]) -> None:
    """Its row is gone by its own doing when pollers look for lost leases."""
    enqueue("apart", "own", {"do": "linger", **{name: str(tmp_path / name) for name in ("settled", "until", "end")}})
    other = enqueue("apart", "other", {"do": "check", "end": str(tmp_path / "other"), "mark": str(tmp_path / "mark")})
    with polling({"apart": 1}, threads=2):
        until(lambda: (tmp_path / "settled").exists() and (tmp_path / "mark").exists())
        assert lookup.cancel("apart", "other")
        until(lambda: other.pk in lost)
        (tmp_path / "until").touch()
        until((tmp_path / "end").exists)
    assert status_of(other) == "POISON"


def test_a_task_in_crash_isolation_is_told(tmp_path: Path, lost: list[int]) -> None:
    do = {"work": {"do": "check", "end": str(tmp_path / "end")}, "aio": {"do": "wait", "until": str(tmp_path / "no")}}
    with polling({"work": 1, "aio": 1}) as poller:
        for queue, payload in do.items():
            mark = tmp_path / queue
            orphan = {"attempt": 1, "next_process_time": timedelta(0), "payload": {**payload, "mark": str(mark)}}
            task = make_task("PROCESSING", queue=queue, **orphan)
            poller.wake(queue)
            until(lambda mark=mark: lines(mark))
            assert lines(mark)[0][3] != str(os.getpid())
            assert Task.objects.filter(pk=task.pk).cancel() == 1
            until(lambda task=task: task.pk in lost)
            assert status_of(task) == "POISON"


def test_a_task_that_ends_its_process_is_charged_alone(gate: Gate) -> None:
    other = enqueue("apart", "other", gate.payload)
    deadly = enqueue("apart", "deadly", {"do": "kill", "until_attempt": 2})
    with polling({"apart": 1}, threads=2):
        until(lambda: status_of(deadly) == "COMPLETED")
        gate.open()
        until(lambda: status_of(other) == "COMPLETED")
    assert set(Task.objects.values_list("reference", "attempt")) == {("other", 1), ("deadly", 2)}
    attempt = Attempt.objects.get(task_id=deadly.pk)
    assert "ProcessDied" in attempt.error_type and "SIGKILL" in attempt.message


@pytest.mark.parametrize("end", ["second SIGTERM", "SIGKILL"])
def test_children_end_with_their_poller(start: Start, deaf: Deaf, end: str) -> None:
    enqueue("apart", "deaf", deaf.payload)
    with start("--queue", "apart", "--threads", "1") as poller:
        _, child = deaf.started()
        poller.signal(signal.SIGKILL) if end == "SIGKILL" else poller.stop_at_once()
        until(lambda: not alive(child))


def test_tasks_wait_while_no_child_can_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.there_is_no_such_module")
    task = enqueue("apart", "r1")
    with polling({"apart": 1}, threads=1):
        until(lambda: "A process for tasks does not start (exit code 1)" in caplog.text)
        monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
        until(lambda: status_of(task) == "COMPLETED")
    task.refresh_from_db()
    assert (task.attempt, task.total_attempt) == (1, 1)


def test_children_are_kept_and_replaced_by_count_and_memory(gate: Gate, settings: Any) -> None:
    def done_by(number: int) -> list[int]:
        """Return the processes of the newest tasks, once they are done."""
        before = completed()
        for _ in range(number):
            enqueue("apart", payload=gate.payload)
        until(lambda: completed() == before + number)
        return [int(pid) for *_, pid in gate.starts()[-number:]]

    gate.open()
    settings.DBTASKQUEUE = {"MAX_TASKS_PER_CHILD": 2}
    with polling({"apart": 1}, threads=1):
        first, second, third = done_by(3)
        assert first == second != third
        settings.DBTASKQUEUE = {"MAX_MEMORY_PER_CHILD": 1}
        fourth, fifth = done_by(2)
        assert third == fourth != fifth
    until(lambda: not any(map(alive, (first, third, fifth))))
    assert set(Task.objects.values_list("attempt", flat=True)) == {1}


@pytest.mark.usefixtures("process_database")
def test_a_task_that_checks_stops_by_itself(tmp_path: Path, lost: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_GRACE_SECONDS", PATIENCE)  # as long as a loaded machine needs
    with polling({"work": 1, "apart": 1}, threads=1):
        for queue in ("work", "apart"):
            end, mark = tmp_path / f"end {queue}", tmp_path / queue
            task = enqueue(queue, "kind", {"do": "check", "end": str(end), "mark": str(mark)})
            until(mark.exists)
            assert lookup.cancel(queue, "kind")
            until(lambda task=task, end=end: end.exists() and task.pk in lost)
            assert status_of(task) == "POISON"
            assert not lookup.cancel(queue, "kind"), "it has ended"


def test_a_thread_is_told_of_its_timeout(tmp_path: Path) -> None:
    task = enqueue("timed", "slow", {"do": "check", "end": str(tmp_path / "end")})
    with polling({"timed": 1}):
        until((tmp_path / "end").exists)
    assert status_of(task) == "ERROR"


def test_a_coroutine_is_cancelled(process_database: ProcessDatabase, gate: Gate, lost: list[int]) -> None:
    cancelled, released, deleted = tasks = [enqueue("aio", payload=gate.payload) for _ in range(3)]
    with polling({"aio": 1}):
        gate.until_started(3)
        chosen = [Task.objects.filter(pk=task.pk) for task in tasks]
        assert (chosen[0].cancel(), chosen[1].release_all(), chosen[2].purge()) == (1, 1, 1)
        until(lambda: {*lost} == {task.pk for task in tasks})
        gate.open()
        until(lambda: status_of(released) == "COMPLETED")
    assert status_of(cancelled) == "POISON"
    assert not Task.objects.filter(pk=deleted.pk).exists()


def test_a_running_task_is_replaced_by_its_reference(deaf: Deaf, lost: list[int]) -> None:
    task = enqueue("apart", "report", deaf.payload)
    with polling({"apart": 1}, threads=1):
        program, _ = deaf.started()
        with pytest.raises(DuplicateTask, match="replace_running"):
            enqueue("apart", "report", {"result": "new"}, on_duplicate="replace")
        again = enqueue("apart", "report", {"result": "new"}, on_duplicate="replace_running")
        assert (again.pk, again.status, again.attempt) == (task.pk, "CREATED", 0)
        until(lambda: status_of(task) == "COMPLETED" and not alive(program))
        assert lost == [task.pk]
    task.refresh_from_db()
    assert (task.result, task.attempt, task.total_attempt) == ("new", 1, 2)


# -- processors that fork, and errors that do not pass from one process to another -------------------------------------
# How the copy ends, and its exit code. The copy shares the connection, and must not end its transaction.
COPIES = (("work", "exit"), ("work", "raise"), ("atomic", "exit"), ("aio", "return"),
          ("apart", "exit"), ("apart", "raise"), ("aparta", "return"))  # fmt: skip


def test_the_copy_of_a_process_ends_with_its_call(tmp_path: Path) -> None:
    """Given tasks that fork, when a copy ends the call, then only the task's own process goes on, with its answer.

    The copy would else run the tasks after it, or answer in their place.
    """
    mark, queues = tmp_path / "mark", dict.fromkeys((queue for queue, _ in COPIES), 1)
    expected = {}
    for queue, end in COPIES:
        fork = {"do": "fork", "end": end}
        does = fork if queue == "aio" else {"do": "book", "then": fork}
        enqueue(queue, f"{queue} {end}", {**does, "mark": str(mark)})
        expected[f"{queue} {end}"] = {"exit": 3, "raise": 1, "return": 0}[end]
    for queue, number in product(queues, range(4)):
        enqueue(queue, f"{queue} {number}", {"result": number, "mark": str(mark)})
        expected[f"{queue} {number}"] = number
    with polling(queues, threads=1):
        until(lambda: completed() == len(expected))
    assert dict(Task.objects.values_list("reference", "result")) == expected
    assert Booking.objects.count() == len(COPIES) - 1
    assert sorted(f"{queue} {what}" for _, queue, what, *_ in lines(mark)) == sorted(expected)


def test_a_copy_ends_whatever_its_output_and_its_code_are() -> None:
    program = """
import os, sys
from django_dbtaskqueue.core import threads
sys.stdout = None
try:
    with threads.NoCopies():
        if (copy := os.fork()) == 0:
            sys.exit(2**70 + 3)
except SystemExit:
    os._exit(9)  # the copy goes on
os._exit(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 3


def test_an_error_that_cannot_be_pickled_is_told_whole() -> None:
    queues = {"work": 1, "apart": 1}
    for queue in queues:
        enqueue_many(queue, [(kind, {"do": "raise_odd", "kind": kind}) for kind in ("ArgumentsLost", "Locked")])
    tasks = {task.pk: task.reference for task in Task.objects.all()}
    with polling(queues, threads=1):
        until(lambda: {*Attempt.objects.values_list("task_id", flat=True)} == {*tasks})
    for attempt in Attempt.objects.filter(attempt=1):
        assert attempt.error_type == f"tests.testapp.tasks.{tasks[attempt.task_id]}"
        assert attempt.message == "order 7 was refused with E5" and "in _raise_odd" in attempt.traceback
