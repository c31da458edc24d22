"""Checkout of several queues in one statement, for whoever polls many of them.

What is taken of each line, and in which order, is what ``SkipLocked`` would take of one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

from django_dbtaskqueue.core.lease import Door, Lease
from django_dbtaskqueue.db.session import Row, Session
from django_dbtaskqueue.flow.checkout import LINE_ORDER, NOW, START, WALK_MOST, Bounds, Line, leases

QUEUE = 1  # column of a leased row (sql.checkouts.LEASED)


@dataclass(slots=True, eq=False)
class Part:
    """One line's part in a checkout of several, and what came of it."""

    line: Line
    door: Door
    limit: int  # the most tasks to take of it
    reached: bool = False  # False: those before it had all that was to be taken, and this line was not looked at
    rows: list[Row] = field(default_factory=list)
    taken: list[Lease] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Step:
    """One part in one statement."""

    part: Part
    walks: bool
    times: tuple[float, float]  # of the line's walks, as they were before
    bounds: Bounds = field(default_factory=dict)  # where it begins; nowhere when the line is empty


def take_of_many(
    session: Session,
    parts: Sequence[Part],
    *,
    poller_instance: str,
    limit: int,
    lease: timedelta,
    tags: Sequence[str] = (),
) -> int:
    """Take due tasks of several lines of one PostgreSQL table, in the order of ``parts``; return how many.

    At most ``limit`` in all, and of each line no more than its part says. The lines have no ``max_wait``. Nothing is
    taken of a paused queue. Their payloads are still text.
    """
    since = monotonic()  # before the statement is sent, so that a deadline is never later than the database's
    params = {
        "poller_instance": poller_instance,
        "lease": lease.total_seconds(),
        "tags": session.sql.dialect.array(tags),
    }
    got = rows_of_many(session, parts, params, limit)
    for part in parts:
        part.taken = leases(part.rows, part.door, since + params["lease"])
        for task in part.taken:
            if task.lease_seconds is not None:
                task.deadline = since + task.lease_seconds
    return got


def rows_of_many(session: Session, parts: Sequence[Part], params: dict[str, Any], limit: int) -> int:
    """``take_of_many`` by rows: ``params`` hold ``poller_instance``, ``lease`` (seconds) and ``tags``."""
    now = monotonic()
    steps = [_step(part, now, walks=_walks_at_once(part.line, now)) for part in parts]
    got = _take(session, steps, params, limit)
    if got == limit:
        return got
    now = monotonic()
    empty = [step.part for step in steps if not step.walks and not step.part.rows]
    again = [_step(part, now, walks=True) for part in empty if now >= _may_walk(part.line)]
    return got + _take(session, again, params, limit - got) if again else got


def next_due_of_many(session: Session, priorities: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Return, by queue, the seconds until the first task of its priorities scheduled for later is due, if there is one.

    ``priorities`` are pairs of queue and priority.
    """
    pairs = list(priorities)
    if not pairs:
        return {}
    queues, numbers = [queue for queue, _ in pairs], [number for _, number in pairs]
    return dict(session.run(session.sql.next_due_of_many, {"queues": queues, "priorities": numbers}))


def _may_walk(line: Line) -> float:
    return min(line.may_walk, line.next_walk)


def _walks_at_once(line: Line, now: float) -> bool:
    """Whether a line is begun at its front, as by ``checkout.take_or_walk``."""
    if not line.bounds:
        return now >= _may_walk(line)
    return now >= line.next_walk and (line.overdue or line.next_walk == NOW)


def _step(part: Part, now: float, *, walks: bool) -> _Step:
    line = part.line
    times = (line.may_walk, line.next_walk)
    if walks:
        line.may_walk = line.next_walk = now + WALK_MOST  # one of the threads that share a line walks, not all
    return _Step(part, walks, times, line.bounds)


def _take(session: Session, steps: list[_Step], params: dict[str, Any], limit: int) -> int:
    """Take from where each step begins; see to the lines' bounds and walks. Return how many tasks there were."""
    begun = monotonic()
    _find_fronts(session, [step for step in steps if step.walks])
    asked = [step for step in steps if step.bounds]
    rows = session.run(session.sql.checkout_of_many, {**params, **_params(asked), "limit": limit}) if asked else []
    by_queue: dict[str, list[Row]] = {}
    for row in sorted(rows, key=LINE_ORDER):  # RETURNING has no order
        by_queue.setdefault(row[QUEUE], []).append(row)
    reached = _reached(steps, by_queue, full=len(rows) >= limit)
    pace = (monotonic() - begun) / max(1, len(rows))
    for step in steps[:reached]:
        _end(step, by_queue.get(step.part.line.queue, []), begun, pace, len(rows))
    for step in steps[reached:]:
        step.part.reached = False
        step.part.line.may_walk, step.part.line.next_walk = step.times
    return len(rows)


def _find_fronts(session: Session, steps: list[_Step]) -> None:
    """Begin at the front of every priority there is."""
    if not steps:
        return
    fronts: dict[str, Bounds] = {step.part.line.queue: {} for step in steps}
    for queue, priority in session.run(session.sql.priorities_of_many, {"queues": list(fronts)}):
        fronts[queue][priority] = START
    for step in steps:
        step.bounds = fronts[step.part.line.queue]


def _params(steps: list[_Step]) -> dict[str, Any]:
    """Return bounds as statement parameters: the lines in order, of each its priorities in order."""
    bounds = [(priority, *step.bounds[priority]) for step in steps for priority in sorted(step.bounds)]
    lasts: list[int] = []
    for step in steps:
        lasts.append((lasts[-1] if lasts else 0) + len(step.bounds))
    return {
        "queues": [step.part.line.queue for step in steps],
        "limits": _array([step.part.limit for step in steps]),
        "firsts": _array([last - len(step.bounds) + 1 for step, last in zip(steps, lasts, strict=True)]),
        "lasts": _array(lasts),
        "priorities": _array([priority for priority, _, _ in bounds]),
        "times": _array([f'"{time}"' for _, time, _ in bounds]),
        "ids": _array([number for _, _, number in bounds]),
    }


def _array(values: Iterable[int | str]) -> str:
    """Return an array as PostgreSQL writes it: psycopg takes many times as long for a list."""
    return f"{{{','.join(map(str, values))}}}"


def _reached(steps: list[_Step], rows: dict[str, list[Row]], *, full: bool) -> int:
    """Return how many steps were looked at: all, or those up to the last that gave something."""
    if not full:
        return len(steps)
    return max([number for number, step in enumerate(steps, 1) if step.part.line.queue in rows], default=0)


def _end(step: _Step, rows: list[Row], begun: float, pace: float, total: int) -> None:
    line, part = step.part.line, step.part
    part.reached = True
    part.rows = rows
    if step.walks:
        line.overdue = False
        line.rest(begun, total)
    else:
        line.overdue = begun >= line.next_walk and bool(rows)
        line.learn(pace * len(rows), len(rows))
    line.advance(step.bounds or line.bounds, rows)
