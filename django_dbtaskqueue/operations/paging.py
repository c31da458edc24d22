"""Pages of rows by id, and windowed search: pages of a search that no index answers.

A search first runs as it is. When that takes too long, the page holds the matches among the next ``WINDOW_ROWS`` tasks,
and says so; a search that goes on reads window after window until one has a match. No page reads a large table to its
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.core.exceptions import FieldDoesNotExist
from django.db import connections
from django.db.models import Aggregate, BooleanField, Max, Min, TextField
from django.db.models.expressions import RawSQL

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.sql.stats import StatsStatements
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.bounded_reads import Rows, in_time, prefer_indexes, statement_timeout
from django_dbtaskqueue.operations.search import Search, Term
from django_dbtaskqueue.operations.search.query import id_range, select, within
from django_dbtaskqueue.operations.search.values import COMPARISONS

WHOLE_SEARCH_TIMEOUT = timedelta(milliseconds=100)  # for a page to be found without a window
WINDOW_ROWS = 20_000  # that a search reads at once
WINDOW_TIMEOUT = timedelta(milliseconds=500)  # for a window; a slower one is read again in part
MIN_WINDOW_ROWS = 100
MAX_IDS_PER_WINDOW_ROW = 3  # between the ends of a window that is read as one range of ids
SORT_TIMEOUT = timedelta(milliseconds=500)  # for all rows that match to be sorted
LOOK_ON_TIME = timedelta(seconds=1)  # that one answer of a search that goes on may take
MIN_ROWS_PER_PRIORITY = 100  # of the ready tasks of each queue and priority, read for the tasks that are PROCESSING
# The operators of each qualifier whose rows an index finds, when not negated.
INDEXED_OPERATORS = {"": "^", "queue": "=", "ref": "=^", "id": ("=", "..", *COMPARISONS), "fingerprint": "="}
FAILED_STATUSES = {str(Status.ERROR), str(Status.POISON)}


@dataclass(frozen=True, slots=True)
class Page:
    """One page of rows in the order of their ids, and how many rows the search read for it."""

    rows: list[Any]
    newer: int | None = None  # the id where the page of newer rows begins; None: there is no such page
    older: int | None = None
    window: int = 0  # this many rows were read, and others follow; 0: read to the end
    back_to: datetime | None = None  # when the last of these was created
    progress: float = 1.0  # the share of the table that is behind this page, by ids
    cut: bool = False  # other rows match, and this order has no page for them
    first: int = 0  # only this many ready tasks of each queue and priority were read; 0: all


def whole_page(rows: Rows, size: int, *, before: int | None = None, after: int | None = None) -> Page:
    """Return ``size`` rows, the newest first: those before an id, those after one, or the newest. No time limit.

    Reads no row of another page, however far back the page lies.
    """
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: size + 1])[::-1]
        shown = found[-size:]
        return Page(shown, _first(shown, newer=len(found) > size), shown[-1].pk if shown else None)
    chosen = rows if before is None else rows.filter(pk__lt=before)
    found = list(chosen.order_by("-pk")[: size + 1])
    shown = found[:size]
    return Page(shown, _first(shown, newer=before is not None), shown[-1].pk if len(found) > size else None)


def _first(shown: list[Any], *, newer: bool) -> int | None:
    return shown[0].pk if shown and newer else None


# -- windowed search ---------------------------------------------------------------------------------------------------


def page_of(
    rows: Rows,
    among: Rows,
    size: int,
    *,
    before: int | None = None,
    after: int | None = None,
    look_on: timedelta | None = None,
    patience: timedelta | None = None,
) -> Page:
    """Return one page of ``rows``, the newest first; if that takes long, of the next ``WINDOW_ROWS`` of ``among``.

    ``among`` holds all of ``rows``, and an index finds it. With ``look_on`` the search reads windows for that long,
    until one has a match; before that it tries to answer as a whole for ``patience``. On another database than
    PostgreSQL the search runs to its end.
    """
    windows = connections[rows.db].vendor == "postgresql"
    if look_on is None or not windows:
        whole = partial(whole_page, rows, size, before=before, after=after)
        if found := in_time(rows.db, patience or WHOLE_SEARCH_TIMEOUT, whole):
            return found
    if after is not None:
        return _window_after(rows, among, size, after)
    deadline, read, end = clock.monotonic() + (look_on or timedelta(0)).total_seconds(), 0, before
    while True:
        ids = _ids((among if end is None else among.filter(pk__lt=end)).order_by("-pk"))
        full = len(ids) == WINDOW_ROWS
        found, seen = _in_window(rows, ids, size, end)
        read, further = read + seen, ids[seen - 1] if full or seen < len(ids) else None
        if found.rows or further is None or clock.monotonic() >= deadline:
            break
        end = further
    # A window without a match has neighbours, too: they begin at its ends.
    page = replace(found, newer=found.newer or (before and before - 1), older=found.older or further)
    return page if further is None else _at(page, among, further, read)


def _in_window(rows: Rows, ids: list[int], size: int, before: int | None) -> tuple[Page, int]:
    """Return the page of these ids, and how many of them were read: fewer where long texts make them slow."""
    while len(ids) > MIN_WINDOW_ROWS:
        part = partial(whole_page, _of_window(rows, ids), size, before=before)
        if found := in_time(rows.db, WINDOW_TIMEOUT, part):
            return found, len(ids)
        ids = ids[: max(len(ids) // 8, MIN_WINDOW_ROWS)]
    return whole_page(_of_window(rows, ids), size, before=before), len(ids)


def _window_after(rows: Rows, among: Rows, size: int, after: int) -> Page:
    ids = _ids(among.filter(pk__gt=after).order_by("pk"))
    found = whole_page(_of_window(rows, ids), size, after=after)
    further = ids[-1] if len(ids) == WINDOW_ROWS else None
    page = replace(found, newer=found.newer or further, older=found.older or after + 1)
    return page if further is None else _at(page, among, after, len(ids))


def _at(page: Page, among: Rows, place: int, read: int) -> Page:
    """Return a page that says how far a search has come: to the row ``place``, after ``read`` rows."""
    table = among.model._default_manager.using(among.db)
    try:
        field = among.model._meta.get_field("create_time").name
        time = table.filter(pk=place).values_list(field, flat=True).first()
    except FieldDoesNotExist:
        time = None
    ends = table.aggregate(low=Min("pk"), high=Max("pk"))
    share = (ends["high"] - place) / max(ends["high"] - ends["low"], 1)
    return replace(page, window=read, back_to=time, progress=min(max(share, 0.0), 1.0))


def sorted_page(rows: Rows, among: Rows, size: int, order: Sequence[Any]) -> Page:
    """Return the first rows in an order that no index has; if that takes long, of the newest ``WINDOW_ROWS``."""
    found = in_time(rows.db, SORT_TIMEOUT, lambda: list(rows.order_by(*order)[: size + 1]))
    if found is not None:
        return Page(found[:size], cut=len(found) > size)
    ids = _ids(among.order_by("-pk"))
    found = list(_of_window(rows, ids).order_by(*order)[: size + 1])
    return _at(Page(found[:size], cut=True), among, ids[-1] if ids else 0, len(ids))


def look_through(search: Search, rows: TaskQuerySet[Any], size: int, *, before: int | None = None) -> Iterator[Page]:
    """Yield the pages of a search, with ``size`` rows in all, each after at most about ``LOOK_ON_TIME``.

    ``rows`` match the search; ``older`` of the last page is where further rows begin. A search by date first looks
    where its ids are, and everywhere when it has found nothing there.
    """
    tasks: TaskQuerySet = rows.model._default_manager.using(rows.db).all()
    for ids in dict.fromkeys((id_range(search, tasks), None)):
        page, missing = Page([], older=before, window=1), size
        chosen, among, look_on = within(ids, rows), within(ids, indexed_part(search, tasks)), None
        while page.window and missing:
            with statement_timeout(rows.db):
                page = page_of(chosen, among, missing, before=page.older, look_on=look_on)
            missing, look_on = missing - len(page.rows), LOOK_ON_TIME
            if page.window or missing < size or ids is None:
                yield page
        if missing < size:
            return


def page_of_processing(rows: TaskQuerySet, names: Sequence[str], size: int, **place: int | None) -> Page:
    """Return one page of those of ``rows`` that are PROCESSING. Such tasks are the first in ready order.

    Reads the first tasks of each priority, in the queues ``names`` or in all.
    """
    session = Session.on(rows.db, rows.model)
    sql = StatsStatements(session.sql.tables, session.sql.dialect)
    with prefer_indexes(session):
        queues = list(names) or [row[0] for row in session.run(sql.names, {})]
        most = max(MIN_ROWS_PER_PRIORITY, WINDOW_ROWS // max(len(queues), 1))
        found = session.run(sql.first_tasks(most, WINDOW_ROWS), {"names": queues})
    seen = sum(number for number, _ids in found)
    ids = [one for _number, part in found for one in part or ()]
    cut = seen >= WINDOW_ROWS or any(number >= most for number, _ids in found)
    return replace(whole_page(_only(rows, ids), size, **place), first=most if cut else 0)


def finds_processing_only(search: Search) -> bool:
    """Whether a search finds only PROCESSING tasks, and no index answers it."""
    if any(term.name in ("ref", "id", "") for term in search.terms):
        return False
    wanted = {"status": {str(Status.PROCESSING)}, "is": {"held", "stale"}}
    return any(
        not term.negated and {match.value for match in term.matches} <= wanted.get(term.name, set())
        for term in search.terms
    )


def indexed_part(search: Search, tasks: TaskQuerySet) -> TaskQuerySet:
    """Return the tasks that fit as much of a search as indexes answer."""

    def answered(term: Term) -> bool:
        if term.name == "status":
            return {match.value for match in term.matches} <= FAILED_STATUSES
        return all(match.op in INDEXED_OPERATORS.get(term.name, ()) for match in term.matches)

    known = [term for term in search.terms if not term.negated and answered(term)]
    return select(Search(tuple(known)), tasks)


def _ids(rows: Rows) -> list[int]:
    """Return the first ids as one array: Python needs a fifth of the time that it needs for as many rows."""
    together = Aggregate("pk", function="ARRAY_AGG", output_field=TextField())
    found: list[int] | None = rows.values("pk")[:WINDOW_ROWS].aggregate(ids=together)["ids"]
    return found or []


def _of_window(rows: Rows, ids: list[int]) -> Rows:
    """Return those of ``rows`` in a window: all that lie between its ends.

    PostgreSQL takes as long to plan an array of 20,000 ids as to read their rows. Where many rows of others lie between
    them, the array is still faster.
    """
    if not ids or abs(ids[0] - ids[-1]) >= MAX_IDS_PER_WINDOW_ROW * len(ids):
        return _only(rows, ids)
    return rows.filter(pk__range=(min(ids[0], ids[-1]), max(ids[0], ids[-1])))


def _only(rows: Rows, ids: list[int]) -> Rows:
    """Return those of ``rows`` with these ids, given as one array: a long list of values takes long to parse."""
    quote = connections[rows.db].ops.quote_name
    column = f"{quote(rows.model._meta.db_table)}.{quote(rows.model._meta.pk.column)}"
    array = "{" + ",".join(map(str, ids)) + "}"
    return rows.filter(RawSQL(f"{column} = ANY(%s::bigint[])", [array], output_field=BooleanField()))  # noqa: S611 -- names of the model's own, the ids apart
