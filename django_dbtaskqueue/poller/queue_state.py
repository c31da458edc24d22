"""One queue as the loop sees it: its settings in force, its line, when to look again, how much to take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.flow.checkout import Strategy
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.flow.scan import ScanCursor
from django_dbtaskqueue.flow.settle_port import SettlePort

DEEP = 4  # batches that may wait: one is done while one is settled, one on its way and one at hand
AHEAD = 0.1  # seconds of work that may wait in memory, so that few leases age there
SMOOTHING = 0.3
FEW = 20  # tasks supposed where there are any
CAREFUL = 100  # tasks, at most, of queues whose tasks nobody knows yet
JITTER = (0.8, 1.2)


@dataclass(slots=True, eq=False)
class Lane:
    """State of one queue in one poller. Written under the poller's lock."""

    queue: str
    settings: QueueSettings
    port: SettlePort
    line: ScanCursor
    strategy: Strategy | None = None
    weight: int = 1
    turn: float = 0.0  # when it is next, in turns; see Intake
    next_poll: float = 0.0
    idle: float = 0.0  # seconds of the present back-off
    walked: bool = False  # whether the walk after the last find has been waited for
    mean: float | None = None  # seconds one task takes, smoothed
    tried: bool = False  # tasks were taken
    more: int = 0  # tasks that are probably there: the last checkout gave all that was asked for
    reserved: int = 0  # tasks asked for by a checkout under way
    over: bool = False  # nothing more to take in a run that ends
    wakes: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)  # of the queue's row, as last applied
    doubtful: bool = False  # a checkout failed, and may have taken tasks all the same
    unpark: bool = True  # tasks may be parked that have a handler by now
    closed: frozenset[Processor] = frozenset()  # those of several processors that had no room at the last checkout
    lines: dict[tuple[str, ...], ScanCursor] = field(default_factory=dict)  # by the payload types left out

    def apply(self, settings: QueueSettings) -> None:
        """Go on with other settings from the next checkout and settle on."""
        self.settings = settings
        self.line.max_wait = settings.max_wait
        self.port.keep = settings.keep
        self.port.group_retry = settings.group_retry
        self.port.reenqueue = settings.reenqueue if "reenqueue" in self.overrides else None

    def line_without(self, types: tuple[str, ...]) -> ScanCursor:
        """Return the line that leaves out some payload types: how far it was taken is another matter."""
        if not types:
            return self.line
        line = self.lines.setdefault(types, ScanCursor(self.queue))
        line.max_wait = self.line.max_wait
        return line

    def priorities(self) -> list[int]:
        """Return the priorities met so far."""
        return sorted({priority for line in (self.line, *self.lines.values()) for priority in line.watermarks})

    @property
    def key(self) -> str:
        """The lane's name in its poller: the queue, and its shard if it has any."""
        return self.port.key

    def ahead(self, pace: float | None = None) -> int:
        """Return how many tasks may wait in memory beyond those that run: many of fast ones, none of slow ones.

        ``pace`` is the mean of all the poller's tasks: what is not known yet is taken to be like them, once.
        """
        if self.mean is not None:
            return min(DEEP * self.settings.batch_size, int(AHEAD / max(self.mean, 1e-6)))
        return 0 if pace is None or self.tried else min(CAREFUL, int(AHEAD / max(pace, 1e-6)))

    def learn(self, seconds: float, tasks: int) -> None:
        """Take ``tasks`` runs that lasted ``seconds`` in all into the mean."""
        self.mean = smoothed(self.mean, seconds / tasks)

    def wake(self) -> None:
        """There may be something to take now."""
        self.wakes += 1
        self.idle, self.walked = 0.0, False
        self.next_poll = 0.0

    def taken(self, *, got: int, asked: int, wakes: int, next_due: float | None) -> None:
        """Decide when to look again after a checkout; ``wakes`` is the count before it began."""
        now = monotonic()
        self.tried = self.tried or got > 0
        self.more = max(got, FEW) if got == asked else 0
        if got or wakes != self.wakes:
            self.idle, self.walked = 0.0, False
            self.next_poll = now
            return
        tenth = self.settings.lease.total_seconds() / 10  # who looks as often starts an orphan soon after its lease
        base = min(self.settings.poll_interval.total_seconds(), tenth)
        most = max(base, min(self.settings.idle_interval.total_seconds(), tenth))
        if not self.walked and self.line.next_full_scan > now:
            self.walked = True  # what came to stand behind the bound is found by one more walk, soon
            wait = self.line.next_full_scan - now
        else:
            self.idle = min(most, self.idle * 2 or base)
            wait = self.idle * random.uniform(*JITTER)
        if next_due is not None:
            wait = min(wait, max(0.0, next_due) + 0.001)
        self.next_poll = now + wait


def smoothed(mean: float | None, latest: float) -> float:
    """Return a mean that follows what comes in."""
    return latest if mean is None else mean + SMOOTHING * (latest - mean)
