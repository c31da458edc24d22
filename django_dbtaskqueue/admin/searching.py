"""The search of the task list as a page shows it: its text, a chip for each term, links that search."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.db import router
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from django_dbtaskqueue.admin.base import id_of
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import SavedSearch
from django_dbtaskqueue.operations.search.parse import QUALIFIERS, Search, Term, to_text
from django_dbtaskqueue.operations.search.values import Match

MOST_VIEWS = 100  # saved searches on a page
LONGEST_NAME = 100
EXAMPLES = (
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


def facts(filterset: Any, path: str) -> dict[str, Any]:
    """Return what the search form shows of a bound ``TaskFilter``."""
    search: Search = filterset.search
    return {
        "text": to_text(search) if search else filterset.data.get("q", ""),
        "chips": [(term.text, _without(search, term, path)) for term in search.terms],
        "faults": [fault for faults in filterset.errors.values() for fault in faults],
        "examples": [{"text": text, "query": urlencode({"q": text})} for text in EXAMPLES],
        "qualifiers": QUALIFIERS.values(),
    }


def saved_views(user: Any, alias: str) -> list[dict[str, Any]]:
    """Return the searches the user saved, and those shared by others, by name."""
    name = user.get_username()
    rows = SavedSearch.objects.using(alias).filter(Q(owner=name) | Q(shared=True)).order_by("name", "pk")[:MOST_VIEWS]
    return [
        {"pk": row.pk, "name": row.name, "own": row.owner == name, "query": urlencode({"q": row.query})} for row in rows
    ]


def change_views(page: Any, request: HttpRequest) -> HttpResponse:
    """Save the search of the address under a name, or forget one of the user's own."""
    mine = SavedSearch.objects.using(router.db_for_write(SavedSearch)).filter(owner=request.user.get_username())
    if "forget_view" in request.POST:
        mine.filter(pk=id_of(request.POST["forget_view"]) or 0).delete()
        return HttpResponseRedirect(request.get_full_path())
    name = request.POST.get("view_name", "").strip()[:LONGEST_NAME]
    search = page.search_of(request)
    if not name or not search:
        page.message_user(request, _("Give a search and a name for it."), messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())
    shared = request.POST.get("view_shared") == "1"
    mine.update_or_create(
        owner=request.user.get_username(), name=name, defaults={"query": to_text(search), "shared": shared}
    )
    page.message_user(request, _("Saved as %(name)s.") % {"name": name}, messages.SUCCESS)
    return HttpResponseRedirect(request.get_full_path())


def _without(search: Search, term: Term, path: str) -> str:
    rest = Search(tuple(one for one in search.terms if one is not term))
    return f"{path}?{urlencode({'q': to_text(rest)})}" if rest else path
