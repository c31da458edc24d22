"""Rows that no checkout can take, or no poller can read: they are parked with the reason, and their queue goes on."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connections

from django_dbtaskqueue import enqueue, registry
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.models.tasks import MAX_TOTAL_ATTEMPT
from tests.conftest import ProcessDatabase
from tests.poller.processes import polling
from tests.support import until

GOOD = 6


@pytest.fixture(autouse=True)
def processors(taskqueue_registry: None) -> None:
    for queue in ("letters", "parcels"):
        registry.register(queue, lambda task: None)


def insert(column: str, value: object) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute(f"INSERT INTO dbtaskqueue_task (queue_name, {column}) VALUES ('letters', %s)", [value])


def completed() -> int:
    return Task.objects.filter(status="COMPLETED").count()


@pytest.mark.parametrize("queues", [{"letters": 1}, {"letters": 1, "parcels": 1}])
def test_a_row_that_breaks_the_checkout(process_database: ProcessDatabase, queues: dict[str, int]) -> None:
    # Given a row whose next checkout would break a CHECK, before and behind others
    for _ in range(GOOD // 2):
        enqueue("letters")
    insert("total_attempt", MAX_TOTAL_ATTEMPT)
    for _ in range(GOOD // 2):
        enqueue("letters")
    with polling(queues) as poller:
        until(lambda: completed() == GOOD)
        until(lambda: Task.objects.filter(parked_by__startswith="unreadable: ").exists())
        enqueue("letters")
        until(lambda: completed() == GOOD + 1)
        until(lambda: poller.state == "RUNNING")
    bad = Task.objects.get(total_attempt=MAX_TOTAL_ATTEMPT)
    assert (bad.status, bad.ready_time) == ("CREATED", None)


def test_a_row_that_cannot_be_read(sqlite_process_database: ProcessDatabase) -> None:
    insert("expire_time", "2030-13-45 00:00:00")  # SQLite compares text, so its CHECK lets this pass
    enqueue("letters")
    with polling({"letters": 1}):
        until(lambda: completed() == 1)
        until(lambda: Task.objects.filter(queue="letters", parked_by__startswith="unreadable: ").count() == 1)


def test_a_lease_that_is_shorter_than_its_checkout(process_database: ProcessDatabase) -> None:
    task = enqueue("letters", lease=timedelta(seconds=1))
    Task.objects.update(lease_seconds=0.000001)  # as SQL may write it
    with polling({"letters": 1}):
        until(lambda: completed() == 1)
    task.refresh_from_db()
    assert (task.attempt, task.total_attempt < 10) == (1, True)
