"""The pull API, on PostgreSQL and on SQLite, with real commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_dbtaskqueue import queue
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.signals import task_changed
from tests.conftest import ProcessDatabase

Told = list[tuple[str, str, int]]


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> Callable[..., None]:
    """Set the queue ``mail``; call it for other settings."""

    def configure(**mail: Any) -> None:
        settings.DBTASKQUEUE = {"QUEUES": {"mail": mail, "other": {}}, "NOTIFY": True}

    configure()
    return configure


@pytest.fixture
def configure(_queues: Callable[..., None]) -> Callable[..., None]:
    """Set the queue ``mail`` otherwise."""
    return _queues


@pytest.fixture
def mail(process_database: ProcessDatabase) -> Iterator[QueueHandle]:
    """The queue ``mail``."""
    yield queue("mail")
    notify.flush()
    usage.discard("default", "mail")


@pytest.fixture
def told() -> Iterator[Told]:
    """What the signal told: (queue, call, task id), in order."""
    seen: Told = []

    def receiver(sender: str, *, call: str, task_ids: tuple[int, ...], **_: Any) -> None:
        seen.extend((sender, call, task_id) for task_id in task_ids)

    task_changed.connect(receiver)
    yield seen
    task_changed.disconnect(receiver)
