"""How long tests wait for what should come: so long that only a fault ends it.

A test that passes waits for events, and no limit makes it longer.
"""

import os
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0  # seconds, for what cannot be looked at meanwhile: a future, a process, a socket
DEFAULT_S = 60.0


def slowness() -> float:
    """Return how many processes share a core: at least 1, and the mean of the last minute."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Deadline:
    """Passed after a minute without success, on a machine that had the time.

    Beside other busy processes a second counts as the share that is left for one; a pause of the machine as one second.
    """

    def __init__(self, seconds: float = DEFAULT_S) -> None:
        self._left, self._looked = seconds, time.monotonic()

    @property
    def passed(self) -> bool:
        now = time.monotonic()
        self._left -= min(now - self._looked, 1.0) / slowness()
        self._looked = now
        return self._left < 0


def eventually(assertion: Callable[[], Any], *, timeout: float = DEFAULT_S) -> Any:
    """Call ``assertion`` until it raises no AssertionError any more; return what it returns.

    It is the one way in which tests wait. ``timeout`` counts seconds of a machine that has nothing else to do.
    """
    deadline, pause = Deadline(timeout), 0.005
    while True:
        try:
            return assertion()
        except AssertionError:
            if deadline.passed:
                raise
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)  # what comes late is looked for less often


def until(condition: Callable[[], Any], *, timeout: float = DEFAULT_S) -> None:
    def holds() -> None:
        assert condition()

    eventually(holds, timeout=timeout)
