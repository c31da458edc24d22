"""The numbers of the overview page, at a cost that does not grow with the tables.

Small numbers are counted; beyond a bound they are estimates, and say so. Rates and charts come from what pollers and
producers counted by the minute, never from the task table.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Sum
from django.db.models.functions import Now
from django.utils.formats import number_format

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.sql.stats import Reading
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.models import Metric, Poller, Queue, Task, UsageCount
from django_dbtaskqueue.operations.lookup import Location, locations
from django_dbtaskqueue.operations.planner_hints import by_index
from django_dbtaskqueue.operations.stats.failures import FailureFigures as FailureFigures
from django_dbtaskqueue.operations.stats.failures import failure_groups as failure_groups
from django_dbtaskqueue.operations.stats.series import Point as Point
from django_dbtaskqueue.operations.stats.series import series as series

READ = 20_000  # rows that one overview counts at most in each table and status
FEWEST, MOST = 50, 10_000  # rows that it counts of one queue in one status
LATE = timedelta(minutes=1)  # a queue whose oldest task has waited longer is late
RATE = timedelta(minutes=5)  # the time that rates are taken over
MISSED = 3  # heartbeats after which a poller no longer counts


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of tasks: counted, or about so many."""

    number: int
    exact: bool = True

    def __str__(self) -> str:
        shown = number_format(self.number, force_grouping=True)
        return shown if self.exact else f"≈\u202f{shown}"

    def __bool__(self) -> bool:
        return self.number > 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.number + other.number, self.exact and other.exact)


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """One row of the overview."""

    queue: str
    statuses: Mapping[str, Amount]  # every status, in the order of ``Status``
    total: Amount
    oldest: timedelta | None  # how long the task that waits longest has been due
    rate_in: float  # tasks put per second, over the last five minutes
    rate_out: float  # tasks pollers finished per second, whatever became of them
    failed: int  # attempts that failed in the last hour
    drain: timedelta | None  # until nothing is left at this rate; None: never, or nothing to do
    paused: bool
    pollers: int  # alive, that serve it

    @property
    def overdue(self) -> bool:
        """Whether a task has been due for over a minute."""
        return self.oldest is not None and self.oldest > LATE

    @property
    def late(self) -> bool:
        """Whether a task is overdue though the queue is not paused."""
        return self.overdue and not self.paused

    @property
    def unserved(self) -> bool:
        """Whether tasks wait, the queue is not paused, and no living poller serves it."""
        return bool(self.statuses[Status.CREATED]) and not self.pollers and not self.paused


@dataclass(frozen=True, slots=True)
class Overview:
    """All queues at a glance."""

    as_of: datetime
    queues: Sequence[QueueFigures]
    statuses: Mapping[str, Amount] = field(default_factory=dict)  # over all queues
    total: Amount = Amount(0)
    pollers: int = 0  # alive

    @property
    def late(self) -> list[QueueFigures]:
        """The late queues, the latest first."""
        return sorted((row for row in self.queues if row.late), key=lambda row: row.oldest or LATE, reverse=True)

    @property
    def oldest(self) -> timedelta | None:
        """How long the task that waits longest has been due."""
        return max((row.oldest for row in self.queues if row.oldest is not None), default=None)

    @property
    def failed(self) -> int:
        """Attempts that failed in the last hour."""
        return sum(row.failed for row in self.queues)


def overview(using: str | None = None) -> Overview:
    """Return the figures of every queue: those that are known and those that only have tasks.

    Over all databases, or that of ``using``. A constant number of queries per database and task table.
    """
    places = places_of(using)
    cells: defaultdict[str, dict[str, Amount]] = defaultdict(lambda: dict.fromkeys(map(str, Status), Amount(0)))
    ages: dict[str, float] = {}
    for name in conf.known_queues():
        cells[name]
    for place in places:
        for name, found in _cells(place).items():
            cells[name] = {status: cells[name][status] + number for status, number in found.items()}
        for name, waits in heads(place, list(cells)).items():
            ages[name] = max(*waits.values(), ages.get(name, 0.0))
    context = _Context(sorted({alias for alias, _ in places}), cells)
    rows = [context.row(name, cells[name], ages.get(name)) for name in sorted(cells)]
    return Overview(context.as_of, rows, *_sums(rows), pollers=len(context.alive))


