"""The pull API, on PostgreSQL and on SQLite, with real commits."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import queue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pull import blocking
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.signals import task_changed
from tests.conftest import ProcessDatabase

SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)
Configure = Callable[..., None]


@pytest.fixture(autouse=True)
def configure(settings: Any) -> Configure:
    """Set the queue ``mail``; call it for other settings."""

    def configure(**mail: Any) -> None:
        settings.DBTASKQUEUE = {"QUEUES": {"mail": mail, "other": {}}, "NOTIFY": True}

    configure()
    return configure


@pytest.fixture
def mail(process_database: ProcessDatabase) -> Iterator[QueueHandle]:
    yield queue("mail")
    notify.flush()
    usage.discard("default", "mail")


class Told(list[tuple[str, int]]):
    """What the signal told of ``mail``: (call, task id), in order."""

    def calls(self) -> list[str]:
        return [call for call, _ in self]

    def note(self, sender: str, *, call: str, task_ids: tuple[int, ...], **_: Any) -> None:
        self.extend((call, task_id) for task_id in task_ids if sender == "mail")


@pytest.fixture
def told() -> Iterator[Told]:
    seen = Told()
    task_changed.connect(seen.note)
    yield seen
    task_changed.disconnect(seen.note)


def taken(handle: QueueHandle, *payload: Any, **options: Any) -> Lease:
    handle.put(*payload, **options)
    return handle.take()


def row(task: Any) -> Task:
    return Task.objects.get(pk=task.id)


def status(task: Any) -> str:
    return str(row(task).status)


def waiters(name: str = "mail") -> int:
    return blocking.waiters(name, ["default"])
