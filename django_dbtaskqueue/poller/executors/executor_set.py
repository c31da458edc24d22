"""The executors of one poller, and which of them runs a processor."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Executor, Finish, Job
from django_dbtaskqueue.poller.executors.asyncio import AsyncExecutor
from django_dbtaskqueue.poller.executors.pool import PoolExecutor
from django_dbtaskqueue.poller.executors.thread import ThreadExecutor

PROCESSOR = attrgetter("processor")


class Placement(NamedTuple):
    """The processors of one queue and their executors."""

    processors: tuple[Processor, ...]
    executors: frozenset[Executor]
    executor: Executor | None  # set if the queue has one executor, and at most one processor, which is plain
    one_limit: bool  # False: the processors have room for different numbers of tasks


UNPLACED = Placement((), frozenset(), None, one_limit=True)  # until the first fetch


class Executors:
    """Threads, one event loop, and one pool for each executor that a processor brings along."""

    def __init__(self, threads: int, coroutines: int, finish: Finish, default: object = None) -> None:
        """``default`` runs plain functions whose processors name no executor; None: threads of this process."""
        self._finish = finish
        self._default = default
        self.limiter = ConcurrencyLimiter()
        self._threads = ThreadExecutor(threads, finish, self.limiter)
        self._coroutine_slots = coroutines
        self._coroutines: AsyncExecutor | None = None  # made for the first async processor
        self._pools: list[tuple[object, PoolExecutor]] = []
        self._lock = threading.Lock()
        self.all: list[Executor] = [self._threads]  # those in use; threads always are
        self.placed: set[Executor] = set()  # those with a processor of a polled queue

    def of(self, processor: Processor | None) -> Executor:
        """Return the executor of a processor; raise ``ImproperlyConfigured`` if ``executor=`` is not an executor."""
        if processor is None:
            return self._threads
        if processor.is_async:
            with self._lock:
                if self._coroutines is None:
                    self._coroutines = AsyncExecutor(self._coroutine_slots, self._finish, self.limiter)
                    self.all.append(self._coroutines)
            return self._coroutines
        wanted = self._default if processor.executor is None else processor.executor
        if wanted is None:
            return self._threads
        with self._lock:
            for given, pool in self._pools:
                if given is wanted or (isinstance(given, str) and given == wanted):
                    return pool
            pool = PoolExecutor(wanted, self._finish, self.limiter)
            self._pools.append((wanted, pool))
            self.all.append(pool)
        return pool

    def place(self, processors: tuple[Processor, ...]) -> Placement:
        """Return where the processors of one queue run. Tasks without a processor count as jobs of threads."""
        executors = frozenset(map(self.of, processors or (None,)))
        self.placed |= executors
        plain = all(processor.plain for processor in processors)
        executor = next(iter(executors)) if len(processors) < 2 and plain else None
        return Placement(processors, executors, executor, len(processors) < 2 or (len(executors) == 1 and plain))

    def slots(self, queues: Iterable[str]) -> int:
        """Return how many jobs can run at a time in the executors of these queues' processors."""
        used = {self.of(processor) for queue in queues for processor in registry.processors(queue)}
        return sum(executor.slots for executor in used or {self._threads})

    def waiting(self) -> bool:
        """Whether a job waits for a slot."""
        for executor in self.all:  # noqa: SIM110 -- a generator costs a call for each executor, at each poll
            if executor.todo:
                return True
        return False

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Run jobs of plain processors, in order."""
        processors = set(map(PROCESSOR, jobs))
        if len(processors) == 1:
            self.of(jobs[0].processor).submit(jobs, fast=fast)
            return
        executors = {processor: self.of(processor) for processor in processors}
        for executor in set(executors.values()):
            executor.submit([job for job in jobs if executors[job.processor] is executor], fast=fast)

    def submit_special(self, processor: Processor, leases: list[Lease]) -> None:
        """Run tasks of a processor that takes batches or has a concurrency limit."""
        size = processor.batch or 1
        chunks = [leases[start : start + size] for start in range(0, len(leases), size)]
        admitted = self.limiter.admit([Job(chunk[0], processor, tuple(chunk[1:])) for chunk in chunks])
        if admitted:
            self.of(processor).submit(admitted, fast=False)

    def nudge(self) -> None:
        """Start waiting jobs if slots are free."""
        for executor in self.all:
            executor.nudge()

    def withdraw(self) -> list[Job]:
        """Take back and return the jobs that have not started."""
        jobs = self.limiter.withdraw()
        for executor in self.all:
            while executor.todo:
                try:
                    jobs.append(executor.todo.popleft())
                except IndexError:
                    break
        return jobs
