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
========= ============================================================================================================

Each writes its start and its end into the ledger. A task of the queue "effects" also adds 1 to the amount of the
Booking that has its reference.
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

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Poison, Reenqueue, processor
from django_dbtaskqueue.core.lease import Lease
from tests.chaos.crashing import overflow
from tests.faults import mutations
from tests.faults.ledger import Ledger
from tests.faults.sizes import LEASE_S
from tests.testapp.models import Booking

SECONDS = {"slow": 2.0, "late": 2.0, "gone": 2.0, "long": LEASE_S * 1.5, "last": LEASE_S * 1.5}
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
    **dict.fromkeys(("delete", "gone")),
    "poison": "POISON",
    **dict.fromkeys(("segfault", "overflow", "exit", "kill"), "ERROR"),
}
ledger = Ledger()


def _started(task: Lease) -> str:
    """Write the start of a task; return its kind."""
    ledger.write("start", task=task.id, fence=task.total_attempt, reference=task.reference)
    return str(task.reference).partition("-")[0]


def _outcome(task: Lease, kind: str) -> Any:
    """Return the outcome of a task, and write its end."""
    outcome: Any = Complete(task.total_attempt)
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
    kind = _started(task)
    if kind in DEADLY:
        DEADLY[kind]()
    if kind in SECONDS:
        time.sleep(SECONDS[kind])
    return _outcome(task, kind)


for queue in ("plain", "small", "grouped", "last", "lethal"):
    processor(queue)(run)


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


if mutation := os.environ.get("FAULTS_MUTATION"):
    mutations.apply(mutation)
