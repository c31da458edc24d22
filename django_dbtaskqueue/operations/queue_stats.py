"""Statistics of each queue, and whether the queues are well, at a cost that does not grow with the tables.

Small numbers are counted. Larger ones are estimates and are marked as such. Rates come from the counts by the minute
that pollers and producers store, never from the task table.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet, Sum
from django.db.models.functions import Now
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.sql.stats import StatsStatements
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.minute_counts import database_now
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.models import Metric, Poller, Queue, UsageCount
from django_dbtaskqueue.models.control import queue_names_in
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, prefer_indexes
from django_dbtaskqueue.operations.lookup import Location, locations_on

MAX_ROWS_PER_TABLE = 20_000  # that one overview counts in each table and status
MIN_ROWS_PER_QUEUE, MAX_ROWS_PER_QUEUE = 50, 10_000  # that it counts of one queue in one status
LATE_AFTER = timedelta(minutes=1)  # a queue is late when its oldest task has been due for longer
RATE_PERIOD = timedelta(minutes=5)  # the time that rates are measured over
MISSED_HEARTBEATS = 3  # after which a poller does not count as alive
FINAL_OUTCOMES = ("completed", "deleted", "failed", "poisoned")
FAILED_OUTCOMES = ("failed", "retried")
MAX_QUEUES_NAMED = 5
NONE_COUNTED = ApproxCount(0)


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One row of the overview."""

    queue: str
    statuses: Mapping[str, ApproxCount]  # every status, in the order of ``Status``
    total: ApproxCount
    oldest: timedelta | None  # how long the task that waits longest has been due
    rate_in: float  # tasks put per second, over the last five minutes
    rate_out: float  # tasks pollers finished per second, with any outcome
    failed: int  # attempts that failed in the last hour
    drain: timedelta | None  # until nothing is left at this rate; None: never, or nothing to do
    paused: bool
    pollers: int  # alive, that serve it

    @property
    def overdue(self) -> bool:
        """Whether a task has been due for over a minute."""
        return self.oldest is not None and self.oldest > LATE_AFTER

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
    queues: Sequence[QueueStats]
    statuses: Mapping[str, ApproxCount] = field(default_factory=dict)  # over all queues
    total: ApproxCount = NONE_COUNTED
    pollers: int = 0  # alive

    @property
    def late(self) -> list[QueueStats]:
        """The late queues, the latest first."""
        return sorted((row for row in self.queues if row.late), key=lambda row: row.oldest or LATE_AFTER, reverse=True)

    @property
    def oldest(self) -> timedelta | None:
        """How long the task that waits longest has been due."""
        return max((row.oldest for row in self.queues if row.oldest is not None), default=None)

    @property
    def failed(self) -> int:
        """Attempts that failed in the last hour."""
        return sum(row.failed for row in self.queues)


def overview(using: str | None = None, *, only: Sequence[str] | None = None) -> Overview:
    """Return the statistics of every queue: those that are known and those that only have tasks.

    Over all databases, or that of ``using``. A constant number of queries per database and task table. With ``only``
    of these queues, and of the pollers that serve one of them.
    """
    context, rows = _read(locations_on(using), conf.known_queues() if only is None else only, only)
    pollers = [served for served in context.alive.values() if only is None or served & {*only}]
    return Overview(context.as_of, rows, *_sums(rows), pollers=len(pollers))


def stats_of_queue(name: str) -> QueueStats:
    """Return the statistics of one queue, over all databases it has tasks in."""
    _context, (row,) = _read([(alias, model_for(name)) for alias in aliases_of(name)], [name], only=[name])
    return row


def _read(
    places: Sequence[Location], known: Iterable[str], only: Sequence[str] | None = None
) -> tuple[_Context, list[QueueStats]]:
    """Read the known queues and those that have tasks, or with ``only`` these; return them by name."""
    cells = {name: dict.fromkeys(map(str, Status), NONE_COUNTED) for name in known}
    ages: dict[str, float] = {}
    for place in places:
        for name, found in _cells(place, only).items() if only != [] else ():
            before = cells.get(name, {})
            cells[name] = {status: before.get(status, NONE_COUNTED) + number for status, number in found.items()}
        for name, waits in waits_by_priority(place, list(cells)).items():
            ages[name] = max(*waits.values(), ages.get(name, 0.0))
    names = sorted(cells) if only is None else list(only)
    context = _Context(sorted({alias for alias, _ in places}), names)
    return context, [context.row(name, cells[name], ages.get(name)) for name in names]


