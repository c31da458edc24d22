"""Work that really stops: a running task is cancelled, replaced, past its timeout or without its lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue import enqueue, signals
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations import lookup
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines, polling
from tests.support import until


@pytest.fixture
def lost() -> Iterator[list[int]]:
    """The tasks whose outcome came too late."""
    found: list[int] = []

    def note(task: Any, **_: Any) -> None:
        found.append(task.id)

    signals.lease_lost.connect(note, weak=False)
    yield found
    signals.lease_lost.disconnect(note)


def status(task: Task) -> str:
    return Task.objects.get(pk=task.pk).status


# -- threads and coroutines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["work"])
def test_a_task_that_checks_stops_by_itself(
    process_database: ProcessDatabase, tmp_path: Path, lost: list[int], queue: str
) -> None:
    end = tmp_path / "end"
    task = enqueue(queue, "kind", {"do": "check", "end": str(end), "mark": str(tmp_path / "mark")})
    with polling({queue: 1}):
        until(lambda: bool(lines(tmp_path / "mark")))
        assert lookup.cancel(queue, "kind")
        until(end.exists)
        until(lambda: task.pk in lost)
    assert status(task) == "POISON"
    assert not lookup.cancel(queue, "kind"), "it has ended"


def test_a_thread_is_told_of_its_timeout(process_database: ProcessDatabase, tmp_path: Path) -> None:
    task = enqueue("timed", "slow", {"do": "check", "end": str(tmp_path / "end")})
    with polling({"timed": 1}):
        until((tmp_path / "end").exists)
    assert status(task) == "ERROR"


@pytest.mark.parametrize("verb", ["cancel", "release", "delete"])
def test_a_coroutine_is_cancelled(
    process_database: ProcessDatabase, tmp_path: Path, lost: list[int], verb: str
) -> None:
    """Given a coroutine, when its lease is ended in any way, then it is cancelled and its outcome is lost."""
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    task = enqueue("aio", "endless", {"do": "wait", "until": str(gate), "mark": str(mark)})
    with polling({"aio": 1}):
        until(lambda: bool(lines(mark)))
        chosen = Task.objects.filter(pk=task.pk)
        assert {"cancel": chosen.cancel, "release": chosen.release_all, "delete": chosen.purge}[verb]() == 1
        until(lambda: task.pk in lost)
        gate.touch()
        if verb == "release":
            until(lambda: status(task) == "COMPLETED")
    assert list(chosen.values_list("status", flat=True)) == {"cancel": ["POISON"], "release": ["COMPLETED"]}.get(
        verb, []
    )
