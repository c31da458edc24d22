"""Pages of a search that no index answers: as many tasks as can be looked through at once, then it goes on from there.

A search is asked as it is first. When that takes too long, the page holds what fits among the next ``WINDOW`` tasks,
and says so. Nothing is ever read to the end of a large table for one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import OperationalError, connections
from django.db.models import BooleanField, QuerySet
from django.db.models.expressions import RawSQL

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.sql.stats import Reading
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.paginators import Slice, overran, slice_of, time_limit
from django_dbtaskqueue.operations.planner_hints import by_index
from django_dbtaskqueue.operations.search.parse import Search
from django_dbtaskqueue.operations.search.query import select

AT_ONCE = timedelta(milliseconds=100)  # for a page to be found without a window
WINDOW = 20_000  # rows that one page looks through at most
FEWEST = 100  # tasks of each line that are looked at for those in hand
INDEXED = ("", "queue", "ref", "id", "fingerprint")  # qualifiers whose rows an index finds, when not negated
FAILED = {str(Status.ERROR), str(Status.POISON)}


@dataclass(frozen=True, slots=True)
class Look:
    """One page of rows, and how far it was looked for them."""

    slice: Slice
    window: int = 0  # only so many rows were looked through; 0: all that fit are on the pages
    first: int = 0  # only so many of each line, by its order, were looked at; 0: all


def page_of(
    rows: QuerySet[Any], among: QuerySet[Any], size: int, *, before: int | None = None, after: int | None = None
) -> Look:
    """Return one page of ``rows``, the newest first; where that takes long, of the next ``WINDOW`` of ``among``.

    ``among`` holds all of ``rows``, and an index finds it. Elsewhere than on PostgreSQL the search runs to its end.
    """
    try:
        with time_limit(rows.db, min(AT_ONCE, conf.settings().operations_timeout)):
            return whole_page(rows, size, before=before, after=after)
    except OperationalError as error:
        if not overran(error):
            raise
    if after is not None:
        ids = _ids(among.filter(pk__gt=after).order_by("pk"))
        return _newer(_only(rows, ids), ids, size, after)
    ids = _ids((among if before is None else among.filter(pk__lt=before)).order_by("-pk"))
    return _older(_only(rows, ids), ids, size, before)


def whole_page(rows: QuerySet[Any], size: int, *, before: int | None = None, after: int | None = None) -> Look:
    """Return one page of ``rows``, the newest first, however long that takes."""
    return Look(slice_of(rows, size, before=before, after=after))


def page_in_hand(rows: TaskQuerySet, names: Sequence[str], size: int, **place: int | None) -> Look:
    """Return one page of those of ``rows`` that are PROCESSING: such tasks stand at the heads of the lines.

    Looks in the lines of ``names``, or of all queues, and there at the first tasks of each priority.
    """
    session = Session.on(rows.db, rows.model)
    sql = Reading(session.sql.tables, session.sql.dialect)
    with by_index(session):
        queues = list(names) or [row[0] for row in session.run(sql.names, {})]
        most = max(FEWEST, WINDOW // max(len(queues), 1))
        lines = session.run(sql.in_hand(most, WINDOW), {"names": queues})
    seen = sum(number for number, _ids in lines)
    ids = [one for _number, found in lines for one in found or ()]
    cut = seen >= WINDOW or any(number >= most for number, _ids in lines)
    return Look(slice_of(_only(rows, ids), size, **place), first=most if cut else 0)


def in_hand(search: Search) -> bool:
    """Whether a search finds PROCESSING tasks only, and not by what an index knows."""
    if any(term.name in ("ref", "id", "") for term in search.terms):
        return False
    wanted = {"status": {str(Status.PROCESSING)}, "is": {"held", "stale"}}
    return any(
        not term.negated and {match.value for match in term.matches} <= wanted.get(term.name, set())
        for term in search.terms
    )


def among(search: Search, tasks: TaskQuerySet) -> TaskQuerySet:
    """Return the tasks that fit as much of a search as indexes answer."""

    def answered(name: str, values: set[str]) -> bool:
        return name in INDEXED or (name == "status" and values <= FAILED)

    known = [
        term
        for term in search.terms
        if not term.negated and answered(term.name, {match.value for match in term.matches})
    ]
    return select(Search(tuple(known)), tasks)


def _ids(rows: QuerySet[Any]) -> list[int]:
    return list(rows.values_list("pk", flat=True)[:WINDOW])


def _only(rows: QuerySet[Any], ids: list[int]) -> QuerySet[Any]:
    """Return those of ``rows`` with these ids: one array, for a list of so many values takes long to read."""
    quote = connections[rows.db].ops.quote_name
    column = f"{quote(rows.model._meta.db_table)}.{quote(rows.model._meta.pk.column)}"
    array = "{" + ",".join(map(str, ids)) + "}"
    return rows.filter(RawSQL(f"{column} = ANY(%s::bigint[])", [array], output_field=BooleanField()))  # noqa: S611 -- names of the model's own, the ids apart


def _older(rows: QuerySet[Any], ids: list[int], size: int, before: int | None) -> Look:
    found = list(rows.order_by("-pk")[: size + 1])
    shown = found[:size]
    further = ids[-1] if len(ids) == WINDOW else None
    older = shown[-1].pk if len(found) > size else further
    newer = None if before is None else shown[0].pk if shown else before - 1
    return Look(Slice(shown, newer, older), window=len(ids) if further else 0)


def _newer(rows: QuerySet[Any], ids: list[int], size: int, after: int) -> Look:
    found = list(rows.order_by("pk")[: size + 1])[::-1]
    shown = found[-size:]
    further = ids[-1] if len(ids) == WINDOW else None
    newer = shown[0].pk if len(found) > size else further
    return Look(Slice(shown, newer, shown[-1].pk if shown else after + 1), window=len(ids) if further else 0)
