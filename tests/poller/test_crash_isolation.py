"""Crash isolation: a task that may have killed its process runs alone, and soon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Max

from django_dbtaskqueue import enqueue_many, registry
from django_dbtaskqueue.models import Task
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.poller.processes import polling
from tests.support import until

QUEUE, MANY = "flood", 6000


@pytest.fixture
def flood(settings: Any) -> Iterator[str]:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}}
    before = registry.snapshot()
    yield QUEUE
    registry.restore(before)


def test_it_is_not_put_off_while_there_is_plenty_to_do(postgres_process_database: ProcessDatabase, flood: str) -> None:
    """Given an orphan behind the watermark while a queue is drained, then it runs before the drain is over."""
    pause = threading.Event()
    registry.register(flood, lambda task: pause.wait(0.001) and None)
    enqueue_many(flood, ({"payload": number} for number in range(MANY)))
    tasks = Task.objects.filter(queue=flood)
    with polling({flood: 1}):
        until(lambda: tasks.filter(status="COMPLETED").exists())
        orphan = make_task(
            "PROCESSING", queue=flood, attempt=1, ready_time=timedelta(hours=-1), next_process_time=timedelta(0)
        )
        until(lambda: tasks.filter(status="COMPLETED").count() == MANY + 1)
    orphan.refresh_from_db()
    assert orphan.total_attempt < 10  # taken with many and released, then taken alone; not again and again
    last = tasks.exclude(pk=orphan.pk).aggregate(last=Max("start_time"))["last"]
    assert orphan.start_time is not None
    assert orphan.start_time < last
