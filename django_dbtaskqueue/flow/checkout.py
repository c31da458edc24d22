"""Checkout: due rows under a lease. The attempt is charged in the same statement that takes the row.

Tasks are taken in the ready order: (priority, ready_time, id) among the rows visible at checkout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from operator import itemgetter
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.utils.module_loading import import_string

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import POSITION, Lease, Port
from django_dbtaskqueue.core.sql.checkout import UNREADABLE
from django_dbtaskqueue.core.sql.dialects import NO_VALUES, POSTGRESQL
from django_dbtaskqueue.db.liveness import is_about_data
from django_dbtaskqueue.db.session import Params, Row, Session
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.groups import Limiter, fenced

# -- the scan of the ready order: where a checkout begins reading, for one queue or for several in one statement -------

# Dead rows pile up at the start of the ready order while a snapshot pins them. A checkout therefore reads only rows
# after its watermarks: of each priority the last row that was taken. Rows behind a watermark (a late commit, a
# reprocess, an expired lease) are found only by a full scan. A full scan runs when there is nothing after the
# watermarks; otherwise full scans may use at most 5 % of the time.

START = ("-infinity", 0)  # the watermark of a priority that has all its rows after it
FULL_SCAN_TIME_SHARE = 1 / 20  # of the time, for what a full scan costs more than a checkout after the watermarks
FULL_SCAN_MIN_INTERVAL_S = 0.05  # between two full scans while there is something after the watermarks
FULL_SCAN_MAX_INTERVAL_S = 1.0  # a task behind a watermark waits at most this long for a full scan
MIN_ROWS_FOR_COST_SAMPLE = 50  # fewer rows give no useful timing: most of it is the round trip
MIN_SHARED_ROWS = 50  # a smaller checkout walks past few rows that others hold
COST_SMOOTHING = 0.2
SCAN_NOW = 0.0  # as ``next_full_scan``: the next checkout is a full scan
ID, QUEUE, PRIORITY, READY_TIME = (POSITION[name] for name in ("id", "queue", "priority", "ready_text"))
READY_ORDER = itemgetter(PRIORITY, READY_TIME, ID)

Watermarks = dict[int, tuple[str, int]]  # of each priority the last row taken: its ready time as text, its id


@dataclass(slots=True)
class ScanCursor:
    """What one process remembers of one queue's ready order. The threads of a process may share it."""

    queue: str
    max_wait: timedelta | None = None  # a priority whose first task has waited longer is served first
    watermarks: Watermarks = field(default_factory=dict)  # replaced, never changed in place: threads share the cursor
    next_full_scan: float = SCAN_NOW  # when the next full scan is due (``clock.monotonic``)
    may_full_scan: float = SCAN_NOW  # when a full scan may run before that, because nothing is after the watermarks
    full_scan_overdue: bool = False
    scanning: bool = False  # one of the threads that share the cursor scans, not all
    row_seconds: float | None = None  # seconds per row of checkouts after the watermarks, smoothed
    lost_races: int = 0
    others: int = 0  # live pollers that serve this queue, too
    shares: bool = True  # whether large checkouts begin where the latest of those ended
    aged: list[int] = field(default_factory=list)  # priorities past max_wait, the longest wait first

    def rewind(self) -> None:
        """Begin the next checkout with a full scan: tasks behind the watermarks are ready again."""
        self.next_full_scan = SCAN_NOW

    @property
    def scan_share(self) -> float:
        """How many times as long as alone a poller waits between two scans: together they make two, not one each."""
        return (1 + max(1, self.others)) / 2

    def params(self, watermarks: Watermarks) -> dict[str, Any]:
        """Return watermarks as statement parameters, in the order the priorities are to be served."""
        aged = [priority for priority in self.aged if priority in watermarks]
        order = aged + [priority for priority in sorted(watermarks) if priority not in aged]
        return {
            "queue_name": self.queue,
            "priorities": POSTGRESQL.array(order),
            "times": POSTGRESQL.array([watermarks[priority][0] for priority in order]),
            "ids": POSTGRESQL.array([watermarks[priority][1] for priority in order]),
        }

    def in_order(self, rows: list[Row]) -> list[Row]:
        if not self.aged:
            return sorted(rows, key=READY_ORDER)
        last = len(self.aged)
        rank = {priority: place for place, priority in enumerate(self.aged)}
        return sorted(rows, key=lambda row: (rank.get(row[PRIORITY], last), *READY_ORDER(row)))

    def begins_with_full_scan(self, now: float) -> bool:
        """Whether the next checkout is a full scan.

        One that is due lets one checkout after the watermarks go first, so that a new task of a quiet queue is taken.
        """
        if not self.watermarks:
            return self.allows_full_scan(now)
        due = now >= self.next_full_scan and (self.full_scan_overdue or self.next_full_scan == SCAN_NOW)
        return due and not self.scanning

    def allows_full_scan(self, now: float) -> bool:
        """Whether a full scan may run now, given that there is nothing after the watermarks."""
        return not self.scanning and now >= min(self.may_full_scan, self.next_full_scan)

    def is_shared(self, params: Params) -> bool:
        """Whether a checkout after the watermarks uses those of the other pollers: a large one of any task in order."""
        some = self.aged or params["tags"] != NO_VALUES["postgresql"] or "without" in params
        large = params["limit"] >= MIN_SHARED_ROWS
        return bool(self.others and self.shares and large and not some and not self.scanning)

    def advance(self, watermarks: Watermarks, rows: list[Row]) -> None:
        """Remember ``watermarks``, and of each priority the last row taken; ``rows`` are in ready order."""
        self.watermarks = {**watermarks, **{row[PRIORITY]: (row[READY_TIME], row[ID]) for row in rows}}

    def sample_cost(self, seconds: float, rows: int) -> None:
        """Remember what a checkout after the watermarks took."""
        if rows >= MIN_ROWS_FOR_COST_SAMPLE:
            latest = seconds / rows
            mean = latest if self.row_seconds is None else self.row_seconds
            self.row_seconds = mean + COST_SMOOTHING * (latest - mean)

    def schedule_full_scan(self, begun: float, rows: int) -> None:
        """Decide when the next full scan is due, after one that began at ``begun`` and took ``rows``."""
        now = clock.monotonic()
        cost = now - begun - rows * (self.row_seconds or 0.0)
        pause = min(FULL_SCAN_MAX_INTERVAL_S, max(0.0, cost) / FULL_SCAN_TIME_SHARE)
        if self.others:
            pause *= self.scan_share * random.uniform(0.5, 1.5)
        self.may_full_scan = now + pause
        self.next_full_scan = max(self.may_full_scan, begun + FULL_SCAN_MIN_INTERVAL_S)


