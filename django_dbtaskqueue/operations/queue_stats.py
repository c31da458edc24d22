"""Statistics of each queue, and whether the queues are well, at a cost that does not grow with the tables.

Small numbers are counted. Larger ones are estimates and are marked as such. Rates come from the counts by the minute
that pollers and producers store, never from the task table.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain
from typing import ClassVar, Self

from django.db.models import Min, Q, QuerySet, Value
from django.db.models.functions import Coalesce, Now, NullIf
from django.utils.formats import number_format
from django.utils.timezone import localtime
from django.utils.translation import gettext as _, ngettext

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import format_age, parse_duration
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.db.session import Session, aliases_of
from django_dbtaskqueue.flow.groups import Limiter
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.metrics import upper
from django_dbtaskqueue.models import MinuteCount, Poller, Queue, Task
from django_dbtaskqueue.models.control import CALL, FAILURE, IN_EFFECT, MISSED_HEARTBEATS, OUTCOME, queue_names_in
from django_dbtaskqueue.models.readable import ReadableTime, Total
from django_dbtaskqueue.operations import bounded_reads
from django_dbtaskqueue.operations.bounded_reads import NONE_COUNTED, ApproxCount, LimitUse, QueueCounts, limits_of
from django_dbtaskqueue.operations.lookup import Location, aliases_in, locations_on, places_of

LATE_AFTER = timedelta(minutes=1)  # a queue is late when its oldest task has been due for longer
RATE_PERIOD = timedelta(minutes=5)  # the time that rates are measured over
DURATION_PERIOD = timedelta(hours=1)  # the time that run times and waits are measured over
RATE_STEPS = DURATION_PERIOD // RATE_PERIOD
FINAL_OUTCOMES = ("completed", "deleted", "failed", "poisoned")
FAILED_OUTCOMES = ("failed", "retried")
MAX_QUEUES_NAMED = 5
HISTOGRAMS = ("runs", "waits")


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause in effect. ``until`` None: until the queue is resumed."""

    since: datetime | None
    until: datetime | None
    by: str
    reason: str

    @property
    def note(self) -> str:
        """What is known of it, as in "by ada: provider is down, until 2026-11-22 14:00"."""
        who = _("by %(who)s") % {"who": self.by} if self.by else ""
        end = self.until and (localtime(self.until) if self.until.tzinfo else self.until)
        words = _("until %(time)s") % {"time": f"{end:%Y-%m-%d %H:%M}"} if end else ""
        return ", ".join(filter(None, (": ".join(filter(None, (who, self.reason))), words)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds that half of the attempts stayed within, and 95 %; None without a measured attempt."""

    p50: float | None = None
    p95: float | None = None

    @classmethod
    def of(cls, histogram: Mapping[int, int]) -> Self:
        return cls(quantile(histogram, 0.5), quantile(histogram, 0.95))


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The figures of a queue in the last hour; rates per second, of five minutes. Stale: tasks whose lease ran out."""

    DOCUMENT: ClassVar = (
        "queue", "paused", "pause", "late", "pollers", "oldest", "rate_in", "rate_out", "failed", "drain", "run",
        "wait", "stale", "statuses", "limits",
    )  # fmt: skip
    queue: str
    statuses: Mapping[str, ApproxCount]  # every status, in the order of ``Status``
    total: ApproxCount
    oldest: timedelta | None  # how long the task that waits longest has been due, or without a lease
    rate_in: float  # tasks put
    rate_out: float  # tasks pollers finished, with any outcome
    failed: int  # attempts
    drain: timedelta | None  # until nothing is left at this rate; None: never, or nothing to do
    pause: Pause | None  # None: the queue is not paused
    pollers: int  # alive, that serve it
    stale: int = 0  # among those counted
    stale_for: timedelta | None = None  # how long ago the first of these leases ran out
    rates: Sequence[float] = ()  # tasks finished per second in the last hour, by ``RATE_PERIOD``, the oldest first
    run: Quantiles = Quantiles()
    wait: Quantiles = Quantiles()  # from due to checkout
    limits: Sequence[LimitUse] = ()  # over all pollers, by database; read by ``with_limits``

    @property
    def paused(self) -> bool:
        return self.pause is not None

    @property
    def overdue(self) -> bool:
        return self.oldest is not None and self.oldest > LATE_AFTER

    @property
    def late(self) -> bool:
        return self.overdue and not self.paused

    @property
    def unserved(self) -> bool:
        """Whether tasks wait or have lost their poller, the queue is not paused, and no living poller serves it."""
        return bool(self.statuses[Status.CREATED] or self.stale) and not self.pollers and not self.paused

    @property
    def needs_care(self) -> bool:
        """Whether the queue is late, paused or not served, or attempts failed in the last hour."""
        return self.late or self.paused or self.unserved or self.failed > 0


@dataclass(frozen=True, slots=True)
class Health:
    """How the queues are: ``level`` is ok, warned or late; the rest says why, in words and by queue."""

    level: str
    sentence: str
    notes: Sequence[str]  # what else an operator should know
    late: Sequence[str]  # queues, the latest first; a paused queue is never late
    unserved: Sequence[str]  # queues with tasks that no living poller serves
    paused: Sequence[str]


@dataclass(frozen=True, slots=True)
class QueuesOverview:
    """All queues at a glance. ``pollers``: how many are alive."""

    DOCUMENT: ClassVar = ("as_of", "health", "pollers", "queues")
    as_of: datetime
    queues: Sequence[QueueStats]
    statuses: Mapping[str, ApproxCount] = field(default_factory=dict)  # over all queues
    pollers: int = 0
    health: Health = Health("ok", "", (), (), (), ())

    @property
    def late(self) -> list[QueueStats]:
        return sorted((row for row in self.queues if row.late), key=lambda row: row.oldest or LATE_AFTER, reverse=True)

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.queues)


def overview(using: str | None = None, *, only: Sequence[str] | None = None) -> QueuesOverview:
    """Return the statistics of every queue: those that are known and those that only have tasks.

    Over all databases, or that of ``using``. A constant number of queries per database and task table. With ``only``
    of these queues, and of the pollers that serve one of them.
    """
    context, rows = _read(locations_on(using), known_queues(using) if only is None else only, only)
    pollers = [served for served in context.alive.values() if only is None or served & {*only}]
    statuses = {status: sum((row.statuses[status] for row in rows), NONE_COUNTED) for status in map(str, Status)}
    found = QueuesOverview(context.as_of, rows, statuses, pollers=len(pollers))
    return replace(found, health=_health(found))


def with_limits(rows: Sequence[QueueStats]) -> list[QueueStats]:
    """Return statistics with the use of each queue's limits. It reads nothing of the queues that have none."""
    names = {row.queue for row in rows}
    limited = {name for name in names if Limiter.of(name, conf.default_settings(name))}
    for alias in {alias for name in names for alias in aliases_of(name)}:  # by their row's overrides
        changed = Queue.objects.using(alias).filter(name__in=names).exclude(overrides={})
        limited.update(changed.values_list("name", flat=True))
    return [replace(row, limits=limits_of(row.queue)) if row.queue in limited else row for row in rows]


def stats_of_queue(name: str) -> QueueStats:
    """Return the statistics of one queue, over all databases it has tasks in."""
    _context, (row,) = _read(places_of(name), [name], only=[name])
    return row


def _read(
    places: Sequence[Location], known: Iterable[str], only: Sequence[str] | None = None
) -> tuple["_Context", list[QueueStats]]:
    """Read the known queues and those that have tasks, or with ``only`` these; return them by name."""
    context = _Context(aliases_in(places))
    cells = {name: QueueCounts() for name in (only if only is not None else {*known, *context.served})}
    ages: dict[str, float] = {}
    for place in places if only != [] else ():
        for name, found in bounded_reads.queue_counts(place, only).items():
            cells[name] = cells.get(name, QueueCounts()) + found
        for name, waits in bounded_reads.waits_by_priority(place, list(cells)).items():
            ages[name] = max(*waits.values(), ages.get(name, 0.0))
    names = sorted(cells) if only is None else only
    return context, [context.row(name, cells[name], ages.get(name)) for name in names]


class _Context:
    """What the other tables say: rates, pauses, pollers."""

    def __init__(self, aliases: Sequence[str]) -> None:
        self.rates_in: defaultdict[str, float] = defaultdict(float)
        self.rates: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * RATE_STEPS)  # the newest first
        self.failed: defaultdict[str, int] = defaultdict(int)
        self.histograms: dict[str, defaultdict[str, Counter[int]]] = {kind: defaultdict(Counter) for kind in HISTOGRAMS}
        self.pauses: dict[str, Pause] = {}
        self.alive: dict[str, set[str]] = {}
        self.as_of = Session.on(aliases[0] if aliases else "default").now()
        for alias in aliases:
            self._read(alias)
        self.served = Counter(chain.from_iterable(self.alive.values()))  # by how many pollers

    def _read(self, alias: str) -> None:
        over = RATE_PERIOD.total_seconds()
        self.alive |= alive(alias)
        puts = MinuteCount.objects.using(alias).filter(kind=CALL, name="put", minute__gte=Now() - RATE_PERIOD)
        for name, number in puts.values_list("queue").annotate(Total("count")).order_by():
            self.rates_in[name] += float(number) / over
        self.pauses |= pauses(Queue.objects.using(alias).all())
        session, sql = bounded_reads.reading((alias, Task))
        every = {"every": True, "queues": session.sql.dialect.array([])}
        params = {"start": session.time_text(self.as_of - DURATION_PERIOD), "step": over, **every}
        for name, outcome, steps_ago, number in session.run(sql.ended, params):
            if outcome in FINAL_OUTCOMES and steps_ago < RATE_STEPS:
                self.rates[name][max(steps_ago, 0)] += number / over
            if outcome in FAILED_OUTCOMES:
                self.failed[name] += number
        for kind in HISTOGRAMS:
            for name, bucket, number in session.run(sql.durations.format(times=kind, by="queue_name"), params):
                self.histograms[kind][name][int(bucket)] += int(number)

    def row(self, name: str, cells: QueueCounts, age: float | None) -> QueueStats:
        statuses, dead = cells.statuses, cells.stale_seconds
        age = max((one for one in (age, dead) if one is not None), default=None)
        rate_in, rates = self.rates_in[name], self.rates[name]
        rate_out = rates[0]
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
            pause=self.pauses.get(name),
            pollers=self.served[name],
            stale=cells.stale,
            stale_for=None if dead is None else timedelta(seconds=max(dead, 0.0)),
            rates=rates[::-1],
            run=Quantiles.of(self.histograms["runs"][name]),
            wait=Quantiles.of(self.histograms["waits"][name]),
        )


