"""From a search to pages of rows: what each qualifier asks, the filter set that all faces share, and windowed search.

Terminal statuses are asked for by ``final_status``, live ones within what the checkout indexes hold, so that an index
answers. Times are compared with the database's clock. Nothing but ``id_range`` reads.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from operator import and_, or_
from typing import Any, Self, cast

import django_filters
from django import forms
from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import Aggregate, BooleanField, F, Func, Max, Min, Q, TextField, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.utils.timezone import make_aware
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.columns import INTEGER_TYPES, searched
from django_dbtaskqueue.core.durations import MICROSECOND, clock, task_place
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.states import SIGNAL, TERMINAL, Status
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of, model_for
from django_dbtaskqueue.models import AbstractTask, Step
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.models.tasks import WAIT
from django_dbtaskqueue.operations.bounded_reads import Rows, in_time, prefer_indexes, reading, statement_timeout
from django_dbtaskqueue.operations.lookup import tasks_on
from django_dbtaskqueue.operations.permissions import User, masked_fault, search_fault
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, Term, parse, parse_term, to_text, values
from django_dbtaskqueue.operations.search.values import ErrorHolds, JsonFits, Match, Piece, dated, span_of

__all__ = ["TaskFilter"]

LOOKUPS = {
    "=": "exact", "^": "startswith", "$": "endswith", "~": "contains", ">": "gt", ">=": "gte", "<": "lt", "<=": "lte",
}  # fmt: skip
_any = partial(reduce, or_)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # no search can name an earlier time
LATER_OR_EARLIER = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
TEXTS, NUMBERS, TIMES = searched("text"), searched(*INTEGER_TYPES), searched("timestamptz")
# What a checkout index can answer; the rest of the table is not read for it.
IN_INDEX = Q(ready_time__isnull=False) | Q(parked_by__isnull=False)
# Tasks that can have an error: all but the COMPLETED ones.
MAY_HAVE_ERROR = Q(final_status__in=[Status.ERROR, Status.POISON]) | IN_INDEX
# Every task, expressed so that the partial indexes, which begin with the queue, can find all tasks of a queue.
ALL_TASKS = Q(final_status__isnull=False) | IN_INDEX
HELD_TASKS = Q(status=Status.PROCESSING, ready_time__isnull=False)
STATE_CONDITIONS: dict[str, Q] = {
    "due": Q(ready_time__lte=Now(), next_process_time__lte=Now(), attempt__lt=F("max_attempts")),
    "held": HELD_TASKS & Q(next_process_time__gt=Now()),
    "parked": Q(parked_by__isnull=False),
    "scheduled": Q(status=Status.CREATED, ready_time__isnull=False, next_process_time__gt=Now()),
    "stale": HELD_TASKS & Q(next_process_time__lte=Now()),
}
# What was not made due, by a signal or an operator.
AWAITING = Q(status=Status.CREATED) & (Q(parked_by=SIGNAL) | Q(ready_time__isnull=False, next_process_time__gt=Now()))
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


def tasks_for(search: Search, using: str | None = None, *, write: bool = False) -> TaskQuerySet:
    """Return all tasks of the table and database a search looks in: that of the one queue it names, or the common one.

    Not filtered yet. A queue with shards needs ``using``; without, the first is looked in (``elsewhere`` says so).
    """
    queues = search.queues()
    queue = queues[0] if len(queues) == 1 else ""
    return tasks_on(alias_for(queue, using, write=write), model_for(queue))


def select(search: Search | str, tasks: TaskQuerySet) -> TaskQuerySet:
    """Return those of ``tasks`` that match all terms. Raises ``SearchError``; reads nothing."""
    found = parse(search) if isinstance(search, str) else search
    if fault := masked_fault(found):
        raise SearchError(to_text(found), fault)
    for one in found.terms:
        tasks = tasks.filter(_condition(one, tasks.db, tasks.model))
    return tasks


def by_status(statuses: Sequence[str]) -> Q:
    """Return the condition for tasks in one of these statuses that the indexes answer."""
    ended = [status for status in statuses if status in TERMINAL]
    live = [status for status in statuses if status not in TERMINAL]
    condition = Q(final_status__in=ended) if ended else Q()
    return condition | (Q(status__in=live) & IN_INDEX) if live else condition


def _condition(term: Term, alias: str, model: type[AbstractTask]) -> Q:
    wanted = [match.value for match in term.matches]
    if "." in term.name:
        column, *path = term.name.split(".")
        condition = Q(JsonFits(column, tuple(path), term.matches))
    elif term.name == "status":
        condition = by_status(wanted)
    elif term.name == "is":
        condition = _any(STATE_CONDITIONS[value] for value in wanted)
    elif term.name == "error":
        condition = MAY_HAVE_ERROR & Q(ErrorHolds(*wanted))
    elif term.name == "fingerprint" and not term.negated:
        condition = Q(final_status__in=[Status.ERROR, Status.POISON], fingerprint__isnull=False)
        condition &= _any(_text("fingerprint", match, alias) for match in term.matches)
    elif term.name == "signal":
        waits = Step.objects.using(alias).filter(kind=WAIT, location=model._meta.label_lower)
        named = waits.filter(_any(_text("name", match, alias) for match in term.matches))
        condition = AWAITING & Q(pk__in=named.values("task_id"))
    elif term.name in TEXTS:
        condition = _any(_text(TEXTS[term.name], match, alias) for match in term.matches)
        condition &= ALL_TASKS if term.name == "queue" and not term.negated else Q()
    elif term.name in NUMBERS:
        condition = _any(_number(NUMBERS[term.name], match, alias, model) for match in term.matches)
    else:
        condition = _any(_time(TIMES[term.name], match, alias) for match in term.matches)
    return ~condition if term.negated else condition


def _text(column: str, match: Match, alias: str) -> Q:
    condition = Q(**{f"{column}__{LOOKUPS[match.op]}": match.value})
    if match.op == "=" or Session.on(alias).postgresql:
        return condition
    # SQLite's LIKE takes a to z in any case.
    pattern = Value("*" * (match.op in "$~") + re.sub(r"[*?[]", r"[\g<0>]", match.value) + "*" * (match.op in "^~"))
    glob = Func(F(column), pattern, template="%(expressions)s", arg_joiner=" GLOB ", output_field=BooleanField())
    return condition & Q(glob)


def _number(column: str, match: Match, alias: str, model: type[AbstractTask]) -> Q:
    numbers, here = [], (alias, model._meta.label_lower)
    for text in filter(None, (match.value, match.high)):
        home, location, number = task_place(text) or (*here, int(text))
        if location != here[1] or (home != alias and any(alias in aliases_of(one) for one in conf.settings_queues())):
            return Q(pk__in=[])  # the id of a Django task in another table, or on another shard
        numbers.append(number)
    return Q(**{f"{column}__range": numbers}) if match.high else Q(**{f"{column}__{LOOKUPS[match.op]}": numbers[0]})


def bounds_of(match: Match) -> list[tuple[str, timedelta | datetime]]:
    """Return a match of a time as comparisons with it: (operator, how long ago or which moment)."""
    value = dated(match.value)
    bounds = [(match.op, value)]
    if match.op == "=":  # a day
        bounds = [(">=", value), ("<=", value)]
    elif match.op == "..":
        low, high = span_of(match.value) is not None, span_of(match.high) is not None
        bounds = [("<=" if low else ">=", value), (">=" if high else "<=", dated(match.high, value))]
        if low and high:  # two ages
            bounds = [(">=", value), ("<=", match.high)]
    return [_bound(*bound) for bound in bounds]


def _bound(op: str, value: str) -> tuple[str, timedelta | datetime]:
    """Longer ago is earlier. A day lasts to its end."""
    if (span := span_of(value)) is not None:
        return LATER_OR_EARLIER[op], span
    moment = datetime.fromisoformat(value)
    if values.DAY.fullmatch(value) and op in (">", "<="):
        return {">": ">=", "<=": "<"}[op], moment + timedelta(days=1)
    return op, moment


def with_moments(search: Search, now: datetime) -> Search:
    """Return the search with moments for its times: it means the same later, and in another time zone."""
    return Search(tuple(_fixed(term, now) if term.name in TIMES else term for term in search.terms))


def _fixed(term: Term, now: datetime) -> Term:
    matches = tuple(_moments(match, now if now.tzinfo else make_aware(now)) for match in term.matches)
    return replace(term, name="created" if term.name == "age" else term.name, matches=matches)


def _moments(match: Match, now: datetime) -> Match:
    bounds = [(op, now - min(at, now - EPOCH) if isinstance(at, timedelta) else at) for op, at in bounds_of(match)]
    (op, first), *rest = sorted(((op, at if at.tzinfo else make_aware(at)) for op, at in bounds), reverse=True)
    if not rest:
        return Match(op, first.isoformat())
    end, last = rest[0]
    return Match("..", first.isoformat(), (last - MICROSECOND * (end == "<")).isoformat())  # both ends are in it


def _limit(bound: timedelta | datetime, now: datetime | Now, session: Session) -> object:
    return now - bound if isinstance(bound, timedelta) else session.comparable_time(bound)


def _time(column: str, match: Match, alias: str) -> Q:
    session = Session.on(alias)
    bounds = [(LOOKUPS[op], _limit(bound, Now(), session)) for op, bound in bounds_of(match)]
    return reduce(and_, (Q(**{f"{column}__{lookup}": limit}) for lookup, limit in bounds))


def since(column: str, text: str, alias: str) -> Q:
    """Return the condition for a time from ``text`` on: an age, a day, a time of day. Raises ``SearchError``."""
    return _time(column, values.READERS["time"](Piece(f"{'<' if span_of(text) else '>='}{text}"), "since"), alias)


# Ids and creation times rise together, so the primary key finds a date. No time column has an index: writes would pay.


def id_range(search: Search, tasks: TaskQuerySet) -> range | None:
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
        return range(
            first if low is None else _around(session, low - MAX_TRANSACTION_TIME, first, end)[0],
            end if high is None else _around(session, high + MAX_TRANSACTION_TIME, first, end)[1],
        )


def within(found: range | None, tasks: TaskQuerySet) -> TaskQuerySet:
    """Return those of the tasks that have an id of the range."""
    return tasks if found is None else tasks.filter(pk__gte=found.start, pk__lt=found.stop)


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
        now = session.now()
        found = [
            {"low" if ">" in op else "high": cast(datetime, _limit(at, now, session)) for op, at in bounds_of(match)}
            for match in term.matches
        ]
        if column == "create_time":  # a task also starts or ends long after it was created
            lows += [min(one["low"] for one in found)] if all("low" in one for one in found) else []
        highs += [max(one["high"] for one in found)] if all("high" in one for one in found) else []
    return max(lows, default=None), min(highs, default=None)


class SearchForm(forms.Form):
    """Reads ``q`` as a search, and every other field as what follows the colon of a qualifier."""

    user: User | None = None  # who searches; None may see everything

    search = Search()  # all valid fields, as one search

    def clean(self) -> None:
        for name, text in [*self.cleaned_data.items()]:
            try:
                self.search &= Search((parse_term(name, text),)) if text and name != "q" else parse(text)
            except SearchError as error:
                params = {"part": repr(error.part), "reason": error.reason}
                self.add_error(name, ValidationError(_("Search %(part)s: %(reason)s"), params=params))
        if fault := search_fault(self.user, self.search):
            raise ValidationError(fault)


class TaskFilter(django_filters.FilterSet):  # type: ignore[misc]  # it publishes no types
    """``TaskFilter({"q": "status:ERROR", "queue": "claims"}, queryset=Task.objects.all()).qs``.

    ``q`` is a search. Each qualifier is also a filter: its value is what follows the colon. A filter set with
    an error selects no task and says why in ``errors``; ``checked()`` raises the error instead.
    """

    q = django_filters.CharFilter(label=_("Search"))

    class Meta:
        form = SearchForm

    @classmethod
    def get_filters(cls) -> dict[str, django_filters.CharFilter]:
        """Return ``q`` and one filter for each qualifier."""
        named = {name: django_filters.CharFilter(label=name, help_text=one.help) for name, one in QUALIFIERS.items()}
        return {**super().get_filters(), **named}

    def get_form_class(self) -> type[SearchForm]:
        """Return a form of the fields that were given, for the user of the ``request`` if there is one."""
        given = {name: one.field for name, one in self.filters.items() if name in self.data}
        return type("TaskForm", (SearchForm,), {**given, "user": getattr(self.request, "user", None)})

    def filter_queryset(self, queryset: TaskQuerySet) -> TaskQuerySet:
        """Return the tasks that fit; none when the filter set has an error."""
        return queryset.none() if self.errors else select(self.search, queryset)

    @property
    def search(self) -> Search:
        """All that was asked for, as one search: its text and address are ``search.to_text`` and ``to_url`` of it."""
        return self.form.search if self.is_valid() else Search()

    def checked(self) -> Self:
        """Return this filter set; raise ``SearchError`` with its first error."""
        for name, faults in self.errors.items() if self.is_bound else ():
            raise SearchError(str(self.data.get(name, "")), str(faults[0]).partition(": ")[2] or str(faults[0]))
        return self


WHOLE_SEARCH_TIMEOUT = timedelta(milliseconds=100)  # for a page to be found without a window
WINDOW_ROWS = 20_000  # that a search reads at once
WINDOW_TIMEOUT = timedelta(milliseconds=500)  # for a window; a slower one is read again in part
MIN_WINDOW_ROWS = 100
MAX_IDS_PER_WINDOW_ROW = 3  # between the ends of a window that is read as one range of ids
SORT_TIMEOUT = timedelta(milliseconds=500)  # for all rows that match to be sorted
LOOK_ON_TIME = timedelta(seconds=1)  # that one answer of a search that goes on may take
MIN_ROWS_PER_PRIORITY = 100  # of the ready tasks of each queue and priority, read for the tasks that are PROCESSING
# The operators of each qualifier whose rows an index finds, when not negated.
INDEXED_OPERATORS = {"": "^", "queue": "=", "ref": "=^", "id": ("=", "..", *values.COMPARISONS), "fingerprint": "="}
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
    """Return ``size`` rows, the newest first: those before an id, or after one. Reads no row of another page."""
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: size + 1])[::-1]
        shown = found[-size:]
        return Page(shown, shown[0].pk if len(found) > size else None, shown[-1].pk if shown else None)
    found = list((rows if before is None else rows.filter(pk__lt=before)).order_by("-pk")[: size + 1])
    shown = found[:size]
    newer = shown[0].pk if shown and before is not None else None
    return Page(shown, newer, shown[-1].pk if len(found) > size else None)


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
    if look_on is None or connections[rows.db].vendor != "postgresql":
        whole = partial(whole_page, rows, size, before=before, after=after)
        if found := in_time(rows.db, patience or WHOLE_SEARCH_TIMEOUT, whole):
            return found
    if after is not None:
        ids = _ids(among.filter(pk__gt=after).order_by("pk"))
        found = whole_page(_of_window(rows, ids), size, after=after)
        further = ids[-1] if len(ids) == WINDOW_ROWS else None
        page = replace(found, newer=found.newer or further, older=found.older or after + 1)
        return page if further is None else _at(page, among, after, len(ids))
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
        if found := in_time(rows.db, WINDOW_TIMEOUT, partial(whole_page, _of_window(rows, ids), size, before=before)):
            return found, len(ids)
        ids = ids[: max(len(ids) // 8, MIN_WINDOW_ROWS)]
    return whole_page(_of_window(rows, ids), size, before=before), len(ids)


def _at(page: Page, among: Rows, place: int, read: int) -> Page:
    """Return a page that says how far a search has come: to the row ``place``, after ``read`` rows."""
    table = among.model._default_manager.using(among.db)
    timed = hasattr(among.model, "create_time")
    time = table.filter(pk=place).values_list("create_time", flat=True).first() if timed else None
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
    tasks = tasks_on(rows.db, rows.model)
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
    """Return a page of the PROCESSING ones of ``rows``. Such tasks are the first of each priority in ready order."""
    session, sql = reading((rows.db, rows.model))
    with prefer_indexes(session):
        queues = list(names) or [row[0] for row in session.run(sql.names, {})]
        most = max(MIN_ROWS_PER_PRIORITY, WINDOW_ROWS // max(len(queues), 1))
        found = session.run(sql.first_tasks.format(most=most, most_of_all=WINDOW_ROWS), {"names": queues})
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

    return select(Search(tuple(term for term in search.terms if not term.negated and answered(term))), tasks)


def _ids(rows: Rows) -> list[int]:
    """Return the first ids as one array: Python needs a fifth of the time that it needs for as many rows."""
    together = Aggregate("pk", function="ARRAY_AGG", output_field=TextField())
    found: list[int] | None = rows.values("pk")[:WINDOW_ROWS].aggregate(ids=together)["ids"]
    return found or []


def _of_window(rows: Rows, ids: list[int]) -> Rows:
    """Return those of ``rows`` in a window: all that lie between its ends.

    PostgreSQL plans an array of 20,000 ids as long as it reads the rows. Between many rows of others it is faster.
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
