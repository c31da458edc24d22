"""Rates and durations over time, from what pollers counted by the minute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.sql.stats import series_sql
from django_dbtaskqueue.db.session import Session, alias_for
from django_dbtaskqueue.metrics.histogram import quantile
from django_dbtaskqueue.models import Metric

STEPS = (60, 300, 600, 3600, 6 * 3600, 86_400)  # seconds that one point may stand for
POINTS = 150  # that a series has at most, unless the longest step gives more
KINDS = ("runs", "waits")


@dataclass(frozen=True, slots=True)
class Point:
    """What happened in one step of time."""

    time: datetime  # its beginning
    seconds: float  # its length
    outcomes: Mapping[str, int] = field(default_factory=dict)  # attempts by outcome; see ``Metric``
    run_seconds: float = 0.0  # spent in processors
    wait_seconds: float = 0.0  # waited in line by the tasks that were sampled
    runs: Mapping[int, int] = field(default_factory=dict)  # histogram of run times
    waits: Mapping[int, int] = field(default_factory=dict)  # histogram of waits, from due to taken

    @property
    def total(self) -> int:
        """Attempts that ended."""
        return sum(self.outcomes.values())

    @property
    def rate(self) -> float:
        """Attempts that ended, per second."""
        return self.total / self.seconds

    def rate_of(self, *outcomes: str) -> float:
        """Attempts that ended in one of these ways, per second."""
        return sum(self.outcomes.get(outcome, 0) for outcome in outcomes) / self.seconds

    def run(self, share: float) -> float | None:
        """The run time in seconds that ``share`` of the attempts stayed within, e.g. 0.95."""
        return quantile(self.runs, share)

    def wait(self, share: float) -> float | None:
        """The same of the time between due and taken."""
        return quantile(self.waits, share)


def series(using: str | None, since: timedelta, queue: str | None = None) -> list[Point]:
    """Return what happened from ``since`` ago until now, the oldest first: at most about 150 points, none left out.

    Over all queues of a database, or of one. Reads only the per-minute counts.
    """
    if since <= timedelta(0):
        raise TaskQueueError(f"series(since={since!r}) must be a positive duration.")
    session = Session.on(alias_for(queue or "", using, write=False))
    step = next((one for one in STEPS if since.total_seconds() <= one * POINTS), STEPS[-1])
    now = session.time(session.run(f"SELECT {session.sql.dialect.now}", {})[0][0])
    last = int(now.timestamp()) // step
    first = last - max(1, round(since.total_seconds() / step)) + 1
    points = {at: _Sums() for at in range(first, last + 1)}
    # A little before, for SQLite compares texts; what is too old fits no point.
    start = datetime.fromtimestamp(first * step, tz=now.tzinfo) - timedelta(seconds=1)
    _fill(session, points, {"start": session.time_text(start), "step": step, "queue": queue})
    return [
        Point(
            datetime.fromtimestamp(at * step, tz=now.tzinfo),
            min(step, max(now.timestamp() - at * step, 1)),
            **vars(sums),
        )
        for at, sums in points.items()
    ]


class _Sums:
    """What a point is made of."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, int] = defaultdict(int)
        self.run_seconds = 0.0
        self.wait_seconds = 0.0
        self.runs: defaultdict[int, int] = defaultdict(int)
        self.waits: defaultdict[int, int] = defaultdict(int)


def _fill(session: Session, points: Mapping[int, _Sums], params: dict[str, Any]) -> None:
    counts, histogram = series_sql(session.sql.dialect, f'"{Metric._meta.db_table}"')
    for at, outcome, number, run_seconds, wait_seconds in session.run(counts, params):
        if at in points:
            points[at].outcomes[outcome] += int(number)
            points[at].run_seconds += run_seconds
            points[at].wait_seconds += wait_seconds
    for kind in KINDS:
        for at, number, count in session.run(histogram.format(kind=kind), params):
            if at in points:
                getattr(points[at], kind)[int(number)] += int(count)
