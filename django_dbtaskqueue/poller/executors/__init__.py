"""What all executors share: the job, its outcomes, and the limit of a processor's concurrent calls.

An executor runs jobs and returns their outcomes. It never writes to the database.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Outcome, Release, Settlement
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db.liveness import DatabaseUse, database_use
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import Processor, decide, smoothed

LOST = 0.0  # deadline of a lease that is lost


class Job(NamedTuple):
    """One call of a processor: with one lease, or as a batch with the rest of its leases."""

    lease: Lease
    processor: Processor
    rest: tuple[Lease, ...] = ()

    @property
    def leases(self) -> tuple[Lease, ...]:
        return (self.lease, *self.rest)


class Done(NamedTuple):
    """One lease's outcome; None if the processor settled the task itself. ``seconds`` is the run time."""

    lease: Lease
    settlement: Settlement | None
    seconds: float


class Answer(NamedTuple):
    """The outcome of one lease, as it comes back from another process or host."""

    outcome: Outcome | Settlement | None
    settled: Settlement | None  # by the processor itself
    lost: str
    seconds: float = 0.0  # run time, if the executor measured it; 0: use the time between submit and answer


class Run(NamedTuple):
    """One job that runs now; ``started`` is a ``clock.monotonic()``."""

    job: Job
    started: float


class Finish(Protocol):
    """The function that receives an executor's outcomes."""

    def __call__(self, done: Done, *, idle: bool) -> None:
        """Take an outcome; ``idle`` if no job waits for the slot that became free."""


@dataclass(slots=True)
class _CallState:
    """The calls of one processor. A running call has a slot or waits for a slot only."""

    running: int = 0
    waiting: deque[Job] = field(default_factory=deque)
    mean_seconds: float | None = None  # of one call, smoothed


class ConcurrencyLimiter:
    """Limits the concurrent calls of each queue and payload type. Calls over the limit wait here and take no slot."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, type | None], _CallState] = {}
        self._lock = threading.Lock()

    def admit(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs of one processor that may run now; the others wait."""
        if (limit := jobs[0].processor.concurrency) is None:
            return jobs
        with self._lock:
            calls = self._calls_of(jobs[0].processor)
            admitted = jobs[: max(0, limit - calls.running)]
            calls.running += len(admitted)
            calls.waiting.extend(jobs[len(admitted) :])
        return admitted

    def release(self, processor: Processor, seconds: float | None) -> list[Job]:
        """Note that a call ended after ``seconds`` (None: it never began); return the jobs that may run instead."""
        if processor.concurrency is None:
            return []
        with self._lock:
            calls = self._calls_of(processor)
            calls.running -= 1
            if seconds is not None:
                calls.mean_seconds = smoothed(calls.mean_seconds, seconds)
            free = max(0, processor.concurrency - calls.running)
            admitted = [calls.waiting.popleft() for _ in range(min(free, len(calls.waiting)))]
            calls.running += len(admitted)
        return admitted

    def load(self, processor: Processor) -> tuple[int, float | None]:
        """Return how many calls of a processor run or wait, and the mean seconds of one."""
        with self._lock:
            calls = self._calls_of(processor)
            return calls.running + len(calls.waiting), calls.mean_seconds

    def withdraw(self, *, only_async: bool = False) -> list[Job]:
        """Take back and return all waiting jobs."""
        with self._lock:
            waiting = [calls.waiting for calls in self._calls.values() if calls.waiting]
            chosen = [jobs for jobs in waiting if jobs[0].processor.is_async or not only_async]
            withdrawn = [job for jobs in chosen for job in jobs]
            for jobs in chosen:
                jobs.clear()
        return withdrawn

    def _calls_of(self, processor: Processor) -> _CallState:
        return self._calls.setdefault((processor.queue, processor.payload), _CallState())


def done_by_lease(job: Job, settlements: Sequence[Settlement | None], seconds: float) -> Iterator[Done]:
    """Yield the outcome of each lease of a job, with an equal part of the job's seconds."""
    for lease, settlement in zip(job.leases, settlements, strict=True):
        yield Done(lease, settlement, seconds / len(settlements))


