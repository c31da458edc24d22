"""Counting that stays cheap at any size: exact up to a bound, "10,000+" above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.core.paginator import Paginator
from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.utils.formats import number_format

if TYPE_CHECKING:
    AnyPaginator = Paginator[Any]
else:
    AnyPaginator = Paginator

BOUND = 10_000
CHUNK = 400  # counts in one statement: SQLite takes at most 500 terms
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
        with _time_limit(alias, within):
            for start in range(0, len(selections), CHUNK):
                found += [_count(number, bound) for number in _numbers(selections[start : start + CHUNK], alias, bound)]
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != QUERY_CANCELED:
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


@contextmanager
def _time_limit(alias: str, within: timedelta) -> Iterator[None]:
    if connections[alias].vendor != "postgresql":
        yield
        return
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting('statement_timeout')")
        (before,) = cursor.fetchone()
        limit = "SELECT set_config('statement_timeout', %s, true)"
        cursor.execute(limit, [f"{int(within.total_seconds() * 1000)}ms"])
        yield
        cursor.execute(limit, [before])  # the setting outlives a savepoint


class BoundedPaginator(AnyPaginator):
    """Pages over the first 10,000 rows; what lies behind is found by narrowing the search."""

    @cached_property
    def found(self) -> Count:
        """How many rows there are, as far as it was counted."""
        rows: Any = self.object_list
        return bounded_count(rows) if isinstance(rows, QuerySet) else Count(len(rows))

    @cached_property
    def count(self) -> int:
        """The number of rows the pages reach."""
        return self.found.number
