"""The product's clock in the hands of a test: pauses, leases in memory and rates end when the test says so.

It does not move the database's time: ``tests.factories.age`` and ``django_dbtaskqueue.testing.advance`` do.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 0.002  # of real time, between two looks of a thread that waits: whether its time has come


class SteppedClock:
    """Goes on with real time, or stands after ``stop``. ``advance`` lets time pass at once, and ends waits.

    A wait lasts from its thread's last look at the clock: what passes before it waits counts.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._stands_at: float | None = None
        self._over = False
        self._looked = threading.local()

    def monotonic(self) -> float:
        now = self._ahead + (time.monotonic() if self._stands_at is None else self._stands_at)
        self._looked.at = now
        return now

    def advance(self, seconds: float) -> None:
        self._ahead += seconds

    def stop(self) -> None:
        """Let no time pass any more but by ``advance``."""
        self._stands_at = time.monotonic()

    def end(self) -> None:
        """End all waits: the threads that outlive a test go on with the product's clock."""
        self._over = True

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        until = self._end(seconds)
        while not event.wait(LOOK_S):
            if self._is_over(until):
                return event.is_set()
        self.monotonic()
        return True

    def wait_for(
        self, condition: threading.Condition, predicate: Callable[[], object], seconds: float | None = None
    ) -> object:
        until = self._end(seconds)
        while not (found := predicate()) and not self._is_over(until):
            condition.wait(LOOK_S)
        return found

    async def wait_async(self, event: asyncio.Event, seconds: float | None) -> None:
        until = self._end(seconds)
        while not event.is_set() and not self._is_over(until):
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), LOOK_S)

    def _end(self, seconds: float | None) -> float:
        looked = getattr(self._looked, "at", None)
        return float("inf") if seconds is None else (self.monotonic() if looked is None else looked) + seconds

    def _is_over(self, until: float) -> bool:
        return self._over or self.monotonic() >= until
