"""A child process that runs jobs for a poller: spawned, spoken to by a pipe, and killed with all that it started."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

from django.db import connections

from django_dbtaskqueue.core.outcomes import Fail
from django_dbtaskqueue.poller.executors import Answer

END_SECONDS = 5.0  # that a killed process may take to end
DEATH_SECONDS = 0.5  # from the end of its pipe until its exit code is known
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
Message = tuple[int, list[Answer] | None]  # the number of a job and its answers; None: what the executors agreed on


class Child:
    """The poller's side of a child process. Any thread may send to it and kill it; one thread receives."""

    def __init__(self, serve: Callable[[Channel], None], name: str) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        databases = {alias: connections.settings[alias]["NAME"] for alias in connections}
        self._process = context.Process(target=_enter, args=[serve, theirs, databases], name=name, daemon=True)
        self._process.start()
        theirs.close()
        self._sending = threading.Lock()
        self.killed = False  # by this process

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid or 0

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int, what: object) -> None:
        """Send a job or another message. Raise ``OSError`` if it has ended, other errors for what cannot be sent."""
        message = ForkingPickler.dumps(what)
        with self._sending:
            self._pipe.send(number)
            self._pipe.send_bytes(message)

    def receive(self, seconds: float) -> Message | None:
        """Return its next message, or None after so many seconds. Raise ``EOFError`` or ``OSError`` if it has ended."""
        if self._pipe.poll(seconds):
            return self._pipe.recv(), _received(self._pipe)
        if not self.is_alive():  # a process that it forked keeps the pipe open
            raise EOFError("the process has ended")
        return None

    def kill(self) -> None:
        """End it at once, with the processes that it started, whatever they do. Returns before they have ended."""
        self.killed = True
        self._kill_group()
        self._process.kill()

    def end(self, *, seconds: float = 0.0) -> int | None:
        """Kill it, if it still runs after so many seconds, and free what it took; return its exit code."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self.kill()
        else:
            self._kill_group()  # what it started
        self._pipe.close()
        self._process.join(END_SECONDS)
        return self._process.exitcode

    def _kill_group(self) -> None:
        # It has just begun, or ended, or the system has no such groups.
        with suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.pid, signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Let it end in order, with its exit handlers; wait for that."""
        with suppress(OSError):
            self.send(0, None)
            self._process.join(END_SECONDS)


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
    known = code is not None and -code in set(signal.Signals)
    return signal.Signals(-code).name if code is not None and known else f"exit code {code}"


def _received(pipe: Connection) -> list[Answer] | None:
    try:
        answers: list[Answer] | None = pipe.recv()
    except (EOFError, OSError):
        raise
    except Exception as error:  # of a class that cannot be made again
        return [Answer(Fail(error), None, "")]
    return answers


# -- in the process ----------------------------------------------------------------------------------------------------


class Channel:
    """The child's side. Any thread may send; one thread receives."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def receive(self) -> tuple[int, object]:
        """Return the next message. A job that cannot be read is answered with that failure, and passed over."""
        while True:
            number: int = self._pipe.recv()
            try:
                return number, self._pipe.recv()
            except (EOFError, OSError):
                raise
            except Exception as error:  # this process does not find the processor
                self.send(number, [Answer(Fail(error), None, "")])

    def send(self, number: int, answers: list[Answer] | None) -> None:
        """Send the answers of a job, or what None means to the executor."""
        try:
            data = ForkingPickler.dumps(answers)
        except Exception as error:  # an error or a result that cannot be sent
            data = ForkingPickler.dumps([Answer(Fail(f"{type(error).__name__}: {error}"), None, "")])
        with self._sending:
            try:
                self._pipe.send(number)
                self._pipe.send_bytes(data)
            except OSError:  # the poller has ended
                os._exit(0)


def _enter(serve: Callable[[Channel], None], pipe: Connection, databases: Mapping[str, object]) -> None:
    """Load the project, then serve. ``databases``: their names, which in a test are not those of the settings."""
    with suppress(AttributeError):  # Ctrl-C on the terminal is for the poller; what a task starts is killed with it
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_the_poller)
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
    serve(Channel(pipe))


def _leave_to_the_poller(*_: object) -> None:
    """Do nothing: the poller decides when the tasks end. Programs that a task starts do not inherit this."""
