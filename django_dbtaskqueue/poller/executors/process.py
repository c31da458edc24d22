"""Processors in child processes, which can be ended whatever their code does: ``executor="process"``.

Tasks that may kill their process run in such children, too, so that the poller and its other tasks go on. A child runs
one job at a time: if it dies, that job is the reason. It is spawned, spoken to by a pipe, and killed with all that it
started, when its job must end: an operator cancelled the task, its timeout is over, or its lease is lost. Threads of
the poller wait for the children's answers. Only the poller settles.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from asgiref.sync import async_to_sync
from django.db import connections
from django.utils.module_loading import import_string

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock, next_pause
from django_dbtaskqueue.core.exceptions import ProcessDied
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Outcome, Release, Settlement, Suspend
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import Processor, decide_all, perform_all, perform_all_async
from django_dbtaskqueue.poller.executors import LOST, Answer, ConcurrencyLimiter, Finish, Job, Run, stopped
from django_dbtaskqueue.poller.executors.pool import Perform, applied, portable, run_here
from django_dbtaskqueue.poller.executors.thread import Doubt, ThreadExecutor, check_connections

# -- a child -----------------------------------------------------------------------------------------------------------

END_SECONDS = 5.0  # that a process may take to end
DEATH_SECONDS = 0.5  # from the end of its pipe until its exit code is known
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Channel:
    """One end of the pipe between a poller and its child. Any thread may send; one thread receives.

    A message has the number of a job. Jobs and the ids of lost leases go to the child, answers come from it. None ends
    the child. From it, None says that the child is ready, or that the task of this number has settled itself.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._sending = threading.Lock()

    def send(self, number: int, what: object) -> None:
        """Send a message. Raise ``OSError`` if the other side has ended, other errors for what cannot be sent."""
        message = ForkingPickler.dumps(what)
        with self._sending:
            self.pipe.send(number)
            self.pipe.send_bytes(message)

    def receive(self) -> tuple[int, object]:
        """Return the next message; if it cannot be read, that failure as an answer. Raise ``EOFError`` at the end."""
        number: int = self.pipe.recv()
        try:
            return number, self.pipe.recv()
        except (EOFError, OSError):
            raise
        except Exception as error:  # of a class that cannot be made again, or of a processor that is not found
            return number, _failure(error)


def _failure(error: Exception | str) -> list[Answer]:
    return [Answer(Fail(error), None, "")]


class Server(Channel):
    """In the child: runs jobs on the main thread, one after the other, while another thread listens to the poller."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(pipe)
        self._requests: SimpleQueue[tuple[int, object]] = SimpleQueue()
        self._leases: dict[int, tuple[Lease, ...]] = {}  # of the last job, by its number
        self._coroutine: asyncio.Task[object] | None = None

    def serve(self) -> None:
        """Serve until the poller asks for the end."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._get_ready()
        while True:
            number, request = self._requests.get()
            if request is None:
                return
            if isinstance(request, Job):
                perform: Perform = async_to_sync(self._perform_async) if request.processor.is_async else perform_all
                self._reply(number, copy_context().run(run_here, request, perform))
            else:
                self._get_ready()

    def _get_ready(self) -> None:
        liveness.outages.seen += 1
        check_connections()
        self._reply(0, None)

    def _reply(self, number: int, answers: list[Answer] | None) -> None:
        try:
            self.send(number, answers)
        except OSError:  # the poller has ended
            os._exit(0)
        except Exception as error:  # an error or a result that cannot be sent
            self._reply(number, _failure(f"{type(error).__name__}: {error}"))

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, message = self.receive()
                if not isinstance(message, list):
                    self._leases = {number: message.leases} if isinstance(message, Job) else self._leases
                    self._requests.put((number, message))
                elif message and isinstance(message[0], Answer):  # a job that cannot be read
                    self._reply(number, message)
                else:
                    self._tell(-number, message)
        os._exit(0)  # the poller has ended, or closed the pipe

    def _tell(self, number: int, ids: list[int]) -> None:
        """Tell tasks to stop. None says that they have settled themselves, so that their process may go on."""
        lost = [lease for lease in self._leases.get(number, ()) if lease.id in ids]
        for lease in lost:
            lease.cancelled = True
        if lost and all(lease.touched for lease in lost):
            self._reply(number, None)
        elif lost and self._coroutine is not None:
            with suppress(RuntimeError):  # its loop is closed: it has ended
                self._coroutine.get_loop().call_soon_threadsafe(self._coroutine.cancel)

    async def _perform_async(self, leases: Sequence[Lease], processor: Processor) -> Sequence[Outcome | Suspend | None]:
        self._coroutine = asyncio.current_task()
        try:
            return await perform_all_async(leases, processor)
        except BaseException as error:
            return [Fail(error)] * len(leases)


def _serve(pipe: Connection) -> None:
    Server(pipe).serve()