def of_queue(name: str) -> QueueFigures:
    """Return the figures of one queue, over all databases it has tasks in."""
    places: list[Location] = [(alias, model_for(name)) for alias in aliases_of(name)]
    cells = dict.fromkeys(map(str, Status), Amount(0))
    waits: list[float] = []
    for place in places:
        found = _cells(place, [name]).get(name, {})
        cells = {status: number + found.get(status, Amount(0)) for status, number in cells.items()}
        waits += heads(place, [name]).get(name, {}).values()
    context = _Context(sorted({alias for alias, _ in places}), [name])
    return context.row(name, cells, max(waits, default=None))


def places_of(using: str | None) -> list[Location]:
    """Return the databases and tables to look at: all that known queues have, or those of one database."""
    return [place for place in locations() if using in (None, place[0])] or [(str(using), Task)]


class _Context:
    """What stands beside the task tables: rates, pauses, pollers."""

    def __init__(self, aliases: Sequence[str], names: Iterable[str]) -> None:
        self.names = list(names)
        self.rates_in: defaultdict[str, float] = defaultdict(float)
        self.rates_out: defaultdict[str, float] = defaultdict(float)
        self.failed: defaultdict[str, int] = defaultdict(int)
        self.paused: set[str] = set()
        self.alive: dict[str, set[str]] = {}
        for alias in aliases:
            self._read(alias)
        session = Session.on(aliases[0] if aliases else "default")
        self.as_of = session.time(session.run(f"SELECT {session.sql.dialect.now}", {})[0][0])

    def _read(self, alias: str) -> None:
        over = RATE.total_seconds()
        puts = UsageCount.objects.using(alias).filter(queue__in=self.names, minute__gte=Now() - RATE, call="put")
        for name, number in puts.values_list("queue").annotate(number=Sum("count")).order_by():
            self.rates_in[name] += number / over
        done = Metric.objects.using(alias).filter(minute__gte=Now() - RATE, outcome__in=FINAL)
        for name, number in done.values_list("queue").annotate(number=Sum("count")).order_by():
            self.rates_out[name] += number / over
        failed = Metric.objects.using(alias).filter(minute__gte=Now() - timedelta(hours=1), outcome__in=FAILED)
        for name, number in failed.values_list("queue").annotate(number=Sum("count")).order_by():
            self.failed[name] += number
        stopped = Queue.objects.using(alias).filter(paused_time__isnull=False).exclude(paused_until__lte=Now())
        self.paused.update(stopped.values_list("name", flat=True))
        self.alive |= alive(alias)

    def row(self, name: str, statuses: Mapping[str, Amount], age: float | None) -> QueueFigures:
        """Return what is known of one queue."""
        rate_in, rate_out = self.rates_in[name], self.rates_out[name]
        waiting = statuses[Status.CREATED].number + statuses[Status.PROCESSING].number
        draining = waiting > 0 and rate_out > rate_in
        return QueueFigures(
            queue=name,
            statuses=statuses,
            total=sum(statuses.values(), Amount(0)),
            oldest=None if age is None else timedelta(seconds=max(age, 0.0)),
            rate_in=rate_in,
            rate_out=rate_out,
            failed=self.failed[name],
            drain=timedelta(seconds=waiting / (rate_out - rate_in)) if draining else None,
            paused=name in self.paused,
            pollers=sum(name in served for served in self.alive.values()),
        )


