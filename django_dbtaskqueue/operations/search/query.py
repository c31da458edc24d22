"""From a search to rows: what each qualifier asks the database, and the filter set that pages, API and commands share.

Terminal statuses are asked for by ``final_status``, live ones within what the checkout indexes hold, so that an index
answers. Times are compared with the database's clock. Nothing but ``id_range`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import and_, or_
from typing import Any, cast

import django_filters
from django import forms
from django.core.exceptions import ValidationError
from django.db.models import BooleanField, F, Func, Max, Min, Q, Value
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.core.columns import INTEGER_TYPES, searched
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.outcomes import SIGNAL
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.db.minute_counts import database_now
from django_dbtaskqueue.db.session import Session, alias_for, model_for
from django_dbtaskqueue.models import AbstractTask, Step
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.models.tasks import WAIT
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.permissions import User, masked_fault, search_fault
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, Term, parse, parse_term, to_text
from django_dbtaskqueue.operations.search.values import VALUE_TYPES, ErrorHolds, JsonFits, Match, Piece, dated, span_of

__all__ = ["TaskFilter"]

LOOKUPS = {
    "=": "exact",
    "^": "startswith",
    "$": "endswith",
    "~": "contains",
    ">": "gt",
    ">=": "gte",
    "<": "lt",
    "<=": "lte",
}
LOOKUP_OF_AGE = {">": "<", ">=": "<=", "<": ">", "<=": ">="}  # longer ago is earlier
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

    Not filtered yet. A queue with shards needs ``using``; without, the first database it has is looked in.
    """
    queues = search.queues()
    queue = queues[0] if len(queues) == 1 else ""
    model: type[AbstractTask] = model_for(queue)
    found: TaskQuerySet = model._default_manager.using(alias_for(queue, using, write=write)).all()
    return found


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
    values = [match.value for match in term.matches]
    if "." in term.name:
        column, *path = term.name.split(".")
        condition = Q(JsonFits(column, tuple(path), term.matches))
    elif term.name == "status":
        condition = by_status(values)
    elif term.name == "is":
        condition = _any(STATE_CONDITIONS[value] for value in values)
    elif term.name == "error":
        condition = MAY_HAVE_ERROR & Q(ErrorHolds(*values))
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
        condition = _any(_number(NUMBERS[term.name], match) for match in term.matches)
    else:
        condition = _any(_time(TIMES[term.name], match, alias) for match in term.matches)
    return ~condition if term.negated else condition


def _any(conditions: Iterable[Q]) -> Q:
    found: Q = reduce(or_, conditions)
    return found


def _text(column: str, match: Match, alias: str) -> Q:
    condition = Q(**{f"{column}__{LOOKUPS[match.op]}": match.value})
    if match.op == "=" or Session.on(alias).postgresql:
        return condition
    # SQLite's LIKE takes a to z in any case.
    literal = re.sub(r"[*?[]", r"[\g<0>]", match.value)
    pattern = Value("*" * (match.op in "$~") + literal + "*" * (match.op in "^~"))
    glob = Func(F(column), pattern, template="%(expressions)s", arg_joiner=" GLOB ", output_field=BooleanField())
    return condition & Q(glob)


def _number(column: str, match: Match) -> Q:
    if match.op == "..":
        return Q(**{f"{column}__range": (int(match.value), int(match.high))})
    return Q(**{f"{column}__{LOOKUPS[match.op]}": int(match.value)})


# -- times -------------------------------------------------------------------------------------------------------------


def bounds_of(match: Match) -> list[tuple[str, str]]:
    """Return a match of a time as comparisons: (operator, value). A day lasts to its end."""
    value = dated(match.value)
    if match.op == "=":  # a day
        return [(">=", value), ("<=", value)]
    if match.op != "..":
        return [(match.op, value)]
    low, high = span_of(match.value) is not None, span_of(match.high) is not None
    if low and high:  # two ages
        return [(">=", value), ("<=", match.high)]
    return [("<=" if low else ">=", value), (">=" if high else "<=", dated(match.high, value))]


def _time(column: str, match: Match, alias: str) -> Q:
    return reduce(and_, (_bound(column, op, value, alias) for op, value in bounds_of(match)))


def since(column: str, text: str, alias: str) -> Q:
    """Return the condition for a time from ``text`` on: an age, a day, a time, or a time of day.

    Raises ``SearchError``.
    """
    match = VALUE_TYPES["time"].read(Piece(f"{'<' if span_of(text) else '>='}{text}"), "since")
    return _time(column, match, alias)


