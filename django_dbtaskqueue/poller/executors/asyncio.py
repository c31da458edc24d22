"""Async processors on one event loop, which has its own thread.

A consumer is one slot: an asyncio task that runs one job after another, so that a job needs no task of its own. The
next consumer starts when the ones before it wait for something.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from contextlib import suppress

from asgiref.sync import sync_to_async
from django.db import connections

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.outcomes import Fail, Release, Settlement
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db.liveness import database_use
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import run_all_async
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Finish, Job, Run, stopped
from django_dbtaskqueue.poller.executors.thread import Doubt, check, tidy_async, unless_dead_async

logger = logging.getLogger("django_dbtaskqueue")

MAX_TURN_SECONDS = 0.005  # before a consumer yields to the event loop
BLOCKED_AFTER_LOOKS = 20  # without an answer of the event loop: about five seconds in which this process ran


class AsyncExecutor(Executor):
    """Runs jobs as at most ``slots`` coroutines at a time."""

    def __init__(self, slots: int, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(finish, limiter)
        self.slots = slots
        self._runs: dict[asyncio.Task[None], tuple[Job, float]] = {}  # the job of each consumer, and its start
        self._consumers: set[asyncio.Task[None]] = set()
        self._starting = False
        self._doubt = Doubt()  # about the connections of Django's async ORM thread
        self._loop = asyncio.new_event_loop()
        self._thread: WatchedThread | None = None
        self._lock = threading.Lock()  # only for starting the thread: a poller fetches on two
        self._asked = False  # the event loop, which has not answered yet
        self._unanswered = 0  # how many looks there have been since then. The loop's thread only clears ``_asked``

    def nudge(self) -> None:
        if not self.todo:
            return
        with self._lock:
            if self._thread is None:
                self._thread = WatchedThread(target=self._serve, name="dbtaskqueue-loop", daemon=True)
                self._thread.start()
        self._loop.call_soon_threadsafe(self._start)

    def busy(self) -> int:
        return len(self._runs)

    def running(self) -> list[Run]:
        return [Run(*current) for current in self._runs.copy().values()]

    def threads(self) -> list[WatchedThread]:
        return [] if self._thread is None else [self._thread]

    def overrun(self, run: Run) -> bool:
        """Cancel a run; its slot frees when the coroutine has really ended."""
        given_up = super().overrun(run)
        if given_up:
            self.stop(run)
        return given_up

    def stop(self, run: Run) -> None:
        self._loop.call_soon_threadsafe(self._cancel, run)

    def look(self) -> None:
        """Ask the event loop for an answer. While a coroutine lets it give none, give back what it has not begun."""
        if self._thread is None:
            return
        if self._asked:
            self._unanswered += 1
        else:
            self._asked, self._unanswered = True, 0
            self._loop.call_soon_threadsafe(self._answer)
        if self._unanswered >= BLOCKED_AFTER_LOOKS:
            if not self.blocked:
                self._name_what_blocks(self._thread)
            self.blocked = True
            self._give_back()

    def _give_back(self) -> None:
        waiting = self._limiter.withdraw(only_async=True)
        for job in self.withdraw():
            waiting.append(job)
            self._put_first(self._limiter.release(job.processor, None))
        for lease in [lease for job in waiting for lease in job.leases]:
            self._finish(Done(lease, Release(), 0.0), idle=True)

    def _answer(self) -> None:
        if self.blocked:
            logger.info("The event loop answers again: async tasks go on")
        self._asked = self.blocked = False

    def _name_what_blocks(self, thread: WatchedThread) -> None:
        current = self._runs.get(asyncio.current_task(self._loop))  # type: ignore[arg-type]
        task = "A coroutine" if current is None else f"Task {current[0].lease.id} of {current[0].lease.queue}"
        stack = "".join(traceback.format_stack(sys._current_frames().get(thread.ident or 0)))
        words = "%s blocks the event loop: no async task goes on, and those that have not begun are given back. Let it "
        logger.warning(words + "await, or make its processor a plain function. It is here:\n%s", task, stack)

    def cancel(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tuple(self._runs)])

    def close(self) -> None:
        """Stop the event loop and close it, because an open loop holds sockets."""
        if self._thread is None:
            self._loop.close()
        else:
            with suppress(Exception):  # fails while a processor still runs on that thread
                closed = asyncio.run_coroutine_threadsafe(sync_to_async(_close_connections)(), self._loop)
                closed.result(timeout=1)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=1)

    def _cancel(self, run: Run) -> None:
        for task, current in self._runs.items():
            if current == run:
                task.cancel()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _start(self) -> None:
        if not self._starting and self.todo and len(self._consumers) < self.slots:
            self._starting = True
            consumer = self._loop.create_task(self._consume())
            self._consumers.add(consumer)
            consumer.add_done_callback(self._consumers.discard)

    async def _consume(self) -> None:
        self._starting = False
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 -- for the type checker; a coroutine on a loop has a task
        turn = clock.monotonic() + MAX_TURN_SECONDS
        while self.todo:
            if self._doubt.arises():
                await sync_to_async(check)()
            try:
                job = self.todo.popleft()
            except IndexError:  # it was given back
                break
            self._start()  # the next consumer; it gets its turn if this job waits for something
            await self._run(task, job)
            if clock.monotonic() >= turn:
                await asyncio.sleep(0)
                turn = clock.monotonic() + MAX_TURN_SECONDS
        if not self._runs and any(one["OPTIONS"].get("pool") for one in connections.settings.values()):
            await tidy_async(doubtful=False)  # no coroutine reads from a connection now: it goes back

    async def _run(self, task: asyncio.Task[None], job: Job) -> None:
        current = self._begin(job)
        if current is None:
            return
        self._runs[task] = job, started = current
        for lease in job.leases:
            observe.started(lease, job.processor)
        settlements: list[Settlement | None]
        try:
            settlements = await run_all_async(job.leases, job.processor)
            if database_use.get().dead:
                settlements = await unless_dead_async(settlements)
        except BaseException as error:
            settlements = stopped(job, _ended_by(task, error))
        del self._runs[task]
        self._end(current, settlements, clock.monotonic() - started)
        doubtful = database_use.get().doubtful
        if doubtful or [one for one in settlements if one is not None and one.facts.error is not None]:
            await tidy_async(doubtful=doubtful)


def _close_connections() -> None:
    """Close the connections of Django's async ORM thread, which lives longer than this executor."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def _ended_by(task: asyncio.Task[None], error: BaseException) -> Fail:
    if isinstance(error, asyncio.CancelledError):
        task.uncancel()
        return Fail("Cancelled while the poller was stopping")
    return Fail(error)
