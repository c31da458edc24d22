"""Lists of any size: the address holds the search, pages go by id, and counts are bounded or estimated."""

from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, ClassVar

import django_filters
import django_tables2 as tables
from django import forms
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import SuspiciousOperation
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.formats import date_format
from django.utils.html import conditional_escape, format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _, gettext_lazy

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import DATABASE_KEY, LIVE_KEY, ReadOnlyAdmin, viewer
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.context import set_inside, standbys
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.db.session import alias_for, model_for
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.operations import permissions
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, count_within, estimate
from django_dbtaskqueue.operations.search.query import LOOK_ON_TIME, Page, page_of

PAGE_ROWS, MAX_QUEUES_TO_PICK = 50, 200
COUNT_TIMEOUT = timedelta(milliseconds=60)  # after that the number of rows is estimated
BEFORE_KEY, AFTER_KEY = "before", "after"  # query keys: the ids at which a page begins
FULL_SEARCH_KEY = "whole"  # query key: search to the end, as long as OPERATIONS_TIMEOUT allows
SORT_KEY = "sort"  # query key: the order of the rows
LOOKED_KEY = "looked"  # query key: how many rows a search that goes on has read without a match
# Keys that an address may have beside the search; the last four are put there by Django's admin.
PAGE_KEYS = (
    BEFORE_KEY, AFTER_KEY, FULL_SEARCH_KEY, LOOKED_KEY, SORT_KEY,
    LIVE_KEY, DATABASE_KEY, "_changelist_filters", "_facets", "_popup", "e",
)  # fmt: skip


class FilterSet(django_filters.FilterSet):  # type: ignore[misc]  # publishes no types
    """The filters of a list."""

    @classmethod
    def of(cls, **more: django_filters.Filter) -> type[django_filters.FilterSet]:
        """Return a filter set with further filters: their names are keys of the page's query string."""
        return type("PageFilter", (cls,), more)


class TickColumn(tables.CheckBoxColumn):  # type: ignore[misc]  # publishes no types
    @property
    def header(self) -> SafeString:
        label = _("Tick all rows of this page")
        return format_html('<input type="checkbox" class="dbtq-all dbtq-script" hidden aria-label="{}">', label)

    def cell(self, record: Model, place: int) -> SafeString:
        html = '<input type="checkbox" name="{}" value="{}" id="dbtq-tick-{}" aria-label="{}">'
        return format_html(html, ACTION_CHECKBOX_NAME, record.pk, place, _("Tick %(what)s") % {"what": record})


class PageColumn(tables.Column):  # type: ignore[misc]  # publishes no types
    """A column of ``list_display``: a method of the admin class, or a field of the row."""

    def __init__(self, page: ReadOnlyAdmin, name: str) -> None:
        method = getattr(page, name, None)
        field: Any = method or page.opts.get_field(name)
        title = field.short_description if method else field.verbose_name
        super().__init__(verbose_name=title, accessor="pk", empty_values=(), orderable=False)
        self.hint = page.hints.get(name, "")
        self._value = method or attrgetter(name)
        links = page.list_display[:1] if page.list_display_links == () else page.list_display_links or ()
        self._page = page if name in links else None

    def cell(self, record: Model, place: int) -> str:
        value = self._value(record)
        shown = cells.own_text(value) if type(value) is str and value else "" if value is None else value
        if self._page and shown != "":
            if (address := record.__dict__.get("own_page")) is None:  # two columns can lead there
                address = record.__dict__["own_page"] = self._page.page_of(record)
            shown = self._page.link(shown, address)
        return shown if isinstance(shown, SafeString) else str(shown)


class PageTable(tables.Table):  # type: ignore[misc]  # publishes no types
    """The rows of a list page. Its columns are those of ``list_display``; a detail page shows the same methods."""

    tick = TickColumn(accessor="pk", orderable=False)

    class Meta:
        template_name = "admin/dbtaskqueue/table.html"
        orderable = False
        attrs: ClassVar[dict[str, str]] = {"class": "dbtq-table"}

    def body(self) -> SafeString:
        """Return the rows. The library would inspect the signature of a column's method for each cell of each row."""
        columns = [
            (format_html('<td class="field-{}" data-label="{}">', one.name, capfirst(one.header)), one.column.cell)
            for one in self.columns
            if one.name != "tick"
        ]
        if "tick" in self.columns.names():
            columns.insert(0, (SafeString('<td class="field-tick">'), self.columns["tick"].column.cell))
        lines = []
        for place, row in enumerate(self.data, 1):
            cells = (f"{head}{conditional_escape(cell(row, place))}</td>" for head, cell in columns)
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return SafeString("\n".join(lines))  # each cell is escaped


