"""Where the processors of one poller run, and how many of their tasks there is room for."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.poller.executors import Executor, Finish, Job
from django_dbtaskqueue.poller.executors.asyncio import AsyncExecutor
from django_dbtaskqueue.poller.executors.concurrency import Gates
from django_dbtaskqueue.poller.executors.pool import PoolExecutor
from django_dbtaskqueue.poller.executors.thread import ThreadExecutor


class Places:
    """The executors: threads, an event loop, and those that processors bring along, made as they are met."""

    def __init__(self, threads: int, coroutines: int, finish: Finish, elsewhere: Any = None) -> None:
        """``elsewhere`` is the executor of plain functions whose processors bring none along; None: our threads."""
        self._finish = finish
        self._elsewhere = elsewhere
        self._gates = Gates()
        self._sync = ThreadExecutor(threads, finish, self._gates)
        self._async = AsyncExecutor(coroutines, finish, self._gates)
        self._pools: list[tuple[object, PoolExecutor]] = []
        self._lock = threading.Lock()
        self.executors: list[Executor] = [self._sync, self._async]

    def of(self, processor: Processor | None) -> Executor:
        """Return where a processor runs; raise ``ImproperlyConfigured`` for an ``executor=`` that is none."""
        if processor is None:
            return self._sync
        if processor.is_async:
            return self._async
        wanted = self._elsewhere if processor.executor is None else processor.executor
        if wanted is None:
            return self._sync
        with self._lock:
            for given, pool in self._pools:
                if given is wanted or (isinstance(given, str) and given == wanted):
                    return pool
            pool = PoolExecutor(wanted, self._finish, self._gates)
            self._pools.append((wanted, pool))
            self.executors.append(pool)
        return pool

    def used(self, queues: Iterable[str]) -> list[Executor]:
        """Return the executors that processors of these queues run in."""
        found = {self.of(processor): None for queue in queues for processor in registry.processors(queue)}
        return list(found) or [self._sync]

    def slots(self, processor: Processor | None) -> int:
        """Return how many more tasks of a processor would find a slot at once; below zero when some wait already."""
        executor = self.of(processor)
        free = executor.slots - len(executor.todo) - executor.busy()
        return free * (processor.batch or 1) if processor is not None else free

    def allowed(self, processor: Processor | None) -> int | None:
        """Return how many more tasks of a processor its ``concurrency`` lets us take; None: any number."""
        calls = None if processor is None else self._gates.room(processor)
        return calls * (processor.batch or 1) if processor is not None and calls is not None else None

    def waiting(self, processor: Processor | None) -> int:
        """Return how many jobs wait for a slot where a processor runs."""
        return len(self.of(processor).todo)

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Run jobs of plain processors, in order."""
        processors = {job.processor for job in jobs}
        places = {processor: self.of(processor) for processor in processors}
        for executor in set(places.values()):
            group = [job for job in jobs if places[job.processor] is executor] if len(processors) > 1 else jobs
            executor.submit(group, fast=fast)

    def submit_special(self, processor: Processor, leases: list[Lease]) -> None:
        """Run tasks of one processor in its batches, as many at a time as it may have."""
        size = processor.batch or 1
        chunks = [leases[start : start + size] for start in range(0, len(leases), size)]
        admitted = self._gates.enter([Job(chunk[0], processor, tuple(chunk[1:])) for chunk in chunks])
        if admitted:
            self.of(processor).submit(admitted, fast=False)

    def nudge(self) -> None:
        """See that waiting jobs find a free slot."""
        for executor in self.executors:
            executor.nudge()

    def withdraw(self) -> list[Job]:
        """Take back what has not started."""
        jobs = self._gates.withdraw()
        for executor in self.executors:
            while executor.todo:
                try:
                    jobs.append(executor.todo.popleft())
                except IndexError:
                    break
        return jobs
