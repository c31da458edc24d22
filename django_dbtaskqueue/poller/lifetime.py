"""The life of a poller in its process: how it stops, and what it shows its operator meanwhile.

A signal only counts; the main thread stops the poller. The first request drains: the poller checks nothing out, gives
back uncharged what has not started, and waits for what runs. The second request cancels what runs. After the shutdown
timeout the poller waits for nothing.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from django.db import connections
from django.db.models import Model
from django.db.utils import OperationalError

from django_dbtaskqueue.conf.queue import changed_settings
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import __version__, logger
from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.core.outcomes import COMPLETE_FACTS
from django_dbtaskqueue.core.threads import signals_handled
from django_dbtaskqueue.db import liveness, notify
from django_dbtaskqueue.db.session import migrated
from django_dbtaskqueue.operations.checks import check_columns
from django_dbtaskqueue.poller.held_leases import MAX_TASKS_AGAIN, RUN_AGAIN

if TYPE_CHECKING:
    from django_dbtaskqueue.poller.heartbeat import Heartbeat
    from django_dbtaskqueue.poller.loop import Poller
    from django_dbtaskqueue.poller.queue_state import QueueState

RUN, RETIRE, DRAIN, CANCEL = range(4)  # to retire is to drain without a deadline: another process takes over
SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REQUEST_POLL_S = 0.1
CANCEL_GRACE_S = 1.0  # time that cancelled tasks get to end


class ShutdownRequest:
    """The requested level, from ``RUN`` to ``CANCEL``. It never goes down.

    A signal handler may interrupt the main thread anywhere, under any lock. So the handler only counts.
    """

    def __init__(self) -> None:
        self._signals = 0
        self._requested = RUN

    @property
    def level(self) -> int:
        return max(self._requested, (RUN, DRAIN, CANCEL)[min(self._signals, 2)])

    def request(self, level: int) -> None:
        """Request ``level``. Any thread may call this, and may call it twice."""
        self._requested = max(self._requested, level)

    def on_signals(self) -> AbstractContextManager[None]:
        """Count SIGTERM and SIGINT inside the block. Python allows this in the main thread only."""
        return signals_handled(dict.fromkeys(SHUTDOWN_SIGNALS, self._count))

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def run_to_end(
    poller: Poller,
    heartbeat: Heartbeat,
    shutdown: ShutdownRequest,
    *,
    timeout: timedelta,
    on_tick: Callable[[Poller], None] = lambda poller: None,
) -> list[str]:
    """Run a poller and its heartbeat to the poller's end; return a sentence for each thing that was left behind.

    Calls ``on_tick`` regularly. ``timeout`` counts from the first request, or from the end of a run without one.
    """
    with threads_started(poller, heartbeat):
        ended, deadline = _wait_for_end(poller, heartbeat, shutdown, timeout.total_seconds(), on_tick)
        _wait_for_threads(poller, shutdown, deadline)
        return [f"Thread {name} ended: its poller ends, another one must replace it" for name in ended] + _left(poller)


@contextmanager
def threads_started(poller: Poller, heartbeat: Heartbeat) -> Iterator[None]:
    """Run the threads of both inside the block."""
    poller.start()
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.stop()
        poller.close()
        notify.flush()


def ended_threads(poller: Poller, heartbeat: Heartbeat) -> list[str]:
    """Return the threads that ended although the poller runs. Without them it would only look healthy."""
    ended = [thread.name for thread in (*poller.threads(), *heartbeat.threads) if thread.ended]
    return [] if poller.stopping else ended


def _wait_for_end(
    poller: Poller, heartbeat: Heartbeat, shutdown: ShutdownRequest, timeout: float, on_tick: Callable[[Poller], None]
) -> tuple[list[str], float]:
    """Pass requests on until the loop ends or must be left; return threads that ended too early, and the deadline."""
    ended, done, deadline = list[str](), RUN, float("inf")
    while not poller.wait(REQUEST_POLL_S) and clock.monotonic() < deadline:
        on_tick(poller)
        if not ended and (ended := ended_threads(poller, heartbeat)):
            deadline = clock.monotonic() + timeout
            poller.stop()
        if ended and not poller.can_settle():
            return ended, clock.monotonic()
        if shutdown.level > done:
            done, count = shutdown.level, len(poller.running())
            if done > RETIRE:
                deadline = min(deadline, clock.monotonic() + timeout)
            if done == CANCEL:
                logger.warning("Stopping now: cancelling %s running tasks", count)
                poller.cancel()
            else:
                longest = "" if done == RETIRE else f" at most {format_seconds(timeout)}"
                reason = "Another process takes over" if done == RETIRE else "Stopping"
                logger.info("%s: waiting%s for %s running tasks", reason, longest, count)
                poller.stop()
    return ended, min(deadline, clock.monotonic() + timeout)


def _wait_for_threads(poller: Poller, shutdown: ShutdownRequest, deadline: float) -> None:
    """Wait for cancelled tasks: their threads run on after the failure was written."""
    began = clock.monotonic()
    while poller.running() and clock.monotonic() < deadline:
        if shutdown.level == CANCEL and clock.monotonic() > began + CANCEL_GRACE_S:
            break
        clock.wait(threading.Event(), REQUEST_POLL_S)


def _left(poller: Poller) -> list[str]:
    runs = poller.running()
    left = [
        f"Task {run.job.lease.id} of {run.job.lease.queue} ({run.job.lease.reference or 'no reference'}) still runs "
        f"after {format_seconds(clock.monotonic() - run.started)}; its attempt stays charged"
        for run in runs
    ]
    unsettled = len(poller.settler.held) - len(runs)
    if not poller.wait(0) and unsettled > 0:
        left.append(f"{unsettled} outcomes could not be stored; their leases run out, and the tasks are taken again")
    return left


# -- what it shows: opening lines, a status line at the bottom of the terminal, a closing line -------------------------

RATE_PERIOD_S = 5.0
REDRAW_INTERVAL_S = 0.25
CLEAR_LINE = "\r\x1b[K"  # back to the first column, and clear to the end of the line


@dataclass(frozen=True, slots=True)
class PollerSnapshot:
    """The figures of one poller, or the sum of several pollers, at one moment."""

    state: str = "INIT"
    running: int = 0
    slots: int = 0
    finished: int = 0
    failed: int = 0

    @classmethod
    def of(cls, poller: Poller) -> PollerSnapshot:
        counts = poller.counts
        return cls(poller.state, len(poller.running()), poller.slots(), counts.finished, counts.failed)

    @classmethod
    def total(cls, parts: Iterable[PollerSnapshot]) -> PollerSnapshot:
        """Return the sum of several. Its state is the most alarming one of theirs."""
        found = list(parts)
        states = {part.state for part in found}
        state = next((state for state in ("WAITING", "ENDING", "RUNNING") if state in states), "INIT")
        sums = [sum(getattr(part, name) for part in found) for name in ("running", "slots", "finished", "failed")]
        return cls(state, *sums)


class StatusLine:
    """Keeps one status line at the bottom of a terminal. Log lines written to it appear above. Any thread may write."""

    def __init__(self, terminal: TextIO, queues: Iterable[str]) -> None:
        self._terminal = terminal
        self._queues = ", ".join(queues)
        self._lock = threading.Lock()
        self._shown = ""
        self._drawn = 0.0
        self._past: deque[tuple[float, int]] = deque()

    def draw(self, now: PollerSnapshot) -> None:
        """Show a snapshot, unless the last one was shown less than ``REDRAW_INTERVAL_S`` ago."""
        if clock.monotonic() - self._drawn >= REDRAW_INTERVAL_S:
            self._drawn = clock.monotonic()
            self._rewrite(shown=self._text(now)[: max(1, shutil.get_terminal_size().columns - 1)])

    def close(self) -> None:
        self._rewrite(shown="")

    def write(self, text: str) -> None:
        """Write a line above the status line, or a line and its traceback, with or without its end."""
        self._rewrite(text.removesuffix("\n") + "\n")

    def _rewrite(self, above: str = "", *, shown: str | None = None) -> None:
        with self._lock:
            self._shown = self._shown if shown is None else shown
            self._terminal.write(CLEAR_LINE + above + self._shown)
            self._terminal.flush()

    def _text(self, now: PollerSnapshot) -> str:
        texts = {"INIT": "starting", "STARTUP": "starting", "WAITING": "waiting for the database", "ENDING": "draining"}
        doing = texts.get(now.state) or ("working" if now.running else "idle")
        parts = [f"{now.running}/{now.slots} running", f"{now.finished} done", f"{now.failed} failed"]
        return " | ".join([self._queues, *parts, f"{self._rate(now.finished):.0f}/s", doing])

    def _rate(self, finished: int) -> float:
        now = clock.monotonic()
        self._past.append((now, finished))
        while len(self._past) > 2 and self._past[0][0] < now - RATE_PERIOD_S:
            self._past.popleft()
        since, before = self._past[0]
        return max(0, finished - before) / (now - since) if now > since else 0.0


def opening(poller: Poller) -> Iterator[str]:
    """Yield the two opening lines; raise ``ImproperlyConfigured`` for a database that is not migrated."""
    found: dict[str, list[type[Model]]] = {}
    for state in poller.queues.values():
        found.setdefault(state.port.alias, []).append(state.port.model)
    databases = ", ".join(f"{database(alias, models)} ({alias})" for alias, models in found.items())
    options = poller.options
    yield f"django-dbtaskqueue {__version__} on {databases}, instance {poller.instance}"
    queues = ", ".join(map(_queue, poller.queues.values()))
    yield f"Queues: {queues}. Slots: {options.threads} threads, {options.coroutines} coroutines"


def closing(poller: Poller, seconds: float) -> str:
    """Return the closing line. It counts tasks: one that was tried again is told as it ended."""
    counts = poller.counts
    others = {name: counts.outcomes[name] for name in sorted({*counts.outcomes} - {"", COMPLETE_FACTS.counts_as})}
    ended = {"completed": counts.finished - sum(others.values()), "failed": 0, **others, "lost": others.get("lost", 0)}
    ends = [f"{number} {name}" for name, number in ended.items() if name not in RUN_AGAIN]
    again, over = Counter(counts.again.values()), "over " if len(counts.again) == MAX_TASKS_AGAIN else ""
    shown = ", ".join(ends + [f"{over}{again[name]} {words}" for name, words in RUN_AGAIN.items() if again[name]])
    return f"Stopped: {shown} in {format_seconds(seconds)} ({counts.finished / (seconds or 1):.1f}/s)"


def database(alias: str, task_tables: Iterable[type[Model]]) -> str:
    """Return a database's vendor and version, or that it is away; ``ImproperlyConfigured`` if it cannot be used."""
    connection = connections.create_connection(alias)
    try:
        with migrated(), liveness.bounded_answers(connection):
            version = ".".join(map(str, connection.get_database_version()))
            check_columns(connection, task_tables)
    except OperationalError:
        return f"{connection.display_name}, not reachable yet"
    finally:
        connection.close()
    return f"{connection.display_name} {version}"


def _queue(state: QueueState) -> str:
    parts = [f"weight {state.weight}"] if state.weight != 1 else []
    parts += [f"{name} {value}" for name, _default, value in changed_settings(QueueSettings(), state.settings)]
    return f"{state.name} ({', '.join(parts)})" if parts else state.name