def pauses(queues: QuerySet[Queue]) -> dict[str, Pause]:
    """Return the pauses that are in effect, by queue."""
    found = queues.filter(IN_EFFECT).values_list("name", "paused_time", "paused_until", "paused_by", "paused_reason")
    return {name: Pause(since, until, by, reason) for name, since, until, by, reason in found}


def living(alias: str) -> QuerySet[Poller]:
    """Return the pollers that report to a database: they have not stopped, and have not missed three heartbeats."""
    recent = Now() - MISSED_HEARTBEATS * conf.settings().heartbeat
    return Poller.objects.using(alias).filter(heartbeat_time__gt=recent).exclude(state="STOPPED")


def alive(alias: str) -> dict[str, set[str]]:
    """Return the names of the living pollers, and the queues each serves."""
    rows = living(alias).values_list("instance", "queues")[:1000]
    return {instance: {*queue_names_in(queues)} for instance, queues in rows}


def _health(found: QueuesOverview) -> Health:
    """Return how the queues are. The tasks of a paused queue wait on purpose: it is named as paused, not as late."""
    late, unserved = found.late, [row.queue for row in found.queues if row.unserved]
    paused = {row.queue: row.pause.note for row in found.queues if row.pause}
    dead = [row for row in found.queues if row.stale_for is not None and row.stale_for > LATE_AFTER]
    named = [
        (_("Late: %(queues)s."), [f"{row.queue} ({format_age(row.oldest)})" for row in late]),
        (_("Nothing serves %(queues)s."), unserved),
        (
            _("Leases ran out and no poller has taken the tasks over: %(queues)s."),
            [f"{row.queue} ({row.stale}, {format_age(row.stale_for)})" for row in dead],
        ),
        (_("Paused: %(queues)s."), [f"{name} ({note})" if note else name for name, note in paused.items()]),
    ]
    notes = [words % {"queues": names_of(names)} for words, names in named if names]
    notes += [_("No poller is running.")] if not found.pollers and not unserved else []
    parts = [_("All queues are on time")]
    if late:
        words = ngettext("%(count)s queue late, oldest %(age)s", "%(count)s queues late, oldest %(age)s", len(late))
        parts = [words % {"count": len(late), "age": format_age(late[0].oldest)}]
    failures = _failures(found)
    parts += failures
    if paused:
        words = ngettext("%(count)s queue paused", "%(count)s queues paused", len(paused))
        parts.append(words % {"count": len(paused)})
    level = "late" if late else "warned" if notes or failures else "ok"
    return Health(level, "; ".join(parts) + ".", notes, [row.queue for row in late], unserved, [*paused])


