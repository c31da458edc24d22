"""The scan of the ready order: where a checkout begins reading, for one queue or for several in one statement.

Dead rows pile up at the start of the ready order while a snapshot pins them. A checkout therefore reads only rows after
its watermarks: of each priority the last row that was taken. Rows behind a watermark (a late commit, a reprocess, an
expired lease) are found only by a full scan. A full scan runs when there is nothing after the watermarks; otherwise
full scans may use at most 5 % of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from typing import Any

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.db.session import Row, Session

START = ("-infinity", 0)  # the watermark of a priority that has all its rows after it
FULL_SCAN_TIME_SHARE = 1 / 20  # of the time, for what a full scan costs more than a checkout after the watermarks
FULL_SCAN_MIN_INTERVAL_S = 0.05  # between two full scans while there is something after the watermarks
FULL_SCAN_MAX_INTERVAL_S = 1.0  # a task behind a watermark waits at most this long for a full scan
MIN_ROWS_FOR_COST_SAMPLE = 50  # fewer rows give no useful timing: most of it is the round trip
COST_SMOOTHING = 0.2
SCAN_NOW = 0.0  # as ``next_full_scan``: the next checkout is a full scan
ID, QUEUE, PRIORITY, READY_TIME = 0, 1, 7, 15  # columns of a leased row (core.sql.checkout.LEASED)
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
    aged: list[int] = field(default_factory=list)  # priorities past max_wait, the longest wait first

    def rewind(self) -> None:
        """Begin the next checkout with a full scan: tasks behind the watermarks are ready again."""
        self.next_full_scan = SCAN_NOW

    def params(self, watermarks: Watermarks) -> dict[str, Any]:
        """Return watermarks as statement parameters, in the order the priorities are to be served."""
        aged = [priority for priority in self.aged if priority in watermarks]
        order = aged + [priority for priority in sorted(watermarks) if priority not in aged]
        return {
            "queue_name": self.queue,
            "priorities": array(order),
            "times": array([f'"{watermarks[priority][0]}"' for priority in order]),
            "ids": array([watermarks[priority][1] for priority in order]),
        }

    def in_order(self, rows: list[Row]) -> list[Row]:
        """Return rows in ready order: RETURNING has no order."""
        if not self.aged:
            return sorted(rows, key=READY_ORDER)
        last = len(self.aged)
        rank = {priority: place for place, priority in enumerate(self.aged)}
        return sorted(rows, key=lambda row: (rank.get(row[PRIORITY], last), *READY_ORDER(row)))

    def begins_with_full_scan(self, now: float) -> bool:
        """Whether the next checkout is a full scan.

        A full scan that is due lets one checkout after the watermarks go first: a task that was just enqueued into a
        quiet queue does not wait for it.
        """
        if not self.watermarks:
            return self.allows_full_scan(now)
        due = now >= self.next_full_scan and (self.full_scan_overdue or self.next_full_scan == SCAN_NOW)
        return due and not self.scanning

    def allows_full_scan(self, now: float) -> bool:
        """Whether a full scan may run now, given that there is nothing after the watermarks."""
        return not self.scanning and now >= min(self.may_full_scan, self.next_full_scan)

    def advance(self, watermarks: Watermarks, rows: list[Row]) -> None:
        """Remember ``watermarks``, and of each priority the last row taken; ``rows`` are in ready order."""
        last = {row[PRIORITY]: (row[READY_TIME], row[ID]) for row in rows}
        self.watermarks = {**watermarks, **last}

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
        if self.others:  # they share the full scans: together they make two where one poller makes one
            pause *= (1 + self.others) / 2 * random.uniform(0.5, 1.5)
        self.may_full_scan = now + pause
        self.next_full_scan = max(self.may_full_scan, begun + FULL_SCAN_MIN_INTERVAL_S)


def array(values: Iterable[int | str]) -> str:
    """Return an array as PostgreSQL writes it.

    For a list, psycopg takes many times as long, and prepares the statement anew when the numbers need a larger type.
    """
    return f"{{{','.join(map(str, values))}}}"


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
        _share_out(scans, rows, begun, reached=len(scans) if len(rows) < limit else _reached(scans, rows))
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


def _reached(scans: Sequence[Scan], rows: list[Row]) -> int:
    """Return how many scans were read: up to the last that gave something."""
    queues = {row[QUEUE] for row in rows}
    return max([number for number, scan in enumerate(scans, 1) if scan.cursor.queue in queues], default=0)


def _share_out(scans: Sequence[Scan], rows: list[Row], begun: float, *, reached: int) -> None:
    """Give each scan its rows, and note on its cursor how far it came and what it cost."""
    by_queue: dict[str, list[Row]] = {}
    for row in rows:
        by_queue.setdefault(row[QUEUE], []).append(row)
    seconds_per_row = (clock.monotonic() - begun) / max(1, len(rows))
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
