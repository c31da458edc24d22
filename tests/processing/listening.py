"""A listener that is found by its dotted path."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.signals import Listener

HOOKS_OF_TASKS = ("checked_out", "started", "executed", "crashed", "finished")


class Diary(Listener):
    """Writes down what it is told, and how the task stood in the database at that moment."""

    def __init__(self, name: str = "diary", book: list[tuple[Any, ...]] | None = None) -> None:
        self.name = name
        self.book: list[tuple[Any, ...]] = [] if book is None else book

    def write(self, hook: str, task: Lease, *facts: Any) -> None:
        self.book.append((self.name, hook, task.reference, status_of(task), *facts))

    def checked_out(self, task: Lease) -> None:
        self.write("checked_out", task)

    def started(self, task: Lease) -> None:
        self.write("started", task)

    def executed(self, task: Lease, outcome: Outcome) -> None:
        self.write("executed", task, outcome)

    def crashed(self, task: Lease, error: BaseException | str) -> None:
        self.write("crashed", task, error)

    def finished(self, task: Lease) -> None:
        self.write("finished", task)

    def poller_started(self, poller: Any) -> None:
        self.book.append((self.name, "poller_started", poller))

    def poller_executed(self, poller: Any, tasks: int) -> None:
        self.book.append((self.name, "poller_executed", poller, tasks))

    def poller_idle(self, poller: Any) -> None:
        self.book.append((self.name, "poller_idle", poller))

    def poll_failed(self, poller: Any, error: Exception) -> None:
        self.book.append((self.name, "poll_failed", poller, error))

    def poller_finished(self, poller: Any) -> None:
        self.book.append((self.name, "poller_finished", poller))

    def hooks(self, reference: str) -> list[str]:
        """Return what it was told of one task."""
        return [entry[1] for entry in self.book if entry[2] == reference]

    def of_pollers(self) -> list[tuple[Any, ...]]:
        """Return what it was told of pollers."""
        return [entry for entry in self.book if entry[1].startswith("poll")]


def status_of(task: Lease) -> str | None:
    """Return how the task stands in the database; PROCESSING on an event loop, which must not wait for one."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return "PROCESSING"
    found = Task.objects.using(task.port.alias).filter(pk=task.id)
    return found.values_list("status", flat=True).first()


class Nobody:
    """No listener."""
