"""``--processes``: a supervisor starts child processes, replaces those that die, and passes shutdown requests on.

The supervisor never touches the database and runs no processor, so that only a signal can end it. A socket connects it
with each child. The child writes snapshots, one JSON object per line; each is also a sign of life. The supervisor
writes the requested shutdown level, one digit each. The end of the stream means that the other side has died.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field, replace
from datetime import timedelta
from itertools import count as counted_from
from select import select
from typing import IO

from django.utils import autoreload

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock, format_seconds, next_pause
from django_dbtaskqueue.poller.executors.process import Wear, exit_text, kill_group
from django_dbtaskqueue.poller.lifetime import DRAIN, REQUEST_POLL_S, RETIRE, RUN, PollerSnapshot, ShutdownRequest

CHILD_BOOT_TIMEOUT_S = 60.0  # until the first sign of life of a child that loads a large project
MAX_SILENT_HEARTBEATS = 3  # after this many heartbeats without a sign of life a child is killed
MAX_SNAPSHOT_INTERVAL_S = 1.0
EARLY_EXIT_S = 10.0  # a child that dies earlier than this is replaced more slowly each time
MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.1, 5.0
SHUTDOWN_MARGIN = timedelta(seconds=10)  # that children get beyond their own shutdown timeout
USAGE_CODE, CONFIGURATION_CODE = 2, 3  # exit codes that a new child would end with, too
CHILD_FLAG = "--child"
RECEIVE_BYTES = 65_536
LOG_END_S = 0.5  # that the last log lines of a child may take; a process that it started may keep the pipe open


class ChildChannel:
    """The child's end of the socket, with a thread that ends with the process: so it shows that threads run here."""

    def __init__(self, fd: int, shutdown: ShutdownRequest, heartbeat: timedelta) -> None:
        self.snapshot: Callable[[], PollerSnapshot] = PollerSnapshot
        self._shutdown = shutdown
        self._interval = min(MAX_SNAPSHOT_INTERVAL_S, heartbeat.total_seconds() / 3)
        os.set_inheritable(fd, False)  # a program started by a processor must not keep it open
        self._socket = socket.socket(fileno=fd)
        threading.Thread(target=self._loop, name="dbtaskqueue-child-channel", daemon=True).start()

    def polls(self, snapshot: Callable[[], PollerSnapshot]) -> None:
        """Tell the supervisor that this child's settings are right, and send these snapshots from now on."""
        self.snapshot = snapshot
        self._send(replace(snapshot(), state="STARTUP"))

    def _loop(self) -> None:
        while True:
            self._send(self.snapshot())
            if not select([self._socket], [], [], self._interval)[0]:
                continue
            received = b""
            with suppress(OSError):
                received = self._socket.recv(RECEIVE_BYTES)
            if not received:
                break
            self._shutdown.request(max(map(int, received.decode())))
        logger.warning("The supervisor is gone: stopping")
        self._shutdown.request(DRAIN)

    def _send(self, snapshot: PollerSnapshot) -> None:
        line = json.dumps(asdict(snapshot)).encode() + b"\n"
        with suppress(OSError):  # the supervisor is gone, or stopped and its buffer is full
            self._socket.send(line, socket.MSG_DONTWAIT)


@dataclass(slots=True, eq=False)
class PollerProcess:
    """One child process, and what is known of those that ran in its place before."""

    place: int  # counted from 1; children that live at the same time have different ones
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket | None = None
    started: float = 0.0
    last_seen: float | None = None  # time of the last sign of life
    start_at: float = 0.0
    restart_delay: float = MIN_RESTART_DELAY_S
    requested: int = RUN
    killed: bool = False
    successor: PollerProcess | None = None  # it is worn out, and this one takes its place
    polled: bool = False  # its settings are right, so its exit code is not about them: a task may exit with any
    code: int | None = None  # exit code of the last process, when no other follows
    latest: PollerSnapshot = field(default_factory=PollerSnapshot)
    partial_snapshot: bytes = b""  # the beginning of an unfinished line
    log: threading.Thread | None = None  # that passes its log lines on


