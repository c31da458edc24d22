"""Where processors run. An executor takes jobs and hands back what became of them; it never writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release, Settlement
from django_dbtaskqueue.flow.run import Processor


class Job(NamedTuple):
    """One call of a processor: with one lease, or as a batch with the rest of its leases."""

    lease: Lease
    processor: Processor
    rest: tuple[Lease, ...] = ()

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases of the call."""
        return (self.lease, *self.rest)


class Done(NamedTuple):
    """One lease's outcome; None when the processor settled it by itself. ``seconds`` is the time it ran."""

    lease: Lease
    settlement: Settlement | None
    seconds: float


class Run(NamedTuple):
    """One job under way; ``started`` is of ``time.monotonic()``."""

    job: Job
    started: float


class Executor(Protocol):
    """What the loop asks of a place where processors run."""

    @property
    def slots(self) -> int:
        """How many jobs may run at a time."""

    @property
    def todo(self) -> deque[Job]:
        """The jobs that wait for a slot."""

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Run these, in order as slots come free. ``fast`` hints that one slot will be done before another wakes."""

    def nudge(self) -> None:
        """See that waiting jobs find a free slot."""

    def busy(self) -> int:
        """Return how many slots are taken."""

    def running(self) -> list[Run]:
        """Return what runs now, overrun jobs included: their slots are taken until they really end."""

    def overrun(self, run: Run) -> bool:
        """Give up on a job whose time is over; False if it just ended by itself. Its slot frees when it ends."""

    def cancel(self) -> None:
        """Interrupt what can be interrupted."""

    def close(self) -> None:
        """Take no more jobs; let idle slots end."""


class Finish(Protocol):
    """Where an executor hands its outcomes."""

    def __call__(self, done: Done, *, idle: bool) -> None:
        """Take an outcome; ``idle`` when no job waits for the slot that came free."""


def still_held(job: Job, now: float, finish: Finish) -> Job | None:
    """Return the job without leases that ran out while they waited: somebody else may hold those by now."""
    held = [lease for lease in job.leases if now < lease.deadline]
    if len(held) == len(job.leases):
        return job
    for lease in job.leases:
        if now >= lease.deadline:
            finish(Done(lease, Release(), 0.0), idle=True)
    return job._replace(lease=held[0], rest=tuple(held[1:])) if held else None


def shared(job: Job, settlements: Sequence[Settlement | None], seconds: float) -> Iterator[Done]:
    """Yield what became of each lease of a job that took so long."""
    for lease, settlement in zip(job.leases, settlements, strict=True):
        yield Done(lease, settlement, seconds / len(settlements))
