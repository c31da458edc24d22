"""Sync processors on threads.

Threads take single jobs from a shared deque, whose ends are atomic, so that a slow job never holds up others and a
fast one costs no lock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver

from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import run, run_all
from django_dbtaskqueue.poller.executors import Done, Finish, Job, Run, shared, still_held
from django_dbtaskqueue.poller.executors.concurrency import Gates

logger = logging.getLogger(__name__)
STUCK = 0.005  # seconds in one job after which others do not wait for its thread


class ThreadExecutor:
    """Runs jobs on ``slots`` daemon threads, started as they are needed."""

    def __init__(self, slots: int, finish: Finish, gates: Gates) -> None:
        self.slots = slots
        self.todo: deque[Job] = deque()
        self._finish = finish
        self._gates = gates
        self._jobs: list[Job | None] = [None] * slots  # what each thread runs, and
        self._since = [0.0] * slots  # since when; written first, so that no job is ever seen older than it is
        self._given_up: set[Run] = set()
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._resting: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()  # only for starting threads

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Queue jobs and wake as many threads as they can use."""
        self.todo.extend(jobs)
        if fast:
            self.nudge()
        else:
            self._wake(len(jobs))

    def nudge(self) -> None:
        """Wake one more thread when jobs wait and the one woken before is stuck in a slow job.

        Two threads that run fast jobs only take the interpreter from each other.
        """
        stuck = monotonic() - STUCK
        going = (job is not None and since >= stuck for job, since in zip(self._jobs, self._since, strict=True))
        if self.todo and not any(going):
            self._wake(1)

    def busy(self) -> int:
        """Return how many threads run a job."""
        return self.slots - self._jobs.count(None)

    def running(self) -> list[Run]:
        """Return what runs now."""
        return [Run(job, since) for job, since in zip(self._jobs, self._since, strict=True) if job is not None]

    def overrun(self, run: Run) -> bool:
        """Forget a run: a thread cannot be stopped, so its slot stays taken until it ends."""
        if run in self._given_up or run not in self.running():
            return False
        self._given_up.add(run)
        return True

    def cancel(self) -> None:
        """Nothing to do: Python cannot interrupt a thread."""

    def close(self) -> None:
        """Let idle threads end, and with them their connections. A thread stuck in a task is left behind."""
        self._closed = True
        for _ in self._threads:
            self._tokens.put(False)
        for slot, thread in enumerate(self._threads):
            if self._jobs[slot] is None:
                thread.join(timeout=1)

    def _wake(self, wanted: int) -> None:
        idle = len(self._resting) - self._tokens.qsize()
        for _ in range(min(wanted, max(idle, 0))):
            self._tokens.put(True)
        if wanted > idle and len(self._threads) < self.slots:
            self._start(wanted - idle)

    def _start(self, wanted: int) -> None:
        with self._lock:
            for slot in range(len(self._threads), min(len(self._threads) + wanted, self.slots)):
                thread = threading.Thread(target=self._work, args=[slot], name=f"dbtaskqueue-{slot}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self, slot: int) -> None:
        while True:
            try:
                job = self.todo.popleft()
            except IndexError:
                if not self._rest(slot):
                    connections.close_all()
                    return
                continue
            self._run(slot, job)

    def _rest(self, slot: int) -> bool:
        """Wait for work; False at the end."""
        self._resting.add(slot)
        try:
            return self._tokens.get() and not self._closed
        finally:
            self._resting.discard(slot)

    def _run(self, slot: int, job: Job) -> None:
        if not job.processor.plain:
            self._run_special(slot, job)
            return
        lease = job.lease
        started = monotonic()
        if started >= lease.deadline:
            self._finish(Done(lease, Release(), 0.0), idle=not self.todo)  # somebody else may hold it by now
            return
        self._since[slot], self._jobs[slot] = started, job
        observe.started(lease)
        settlement = run(lease, job.processor)
        self._jobs[slot] = None
        if not self._given_up or not self._is_late(Run(job, started)):
            self._finish(Done(lease, settlement, monotonic() - started), idle=not self.todo)
        tidy()

    def _run_special(self, slot: int, job: Job) -> None:
        """Run a batch, or a call of a processor that may have only so many."""
        started = monotonic()
        held = still_held(job, started, self._finish)
        if held is None:
            self._enter(self._gates.leave(job.processor, None))
            return
        self._since[slot], self._jobs[slot] = started, held
        for lease in held.leases:
            observe.started(lease)
        settlements = run_all(held.leases, held.processor)
        self._jobs[slot] = None
        tidy()
        seconds = monotonic() - started
        self._enter(self._gates.leave(job.processor, seconds))
        if not self._is_late(Run(held, started)):
            for done in shared(held, settlements, seconds):
                self._finish(done, idle=not self.todo)

    def _enter(self, jobs: list[Job]) -> None:
        """Put jobs that a gate let in first in line; this thread goes on with the first of them."""
        self.todo.extendleft(reversed(jobs))
        if len(jobs) > 1:
            self._wake(len(jobs) - 1)

    def _is_late(self, run: Run) -> bool:
        """Whether the run was given up meanwhile, and its failure written."""
        if run not in self._given_up:
            return False
        self._given_up.discard(run)
        late = monotonic() - run.started
        logger.warning("Task %s ended %.1f s after its timeout was written", run.job.lease.id, late)
        return True


class _Opened(threading.local):
    """The connections a thread has opened so far, and whether it opened one since it last looked."""

    def __init__(self) -> None:
        self.connections: list[BaseDatabaseWrapper] = []
        self.anew = True


_opened = _Opened()


@receiver(connection_created)
def _note(**_: object) -> None:
    _opened.anew = True


def tidy() -> None:
    """Leave no connection behind that the next task would stumble over: broken, aged, or in an open transaction."""
    if _opened.anew:
        _opened.connections, _opened.anew = list(connections.all(initialized_only=True)), False
    for connection in _opened.connections:
        if connection.connection is None:
            continue
        if connection.in_atomic_block or not connection.autocommit:
            with suppress(Exception):  # a connection this broken may not even close
                connection.in_atomic_block = connection.closed_in_transaction = False
                connection.close()
        elif connection.settings_dict["OPTIONS"].get("pool"):
            connection.close()  # back into the pool: there may be fewer connections in it than threads
        elif connection.errors_occurred or _aged(connection):
            connection.close_if_unusable_or_obsolete()


def _aged(connection: BaseDatabaseWrapper) -> bool:
    """Whether a persistent connection is past its age. CONN_MAX_AGE 0 keeps it: tasks follow each other."""
    return bool(connection.settings_dict["CONN_MAX_AGE"] and connection.close_at and monotonic() >= connection.close_at)
