"""Checkout: due rows under a lease. The attempt is charged in the same statement that takes the row.

Tasks are taken in the ready order: (priority, ready_time, id) among the rows visible at checkout. A strategy takes from
one queue; ``take_many`` takes from several queues in one statement. Where they begin to read, ``flow.scan`` says.
"""

from __future__ import annotations

import json
import logging
import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.utils.module_loading import import_string

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Lease, Port
from django_dbtaskqueue.core.sql.checkout import UNREADABLE
from django_dbtaskqueue.core.sql.dialects import NO_VALUES
from django_dbtaskqueue.db.liveness import is_about_data
from django_dbtaskqueue.db.session import Params, Row, Session
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.limiter import Limiter, fenced
from django_dbtaskqueue.flow.scan import READY_ORDER, Scan, ScanCursor, Watermarks, array, take_rows

logger = logging.getLogger("django_dbtaskqueue")
CANDIDATE_POOL_SIZE = 48  # tasks from which an optimistic checkout that lost a race picks at random


@dataclass(slots=True, eq=False)
class QueueShare(Scan):
    """One queue's scan in a checkout of several (``take_many``), and the leases that came of it."""

    port: Port = field(kw_only=True)
    taken: list[Lease] = field(default_factory=list)


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


class _FromWatermarks:
    """Takes what is after the watermarks, or scans from the start."""

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        """See ``Strategy``."""

        def take_after(_: list[Scan]) -> list[Row]:
            if cursor.max_wait is not None:
                find_aged(session, cursor, cursor.max_wait, params, scan.watermarks)
            return cursor.in_order(self._take_after(session, cursor, {**params, **cursor.params(scan.watermarks)}))

        scan = Scan(cursor, params["limit"])
        take_rows(session, [scan], scan.limit, take_after)
        return scan.rows

    @abstractmethod
    def _take_after(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        """Take rows after the watermarks, which ``params`` hold, in any order."""


class SkipLocked(_FromWatermarks):
    """Lock due rows, passing over locked ones, and lease them in the same statement."""

    def _take_after(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        return session.repeat(session.sql.checkout_skip_locked, params)


class Optimistic(_FromWatermarks):
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
        """Take the first tasks of the ready order."""
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
        """See ``Strategy``."""
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
    late = sorted([(-age, priority) for priority, age in ages if age > max_wait.total_seconds()])
    cursor.aged = [priority for _, priority in late]


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
    methods = [name for name in vars(Strategy) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(driver, name, None))]
    if missing:
        raise ImproperlyConfigured(f"strategy={path!r} lacks {', '.join(missing)}(); see flow.checkout.Strategy.")
    return driver  # type: ignore[no-any-return]


def take(
    session: Session,
    cursor: ScanCursor,
    *,
    strategy: Strategy,
    poller_instance: str,
    limit: int,
    lease: timedelta,
    port: Port,
    tags: Sequence[str] = (),
    without: Sequence[str] = (),
    min_lease: float = 0.0,
    limiter: Limiter | None = None,
) -> list[Lease]:
    """Take at most ``limit`` due tasks of one queue, but no payload types ``without`` ('' is "none"), not decoded.

    No lease is shorter than ``min_lease`` seconds, whatever the queue or the task say. ``limiter``: of a queue with
    limits over all pollers.
    """
    params = _params(session, poller_instance, lease, tags, min_lease)
    params["limit"] = limit
    if without:
        session, params["without"] = session.narrowed(), session.sql.dialect.array(without)
    since = clock.monotonic()  # before the statement is sent, so that a deadline is never later than the database's
    try:
        if limiter is None:
            rows = strategy.take(session, cursor, params)
        else:
            rows = limiter.take(
                session, params, lambda allowed: strategy.take(session, cursor, {**allowed}), cursor.rewind
            )
    except DatabaseError as error:
        if session.connection.in_atomic_block or not is_about_data(error):
            raise
        params["queue_name"] = cursor.queue
        rows = _take_or_park(session, first_ready(session, params), params, limiter)
    return _granted(session, rows, port, since, params) if rows else []


def _take_or_park(session: Session, found: Sequence[Row], params: Params, limiter: Limiter | None) -> list[Row]:
    """Take tasks of which some cannot be taken: a part that fails is halved; park each one that fails alone."""

    def take_found(allowed: Params) -> list[Row]:
        rows = fenced((task_id, token) for task_id, token in found[: allowed["limit"]])
        return session.run(session.sql.checkout_optimistic, {**params, "rows": rows})

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
            parts = (found[:middle], found[middle:])
            return [row for part in parts for row in _take_or_park(session, part, params, limiter)]
        [(task_id, token)] = found
        reason = f"{UNREADABLE}: {error}".partition("\n")[0][:200]
        logger.error("Task %s of %s parked: %s", task_id, params["queue_name"], reason)
        session.run(session.sql.park_unleased, {"task_id": task_id, "token": token, "reason": reason})
        return []


def take_many(
    session: Session,
    shares: Sequence[QueueShare],
    *,
    poller_instance: str,
    limit: int,
    lease: timedelta,
    tags: Sequence[str] = (),
    min_lease: float = 0.0,
) -> int:
    """Take due tasks of several queues of one PostgreSQL table, in the order of ``shares``; return how many.

    At most ``limit`` in all, and of each queue at most what its share says: what ``SkipLocked`` would take of one
    after the other. The queues have no ``max_wait``. A paused queue gives nothing. Payloads are still text.
    """
    params = _params(session, poller_instance, lease, tags, min_lease)
    since = clock.monotonic()  # before the statement is sent, so that a deadline is never later than the database's
    got = take_rows_of_many(session, shares, params, limit)
    for share in shares:
        share.taken = _granted(session, share.rows, share.port, since, params)
    return got


def take_rows_of_many(session: Session, scans: Sequence[Scan], params: dict[str, Any], limit: int) -> int:
    """``take_many`` by rows: ``params`` hold ``poller_instance``, ``lease`` (seconds) and ``tags``."""

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
        "limits": array([scan.limit for scan in scans]),
        "firsts": array([last - len(scan.watermarks) + 1 for scan, last in zip(scans, lasts, strict=True)]),
        "lasts": array(lasts),
        "priorities": array([priority for priority, _, _ in marks]),
        "times": array([f'"{time}"' for _, time, _ in marks]),
        "ids": array([number for _, _, number in marks]),
    }