@dataclass(slots=True, eq=False)
class Scan:
    """One queue in a checkout: where it begins, and what came of it."""

    cursor: ScanCursor
    limit: int  # the most rows to take of it
    full: bool = False
    watermarks: Watermarks = field(default_factory=dict)  # where it begins; empty: nothing is in the ready order
    reached: bool = False  # False: the queues before it gave all that was asked for, and this one was not read
    rows: list[Row] = field(default_factory=list)


Take = Callable[[list[Scan]], list[Row]]  # lease rows after the scans' watermarks; return them in ready order


def take_rows(session: Session, scans: Sequence[Scan], limit: int, take: Take) -> int:
    """Take at most ``limit`` rows of some queues, in their order; return how many. Each scan's ``rows`` are its own.

    One statement takes what is after the watermarks. A second one is a full scan of those queues that gave nothing.
    """
    now = clock.monotonic()
    got = _take(session, scans, [scan.cursor.begins_with_full_scan(now) for scan in scans], limit, take)
    if got >= limit:
        return got
    now = clock.monotonic()
    empty = [scan for scan in scans if not scan.full and not scan.rows and scan.cursor.allows_full_scan(now)]
    return got + _take(session, empty, [True] * len(empty), limit - got, take) if empty else got


def _take(session: Session, scans: Sequence[Scan], full: list[bool], limit: int, take: Take) -> int:
    begun = clock.monotonic()
    for scan, whole in zip(scans, full, strict=True):
        scan.full, scan.watermarks = whole, {} if whole else scan.cursor.watermarks
    full_scans = [scan for scan in scans if scan.full]
    for scan in full_scans:
        scan.cursor.scanning = True
    try:
        _find_priorities(session, full_scans)
        asked = [scan for scan in scans if scan.watermarks]
        rows = take(asked) if asked else []
        _share_out(scans, rows, begun, limit)
    finally:
        for scan in full_scans:
            scan.cursor.scanning = False
    return len(rows)


def _find_priorities(session: Session, scans: list[Scan]) -> None:
    """Let scans begin at the first row of every priority there is."""
    if len(scans) == 1:
        found = session.repeat(session.sql.priorities, {"queue_name": scans[0].cursor.queue})
        scans[0].watermarks = {priority: START for (priority,) in found}
    elif scans:
        by_queue = {scan.cursor.queue: scan.watermarks for scan in scans}
        for queue, priority in session.run(session.sql.priorities_of_many, {"queues": list(by_queue)}):
            by_queue[queue][priority] = START