def _failures(found: QueuesOverview) -> list[str]:
    """Return how many tasks failed for good, and how many attempts in the last hour; only what is not 0."""
    named = [(str(status), found.statuses.get(status, NONE_COUNTED)) for status in (Status.ERROR, Status.POISON)]
    tasks = ", ".join(f"{number} {status}" for status, number in named if number)
    count = found.failed
    words = ngettext("%(count)s attempt failed in the last hour", "%(count)s attempts failed in the last hour", count)
    attempts = words % {"count": number_format(count, force_grouping=True)} if count else ""
    return [part for part in (tasks, attempts) if part]


def names_of(names: Sequence[str]) -> str:
    """Return names joined by commas: the first few, and how many more there are."""
    shown = ", ".join(names[:MAX_QUEUES_NAMED])
    left = len(names) - MAX_QUEUES_NAMED
    return shown if left <= 0 else _("%(shown)s and %(count)s more") % {"shown": shown, "count": left}


WINDOWS = {name: parse_duration(name) for name in ("1h", "3h", "24h", "3d", "7d")}
MAX_OPEN_TASKS_COUNTED = 1000  # of one group
MAX_ENDED_TASKS = 1000  # of a queue and a terminal status, read for the figures of its payload types
POINT_SECONDS = (60, 300, 600, 3600, 6 * 3600, 86_400)  # that one point of a series may last
MAX_VERSIONS = 100  # of pollers, the oldest first
MAX_POINTS = 150  # of a series, unless the longest step gives more