class _Context:
    """What the other tables say: rates, pauses, pollers."""

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
        self.as_of = database_now(session)

    def _read(self, alias: str) -> None:
        over = RATE_PERIOD.total_seconds()
        puts = UsageCount.objects.using(alias).filter(queue__in=self.names, minute__gte=Now() - RATE_PERIOD, call="put")
        ended = Metric.objects.using(alias)
        done = ended.filter(minute__gte=Now() - RATE_PERIOD, outcome__in=FINAL_OUTCOMES)
        failed = ended.filter(minute__gte=Now() - timedelta(hours=1), outcome__in=FAILED_OUTCOMES)
        for name, number in _sums_by_queue(puts):
            self.rates_in[name] += number / over
        for name, number in _sums_by_queue(done):
            self.rates_out[name] += number / over
        for name, number in _sums_by_queue(failed):
            self.failed[name] += number
        stopped = Queue.objects.using(alias).filter(paused_time__isnull=False).exclude(paused_until__lte=Now())
        self.paused.update(stopped.values_list("name", flat=True))
        self.alive |= alive(alias)

    def row(self, name: str, statuses: Mapping[str, ApproxCount], age: float | None) -> QueueStats:
        """Return what is known of one queue."""
        rate_in, rate_out = self.rates_in[name], self.rates_out[name]
        waiting = statuses[Status.CREATED].number + statuses[Status.PROCESSING].number
        draining = waiting > 0 and rate_out > rate_in
        return QueueStats(
            queue=name,
            statuses=statuses,
            total=sum(statuses.values(), NONE_COUNTED),
            oldest=None if age is None else timedelta(seconds=max(age, 0.0)),
            rate_in=rate_in,
            rate_out=rate_out,
            failed=self.failed[name],
            drain=timedelta(seconds=waiting / (rate_out - rate_in)) if draining else None,
            paused=name in self.paused,
            pollers=sum(name in served for served in self.alive.values()),
        )


def _sums_by_queue(rows: QuerySet[Any]) -> list[tuple[str, int]]:
    return list(rows.values_list("queue").annotate(number=Sum("count")).order_by())


def alive(alias: str) -> dict[str, set[str]]:
    """Return the pollers that report to a database, and the queues each serves."""
    recent = Poller.objects.using(alias).filter(
        heartbeat_time__gt=Now() - MISSED_HEARTBEATS * conf.settings().heartbeat
    )
    return {
        instance: {*queue_names_in(queues)}
        for instance, queues in recent.exclude(state="STOPPED").values_list("instance", "queues")[:1000]
    }


def _sums(rows: Iterable[QueueStats]) -> tuple[dict[str, ApproxCount], ApproxCount]:
    sums = dict.fromkeys(map(str, Status), NONE_COUNTED)
    for row in rows:
        sums = {status: number + row.statuses[status] for status, number in sums.items()}
    return sums, sum(sums.values(), NONE_COUNTED)


# -- the task table ----------------------------------------------------------------------------------------------------


def _reading(place: Location) -> tuple[Session, StatsStatements]:
    session = Session.on(*place)
    return session, StatsStatements(session.sql.tables, session.sql.dialect)