def _share_out(scans: Sequence[Scan], rows: list[Row], begun: float, limit: int) -> None:
    """Give each scan its rows, and note on its cursor how far it came and what it cost."""
    by_queue: dict[str, list[Row]] = {}
    for row in rows:
        by_queue.setdefault(row[QUEUE], []).append(row)
    seconds_per_row, reached = (clock.monotonic() - begun) / max(1, len(rows)), len(scans)
    if len(rows) >= limit:  # the scans were read up to the last that gave something
        reached = max((number for number, scan in enumerate(scans, 1) if scan.cursor.queue in by_queue), default=0)
    for number, scan in enumerate(scans):
        scan.reached = number < reached
        if not scan.reached:
            continue
        cursor, scan.rows = scan.cursor, by_queue.get(scan.cursor.queue, [])
        if scan.full:
            cursor.full_scan_overdue = False
            cursor.schedule_full_scan(begun, len(rows))
        else:
            cursor.full_scan_overdue = begun >= cursor.next_full_scan and bool(scan.rows)
            cursor.sample_cost(seconds_per_row * len(scan.rows), len(scan.rows))
        cursor.advance(scan.watermarks or cursor.watermarks, scan.rows)


# -- checkout ----------------------------------------------------------------------------------------------------------

CANDIDATE_POOL_SIZE = 48  # tasks from which an optimistic checkout that lost a race picks at random


class Strategy(Protocol):
    """How due rows are taken: a queue's driver. Set ``strategy`` to the dotted path of a class to use your own.

    One object serves one queue in one process, from several threads. Whatever it does, it owes what the conformance
    suite (``tests/conformance``) asks of the drivers here: no row to two callers while a lease lives, the attempt
    charged with the lease, never more than the limit, nothing of a paused queue.
    """

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        """Take at most ``params["limit"]`` due rows of ``cursor.queue`` in one atomic step.

        ``params`` also hold ``poller_instance``, ``lease`` (seconds) and ``tags``, as the statements of ``session.sql``
        name them. Return the columns ``core.lease.LEASED``, in the order the tasks are to be processed.
        """