def _bound(column: str, op: str, value: str, alias: str) -> Q:
    span = span_of(value)
    if span is not None:
        return Q(**{f"{column}__{LOOKUPS[LOOKUP_OF_AGE[op]]}": Now() - span})
    op, moment = moment_of(op, value)
    return Q(**{f"{column}__{LOOKUPS[op]}": Session.on(alias).comparable_time(moment)})


def moment_of(op: str, value: str) -> tuple[str, datetime]:
    """Return a comparison with a date, or a date and time, as one with a moment."""
    moment = datetime.fromisoformat(value)
    if len(value) == len("2026-11-20") and op in (">", "<="):  # after that day, or up to its end
        moment, op = moment + timedelta(days=1), {">": ">=", "<=": "<"}[op]
    return op, moment


# -- dates as ranges of ids --------------------------------------------------------------------------------------------

# Ids and creation times rise together, so the primary key finds a date. A time column has no index, because every
# enqueue and every settle would pay for it.


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


# -- the filter set ----------------------------------------------------------------------------------------------------


class SearchField(forms.CharField):
    """A field whose clean value is a search: a whole one, or with ``qualifier`` the text after its colon."""

    def __init__(self, *, qualifier: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.qualifier = qualifier

    def clean(self, value: str | None) -> Search:
        """Read the search; a ``SearchError`` becomes an error of the field."""
        text = str(super().clean(value))
        try:
            if not text or not self.qualifier:
                return parse(text)
            return Search((parse_term(self.qualifier, text.removeprefix("-"), negated=text.startswith("-")),))
        except SearchError as error:
            words = _("Search %(part)s: %(reason)s")
            raise ValidationError(words, params={"part": repr(error.part), "reason": error.reason}) from error


class SearchFilter(django_filters.Filter):  # type: ignore[misc]  # it publishes no types
    """Filters by the search in its field."""

    field_class = SearchField

    def filter(self, qs: TaskQuerySet, value: Search) -> TaskQuerySet:
        return select(value, qs)


class SearchForm(forms.Form):
    """Reads every field of a filter set as a part of one search."""

    user: User | None = None  # who searches; None may see everything

    search = Search()  # all valid fields, as one search

    def clean(self) -> None:
        """Refuse a search in payloads that the user may not see."""
        self.search = reduce(and_, self.cleaned_data.values(), Search())
        if fault := search_fault(self.user, self.search):
            raise ValidationError(fault)


class TaskFilter(django_filters.FilterSet):  # type: ignore[misc]  # it publishes no types
    """``TaskFilter({"q": "status:ERROR", "queue": "claims"}, queryset=Task.objects.all()).qs``.

    ``q`` is a search. Each qualifier is also a filter: its value is what follows the colon. A filter set with
    an error selects no task and says why in ``errors``; ``checked()`` raises the error instead.
    """

    q = SearchFilter(label=_("Search"))

    class Meta:
        form = SearchForm

    @classmethod
    def get_filters(cls) -> dict[str, SearchFilter]:
        """Return ``q`` and one filter for each qualifier."""
        named = {
            name: SearchFilter(name, label=name, help_text=one.help, qualifier=name) for name, one in QUALIFIERS.items()
        }
        return {**super().get_filters(), **named}

    def get_form_class(self) -> type[SearchForm]:
        """Return a form of the fields that were given, for the user of the ``request`` if there is one."""
        given = {name: one.field for name, one in self.filters.items() if name in self.data}
        return type("TaskForm", (SearchForm,), {**given, "user": getattr(self.request, "user", None)})

    def filter_queryset(self, queryset: TaskQuerySet) -> TaskQuerySet:
        """Return the tasks that fit; none when the filter set has an error."""
        found: TaskQuerySet = queryset.none() if self.errors else super().filter_queryset(queryset)
        return found

    @property
    def search(self) -> Search:
        """All that was asked for, as one search: its text and address are ``search.to_text`` and ``to_url`` of it."""
        return self.form.search if self.is_valid() else Search()

    def checked(self) -> TaskFilter:
        """Return this filter set; raise ``SearchError`` with its first error."""
        for name, faults in self.errors.items() if self.is_bound else ():
            raise SearchError(str(self.data.get(name, "")), str(faults[0]).partition(": ")[2] or str(faults[0]))
        return self
