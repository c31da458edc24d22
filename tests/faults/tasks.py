"""Processors of the fault runs. The kind of a task, the first word of its reference, says what it does.

========= ============================================================================================================
ok        completes
slow      completes after 2 seconds: a pause of its process ends while another one runs it
long      completes after one and a half of its leases
last      as long, with one attempt only: nobody may declare its process dead while it lives
retry     fails on its first two starts, then completes
late      as retry, after 2 seconds
again     goes back into the queue once, then completes
delete    completes and deletes its row
gone      as delete, after 2 seconds: a former holder that comes back would delete the row of the next one
poison    ends as POISON
segfault  reads address 0
overflow  calls itself, in C, until there is no stack left
exit      ``os._exit(7)``
kill      SIGKILL of its own process
hold      holds the interpreter for longer than its lease, then completes; a supervisor ends its process before that
fork      completes; a copy of its process returns, raises or exits instead
dies      ``os._exit(7)`` on its first start, then completes
maybe     completes after half a second, unless an operator cancels it first
endless   says that it is alive, until an operator cancels it
cut       never runs: a task that it waits for ends as POISON
early     takes three steps, sleeps, and receives a signal that was sent when it was enqueued
answered  as early, but the signal comes when it waits
========= ============================================================================================================

Each writes its start and its end into the ledger, and completes with its reference and fence as its result. A task of
the queue "effects" also adds 1 to the amount of the Booking that has its reference; a step does so with one of its own.
"""

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db.models import F

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Poison, Reenqueue, periodic, processor
from django_dbtaskqueue.contrib.bridge import send_to
from django_dbtaskqueue.core.lease import Lease
from tests.chaos.crashing import overflow
from tests.faults.ledger import Ledger
from tests.faults.sizes import LEASE_S, STEPS
from tests.testapp.models import Booking
from tests.testapp.tasks import end_of_the_copy

SECONDS = {"slow": 2.0, "late": 2.0, "gone": 2.0, "long": LEASE_S * 1.5, "last": LEASE_S * 1.5, "maybe": 0.5}
DEADLY: dict[str, Callable[[], Any]] = {
    "segfault": lambda: ctypes.string_at(0),
    "overflow": overflow,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # A function called through PyDLL keeps the interpreter's lock.
    "hold": lambda: ctypes.PyDLL(None).sleep(int(LEASE_S) + 2),
}
EXPECTED = {
    **dict.fromkeys(("ok", "slow", "long", "retry", "late", "again"), "COMPLETED"),
    **dict.fromkeys(("fork", "dies", "early", "answered"), "COMPLETED"),
    **dict.fromkeys(("delete", "gone")),
    **dict.fromkeys(("poison", "endless", "cut"), "POISON"),
    **dict.fromkeys(("segfault", "overflow", "exit", "kill"), "ERROR"),
}
ledger = Ledger()


def _started(task: Lease) -> str:
    ledger.write("start", task=task.id, fence=task.total_attempt, reference=task.reference)
    return str(task.reference).partition("-")[0]


def _outcome(task: Lease, kind: str) -> Any:
    outcome: Any = Complete([task.reference, task.total_attempt])
    if kind in ("retry", "late") and task.total_attempt <= 2:
        outcome = Fail("asked to fail")
    elif kind == "again" and task.reenqueue_attempt == 0:
        outcome = Reenqueue(timedelta(milliseconds=100))
    elif kind in ("delete", "gone"):
        outcome = CompleteDelete()
    elif kind == "poison":
        outcome = Poison("asked to poison")
    ledger.write("end", task=task.id, fence=task.total_attempt)
    return outcome


def run(task: Lease) -> Any:
    """Do what the task's kind says, without the database."""
    return _run(task, _started(task))


def _run(task: Lease, kind: str) -> Any:
    if kind in DEADLY:
        DEADLY[kind]()
    if kind == "dies" and task.total_attempt == 1:
        os._exit(7)
    if kind == "fork":
        if (copy := os.fork()) == 0:
            return end_of_the_copy(("exit", "raise", "return")[task.id % 3])
        os.waitpid(copy, 0)
    while kind == "endless":
        ledger.write("alive", reference=task.reference)
        time.sleep(0.2)
        if task.queue != "processes":  # there it does not ask
            task.check()
    if kind in SECONDS:
        time.sleep(SECONDS[kind])
    return _outcome(task, kind)


for queue in ("plain", "small", "grouped", "last", "lethal", "flow", "limited", "wide", "unique", "stopped", "spread"):
    processor(queue)(run)
processor("processes", executor="process")(run)
processor("ticks")(run)
periodic("* * * * * *", queue="ticks", name="tick", missed="all")


@processor("batched", batch=5)
def batched(tasks: list[Lease]) -> list[Any]:
    kinds = [_started(task) for task in tasks]  # they begin together
    return [_run(task, kind) for task, kind in zip(tasks, kinds, strict=True)]


@processor("steps")
def steps(task: Lease) -> Any:
    _started(task)
    bookings = Booking.objects.using(task.port.alias)

    def book(step: str) -> None:
        row, _ = bookings.get_or_create(reference=f"{task.reference} {step}")
        bookings.filter(pk=row.pk).update(amount=F("amount") + 1)

    for step in STEPS[:-1]:
        task.step(step, book, step)
    task.sleep(timedelta(milliseconds=200))
    received = task.wait_for("approved")
    task.step(STEPS[-1], book, STEPS[-1])
    ledger.write("end", task=task.id, fence=task.total_attempt)
    return Complete([received, task.total_attempt])


@processor("bridged")
def bridged(task: Lease) -> Any:
    _started(task)
    outcome = send_to("site")(task)
    ledger.write("end", task=task.id, fence=task.total_attempt)
    return outcome


@processor("effects", mode="atomic")
def effects(task: Lease) -> Any:
    kind = _started(task)
    Booking.objects.using(task.port.alias).filter(reference=task.reference).update(amount=F("amount") + 1)
    if kind in SECONDS:
        time.sleep(SECONDS[kind])
    return _outcome(task, kind)


@processor("evented")
async def evented(task: Lease) -> Any:
    kind = _started(task)
    if kind in SECONDS:
        await asyncio.sleep(SECONDS[kind])
    return _outcome(task, kind)
