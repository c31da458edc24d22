"""Queues, pollers, failures, the audit and the doctor as data, for the command line's JSON and for the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypedDict

from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.models import AuditEntry, FailureGroup, Poller
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, LimitUse, limits_by_queue
from django_dbtaskqueue.operations.queue_stats import (
    FailureStats,
    Health,
    Overview,
    Pause,
    Point,
    Quantiles,
    QueueStats,
    health,
)
from django_dbtaskqueue.operations.serializers import document


class CountDocument(TypedDict):
    """A number of tasks; not ``exact``: an estimate, or the number that was counted up to a bound."""

    count: int
    exact: bool


class LimitsDocument(TypedDict):
    """The limits of a queue over all pollers in one database, and their use; None: no such limit.

    ``tokens``: tasks that may start now. ``next_seconds``: until the rate allows the next start; None: it allows one.
    ``reached``: the setting that holds tasks back now, max_running or rate, or "". ``held_back``: these tasks.
    """

    database: str
    running: int | None
    max_running: int | None
    rate: str | None
    burst: int | None
    tokens: int | None
    next_seconds: float | None
    reached: str
    held_back: CountDocument
    max_running_per_group: int
    rate_per_group: str | None
    burst_per_group: int | None


class QueueStatsDocument(TypedDict):
    """The figures of a queue.

    Rates are per second, over the last five minutes; times and failures are of the last hour. ``stale``: tasks whose
    lease ran out. ``limits``: by database, of a queue with limits over all pollers.
    """

    queue: str
    paused: bool
    pause: Pause | None
    late: bool
    pollers: int
    oldest_seconds: float | None
    rate_in: float
    rate_out: float
    failed_last_hour: int
    drain_seconds: float | None
    run_seconds: Quantiles
    wait_seconds: Quantiles
    stale: int
    tasks: dict[str, CountDocument]
    limits: list[LimitsDocument]


class OverviewDocument(TypedDict):
    """All queues at a glance. ``pollers``: how many are alive."""

    as_of: datetime
    health: Health
    pollers: int
    queues: list[QueueStatsDocument]


def overview_document(view: Overview, rows: Sequence[QueueStats]) -> OverviewDocument:
    """Return queues at a glance; a number that is an estimate is not ``exact``."""
    limits = limits_by_queue(row.queue for row in rows)
    return {
        "as_of": view.as_of,
        "health": health(view),
        "pollers": view.pollers,
        "queues": [queue_stats_document(row, limits.get(row.queue, ())) for row in rows],
    }


def limits_document(use: LimitUse) -> LimitsDocument:
    """Return the limits of a queue in one database."""
    limits = use.settings
    return document(
        LimitsDocument,
        limits,
        database=use.database,
        running=None if limits.max_running is None else use.running,
        rate=None if limits.rate is None else str(limits.rate),
        tokens=use.tokens if limits.rate else None,
        next_seconds=use.next_seconds,
        reached=use.reached,
        held_back=_count(use.held_back),
        rate_per_group=None if limits.rate_per_group is None else str(limits.rate_per_group),
    )


def queue_stats_document(row: QueueStats, limits: Sequence[LimitUse]) -> QueueStatsDocument:
    """Return the figures of one queue."""
    return document(
        QueueStatsDocument,
        row,
        oldest_seconds=_seconds(row.oldest),
        failed_last_hour=row.failed,
        drain_seconds=_seconds(row.drain),
        run_seconds=row.run,
        wait_seconds=row.wait,
        tasks={name: _count(one) for name, one in row.statuses.items()},
        limits=[limits_document(use) for use in limits],
    )


class PollerDocument(TypedDict):
    """A poller as it last reported. ``alive``: it has not stopped, and has not missed three heartbeats."""

    poller: str
    host: str
    pid: int
    version: str
    state: str
    alive: bool
    queues: list[str]
    slots: int
    held: int
    finished: int
    failed: int
    started: datetime
    heartbeat: datetime
    requested_command: str


def poller_document(row: Poller, *, alive: bool, queues: Sequence[str]) -> PollerDocument:
    """Return a poller, with those of its queues that are shown."""
    own = {"poller": row.instance, "started": row.start_time, "heartbeat": row.heartbeat_time}
    return document(PollerDocument, row, alive=alive, queues=list(queues), **own)


class FailureDocument(TypedDict):
    """Failures that have queue, exception, place in the code and message in common.

    ``failed``: attempts that failed, by window. ``open``: tasks that are in ERROR or POISON because of it; with
    ``open_more`` there are more.
    """

    fingerprint: str
    queue: str
    error_type: str
    place: str
    message: str
    first_seen: datetime
    last_seen: datetime
    failed: dict[str, int]
    open: int
    open_more: bool


def failure_document(group: FailureGroup, stats: FailureStats) -> FailureDocument:
    """Return a failure group, secrets masked."""
    open_tasks = {"open": stats.open.number, "open_more": stats.open.more}
    message = masked_text(group.message)
    return document(FailureDocument, group, place=group.frame, message=message, failed=dict(stats.counts), **open_tasks)


class AuditDocument(TypedDict):
    """One act of an operator."""

    id: int
    time: datetime
    actor: str
    source: str
    verb: str
    queue: str
    query: str
    reason: str
    changed: int
    skipped: int
    details: Mapping[str, object]
    operation: int | None


def audit_document(entry: AuditEntry) -> AuditDocument:
    """Return an audit entry, secrets masked."""
    details = masked(entry.details)
    known = details if isinstance(details, dict) else {}
    return document(AuditDocument, entry, id=entry.pk, details=known, operation=entry.operation_id)


class PointDocument(TypedDict):
    """What happened in one step of time. Run and wait are quantiles in seconds, None where nothing was measured."""

    time: datetime
    seconds: float
    outcomes: dict[str, int]
    run_p50: float | None
    run_p95: float | None
    wait_p50: float | None
    wait_p95: float | None


def point_document(point: Point) -> PointDocument:
    """Return one step of a series."""
    times = {f"{name}_p{share}": getattr(point, name)(share / 100) for name in ("run", "wait") for share in (50, 95)}
    return document(PointDocument, point, outcomes=dict(point.outcomes), **times)


def _count(value: ApproxCount) -> CountDocument:
    return {"count": value.number, "exact": value.exact}


def _seconds(value: timedelta | None) -> float | None:
    return None if value is None else value.total_seconds()
