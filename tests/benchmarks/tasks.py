"""The processors that benchmarks measure: they do nothing, nothing for 20 microseconds, keep a core busy, or wait."""

from __future__ import annotations

import os
import threading
from time import monotonic, perf_counter
from typing import Any

from django.contrib.auth.models import Group

from django_dbtaskqueue import processor, registry

BUSY = 0.00002  # seconds


@processor("nothing")
def nothing(task: Any) -> None:
    """Do nothing."""


@processor("nothing-async")
async def nothing_async(task: Any) -> None:
    """Do nothing on the event loop."""


@processor("nothing-atomic", mode="atomic")
def nothing_atomic(task: Any) -> None:
    """Do nothing, in a transaction of its own."""


@processor("nothing-atomic-100", mode="atomic", batch=100)
def nothing_atomic_100(tasks: list[Any]) -> None:
    """Do nothing, a hundred tasks to a transaction."""


@processor("insert", mode="atomic")
def insert(task: Any) -> None:
    """Insert one row by the ORM, in the transaction that settles the task."""
    Group.objects.create(name=f"group {task.id}")


@processor("busy")
def busy(task: Any) -> None:
    """Keep the processor core busy for 20 microseconds."""
    end = perf_counter() + BUSY
    while perf_counter() < end:
        pass


@processor("grind")
def grind(task: Any) -> int:
    """Count as far as the payload says: some 30 ms of a core for a million."""
    return sum(range(task.payload))


@processor("nap")
def nap(task: Any) -> None:
    """Wait for so many milliseconds as the payload says."""
    threading.Event().wait(task.payload / 1000)


@processor("pick-up")
def pick_up(task: Any) -> dict[str, float]:
    """Say when it was started, on the clock that all processes of a machine share."""
    return {"started": monotonic()}


for number in range(int(os.environ.get("BENCHMARK_QUEUES", "0"))):
    registry.register(f"queue-{number}", nothing)
