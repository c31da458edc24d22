"""Processors whose payload says what they do, so that one of them serves many tests; their queues stand at the end.

A payload is None or an object: ``{"do": VERB, …}``, "ok" by default. ``run(task)`` does it:

ok          Complete(payload.get("result"))
sleep       sleeps ``seconds`` (default 0.05) and completes; on ``aio`` without blocking the event loop
wait        completes as soon as the file ``until`` exists
raise       raises ``RuntimeError(message)``, by default "asked to fail"; ``until_attempt`` n: only before attempt n
fail        Fail(message, retry=payload.get("retry", True))
poison      Poison(reason)
reenqueue   Reenqueue(delay seconds) until that happened ``times`` times (default 1), then completes
delete      CompleteDelete()
exit        ends the process with ``os._exit(code)``; ``until_attempt`` as above
kill        the same by SIGKILL
stop        the same by SIGSTOP, which stops the whole process until SIGCONT; then completes
book        writes ``Booking(reference=task.reference)``, then does what ``then`` (a payload of its own) says
enqueue     enqueues ``queue``, ``reference``, ``payload`` on the task's database, then completes
settle      writes a Booking and settles by ``task.complete()`` itself, both in its own transaction
hold        blocks all signals, starts a program whose id it writes to the file ``program``, books as above, holds the
            interpreter in C for ``seconds`` (default 100), and writes the file ``end``
linger      deletes its row by itself, marks, waits for the file ``until``, and writes the file ``end``
check       asks ``task.check()`` until it raises, and writes the file ``end``
fork        forks; the copy ends the call as ``end`` says (exit, return, raise); completes with the copy's exit code
raise_odd   raises the error ``kind``, which pickle cannot make again

Whatever it does, ``"mark": PATH`` first appends a line "id reference total_attempt pid" to that file: the record of
what was really started, and an event to wait for.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.db import transaction

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Fixed, Poison, Reenqueue, enqueue, processor
from django_dbtaskqueue.core.exceptions import TaskCancelled
from django_dbtaskqueue.core.lease import Lease
from tests.testapp.models import Booking

NEW_RELEASE = "TESTAPP_NEW_RELEASE"  # in the environment of a process that runs the new release
LOOK = 0.01  # seconds between two looks for a file
QUICKLY: dict[str, Any] = {"max_attempts": 3, "retry": Fixed(timedelta(milliseconds=50))}
Verb = Callable[[Lease, dict[str, Any]], Any]
LIMIT: dict[str, Any] = {"max_attempts": 1, "timeout": timedelta(milliseconds=300)}


def run(task: Lease) -> Any:
    payload = task.payload or {}
    mark(task, payload)
    return VERBS[payload.get("do", "ok")](task, payload)


async def run_async(task: Lease) -> Any:
    """``run``, where the verbs that take time let others run meanwhile."""
    payload = task.payload or {}
    verb = payload.get("do", "ok")
    if verb not in ("sleep", "wait"):
        return run(task)
    mark(task, payload)
    if verb == "sleep":
        await asyncio.sleep(payload.get("seconds", 0.05))
    else:
        while not Path(payload["until"]).exists():
            await asyncio.sleep(LOOK)
    return Complete(payload.get("result"))


def mark(task: Lease, payload: dict[str, Any]) -> None:
    """Record the start: one short append, which no other process can tear."""
    if "mark" in payload:
        with open(payload["mark"], "a") as file:
            file.write(f"{task.id} {task.reference} {task.total_attempt} {os.getpid()}\n")


def _ok(task: Lease, payload: dict[str, Any]) -> Complete:
    return Complete(payload.get("result"))


def _sleep(task: Lease, payload: dict[str, Any]) -> Complete:
    time.sleep(payload.get("seconds", 0.05))
    return _ok(task, payload)


def _wait(task: Lease, payload: dict[str, Any]) -> Complete:
    while not Path(payload["until"]).exists():
        time.sleep(LOOK)
    return _ok(task, payload)


def _raise(payload: dict[str, Any]) -> None:
    raise RuntimeError(payload.get("message", "asked to fail"))


def _fork(task: Lease, payload: dict[str, Any]) -> Complete:
    if copy := os.fork():
        return Complete(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
    return end_of_the_copy(payload["end"])


def end_of_the_copy(way: str) -> Complete:
    """End the call in a copy of the process. Its answer is that of no task."""
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise RuntimeError("of the copy")
    return Complete("of the copy")


class ArgumentsLost(Exception):
    def __init__(self, order: int, code: str) -> None:
        super().__init__(f"order {order} was refused with {code}")


class Locked(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def _raise_odd(task: Lease, payload: dict[str, Any]) -> Complete:
    raise ArgumentsLost(7, "E5") if payload["kind"] == "ArgumentsLost" else Locked("order 7 was refused with E5")


def _at_first(act: Callable[[dict[str, Any]], object]) -> Verb:
    """What goes wrong, but at the attempts after ``until_attempt``."""

    def do(task: Lease, payload: dict[str, Any]) -> Complete:
        if "until_attempt" not in payload or task.attempt < payload["until_attempt"]:
            act(payload)
        return _ok(task, payload)

    return do


def _reenqueue(task: Lease, payload: dict[str, Any]) -> Any:
    if task.reenqueue_attempt >= payload.get("times", 1):
        return _ok(task, payload)
    return Reenqueue(timedelta(seconds=payload.get("delay", 0)))


def _book(task: Lease, payload: dict[str, Any]) -> Any:
    Booking.objects.using(task.port.alias).create(reference=task.reference, amount=task.attempt)
    then = payload.get("then", {})
    return VERBS[then.get("do", "ok")](task, then)


def _enqueue(task: Lease, payload: dict[str, Any]) -> Complete:
    enqueue(payload["queue"], payload.get("reference"), payload.get("payload"), using=task.port.alias)
    return Complete()


def _settle(task: Lease, payload: dict[str, Any]) -> None:
    with transaction.atomic(using=task.port.alias):
        Booking.objects.using(task.port.alias).create(reference=task.reference, amount=task.attempt)
        task.complete(payload.get("result"))


def _hold(task: Lease, payload: dict[str, Any]) -> Complete:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    Path(payload["program"]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    Booking.objects.using(task.port.alias).create(reference=task.reference, amount=task.attempt)
    ctypes.PyDLL(None).sleep(payload.get("seconds", 100))
    Path(payload["end"]).touch()
    return _ok(task, payload)


def _linger(task: Lease, payload: dict[str, Any]) -> None:
    task.complete_delete()
    mark(task, {"mark": payload["settled"]})
    _wait(task, payload)
    Path(payload["end"]).touch()


def _check(task: Lease, payload: dict[str, Any]) -> None:
    try:
        while not task.cancelled:
            time.sleep(LOOK)
        task.check()
    except TaskCancelled:
        Path(payload["end"]).touch()
        raise


NAMED = (_ok, _sleep, _wait, _reenqueue, _book, _enqueue, _settle, _hold, _check, _linger, _fork, _raise_odd)
VERBS: dict[str, Verb] = {
    **{verb.__name__[1:]: verb for verb in NAMED},
    "raise": _at_first(_raise),
    "fail": lambda _, payload: Fail(payload.get("message", "asked to fail"), retry=payload.get("retry", True)),
    "poison": lambda _, payload: Poison(payload.get("reason", "asked to poison")),
    "delete": lambda _, payload: CompleteDelete(),
    "exit": _at_first(lambda payload: os._exit(payload.get("code", 7))),
    "kill": _at_first(lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "stop": _at_first(lambda _: os.kill(os.getpid(), signal.SIGSTOP)),
}


@dataclass
class Order:
    """A payload that only the new release of a rolling release has a processor for."""

    number: int


def run_batch(tasks: list[Lease]) -> list[Any]:
    return [run(task) for task in tasks]


processor("work", **QUICKLY)(run)
processor("other", **QUICKLY)(run)
processor("atomic", mode="atomic", **QUICKLY)(run)
processor("aio", **QUICKLY)(run_async)
processor("brief", lease=timedelta(seconds=1), **QUICKLY)(run)
processor("apart", executor="process", **QUICKLY)(run)
processor("aparta", executor="process", mode="atomic", **QUICKLY)(run)
processor("apartb", executor="process", batch=2, **QUICKLY)(run_batch)
processor("apartt", executor="process", **LIMIT)(run)
processor("timed", **LIMIT)(run)
processor("aiotimed", **LIMIT)(run_async)
if NEW_RELEASE in os.environ:
    processor("work", payload=Order, **QUICKLY)(lambda task: task.payload.number)
