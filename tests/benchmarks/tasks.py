"""The processors that benchmarks measure: they do nothing, wait, or keep a core busy."""

import asyncio
import os
import threading
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from django.contrib.auth.models import Group

from django_dbtaskqueue import processor, registry

BUSY = 0.00002  # seconds


def nothing(task: Any) -> None:
    pass


registry.register("nothing", nothing)
registry.register("nothing-atomic", nothing, mode="atomic")
registry.register("nothing-atomic-100", nothing, mode="atomic", batch=100)
for number in range(int(os.environ.get("BENCHMARK_QUEUES", "0"))):
    registry.register(f"queue-{number}", nothing)


@processor("nothing-async")
async def nothing_async(task: Any) -> None:
    pass


async def wait(task: Any, seconds: float) -> None:
    await asyncio.sleep(seconds)


registry.register("nothing-process", nothing, executor="process")
for ms in (1, 5, 20):
    registry.register(f"wait-{ms}-async", partial(wait, seconds=ms / 1000))
    registry.register(f"wait-{ms}-threads", lambda task, seconds=ms / 1000: threading.Event().wait(seconds) or None)


@processor("insert", mode="atomic")
def insert(task: Any) -> None:
    Group.objects.create(name=f"group {task.id}")


@processor("busy")
def busy(task: Any) -> None:
    end = perf_counter() + BUSY
    while perf_counter() < end:
        pass


@processor("grind")
def grind(task: Any) -> int:
    return sum(range(task.payload))


@processor("pick-up")
def pick_up(task: Any) -> dict[str, float]:
    """Say when it was started, on the clock that all processes of a machine share."""
    return {"started": monotonic()}
