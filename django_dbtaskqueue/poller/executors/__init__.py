"""Where processors run. An executor takes leases and hands back what became of them; it never writes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from django_dbtaskqueue.flow.process import Processor
from django_dbtaskqueue.flow.settle import Settlement
from django_dbtaskqueue.lease import Lease


class Job(NamedTuple):
    """One lease and who processes it."""

    lease: Lease
    processor: Processor


class Done(NamedTuple):
    """One lease's outcome; None when the processor settled it by itself. ``seconds`` is the time it ran."""

    lease: Lease
    settlement: Settlement | None
    seconds: float


class Run(NamedTuple):
    """One task under way; ``started`` is of ``time.monotonic()``."""

    job: Job
    started: float


class Executor(Protocol):
    """What the loop asks of a place where processors run."""

    slots: int
    todo: deque[Job]

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Run these, in order as slots come free. ``fast`` hints that one slot will be done before another wakes."""

    def nudge(self) -> None:
        """See that waiting jobs find a free slot."""

    def busy(self) -> int:
        """Return how many slots are taken."""

    def running(self) -> list[Run]:
        """Return what runs now, overrun tasks included: their slots are taken until they really end."""

    def overrun(self, run: Run) -> bool:
        """Give up on a task whose time is over; False if it just ended by itself. Its slot frees when it ends."""

    def cancel(self) -> None:
        """Interrupt what can be interrupted."""

    def close(self) -> None:
        """Take no more jobs; let idle slots end."""


class Finish(Protocol):
    """Where an executor hands its outcomes."""

    def __call__(self, done: Done, *, idle: bool) -> None:
        """Take an outcome; ``idle`` when no job waits for the slot that came free."""