def stopped(job: Job, failure: Fail) -> list[Settlement | None]:
    """Return what is to be written of a job that was ended from outside.

    If it was ended because a lease of it is lost, its other tasks are released: they have done nothing wrong.
    """
    spared = Release() if any(lease.deadline == LOST for lease in job.leases) else None
    return [
        None if lease.settled else spared if spared and lease.deadline != LOST else decide(lease, failure)
        for lease in job.leases
    ]


class Executor:
    """What all executors are: the jobs that wait, those that run, and what a job's beginning and end mean."""

    slots: int  # how many jobs may run at a time
    blocked = False  # it begins no job for now, and is given none
    tells_late_ends = False  # it cannot end a job: one that was given up ends some time, and that is logged

    def __init__(self, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        self.todo: deque[Job] = deque()  # the jobs that wait for a slot
        # Those that run, each under its slot. A job past its timeout is one of them until it really ends.
        self.runs: dict[Hashable, Run] = {}
        self.threads: list[WatchedThread] = []  # that run until ``close``
        self._finish = finish
        self._limiter = limiter
        self._given_up: set[Run] = set()
        self._giving_up = threading.Lock()  # several threads look for runs to give up; each run has one outcome

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Run jobs in order, as slots become free. ``fast`` jobs end before a second slot could start one."""
        self.todo.extend(jobs)
        self.nudge()

    def withdraw(self) -> Iterator[Job]:
        """Take back and yield the jobs that wait for a slot."""
        with suppress(IndexError):  # another thread was faster
            while self.todo:
                yield self.todo.popleft()

    @abstractmethod
    def nudge(self) -> None:
        """Start waiting jobs if slots are free."""

    def running(self) -> list[Run]:
        """Return the running jobs."""
        return list(self.runs.copy().values())

    def overrun(self, run: Run) -> bool:
        """Give up a job past its timeout; False if it has just ended. Its slot becomes free when it ends."""
        with self._giving_up:
            if run in self._given_up or run not in self.running():
                return False
            self._given_up.add(run)
        self.stop(run, at_once=True)
        return True

    def look(self) -> None:
        """Find out whether it is ``blocked``. Called a few times per second."""

    def stop(self, run: Run, *, at_once: bool = False) -> None:
        """End a job, because a lease of it is lost, or it was given up: then ``at_once``.

        Here nothing can: its function sees ``task.cancelled``.
        """

    def cancel(self) -> None:
        """Take back the jobs that have not begun where they were sent. Those that run are given up one by one."""

    def close(self) -> None:
        """Take no more jobs and end idle slots."""

    def _begin(self, slot: Hashable, job: Job) -> Run | None:
        """Tell that a job starts; return it without leases that ran out meanwhile: others may hold their tasks."""
        database_use.set(DatabaseUse())
        now = clock.monotonic()
        held = [lease for lease in job.leases if now < lease.deadline]
        self._release(set(job.leases).difference(held))
        if not held:
            self._put_first(self._limiter.release(job.processor, None))
            return None
        job = job._replace(lease=held[0], rest=tuple(held[1:]))
        for lease in held:
            observe.started(lease, job.processor)
        self.runs[slot] = run = Run(job, now)
        return run

    def _end(self, slot: Hashable, settlements: Sequence[Settlement | None], seconds: float = 0.0) -> None:
        """Start the next call of the processor, and report the outcomes. ``seconds``: if another clock has them."""
        run = self.runs.pop(slot)
        seconds = seconds or clock.monotonic() - run.started
        self._put_first(self._limiter.release(run.job.processor, seconds))
        if not self._is_late(run):
            for done in done_by_lease(run.job, settlements, seconds):
                self._finish(done, idle=not self.todo)

    def _release(self, leases: Iterable[Lease]) -> None:
        """Give back tasks that have not started, uncharged."""
        for lease in leases:
            self._finish(Done(lease, Release(), 0.0), idle=True)

    def _put_first(self, jobs: list[Job]) -> None:
        self.todo.extendleft(reversed(jobs))

    def _is_late(self, run: Run) -> bool:
        """Whether the run was given up before it ended; its failure is then already written."""
        late = run in self._given_up
        self._given_up.discard(run)
        if late and self.tells_late_ends:
            seconds = format_seconds(clock.monotonic() - run.started)
            logger.warning("Task %s ended %s after its timeout was written", run.job.lease.id, seconds)
        return late
