"""Sync processors on threads.

Threads take single jobs from one shared deque. Its ends are atomic, so a fast job costs no lock, and a slow job does
not delay other jobs.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue

from django.db import connections

from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db.liveness import ended_call
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import run, run_all
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Finish, Job, Run
from django_dbtaskqueue.poller.executors.thread_connections import check, tidied, tidy, unless_dead

logger = logging.getLogger(__name__)
BLOCKED_AFTER_SECONDS = 0.005  # in one job: from then on, waiting jobs get another thread
HAND_OVER_SECONDS = 0.001  # at most, from the wake-up of an idle thread until it has the interpreter


class ThreadExecutor(Executor):
    """Runs jobs on at most ``slots`` daemon threads. A thread starts when it is needed."""

    def __init__(self, slots: int, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(finish, limiter)
        self.slots = slots
        self._jobs: list[Job | None] = [None] * slots  # the job of each thread
        self._since = [0.0] * slots  # its start; written before the job, so that a job never seems older than it is
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._threads: list[WatchedThread] = []
        self._idle: set[int] = set()
        self._awake = threading.Event()  # an idle thread has the interpreter
        self._closed = False
        self._lock = threading.Lock()  # only for starting threads

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Append jobs and wake as many threads as they can use.

        If no job runs, wait until a thread has the interpreter. The caller would keep it until its next statement.
        """
        idle = self._jobs.count(None) == self.slots
        self._awake.clear()
        self.todo.extend(jobs)
        if fast:
            self.nudge()
        else:
            self._wake(len(jobs))
        if idle and self._wakeups.qsize():
            self._awake.wait(HAND_OVER_SECONDS)

    def nudge(self) -> None:
        """Wake one more thread if jobs wait and all running threads are in slow jobs.

        Two threads that run fast jobs compete for the interpreter and are no faster than one.
        """
        if not self.todo:
            return
        blocked = clock.monotonic() - BLOCKED_AFTER_SECONDS
        for job, since in zip(self._jobs, self._since, strict=True):
            if job is not None and since >= blocked:
                return
        self._wake(1)

    def busy(self) -> int:
        return self.slots - self._jobs.count(None)

    def running(self) -> list[Run]:
        return [Run(job, since) for job, since in zip(self._jobs, self._since, strict=True) if job is not None]

    def threads(self) -> list[WatchedThread]:
        return self._threads[:]

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
                thread = WatchedThread(target=self._work, args=[slot], name=f"dbtaskqueue-{slot}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self, slot: int) -> None:
        while True:
            while not self.todo:
                if not self._wait_for_job(slot):
                    connections.close_all()
                    return
            check()  # before a job is taken: a wire that stands still would delay it beyond its lease
            try:
                job = self.todo.popleft()
            except IndexError:  # another thread took it
                continue
            self._run(slot, job)

    def _wait_for_job(self, slot: int, seconds: float | None = None) -> bool:
        """Wait; return False if the thread has to end, or after so many seconds."""
        self._idle.add(slot)
        try:
            return self._wakeups.get(timeout=seconds) and not self._closed
        except Empty:
            return False
        finally:
            self._idle.discard(slot)
            self._awake.set()

    def _run(self, slot: int, job: Job) -> None:
        if not job.processor.plain:
            self._run_special(slot, job)
            return
        lease = job.lease
        started = clock.monotonic()
        if started >= lease.deadline:
            self._finish(Done(lease, Release(), 0.0), idle=not self.todo)  # another poller may hold it by now
            return
        self._since[slot], self._jobs[slot] = started, job
        observe.started(lease, job.processor)
        settlement = run(lease, job.processor)
        call = ended_call()
        if call.dead:
            (settlement,) = unless_dead([settlement])
        self._jobs[slot] = None
        ended = clock.monotonic()
        if not self._given_up or not self._is_late(Run(job, started)):
            # Half the time of Done's own function, in Python.
            self._finish(tuple.__new__(Done, (lease, settlement, ended - started)), idle=not self.todo)
        tidy(ended, doubtful=call.doubtful)

    def _run_special(self, slot: int, job: Job) -> None:
        """Run a batch, or a call of a processor with a concurrency limit."""
        current = self._begin(job)
        if current is None:
            return
        job, started = current
        self._since[slot], self._jobs[slot] = started, job
        for lease in job.leases:
            observe.started(lease, job.processor)
        settlements = tidied(run_all(job.leases, job.processor))
        self._jobs[slot] = None
        self._end(current, settlements, clock.monotonic() - started)

    def _put_first(self, jobs: list[Job]) -> None:
        super()._put_first(jobs)
        if len(jobs) > 1:  # this thread takes the first of them
            self._wake(len(jobs) - 1)

    def _is_late(self, run: Run) -> bool:
        late = super()._is_late(run)
        if late:
            seconds = format_seconds(clock.monotonic() - run.started)
            logger.warning("Task %s ended %s after its timeout was written", run.job.lease.id, seconds)
        return late