def waits_by_priority(place: Location, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """Return, by queue and priority, how many seconds the first task has been due; only where a task is due."""
    session, sql = _reading(place)
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with prefer_indexes(session):
        for name, priority, seconds in session.run(sql.due_ages, {"names": session.sql.dialect.array(names)}):
            found[name][priority] = seconds
    return found


def _cells(place: Location, only: Sequence[str] | None = None) -> dict[str, dict[str, ApproxCount]]:
    """Return the queues that have tasks in one table, or some of them, and how many in each status."""
    session, sql = _reading(place)
    if not session.postgresql:
        return _exact(session.run(sql.counts_exact, {}))
    with prefer_indexes(session):
        names = [row[0] for row in session.run(sql.names, {})] if only is None else list(only)
        most = max(MIN_ROWS_PER_QUEUE, min(MAX_ROWS_PER_QUEUE, MAX_ROWS_PER_TABLE // max(len(names), 1)))
        rows = session.run(sql.counts(most + 1), {"names": names})
        found = {name: _counted(tuple(counts), most) for name, *counts in rows}
        return _estimated(session, sql, found)


def _counted(counts: tuple[int, ...], bound: int) -> dict[str, ApproxCount]:
    """Return one number per status; all were counted up to ``bound`` + 1."""
    ready, held, parked, *ended = counts
    more = ready > bound
    numbers = [
        ApproxCount(ready - held + parked, more=more or parked > bound),
        ApproxCount(held, more=more and held > bound // 2),  # held tasks are the first in ready order
        *(ApproxCount(number, more=number > bound) for number in ended),
    ]
    return dict(zip(map(str, Status), numbers, strict=True))


def _estimated(
    session: Session, sql: StatsStatements, found: dict[str, dict[str, ApproxCount]]
) -> dict[str, dict[str, ApproxCount]]:
    """Put the planner's estimates in place of numbers that were not counted to the end; they are never smaller."""
    open_cells = [(name, status) for name, row in found.items() for status, number in row.items() if not number.exact]
    if not open_cells:
        return found
    params = {f"{key}{at}": cell[part] for at, cell in enumerate(open_cells) for part, key in enumerate("qs")}
    plan = session.run(sql.estimates(len(open_cells)), params)[0][0]
    rows = dict(_rows(plan if isinstance(plan, list) else json.loads(plan)))
    for at, (name, status) in enumerate(open_cells):
        counted = found[name][status]
        found[name][status] = ApproxCount(max(counted.number, rows.get(f"c{at}", 0)), estimated=True)
    return found


def _rows(plan: Any) -> Iterable[tuple[str, int]]:
    """Yield alias and estimated rows of each scan of a plan."""
    for node in plan if isinstance(plan, list) else [plan]:
        if "Alias" in node:
            yield node["Alias"], int(node["Plan Rows"])
        for part in ("Plan", "Plans"):
            if part in node:
                yield from _rows(node[part])


def _exact(rows: Iterable[tuple[Any, ...]]) -> dict[str, dict[str, ApproxCount]]:
    found: dict[str, dict[str, ApproxCount]] = {}
    for name, status, _parked, number in rows:
        cells = found.setdefault(name, dict.fromkeys(map(str, Status), NONE_COUNTED))
        cells[status] += ApproxCount(number)
    return found


# -- health ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Health:
    """A judgement of all queues."""

    level: str  # "ok", "warned" or "late"
    sentence: str
    notes: Sequence[str]  # what else an operator should know
    late: Sequence[str]  # queues, the latest first; a paused queue is never late
    unserved: Sequence[str]  # queues with tasks that no living poller serves
    paused: Sequence[str]


def health(found: Overview) -> Health:
    """Return how the queues are. The tasks of a paused queue wait on purpose: it is named as paused, not as late."""
    late, unserved = found.late, [row.queue for row in found.queues if row.unserved]
    paused = [row.queue for row in found.queues if row.paused]
    notes = [_("Nothing serves %(queues)s.") % {"queues": _names(unserved)}] if unserved else []
    notes += [_("Paused: %(queues)s.") % {"queues": _names(paused)}] if paused else []
    notes += [_("No poller is running.")] if not found.pollers and not unserved else []
    names = [row.queue for row in late]
    if not late:
        level, sentence = "warned" if notes else "ok", _("All queues are on time.")
        return Health(level, sentence, notes, names, unserved, paused)
    ages = [format_duration(row.oldest or timedelta(0), rough=True) for row in late]
    words = ngettext("%(count)s queue late, oldest %(age)s", "%(count)s queues late, oldest %(age)s", len(late))
    sentence = words % {"count": len(late), "age": ages[0]}
    shown = _names([f"{name} ({age})" for name, age in zip(names, ages, strict=True)])
    return Health("late", sentence, [_("Late: %(queues)s.") % {"queues": shown}, *notes], names, unserved, paused)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_QUEUES_NAMED])
    left = len(names) - MAX_QUEUES_NAMED
    return shown if left <= 0 else _("%(shown)s and %(count)s more") % {"shown": shown, "count": left}
