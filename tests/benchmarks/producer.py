"""What enqueues, as a process of its own: ``python -m tests.benchmarks.producer WAY [ARGUMENT]``.

It says READY, begins at GO, and says what it measured.
"""

from __future__ import annotations

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
    """Return one that nobody else has."""
    return f"r-{os.getpid()}-{next(numbers)}"


def per_second(act: Callable[[], Any]) -> Figures:
    """Act again and again; return how often."""
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

    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1500):
        asked = number % 2 == 1
        began = monotonic()
        with transaction.atomic():
            Group.objects.create(name=reference())
            if asked:
                enqueue("nothing", reference(), {"number": number})
        seconds[asked].append(monotonic() - began)
    without, added = (statistics.median(seconds[asked]) * 1000 for asked in (False, True))
    return {"without": without, "with": added, "added": added - without}


def items(tasks: int, *, referenced: bool) -> Iterator[dict[str, Any]]:
    """Yield what to enqueue."""
    for number in range(tasks):
        yield {"payload": {"number": number}} | ({"reference": reference()} if referenced else {})


def many(tasks: str, *, referenced: bool = True, on_duplicate: str = "error") -> Figures:
    """One ``enqueue_many`` from an iterator; the most memory its process had."""
    from django_dbtaskqueue import enqueue_many

    enqueue_many("nothing", items(100, referenced=referenced), on_duplicate=on_duplicate)
    began = monotonic()
    report = enqueue_many("nothing", items(int(tasks), referenced=referenced), on_duplicate=on_duplicate)
    return {"tasks": report.enqueued, "began": began, "ended": monotonic(), "memory": memory(psutil.Process(), "VmHWM")}


WAYS: dict[str, Callable[..., Figures]] = {
    "single": single,
    "create": create,
    "view": view,
    "many": many,
    "many-ignore": partial(many, on_duplicate="ignore"),
    "many-plain": partial(many, referenced=False),
}


def main() -> None:
    """Begin at GO."""
    django.setup()
    begin()
    finish(**WAYS[sys.argv[1]](*sys.argv[2:]))


if __name__ == "__main__":
    main()
