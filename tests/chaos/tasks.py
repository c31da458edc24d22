"""Processors of the child processes. A payload is an object ``{"do": VERB, …}``; those of ``tests/testapp`` and these:

hold    completes, with the attempt's number as its result, as soon as the file ``until`` exists; with ``each``, as soon
        as ``until`` with ".<total_attempt>" behind it does; ``bump`` as below; ``fail``: only the first checkout fails
count   counts the bookings, once the file ``until`` exists, and then takes ``seconds``
bump    adds 1 to ``Booking.amount`` of the task's reference
steps   takes three steps that each write a booking, and waits for a signal; ends its process once, at the point
        ``die``, and leaves the file ``mark``

All queues have the same; those in ``ATOMIC`` have ``mode="atomic"``.
"""

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

from django.db.models import F

from django_dbtaskqueue import Complete, processor
from django_dbtaskqueue.core.lease import Lease
from tests.chaos import ALONE, ATOMIC, crashing
from tests.testapp import tasks as testapp
from tests.testapp.models import Booking


def run(task: Lease) -> Any:
    payload = task.payload or {}
    testapp.mark(task, payload)
    crashing.in_handler()
    return VERBS[payload.get("do", "ok")](task, payload)


def _hold(task: Lease, payload: dict[str, Any]) -> Complete:
    until = Path(f"{payload['until']}.{task.total_attempt}" if payload.get("each") else payload["until"])
    while not until.exists():
        time.sleep(testapp.LOOK)
    if payload.get("bump"):
        _bump(task, payload)
    if payload.get("fail") and task.total_attempt == 1:
        raise RuntimeError("asked to fail")
    return Complete(task.total_attempt)


def _count(task: Lease, payload: dict[str, Any]) -> Complete:
    while "until" in payload and not Path(payload["until"]).exists():
        time.sleep(testapp.LOOK)
    found = Booking.objects.using(task.port.alias).count()
    time.sleep(payload.get("seconds", 0))
    return Complete(found)


def _bump(task: Lease, payload: dict[str, Any]) -> Complete:
    Booking.objects.using(task.port.alias).filter(reference=task.reference).update(amount=F("amount") + 1)
    return Complete()


def _steps(task: Lease, payload: dict[str, Any]) -> Complete:
    mark = Path(payload["mark"])

    def die_at(point: str) -> None:
        if point == payload["die"] and not mark.exists():
            mark.touch()
            crashing.die()

    def book(name: str) -> str:
        Booking.objects.using(task.port.alias).create(reference=f"{task.reference} {name}")
        die_at(f"inside {name}")
        return name

    die_at("before")
    task.step("reserve", book, "reserve")
    die_at("between")
    task.step("charge", book, "charge")
    try:
        answer = task.wait_for("approved")
    finally:
        die_at("wait")
    task.step("letter", book, "letter")
    die_at("after")
    return Complete(answer)


def _recursion(task: Lease, payload: dict[str, Any]) -> None:
    _recursion(task, payload)


VERBS = {
    **testapp.VERBS,
    "hold": _hold,
    "bump": _bump,
    "count": _count,
    "segfault": lambda task, payload: ctypes.string_at(0),
    "overflow": lambda task, payload: crashing.overflow(),
    "recursion": _recursion,
    "leave": lambda task, payload: sys.exit(5),
    "steps": _steps,
}

for queue in ("chaos", *ALONE):
    processor(queue)(run)
for queue in ATOMIC:
    processor(queue, mode="atomic")(run)
crashing.install()
