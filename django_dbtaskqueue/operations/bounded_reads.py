"""Reads with bounded cost: a statement timeout, planner settings, and counts that stop at a bound.

A page, a command or an API answer never keeps the database busy for long, however large a table is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.utils.formats import number_format

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import clock, format_duration
from django_dbtaskqueue.core.exceptions import SearchTooSlow
from django_dbtaskqueue.db.liveness import sqlstate
from django_dbtaskqueue.db.session import Session

Rows = QuerySet[Any]  # of any model
MAX_COUNTED_ROWS = 10_000
SET_TIMEOUT = """\
WITH before AS MATERIALIZED (SELECT current_setting('statement_timeout') AS t)
SELECT t, set_config('statement_timeout', %s, true) FROM before
"""
QUERY_CANCELED = "57014"  # SQLSTATE of a statement that ran out of time
SQLITE_STEPS_PER_CHECK = 20_000  # of SQLite's virtual machine between two checks of the time
# Statistics lag behind a queue: with them the planner would sometimes read all of a queue to count its first rows.
# A parallel plan would give the estimate of one worker's share only.
INDEX_SETTINGS = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "max_parallel_workers_per_gather": "0",
}


# -- statement timeout and planner settings ----------------------------------------------------------------------------


@contextmanager
def statement_timeout(alias: str, within: timedelta | None = None) -> Iterator[None]:
    """Cancel any statement in this block that runs longer than ``within`` (``DBTASKQUEUE["OPERATIONS_TIMEOUT"]``).

    Raises ``SearchTooSlow``, which says how to narrow the search. On PostgreSQL the block is a transaction with its own
    ``statement_timeout``, so it also reads one state of the data. On SQLite the limit holds for the whole block. On
    another database nothing is limited.
    """
    limit = conf.settings().operations_timeout if within is None else within
    try:
        with time_limit(alias, limit), _sqlite_time_limit(alias, limit):
            yield
    except OperationalError as error:
        if timed_out(error) or str(error) == "interrupted":
            raise SearchTooSlow(format_duration(limit)) from error
        raise


@contextmanager
def time_limit(alias: str, within: timedelta) -> Iterator[None]:
    """Cancel any statement in this block that runs longer, with an OperationalError that ``timed_out`` recognises.

    On PostgreSQL the block is a transaction (a savepoint inside the caller's); elsewhere nothing is limited.
    """
    if connections[alias].vendor != "postgresql":
        yield
        return
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(SET_TIMEOUT, [f"{int(within.total_seconds() * 1000)}ms"])
        before = cursor.fetchone()[0]
        yield
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", [before])  # the setting outlives a savepoint


def timed_out(error: OperationalError) -> bool:
    """Whether a statement was cancelled because it took too long."""
    return sqlstate(error) == QUERY_CANCELED


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


@contextmanager
def prefer_indexes(session: Session) -> Iterator[None]:
    """A transaction, or part of the caller's, whose statements use an index wherever there is one."""
    if not session.postgresql:
        yield
        return
    with session.atomic():
        asked = ", ".join(f"current_setting('{name}')" for name in INDEX_SETTINGS)
        before = dict(zip(INDEX_SETTINGS, session.run(f"SELECT {asked}", {})[0], strict=True))
        change = "SELECT " + ", ".join(f"set_config('{name}', %({name})s, true)" for name in INDEX_SETTINGS)
        session.run(change, INDEX_SETTINGS)
        yield
        session.run(change, before)  # the settings outlive a savepoint


# -- counts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApproxCount:
    """A number of rows: counted exactly, counted up to a bound ("10,000+"), or estimated by the planner ("≈ 9,876")."""

    number: int
    more: bool = False  # there is at least one more than ``number``
    estimated: bool = False

    @property
    def exact(self) -> bool:
        """Whether all rows were counted."""
        return not self.more and not self.estimated

    def __str__(self) -> str:
        shown = number_format(self.number, force_grouping=True)
        return f"≈\u202f{shown}" if self.estimated else shown + "+" * self.more

    def __bool__(self) -> bool:
        return self.number > 0

    def __add__(self, other: ApproxCount) -> ApproxCount:
        return ApproxCount(self.number + other.number, self.more or other.more, self.estimated or other.estimated)


def bounded_count(rows: Rows, bound: int = MAX_COUNTED_ROWS) -> ApproxCount:
    """Return the number of rows, reading no more than ``bound`` + 1 that match."""
    return approx(rows.order_by().values("pk")[: bound + 1].count(), bound)


def count_within(rows: Rows, limit: timedelta) -> ApproxCount | None:
    """Return the bounded number of rows; on PostgreSQL None when the count takes longer than ``limit``."""
    try:
        with time_limit(rows.db, limit):
            return bounded_count(rows)
    except OperationalError as error:
        if timed_out(error):
            return None
        raise


def count_in_time(rows: Rows) -> ApproxCount | None:
    """Return the bounded number of rows; None when the count takes longer than ``OPERATIONS_TIMEOUT``."""
    try:
        with statement_timeout(rows.db):
            return bounded_count(rows)
    except SearchTooSlow:
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
