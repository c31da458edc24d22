"""Searches by date as ranges of ids. Ids and creation times rise together, so the primary key finds a date.

A time column has no index, because every enqueue and every settle would pay for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from django.db.models import Max, Min

from django_dbtaskqueue.db.minute_counts import database_now
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.search import Search
from django_dbtaskqueue.operations.search.query import TIMES, bounds_of, moment_of
from django_dbtaskqueue.operations.search.values import Match, span_of

# A task's creation time is the begin of its transaction, and other transactions take ids meanwhile. A task of a
# transaction that was open for longer than this may be outside the range.
MAX_TRANSACTION_TIME = timedelta(hours=1)
MIN_IDS = 20_000  # a table with fewer ids is searched without a range
PROBES_PER_STATEMENT = 64
MAX_ID_ERROR = 1000  # ids, that a range may begin too early or end too late
PROBE = """\
SELECT p.id,
    coalesce((SELECT t.create_time > %(time)s FROM {table} AS t WHERE t.id >= p.id ORDER BY t.id LIMIT 1), true)
FROM unnest(%(ids)s::bigint[]) AS p(id) ORDER BY p.id
"""


@dataclass(frozen=True, slots=True)
class IdRange:
    """The ids that tasks of a time have: from ``first`` up to, not including, ``end``."""

    first: int
    end: int


def id_range(search: Search, tasks: TaskQuerySet) -> IdRange | None:
    """Return the ids that can match the dates of a search; None when it has no date, or the table is small.

    A task whose creation time was written by hand may be outside. PostgreSQL only: elsewhere None.
    """
    session = Session.on(tasks.db, tasks.model)
    low, high = _creation_times(search, session) if session.postgresql else (None, None)
    if low is None and high is None:
        return None
    with statement_timeout(tasks.db):
        ends = tasks.model._default_manager.using(tasks.db).aggregate(first=Min("pk"), last=Max("pk"))
        if ends["first"] is None or ends["last"] - ends["first"] < MIN_IDS:
            return None
        first, end = ends["first"], ends["last"] + 1
        return IdRange(
            first if low is None else _around(session, low - MAX_TRANSACTION_TIME, first, end)[0],
            end if high is None else _around(session, high + MAX_TRANSACTION_TIME, first, end)[1],
        )


def within(found: IdRange | None, tasks: TaskQuerySet) -> TaskQuerySet:
    """Return those of the tasks that have an id of the range."""
    return tasks if found is None else tasks.filter(pk__gte=found.first, pk__lt=found.end)


def _around(session: Session, time: datetime, first: int, end: int) -> tuple[int, int]:
    """Return two ids: the task at the one was created by ``time``, the task at the other later."""
    sql = PROBE.format(table=session.sql.tables.task)
    while end - first > MAX_ID_ERROR:
        step = max((end - first) // PROBES_PER_STATEMENT, 1)
        for one, later in session.run(sql, {"ids": list(range(first + step, end, step)), "time": time}):
            if later:
                end = one
                break
            first = one
    return first, end


def _creation_times(search: Search, session: Session) -> tuple[datetime | None, datetime | None]:
    """Return between which times the tasks of a search were created, as far as it says so."""
    lows, highs = [], []
    for term in search.terms:
        column = TIMES.get(term.name)
        if term.negated or column not in ("create_time", "start_time", "finish_time"):
            continue
        now = database_now(session)
        found = [dict(_bounds(match, session, now)) for match in term.matches]
        if column == "create_time":  # a task also starts or ends long after it was created
            lows += [min(one["low"] for one in found)] if all("low" in one for one in found) else []
        highs += [max(one["high"] for one in found)] if all("high" in one for one in found) else []
    return max(lows, default=None), min(highs, default=None)


def _bounds(match: Match, session: Session, now: datetime) -> Iterator[tuple[str, datetime]]:
    for op, value in bounds_of(match):
        span = span_of(value)
        if span is not None:
            yield "high" if op in (">", ">=") else "low", now - span
        else:
            moment = session.comparable_time(moment_of(op, value)[1])
            yield "low" if op in (">", ">=") else "high", cast(datetime, moment)
