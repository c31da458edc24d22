"""Executors of users, and what runs in another process: both are found by dotted path."""

import multiprocessing
import os
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import django
from django.db import connections

from django_dbtaskqueue.core.lease import Lease
from tests.support import PATIENCE


class Inline:
    """Runs a call at once, where it is submitted."""

    slots = 3

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


class Unsized:
    """Does not say how many calls it takes."""

    submit = Inline.submit


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
    """Write to the task's database."""
    from tests.testapp.models import Booking

    Booking.objects.using(task.port.alias).create(reference=task.reference or "")
    return {"pid": os.getpid()}


def wait(task: Lease) -> Any:
    """Take a step and wait for a signal."""
    booked = task.step("book", book, task)
    return [booked["pid"], task.wait_for("approved")]


def where(task: Lease) -> dict[str, Any]:
    """Say which process it is, or do what the payload says."""
    payload = task.payload or {}
    if payload.get("do") == "raise":
        raise ValueError("asked to fail elsewhere")
    if payload.get("do") == "die":
        os._exit(3)
    return {"pid": os.getpid(), "payload": payload, "context": task.context}
