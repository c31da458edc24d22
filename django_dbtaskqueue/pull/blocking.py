"""Blocking ``take`` and ``wait``: threads wait for a task, first come, first served.

Of the threads of this process that wait for the same tasks, only the first one polls the database. It sleeps until a
wake-up comes (from this process, or by NOTIFY from another one) or until its next poll is due: a lost wake-up costs
time, and no task. Between processes the database decides who gets a task.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeVar

from django.db import connections

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.threads import after_fork
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.notify import Wakeup

T = TypeVar("T")
GIVE_WAY_S = 1.0  # a thread that does not want to wait lets those before it poll first, for at most this long
LISTENER_LINGER_S = 10.0  # the listening connection outlives the last waiting thread


class WaitKey(NamedTuple):
    """Threads with the same key wait for the same tasks."""

    queue: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    group: str | None = None
    takes: bool = True  # False: they wait for a task that can be taken, and do not take it


class WaitQueue:
    """The threads of one key, in the order they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._wakeups = 0
        self._polls = 0  # begun so far
        self._last_empty_poll = 0  # its number
        self.entered = 0  # threads inside ``take`` or ``wait``; guarded by _wait_queues_lock

    def wake(self) -> None:
        """There may be something to take: let the first thread poll now."""
        with self._changed:
            self._wakeups += 1
            self._changed.notify_all()

    def take(self, poll: Callable[[], T | None], until: float | None, pause: Callable[[], float]) -> T | None:
        """Return what ``poll`` finds when it is this thread's turn; None when nothing was found by ``until``.

        ``until`` None: do not wait. ``pause`` returns the seconds to sleep at most before the next poll.
        """
        me = object()
        with self._changed:
            self._waiting.append(me)
            next_poll = self._polls + 1
        if until is None:
            self.wake()
        try:
            return self.poll(poll, until, pause) if self._is_our_turn(me, until, next_poll) else None
        finally:
            with self._changed:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _is_our_turn(self, me: object, until: float | None, next_poll: int) -> bool:
        """Wait until this thread is the first.

        False on timeout. A thread that does not want to wait gets False, too, when a poll that began after it came
        found nothing; it polls out of turn when those before it take too long.
        """
        with self._changed:
            if until is None:
                clock.wait_for(
                    self._changed, lambda: self._waiting[0] is me or self._last_empty_poll >= next_poll, GIVE_WAY_S
                )
                return self._waiting[0] is me or self._last_empty_poll < next_poll
            return clock.wait_for(self._changed, lambda: self._waiting[0] is me, max(0.0, until - clock.monotonic()))

    def poll(
        self, poll: Callable[[], T | None], until: float | None, pause: Callable[[], float], *, for_all: bool = True
    ) -> T | None:
        """Poll, and sleep until a wake-up or the next poll, until something is found or the time is over.

        ``for_all``: a poll that found nothing tells the other threads that there is nothing for them either.
        """
        while True:
            with self._changed:
                wakeups = self._wakeups
                number = self._polls = self._polls + 1
            if (found := poll()) is not None:
                return found
            with self._changed:
                if for_all:
                    self._last_empty_poll = max(self._last_empty_poll, number)
                    self._changed.notify_all()
            if until is None or clock.monotonic() >= until:
                return None
            self._sleep(min(until - clock.monotonic(), pause()), wakeups)

    def _sleep(self, seconds: float, wakeups: int) -> None:
        with self._changed:
            clock.wait_for(self._changed, lambda: self._wakeups != wakeups, seconds)


class NotifyListener:
    """Receives the wake-ups of other processes on its own connection, while a thread waits and a little longer."""

    def __init__(self, alias: str, linger_s: float, woken: Callable[[str], None]) -> None:
        """``woken`` is called with the payload of each wake-up, and with "" when the connection is made."""
        self._alias = alias
        self._woken = woken
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._users = 0
        self._wakeup: Wakeup | None = None
        self._stopping: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._stopping is not None:
                self._stopping.cancel()
            if self._wakeup is None:
                self._wakeup = Wakeup(self._alias, self._woken)  # wakes once more when it is connected
                self._wakeup.start()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._stopping = threading.Timer(self._linger_s, self._stop)
                    self._stopping.daemon = True
                    self._stopping.start()

    def _stop(self) -> None:
        with self._lock:
            if self._users:
                return
            wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            wakeup.stop()


_wait_queues_lock = threading.Lock()
_wait_queues: dict[WaitKey, WaitQueue] = {}
_listeners: dict[tuple[str, str, Callable[[str], None]], NotifyListener] = {}


def take(
    key: WaitKey, poll: Callable[[], T | None], until: float | None, pause: Callable[[], float], *, alone: bool = False
) -> T | None:
    """``WaitQueue.take`` of a key, listening for wake-ups from the first pause on.

    ``alone``: poll out of turn, because this thread may hold locks that the others wait for.
    """
    with _entered(key) as wait_queue, ExitStack() as stack:
        notify.listen(wake)
        listening: list[NotifyListener] = []

        def listening_pause() -> float:
            if not listening:  # a take that finds something at once needs no listener
                listening.extend(listener(alias, wake) for alias in key.aliases)
                for one in listening:
                    stack.enter_context(one.listening())
            return pause()

        if alone:
            return wait_queue.poll(poll, until, listening_pause, for_all=False)
        return wait_queue.take(poll, until, listening_pause)


def listener(alias: str, woken: Callable[[str], None]) -> NotifyListener:
    """Return the one listener of this process that calls ``woken`` for the wake-ups of a database."""
    settings = connections[alias].settings_dict
    linger_s = 0.0 if notify.is_for_tests(settings) else LISTENER_LINGER_S
    key = alias, str(settings["NAME"]), woken
    return _listeners.setdefault(key, NotifyListener(alias, linger_s, woken))


def wake(queue: str) -> None:
    """Wake the threads that wait for ``queue``, or all when it is empty."""
    with _wait_queues_lock:
        found = [wait_queue for key, wait_queue in _wait_queues.items() if not queue or key.queue == queue]
    for wait_queue in found:
        wait_queue.wake()


def waiters(queue: str, aliases: Sequence[str]) -> int:
    """Return how many threads of this process are inside ``take`` or ``wait`` for a queue."""
    with _wait_queues_lock:
        found = [one for key, one in _wait_queues.items() if key.queue == queue and {*key.aliases} & {*aliases}]
        return sum(wait_queue.entered for wait_queue in found)


@contextmanager
def _entered(key: WaitKey) -> Iterator[WaitQueue]:
    with _wait_queues_lock:
        wait_queue = _wait_queues.setdefault(key, WaitQueue())
        wait_queue.entered += 1
    try:
        yield wait_queue
    finally:
        with _wait_queues_lock:
            wait_queue.entered -= 1
            if not wait_queue.entered:
                _wait_queues.pop(key, None)


@after_fork
def _after_fork() -> None:
    # The waiting threads and the connections stayed with the parent.
    global _wait_queues_lock
    _wait_queues_lock = threading.Lock()
    _wait_queues.clear()
    _listeners.clear()
