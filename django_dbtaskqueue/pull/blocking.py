"""Waiting for a task, first come first served.

Of all takers of a queue in this process only the one who came first looks into the database; the others wait for their
turn without asking anybody. The first one sleeps until a wake-up comes (from this process, or through LISTEN from any)
or until it is time to look again, for polling is the truth. Between processes the database decides, not the order.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import monotonic
from typing import NamedTuple, TypeVar

from django.db import connections

from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.listen import Wakeup

T = TypeVar("T")
PATIENCE = 1.0  # seconds a taker that does not want to wait gives way to one that is looking
LINGER = 10.0  # seconds the listening connection outlives the last waiter


class Place(NamedTuple):
    """What a line of takers stands for: takers who see the same tasks."""

    queue: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]


class Takers:
    """The takers at one place."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._wakes = 0
        self._begun = 0  # looks begun
        self._vain = 0  # the number of the last look that found nothing
        self.entered = 0  # threads inside ``take``; guarded by _all_changed

    def wake(self) -> None:
        """There may be something to take."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def take(
        self, look: Callable[[], T | None], until: float | None, pause: Callable[[], float], *, alone: bool
    ) -> T | None:
        """Return what ``look`` finds, when it is this thread's turn; None when nothing was found by ``until``.

        ``until`` None: do not wait. ``pause`` says how many seconds to sleep at most before the next look. ``alone``:
        look out of turn, for this thread may hold locks that the others wait for.
        """
        if alone:
            return self._look(look, until, pause, lambda: True, lambda number: None)
        me = object()
        fresh = self._join(me, ring=until is None)
        try:
            return self._look(look, until, pause, partial(self._turn, me, fresh, until), self._found_nothing)
        finally:
            with self._changed:
                self._line.remove(me)
                self._changed.notify_all()

    def _look(
        self,
        look: Callable[[], T | None],
        until: float | None,
        pause: Callable[[], float],
        turn: Callable[[], bool],
        found_nothing: Callable[[int], None],
    ) -> T | None:
        while turn():
            wakes, number = self._begin()
            found = look()
            if found is not None:
                return found
            found_nothing(number)
            if until is None or monotonic() >= until:
                return None
            self._sleep(wakes, min(until - monotonic(), pause()))
        return None

    def _join(self, me: object, *, ring: bool) -> int:
        """Go to the end of the line; return the number of the next look to begin. ``ring``: it is to begin now."""
        with self._changed:
            self._line.append(me)
            if ring and self._line[0] is not me:
                self._wakes += 1
                self._changed.notify_all()
            return self._begun + 1

    def _turn(self, me: object, fresh: int, until: float | None) -> bool:
        """Wait for the head of the line; False when the time is over, or a look begun since was in vain for all."""
        with self._changed:
            if until is None:
                self._changed.wait_for(lambda: self._line[0] is me or self._vain >= fresh, PATIENCE)
                return self._line[0] is me or self._vain < fresh
            while self._line[0] is not me:
                left = until - monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def _begin(self) -> tuple[int, int]:
        with self._changed:
            self._begun += 1
            return self._wakes, self._begun

    def _found_nothing(self, number: int) -> None:
        with self._changed:
            self._vain = max(self._vain, number)
            self._changed.notify_all()

    def _sleep(self, wakes: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._wakes != wakes, seconds)


class Ear:
    """Hears the wake-ups of other processes, on a connection of its own, while somebody waits and a little longer."""

    def __init__(self, alias: str, database: str) -> None:
        self._alias = alias
        # A test database cannot be dropped while somebody is connected to it.
        self._linger = 0.0 if database.startswith("test_") else LINGER
        self._lock = threading.Lock()
        self._users = 0
        self._idle_since = 0.0
        self._wakeup: Wakeup | None = None
        self._closing = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Listen for the time of a ``with`` block."""
        with self._lock:
            self._users += 1
            if self._wakeup is None:
                self._wakeup = Wakeup(self._alias, partial(wake))  # wakes once more when it is connected
                self._wakeup.start()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._idle_since = monotonic()
                if not self._users and not self._closing:
                    self._closing = True
                    threading.Thread(target=self._close, name="dbtaskqueue-ear", daemon=True).start()

    def _close(self) -> None:
        while True:
            with self._lock:
                left = self._idle_since + self._linger - monotonic()
                if self._users or left <= 0:
                    self._closing = False
                    gone, self._wakeup = (None, self._wakeup) if self._users else (self._wakeup, None)
                    break
            threading.Event().wait(left)
        if gone is not None:
            gone.stop()


_all_changed = threading.Lock()
_all: dict[Place, Takers] = {}
_ears: dict[tuple[str, str], Ear] = {}


def take(
    place: Place,
    look: Callable[[], T | None],
    until: float | None,
    pause: Callable[[], float],
    *,
    alone: bool = False,
) -> T | None:
    """``Takers.take`` at a place, listening for wake-ups as long as there is somebody to wake."""
    ears: list[Ear] = []
    with _inside(place) as takers, ExitStack() as stack:
        notify.listen(wake)

        def listening_pause() -> float:
            if not ears:  # a take that finds something at once needs none
                ears.extend(map(_ear, place.aliases))
                for ear in ears:
                    stack.enter_context(ear.open())
            return pause()

        return takers.take(look, until, listening_pause, alone=alone)


def _ear(alias: str) -> Ear:
    database = str(connections[alias].settings_dict["NAME"])
    return _ears.setdefault((alias, database), Ear(alias, database))


def wake(queue: str) -> None:
    """Wake the takers of ``queue``, or all when it is empty."""
    with _all_changed:
        takers = [found for place, found in _all.items() if not queue or place.queue == queue]
    for found in takers:
        found.wake()


def waiters(queue: str, aliases: Sequence[str]) -> int:
    """Return how many threads of this process are inside ``take`` for a queue."""
    with _all_changed:
        found = [takers for place, takers in _all.items() if place.queue == queue and {*place.aliases} & {*aliases}]
        return sum(takers.entered for takers in found)


@contextmanager
def _inside(place: Place) -> Iterator[Takers]:
    with _all_changed:
        takers = _all.setdefault(place, Takers())
        takers.entered += 1
    try:
        yield takers
    finally:
        with _all_changed:
            takers.entered -= 1
            if not takers.entered:
                _all.pop(place, None)


def _after_fork() -> None:
    # The waiting threads and the connections stayed with the parent.
    global _all_changed
    _all_changed = threading.Lock()
    _all.clear()
    _ears.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
