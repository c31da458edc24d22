"""What enqueues, as a process of its own: ``python -m tests.benchmarks.producer WAY [ARGUMENT]``, for a ``Worker``."""

import os
import statistics
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import django

from tests.benchmarks.children import SECONDS, Figures, at_go, memory, timed

numbers = count()


def reference() -> str:
    return f"r-{os.getpid()}-{next(numbers)}"


def per_second(act: Callable[[], Any]) -> Figures:
    def again() -> int:
        done, end = 0, monotonic() + SECONDS
        while monotonic() < end:
            act()
            done += 1
        return done

    act()  # what is done once per process
    return timed(again)


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


def many(tasks: str, *, referenced: bool = True, on_duplicate: str = "error") -> Figures:
    """One ``enqueue_many`` from an iterator; the most memory its process had."""
    from django_dbtaskqueue import enqueue_many

    def enqueued(tasks: int) -> int:
        named = (({"reference": reference()} if referenced else {}) | {"payload": {"number": n}} for n in range(tasks))
        return enqueue_many("nothing", named, on_duplicate=on_duplicate).enqueued

    enqueued(100)
    return timed(lambda: enqueued(int(tasks))) | {"memory": memory(os.getpid(), "VmHWM")}


def paced(queue: str, number: str, every: str, closes: str = "") -> Figures:
    """One task after another; return when each was committed, by its id. Its payload says when it was called for."""
    from django.db import connections

    from django_dbtaskqueue import enqueue

    committed, first, pause = {}, monotonic(), threading.Event()
    for index in range(int(number)):
        pause.wait(max(0.0, first + index * float(every) - monotonic()))
        task = enqueue(queue, payload=monotonic())
        committed[str(task.pk)] = monotonic()
        if closes:  # as a view does with CONN_MAX_AGE=0
            connections.close_all()
    return committed


WAYS: dict[str, Callable[..., Figures]] = {"single": single, "create": create, "view": view, "many": many}
WAYS |= {"many-ignore": partial(many, on_duplicate="ignore"), "many-plain": partial(many, referenced=False)}
WAYS["paced"] = paced

if __name__ == "__main__":
    django.setup()
    at_go(lambda: WAYS[sys.argv[1]](*sys.argv[2:]))