@dataclass(eq=False)
class Supervisor:
    """Keeps ``count`` children running ``command`` until a shutdown is requested, or until they have ended."""

    command: Sequence[str]
    count: InitVar[int]
    shutdown: ShutdownRequest
    _: KW_ONLY
    endless: bool
    heartbeat: InitVar[timedelta]
    timeout: InitVar[timedelta]
    above: Callable[[str], object] | None = None  # takes the children's log lines; None: they write them themselves
    options_of: Callable[[int], list[str]] = lambda number: []  # what the child at a place gets besides
    wear: Wear = field(default_factory=Wear)  # after which a child is replaced

    def __post_init__(self, count: int, heartbeat: timedelta, timeout: timedelta) -> None:
        self._done = PollerSnapshot()  # what the processes did that have ended
        self._silence_limit = MAX_SILENT_HEARTBEATS * heartbeat.total_seconds()
        self._stop_timeout = (timeout + SHUTDOWN_MARGIN).total_seconds()
        self._deadline = float("inf")
        self.children = [PollerProcess(place) for place in range(1, count + 1)]

    def run(self, on_tick: Callable[[PollerSnapshot], None] = lambda snapshot: None) -> int:
        """Supervise until every child has ended for good; return the worst exit code of the last ones."""
        while any(child.code is None for child in self.children):
            channels = {child.channel: child for child in self.children if child.channel is not None}
            for channel in select(list(channels), [], [], REQUEST_POLL_S)[0]:  # a sign of life may wait there
                self._receive(channels[channel])
            for child in self.children[:]:
                if child.code is None:
                    self._check(child)
            self._pass_request_on()
            on_tick(self.snapshot())
        return max(child.code or 0 for child in self.children)

    def snapshot(self) -> PollerSnapshot:
        """Return the sum of all children, with what earlier processes did."""
        return PollerSnapshot.total([*[child.latest for child in self.children if child.code is None], self._done])

    # -- one child ---------------------------------------------------------------------------------------------------

    def _check(self, child: PollerProcess) -> None:
        if child.process is None:
            if self.shutdown.level > RUN:
                child.code = 0
            elif clock.monotonic() >= child.start_at:
                child.start_at = clock.monotonic() + MAX_RESTART_DELAY_S
                try:
                    self._start(child)
                except OSError as error:  # the machine is out of processes or memory
                    text = "Cannot start a child, trying again in %s: %s"
                    logger.error(text, format_seconds(MAX_RESTART_DELAY_S), error)
            return
        if (code := child.process.poll()) is not None:
            self._ended(child, child.process.pid, code)
        elif not child.killed:
            self._kill_if_stuck(child, child.process)
            self._retire_if_worn_out(child, child.process.pid)

    def _retire_if_worn_out(self, child: PollerProcess, pid: int) -> None:
        """Start a successor of a worn-out child, at another place; when it polls, let the child drain and end."""
        if self.shutdown.level > RUN or child.requested != RUN or not self.endless:
            return
        if child.successor is None and child.polled and self.wear.reached(child.latest.finished, pid):
            logger.info("Child %s is replaced after %s tasks", pid, child.latest.finished)
            taken = {each.place for each in self.children}
            child.successor = PollerProcess(next(place for place in counted_from(1) if place not in taken))
            self.children.append(child.successor)
        elif child.successor is not None and child.successor.latest.state == "RUNNING":
            self._request(child, RETIRE)

    def _start(self, child: PollerProcess) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            fd = theirs.fileno()
            # A process group of its own: a Ctrl-C at the terminal reaches only the supervisor, and so counts once.
            child.process = subprocess.Popen(
                [*self.command, *self.options_of(child.place), CHILD_FLAG, str(fd)],
                pass_fds=[fd],
                process_group=0,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if self.above else None,
            )
        child.channel, child.started, child.last_seen, child.partial_snapshot = ours, clock.monotonic(), None, b""
        child.requested, child.killed, child.polled, child.latest = RUN, False, False, PollerSnapshot()
        if child.process.stderr and self.above:
            child.log = threading.Thread(target=_relay, args=[child.process.stderr, self.above], daemon=True)
            child.log.start()
        logger.info("Started child %s", child.process.pid)

    def _ended(self, child: PollerProcess, pid: int, code: int) -> None:
        self._receive(child)
        self._close(child)
        if child.log:
            child.log.join(LOG_END_S)
        child.process = None
        done = PollerSnapshot(finished=child.latest.finished, failed=child.latest.failed)
        self._done = PollerSnapshot.total([self._done, done])
        child.latest = PollerSnapshot()
        if code in (USAGE_CODE, CONFIGURATION_CODE) and not child.polled:
            child.code = code
            self.shutdown.request(DRAIN)
        elif child.successor is not None:
            self.children.remove(child)
            logger.info("Child %s was replaced: %s", pid, exit_text(code))
        elif self.shutdown.level > RUN:
            child.code = int(code not in (0, -signal.SIGTERM, -signal.SIGINT))  # a signal may come before the handlers
        elif code == 0 and not self.endless:
            child.code = 0
        else:
            self._replace(child, pid, code)
        if code:
            kill_group(pid)  # its pools' worker processes would run for ever
        if child.code:
            logger.error("Child %s ended: %s", pid, exit_text(code))

    def _replace(self, child: PollerProcess, pid: int, code: int) -> None:
        delay = child.restart_delay if clock.monotonic() - child.started < EARLY_EXIT_S else MIN_RESTART_DELAY_S
        child.restart_delay = next_pause(delay, MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S)
        child.start_at = clock.monotonic() + delay
        log = logger.info if code == 0 else logger.error
        log("Child %s ended: %s. Starting another one in %s", pid, exit_text(code), format_seconds(delay))

    def _kill_if_stuck(self, child: PollerProcess, process: subprocess.Popen[bytes]) -> None:
        now = clock.monotonic()
        limit = CHILD_BOOT_TIMEOUT_S if child.last_seen is None else self._silence_limit
        if child.latest.state in ("ENDING", "STOPPED"):  # Python may take seconds to end, and says nothing then
            limit = max(limit, self._stop_timeout)
        silence = now - (child.last_seen or child.started)
        if silence > limit:
            logger.error(
                "Child %s gave no sign of life for %s: it is stopped, or a processor holds the interpreter. "
                "Killing it; its tasks are taken again when their leases run out",
                process.pid,
                format_seconds(silence),
            )
        elif now > self._deadline:
            logger.error("Child %s did not end in time. Killing it", process.pid)
        else:
            return
        kill_group(process.pid)
        child.killed = True

    # -- sockets and logs of the children ----------------------------------------------------------------------------

    def _receive(self, child: PollerProcess) -> None:
        if child.channel is None:
            return
        try:
            received = child.channel.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close(child)
            return
        child.last_seen = clock.monotonic()
        *lines, child.partial_snapshot = (child.partial_snapshot + received).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # cut short because the socket was full
                child.latest = PollerSnapshot(**json.loads(line))
                child.polled = child.polled or child.latest.state != "INIT"

    def _close(self, child: PollerProcess) -> None:
        if child.channel is not None:
            child.channel.close()
            child.channel = None

    def _pass_request_on(self) -> None:
        level = self.shutdown.level
        if level == RUN:
            return
        if self._deadline == float("inf"):
            self._deadline = clock.monotonic() + self._stop_timeout
            logger.info("Stopping %s children", sum(child.process is not None for child in self.children))
        for child in self.children:
            self._request(child, level)

    def _request(self, child: PollerProcess, level: int) -> None:
        """Send a level to a child, once: a service manager may have signalled it, too."""
        if child.requested < level and child.channel is not None:
            child.requested = level
            with suppress(OSError):  # it has just ended
                child.channel.send(str(level).encode())


