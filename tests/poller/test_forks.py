"""Processors that fork, and errors that do not pass from one process to another."""

import subprocess
import sys
from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.poller.processes import lines, polling
from tests.support import until
from tests.testapp.models import Booking


@pytest.fixture(autouse=True)
def _environment(postgres_process_database: ProcessDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead the children of pollers in this process to the test's database."""
    for key, value in postgres_process_database.env.items():
        monkeypatch.setenv(key, value)


@pytest.mark.parametrize(
    ("queue", "end", "code"),
    [("work", "exit", 3), ("work", "raise", 1), ("atomic", "exit", 3), ("aio", "return", 0), ("apart", "exit", 3),
     ("apart", "raise", 1), ("aparta", "return", 0)],
)  # fmt: skip
def test_the_copy_of_a_process_ends_with_its_call(queue: str, end: str, code: int, tmp_path: Path) -> None:
    """Given a task that forks, when its copy ends the call, then only the task's own process goes on, with its answer.

    The copy would else run the tasks after it, or answer in their place.
    """
    mark = tmp_path / "mark"
    fork = {"do": "fork", "end": end}
    written = fork if queue == "aio" else {"do": "book", "then": fork}
    enqueue(queue, "forks", {**written, "mark": str(mark)})
    for number in range(4):
        enqueue(queue, f"r{number}", {"result": number, "mark": str(mark)})
    with polling({queue: 1}, threads=1):
        until(lambda: Task.objects.filter(status="COMPLETED").count() == 5)
    results = dict(Task.objects.values_list("reference", "result"))
    assert results == {"forks": code, **{f"r{number}": number for number in range(4)}}
    assert Booking.objects.count() == (
        queue != "aio"
    )  # the copy shares the connection, and must not end its transaction
    assert sorted(reference for _, reference, *_ in lines(mark)) == ["forks", "r0", "r1", "r2", "r3"]


def test_a_copy_ends_whatever_its_output_and_its_code_are() -> None:
    program = """
import os, sys
from django_dbtaskqueue.core import threads
sys.stdout = None
try:
    with threads.no_copies():
        copy = os.fork()
        if copy == 0:
            sys.exit(2**70 + 3)
except SystemExit:
    os._exit(9)  # the copy goes on
os._exit(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 3


@pytest.mark.parametrize("queue", ["work", "apart"])
@pytest.mark.parametrize("kind", ["ArgumentsLost", "Locked"])
def test_an_error_that_cannot_be_pickled_is_told_whole(queue: str, kind: str) -> None:
    """On a thread and in a process alike."""
    task = enqueue(queue, kind, {"do": "raise_odd", "kind": kind})
    with polling({queue: 1}, threads=1):
        until(lambda: Attempt.objects.filter(task_id=task.pk).exists())
    attempt = Attempt.objects.filter(task_id=task.pk).earliest("attempt")
    assert attempt.error_type == f"tests.testapp.tasks.{kind}"
    assert attempt.message == "order 7 was refused with E5"
    assert "in _raise_odd" in attempt.traceback
