"""Processors on threads of this process: plain functions on many, coroutines on the one of an event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.utils import InterfaceError, OperationalError
from django.dispatch import receiver

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.outcomes import Fail, Outcome, Release, Settlement
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.db.liveness import DatabaseUse, database_use
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import run, run_all, run_all_async
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Executor, Finish, Job, Run, stopped

# -- connections of such a thread: none harms the next task, and a dead one harms no task ------------------------------

# After a failed connect: a server may refuse this thread and not the poller, which takes the same task again.
RECONNECT_PAUSE_S = 1.0
IDLE_SECONDS = 5.0  # without a task, after which a thread's connections are checked before the next one


class Doubt:
    """Whether the connections of one thread may have died since its last job: in an idle time, or in an outage."""

    def __init__(self) -> None:
        self._job_at = 0.0  # no job yet: whatever the thread has open is checked before the first one
        self._outages = liveness.outages.seen

    def arises(self) -> bool:
        """Return it, once for each reason. To be asked before a job is taken."""
        before, self._job_at = self._job_at, clock.monotonic()
        outages, self._outages = self._outages, liveness.outages.seen
        return self._job_at - before > IDLE_SECONDS or outages != self._outages


class _Opened(threading.local):
    """The connections of a thread; ``changed`` if it opened one since the list was made."""

    def __init__(self) -> None:
        self.connections: list[BaseDatabaseWrapper] = []
        self.changed = True
        self.runs_tasks = False
        self.doubt = Doubt()


_opened = _Opened()


@receiver(connection_created)
def _note(connection: BaseDatabaseWrapper, **_: object) -> None:
    _opened.changed = True
    liveness.connected()
    if _opened.runs_tasks:
        liveness.note_statements(connection)


def check_connections() -> None:
    """Before a task: note the statements on each connection, and close those that died in an idle time."""
    _opened.runs_tasks = True
    if _opened.changed:
        _list_connections()
    if not _opened.connections:
        return
    ask = _opened.doubt.arises()
    for connection in _opened.connections:
        liveness.note_statements(connection)
        if ask and connection.connection is not None and connection.vendor != "sqlite":
            liveness.close_if_dead(connection)


def unless_dead(outcomes: Sequence[Outcome | Settlement | None]) -> list[Any]:
    """Return what is to be written of a call that had no live connection for its first statement."""
    spared, number = _spared(outcomes)
    if number and not any(connection.connection for connection in connections.all(initialized_only=True)):
        clock.wait(threading.Event(), RECONNECT_PAUSE_S)
    return spared


def tidied(outcomes: Sequence[Outcome | Settlement | None]) -> list[Any]:
    """After a call: ``tidy``; return what is to be written of it."""
    use = database_use.get()
    written = unless_dead(outcomes) if use.dead else list(outcomes)
    tidy(doubtful=use.doubtful)
    return written


async def unless_dead_async(outcomes: Sequence[Outcome | Settlement | None]) -> list[Any]:
    """``unless_dead`` for a call on an event loop, whose other calls go on meanwhile."""
    spared, number = _spared(outcomes)
    if number:
        await tidy_async(doubtful=True)
        try:
            await clock.wait_async(asyncio.Event(), RECONNECT_PAUSE_S)
        except asyncio.CancelledError:  # the poller stops: the tasks are given back all the same
            cast("asyncio.Task[None]", asyncio.current_task()).uncancel()
    return spared


def _spared(outcomes: Sequence[Outcome | Settlement | None]) -> tuple[list[Any], int]:
    """Release the tasks that failed by their dead connection; return what is to be written, and how many they are."""
    errors = [None if one is None else one.facts.error for one in outcomes]
    lost = [isinstance(error, OperationalError | InterfaceError) for error in errors]
    if any(lost):
        liveness.outages.seen += 1  # other threads may have such connections, too
    return [Release() if dead else one for one, dead in zip(outcomes, lost, strict=True)], sum(lost)


def tidy(*, doubtful: bool = False) -> None:
    """Close each connection that would harm the next task: in an open transaction, after an error, too old.

    ``doubtful``: each, because the call failed by one, or changed a session. Only the project knows how that was.
    """
    if _opened.changed:
        _list_connections()
    for connection in _opened.connections:
        if connection.connection is None:
            continue
        dirty = doubtful or connection.in_atomic_block or not connection.autocommit or connection.errors_occurred
        pooled = connection.settings_dict["OPTIONS"].get("pool")  # of fewer connections than there are threads
        # With a CONN_MAX_AGE of 0 it is kept, because the next task follows at once.
        close_at = connection.settings_dict["CONN_MAX_AGE"] and connection.close_at
        if dirty or pooled or (close_at and clock.monotonic() >= close_at):
            with suppress(Exception):  # even close() may fail on a broken connection
                connection.in_atomic_block = connection.closed_in_transaction = False
                if dirty and pooled:
                    connection.connection.close()  # the pool makes another
                connection.close()


async def tidy_async(*, doubtful: bool) -> None:
    """``tidy`` the connections of Django's async ORM thread."""
    with suppress(Exception):
        await sync_to_async(tidy)(doubtful=doubtful)


