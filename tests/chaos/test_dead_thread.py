"""A thread that a poller cannot work without ends: the process ends with a message, and another one goes on."""

from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Task
from tests.chaos.conftest import Configure, Start
from tests.chaos.processes import until_all


@pytest.fixture(autouse=True)
def leaves_once(queues: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queues(heartbeat="10s", listeners=("tests.chaos.crashing.LeavesOnce",))
    monkeypatch.setenv("CHAOS_FLAG", str(tmp_path / "left"))


def test_a_child_without_its_fetch_thread_is_replaced(start: Start) -> None:
    parent = start("--processes", "1")
    enqueue_many("chaos", [{}] * 3)
    parent.until_logged("Thread dbtaskqueue-fetch-0 ended")
    parent.until_logged("Starting another one")
    enqueue("chaos")
    until_all("COMPLETED")
    parent.end()


def test_a_poller_without_its_fetch_thread_stores_what_runs_and_ends(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    enqueue("chaos", None, {"do": "hold", "until": str(gate)})
    poller = start()
    poller.until_logged("Thread dbtaskqueue-fetch-0 ended")
    gate.touch()
    poller.ended(1)  # once the other thread has stored the outcome
    assert "SystemExit: 4" in poller.log
    assert "its poller ends" in poller.log
    assert Task.objects.get().status == "COMPLETED"