class SkipLocked:
    """Take what is after the watermarks, or scan from the start: lock free rows, and lease them."""

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        def take_after(_: list[Scan]) -> list[Row]:
            if cursor.max_wait is not None:
                find_aged(session, cursor, cursor.max_wait, params, scan.watermarks)
            return cursor.in_order(self._take_after(session, cursor, {**params, **cursor.params(scan.watermarks)}))

        scan = Scan(cursor, params["limit"])
        take_rows(session, [scan], scan.limit, take_after)
        return scan.rows

    def _take_after(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        sql = session.sql
        return session.repeat(
            sql.checkout_beside_others if cursor.is_shared(params) else sql.checkout_skip_locked, params
        )


class Optimistic(SkipLocked):
    """Read candidates without locks, then update those that have not changed meanwhile.

    After a lost race it picks at random among more candidates, or all pollers would fight for the same rows.
    """

    def _take_after(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        limit = params["limit"]
        wanted = max(limit, CANDIDATE_POOL_SIZE) + limit if cursor.lost_races else limit
        found = session.run(session.sql.candidates, {**params, "limit": wanted})
        if cursor.lost_races and len(found) > limit:
            found = random.sample(found, limit)
        if not found:
            return []
        chosen = fenced((task_id, token) for task_id, token, *_ in found)
        rows = session.run(session.sql.checkout_optimistic, {**params, "rows": chosen})
        cursor.lost_races = len(found) - len(rows)
        if cursor.lost_races:
            cursor.rewind()  # the candidates that were not picked are behind the watermarks
        return rows


class SingleWriter:
    """The optimistic strategy where the database lets one writer in at a time: no row can change meanwhile."""

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        if cursor.max_wait is not None:
            find_aged(session, cursor, cursor.max_wait, params, {})
        sql = session.sql.checkout_single_writer(aged=bool(cursor.aged))
        rows = session.run(sql, {**params, "queue_name": cursor.queue, "aged": json.dumps(cursor.aged)})
        return cursor.in_order(rows) if len(rows) > 1 else rows


class FromGroup:
    """Takes from one group of a queue only, by the index of the groups' heads."""

    def __init__(self, group: str) -> None:
        self.group = group

    def take(self, session: Session, cursor: ScanCursor, params: Params) -> list[Row]:
        params = {**params, "queue_name": cursor.queue}
        return _take_or_park(session, first_ready(session, params, self.group), params, None)


def first_ready(session: Session, params: Params, group: str | None = None) -> list[Row]:
    """Return (id, total_attempt) of the first tasks that can be taken, of a queue or of one of its groups."""
    if group is None:
        return session.run(session.sql.first_ready, params)
    return session.run(session.sql.first_ready_of_group, {**params, "group": group})


def find_aged(
    session: Session, cursor: ScanCursor, max_wait: timedelta, params: dict[str, Any], watermarks: Watermarks
) -> None:
    """Find the priorities whose first task has waited longer than the cursor's ``max_wait``."""
    marks = cursor.params(watermarks) if session.postgresql else {"queue_name": cursor.queue}  # SQLite has no arrays
    ages = session.run(session.sql.ages, {**params, **marks})
    cursor.aged = [one for _, one in sorted((-age, one) for one, age in ages if age > max_wait.total_seconds())]


def strategy_for(session: Session, name: str = "auto") -> Strategy:
    """Return the strategy ``name`` on this database; ``auto`` is the best it can do, a dotted path the site's own."""
    if "." in name:
        return _driver(name)
    if not session.postgresql:
        if name == "skip_locked":
            raise TaskQueueError(
                f'strategy="skip_locked" needs SELECT … FOR UPDATE SKIP LOCKED, which {session.connection.vendor} '
                'lacks. Use strategy="auto" or "optimistic".'
            )
        return SingleWriter()
    return Optimistic() if name == "optimistic" else SkipLocked()


def _driver(path: str) -> Strategy:
    """Return an object of the class at a dotted path; raise ``ImproperlyConfigured`` naming what it lacks."""
    try:
        driver = import_string(path)()
    except (ImportError, TypeError) as error:
        raise ImproperlyConfigured(f"strategy={path!r} cannot be made: {error}") from None
    if missing := [name for name in vars(Strategy) if name[0] != "_" and not callable(getattr(driver, name, None))]:
        raise ImproperlyConfigured(f"strategy={path!r} lacks {', '.join(missing)}(); see flow.checkout.Strategy.")
    return driver  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class QueueShare(Scan):
    """One queue in a checkout, and the leases that came of it. Their payloads are still text."""

    port: Port = field(kw_only=True)
    strategy: Strategy | None = None  # None: the best of its database. Of several queues all are skip-locked
    limiter: Limiter | None = None  # of its limits over all pollers
    without: Sequence[str] = ()  # the payload types to leave out; '' is "none"
    taken: list[Lease] = field(default_factory=list)


@dataclass(slots=True)
class Checkout:
    """Takes due tasks for one holder: of one queue, or of several queues of one PostgreSQL table in one statement."""

    session: Session
    poller_instance: str
    lease: timedelta
    tags: Sequence[str] = ()
    min_lease: float = 0.0  # seconds; no lease is shorter, whatever the queue or the task say

    def take(self, shares: Sequence[QueueShare], limit: int) -> list[Lease]:
        """Take at most ``limit`` due tasks, and of each queue at most what its share says, in the order of the shares.

        Of several queues: what ``SkipLocked`` would take of one after the other; they have no ``max_wait``, and nothing
        else that a share may say. A paused queue gives nothing.
        """
        dialect = self.session.sql.dialect
        tags = dialect.array(self.tags) if self.tags else NO_VALUES[dialect.vendor]
        seconds = self.lease.total_seconds()
        params = {"poller_instance": self.poller_instance, "lease": seconds, "min_lease": self.min_lease, "tags": tags}
        since = clock.monotonic()  # before the statement is sent, so that a deadline is never later than the database's
        if len(shares) == 1:
            (share,) = shares
            share.rows = self._take_of_one(share, {**params, "limit": min(limit, share.limit)})
            share.reached = True
        else:
            take_rows_of_many(self.session, shares, params, limit)
        for share in shares:
            share.taken = _granted(self.session, share.rows, share.port, since, params) if share.rows else []
        return [lease for share in shares for lease in share.taken]

    def _take_of_one(self, share: QueueShare, params: dict[str, Any]) -> list[Row]:
        session, cursor, limiter = self.session, share.cursor, share.limiter
        strategy = share.strategy or strategy_for(session)
        if share.without:
            session, params["without"] = session.narrowed(), session.sql.dialect.array(share.without)
        try:
            if limiter is None:
                return strategy.take(session, cursor, params)
            return limiter.take(
                session, params, lambda allowed: strategy.take(session, cursor, {**allowed}), cursor.rewind
            )
        except DatabaseError as error:
            if session.connection.in_atomic_block or not is_about_data(error):
                raise
            params["queue_name"] = cursor.queue
            return _take_or_park(session, first_ready(session, params), params, limiter)


def _take_or_park(session: Session, found: Sequence[Row], params: Params, limiter: Limiter | None) -> list[Row]:
    """Take tasks of which some cannot be taken: a part that fails is halved; park each one that fails alone."""

    def take_found(allowed: Params) -> list[Row]:
        return session.run(session.sql.checkout_optimistic, {**params, "rows": fenced(found[: allowed["limit"]])})

    wanted = {**params, "limit": len(found)}
    try:
        if not found:
            return []
        return take_found(wanted) if limiter is None else limiter.take(session, wanted, take_found)
    except DatabaseError as error:
        if not is_about_data(error):
            raise
        if len(found) > 1:
            middle = len(found) // 2
            first = _take_or_park(session, found[:middle], params, limiter)
            return first + _take_or_park(session, found[middle:], params, limiter)
        [(task_id, token)] = found
        reason = f"{UNREADABLE}: {error}".partition("\n")[0][:200]
        logger.error("Task %s of %s parked: %s", task_id, params["queue_name"], reason)
        session.run(session.sql.park_unleased, {"task_id": task_id, "token": token, "reason": reason})
        return []


def take_rows_of_many(session: Session, scans: Sequence[Scan], params: dict[str, Any], limit: int) -> int:
    """Take rows of several queues: ``params`` hold ``poller_instance``, ``lease`` (seconds) and ``tags``."""

    def take_after(asked: list[Scan]) -> list[Row]:
        rows = session.run(session.sql.checkout_of_many, {**params, **_watermarks_of_many(asked), "limit": left[0]})
        left[0] -= len(rows)
        return sorted(rows, key=READY_ORDER)

    left = [limit]
    return take_rows(session, scans, limit, take_after)


def _watermarks_of_many(scans: list[Scan]) -> dict[str, Any]:
    """Return watermarks as statement parameters: the queues in order, of each its priorities in order."""
    marks = [(priority, *scan.watermarks[priority]) for scan in scans for priority in sorted(scan.watermarks)]
    lasts = list(accumulate(len(scan.watermarks) for scan in scans))
    return {
        "queues": [scan.cursor.queue for scan in scans],
        "limits": POSTGRESQL.array([scan.limit for scan in scans]),
        "firsts": POSTGRESQL.array([last - len(scan.watermarks) + 1 for scan, last in zip(scans, lasts, strict=True)]),
        "lasts": POSTGRESQL.array(lasts),
        "priorities": POSTGRESQL.array([priority for priority, _, _ in marks]),
        "times": POSTGRESQL.array([time for _, time, _ in marks]),
        "ids": POSTGRESQL.array([number for _, _, number in marks]),
    }


def next_due(session: Session, queues: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """Return by queue the seconds until its first scheduled task is due. ``queues``: their priorities, by name."""
    pairs = [(queue, priority) for queue, priorities in queues.items() for priority in priorities]
    if not session.postgresql:  # it needs no priorities
        return dict(session.run(session.sql.next_due, {"queues": json.dumps([*queues])}))
    params = {"queues": [queue for queue, _ in pairs], "priorities": [priority for _, priority in pairs]}
    return dict(session.run(session.sql.next_due, params)) if pairs else {}


def _granted(session: Session, rows: Iterable[Row], port: Port, since: float, params: Params) -> list[Lease]:
    """Return leased rows as leases granted at ``since``, for the time that the statement's ``params`` gave them."""
    least = params["min_lease"]
    until = since + max(params["lease"], least)
    granted = [Lease(*row, port, until) for row in rows]  # type: ignore[call-arg]  # as in ``leases``
    for task in granted:
        if task.lease_seconds is not None:
            task.lease_seconds = max(task.lease_seconds, least)
            task.deadline = since + task.lease_seconds
    queue = granted[0].queue
    expired = [task.id for task in granted if task.lost_leases > 0]
    calls = {(queue, "lease_expired"): expired, (queue, "take"): [task.id for task in granted]}
    usage.count_calls(session.connection, calls)
    return granted


def leases(rows: Iterable[Row], port: Port, deadline: float) -> list[Lease]:
    """Return leased rows as leases that run out at ``deadline``."""
    return [Lease(*row, port, deadline) for row in rows]  # type: ignore[call-arg]  # a row is as long as LEASED
