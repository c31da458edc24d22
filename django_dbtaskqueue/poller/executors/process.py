"""Processors in child processes, which can be ended whatever their code does: ``executor="process"``.

A child runs one job at a time. It ends when its job must: an operator cancelled the task, its timeout is over, or its
lease is lost. Threads of the poller wait for the children's answers. Only the poller settles.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from django.db import connections

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import clock, next_pause
from django_dbtaskqueue.core.exceptions import ProcessDied
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Outcome, Settlement
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import decide_all
from django_dbtaskqueue.poller.executors import LOST, Answer, ConcurrencyLimiter, Executor, Finish, Job, Run, stopped
from django_dbtaskqueue.poller.executors.child import DEATH_SECONDS, Channel, Child, Wear, exit_text
from django_dbtaskqueue.poller.executors.pool import apply_answer, note_processor, portable, run_here
from django_dbtaskqueue.poller.executors.thread import ThreadExecutor
from django_dbtaskqueue.poller.executors.thread_connections import Doubt, check

logger = logging.getLogger("django_dbtaskqueue")

STOP_GRACE_SECONDS = 0.2  # between task.cancelled and the end of the process, for a task that checks it
LOAD_SECONDS = 60.0  # until a child has loaded the project
ANSWER_POLL_SECONDS = 0.25  # between two looks whether a child that says nothing still runs
ASK = "ready?"  # the child asks its connections whether they live, and answers (0, None)
RESTART_SECONDS = 1.0, 30.0  # between two starts of a child that does not load: at first, and at most


class ProcessExecutor(ThreadExecutor):
    """Runs jobs in at most ``slots`` child processes. A child starts when it is needed, and is kept."""

    def __init__(self, slots: int, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(slots, finish, limiter)
        self._workers: list[_Worker | None] = [None] * slots  # the child of each thread
        self._ended = threading.Event()

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        super().submit(jobs, fast=False)

    def nudge(self) -> None:
        if self.todo:
            self._wake(len(self.todo))

    def overrun(self, run: Run) -> bool:
        """Give up a job past its timeout, and end its process."""
        given_up = super().overrun(run)
        if given_up:
            for worker in filter(None, self._workers):
                worker.kill_if_running(run.job, settled_too=True)
        return given_up

    def stop(self, run: Run) -> None:
        """Tell the task that it has to stop, and end its process if it does not."""
        for worker in filter(None, self._workers):
            worker.stop(run.job)

    def close(self) -> None:
        self._ended.set()
        super().close()
        for worker in filter(None, self._workers):
            worker.kill()

    # -- one thread --------------------------------------------------------------------------------------------------

    def _work(self, slot: int) -> None:
        pause = 0.0
        while not self._closed:
            if not self.todo:
                self._wait_for_job(slot)
                continue
            if not self._has_child(slot):
                pause = next_pause(pause, *RESTART_SECONDS)
                clock.wait(self._ended, pause)
                continue
            pause = 0.0
            with suppress(IndexError):  # another thread took the job
                self._run(slot, self.todo.popleft())
            self._end_if_worn_out(slot)
        worker = self._workers[slot]
        if worker is not None:
            worker.end()
        connections.close_all()  # those that listeners opened on this thread

    def _has_child(self, slot: int) -> bool:
        """See to a child for the next job; return whether there is one.

        It is given a job only when it has loaded, and its connections live: a wire that stands still would delay the
        job beyond its lease.
        """
        worker = self._workers[slot]
        if worker is not None and not worker.is_alive():
            worker.end()
            worker = None
        if worker is None:
            worker = self._workers[slot] = _Worker()
        elif not worker.asks_connections():
            return True
        deadline = clock.monotonic() + LOAD_SECONDS
        with suppress(EOFError, OSError):
            while clock.monotonic() < deadline and not self._closed:
                if worker.receive(ANSWER_POLL_SECONDS) is not None:
                    return True
        code, self._workers[slot] = worker.end(seconds=DEATH_SECONDS), None
        if not self._closed:
            logger.error("A process for tasks does not start (%s). Its tasks wait for the next try", exit_text(code))
        return False

    def _end_if_worn_out(self, slot: int) -> None:
        worker = self._workers[slot]
        if worker is not None and worker.is_worn_out():
            self._workers[slot] = None
            worker.ask_to_end()
            worker.end()

    def _run(self, slot: int, job: Job) -> None:
        current = self._begin(job)
        if current is None:
            return
        job, started = current
        self._since[slot], self._jobs[slot] = started, job
        for lease in job.leases:
            observe.started(lease, job.processor)
        outcomes = self._outcomes(slot, job)
        self._jobs[slot] = None
        note_processor(job)
        self._end(current, decide_all(job.leases, outcomes), clock.monotonic() - started)

    def _outcomes(self, slot: int, job: Job) -> Sequence[Outcome | Settlement | None]:
        worker = self._workers[slot]
        assert worker is not None  # noqa: S101 -- for the type checker: ``_has_child`` made it
        try:
            answers = worker.call(job)
        except (EOFError, OSError):
            self._workers[slot] = None
            return self._died(job, killed=worker.killed, how=exit_text(worker.end(seconds=DEATH_SECONDS)))
        except Exception as error:  # something of the job cannot be sent
            return [Fail(error)] * len(job.leases)
        if len(answers) < len(job.leases):  # one failure for the whole job
            answers = answers * len(job.leases)
        return [apply_answer(lease, answer) for lease, answer in zip(job.leases, answers, strict=True)]

    def _died(self, job: Job, *, killed: bool, how: str) -> Sequence[Outcome | Settlement | None]:
        if killed:
            return stopped(job, Fail("Its process was ended"))
        for lease in job.leases:
            logger.error("Task %s of %s ended its process: %s", lease.id, lease.queue, how, extra=observe.fields(lease))
        return [
            Fail(ProcessDied(lease.poller_instance, lease.attempt, lease.max_attempts, how)) for lease in job.leases
        ]

    def _is_late(self, run: Run) -> bool:
        return Executor._is_late(self, run)


class _Worker(Child):
    """A child and the job it runs."""

    def __init__(self) -> None:
        super().__init__(_serve, "dbtaskqueue-process")
        self._calls = 0
        self._doubt = Doubt()
        self._job: Job | None = None
        self._spared = False  # the task has settled itself: its lease is not lost
        self._lock = threading.Lock()  # of _job: a kill must not hit the next one

    def asks_connections(self) -> bool:
        """Have it ask its connections whether they live, if they may have died; return whether it does."""
        doubtful = self._doubt.arises()
        if doubtful:
            with suppress(OSError):
                self.send(0, ASK)
        return doubtful

    def call(self, job: Job) -> list[Answer]:
        """Run a job. Raise ``EOFError`` or ``OSError`` if the process ended before the answer."""
        with self._lock:
            self._calls += 1
            self._job, self._spared = job, False
        try:
            self.send(self._calls, portable(job))
            while True:
                message = self.receive(ANSWER_POLL_SECONDS)
                number, answers = message or (self._calls, ())
                if answers and number == self._calls:
                    return answers
                if answers:  # of another job: nothing that this process says can be trusted
                    raise EOFError("an answer to another job")
                self._spared |= answers is None and number == self._calls
        finally:
            with self._lock:
                self._job = None

    def stop(self, job: Job) -> None:
        """Tell the task to stop, if it runs here. Its process ends if it runs on, and has not settled itself."""
        with self._lock:
            if self._job is not job:
                return
            number = self._calls
        with suppress(OSError):
            self.send(-number, [lease.id for lease in job.leases if lease.deadline == LOST])
        timer = threading.Timer(STOP_GRACE_SECONDS, self.kill_if_running, [job])
        timer.daemon = True
        timer.start()

    def kill_if_running(self, job: Job, *, settled_too: bool = False) -> None:
        """End the process if it runs this job; only with ``settled_too`` if the task has settled itself."""
        with self._lock:
            if self._job is job and (settled_too or not self._spared):
                self.kill()

    def is_worn_out(self) -> bool:
        """Whether it has run as many calls, or has as much memory, as the settings allow."""
        settings = conf.settings()
        return Wear(settings.max_tasks_per_child, settings.max_memory_per_child).reached(self._calls, self.pid)


# -- in the process ----------------------------------------------------------------------------------------------------


def _serve(channel: Channel) -> None:
    """Run jobs on the main thread, one after the other, while another thread listens to the poller."""
    jobs: SimpleQueue[tuple[int, Job | None] | None] = SimpleQueue()
    threading.Thread(target=_listen, args=[channel, jobs], daemon=True).start()
    jobs.put((0, None))
    while (next_job := jobs.get()) is not None:
        number, job = next_job
        if job is None:
            check()
        channel.send(number, None if job is None else run_here(job))


def _listen(channel: Channel, jobs: SimpleQueue[tuple[int, Job | None] | None]) -> None:
    leases: dict[int, tuple[Lease, ...]] = {}  # of the last job
    try:
        while True:
            number, message = channel.receive()
            if isinstance(message, Job):
                leases = {number: message.leases}
                jobs.put((number, message))
            elif isinstance(message, list):
                _tell(channel, -number, [lease for lease in leases.get(-number, ()) if lease.id in message])
            elif message == ASK:
                liveness.outages.report()
                jobs.put((0, None))
            else:
                jobs.put(None)
    except (EOFError, OSError):  # the poller has ended, or closed the pipe
        os._exit(0)


def _tell(channel: Channel, number: int, lost: list[Lease]) -> None:
    """Tell tasks to stop. None says that they have settled themselves, so that their process may go on."""
    for lease in lost:
        lease.cancelled = True
    if lost and all(lease.touched for lease in lost):
        channel.send(number, None)