def _relay(log: IO[bytes], above: Callable[[str], object]) -> None:
    with log:
        for line in log:
            above(line.decode(errors="replace").removesuffix("\n"))


# -- reload ------------------------------------------------------------------------------------------------------------

# ``--reload``: start the poller's process again when a file of the project changes. For development.
#
# The parent does nothing but start the process, which runs the poller and watches the files that it has loaded. At a
# change it drains, as at the first signal, and ends with ``RELOAD_CODE``. A process that cannot start, such as one
# whose file has a syntax error, is started again at the next change, which the parent sees.

RELOAD_CODE = 4  # exit code


def is_parent() -> bool:
    """Whether this process is to start the one that polls, and not that one."""
    return os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) != "true"


def run_parent(command: Sequence[str], shutdown: ShutdownRequest) -> int:
    """Start the command, and start it again after a change, until a shutdown is requested; return its exit code."""
    env = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
    while True:
        files = dict(autoreload.StatReloader().snapshot_files())
        process = subprocess.Popen(command, env=env, close_fds=False)
        # Ctrl-C on a terminal reaches the process by itself. A SIGTERM may be sent to this one alone.
        before = signal.signal(signal.SIGTERM, lambda *_, process=process: process.terminate())
        code = process.wait()
        signal.signal(signal.SIGTERM, before)
        if code == RELOAD_CODE:
            continue
        if code <= 0 or shutdown.level > RUN:
            return abs(code)
        logger.error("The poller ended with exit code %s. It is started again when a file changes", code)
        while shutdown.level == RUN and files == dict(autoreload.StatReloader().snapshot_files()):
            clock.wait(threading.Event(), REQUEST_POLL_S * 10)
        if shutdown.level > RUN:
            return code


class FileWatcher:
    """Requests a drain when a file that this process has loaded changes."""

    def __init__(self, shutdown: ShutdownRequest) -> None:
        """Start the thread; it ends with the process."""
        self.changed = False
        self._shutdown = shutdown
        threading.Thread(target=self._follow, name="dbtaskqueue-reload", daemon=True).start()

    def _follow(self) -> None:
        try:
            autoreload.get_reloader().run(threading.main_thread())
        except SystemExit:  # how Django's reloader reports a change
            self.changed = True
            self._shutdown.request(DRAIN)