def table_of(
    page: ReadOnlyAdmin, rows: Sequence[Model], *, caption: str, tickable: bool, columns: Sequence[str] = ()
) -> PageTable:
    shown = [(str(name), PageColumn(page, str(name))) for name in columns or page.list_display]
    table = PageTable(rows, extra_columns=shown, exclude=() if tickable else ("tick",))
    table.caption = caption
    return table


class ListAdmin(ReadOnlyAdmin):
    """A list with a search. A later page costs no more than the first."""

    filterset: Any  # a FilterSet; its fields are the keys that the query string may have
    empty: permissions.Text = ""  # the text of a list without rows
    plural: permissions.Text = ""  # the name of several rows; empty: the model's name
    list_across = False  # whether an action can apply to all rows that match
    waits_for_tick = False  # whether the verbs are shown only while a row is ticked

    def list_verbs(self, request: HttpRequest) -> Sequence[permissions.Verb]:
        return ()

    def filtered(self, request: HttpRequest) -> Any:
        if unknown := set(request.GET) - {*self.filterset.base_filters, *PAGE_KEYS}:
            raise SuspiciousOperation(f"{self.opts.label} cannot be searched by {', '.join(sorted(unknown))}.")
        return self.filterset(request.GET, queryset=self.get_queryset(request), request=request)

    def rows_of(self, filterset: Any) -> QuerySet[Any]:
        rows: QuerySet[Any] = filterset.qs if filterset.is_valid() else filterset.queryset.none()
        return rows.defer(*self.long_columns)

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        filterset = self.filtered(request)
        rows = self.rows_of(filterset)
        before, after = _id(request, BEFORE_KEY), _id(request, AFTER_KEY)
        page = self.read_page(request, filterset, rows, before=before, after=after)
        self.prepare(request, page.rows)
        looked = whole_number(request.GET.get(LOOKED_KEY, "0")) or 0
        place = None if looked else before or after
        verbs, names = self.list_verbs(request), str(self.opts.verbose_name_plural)
        return {
            "filterset": filterset,
            "has_q": "q" in filterset.filters,
            "narrowed": any(request.GET.get(name) for name in filterset.filters),
            "here": _address(request),
            "verbs": verbs,
            "slice": page,
            "table": table_of(self, page.rows, caption=names, tickable=bool(verbs)),
            "found": self.found(rows, page, place, filterset),
            "searched": _searched(page, looked, first=place is None),
            "full_search_url": _address(request, **{FULL_SEARCH_KEY: 1}),
            "look_on_url": _look_on(request, page, looked),
            "empty": _("Nothing more.") if place else self.empty or _("None."),
            "newer_url": _address(request, after=page.newer),
            "older_url": _address(request, before=page.older),
        }

    def read_page(self, request: HttpRequest, filterset: Any, rows: QuerySet[Any], **place: int | None) -> Page:
        before, after = place["before"], place["after"]
        return page_of(rows, filterset.queryset, PAGE_ROWS, before=before, after=after, **search_effort(request))

    def found(self, rows: QuerySet[Any], page: Page, place: int | None, filterset: Any) -> str:
        """Return how many rows there are, in words; of a search in parts how many it found so far."""
        if page.window or page.first:
            more = place is not None or page.older is not None or page.cut or page.first > 0
            count: ApproxCount | None = ApproxCount(len(page.rows), more=more)
        else:
            count = self.count(rows, page, place, filterset)
        one = count is not None and not count.more and count.number == 1
        name = self.opts.verbose_name if one else self.plural or self.opts.verbose_name_plural
        return f"{'?' if count is None else count} {name}"

    def count(self, rows: QuerySet[Any], found: Page, place: int | None, filterset: Any) -> ApproxCount | None:
        """Return how many rows there are: exact up to 10,000; estimated above that, or if counting takes too long."""
        if place is None and found.older is None and not found.cut:
            return ApproxCount(len(found.rows))
        count = count_within(rows, COUNT_TIMEOUT)
        if count is not None and not count.more:
            return count
        rough = estimate(filterset.qs)  # a range of ids and the dates it stands for would count twice for the planner
        if rough is None or (count is not None and rough <= count.number):
            return count
        unit = 10 ** max(len(str(rough)) - 2, 0)  # of the second digit
        return ApproxCount(round(rough / unit) * unit, estimated=True)


def part_of_name() -> object:
    search = forms.TextInput(attrs={"type": "search"})
    return django_filters.CharFilter(label=gettext_lazy("Name"), lookup_expr="icontains", widget=search)


