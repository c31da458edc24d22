"""What happened over time, from the counts by the minute: rates, durations, and groups of failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db.models import Min, Q, QuerySet, Sum
from django.db.models.functions import Now

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.sql.stats import StatsStatements, series_sql
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.db.minute_counts import database_now
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of, model_for
from django_dbtaskqueue.metrics import quantile
from django_dbtaskqueue.models import MinuteCount, Poller
from django_dbtaskqueue.models.control import FAILURE
from django_dbtaskqueue.models.readable import ReadableTime
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, approx, prefer_indexes
from django_dbtaskqueue.operations.lookup import locations_on
from django_dbtaskqueue.operations.queue_stats import HISTOGRAMS, NO_QUANTILES, Quantiles

WINDOWS = {
    "1h": timedelta(hours=1),
    "3h": timedelta(hours=3),
    "24h": timedelta(days=1),
    "3d": timedelta(days=3),
    "7d": timedelta(days=7),
}
MAX_OPEN_TASKS_COUNTED = 1000  # of one group
MAX_ENDED_TASKS = 1000  # of a queue and a terminal status, read for the figures of its payload types
POINT_SECONDS = (60, 300, 600, 3600, 6 * 3600, 86_400)  # that one point of a series may last
MAX_VERSIONS = 100  # of pollers, the oldest first
MAX_POINTS = 150  # of a series, unless the longest step gives more


@dataclass(frozen=True, slots=True)
class FailureStats:
    """How often a group of failures occurred, and how many of its tasks still need an operator."""

    counts: Mapping[str, int]  # attempts that failed, by window: "1h", "3h", "24h", "3d", "7d"
    open: ApproxCount  # tasks that are in ERROR or POISON because of it


def stats_of_groups(fingerprints: Sequence[str], alias: str) -> list[FailureStats]:
    """Return the statistics of these groups, in their order. A constant number of queries for each task table."""
    counts, waiting = _counts(fingerprints, alias), _open(fingerprints, alias)
    return [FailureStats(counts[one], waiting[one]) for one in fingerprints]


def _counts(prints: Sequence[str], alias: str) -> dict[str, dict[str, int]]:
    found = {one: dict.fromkeys(WINDOWS, 0) for one in prints}
    if prints:
        week = MinuteCount.objects.using(alias).filter(kind=FAILURE, minute__gte=Now() - WINDOWS["7d"])
        sums = {f"in_{name}": Sum("count", filter=Q(minute__gte=Now() - span)) for name, span in WINDOWS.items()}
        for one, *numbers in week.filter(name__in=prints).values_list("name").annotate(**sums).order_by():
            found[one] = {name: number or 0 for name, number in zip(WINDOWS, numbers, strict=True)}
    return found


def _open(prints: Sequence[str], alias: str) -> dict[str, ApproxCount]:
    numbers: defaultdict[str, int] = defaultdict(int)
    for place in locations_on(alias) if prints else ():
        session = Session.on(*place)
        sql = StatsStatements(session.sql.tables, session.sql.dialect).open_failures(MAX_OPEN_TASKS_COUNTED + 1)
        with prefer_indexes(session):
            for name, number in session.run(sql, {"prints": session.sql.dialect.array(prints)}):
                numbers[name] += number
    return {one: approx(numbers[one], MAX_OPEN_TASKS_COUNTED) for one in prints}


# -- payload types -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TypeStats:
    """The newest ended tasks of one payload type of a queue."""

    payload_type: str  # empty: the queue's default
    statuses: Mapping[str, int]  # tasks by terminal status
    run: Quantiles  # of the last attempt of each
    wait: Quantiles  # from enqueue to checkout, of tasks with one attempt


def stats_of_types(queue: str) -> list[TypeStats]:
    """Return the figures of each payload type, the slowest first, from the newest tasks of each terminal status."""
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    runs, waits = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    # The database subtracts: 9,000 times would take Python longer than all else on the page.
    created, started, finished = map(ReadableTime, ("create_time", "start_time", "finish_time"))
    ran, waited = finished - started, started - created
    for alias in aliases_of(queue):
        tasks = model_for(queue)._default_manager.using(alias).filter(queue=queue)
        for status in map(str, TERMINAL):
            newest = tasks.filter(final_status=status).order_by("-pk")
            for kind, attempts, run, wait in newest.values_list("payload_type", "total_attempt", ran, waited)[
                :MAX_ENDED_TASKS
            ]:
                statuses[kind or ""][status] += 1
                if run is not None:
                    runs[kind or ""].append(run.total_seconds())
                if wait is not None and attempts == 1:
                    waits[kind or ""].append(wait.total_seconds())
    found = [TypeStats(kind, statuses[kind], _quantiles(runs[kind]), _quantiles(waits[kind])) for kind in statuses]
    return sorted(found, key=lambda one: -(one.run.p95 or 0.0))


def _quantiles(values: list[float]) -> Quantiles:
    found = sorted(max(value, 0.0) for value in values)
    return Quantiles(found[len(found) // 2], found[len(found) * 95 // 100]) if found else NO_QUANTILES


# -- rates and durations -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Point:
    """What happened in one step of time."""

    time: datetime  # its beginning
    seconds: float  # its length
    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # attempts by outcome
    runs: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # histogram of run times
    waits: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # histogram of waits

    @property
    def total(self) -> int:
        """Attempts that ended."""
        return sum(self.outcomes.values())

    def rate_of(self, *outcomes: str) -> float:
        """Attempts that ended in one of these ways, per second."""
        return sum(self.outcomes.get(outcome, 0) for outcome in outcomes) / self.seconds

    def run(self, share: float) -> float | None:
        """The run time in seconds that ``share`` of the attempts stayed within, e.g. 0.95."""
        return quantile(self.runs, share)

    def wait(self, share: float) -> float | None:
        """The same of the time between due and checkout."""
        return quantile(self.waits, share)


def new_versions(pollers: QuerySet[Poller], since: timedelta) -> list[tuple[datetime, str]]:
    """Return when one of these pollers of a new version first started, from ``since`` ago until now, as their rows say.

    The first version that any row has is not new.
    """
    rows = pollers.exclude(version="")
    first = rows.values_list("version").annotate(first=Min("start_time")).order_by("first")[:MAX_VERSIONS]
    found = [(time, version) for version, time in first]
    begin = database_now(Session.on(rows.db)) - since if len(found) > 1 else None
    return [(time, version) for time, version in found[1:] if begin is not None and time >= begin]


def series(
    using: str | None, since: timedelta, queue: str | None = None, *, among: Sequence[str] | None = None
) -> list[Point]:
    """Return what happened from ``since`` ago until now, the oldest first: at most about 150 points, none left out.

    Over all queues of a database, those of ``among``, or one. Reads only the counts by the minute.
    """
    if since <= timedelta(0):
        raise TaskQueueError(f"series(since={since!r}) must be a positive duration.")
    session = Session.on(alias_for(queue or "", using, write=False))
    step = next((one for one in POINT_SECONDS if since.total_seconds() <= one * MAX_POINTS), POINT_SECONDS[-1])
    now = database_now(session)
    last = int(now.timestamp()) // step
    first = last - max(1, round(since.total_seconds() / step)) + 1
    points = {
        at: Point(datetime.fromtimestamp(at * step, tz=now.tzinfo), min(step, max(now.timestamp() - at * step, 1)))
        for at in range(first, last + 1)
    }
    # A little before, because SQLite compares texts; what is too old fits no point.
    start = datetime.fromtimestamp(first * step, tz=now.tzinfo) - timedelta(seconds=1)
    _fill(session, points, {"start": session.time_text(start), "step": step, **_queues(session, queue, among)})
    return list(points.values())


def _queues(session: Session, queue: str | None, among: Sequence[str] | None) -> dict[str, object]:
    names = among if queue is None else [queue]
    return {"every": names is None, "queues": session.sql.dialect.array(names or [])}


def _fill(session: Session, points: Mapping[int, Point], params: Mapping[str, object]) -> None:
    counts, histogram = series_sql(session.sql.dialect)
    for at, outcome, number in session.run(counts, params):
        if at in points:
            points[at].outcomes[outcome] += int(number)
    for kind in HISTOGRAMS:
        for at, number, count in session.run(histogram.format(times=kind), params):
            if at in points:
                getattr(points[at], kind)[int(number)] += int(count)
