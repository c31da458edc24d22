"""How long tests wait for what should come: so long that only a fault ends it.

A test that passes waits for events, and no limit makes it longer.
"""

from __future__ import annotations

import os
from time import monotonic

PATIENCE = 600.0  # seconds, for what cannot be looked at meanwhile: a future, a process, a socket
DEFAULT_S = 60.0


def slowness() -> float:
    """Return how many processes share a core: at least 1, and the mean of the last minute."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Deadline:
    """Passed after a minute without success, on a machine that had the time.

    Beside other busy processes a second counts as the share of it that is left for one; a pause of the whole machine
    counts as one second.
    """

    def __init__(self, seconds: float = DEFAULT_S) -> None:
        self._left, self._looked = seconds, monotonic()

    @property
    def passed(self) -> bool:
        """Whether the time is over. To be asked at each look."""
        now = monotonic()
        self._left -= min(now - self._looked, 1.0) / slowness()
        self._looked = now
        return self._left < 0


# -- for folders that still compare times -----------------------------------------------------------------------------

SLOWNESS = slowness()


def patience(seconds: float = DEFAULT_S) -> float:
    """Return a limit of ten times as many seconds."""
    return 10 * seconds


def slack(seconds: float) -> float:
    """Return what a loaded machine adds to a time."""
    return seconds * (max(SLOWNESS, slowness()) - 1)