def _enter(served: Callable[[Connection], None], pipe: Connection, databases: Mapping[str, object]) -> None:
    """Load the project, then serve. ``databases``: their names, which in a test are not those of the settings."""
    with suppress(AttributeError):  # Ctrl-C on the terminal is for the poller; what a task starts is killed with it
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the poller decides. Programs that a task starts do not inherit this
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process is the one to end
    with suppress(OSError, AttributeError):  # Linux: end with the poller, even if a task holds the interpreter
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (poller := multiprocessing.parent_process()) is not None and not poller.is_alive():
        os._exit(0)  # it was killed before that: nothing is loaded
    multiprocessing.current_process().daemon = False  # a task may start processes
    import django

    django.setup()
    for alias, name in databases.items():
        connections.settings[alias]["NAME"] = name
    served(pipe)


class Child(Channel):
    """The poller's side of a child process: the process, and the job that it runs. Any thread may kill it."""

    def __init__(self, served: Callable[[Connection], None] = _serve) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        super().__init__(ours)
        arguments = [served, theirs, {alias: connections.settings[alias]["NAME"] for alias in connections}]
        self._process = context.Process(target=_enter, args=arguments, name="dbtaskqueue-process", daemon=True)
        self._process.start()
        self._pid = self._process.pid or 0  # also that of its process group
        theirs.close()
        self.doubt = Doubt()  # about its connections
        self.killed = False  # by this process
        self.has_job = False  # the last job has been sent whole
        self._calls = 0
        self._job: Job | None = None
        self._spared = False  # the task has settled itself: its lease is not lost
        self._lock = threading.Lock()  # of _job: a kill must not hit the next one

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def is_worn_out(self) -> bool:
        """Whether it has run as many calls, or has as much memory, as the settings allow."""
        settings = conf.settings()
        return Wear(settings.max_tasks_per_child, settings.max_memory_per_child).reached(self._calls, self._pid)

    def wait(self, seconds: float) -> tuple[int, object] | None:
        """Return its next message, or None after so many seconds. Raise ``EOFError`` or ``OSError`` if it has ended."""
        if self.pipe.poll(seconds):
            return self.receive()
        if not self.is_alive():  # a process that it forked keeps the pipe open
            raise EOFError("the process has ended")
        return None

    def call(self, job: Job) -> list[Answer]:
        """Run a job. Raise ``EOFError`` or ``OSError`` if the process ended before the answer."""
        with self._lock:
            self._calls += 1
            self._job, self._spared, self.has_job = job, False, False
        try:
            self.send(self._calls, portable(job))
            self.has_job = True
            while True:
                number, answers = self.wait(ANSWER_POLL_SECONDS) or (self._calls, [])
                if isinstance(answers, list) and answers:
                    if number == self._calls:
                        return answers
                    raise EOFError("an answer to another job")  # nothing that this process says can be trusted
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

    def kill(self) -> None:
        """End it at once, with the processes that it started, whatever they do. Returns before they have ended."""
        self.killed = True
        kill_group(self._pid)
        self._process.kill()

    def end(self, *, seconds: float = 0.0) -> int | None:
        """Kill it, if it still runs after so many seconds, and free what it took; return its exit code."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self.kill()
        else:
            kill_group(self._pid)  # what it started
        self.pipe.close()
        self._process.join(END_SECONDS)
        return self._process.exitcode


def kill_group(pid: int) -> None:
    """Kill a process that leads a process group, and the processes that it started."""
    # It has just begun, or ended, or the system has no such groups.
    with suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(pid, signal.SIGKILL)


class Wear(NamedTuple):
    """After how much a process is replaced; None: never."""

    max_tasks: int | None = None
    max_mib: int | None = None

    def reached(self, tasks: int, pid: int) -> bool:
        """Whether a process that has run so many tasks is to be replaced."""
        worn_out = self.max_tasks is not None and tasks >= self.max_tasks
        return worn_out or (self.max_mib is not None and _resident_mib(pid) > self.max_mib)


def _resident_mib(pid: int) -> float:
    """Return how much memory a process has, in MiB; 0 where there is no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def exit_text(code: int | None) -> str:
    """Return an exit code in words: the name of the signal that ended the process, if one did."""
    if code is None or code >= 0:
        return f"exit code {code}"
    names = {one.value: one.name for one in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


# -- process -----------------------------------------------------------------------------------------------------------

STOP_GRACE_SECONDS = 0.2  # between task.cancelled and the end of the process, for a task that checks it
LOAD_SECONDS = 60.0  # until a child has loaded the project
ANSWER_POLL_SECONDS = 0.25  # between two looks whether a child that says nothing still runs
ASK = "ready?"  # the child asks its connections whether they live, and answers (0, None)
RESTART_SECONDS = 1.0, 30.0  # between two starts of a child that does not load: at first, and at most
MAX_ISOLATED_TASKS = 4  # at the same time: each has a child, and memory may be what their processes died of
MAX_FAILED_STARTS = 3  # in a row, after which isolated tasks run one by one in the poller's process
LINGER_SECONDS = 10.0  # that a child for isolated tasks stays without a task


class ProcessExecutor(ThreadExecutor):
    """Runs jobs in at most ``slots`` child processes. A child starts when it is needed, and is kept."""

    tells_late_ends = False
    linger: float | None = None  # seconds after which a child without a job ends; None: it is kept

    def __init__(self, slots: int, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(slots, finish, limiter)
        self._workers: list[Child | None] = [None] * slots  # the child of each thread
        self._readying: set[int] = set()  # the threads that see to a child for the next job
        self._failed_starts = 0  # since a child has loaded
        self._ended = threading.Event()

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        super().submit(jobs, fast=False)

    def nudge(self) -> None:
        """Wake a thread for each job that none sees to: many polls come while a child loads."""
        unseen = len(self.todo) - len(self._readying)
        if unseen > 0:
            self._wake(unseen)

    def stop(self, run: Run, *, at_once: bool = False) -> None:
        for worker in filter(None, self._workers):
            if at_once:
                worker.kill_if_running(run.job, settled_too=True)
            else:
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
                self._readying.discard(slot)
                if not self._wait_for_job(slot, self.linger) and not self._closed:
                    self._retire(slot)
                continue
            self._readying.add(slot)
            if not self._has_child(slot):
                pause = next_pause(pause, *RESTART_SECONDS)
                self._start_failed()
                clock.wait(self._ended, pause)
                continue
            self._failed_starts, pause = 0, 0.0
            try:
                job = self.todo.popleft()
            except IndexError:  # another thread took it
                continue
            self._readying.discard(slot)
            self._run_special(slot, job)
            if (worker := self._workers[slot]) and worker.is_worn_out():
                self._retire(slot)
        if worker := self._workers[slot]:
            worker.end()
        connections.close_all()  # those that listeners opened on this thread

    def _has_child(self, slot: int) -> bool:
        """See to a child for the next job, that has loaded and whose connections live; return whether there is one."""
        worker, reason = self._workers[slot], ""
        if worker is not None and not worker.is_alive():
            worker.end()
            worker = None
        try:
            if worker is None:
                worker = self._workers[slot] = Child()
            elif not worker.doubt.arises():
                return True
            else:
                worker.send(0, ASK)
            deadline = clock.monotonic() + LOAD_SECONDS
            while clock.monotonic() < deadline and not self._closed:
                if worker.wait(ANSWER_POLL_SECONDS) is not None:
                    return True
        except (EOFError, OSError) as error:  # it has ended, or the system refuses a process
            reason = str(error)
        self._workers[slot] = None
        if worker is not None:
            reason = exit_text(worker.end(seconds=DEATH_SECONDS))
        if not self._closed:
            logger.error("A process for tasks does not start (%s). Its tasks wait for the next try", reason)
        return False

    def _start_failed(self) -> None:
        self._failed_starts += 1

    def _retire(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            with suppress(OSError):
                worker.send(0, None)  # it ends in order, with its exit handlers
            worker.end(seconds=END_SECONDS)

    def _settlements(self, slot: int, job: Job) -> Sequence[Settlement | None]:
        return decide_all(job.leases, self._outcomes(slot, job))

    def _outcomes(self, slot: int, job: Job) -> Sequence[Outcome | Settlement | None]:
        worker = self._workers[slot]
        assert worker is not None  # noqa: S101 -- for the type checker: ``_has_child`` made it
        try:
            answers = worker.call(job)
        except (EOFError, OSError):
            self._workers[slot] = None
            return _died(job, worker, exit_text(worker.end(seconds=DEATH_SECONDS)))
        except Exception as error:  # something of the job cannot be sent
            return [Fail(error)] * len(job.leases)
        if len(answers) < len(job.leases):  # one failure for the whole job
            answers = answers * len(job.leases)
        return applied(answers, job.leases)


class IsolatedExecutor(ProcessExecutor):
    """Runs tasks that may kill their process, of processors that would run in the poller's own process otherwise."""

    linger = LINGER_SECONDS

    def __init__(self, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(MAX_ISOLATED_TASKS, finish, limiter)

    @property
    def works(self) -> bool:
        return self._failed_starts < MAX_FAILED_STARTS

    def _start_failed(self) -> None:
        """Release the tasks if no process starts: they run in the poller's own process then."""
        super()._start_failed()
        if self.works or self._closed:
            return
        logger.error("The process for tasks whose processes died does not start. They run one by one in the poller's")
        self._release(job.lease for job in self.withdraw())


def can_isolate(processor: Processor | None) -> bool:
    """Whether a task of this processor can run alone in another process, which finds the processor by its name."""
    if processor is None or not processor.plain or processor.executor is not None:
        return False
    try:
        return import_string(processor.name) is processor.function and processor.function.__module__ != "__main__"
    except (ImportError, AttributeError):
        return False


def _died(job: Job, worker: Child, how: str) -> Sequence[Outcome | Settlement | None]:
    if worker.killed:
        return stopped(job, Fail("Its process was ended"))
    if not worker.has_job:  # it ended between two jobs
        return [Release()] * len(job.leases)
    for lease in job.leases:
        logger.error("Task %s of %s ended its process: %s", lease.id, lease.queue, how, extra=observe.fields(lease))
    return [Fail(ProcessDied(lease.poller_instance, lease.attempt, lease.max_attempts, how)) for lease in job.leases]
