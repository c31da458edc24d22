"""Tasks that may kill their process, in a process of their own: whatever they do, the poller and its tasks go on.

The tasks run at the same time, but start one after the other. A task that kills mostly kills soon after its start, so
the last one that started is the reason if the process dies then. If it dies later, nobody knows: then each task that
ran starts again and runs alone. The poller holds the leases meanwhile, and no innocent task is charged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from asgiref.sync import sync_to_async
from django.utils.module_loading import import_string

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import ProcessDied
from django_dbtaskqueue.core.outcomes import Fail, Outcome, Release, Settlement
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db.liveness import ended_call
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import Processor, decide_all, perform_async
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Executor, Finish, Job, Run
from django_dbtaskqueue.poller.executors.child import DEATH_SECONDS, Channel, Child, exit_text
from django_dbtaskqueue.poller.executors.pool import answers_of, apply_answer, note_processor, portable, run_remotely
from django_dbtaskqueue.poller.executors.thread_connections import check, tidy_async, unless_dead_async

logger = logging.getLogger("django_dbtaskqueue")

START_INTERVAL_SECONDS = 0.05  # between two starts, and the time in which the last one is blamed for a death
MAX_ISOLATED_TASKS = 64  # at the same time
BOOT_SECONDS = 60.0  # until the process has loaded the project
SIGN_OF_LIFE_SECONDS = 1.0  # between two signs of life of the process
SILENT_SECONDS = 15.0  # without one: a processor holds the interpreter
LINGER_SECONDS = 10.0  # that the process stays without a task
IDLE_WAIT_SECONDS = 0.5
BLAME_NOBODY_LIMIT = 3  # deaths in a row without a task: the process cannot start


def can_isolate(processor: Processor | None) -> bool:
    """Whether another process finds the processor by its name."""
    if processor is None or not processor.plain or processor.executor is not None:
        return False
    try:
        return import_string(processor.name) is processor.function and processor.function.__module__ != "__main__"
    except (ImportError, AttributeError):
        return False


class IsolatedExecutor(Executor):
    """Runs jobs of plain processors in one process, which is started when there are some."""

    def __init__(self, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(finish, limiter)
        self.slots = MAX_ISOLATED_TASKS
        self.works = True  # False: the process could not be started, so tasks cannot run here
        self._alone: deque[Job] = deque()  # jobs that run with no other beside them
        self._runs: dict[int, Run] = {}
        self._number = 0
        self._started_at = 0.0  # the last task; infinite until the process says that it has begun
        self._heard_at = 0.0  # the last message
        self._boots = 0  # starts of the process since its last message
        self._child: Child | None = None
        self._closed = False
        self._wakeup = threading.Event()
        self._thread: WatchedThread | None = None
        self._lock = threading.Lock()  # only for starting the thread

    def nudge(self) -> None:
        if self.todo and self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = WatchedThread(target=self._serve, name="dbtaskqueue-isolated", daemon=True)
                    self._thread.start()
        self._wakeup.set()

    def busy(self) -> int:
        return len(self._runs) + len(self._alone)

    def running(self) -> list[Run]:
        return list(self._runs.copy().values())

    def threads(self) -> list[WatchedThread]:
        return [] if self._thread is None else [self._thread]

    def stop(self, run: Run) -> None:
        """Tell the tasks of a run that they have to stop. The process goes on: other tasks run in it."""
        child = self._child
        for number in [number for number, other in self._runs.copy().items() if other == run]:
            with suppress(OSError):
                if child is not None:
                    child.send(-number, None)

    def cancel(self) -> None:
        """Kill the process: its tasks have been given up."""
        self.close()

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        self._stop()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        idle_since = clock.monotonic()
        while not self._closed:
            if not (self._runs or self._alone or self.todo):
                if self._child is not None and clock.monotonic() - idle_since > LINGER_SECONDS:
                    self._stop()
                clock.wait(self._wakeup, IDLE_WAIT_SECONDS)
                self._wakeup.clear()
                continue
            idle_since = clock.monotonic()
            try:
                self._start_next()
                self._receive()
            except (EOFError, OSError):
                self._died()

    def _start_next(self) -> None:
        if self._child is None:
            self._boot()
        now, alone = clock.monotonic(), bool(self._alone)
        free = not self._runs if alone else len(self._runs) < self.slots
        if alone and self._runs and self._given_up.issuperset(self._runs.values()):
            raise EOFError("tasks past their timeout do not end")
        if not free or self._boots or now - self._started_at < START_INTERVAL_SECONDS:
            return
        try:
            job = (self._alone if alone else self.todo).popleft()
        except IndexError:  # the poller withdrew it
            return
        run = self._begin(job)
        if run is None:
            return
        for lease in run.job.leases:
            observe.started(lease, run.job.processor)
        self._number += 1
        self._runs[self._number] = run
        self._started_at = float("inf")
        assert self._child is not None  # noqa: S101 -- for the type checker
        try:
            self._child.send(self._number, portable(run.job))
        except OSError:
            raise
        except Exception as error:  # something of it cannot be sent
            del self._runs[self._number]
            self._settle(run, [Fail(error)] * len(run.job.leases))

    def _receive(self) -> None:
        assert self._child is not None  # noqa: S101 -- for the type checker
        pause = START_INTERVAL_SECONDS if self.todo or self._alone else IDLE_WAIT_SECONDS
        while (message := self._child.receive(pause)) is not None:
            number, answers = message
            self._heard_at, self._boots, pause = clock.monotonic(), 0, 0.0
            if number == self._number and answers is None:
                self._started_at = self._heard_at
            run = None if answers is None else self._runs.pop(number, None)
            if run is not None:
                pairs = zip(run.job.leases, answers or (), strict=True)
                self._settle(run, [apply_answer(lease, answer) for lease, answer in pairs])
        if clock.monotonic() - self._heard_at > (BOOT_SECONDS if self._boots else SILENT_SECONDS):
            raise EOFError("no sign of life")

    def _settle(self, run: Run, outcomes: Sequence[Outcome | Settlement | None]) -> None:
        note_processor(run.job)
        self._end(run, decide_all(run.job.leases, outcomes), clock.monotonic() - run.started)

    # -- the process -------------------------------------------------------------------------------------------------

    def _boot(self) -> None:
        self._child = Child(_serve, "dbtaskqueue-isolated")
        self._boots += 1
        self._heard_at = clock.monotonic()
        logger.info("Started process %s for tasks whose processes died", self._child.pid)

    def _stop(self, *, seconds: float = 0.0) -> int | None:
        """End the process, if it still runs after so many seconds; return its exit code."""
        child, self._child = self._child, None
        return None if child is None else child.end(seconds=seconds)

    def _died(self) -> None:
        """Find out which task is the reason, and let the others start again."""
        since = clock.monotonic() - self._started_at
        code, runs = self._stop(seconds=DEATH_SECONDS), [run for run in self._runs.values() if not self._is_late(run)]
        begun, self._started_at = self._started_at != float("inf"), 0.0
        self._runs.clear()
        if self._closed:
            return
        if runs and not begun:  # the last one was sent, and had not begun
            self.todo.appendleft(runs.pop().job)
        if not runs:
            if self._boots >= BLAME_NOBODY_LIMIT:
                self._give_back()
            return
        if len(runs) == 1 or (begun and since < START_INTERVAL_SECONDS):
            self._blame(runs.pop(), code)
            self.todo.extendleft(run.job for run in reversed(runs))
        else:
            logger.warning("%s tasks ran in a process that died: each runs alone", len(runs))
            self._alone.extend(run.job for run in runs)

    def _blame(self, run: Run, code: int | None) -> None:
        lease = run.job.lease
        name = exit_text(code)
        logger.error("Task %s of %s ended its process: %s", lease.id, lease.queue, name, extra=observe.fields(lease))
        self._settle(run, [Fail(ProcessDied(lease.poller_instance, lease.attempt, lease.max_attempts, name))])

    def _give_back(self) -> None:
        """The process does not start: release the tasks, which run in the poller's own process then."""
        logger.error("The process for tasks whose processes died does not start. They run one by one in the poller's")
        self.works = False
        for job in (*self._alone, *self.todo):
            self._settle(Run(job, clock.monotonic()), [Release()] * len(job.leases))
        self._alone.clear()
        self.todo.clear()


