"""Sync processors on threads.

Threads take single jobs from one shared deque. Its ends are atomic, so a fast job costs no lock, and a slow job does
not delay other jobs.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver

from django_dbtaskqueue.core.durations import format_seconds
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import run, run_all
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Finish, Job, Run

logger = logging.getLogger(__name__)
BLOCKED_AFTER_SECONDS = 0.005  # in one job: from then on, waiting jobs get another thread


class ThreadExecutor(Executor):
    """Runs jobs on at most ``slots`` daemon threads. A thread starts when it is needed."""

    def __init__(self, slots: int, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(finish, limiter)
        self.slots = slots
        self._jobs: list[Job | None] = [None] * slots  # the job of each thread
        self._since = [0.0] * slots  # its start; written before the job, so that a job never seems older than it is
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()  # only for starting threads

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Append jobs and wake as many threads as they can use."""
        self.todo.extend(jobs)
        if fast:
            self.nudge()
        else:
            self._wake(len(jobs))

    def nudge(self) -> None:
        """Wake one more thread if jobs wait and all running threads are in slow jobs.

        Two threads that run fast jobs compete for the interpreter and are no faster than one.
        """
        if not self.todo:
            return
        blocked = monotonic() - BLOCKED_AFTER_SECONDS
        for job, since in zip(self._jobs, self._since, strict=True):
            if job is not None and since >= blocked:
                return
        self._wake(1)

    def busy(self) -> int:
        return self.slots - self._jobs.count(None)

    def running(self) -> list[Run]:
        return [Run(job, since) for job, since in zip(self._jobs, self._since, strict=True) if job is not None]

    def cancel(self) -> None:
        """Do nothing: Python cannot interrupt a thread."""

    def close(self) -> None:
        """End idle threads and their connections. A thread that runs a task is left alone."""
        self._closed = True
        for _ in self._threads:
            self._wakeups.put(False)
        for slot, thread in enumerate(self._threads):
            if self._jobs[slot] is None:
                thread.join(timeout=1)

    def _wake(self, wanted: int) -> None:
        idle = len(self._idle) - self._wakeups.qsize()
        for _ in range(min(wanted, max(idle, 0))):
            self._wakeups.put(True)
        if wanted <= idle or len(self._threads) >= self.slots:
            return
        with self._lock:
            for slot in range(len(self._threads), min(len(self._threads) + wanted - idle, self.slots)):
                thread = threading.Thread(target=self._work, args=[slot], name=f"dbtaskqueue-{slot}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self, slot: int) -> None:
        while True:
            try:
                job = self.todo.popleft()
            except IndexError:
                if not self._wait_for_job(slot):
                    connections.close_all()
                    return
                continue
            self._run(slot, job)

    def _wait_for_job(self, slot: int) -> bool:
        """Wait; return False if the thread has to end."""
        self._idle.add(slot)
        try:
            return self._wakeups.get() and not self._closed
        finally:
            self._idle.discard(slot)

    def _run(self, slot: int, job: Job) -> None:
        if not job.processor.plain:
            self._run_special(slot, job)
            return
        lease = job.lease
        started = monotonic()
        if started >= lease.deadline:
            self._finish(Done(lease, Release(), 0.0), idle=not self.todo)  # another poller may hold it by now
            return
        self._since[slot], self._jobs[slot] = started, job
        observe.started(lease)
        settlement = run(lease, job.processor)
        self._jobs[slot] = None
        if not self._given_up or not self._is_late(Run(job, started)):
            self._finish(Done(lease, settlement, monotonic() - started), idle=not self.todo)
        tidy()

    def _run_special(self, slot: int, job: Job) -> None:
        """Run a batch, or a call of a processor with a concurrency limit."""
        current = self._begin(job)
        if current is None:
            return
        job, started = current
        self._since[slot], self._jobs[slot] = started, job
        for lease in job.leases:
            observe.started(lease)
        settlements = run_all(job.leases, job.processor)
        self._jobs[slot] = None
        tidy()
        self._end(current, settlements, monotonic() - started)

    def _put_first(self, jobs: list[Job]) -> None:
        super()._put_first(jobs)
        if len(jobs) > 1:  # this thread takes the first of them
            self._wake(len(jobs) - 1)

    def _is_late(self, run: Run) -> bool:
        late = super()._is_late(run)
        if late:
            seconds = format_seconds(monotonic() - run.started)
            logger.warning("Task %s ended %s after its timeout was written", run.job.lease.id, seconds)
        return late


class _Opened(threading.local):
    """The Django connections of a thread; ``changed`` if it opened one since the list was made."""

    def __init__(self) -> None:
        self.connections: list[BaseDatabaseWrapper] = []
        self.changed = True


_opened = _Opened()


@receiver(connection_created)
def _note(**_: object) -> None:
    _opened.changed = True


def tidy() -> None:
    """Close each connection that would harm the next task: broken, too old, or in an open transaction."""
    if _opened.changed:
        _opened.connections, _opened.changed = list(connections.all(initialized_only=True)), False
    for connection in _opened.connections:
        if connection.connection is None:
            continue
        if connection.in_atomic_block or not connection.autocommit:
            with suppress(Exception):  # even close() may fail on a broken connection
                connection.in_atomic_block = connection.closed_in_transaction = False
                connection.close()
        elif connection.settings_dict["OPTIONS"].get("pool"):
            connection.close()  # back to the pool, which may hold fewer connections than there are threads
        elif connection.errors_occurred or _aged(connection):
            connection.close_if_unusable_or_obsolete()


def _aged(connection: BaseDatabaseWrapper) -> bool:
    """Whether a connection is older than CONN_MAX_AGE. With 0 it is kept, because the next task follows at once."""
    return bool(connection.settings_dict["CONN_MAX_AGE"] and connection.close_at and monotonic() >= connection.close_at)
