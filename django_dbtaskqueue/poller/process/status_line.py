"""One line at the bottom of the terminal: what runs, what is done, how fast."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, Protocol, TextIO

from django_dbtaskqueue.poller.loop import Poller

PERIOD = 5.0  # seconds over which the rate is taken
REDRAW = 0.25  # seconds between two drawings
CLEAR = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One poller at one moment, or several taken together."""

    state: str = "INIT"
    running: int = 0
    slots: int = 0
    finished: int = 0
    failed: int = 0

    @classmethod
    def of(cls, poller: Poller) -> Snapshot:
        """Look at a poller."""
        counts = poller.counts
        return cls(poller.state, len(poller.running()), poller.slots(), counts.finished, counts.failed)

    @classmethod
    def total(cls, parts: Iterable[Snapshot]) -> Snapshot:
        """Add several up; the state that worries most is the state of all."""
        found = list(parts)
        states = {part.state for part in found}
        state = next((state for state in ("WAITING", "ENDING", "RUNNING") if state in states), "INIT")
        sums = [sum(getattr(part, name) for part in found) for name in ("running", "slots", "finished", "failed")]
        return cls(state, *sums)

    def facts(self) -> dict[str, Any]:
        """Return the fields, to be sent to another process."""
        return asdict(self)


class Line(Protocol):
    """A place for one line that is rewritten, with other lines scrolling above it."""

    def show(self, text: str) -> None:
        """Rewrite the line."""

    def above(self, text: str) -> None:
        """Write a whole line above it."""

    def close(self) -> None:
        """Take the line away."""


class PlainLine:
    """By carriage return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""

    def show(self, text: str) -> None:
        """Rewrite the line."""
        width = shutil.get_terminal_size().columns
        self._text = text[: max(1, width - 1)]
        self._write(CLEAR + self._text)

    def above(self, text: str) -> None:
        """Write a whole line above it."""
        self._write(f"{CLEAR}{text}\n{self._text}")

    def close(self) -> None:
        """Take the line away."""
        self._text = ""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class RichLine:
    """By ``rich``, which also keeps prints of processors off the line and obeys ``NO_COLOR``."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), auto_refresh=False, transient=True)
        self._live.start()
        self._live.console.show_cursor(True)  # a killed process could not bring it back

    def show(self, text: str) -> None:
        """Rewrite the line."""
        from rich.text import Text

        self._live.update(Text(text, style="bold cyan", no_wrap=True, overflow="ellipsis"), refresh=True)

    def above(self, text: str) -> None:
        """Write a whole line above it."""
        from rich.text import Text

        self._live.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Take the line away."""
        self._live.stop()


class StatusLine:
    """Draws snapshots on a terminal, and lets log lines pass above. Any thread may write."""

    def __init__(self, stream: TextIO, queues: Iterable[str]) -> None:
        self._queues = ", ".join(queues)
        self._lock = threading.RLock()
        self._line = best_line(stream)
        self._drawn = 0.0
        self._past: deque[tuple[float, int]] = deque()

    def draw(self, now: Snapshot) -> None:
        """Show a snapshot, unless the last one is still fresh."""
        if monotonic() - self._drawn >= REDRAW:
            self._drawn = monotonic()
            with self._lock:
                self._line.show(self._text(now))

    def above(self, text: str) -> None:
        """Write a whole line above the status line."""
        with self._lock:
            self._line.above(text)

    def close(self) -> None:
        """Take the line away."""
        with self._lock:
            self._line.close()

    def _text(self, now: Snapshot) -> str:
        parts = [f"{now.running}/{now.slots} running", f"{now.finished} done", f"{now.failed} failed"]
        return " | ".join([self._queues, *parts, f"{self._rate(now.finished):.0f}/s", _doing(now)])

    def _rate(self, finished: int) -> float:
        now = monotonic()
        self._past.append((now, finished))
        while len(self._past) > 2 and self._past[0][0] < now - PERIOD:
            self._past.popleft()
        since, before = self._past[0]
        return max(0, finished - before) / (now - since) if now > since else 0.0


def best_line(stream: TextIO) -> Line:
    """Return the best line that is installed."""
    try:
        return RichLine(stream)
    except ImportError:
        return PlainLine(stream)


def _doing(now: Snapshot) -> str:
    words = {
        "INIT": "starting",
        "STARTUP": "starting",
        "WAITING": "waiting for the database",
        "ENDING": "draining",
        "STOPPED": "stopped",
    }
    return words.get(now.state) or ("working" if now.running else "idle")
