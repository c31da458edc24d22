"""Tests of the flow's stages: on PostgreSQL and on SQLite."""

from typing import Any

import pytest

from django_dbtaskqueue import queue
from django_dbtaskqueue.models import Task

QUEUES: dict[str, Any] = {"parcels": {"max_attempts": 4}, "letters": {}}


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": QUEUES}


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def take(alias: str, name: str = "parcels") -> Any:
    return queue(name, using=alias).take()


def finish(alias: str, name: str = "parcels") -> int:
    lease = take(alias, name)
    lease.complete()
    return lease.id


READY, WAITS, POISONED = ("CREATED", None), ("CREATED", "parents"), ("POISON", None)


def state(task: Task) -> tuple[str, str | None]:
    row = Task.objects.using(task._state.db).get(pk=task.pk)
    return row.status, row.parked_by