class QueuePickFilter(FilterSet):
    """Rows of a queue, which is picked from those that the user may view."""

    queue = django_filters.CharFilter(label=gettext_lazy("Queue"))

    def __init__(self, data: Any, *, queryset: Any, request: Any) -> None:
        super().__init__(data, queryset=queryset, request=request)
        given = {data["queue"]} if data.get("queue") else set()
        names = sorted(given.union(filter(viewer(request).sees, known_queues())))
        if len(names) <= MAX_QUEUES_TO_PICK:
            choices = [("", _("any")), *((name, name) for name in names)]
            self.filters["queue"].extra["widget"] = forms.Select(choices=choices, attrs={"class": "dbtq-auto"})


class SmallListAdmin(ListAdmin):
    """A short list: one page, in the order of ``ordering``."""

    most_rows = 500

    def read_page(self, request: HttpRequest, filterset: Any, rows: Any, **place: int | None) -> Page:
        return Page(list(rows[: self.most_rows]))

    def count(self, rows: Any, found: Page, place: int | None, filterset: Any) -> ApproxCount | None:
        return super().count(rows, found, None, filterset)

    def queue_url(self, queue: str, page: str, /, *args: int, model: type[Model] | None = None, **query: str) -> str:
        """Return the address of a page of a queue's tasks, or of ``model``, on the database where the tasks are."""
        with set_inside(standbys, {}):
            home, here = alias_for(queue, None), alias_for("", None)
        query |= {} if home == here else {DATABASE_KEY: home}
        return self.url(model or model_for(queue), page, *args, **query)


class NamedListAdmin(SmallListAdmin):
    """Rows with names, of several databases."""

    filterset = FilterSet.of(name=part_of_name())

    def listed(self, request: HttpRequest) -> Sequence[Any]:
        return list(self.get_queryset(request))

    def rows_of(self, filterset: Any) -> list[Any]:  # type: ignore[override]
        part = filterset.form.cleaned_data.get("name", "") if filterset.is_valid() else ""
        return [row for row in self.listed(filterset.request) if part.lower() in row.name.lower()]


def _searched(page: Page, looked: int, *, first: bool) -> str:
    if page.first:
        text = _("Nothing among the first %(count)s tasks of each queue in ready order.")
        if page.rows:
            text = _("Only the first %(count)s tasks of each queue in ready order were searched.")
        return text % {"count": cells.number(page.first)}
    if page.cut and not page.window:
        return _("The first %(count)s in this order.") % {"count": cells.number(len(page.rows))}
    if not page.window:
        return ""
    if page.cut:
        text = _(
            "This order has no index: the newest %(count)s tasks were sorted (back to %(time)s). Narrow the search."
        )
    elif page.rows:
        text = _("No index supports this search: %(count)s rows were read, back to %(time)s. Older continues.")
    elif first:
        text = _("Nothing in the newest %(count)s tasks (back to %(time)s).")
    else:
        text = _("Nothing more in the next %(count)s tasks (back to %(time)s).")
    time = cells.EMPTY_VALUE if page.back_to is None else date_format(cells.local(page.back_to), "Y-m-d H:i")
    return text % {"count": cells.number(looked + page.window), "time": time}


def _look_on(request: HttpRequest, page: Page, looked: int) -> str:
    """Return the address where a search without a match goes on; empty when it has a match, or was read to the end."""
    if page.rows or page.cut or not (page.window or page.first):
        return ""
    return _address(request, **{BEFORE_KEY: page.older if page.window else None, LOOKED_KEY: looked + page.window})


def search_effort(request: HttpRequest) -> dict[str, timedelta]:
    """Return how long a search may take as a whole, or how long it goes on, as the address says."""
    if LOOKED_KEY in request.GET:
        return {"look_on": LOOK_ON_TIME}
    return {"patience": conf.settings().operations_timeout} if FULL_SEARCH_KEY in request.GET else {}


def _id(request: HttpRequest, key: str) -> int | None:
    if key not in request.GET:
        return None
    if (found := whole_number(request.GET[key])) is None:
        raise SuspiciousOperation(f"{key}={request.GET[key]!r} is not an id.")
    return found


def _address(request: HttpRequest, **changes: int | None) -> str:
    query = request.GET.copy()
    for key in {LIVE_KEY, BEFORE_KEY, AFTER_KEY, LOOKED_KEY, *changes}:
        query.pop(key, None)
    query.update({key: str(value) for key, value in changes.items() if value is not None})
    return f"{request.path}?{query.urlencode()}" if query else request.path