def alive(alias: str) -> dict[str, set[str]]:
    """Return the pollers that report to a database, and the queues each serves."""
    recent = Poller.objects.using(alias).filter(heartbeat_time__gt=Now() - MISSED * conf.settings().heartbeat)
    return {
        instance: {str(one.get("queue")) if isinstance(one, dict) else str(one) for one in served}
        for instance, served in recent.exclude(state="STOPPED").values_list("instance", "queues")[:1000]
    }


FINAL = ("completed", "deleted", "failed", "poisoned")
FAILED = ("failed", "retried")


def _sums(rows: Iterable[QueueFigures]) -> tuple[dict[str, Amount], Amount]:
    sums = dict.fromkeys(map(str, Status), Amount(0))
    for row in rows:
        sums = {status: number + row.statuses[status] for status, number in sums.items()}
    return sums, sum(sums.values(), Amount(0))


# -- the task table ----------------------------------------------------------------------------------------------------


def _reading(place: Location) -> tuple[Session, Reading]:
    session = Session.on(*place)
    return session, Reading(session.sql.tables, session.sql.dialect)


def heads(place: Location, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """Return how many seconds the head of each queue's priorities has been due; only of those with such a task."""
    session, sql = _reading(place)
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with by_index(session):
        for name, priority, seconds in session.run(sql.heads, {"names": list(names)}):
            found[name][priority] = seconds
    return found


def _cells(place: Location, only: Sequence[str] = ()) -> dict[str, dict[str, Amount]]:
    """Return the queues that have tasks in one table, or some of them, and how many in each status."""
    session, sql = _reading(place)
    if not session.postgresql:
        return _exact(session.run(sql.counts_exact, {}))
    with by_index(session):
        names = list(only) or [row[0] for row in session.run(sql.names, {})]
        most = max(FEWEST, min(MOST, READ // max(len(names), 1)))
        rows = session.run(sql.counts(most + 1), {"names": names})
        found = {name: _bounded((line, held, parked, *ended), most) for name, line, held, parked, *ended in rows}
        return _estimated(session, sql, found)


def _bounded(counts: tuple[int, ...], most: int) -> dict[str, Amount]:
    line, held, parked, *ended = counts
    more = line > most
    waiting = Amount(line - held + parked, not more and parked <= most)
    numbers = [waiting, Amount(held, not more or held <= most // 2), *(Amount(n, n <= most) for n in ended)]
    return dict(zip(map(str, Status), numbers, strict=True))


def _estimated(session: Session, sql: Reading, found: dict[str, dict[str, Amount]]) -> dict[str, dict[str, Amount]]:
    """Put the planner's estimates in place of numbers that were not counted to the end; they are never smaller."""
    open_cells = [(name, status) for name, row in found.items() for status, number in row.items() if not number.exact]
    if not open_cells:
        return found
    params = {f"{key}{at}": cell[part] for at, cell in enumerate(open_cells) for part, key in enumerate("qs")}
    plan = session.run(sql.estimates(len(open_cells)), params)[0][0]
    rows = dict(_rows(plan if isinstance(plan, list) else json.loads(plan)))
    for at, (name, status) in enumerate(open_cells):
        counted = found[name][status]
        found[name][status] = Amount(max(counted.number, rows.get(f"c{at}", 0)), exact=False)
    return found


def _rows(plan: Any) -> Iterable[tuple[str, int]]:
    """Yield alias and estimated rows of each scan of a plan."""
    for node in plan if isinstance(plan, list) else [plan]:
        if "Alias" in node:
            yield node["Alias"], int(node["Plan Rows"])
        for part in ("Plan", "Plans"):
            if part in node:
                yield from _rows(node[part])


def _exact(rows: Iterable[tuple[Any, ...]]) -> dict[str, dict[str, Amount]]:
    found: dict[str, dict[str, Amount]] = {}
    for name, status, _, number in rows:
        cells = found.setdefault(name, dict.fromkeys(map(str, Status), Amount(0)))
        cells[status] += Amount(number)
    return found
