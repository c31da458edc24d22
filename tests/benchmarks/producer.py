"""What enqueues, as a process of its own: ``python -m tests.benchmarks.producer WAY [ARGUMENT]``.

It says READY, begins at GO, and says what it measured.
"""

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from time import monotonic, process_time
from typing import Any

import django
import psutil

from tests.benchmarks.children import begin, finish, memory

SECONDS = 2.0
numbers = count()
Figures = dict[str, float]


def reference() -> str:
    return f"r-{os.getpid()}-{next(numbers)}"


def per_second(act: Callable[[], Any]) -> Figures:
    act()  # what is done once per process
    done, cpu, began = 0, process_time(), monotonic()
    while monotonic() < began + SECONDS:
        act()
        done += 1
    return {"tasks": done, "began": began, "ended": monotonic(), "cpu": process_time() - cpu}


def single() -> Figures:
    """One task in a transaction of its own, through the public call."""
    from django_dbtaskqueue import enqueue

    return per_second(lambda: enqueue("nothing", reference(), {"number": 1}))


def create() -> Figures:
    """The same row by the ORM, which validates nothing and wakes nobody."""
    from django_dbtaskqueue.models import Task

    return per_second(lambda: Task.objects.create(queue="nothing", reference=reference(), payload={"number": 1}))


def view() -> Figures:
    """What an enqueue adds to a view's transaction: every second one has it."""
    from django.contrib.auth.models import Group
    from django.db import transaction

    from django_dbtaskqueue import enqueue

    seconds: tuple[list[float], list[float]] = [], []
    for number in range(1500):
        began = monotonic()
        with transaction.atomic():
            Group.objects.create(name=reference())
            if number % 2:
                enqueue("nothing", reference(), {"number": number})
        seconds[number % 2].append(monotonic() - began)
    without, added = (statistics.median(times) * 1000 for times in seconds)
    return {"ms added, p50": added - without, "ms without": without, "ms with": added}


def items(tasks: int, *, referenced: bool) -> Iterator[dict[str, Any]]:
    for number in range(tasks):
        yield {"payload": {"number": number}} | ({"reference": reference()} if referenced else {})


def many(tasks: str, *, referenced: bool = True, on_duplicate: str = "error") -> Figures:
    """One ``enqueue_many`` from an iterator; the most memory its process had."""
    from django_dbtaskqueue import enqueue_many

    enqueue_many("nothing", items(100, referenced=referenced), on_duplicate=on_duplicate)
    began = monotonic()
    report = enqueue_many("nothing", items(int(tasks), referenced=referenced), on_duplicate=on_duplicate)
    return {"tasks": report.enqueued, "began": began, "ended": monotonic(), "memory": memory(psutil.Process(), "VmHWM")}


ONE = {"single": single, "create": create, "view": view}
MANY = {"many-ignore": partial(many, on_duplicate="ignore"), "many-plain": partial(many, referenced=False)}
WAYS: dict[str, Callable[..., Figures]] = {**ONE, "many": many, **MANY}

if __name__ == "__main__":
    django.setup()
    begin()
    finish(**WAYS[sys.argv[1]](*sys.argv[2:]))