def next_due_by_queue(session: Session, priorities: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Return by queue the seconds until its first scheduled task is due; ``priorities`` are (queue, priority) pairs."""
    pairs = list(priorities)
    if not pairs:
        return {}
    params = {"queues": [queue for queue, _ in pairs], "priorities": [number for _, number in pairs]}
    return dict(session.run(session.sql.next_due_of_many, params))


def _params(
    session: Session, poller_instance: str, lease: timedelta, tags: Sequence[str], min_lease: float
) -> dict[str, Any]:
    dialect = session.sql.dialect
    array = dialect.array(tags) if tags else NO_VALUES[dialect.vendor]
    seconds = lease.total_seconds()
    return {"poller_instance": poller_instance, "lease": seconds, "min_lease": min_lease, "tags": array}


def _granted(session: Session, rows: Iterable[Row], port: Port, since: float, params: Params) -> list[Lease]:
    """Return leased rows as leases granted at ``since``, for the time that the statement's ``params`` gave them."""
    least = params["min_lease"]
    until = since + max(params["lease"], least)
    granted = [Lease(*row, port, until) for row in rows]  # type: ignore[call-arg]  # as in ``leases``
    for task in granted:
        if task.lease_seconds is not None:
            task.lease_seconds = max(task.lease_seconds, least)
            task.deadline = since + task.lease_seconds
    if granted:
        queue = granted[0].queue
        expired = [task.id for task in granted if task.lost_leases > 0]
        calls = {(queue, "lease_expired"): expired, (queue, "take"): [task.id for task in granted]}
        usage.after_commit(session.connection, calls)
    return granted


def leases(rows: Iterable[Row], port: Port, deadline: float) -> list[Lease]:
    """Return leased rows as leases that run out at ``deadline``."""
    return [Lease(*row, port, deadline) for row in rows]  # type: ignore[call-arg]  # a row is as long as LEASED
