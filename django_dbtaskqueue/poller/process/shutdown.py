"""How a poller stops. A signal only counts; the main thread stops the poller.

The first request drains: the poller checks nothing out, gives back uncharged what has not started, and waits for what
runs. The second request cancels what runs. After the shutdown timeout the poller waits for nothing.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.db import notify

if TYPE_CHECKING:
    from django_dbtaskqueue.poller.heartbeat import Heartbeat
    from django_dbtaskqueue.poller.loop import Poller

logger = logging.getLogger("django_dbtaskqueue")

RUN, DRAIN, CANCEL = range(3)
SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REQUEST_POLL_INTERVAL_S = 0.1
CANCEL_GRACE_S = 1.0  # time that cancelled tasks get to end


class ShutdownRequest:
    """The requested level: ``RUN``, ``DRAIN`` or ``CANCEL``. It never goes down.

    A signal handler may interrupt the main thread anywhere, under any lock. So the handler only counts.
    """

    def __init__(self) -> None:
        self._signals = 0
        self._requested = RUN
        self.retired = False  # drain without a deadline: another process takes this one's place

    @property
    def level(self) -> int:
        return max(self._requested, min(self._signals, CANCEL))

    def request(self, level: int) -> None:
        """Request ``level``. Any thread may call this, and may call it twice."""
        self._requested = max(self._requested, level)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Count SIGTERM and SIGINT inside the block. Python allows this in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._count) for number in SHUTDOWN_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def run(
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
    poller.start()
    heartbeat.start()
    try:
        threads = _ThreadMonitor(poller, heartbeat)
        deadline = _wait_for_end(poller, shutdown, timeout.total_seconds(), threads, on_tick)
        _wait_for_threads(poller, shutdown, deadline)
        return threads.left + _left(poller)
    finally:
        heartbeat.stop()
        poller.close()
        notify.flush()


class _ThreadMonitor:
    """Notices a thread that ended although the poller runs. Without it the poller would only look healthy."""

    def __init__(self, poller: Poller, heartbeat: Heartbeat) -> None:
        self.left: list[str] = []  # what to report at the end
        self._poller = poller
        self._heartbeat = heartbeat

    def is_over(self) -> bool:
        """Stop the poller if a thread has ended; return whether no thread is left that can store an outcome."""
        poller = self._poller
        if not self.left:
            threads = [*poller.threads(), *self._heartbeat.threads()]
            ended = [thread.name for thread in threads if thread.ended]
            if not ended or poller.stopping:
                return False
            self.left = [f"Thread {name} ended: its poller ends, another one must replace it" for name in ended]
            poller.stop()
        return not poller.can_settle()


def _wait_for_end(
    poller: Poller,
    shutdown: ShutdownRequest,
    timeout: float,
    threads: _ThreadMonitor,
    on_tick: Callable[[Poller], None],
) -> float:
    """Pass requests on until the loop has ended or the timeout is over; return the deadline."""
    done, deadline = RUN, float("inf")
    while not poller.wait(REQUEST_POLL_INTERVAL_S) and clock.monotonic() < deadline:
        on_tick(poller)
        if threads.is_over():
            return clock.monotonic()
        if threads.left:
            deadline = min(deadline, clock.monotonic() + timeout)
        if shutdown.retired and not poller.stopping:
            logger.info("Another process takes over: waiting for %s running tasks", len(poller.running()))
            poller.stop()
        if shutdown.level > done:
            deadline = min(deadline, clock.monotonic() + timeout)
            done = shutdown.level
            count = len(poller.running())
            if done == DRAIN:
                logger.info("Stopping: waiting at most %s for %s running tasks", format_seconds(timeout), count)
                poller.stop()
            else:
                logger.warning("Stopping now: cancelling %s running tasks", count)
                poller.cancel()
    return min(deadline, clock.monotonic() + timeout)


def _wait_for_threads(poller: Poller, shutdown: ShutdownRequest, deadline: float) -> None:
    """Wait for cancelled tasks: their threads run on after the failure was written."""
    began = clock.monotonic()
    while poller.running() and clock.monotonic() < deadline:
        if shutdown.level == CANCEL and clock.monotonic() > began + CANCEL_GRACE_S:
            break
        clock.wait(threading.Event(), REQUEST_POLL_INTERVAL_S)


def _left(poller: Poller) -> list[str]:
    now = clock.monotonic()
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
