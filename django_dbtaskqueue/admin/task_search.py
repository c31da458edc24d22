"""The search form of tasks: tabs of statuses, queues and orders to pick, completion, saved searches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import messages
from django.db import router
from django.db.models import F
from django.db.models.functions import Coalesce, Now
from django.http import HttpRequest, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.list_pages import SORT_KEY
from django_dbtaskqueue.admin.read_only import id_of, viewer
from django_dbtaskqueue.core.columns import LONG
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.models import SavedSearch
from django_dbtaskqueue.operations.bounded_reads import ApproxCount
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_counts import NONE_COUNTED, queue_counts, queue_names
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, Term, of_queue, parse, text_of, to_text
from django_dbtaskqueue.operations.search.values import STATE_NAMES
from django_dbtaskqueue.operations.visibility import narrow, visible_names, visible_queues

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

    from django_dbtaskqueue.admin.page_actions import TaskPage

MAX_QUEUES_TO_PICK = 200
MAX_ROWS_OF_TABS = 2000  # that the numbers of the status tabs count in each status
MAX_SAVED_SEARCHES = 100  # of a user, and shared ones on a page
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


@dataclass(frozen=True, slots=True)
class Sort:
    """An order of the list."""

    label: StrOrPromise
    by: tuple[Any, ...]


SORTS = {
    "oldest": Sort(gettext_lazy("oldest first"), ("pk",)),
    "wait": Sort(gettext_lazy("longest waiting first"), (F("ready_time").asc(nulls_last=True), "pk")),
    "run": Sort(
        gettext_lazy("slowest first"),
        ((Coalesce("finish_time", Now()) - F("start_time")).desc(nulls_last=True), "-pk"),
    ),
    "attempts": Sort(gettext_lazy("most attempts first"), ("-total_attempt", "-pk")),
}


def numbers_by_status(page: TaskPage, request: HttpRequest, search: Search) -> dict[str, ApproxCount]:
    """Return how many tasks of the searched queue are in each status; empty if the search has other terms.

    They would be more tasks than the search finds.
    """
    queues, actor = search.queues(), viewer(request)
    others = [term for term in search.terms if term.name != "status"]
    if any(
        one.negated or one.name != "queue" or tuple(match.value for match in one.matches) != queues for one in others
    ):
        return {}
    place = (page.get_queryset(request).db, page.model._meta.concrete_model)
    only = visible_names(queues, actor) if queues else visible_queues(actor)
    counts = queue_counts(place, only, MAX_ROWS_OF_TABS).values()
    return {status: sum((one.statuses[status] for one in counts), NONE_COUNTED) for status in map(str, Status)}


def pickers(
    page: TaskPage, request: HttpRequest, search: Search, numbers: Mapping[str, ApproxCount]
) -> dict[str, object]:
    """Return tabs of the statuses with their numbers, the queues to choose from, and the orders."""
    place = (page.get_queryset(request).db, page.model._meta.concrete_model)
    queues, actor = search.queues(), viewer(request)
    found = statuses_of(search)
    every = len(found) == len(Status)
    tabs = [(_("All"), _of_status(search, None, request.path), "", every)]
    for status in map(str, Status):
        number = str(numbers.get(status, ""))
        tabs.append((status, _of_status(search, status, request.path), number, found == {status} and not every))
    names = sorted(visible_names({*known_queues(), *queue_names(place), *queues}, actor))
    order = request.GET.get(SORT_KEY, "")
    return {
        "tabs": [] if page.base_search else tabs,
        "queue_choices": [(text_of(queue=name).partition(":")[2], name, queues == (name,)) for name in names]
        if len(names) <= MAX_QUEUES_TO_PICK
        else [],
        "sorts": [(key, one.label, key == order) for key, one in SORTS.items()],
        "words": json.dumps(_search_words(names[:MAX_QUEUES_TO_PICK])),
    }


def statuses_of(search: Search) -> set[str]:
    """Return the statuses that a search can find."""
    found = {str(status) for status in Status}
    for term in search.terms:
        if term.name == "status":
            named = {match.value for match in term.matches}
            found = found - named if term.negated else found & named
    return found


def _of_status(search: Search, status: str | None, path: str) -> str:
    """Return the address of a search with another status, or with none."""
    rest = Search(tuple(term for term in search.terms if term.name != "status"))
    found = parse(f"status:{status}") & rest if status else rest
    return f"{path}?{urlencode({'q': to_text(found)})}" if found else path


def _search_words(queues: Sequence[str]) -> dict[str, list[str]]:
    """Return what the search box completes: the qualifiers under "", the values of a qualifier under its name."""
    names = [f"{name}:" for name in QUALIFIERS if name] + [f"{name}." for name in LONG]
    known = {"status": [str(status) for status in Status], "is": list(STATE_NAMES)}
    return {"": names, **known, "queue": [text_of(queue=name).partition(":")[2] for name in queues]}


def search_context(filterset: Any, path: str) -> dict[str, Any]:
    """Return what the search form shows of a bound ``TaskFilter``."""
    search: Search = filterset.search
    shown = search  # the queue that the picker shows is not in the text
    if len(search.queues()) == 1:
        shown = Search(tuple(term for term in search.terms if term != of_queue(search.queues()[0]).terms[0]))
    return {
        "text": to_text(shown) if search else filterset.data.get("q", ""),
        "chips": [(term.text, _without(search, term, path)) for term in search.terms],
        "errors": [error for errors in filterset.errors.values() for error in errors],
        "examples": [{"text": text, "query": urlencode({"q": text})} for text in SEARCH_EXAMPLES],
        "qualifiers": QUALIFIERS.values(),
    }


def saved_searches(actor: Actor, alias: str) -> list[dict[str, Any]]:
    """Return the searches the user saved, then those shared by others, each by name."""
    saved = SavedSearch.objects.using(alias).order_by("name", "pk")
    own = saved.filter(owner=actor.name)[:MAX_SAVED_SEARCHES]
    shared = narrow(saved.filter(shared=True).exclude(owner=actor.name), actor)[:MAX_SAVED_SEARCHES]
    return [
        {"pk": row.pk, "name": row.name, "own": row.owner == actor.name, "query": urlencode({"q": row.query})}
        for row in (*own, *shared)
    ]


def change_saved_searches(page: TaskPage, request: HttpRequest) -> HttpResponseRedirect:
    """Save the search of the address under a name, or delete a saved search of the user."""
    mine = SavedSearch.objects.using(router.db_for_write(SavedSearch)).filter(owner=request.user.get_username())
    if "forget_view" in request.POST:
        mine.filter(pk=id_of(request.POST["forget_view"]) or 0).delete()
        return HttpResponseRedirect(request.get_full_path())
    name = request.POST.get("view_name", "").replace("\0", "").strip()[:MAX_SEARCH_NAME_LENGTH]
    try:
        search = page.search_of(request)
    except SearchError as error:
        return page.reply(request, str(error), messages.ERROR)
    if not name or not search:
        return page.reply(request, _("Give a search and a name for it."), messages.ERROR)
    if mine.count() >= MAX_SAVED_SEARCHES and not mine.filter(name=name).exists():
        words = _("You have %(most)s saved searches. Delete one first.")
        return page.reply(request, words % {"most": MAX_SAVED_SEARCHES}, messages.ERROR)
    shared = request.POST.get("view_shared") == "1"
    mine.update_or_create(
        owner=request.user.get_username(), name=name, defaults={"query": to_text(search), "shared": shared}
    )
    return page.reply(request, _("Saved as %(name)s.") % {"name": name}, messages.SUCCESS)


def _without(search: Search, term: Term, path: str) -> str:
    rest = Search(tuple(one for one in search.terms if one is not term))
    return f"{path}?{urlencode({'q': to_text(rest)})}" if rest else path
