"""Lists of any size: a search whose address is the state, pages by id, counts that are bounded or said to be rough."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from django_dbtaskqueue.admin.base import ReadOnlyAdmin, id_of
from django_dbtaskqueue.admin.pages import LIVE, show
from django_dbtaskqueue.admin.tables import table_of
from django_dbtaskqueue.operations.bounded_reads import bounded_counts, estimate
from django_dbtaskqueue.operations.paging import Page, Slice, page_of, whole_page
from django_dbtaskqueue.operations.verbs import Verb

PAGE = 50  # rows
COUNTING = timedelta(milliseconds=60)  # on the number of rows; after that it is estimated
MOST = 500  # rows of a small list
BEFORE, AFTER = "before", "after"  # the query keys of a page's place
WHOLE = "whole"  # the query key that asks to look to the end, as long as OPERATIONS_TIMEOUT allows
KEPT = ("_changelist_filters", "_facets", "_popup", "e")  # what Django's admin puts into addresses


class ListAdmin(ReadOnlyAdmin):
    """A list with a search, and no page that costs more than the first."""

    filterset: Any  # a FilterSet; its fields are all that may stand in the query string
    empty: Any = ""  # what a list without rows says
    several: Any = ""  # what more than one row is called; empty: by the model's name
    list_template = "list"
    list_across = False  # whether acts can be on all that match

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list, its part that refreshes, or an act on rows of it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self.act(request)
        return show(self, request, self.list_template, lambda: self.list_facts(request))

    def act(self, request: HttpRequest) -> HttpResponse:
        """Do what was posted to the list."""
        return HttpResponseNotAllowed(["GET"])

    def list_verbs(self, request: HttpRequest) -> Sequence[Verb]:
        """Return what the user can do to rows of the list."""
        return ()

    def filtered(self, request: HttpRequest) -> Any:
        """Return the bound FilterSet of an address; refuse one with a key that is none of its fields."""
        unknown = set(request.GET) - set(self.filterset.base_filters) - {BEFORE, AFTER, WHOLE, LIVE, *KEPT}
        if unknown:
            raise SuspiciousOperation(f"{self.opts.label} cannot be searched by {', '.join(sorted(unknown))}.")
        return self.filterset(request.GET, queryset=self.get_queryset(request), request=request)

    def selection(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the address selects; none when the search is not understood."""
        filterset = self.filtered(request)
        rows: QuerySet[Any] = filterset.qs if filterset.is_valid() else filterset.queryset.none()
        return rows

    def list_facts(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the list's template shows."""
        filterset = self.filtered(request)
        rows = filterset.qs if filterset.is_valid() else filterset.queryset.none()
        before, after = _id(request, BEFORE), _id(request, AFTER)
        look = self.look(request, filterset, rows.defer(*self.long_columns), before, after)
        found, place = look.slice, before or after
        verbs = self.list_verbs(request)
        names = str(self.opts.verbose_name_plural)
        return {
            "filterset": filterset,
            "has_q": "q" in filterset.filters,
            "narrowed": any(request.GET.get(name) for name in filterset.filters),
            "plain": request.path,
            "here": _address(request),
            "verbs": verbs,
            "slice": found,
            "table": table_of(self, found.rows, caption=names, ticks=bool(verbs)),
            "found": self._number(rows, found, place) if _to_the_end(look) else self._of_window(look, place),
            "looked": _looked(look),
            "whole_url": _address(request, whole=1),
            "empty": self.empty or _("None."),
            **_neighbours(request, found),
        }

    def look(
        self, request: HttpRequest, filterset: Any, rows: QuerySet[Any], before: int | None, after: int | None
    ) -> Page:
        """Return one page of the rows, and how far it was looked for them."""
        if WHOLE in request.GET:
            return whole_page(rows, PAGE, before=before, after=after)
        return page_of(rows, filterset.queryset, PAGE, before=before, after=after)

    def _number(self, rows: QuerySet[Any], found: Slice, place: int | None) -> str:
        """Say how many rows there are: exactly up to 10,000, about above it or when counting took too long."""
        if place is None and found.older is None:
            return self._of(len(found.rows), number_format(len(found.rows)))
        (count,) = bounded_counts([rows], within=COUNTING)
        if count is not None and not count.more:
            return self._of(count.number, str(count))
        rough = estimate(rows)
        if rough is None or (count is not None and rough <= count.number):
            return self._of(2, str(count or "?"))
        return self._of(rough, f"≈ {number_format(_rounded(rough), force_grouping=True)}")

    def _of_window(self, look: Page, place: int | None) -> str:
        """Say how many rows there are of which not all were looked for."""
        number = len(look.slice.rows)
        more = place is not None or look.slice.older is not None or look.first
        return self._of(2 if more else number, f"{number_format(number)}{'+' if more else ''}")

    def _of(self, number: int, text: str) -> str:
        return f"{text} {self.opts.verbose_name if number == 1 else self.several or self.opts.verbose_name_plural}"


class SmallListAdmin(ListAdmin):
    """A list of things there are few of: 500 on one page, in the order of ``ordering``."""

    def look(
        self, request: HttpRequest, filterset: Any, rows: QuerySet[Any], before: int | None, after: int | None
    ) -> Page:
        """All of them."""
        return Page(Slice(list(rows.order_by(*self.ordering)[:MOST]), None, None))


def _to_the_end(look: Page) -> bool:
    return not look.window and not look.first


def _looked(look: Page) -> str:
    """Say how far it was looked, when that was not to the end."""
    if look.window:
        words = _("No index answers this search: for this page %(count)s rows were looked through. Older goes on.")
        return words % {"count": number_format(look.window, force_grouping=True)}
    if look.first:
        words = _("The first %(count)s tasks of each line were looked at; what is being processed stands there.")
        return words % {"count": number_format(look.first, force_grouping=True)}
    return ""


def _rounded(number: int) -> int:
    """Return an estimate to two digits: it knows no more."""
    unit: int = 10 ** max(len(str(number)) - 2, 0)
    return round(number / unit) * unit


def _id(request: HttpRequest, key: str) -> int | None:
    if key not in request.GET:
        return None
    number = id_of(request.GET[key])
    if number is None:
        raise SuspiciousOperation(f"{key}={request.GET[key]!r} is no id.")
    return number


def _address(request: HttpRequest, **changes: int | None) -> str:
    query = request.GET.copy()
    for key in (LIVE, BEFORE, AFTER, *([WHOLE] if WHOLE in changes else [])):
        query.pop(key, None)
    query.update({key: str(value) for key, value in changes.items() if value is not None})
    return f"{request.path}?{query.urlencode()}" if query else request.path


def _neighbours(request: HttpRequest, found: Slice) -> dict[str, str]:
    return {
        "first_url": _address(request),
        "newer_url": _address(request, after=found.newer),
        "older_url": _address(request, before=found.older),
    }
