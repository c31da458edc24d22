"""What is named by its dotted path: middleware, a listener, executors, processors that another process finds."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import django
from django.core.exceptions import MiddlewareNotUsed
from django.db import connections
from django.utils.decorators import sync_and_async_middleware

from django_dbtaskqueue import signals
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from tests.support import PATIENCE

BOOK: list[tuple[Any, ...]] = []
Call = Callable[[Any], Any]


def _note(name: str, when: str, what: Any) -> Any:
    BOOK.append((name, when, what, threading.get_ident()))
    return what


def _writing(name: str, call: Call) -> Call:
    if not asyncio.iscoroutinefunction(call):
        return lambda task: _note(name, "after", call(_note(name, "before", task)))

    async def around_async(task: Any) -> Any:
        return _note(name, "after", await call(_note(name, "before", task)))

    return around_async


@sync_and_async_middleware
def outer(call: Call) -> Call:
    return _writing("outer", call)


@sync_and_async_middleware
def inner(call: Call) -> Call:
    return _writing("inner", call)


def sync_only(call: Call) -> Call:
    return _writing("sync only", call)


@sync_and_async_middleware
def unused(call: Call) -> Call:
    raise MiddlewareNotUsed


def no_call(call: Call) -> Any:
    return "nothing to call"


def with_process(call: Call) -> Call:
    return lambda task: [os.getpid(), call(task)]


with_process.changes_outcome = True  # type: ignore[attr-defined]
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
        return [(hook, *facts) for _, hook, about, *facts in self.book if about == subject]

    def hooks(self, subject: Any) -> list[str]:
        return [hook for hook, *_ in self.of(subject)]


def status_of(task: Lease) -> str | None:
    """Return how the task stands in the database; PROCESSING on an event loop, which must not wait for one."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return "PROCESSING"
    return Task.objects.using(task.port.alias).filter(pk=task.id).values_list("status", flat=True).first()


@contextmanager
def listening(*listeners: signals.Listener) -> Iterator[None]:
    for listener in listeners:
        signals.register(listener)
    try:
        yield
    finally:
        for listener in listeners:
            signals.unregister(listener)


class Inline:
    slots = 3

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


def two_threads() -> Executor:
    return ThreadPoolExecutor(2, thread_name_prefix="mine")


def close_connections(pool: Executor, threads: int) -> None:
    """Close what CONN_MAX_AGE keeps open in each thread of a pool; one that is shut down has none left."""
    meeting = threading.Barrier(threads)

    def close() -> None:
        meeting.wait(PATIENCE)
        connections.close_all()

    with suppress(RuntimeError):
        for future in [pool.submit(close) for _ in range(threads)]:
            future.result(PATIENCE)


def two_processes() -> Executor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), initializer=django.setup)


def book(task: Lease) -> dict[str, Any]:
    from tests.testapp.models import Booking

    Booking.objects.using(task.port.alias).create(reference=task.reference or "")
    return {"pid": os.getpid()}


def wait(task: Lease) -> Any:
    return [task.step("book", book, task)["pid"], task.wait_for("approved")]


def where(task: Lease) -> dict[str, Any]:
    """Say which process it is, or do what the payload says."""
    payload = task.payload or {}
    if payload.get("do") == "raise":
        raise ValueError("asked to fail elsewhere")
    if payload.get("do") == "die":
        os._exit(3)
    return {"pid": os.getpid(), "payload": payload, "context": task.context}