@dataclass(frozen=True, slots=True)
class FailureStats:
    """How often a group of failures occurred, and how many of its tasks still need an operator."""

    failed: Mapping[str, int]  # attempts that failed, by window: "1h", "3h", "24h", "3d", "7d"
    open: ApproxCount  # tasks that are in ERROR or POISON because of it


def stats_of_groups(fingerprints: Sequence[str], alias: str) -> list[FailureStats]:
    """Return the statistics of these groups, in their order. A constant number of queries for each task table."""
    if not fingerprints:
        return []
    week = MinuteCount.objects.using(alias).filter(kind=FAILURE, minute__gte=Now() - WINDOWS["7d"])
    sums = {f"in_{name}": Total("count", filter=Q(minute__gte=Now() - span)) for name, span in WINDOWS.items()}
    failed = {one: dict.fromkeys(WINDOWS, 0) for one in fingerprints}
    for one, *numbers in week.filter(name__in=fingerprints).values_list("name").annotate(**sums).order_by():
        failed[one] = {name: int(number or 0) for name, number in zip(WINDOWS, numbers, strict=True)}
    waiting = Counter[str]()
    for place in locations_on(alias):
        session, sql = bounded_reads.reading(place)
        asked = sql.open_failures.format(most=MAX_OPEN_TASKS_COUNTED + 1)
        with bounded_reads.prefer_indexes(session):
            waiting.update(dict(session.run(asked, {"prints": session.sql.dialect.array(fingerprints)})))
    counted = {one: bounded_reads.approx(waiting[one], MAX_OPEN_TASKS_COUNTED) for one in fingerprints}
    return [FailureStats(failed[one], counted[one]) for one in fingerprints]


