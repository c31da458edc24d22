"""Reads that never keep the database busy for long: a statement timeout, and counts that stop at a bound."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Self, TypeVar

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core.durations import Rate, clock, format_duration, format_seconds
from django_dbtaskqueue.core.exceptions import SearchTooSlow, UnknownQueue
from django_dbtaskqueue.core.sql.stats import MAX_POSITIONS_PER_PRIORITY, StatsStatements
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.liveness import sqlstate
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.flow.groups import Limiter
from django_dbtaskqueue.operations.lookup import Location

Rows = QuerySet[Any]  # of any model
Found = TypeVar("Found")
Counts = dict[str, dict[str, "ApproxCount"]]  # by queue and status
MAX_COUNTED_ROWS = 10_000
QUERY_CANCELED = "57014"  # SQLSTATE of a statement that ran out of time
SQLITE_STEPS_PER_CHECK = 20_000  # of SQLite's virtual machine between two checks of the time
# Statistics lag behind a queue: with them the planner would sometimes read all of a queue to count its first rows.
# A parallel plan would give the estimate of one worker's share only.
INDEX_SETTINGS = {
    "enable_seqscan": "off", "enable_bitmapscan": "off", "enable_sort": "off", "max_parallel_workers_per_gather": "0",
}  # fmt: skip


@contextmanager
def statement_timeout(alias: str, within: timedelta | None = None) -> Iterator[None]:
    """Cancel any statement in this block that runs longer than ``within`` (``DBTASKQUEUE["OPERATIONS_TIMEOUT"]``).

    Raises ``SearchTooSlow``, which says how to narrow the search. On PostgreSQL the block is a transaction with its own
    ``statement_timeout``, so it also reads one state of the data. On SQLite the limit holds for the whole block.
    """
    limit = conf.settings().operations_timeout if within is None else within
    try:
        with time_limit(alias, limit), _sqlite_time_limit(alias, limit):
            yield
    except OperationalError as error:
        if sqlstate(error) == QUERY_CANCELED or str(error) == "interrupted":
            raise SearchTooSlow(format_duration(limit)) from error
        raise


def time_limit(alias: str, within: timedelta) -> AbstractContextManager[None]:
    """Cancel any statement in a block that runs longer, with an OperationalError of the SQLSTATE ``QUERY_CANCELED``.

    On PostgreSQL the block is a transaction (a savepoint inside the caller's); elsewhere nothing is limited.
    """
    return _with_settings(alias, {"statement_timeout": f"{int(within.total_seconds() * 1000)}ms"})


def prefer_indexes(session: Session) -> AbstractContextManager[None]:
    """Return a transaction, or part of the caller's, whose statements use an index wherever there is one."""
    return _with_settings(session.connection.alias, INDEX_SETTINGS)


@contextmanager
def _with_settings(alias: str, settings: Mapping[str, str]) -> Iterator[None]:
    if connections[alias].vendor != "postgresql":
        yield
        return
    old = ", ".join(f"current_setting('{name}') AS {name}" for name in settings)
    new = ", ".join(f"set_config('{name}', %s, true)" for name in settings)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        sql = f"WITH before AS MATERIALIZED (SELECT {old}) SELECT before.*, {new} FROM before"  # noqa: S608 -- our names
        cursor.execute(sql, [*settings.values()])
        before = cursor.fetchone()[: len(settings)]
        yield
        cursor.execute(f"SELECT {new}", before)  # the settings outlive a savepoint


def in_time(alias: str, within: timedelta, read: Callable[[], Found]) -> Found | None:
    """Return what ``read`` returns; on PostgreSQL None when a statement of it takes longer."""
    if connections[alias].vendor != "postgresql":
        return read()
    with suppress(SearchTooSlow), statement_timeout(alias, min(within, conf.settings().operations_timeout)):
        return read()
    return None


@contextmanager
def _sqlite_time_limit(alias: str, limit: timedelta) -> Iterator[None]:
    """On SQLite, call a function from time to time that stops a statement after the limit."""
    connection = connections[alias]
    if connection.vendor != "sqlite":
        yield
        return
    connection.ensure_connection()
    deadline = clock.monotonic() + limit.total_seconds()
    connection.connection.set_progress_handler(lambda: clock.monotonic() > deadline, SQLITE_STEPS_PER_CHECK)
    try:
        yield
    finally:
        connection.connection.set_progress_handler(None, 0)


@dataclass(frozen=True, slots=True)
class ApproxCount:
    """A number of rows: counted exactly, counted up to a bound ("10,000+"), or estimated by the planner ("≈ 9,876")."""

    number: int
    more: bool = False  # there is at least one more than ``number``
    estimated: bool = False

    @property
    def exact(self) -> bool:
        return not self.more and not self.estimated

    def __str__(self) -> str:
        shown = number_format(self.number, force_grouping=True)
        return f"≈\u202f{shown}" if self.estimated else shown + "+" * self.more

    def __bool__(self) -> bool:
        return self.number > 0

    def __add__(self, other: Self) -> "ApproxCount":
        return ApproxCount(self.number + other.number, self.more or other.more, self.estimated or other.estimated)


def bounded_count(rows: Rows, bound: int = MAX_COUNTED_ROWS) -> ApproxCount:
    """Return the number of rows, reading no more than ``bound`` + 1 that match."""
    return approx(rows.order_by().values("pk")[: bound + 1].count(), bound)


def count_within(rows: Rows, limit: timedelta) -> ApproxCount | None:
    """Return the bounded number of rows; on PostgreSQL None when the count takes longer than ``limit``."""
    return in_time(rows.db, limit, lambda: bounded_count(rows))


def count_in_time(rows: Rows) -> ApproxCount | None:
    """Return the bounded number of rows; None when the count takes longer than ``OPERATIONS_TIMEOUT``."""
    with suppress(SearchTooSlow), statement_timeout(rows.db):
        return bounded_count(rows)
    return None


def approx(number: int, bound: int) -> ApproxCount:
    """Return a number that was counted up to ``bound`` + 1."""
    return ApproxCount(min(number, bound), more=number > bound)


def estimate(rows: Rows) -> int | None:
    """Return about how many rows there are, as PostgreSQL's planner thinks; None on another database."""
    if connections[rows.db].vendor != "postgresql":
        return None
    (plan,) = json.loads(rows.order_by().explain(format="json"))
    return int(plan["Plan"]["Plan Rows"])


MAX_ROWS_PER_TABLE = 20_000  # that one overview counts in each table and status
MIN_ROWS_PER_QUEUE, MAX_ROWS_PER_QUEUE = 50, 10_000  # that it counts of one queue in one status
MIN_HELD_TO_ESTIMATE = 1000  # counted tasks in PROCESSING
SCANNED_CELL = re.compile(r" c(\d+)  \(cost=\S+ rows=(\d+) ")  # in a plan: a cell's place and its estimated rows
NONE_COUNTED = ApproxCount(0)


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """What the task tables say of a queue."""

    statuses: dict[str, ApproxCount] = field(default_factory=lambda: dict.fromkeys(map(str, Status), NONE_COUNTED))
    stale: int = 0
    stale_seconds: float | None = None

    def __add__(self, other: Self) -> "QueueCounts":
        seconds = [one for one in (self.stale_seconds, other.stale_seconds) if one is not None]
        both = {status: self.statuses[status] + other.statuses[status] for status in self.statuses}
        return QueueCounts(both, self.stale + other.stale, max(seconds, default=None))


def reading(place: Location) -> tuple[Session, StatsStatements]:
    """Return what reads the statistics of one table, or those by the minute of one database."""
    session = Session.on(*place)
    return session, StatsStatements(session.sql.tables, session.sql.dialect)


def waits_by_priority(place: Location, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """Return, by queue and priority, how many seconds the first task has been due; only where a task is due."""
    session, sql = reading(place)
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with prefer_indexes(session):
        for name, priority, seconds in session.run(sql.due_ages, {"names": session.sql.dialect.array(names)}):
            found[name][priority] = seconds
    return found


@dataclass(frozen=True, slots=True)
class ReadyPosition:
    """Where a task stands among the due tasks of its queue, and which pollers hold the others."""

    position: ApproxCount  # 1 is the task that a checkout takes next
    waiting: ApproxCount  # all that wait, with the task itself
    held: Mapping[tuple[str, str | None], int]  # live leases, by poller and payload type, as far as they were read


def ready_position(place: Location, queue: str, task_id: int) -> ReadyPosition:
    """Return a due task's position in the ready order. Reads a limited number of rows."""
    session, sql = reading(place)
    params = {"names": session.sql.dialect.array([queue]), "queue_name": queue, "task_id": task_id}
    before, waiting, held = 0, 0, Counter[tuple[str, str | None]]()
    with prefer_indexes(session):
        rows = session.run(sql.ready_order_counts, params)
    for earlier, holder, payload_type, number in rows:
        if holder is not None:
            held[holder, payload_type] += number
        else:
            waiting, before = waiting + number, before + number * bool(earlier)
    # At the limit of a priority, or of all, others were not read.
    own = ApproxCount(before, more=True) if before >= MAX_POSITIONS_PER_PRIORITY else ApproxCount(before + 1)
    return ReadyPosition(own, ApproxCount(waiting, more=waiting >= MAX_POSITIONS_PER_PRIORITY), held)


LIMITS = ("max_running", "rate", "burst", "max_running_per_group", "rate_per_group", "burst_per_group")


@dataclass(frozen=True, slots=True)
class LimitUse:
    """The limits of a queue over all pollers in one database, and their use; None or 0: no such limit.

    ``tokens``: tasks that may start now. ``next_seconds``: until the rate allows the next start; None: it allows one.
    ``held_back``: tasks that wait because a limit is reached.
    """

    DOCUMENT: ClassVar = (*LIMITS, "database", "running", "tokens", "next_seconds", "reached", "held_back")
    database: str
    running: int
    tokens: int
    next_seconds: float | None
    max_running: int | None
    rate: Rate | None
    burst: int | None
    max_running_per_group: int
    rate_per_group: Rate | None
    burst_per_group: int | None
    held_back: ApproxCount = NONE_COUNTED

    @property
    def reached(self) -> str:
        """The setting that holds tasks back now, or ""."""
        if self.max_running is not None and self.running >= self.max_running:
            return "max_running"
        return "rate" if self.rate is not None and not self.tokens else ""

    def __str__(self) -> str:
        texts = []
        if self.max_running is not None:
            texts.append(_("%(running)s of %(limit)s running") % {"running": self.running, "limit": self.max_running})
        if self.rate is not None and self.next_seconds is not None:
            facts = {"rate": self.rate, "time": format_seconds(self.next_seconds)}
            texts.append(_("at most %(rate)s start, the next in %(time)s") % facts)
        elif self.rate is not None:
            texts.append(_("at most %(rate)s start, %(tokens)s now") % {"rate": self.rate, "tokens": self.tokens})
        if self.max_running_per_group > 1:
            texts.append(_("at most %(limit)s of each group running") % {"limit": self.max_running_per_group})
        if self.rate_per_group is not None:
            texts.append(_("at most %(rate)s of each group start") % {"rate": self.rate_per_group})
        if self.reached:
            texts.append(_("due tasks held back: %(number)s") % {"number": self.held_back})
        return "; ".join(texts)


def limit_use(place: Location, queue: str) -> LimitUse | None:
    """Return how much of its limits a queue uses; None if it has none."""
    settings, limiter = conf.QueueSettings(), None
    with suppress(UnknownQueue):
        settings = overridden_settings(queue, place[0])
        limiter = Limiter.of(queue, settings)
    if limiter is None:
        return None
    running, tokens = limiter.used(Session.on(*place))
    wait = (1 - tokens) / limiter.rate if limiter.rate and tokens < 1 else None
    limits = {name: getattr(settings, name) for name in LIMITS}
    use = LimitUse(place[0], running, int(tokens) if limiter.rate else 0, wait, **limits)
    return replace(use, held_back=ready_position(place, queue, 0).waiting) if use.reached else use


def limits_of(queue: str) -> list[LimitUse]:
    """Return how much of its limits a queue uses, in each of its databases; nothing if it has none."""
    return [use for alias in aliases_of(queue) if (use := limit_use((alias, model_for(queue)), queue))]


def limits_text(uses: Sequence[LimitUse]) -> str:
    """Return limits in words; of a queue with shards for each of them."""
    return "; ".join(f"{use.database}: {use}" if len(uses) > 1 else str(use) for use in uses)


def queue_names(place: Location) -> list[str]:
    """Return the names of the queues that have tasks in one table."""
    session, sql = reading(place)
    with prefer_indexes(session):
        return [row[0] for row in session.run(sql.names, {})]


def queue_counts(
    place: Location, only: Sequence[str] | None = None, max_rows: int | None = None
) -> dict[str, QueueCounts]:
    """Return the queues that have tasks in one table, or some of them, and how many in each status."""
    session, sql = reading(place)
    if only is not None and not only:
        return {}
    if not session.postgresql:
        found: defaultdict[str, QueueCounts] = defaultdict(QueueCounts)
        for name, status, _parked, number, stale, seconds in session.run(sql.counts_exact, {}):
            found[name] += QueueCounts(QueueCounts().statuses | {status: ApproxCount(number)}, stale, seconds)
        return found if only is None else {name: found[name] for name in only if name in found}
    with prefer_indexes(session):
        names = [row[0] for row in session.run(sql.names, {})] if only is None else list(only)
        most = max(MIN_ROWS_PER_QUEUE, min(MAX_ROWS_PER_QUEUE, (max_rows or MAX_ROWS_PER_TABLE) // max(len(names), 1)))
        rows = session.run(sql.counts.format(most=most + 1), {"names": names})
        counted = {name: _counted(tuple(counts), most) for name, *counts, _stale, _seconds in rows}
        numbers = _estimated(session, sql, counted)
        return {row[0]: QueueCounts(numbers[row[0]], *row[-2:]) for row in rows}


def _counted(counts: tuple[int, ...], bound: int) -> dict[str, ApproxCount]:
    """Return one number per status; all were counted up to ``bound`` + 1."""
    ready, held, parked, *ended = counts
    more = ready > bound
    numbers = [
        ApproxCount(ready - held + parked, more=more or parked > bound),
        ApproxCount(held, more=more),  # those that were seen: others may be behind the bound
        *(ApproxCount(number, more=number > bound) for number in ended),
    ]
    return dict(zip(map(str, Status), numbers, strict=True))


def _estimated(session: Session, sql: StatsStatements, found: Counts) -> Counts:
    """Put the planner's estimates in place of numbers that were not counted to the end; they are never smaller.

    PROCESSING stays "103+", unless many were counted: its share of a queue changes too fast for the statistics.
    """
    open_cells = [
        (name, status)
        for name, row in found.items()
        for status, number in row.items()
        if number.more and (status != Status.PROCESSING or number.number >= MIN_HELD_TO_ESTIMATE)
    ]
    if not open_cells:
        return found
    params = {f"{key}{at}": cell[part] for at, cell in enumerate(open_cells) for part, key in enumerate("qs")}
    asked = " UNION ALL ".join(sql.estimate.format(at=at) for at in range(len(open_cells)))
    plan = "\n".join(line for (line,) in session.run(f"EXPLAIN {asked}", params))
    rows = {int(at): int(number) for at, number in SCANNED_CELL.findall(plan)}
    for at, (name, status) in enumerate(open_cells):
        found[name][status] = ApproxCount(max(found[name][status].number, rows.get(at, 0)), estimated=True)
    return found
