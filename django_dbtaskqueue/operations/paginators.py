"""Counting and paging that stay cheap at any size: exact up to a bound, "10,000+" above it; pages by id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.utils.formats import number_format

BOUND = 10_000
CHUNK = 400  # counts in one statement: SQLite takes at most 500 terms
LIMIT = """\
WITH before AS MATERIALIZED (SELECT current_setting('statement_timeout') AS t)
SELECT t, set_config('statement_timeout', %s, true) FROM before
"""
QUERY_CANCELED = "57014"  # SQLSTATE of a statement that overran its time


@dataclass(frozen=True, slots=True)
class Count:
    """A number of rows; with ``more`` there are at least one more than ``number``."""

    number: int
    more: bool = False

    def __str__(self) -> str:
        return number_format(self.number, force_grouping=True) + ("+" if self.more else "")

    def __bool__(self) -> bool:
        return self.number > 0


def bounded_count(rows: QuerySet[Any], bound: int = BOUND) -> Count:
    """Return the number of rows, reading no more than ``bound`` + 1 that match."""
    return _count(_head(rows, bound).count(), bound)


def bounded_counts(
    selections: Sequence[QuerySet[Any]], *, within: timedelta, bound: int = BOUND
) -> list[Count] | list[None]:
    """Return the bounded counts of many selections of one database, in one statement per 400.

    On PostgreSQL a statement that runs longer than ``within`` is given up, and every count is None: not known.
    """
    if not selections:
        return []
    alias = selections[0].db
    found: list[Count] = []
    try:
        with time_limit(alias, within):
            for start in range(0, len(selections), CHUNK):
                found += [_count(number, bound) for number in _numbers(selections[start : start + CHUNK], alias, bound)]
    except OperationalError as error:
        if not overran(error):
            raise
        return [None] * len(selections)
    return found


def _head(rows: QuerySet[Any], bound: int) -> QuerySet[Any]:
    return rows.order_by().values("pk")[: bound + 1]


def _count(number: int, bound: int) -> Count:
    return Count(min(number, bound), more=number > bound)


def _numbers(selections: Sequence[QuerySet[Any]], alias: str, bound: int) -> list[int]:
    terms, params = [], []
    for place, rows in enumerate(selections):
        inner, values = _head(rows, bound).query.get_compiler(using=alias).as_sql()
        terms.append(f"SELECT {place} AS place, COUNT(*) AS number FROM ({inner}) AS c{place}")  # noqa: S608 -- the ORM's own SQL, values apart
        params += values
    with connections[alias].cursor() as cursor:
        cursor.execute(" UNION ALL ".join(terms), params)
        return [number for _, number in sorted(cursor.fetchall())]


def overran(error: OperationalError) -> bool:
    """Whether a statement was given up because it took too long."""
    return getattr(error.__cause__, "sqlstate", None) == QUERY_CANCELED


@contextmanager
def time_limit(alias: str, within: timedelta) -> Iterator[None]:
    """Give up any one statement in this block that runs longer, with an OperationalError that ``overran`` knows.

    On PostgreSQL the block is a transaction (a savepoint inside the caller's); elsewhere nothing is limited.
    """
    if connections[alias].vendor != "postgresql":
        yield
        return
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(LIMIT, [f"{int(within.total_seconds() * 1000)}ms"])
        before = cursor.fetchone()[0]
        yield
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", [before])  # the setting outlives a savepoint


@dataclass(frozen=True, slots=True)
class Slice:
    """One page of rows in the order of their ids, and where its neighbours begin; None: there is none."""

    rows: list[Any]
    newer: int | None
    older: int | None


def slice_of(rows: QuerySet[Any], size: int, *, before: int | None = None, after: int | None = None) -> Slice:
    """Return ``size`` rows, the newest first: those before an id, those after one, or the newest.

    Reads no row of another page, however far back the page lies.
    """
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: size + 1])[::-1]
        shown = found[-size:]
        return Slice(shown, _first(shown, newer=len(found) > size), shown[-1].pk if shown else None)
    chosen = rows if before is None else rows.filter(pk__lt=before)
    found = list(chosen.order_by("-pk")[: size + 1])
    shown = found[:size]
    return Slice(shown, _first(shown, newer=before is not None), shown[-1].pk if len(found) > size else None)


def _first(shown: list[Any], *, newer: bool) -> int | None:
    return shown[0].pk if shown and newer else None


def estimate(rows: QuerySet[Any]) -> int | None:
    """Return about how many rows there are, as PostgreSQL's planner thinks; None on another database."""
    if connections[rows.db].vendor != "postgresql":
        return None
    (plan,) = json.loads(rows.order_by().explain(format="json"))
    return int(plan["Plan"]["Plan Rows"])
