"""The parent of ``--processes``: it starts children, replaces those that die, and passes on what signals ask.

It never touches the database and runs no processor, so that nothing but a signal can take it away.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import IO

from django_dbtaskqueue.core.durations import format_seconds, next_pause
from django_dbtaskqueue.poller.process import child_channel
from django_dbtaskqueue.poller.process.shutdown import DRAIN, GO_ON, LOOK, Stops
from django_dbtaskqueue.poller.process.status_line import Snapshot

logger = logging.getLogger("django_dbtaskqueue")

BOOT = 60.0  # seconds until the first sign of life of a child that loads a large project
MISSED = 3  # heartbeats without a sign of life that make a child a wedged one
YOUNG = 10.0  # seconds; a child that dies younger is replaced more slowly each time
PAUSE = (0.1, 5.0)  # seconds before it is, at first and at most
MARGIN = timedelta(seconds=10)  # that children get beyond their own shutdown timeout
USAGE, CONFIGURATION = 2, 3  # exit codes that no new child could improve on
FLAG = "--child"


@dataclass(slots=True, eq=False)
class Child:
    """One place for a child process, and who is in it now."""

    process: subprocess.Popen[bytes] | None = None
    wire: socket.socket | None = None
    started: float = 0.0
    heard: float | None = None  # when it last gave a sign of life
    start_at: float = 0.0
    pause: float = PAUSE[0]
    told: int = GO_ON
    killed: bool = False
    code: int | None = None  # how the last one ended, when no other is to follow
    latest: Snapshot = field(default_factory=Snapshot)
    before: tuple[int, int] = (0, 0)  # finished and failed by those that were here before
    rest: bytes = b""  # what it sent of an unfinished line
    text: bytes = b""  # the same of its log


class Supervisor:
    """Keeps ``count`` children running ``command`` until they are to end."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        stops: Stops,
        *,
        endless: bool,
        heartbeat: timedelta,
        timeout: timedelta,
        above: Callable[[str], None] | None = None,
    ) -> None:
        """``above`` takes the children's log lines; without it they write to standard error themselves."""
        self._command = list(command)
        self._above = above
        self.stops = stops
        self._endless = endless
        self._silence = MISSED * heartbeat.total_seconds()
        self._patience = (timeout + MARGIN).total_seconds()
        self._deadline = float("inf")
        self._selector = selectors.DefaultSelector()
        self.children = [Child() for _ in range(count)]

    def run(self, look: Callable[[Snapshot], None] = lambda snapshot: None) -> int:
        """Supervise until every child has ended for good; return the worst exit code of the last ones."""
        while any(child.code is None for child in self.children):
            self._listen()  # first, so that nobody is judged by what has not been read yet
            for child in self.children:
                if child.code is None:
                    self._tend(child)
            self._pass_on()
            look(self.snapshot())
        self._selector.close()
        return max(child.code or 0 for child in self.children)

    def snapshot(self) -> Snapshot:
        """Return all children taken together, with what their predecessors did."""
        parts = [child.latest for child in self.children if child.code is None]
        done = [Snapshot(finished=child.before[0], failed=child.before[1]) for child in self.children]
        return Snapshot.total([*parts, *done])

    # -- one child ---------------------------------------------------------------------------------------------------

    def _tend(self, child: Child) -> None:
        if child.process is None:
            if self.stops.level > GO_ON:
                child.code = 0
            elif monotonic() >= child.start_at:
                self._try_start(child)
            return
        code = child.process.poll()
        if code is not None:
            self._ended(child, child.process.pid, code)
        elif not child.killed:
            self._judge(child, child.process)

    def _try_start(self, child: Child) -> None:
        try:
            self._start(child)
        except OSError as error:  # the machine is out of processes or memory
            child.start_at = monotonic() + PAUSE[1]
            logger.error("Cannot start a child, trying again in %s: %s", format_seconds(PAUSE[1]), error)

    def _start(self, child: Child) -> None:
        ours, theirs = child_channel.open_pair()
        with theirs:
            fd = theirs.fileno()
            # A process group of its own: a Ctrl-C at the terminal reaches the supervisor alone, and so counts once.
            child.process = subprocess.Popen(
                [*self._command, FLAG, str(fd)],
                pass_fds=[fd],
                process_group=0,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if self._above else None,
            )
        child.wire, child.started, child.heard, child.rest = ours, monotonic(), None, b""
        child.told, child.killed, child.latest = GO_ON, False, Snapshot()
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, child))
        if log := child.process.stderr:
            os.set_blocking(log.fileno(), False)
            self._selector.register(log, selectors.EVENT_READ, partial(self._relay, child, log))
        logger.info("Started child %s", child.process.pid)

    def _ended(self, child: Child, pid: int, code: int) -> None:
        self._hear(child)
        self._hang_up(child)
        if child.process and (log := child.process.stderr):
            while self._relay(child, log):
                pass
        child.process = None
        child.before = child.before[0] + child.latest.finished, child.before[1] + child.latest.failed
        child.latest = Snapshot()
        if code in (USAGE, CONFIGURATION):
            child.code = code
            self.stops.tell(DRAIN)
        elif self.stops.level > GO_ON:
            child.code = int(code not in (0, -signal.SIGTERM, -signal.SIGINT))  # a signal may come before the handlers
        elif code == 0 and not self._endless:
            child.code = 0
        else:
            self._replace(child, pid, code)
        if child.code:
            logger.error("Child %s ended: %s", pid, words(code))

    def _replace(self, child: Child, pid: int, code: int) -> None:
        young = monotonic() - child.started < YOUNG
        pause = child.pause if young else PAUSE[0]
        child.pause = next_pause(pause, *PAUSE)
        child.start_at = monotonic() + pause
        log = logger.info if code == 0 else logger.error
        log("Child %s ended: %s. Starting another one in %s", pid, words(code), format_seconds(pause))

    def _judge(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        """Kill a child that gives no sign of life, or does not end in time."""
        now = monotonic()
        silent = now - child.started - BOOT if child.heard is None else now - child.heard - self._silence
        if silent > 0:
            logger.error(
                "Child %s gave no sign of life for %s: it is stopped, or a processor holds the interpreter. "
                "Killing it; its tasks are taken again when their leases run out",
                process.pid,
                format_seconds(silent + (BOOT if child.heard is None else self._silence)),
            )
        elif now > self._deadline:
            logger.error("Child %s did not end in time. Killing it", process.pid)
        else:
            return
        process.kill()
        child.killed = True

    # -- the lines to the children -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        for key, _ in self._selector.select(LOOK):
            key.data()

    def _hear(self, child: Child) -> None:
        if child.wire is None:
            return
        try:
            received = child.wire.recv(child_channel.TAKEN)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._hang_up(child)
            return
        found, child.rest = child_channel.beats(child.rest + received)
        child.heard = monotonic()
        for facts in found:
            child.latest = Snapshot(**facts)

    def _hang_up(self, child: Child) -> None:
        if child.wire is not None:
            self._selector.unregister(child.wire)
            child.wire.close()
            child.wire = None

    def _relay(self, child: Child, log: IO[bytes]) -> bool:
        """Pass on what a child logged; return whether there was anything."""
        if log.closed or self._above is None:
            return False
        try:
            received = os.read(log.fileno(), child_channel.TAKEN)
        except BlockingIOError:
            return False
        *lines, child.text = (child.text + received).split(b"\n")
        for line in lines:
            self._above(line.decode(errors="replace"))
        if not received:
            self._selector.unregister(log)
            log.close()
        return bool(received)

    def _pass_on(self) -> None:
        """Tell the children what is asked, once per level: a service manager may have signalled them, too."""
        level = self.stops.level
        if level == GO_ON:
            return
        if self._deadline == float("inf"):
            self._deadline = monotonic() + self._patience
            logger.info("Stopping %s children", sum(child.process is not None for child in self.children))
        for child in self.children:
            if child.told < level and child.wire is not None:
                child.told = level
                with suppress(OSError):  # it has just ended
                    child.wire.send(str(level).encode())


def words(code: int) -> str:
    """Return what an exit code of ``subprocess`` means."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