# -- in the process ----------------------------------------------------------------------------------------------------


def _serve(channel: Channel) -> None:
    """Run jobs until the poller closes the pipe."""
    worker = _Worker(channel)
    threading.Thread(target=worker.report, daemon=True).start()
    threading.Thread(target=worker.loop.run_forever, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            worker.receive()
    os._exit(0)


class _Worker:
    """Runs each job as soon as it comes: async ones on one event loop, others on a thread each."""

    def __init__(self, channel: Channel) -> None:
        self.loop = asyncio.new_event_loop()
        self._channel = channel
        self._running: dict[int, tuple[Job, asyncio.Task[None] | None]] = {}  # by number; with a task if it is async

    def report(self) -> None:
        """Say that the interpreter runs."""
        pause = threading.Event()
        while True:
            self._channel.send(0, None)
            clock.wait(pause, SIGN_OF_LIFE_SECONDS)

    def receive(self) -> None:
        """Wait for a job and start it, or tell one that it has to stop."""
        number, job = self._channel.receive()
        if not isinstance(job, Job):
            self._stop(-number)
        elif job.processor.is_async:
            asyncio.run_coroutine_threadsafe(self._run_async(number, job), self.loop)
        else:
            threading.Thread(target=self._run, args=[number, job], daemon=True).start()

    def _stop(self, number: int) -> None:
        job, task = self._running.get(number, (None, None))
        for lease in job.leases if job is not None else ():
            lease.cancelled = True
        if task is not None:
            self.loop.call_soon_threadsafe(task.cancel)

    def _run(self, number: int, job: Job) -> None:
        self._running[number] = job, None
        self._channel.send(number, None)
        self._channel.send(number, run_remotely(job))
        del self._running[number]

    async def _run_async(self, number: int, job: Job) -> None:
        self._running[number] = job, asyncio.current_task()
        self._channel.send(number, None)
        try:
            await sync_to_async(check)()
            outcomes = [await perform_async(lease, job.processor) for lease in job.leases]
            call = ended_call()
            if call.dead:
                outcomes = await unless_dead_async(outcomes)
            await tidy_async(doubtful=call.doubtful)
        except BaseException as error:
            outcomes = [Fail(error)] * len(job.leases)
        self._channel.send(number, answers_of(job, outcomes))
        del self._running[number]