def _list_connections() -> None:
    _opened.connections, _opened.changed = list(connections.all(initialized_only=True)), False


# -- threads -----------------------------------------------------------------------------------------------------------

# They take single jobs from one shared deque. Its ends are atomic: a fast job costs no lock, a slow one delays none.

BLOCKED_AFTER_SECONDS = 0.005  # in one job: from then on, waiting jobs get another thread
HAND_OVER_SECONDS = 0.001  # at most, from the wake-up of an idle thread until it has the interpreter


class ThreadExecutor(Executor):
    """Runs jobs on at most ``slots`` daemon threads. A thread starts when it is needed."""

    tells_late_ends = True

    def __init__(self, slots: int, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(finish, limiter)
        self.slots = slots
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._idle: set[int] = set()
        self._awake = threading.Event()  # an idle thread has the interpreter
        self._closed = False
        self._lock = threading.Lock()  # only for starting threads

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Append jobs and wake as many threads as they can use.

        If no job runs, wait until a thread has the interpreter. The caller would keep it until its next statement.
        """
        idle = not self.runs
        self._awake.clear()
        self.todo.extend(jobs)
        if fast:
            self.nudge()
        else:
            self._wake(len(jobs))
        if idle and self._wakeups.qsize():
            self._awake.wait(HAND_OVER_SECONDS)

    def nudge(self) -> None:
        """Wake a thread if jobs wait and all that run are slow: two with fast jobs are no faster than one."""
        if self.todo:
            newest = max([run.started for run in self.runs.copy().values()], default=0.0)
            if newest < clock.monotonic() - BLOCKED_AFTER_SECONDS:
                self._wake(1)

    def close(self) -> None:
        """End idle threads and their connections. A thread that runs a task is left alone."""
        with self._lock:  # no thread is about to start now, or starts later
            self._closed = True
        for _ in self.threads:
            self._wakeups.put(False)
        for slot, thread in enumerate(self.threads):
            if slot not in self.runs:
                thread.join(timeout=1)

    def _wake(self, wanted: int) -> None:
        idle = len(self._idle) - self._wakeups.qsize()
        for _ in range(min(wanted, max(idle, 0))):
            self._wakeups.put(True)
        if wanted <= idle or len(self.threads) >= self.slots:
            return
        with self._lock:
            most = 0 if self._closed else min(len(self.threads) + wanted - idle, self.slots)
            for slot in range(len(self.threads), most):
                thread = WatchedThread(target=self._work, args=[slot], name=f"dbtaskqueue-{slot}", daemon=True)
                self.threads.append(thread)
                thread.start()

    def _work(self, slot: int) -> None:
        while True:
            while not self.todo:
                if not self._wait_for_job(slot):
                    connections.close_all()
                    return
            check_connections()  # before a job is taken: a wire that stands still would delay it beyond its lease
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
        lease, started = job.lease, clock.monotonic()
        if started >= lease.deadline or not job.processor.plain:
            self._run_special(slot, job)
            return
        database_use.set(use := DatabaseUse())
        self.runs[slot] = current = tuple.__new__(Run, (job, started))  # half the time of Run's own function
        observe.started(lease, job.processor)
        settlement = run(lease, job.processor)
        if use.dead:
            (settlement,) = unless_dead([settlement])
        del self.runs[slot]
        ended = clock.monotonic()
        if not self._given_up or not self._is_late(current):
            self._finish(tuple.__new__(Done, (lease, settlement, ended - started)), idle=not self.todo)
        del settlement
        tidy(doubtful=use.doubtful)

    def _run_special(self, slot: int, job: Job) -> None:
        if (current := self._begin(slot, job)) is not None:
            self._end(slot, self._settlements(slot, current.job))

    def _settlements(self, slot: int, job: Job) -> Sequence[Settlement | None]:
        return tidied(run_all(job.leases, job.processor))

    def _put_first(self, jobs: list[Job]) -> None:
        super()._put_first(jobs)
        if len(jobs) > 1:  # this thread takes the first of them
            self._wake(len(jobs) - 1)


# -- event loop --------------------------------------------------------------------------------------------------------

# A consumer is one slot: an asyncio task that runs one job after another, so that a job needs no task of its own. The
# next consumer starts when the ones before it wait for something.

MAX_TURN_SECONDS = 0.005  # before a consumer yields to the event loop
BLOCKED_AFTER_LOOKS = 20  # without an answer of the event loop: about five seconds in which this process ran


class AsyncExecutor(Executor):
    """Runs jobs as at most ``slots`` coroutines at a time."""

    def __init__(self, slots: int, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(finish, limiter)
        self.slots = slots
        self._consumers: set[asyncio.Task[None]] = set()
        self._starting = False
        self._doubt = Doubt()  # about the connections of Django's async ORM thread
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # only for starting the thread: a poller fetches on two
        self._asked = False  # the event loop, which has not answered yet
        self._unanswered = 0  # how many looks there have been since then. The loop's thread only clears ``_asked``

    def nudge(self) -> None:
        if not self.todo:
            return
        with self._lock:
            if not self.threads:
                self.threads.append(WatchedThread(target=self._serve, name="dbtaskqueue-loop", daemon=True))
                self.threads[0].start()
        self._loop.call_soon_threadsafe(self._start)

    def stop(self, run: Run, *, at_once: bool = False) -> None:
        self._loop.call_soon_threadsafe(lambda: [one.cancel() for one in self._consumers if self.runs.get(one) == run])

    def look(self) -> None:
        """Ask the event loop for an answer. While a coroutine lets it give none, give back what it has not begun."""
        if not self.threads:
            return
        if self._asked:
            self._unanswered += 1
        else:
            self._asked, self._unanswered = True, 0
            self._loop.call_soon_threadsafe(self._answer)
        if self._unanswered >= BLOCKED_AFTER_LOOKS:
            if not self.blocked:
                self._name_what_blocks()
            self.blocked = True
            self._give_back()

    def _give_back(self) -> None:
        waiting = self._limiter.withdraw(only_async=True)
        for job in self.withdraw():
            waiting.append(job)
            self._put_first(self._limiter.release(job.processor, None))
        self._release([lease for job in waiting for lease in job.leases])

    def _answer(self) -> None:
        if self.blocked:
            logger.info("The event loop answers again: async tasks go on")
        self._asked = self.blocked = False

    def _name_what_blocks(self) -> None:
        current = self.runs.get(asyncio.current_task(self._loop))
        task = "A coroutine" if current is None else f"Task {current.job.lease.id} of {current.job.lease.queue}"
        stack = "".join(traceback.format_stack(sys._current_frames().get(self.threads[0].ident or 0)))
        words = "%s blocks the event loop: no async task goes on, and those that have not begun are given back. Let it "
        logger.warning(words + "await, or make its processor a plain function. It is here:\n%s", task, stack)

    def close(self) -> None:
        """Stop the event loop and close it, because an open loop holds sockets."""
        if not self.threads:
            self._loop.close()
        else:
            with suppress(Exception):  # fails while a processor still runs on that thread
                asyncio.run_coroutine_threadsafe(sync_to_async(_close_connections)(), self._loop).result(timeout=1)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self.threads[0].join(timeout=1)

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
        task = cast("asyncio.Task[None]", asyncio.current_task())  # a coroutine on a loop has a task
        turn = clock.monotonic() + MAX_TURN_SECONDS
        while self.todo:
            if self._doubt.arises():
                await sync_to_async(check_connections)()
            try:
                job = self.todo.popleft()
            except IndexError:  # it was given back
                break
            self._start()  # the next consumer; it gets its turn if this job waits for something
            await self._run(task, job)
            if clock.monotonic() >= turn:
                await asyncio.sleep(0)
                turn = clock.monotonic() + MAX_TURN_SECONDS
        if not self.runs and any(one["OPTIONS"].get("pool") for one in connections.settings.values()):
            await tidy_async(doubtful=False)  # no coroutine reads from a connection now: it goes back

    async def _run(self, task: asyncio.Task[None], job: Job) -> None:
        lease, started = job.lease, clock.monotonic()
        if not job.processor.plain or started >= lease.deadline:
            await self._run_special(task, job)
            return
        database_use.set(use := DatabaseUse())
        self.runs[task] = current = tuple.__new__(Run, (job, started))  # as on a thread
        observe.started(lease, job.processor)
        settlements = await self._settlements(task, job, use)
        del self.runs[task]
        if not self._given_up or not self._is_late(current):
            self._finish(tuple.__new__(Done, (lease, settlements[0], clock.monotonic() - started)), idle=not self.todo)
        await self._tidy(settlements, use)

    async def _run_special(self, task: asyncio.Task[None], job: Job) -> None:
        if (current := self._begin(task, job)) is not None:
            use = database_use.get()
            settlements = await self._settlements(task, current.job, use)
            self._end(task, settlements)
            await self._tidy(settlements, use)

    async def _settlements(self, task: asyncio.Task[None], job: Job, use: DatabaseUse) -> Sequence[Settlement | None]:
        try:
            settlements = await run_all_async(job.leases, job.processor)
            return await unless_dead_async(settlements) if use.dead else settlements
        except asyncio.CancelledError:
            task.uncancel()
            return stopped(job, Fail("Cancelled while the poller was stopping"))
        except BaseException as error:
            return stopped(job, Fail(error))

    async def _tidy(self, settlements: Sequence[Settlement | None], use: DatabaseUse) -> None:
        if use.doubtful or [one for one in settlements if one is not None and one.facts.error is not None]:
            await tidy_async(doubtful=use.doubtful)


def _close_connections() -> None:
    """Close the connections of Django's async ORM thread, which lives longer than this executor."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()
