"""A listener that is found by its dotted path."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from django_dbtaskqueue import signals
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task

HOOKS = [name for name in vars(signals.Listener) if not name.startswith("_")]
LIFE = ["checked_out", "started", "executed", "finished"]


class Told(signals.Listener):
    """A listener with one method for all hooks."""

    def told(self, hook: str, subject: Any, *facts: Any) -> None:
        raise AssertionError("override it")

    def __getattribute__(self, name: str) -> Any:
        return partial(self.told, name) if name in HOOKS else super().__getattribute__(name)


class Diary(Told):
    """Writes down what it is told, and how the task stood in the database at that moment."""

    def __init__(self, name: str = "diary", book: list[tuple[Any, ...]] | None = None) -> None:
        self.name = name
        self.book: list[tuple[Any, ...]] = [] if book is None else book

    def told(self, hook: str, subject: Any, *facts: Any) -> None:
        if not hook.startswith("poll"):
            subject, facts = subject.reference, (status_of(subject), *facts)
        self.book.append((self.name, hook, subject, *facts))

    def of(self, subject: Any) -> list[tuple[Any, ...]]:
        """Return what it was told of one task, or of a poller."""
        return [(hook, *facts) for _, hook, about, *facts in self.book if about == subject]

    def hooks(self, subject: Any) -> list[str]:
        return [hook for hook, *_ in self.of(subject)]


def status_of(task: Lease) -> str | None:
    """Return how the task stands in the database; PROCESSING on an event loop, which must not wait for one."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return "PROCESSING"
    found = Task.objects.using(task.port.alias).filter(pk=task.id)
    return found.values_list("status", flat=True).first()


@contextmanager
def listening(*listeners: signals.Listener) -> Iterator[None]:
    for listener in listeners:
        signals.register(listener)
    try:
        yield
    finally:
        for listener in listeners:
            signals.unregister(listener)


class Nobody:
    """No listener."""
