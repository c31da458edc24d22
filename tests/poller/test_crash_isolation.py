"""Crash isolation: a task that may have killed its process runs alone, and soon."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import Reenqueue, enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.poller.processes import keep_full, let_others_start, polling
from tests.support import PATIENCE, until

QUEUE = "flood"


@pytest.fixture
def flood(settings: Any, taskqueue_registry: None) -> str:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}}
    return QUEUE


def test_it_is_not_put_off_while_there_is_plenty_to_do(postgres_process_database: ProcessDatabase, flood: str) -> None:
    """Given an orphan behind the watermark of a queue that never runs empty, then it runs all the same."""
    ran: list[object] = []
    registry.register(flood, lambda task: ran.append(task.payload))
    waiting = Task.objects.filter(queue=flood, status="CREATED")

    keep_full(flood)
    with polling({flood: 1}):
        until(lambda: ran)
        orphan = make_task(
            "PROCESSING", queue=flood, attempt=1, ready_time=timedelta(hours=-1), next_process_time=timedelta(0),
            payload="orphan",
        )  # fmt: skip
        until(lambda: keep_full(flood) or "orphan" in ran)
        assert waiting.exists()
        until(lambda: not waiting.exists())
    orphan.refresh_from_db()
    assert orphan.total_attempt < 10  # taken with many and released, then taken alone; not again and again


@pytest.mark.parametrize("kind", ["released by an operator", "reenqueued"])
def test_a_task_whose_attempt_ended_without_a_crash_is_not_isolated(
    kind: str, postgres_process_database: ProcessDatabase, flood: str
) -> None:
    """Given tasks whose last attempts ended well, then they run at the same time."""
    together, starts = threading.Barrier(8), threading.Semaphore(0)

    def run(task: Lease) -> object:
        if task.total_attempt == 1:
            starts.release()
            return Reenqueue(timedelta(0), keep_attempts=True) if kind == "reenqueued" else hold.wait(PATIENCE) and None
        together.wait(PATIENCE)
        return None

    hold = threading.Event()
    registry.register(flood, run)
    enqueue_many(flood, [{}] * 8)
    with polling({flood: 1}, threads=16):
        for _ in range(8):
            assert starts.acquire(timeout=PATIENCE)
        if kind == "released by an operator":
            assert Task.objects.filter(queue=flood).release_all() == 8
        until(lambda: Task.objects.filter(queue=flood, status="COMPLETED").count() == 8)
        hold.set()


def test_a_task_that_was_reenqueued_before_its_process_died_is_isolated(
    postgres_process_database: ProcessDatabase, flood: str
) -> None:
    """Given orphans that were reenqueued some time before, then none runs beside another one at first."""
    running, most = [0], [0]
    lock = threading.Lock()

    def run(task: object) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        let_others_start()
        with lock:
            running[0] -= 1

    registry.register(flood, run)
    for _ in range(4):
        make_task("PROCESSING", queue=flood, attempt=1, reenqueue_attempt=3, next_process_time=timedelta(0))
    with polling({flood: 1}, threads=8):
        until(lambda: Task.objects.filter(queue=flood, status="COMPLETED").count() == 4)
    assert most[0] == 1
