"""How a poller ends: signals ask, the main thread obeys.

The first request drains: nothing more is checked out, what has not started is given back uncharged, what runs
finishes. The second one cancels. After the shutdown timeout nothing is waited for any more.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from types import FrameType

from django_dbtaskqueue.core.durations import format_seconds
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.poller.heartbeat import Heartbeat
from django_dbtaskqueue.poller.loop import Poller

logger = logging.getLogger("django_dbtaskqueue")

GO_ON, DRAIN, CANCEL = range(3)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK = 0.1  # seconds between two looks at what was asked
GRACE = 1.0  # seconds that what was cancelled gets to end


class Stops:
    """What was asked so far: ``GO_ON``, ``DRAIN`` or ``CANCEL``; it only ever grows.

    A signal handler may interrupt the main thread anywhere, under any lock. So it only counts.
    """

    def __init__(self) -> None:
        self._signals = 0
        self._told = GO_ON

    @property
    def level(self) -> int:
        """Return what is asked now."""
        return max(self._told, min(self._signals, CANCEL))

    def tell(self, level: int) -> None:
        """Ask for ``level``, from any thread. Asking twice is asking once."""
        self._told = max(self._told, level)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Count SIGTERM and SIGINT meanwhile; only where Python lets us, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._count) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def run(
    poller: Poller, stops: Stops, *, timeout: timedelta, look: Callable[[Poller], None] = lambda poller: None
) -> list[str]:
    """Run a poller to its end, calling ``look`` now and then; return, in words, what had to be left behind.

    ``timeout`` counts from the first request to stop, or from the end of a run that ends by itself.
    """
    heartbeat = Heartbeat(poller)
    poller.start()
    heartbeat.start()
    try:
        deadline = _until_end(poller, stops, timeout.total_seconds(), look)
        _wait_for_threads(poller, stops, deadline)
        return _left(poller)
    finally:
        heartbeat.stop()
        poller.close()
        notify.flush()


def _until_end(poller: Poller, stops: Stops, timeout: float, look: Callable[[Poller], None]) -> float:
    """Obey until the loop has ended or time is up; return when time is up."""
    done, deadline = GO_ON, float("inf")
    while not poller.wait(LOOK) and monotonic() < deadline:
        look(poller)
        if stops.level > done:
            deadline = min(deadline, monotonic() + timeout)
            done = stops.level
            _obey(poller, done, timeout)
    return min(deadline, monotonic() + timeout)


def _obey(poller: Poller, level: int, timeout: float) -> None:
    if level == DRAIN:
        logger.info("Stopping: waiting at most %s for %s running tasks", format_seconds(timeout), len(poller.running()))
        poller.stop()
    else:
        logger.warning("Stopping now: cancelling %s running tasks", len(poller.running()))
        poller.cancel()


def _wait_for_threads(poller: Poller, stops: Stops, deadline: float) -> None:
    """Wait for the tasks that were given up: their threads run on after their failure was written."""
    pause = threading.Event()
    asked = monotonic()
    while poller.running() and monotonic() < deadline:
        if stops.level == CANCEL and monotonic() > asked + GRACE:
            break
        pause.wait(LOOK)


def _left(poller: Poller) -> list[str]:
    now = monotonic()
    runs = poller.running()
    left = [
        f"Task {run.job.lease.id} of {run.job.lease.queue} ({run.job.lease.reference or 'no reference'}) still runs "
        f"after {format_seconds(now - run.started)}; its attempt stays charged"
        for run in runs
    ]
    unsettled = len(poller.settler.held) - len(runs)
    if not poller.wait(0) and unsettled > 0:
        left.append(f"{unsettled} outcomes could not be stored; their leases run out, and the tasks are taken again")
    return left
