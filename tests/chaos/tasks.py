"""Processors of the child processes. A payload is an object ``{"do": VERB, …}``; those of ``tests/testapp`` and these:

hold    completes, with the attempt's number as its result, as soon as the file ``until`` exists; with ``each``, as soon
        as ``until`` with ".<total_attempt>" behind it does
count   counts the bookings, once the file ``until`` exists, and then takes ``seconds``
bump    adds 1 to ``Booking.amount`` of the task's reference

All queues have the same; those in ``ATOMIC`` have ``mode="atomic"``.
"""

import ctypes
import os
import time
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
    if os.environ.get("CHAOS_KILL") == "in the handler":
        crashing.die()
    return VERBS[payload.get("do", "ok")](task, payload)


def _hold(task: Lease, payload: dict[str, Any]) -> Complete:
    each = f".{task.total_attempt}" if payload.get("each") else ""
    testapp.VERBS["wait"](task, {"until": payload["until"] + each})
    return Complete(task.total_attempt)


def _count(task: Lease, payload: dict[str, Any]) -> Complete:
    if "until" in payload:
        testapp.VERBS["wait"](task, payload)
    found = Booking.objects.using(task.port.alias).count()
    time.sleep(payload.get("seconds", 0))
    return Complete(found)


def _bump(task: Lease, payload: dict[str, Any]) -> Complete:
    Booking.objects.using(task.port.alias).filter(reference=task.reference).update(amount=F("amount") + 1)
    return Complete()


VERBS = {**testapp.VERBS, "hold": _hold, "bump": _bump, "count": _count, "segfault": lambda *_: ctypes.string_at(0)}

for queue in ("chaos", *ALONE):
    processor(queue)(run)
for queue in ATOMIC:
    processor(queue, mode="atomic")(run)
crashing.install()
