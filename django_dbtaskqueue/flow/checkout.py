"""Checkout: due rows under a lease. The attempt is charged in the same statement that takes the row.

Two strategies, one signature. Order is (priority, ready_time, id) among the rows visible at checkout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from time import monotonic
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Door, Lease
from django_dbtaskqueue.db.session import Row, Session

START = ("-infinity", 0)  # the front of the line
WALK_PAUSE = 0.05  # seconds, at least, between two walks from the front while there is something behind the bounds
WALK_SHARE = 20  # what a walk costs more than a checkout that begins at the bounds may be a twentieth of the time,
WALK_MOST = 1.0  # seconds, at most, before the next may begin all the same: nothing waits longer behind a bound
TELLING = 50  # rows whose checkout tells what a row takes
SMOOTHING = 0.2
NOW = 0.0  # a walk that lets no checkout go first
CROWD = 48  # an optimistic checkout that lost a race picks among this many
PRIORITY, READY_TIME, ID = 7, 15, 0  # columns of a leased row (sql.statements.LEASED)
LINE_ORDER = itemgetter(PRIORITY, READY_TIME, ID)


Bounds = dict[int, tuple[str, int]]  # of each priority the last row taken: its place in line as text, its id


@dataclass(slots=True)
class Line:
    """What one process remembers of one queue's line: how far it took it, per priority.

    Dead rows pile up at the front while a snapshot pins them; starting behind them keeps checkout fast. Whatever
    comes to stand behind a bound (a late commit, a reprocess, an expired lease) is found by a walk from the front.
    """

    queue: str
    max_wait: timedelta | None = None  # a priority whose head has waited longer is served first
    bounds: Bounds = field(default_factory=dict)  # replaced, never changed: two threads share a line
    next_walk: float = NOW  # when the next walk is due,
    may_walk: float = NOW  # and when there may be one before, because nothing stands behind the bounds
    overdue: bool = False
    walking: bool = False  # one of the threads that share a line walks, not all
    row_seconds: float | None = None  # what one row of a checkout that begins at the bounds takes, smoothed
    lost_races: int = 0
    aged: list[int] = field(default_factory=list)  # priorities past max_wait, the longest wait first

    def params(self, bounds: Bounds) -> dict[str, Any]:
        """Return bounds as statement parameters, in the order the priorities are to be served."""
        aged = [priority for priority in self.aged if priority in bounds]
        order = aged + [priority for priority in sorted(bounds) if priority not in aged]
        return {
            "queue_name": self.queue,
            "priorities": order,
            "times": [bounds[priority][0] for priority in order],
            "ids": [bounds[priority][1] for priority in order],
        }

    def in_order(self, rows: list[Row]) -> list[Row]:
        """Return rows in line order: RETURNING has none."""
        if not self.aged:
            return sorted(rows, key=LINE_ORDER)
        last = len(self.aged)
        rank = {priority: place for place, priority in enumerate(self.aged)}
        return sorted(rows, key=lambda row: (rank.get(row[PRIORITY], last), *LINE_ORDER(row)))

    def advance(self, bounds: Bounds, rows: list[Row]) -> None:
        """Remember ``bounds``, and of each priority taken the last row; ``rows`` are in line order."""
        last = {row[PRIORITY]: (row[READY_TIME], row[ID]) for row in rows}
        self.bounds = {**bounds, **last}

    def learn(self, seconds: float, rows: int) -> None:
        """Remember what a checkout that began at the bounds took; of few rows most is the round trip."""
        if rows < TELLING:
            return
        latest = seconds / rows
        self.row_seconds = (
            latest if self.row_seconds is None else (self.row_seconds + SMOOTHING * (latest - self.row_seconds))
        )

    def rest(self, begun: float, rows: int) -> None:
        """Decide how long nobody walks after a walk that began at ``begun`` and took ``rows``."""
        now = monotonic()
        cost = now - begun - rows * (self.row_seconds or 0.0)
        self.may_walk = now + min(WALK_MOST, WALK_SHARE * max(0.0, cost))
        self.next_walk = max(self.may_walk, begun + WALK_PAUSE)


class Strategy(Protocol):
    """How due rows are taken: a queue's driver. Set ``strategy`` to the dotted path of a class to use your own.

    One object serves one queue in one process, from several threads. Whatever it does, it owes what the conformance
    suite (``tests/conformance``) asks of the drivers here: no row to two callers while a lease lives, the attempt
    charged with the lease, never more than the limit, nothing of a paused queue.
    """

    def take(self, session: Session, line: Line, params: dict[str, Any]) -> list[Row]:
        """Take at most ``params["limit"]`` due rows of ``line.queue`` in one atomic step.

        ``params`` also hold ``poller_instance``, ``lease`` (seconds) and ``tags``, as the statements of ``session.sql``
        name them. Return the columns ``sql.checkouts.LEASED``, in the order the tasks are to be processed.
        """


class SkipLocked:
    """Lock due rows, passing over locked ones, and lease them in the same statement."""

    def take(self, session: Session, line: Line, params: dict[str, Any]) -> list[Row]:
        """Take from behind the bounds, and walk from the front when there is nothing there or it is time to."""
        return take_or_walk(line, session, lambda bounds: self._bounded(session, line, params, bounds))

    def _bounded(self, session: Session, line: Line, params: dict[str, Any], bounds: Bounds) -> list[Row]:
        find_aged(session, line, params, bounds)
        return line.in_order(session.run(session.sql.checkout_skip_locked, {**params, **line.params(bounds)}))


class Optimistic:
    """Read candidates without locks, then update those that nobody changed meanwhile; losers take nothing."""

    def take(self, session: Session, line: Line, params: dict[str, Any]) -> list[Row]:
        """Take the head; after a lost race pick at random among the first few dozen, or all fight for one head."""
        return take_or_walk(line, session, lambda bounds: self._bounded(session, line, params, bounds))

    def _bounded(self, session: Session, line: Line, params: dict[str, Any], bounds: Bounds) -> list[Row]:
        limit = params["limit"]
        find_aged(session, line, params, bounds)
        wanted = {**params, **line.params(bounds), "limit": max(limit, CROWD) + limit if line.lost_races else limit}
        found = session.run(session.sql.candidates, wanted)
        if line.lost_races and len(found) > limit:
            found = random.sample(found, limit)
        if not found:
            return []
        fenced = json.dumps([{"i": task_id, "k": token} for task_id, token, *_ in sorted(found)])
        rows = session.run(session.sql.checkout_optimistic, {**params, "queue_name": line.queue, "rows": fenced})
        line.lost_races = len(found) - len(rows)
        if line.lost_races:
            line.next_walk = NOW  # what was picked past is behind the bound
        return line.in_order(rows)


class SingleWriter:
    """The optimistic strategy where the database lets one writer in at a time: nobody can change rows meanwhile."""

    def take(self, session: Session, line: Line, params: dict[str, Any]) -> list[Row]:
        """Take the head of the line."""
        find_aged(session, line, params, {})
        sql = session.sql.checkout_single_writer(aged=bool(line.aged))
        return line.in_order(session.run(sql, {**params, "queue_name": line.queue, "aged": json.dumps(line.aged)}))


def find_aged(session: Session, line: Line, params: dict[str, Any], bounds: Bounds) -> None:
    """See which priorities have waited past ``max_wait``. Strict priorities, the default, ask nothing."""
    if line.max_wait is None:
        return
    longest = line.max_wait.total_seconds()
    ages = session.run(session.sql.ages, {**params, **line.params(bounds)})
    late = sorted([(-age, priority) for priority, age in ages if age > longest])
    line.aged = [priority for _, priority in late]


def take_or_walk(line: Line, session: Session, take_from: Callable[[Bounds], list[Row]]) -> list[Row]:
    """Take behind the bounds; from the front when there is nothing, or when the pause between walks is over.

    A walk that is due lets one checkout go first: what was just enqueued on a quiet queue need not wait for it.
    """
    begun = monotonic()
    due = begun >= line.next_walk
    at_once = due and (line.overdue or line.next_walk == NOW)
    bounds = line.bounds
    rows = take_from(bounds) if bounds and not at_once else []
    line.overdue = due and bool(rows)
    if rows:
        line.learn(monotonic() - begun, len(rows))
    elif not line.walking and (begun := monotonic()) >= min(line.may_walk, line.next_walk):
        line.walking = True
        try:
            bounds, rows = _walked(line, session, take_from, bounds)
        finally:
            line.walking = False
        line.rest(begun, len(rows))
    line.advance(bounds, rows)
    return rows


def _walked(
    line: Line, session: Session, take_from: Callable[[Bounds], list[Row]], bounds: Bounds
) -> tuple[Bounds, list[Row]]:
    """Take from the front of every priority there is; return where that began, and what was there."""
    known = session.run(session.sql.priorities, {"queue_name": line.queue})
    if not known:
        return bounds, []
    front = {priority: START for (priority,) in known}
    return front, take_from(front)


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
    line: Line,
    *,
    strategy: Strategy,
    poller_instance: str,
    limit: int,
    lease: timedelta,
    door: Door,
    tags: Sequence[str] = (),
    without: Sequence[str] = (),
) -> list[Lease]:
    """Take at most ``limit`` due tasks of one line, leaving out payload types ``without`` ('' is "none").

    Their payloads are still text.
    """
    since = monotonic()  # before the statement is sent, so that a deadline is never later than the database's
    seconds = lease.total_seconds()
    params = {
        "poller_instance": poller_instance,
        "limit": limit,
        "lease": seconds,
        "tags": session.sql.dialect.array(tags),
    }
    if without:
        session, params["without"] = session.narrowed(), session.sql.dialect.array(without)
    taken = leases(strategy.take(session, line, params), door, since + seconds)
    for task in taken:
        if task.lease_seconds is not None:
            task.deadline = since + task.lease_seconds
    return taken


def leases(rows: Iterable[Row], door: Door, deadline: float) -> list[Lease]:
    """Return leased rows as leases that run out at ``deadline``."""
    return [Lease(*row, door, deadline) for row in rows]  # type: ignore[call-arg]  # a row is as long as LEASED
