"""How long tests wait for what should come: limits in seconds that grow with the slowness of the machine.

A limit ends a test that fails. A test that passes waits for events, and no limit makes it longer.
"""

from __future__ import annotations

import subprocess
import sys
from time import monotonic

NOMINAL_S = 0.07  # the start of a process that imports asyncio, on the quiet machine where the limits were chosen
DEFAULT_S = 60.0


def slowness() -> float:
    """Return how many times longer such a process takes here and now; at least 1."""
    began = monotonic()
    subprocess.run([sys.executable, "-I", "-c", "import asyncio"], check=True)
    return max(1.0, (monotonic() - began) / NOMINAL_S)


SLOWNESS = slowness()  # when the tests begin


def patience(seconds: float = DEFAULT_S) -> float:
    """Return the limit on this machine for what takes at most so many seconds on the quiet one."""
    return seconds * SLOWNESS


def slack(seconds: float) -> float:
    """Return what a slow machine adds to a time that a test measures: nothing on the quiet one."""
    return seconds * (max(SLOWNESS, slowness()) - 1)


PATIENCE = patience()


class Deadline:
    """A limit that also allows for a machine that became slower after the tests began."""

    def __init__(self, seconds: float = DEFAULT_S) -> None:
        self._seconds, self._began = seconds, monotonic()

    @property
    def passed(self) -> bool:
        """Whether the time is over. The slowness of now is only measured when the answer would be yes."""
        waited = monotonic() - self._began
        return waited > patience(self._seconds) and waited > self._seconds * slowness()
