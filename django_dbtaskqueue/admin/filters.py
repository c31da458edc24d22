"""What the lists can be searched by, and the search form of the task list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import django_filters
from django import forms
from django.contrib import messages
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import AnonymousUser
from django.db import router
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.page_actions import TaskPage
from django_dbtaskqueue.admin.read_only import id_of
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.models import SavedSearch
from django_dbtaskqueue.models.operations import STATES
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, Term, to_text
from django_dbtaskqueue.operations.search.values import Match

if TYPE_CHECKING:

    class FilterSet:
        """The class of django-filter, which publishes no types."""

        def __init__(self, data: Any, *, queryset: Any, request: Any) -> None: ...

else:
    FilterSet = django_filters.FilterSet


class TaskIdFilter(FilterSet):
    """Rows about a task, by its id."""

    task_id = django_filters.CharFilter(label=gettext_lazy("Task"), method="of_task")
    locations: tuple[str, ...] = ()  # the tables that an admin site shows

    def of_task(self, rows: QuerySet[Any], _name: str, value: str) -> QuerySet[Any]:
        task_id = id_of(value.strip())
        # With the locations, because the index begins with them.
        return rows.none() if task_id is None else rows.filter(location__in=self.locations, task_id=task_id)


class AttemptFilter(TaskIdFilter):
    fingerprint = django_filters.CharFilter(label=gettext_lazy("Failure group"))


class HistoryFilter(TaskIdFilter):
    """Tasks that left TASKS."""

    queue = django_filters.CharFilter(label=gettext_lazy("Queue"))
    status = django_filters.ChoiceFilter(
        label=gettext_lazy("Status"),
        choices=[(str(status), str(status)) for status in TERMINAL],
        empty_label=gettext_lazy("any"),
    )
    reference = django_filters.CharFilter(label=gettext_lazy("Reference"))


class FailureFilter(FilterSet):
    queue = django_filters.CharFilter(label=gettext_lazy("Queue"))
    error_type = django_filters.CharFilter(label=gettext_lazy("Exception"), lookup_expr="icontains")


class AuditFilter(FilterSet):
    actor = django_filters.CharFilter(label=gettext_lazy("Who"))
    verb = django_filters.CharFilter(label=gettext_lazy("Verb"))
    queue = django_filters.CharFilter(label=gettext_lazy("Queue"))


class BulkFilter(FilterSet):
    state = django_filters.ChoiceFilter(label=gettext_lazy("State"), choices=STATES, empty_label=gettext_lazy("any"))
    actor = django_filters.CharFilter(label=gettext_lazy("Who"))


class ReportFilter(FilterSet):
    kind = django_filters.CharFilter(label=gettext_lazy("Job"))


class NameFilter(FilterSet):
    """Rows with a name, by a part of it."""

    name = django_filters.CharFilter(
        label=gettext_lazy("Name"), lookup_expr="icontains", widget=forms.TextInput(attrs={"type": "search"})
    )


MAX_SAVED_SEARCHES = 100  # on a page
MAX_SEARCH_NAME_LENGTH = 100
SEARCH_EXAMPLES = (
    "status:ERROR",
    "is:stale",
    "queue:claims age:>10m",
    "error:Timeout",
    "attempt:>=3",
    "payload.carrier:UA",
    "-queue:bulk",
)


def text_of(**values: Any) -> str:
    """Return a search for exact values, such as ``text_of(queue="claims", status="ERROR")``."""
    return to_text(Search(tuple(Term(name, (Match("=", str(value)),)) for name, value in values.items())))


def statuses_of(search: Search) -> set[str]:
    """Return the statuses that a search can find."""
    found = {str(status) for status in Status}
    for term in search.terms:
        if term.name == "status":
            named = {match.value for match in term.matches}
            found = found - named if term.negated else found & named
    return found


def search_context(filterset: Any, path: str) -> dict[str, Any]:
    """Return what the search form shows of a bound ``TaskFilter``."""
    search: Search = filterset.search
    return {
        "text": to_text(search) if search else filterset.data.get("q", ""),
        "chips": [(term.text, _without(search, term, path)) for term in search.terms],
        "errors": [error for errors in filterset.errors.values() for error in errors],
        "examples": [{"text": text, "query": urlencode({"q": text})} for text in SEARCH_EXAMPLES],
        "qualifiers": QUALIFIERS.values(),
    }


def saved_searches(user: AbstractBaseUser | AnonymousUser, alias: str) -> list[dict[str, Any]]:
    """Return the searches the user saved, and those shared by others, by name."""
    name = user.get_username()
    rows = (
        SavedSearch.objects.using(alias)
        .filter(Q(owner=name) | Q(shared=True))
        .order_by("name", "pk")[:MAX_SAVED_SEARCHES]
    )
    return [
        {"pk": row.pk, "name": row.name, "own": row.owner == name, "query": urlencode({"q": row.query})} for row in rows
    ]


def change_saved_searches(page: TaskPage, request: HttpRequest) -> HttpResponseRedirect:
    """Save the search of the address under a name, or delete a saved search of the user."""
    mine = SavedSearch.objects.using(router.db_for_write(SavedSearch)).filter(owner=request.user.get_username())
    if "forget_view" in request.POST:
        mine.filter(pk=id_of(request.POST["forget_view"]) or 0).delete()
        return HttpResponseRedirect(request.get_full_path())
    name = request.POST.get("view_name", "").strip()[:MAX_SEARCH_NAME_LENGTH]
    search = page.search_of(request)
    if not name or not search:
        return page.reply(request, _("Give a search and a name for it."), messages.ERROR)
    shared = request.POST.get("view_shared") == "1"
    mine.update_or_create(
        owner=request.user.get_username(), name=name, defaults={"query": to_text(search), "shared": shared}
    )
    return page.reply(request, _("Saved as %(name)s.") % {"name": name}, messages.SUCCESS)


def _without(search: Search, term: Term, path: str) -> str:
    rest = Search(tuple(one for one in search.terms if one is not term))
    return f"{path}?{urlencode({'q': to_text(rest)})}" if rest else path