def failure_shares(alias: str, queues: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Yield some queues with the share of the attempts that failed, in the last hour and in the day before it."""
    start = Now() - WINDOWS["1h"]
    counts = MinuteCount.objects.using(alias).filter(kind=OUTCOME, queue__in=queues)
    failed, later = Q(name__in=FAILED_OUTCOMES), Q(minute__gte=start)
    asked = (failed & later, later, failed & ~later, ~later)
    sums = {f"sum_{number}": Total("count", filter=one, default=0) for number, one in enumerate(asked)}
    rows = counts.filter(minute__gte=start - WINDOWS["24h"]).values_list("queue").annotate(**sums).order_by("queue")
    for queue, *numbers in rows if queues else ():
        failed_now, ended_now, failed_before, ended_before = map(float, numbers)
        yield queue, failed_now / max(1.0, ended_now), failed_before / max(1.0, ended_before)


@dataclass(frozen=True, slots=True)
class TypeStats:
    """The newest ended tasks of one payload type of a queue."""

    payload_type: str  # empty: the queue's default
    statuses: Mapping[str, int]  # tasks by terminal status
    run: Quantiles  # of the last attempt of each
    wait: Quantiles  # from enqueue to checkout, of tasks with one attempt


def stats_of_types(queue: str) -> list[TypeStats]:
    """Return the figures of each payload type, the slowest first, from the newest tasks of each terminal status."""
    ended = defaultdict[str, list[tuple[str, int, timedelta | None, timedelta | None]]](list)
    # The database subtracts: 9,000 times would take Python longer than all else on the page.
    created, started, finished = map(ReadableTime, ("create_time", "start_time", "finish_time"))
    ran, waited = finished - started, started - created
    for alias, model in places_of(queue):
        tasks = model._default_manager.using(alias).filter(queue=queue)
        for status in map(str, TERMINAL):
            newest = tasks.filter(final_status=status).order_by("-pk")
            rows = newest.values_list("payload_type", "total_attempt", ran, waited)
            for kind, attempts, run, wait in rows[:MAX_ENDED_TASKS]:
                ended[kind or ""].append((status, attempts, run, wait))
    found = [
        TypeStats(
            kind,
            Counter(status for status, *_others in tasks),
            _quantiles(run for _status, _attempts, run, _wait in tasks),
            _quantiles(wait for _status, attempts, _run, wait in tasks if attempts == 1),
        )
        for kind, tasks in ended.items()
    ]
    return sorted(found, key=lambda one: -(one.run.p95 or 0.0))


def _quantiles(times: Iterable[timedelta | None]) -> Quantiles:
    found = sorted(max(time.total_seconds(), 0.0) for time in times if time is not None)
    return Quantiles(found[len(found) // 2], found[len(found) * 95 // 100]) if found else Quantiles()


@dataclass(slots=True)
class Point:
    """What happened in one step of time: the attempts that ended, by outcome, and how long they ran and had waited."""

    DOCUMENT: ClassVar = ("time", "seconds", "outcomes", "run", "wait")
    time: datetime  # its beginning
    seconds: float  # its length
    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    runs: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # histogram of run times
    waits: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # histogram of waits

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())

    def rate_of(self, *outcomes: str) -> float:
        """Attempts that ended in one of these ways, per second."""
        return sum(self.outcomes.get(outcome, 0) for outcome in outcomes) / self.seconds

    @property
    def run(self) -> Quantiles:
        return Quantiles.of(self.runs)

    @property
    def wait(self) -> Quantiles:
        return Quantiles.of(self.waits)


def new_releases(pollers: QuerySet[Poller], since: timedelta) -> list[tuple[datetime, str]]:
    """Return when one of these pollers of a new release first started, from ``since`` ago until now, as their rows say.

    Without a release of the project it is the version of this package. The first one that any row has is not new.
    """
    rows = pollers.exclude(version="").annotate(known=Coalesce(NullIf("release", Value("")), "version"))
    first = rows.values_list("known").annotate(first=Min("start_time")).order_by("first")[:MAX_VERSIONS]
    found = [(time, version) for version, time in first]
    begin = Session.on(rows.db).now() - since if len(found) > 1 else None
    return [(time, version) for time, version in found[1:] if begin is not None and time >= begin]


def series(
    using: str | None, since: timedelta, queue: str | None = None, *, among: Sequence[str] | None = None
) -> list[Point]:
    """Return what happened from ``since`` ago until now, the oldest first: at most about 150 points, none left out.

    Over all queues of a database, those of ``among``, or one on all its shards. Reads only the counts by the minute.
    """
    if since <= timedelta(0):
        raise TaskQueueError(f"series(since={since!r}) must be a positive duration.")
    readers = [bounded_reads.reading((alias, Task)) for alias in aliases_of(queue or "", using, write=False)]
    step = next((one for one in POINT_SECONDS if since.total_seconds() <= one * MAX_POINTS), POINT_SECONDS[-1])
    now = readers[0][0].now()
    last = int(now.timestamp()) // step
    first = last - max(1, round(since.total_seconds() / step)) + 1
    points = {
        at: Point(datetime.fromtimestamp(at * step, tz=now.tzinfo), min(step, max(now.timestamp() - at * step, 1)))
        for at in range(first, last + 1)
    }
    # A little before, because SQLite compares texts; what is too old fits no point.
    start = datetime.fromtimestamp(first * step, tz=now.tzinfo) - timedelta(seconds=1)
    names = among if queue is None else [queue]
    for session, sql in readers:
        wanted = {"every": names is None, "queues": session.sql.dialect.array(names or [])}
        params = {"start": session.time_text(start), "step": step, **wanted}
        for at, outcome, number in session.run(sql.outcomes, params):
            if at in points:
                points[at].outcomes[outcome] += int(number)
        for kind in HISTOGRAMS:
            for at, bucket, number in session.run(sql.durations.format(times=kind, by=sql.minute_step), params):
                if at in points:
                    getattr(points[at], kind)[int(bucket)] += int(number)
    return list(points.values())


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the seconds that ``share`` of all stay within, None of nothing. A class is taken to be spread evenly."""
    if not (wanted := share * sum(counts.values())):
        return None
    seen = 0.0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= wanted:
            low = upper(number - 1) if number else 0.0
            return low + (upper(number) - low) * (1 - (seen - wanted) / counts[number])
    return upper(max(counts))
