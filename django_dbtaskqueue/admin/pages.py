"""What every page of the operations area shares: its way around, the part that refreshes, a bound on its time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse, HttpResponseNotModified
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import parse_etags
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.core.exceptions import SearchTooSlow
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.operations.bounded_reads import statement_timeout

INTERVALS = (2, 5, 15, 60)  # seconds between refreshes that a viewer can choose
LIVE = "_live"  # the query key that asks for the part of a page that refreshes
# What differs between two looks at the same facts: ages, which the browser counts on by itself, and tokens.
CHANGING = re.compile(rb'(<time[^>]*dbtq-ago[^>]*>)[^<]*|<input type="hidden" name="csrfmiddlewaretoken"[^>]*>')


@dataclass(frozen=True, slots=True)
class Place:
    """A page one can go to."""

    key: str  # after "g"
    model: str  # whose list it is
    label: Any
    url: str = ""
    current: bool = False


PLACES = (
    Place("o", "overview", gettext_lazy("Overview")),
    Place("t", "task", gettext_lazy("Tasks")),
    Place("f", "failuregroup", gettext_lazy("Failures")),
    Place("p", "poisontask", gettext_lazy("Poison")),
    Place("q", "queue", gettext_lazy("Queues")),
    Place("l", "poller", gettext_lazy("Pollers")),
    Place("b", "bulkoperation", gettext_lazy("Bulk operations")),
    Place("h", "taskhistory", gettext_lazy("History")),
    Place("a", "auditentry", gettext_lazy("Audit")),
    Place("r", "pipelinereport", gettext_lazy("Reports")),
    Place("d", "doctor", gettext_lazy("Doctor")),
)
KEYS = (
    ("/", gettext_lazy("Search")),
    ("j", gettext_lazy("Next row")),
    ("k", gettext_lazy("Previous row")),
    ("x", gettext_lazy("Tick the row")),
    ("Enter", gettext_lazy("Open the row")),
    ("r", gettext_lazy("Refresh now")),
    ("q", gettext_lazy("Queues")),
    ("?", gettext_lazy("These keys")),
    ("Esc", gettext_lazy("Leave the search box, or close this")),
)


def places(request: HttpRequest, site: AdminSite, here: str) -> Iterator[Place]:
    """Yield the pages this site has and this user may see."""
    shown = {model._meta.model_name: admin for model, admin in site._registry.items() if model._meta.app_label == APP}
    for place in PLACES:
        admin: Any = shown.get(place.model)
        if admin is not None and admin.has_view_permission(request):
            url = reverse(f"admin:{APP}_{place.model}_changelist", current_app=site.name)
            yield Place(place.key, place.model, place.label, url, place.model == here)


APP = "dbtaskqueue"


def words() -> str:
    """Return, as JSON, the texts that the browser puts together by itself."""
    texts = {
        "ago": _("%(time)s ago"),
        "within": _("in %(time)s"),
        "ticked": _("%(number)s ticked"),
        "held": _("not refreshed while rows are ticked"),
        "lost": _("no answer since %(time)s"),
        "gone": _("You are no longer logged in: load the page again."),
        "copied": _("Copied"),
        "time": _("Time"),
        "key": _("g %(key)s"),
    }
    return json.dumps(texts)


def surroundings(request: HttpRequest, site: AdminSite, here: str) -> dict[str, Any]:
    """Return what ``admin/dbtaskqueue/frame.html`` shows around a page."""
    return {
        "places": list(places(request, site, here)),
        "intervals": INTERVALS,
        "keys": KEYS,
        "words": words(),
    }


def show(
    page: Any, request: HttpRequest, template: str, facts: Callable[[], Mapping[str, Any]], *, status: int = 200
) -> HttpResponse:
    """Return a page, or its part that refreshes when that was asked for.

    All it reads is bound by ``DBTASKQUEUE["OPERATIONS_TIMEOUT"]``; a page says how to narrow what takes longer.
    """
    request.current_app = page.admin_site.name
    live = LIVE in request.GET
    name = f"admin/dbtaskqueue/{template}{'_live' if live else ''}.html"
    alias = page.get_queryset(request).db

    def answer() -> HttpResponse:
        as_of = clock(alias)
        context = {**_frame(page, request, live=live), "as_of": as_of, **facts()}
        response = TemplateResponse(request, name, context, status=status).render()
        return _fragment(request, response, as_of) if live else response

    return within_time(page, request, alias, answer)


def within_time(page: Any, request: HttpRequest, alias: str, answer: Callable[[], HttpResponse]) -> HttpResponse:
    """Return ``answer()``, rendered; when a statement of it takes too long, the page that says so."""
    try:
        with statement_timeout(alias):
            return answer()
    except SearchTooSlow:
        return too_slow(page, request)


def clock(alias: str) -> datetime:
    """Return the database's time."""
    session = Session.on(alias)
    return session.time(session.run("SELECT CURRENT_TIMESTAMP", {})[0][0])


def too_slow(page: Any, request: HttpRequest) -> HttpResponse:
    """Return the page that says what to do about a search that takes too long."""
    context = {
        **_frame(page, request, live=False),
        "title": _("This takes too long"),
        "said": _("The database did not answer in time, and the question was given up."),
        "plain": request.path,
    }
    response = TemplateResponse(request, "admin/dbtaskqueue/too_slow.html", context, status=503)
    response.headers["Retry-After"] = "60"  # for the browser's refreshing
    return response.render()


def _frame(page: Any, request: HttpRequest, *, live: bool) -> dict[str, Any]:
    own = {"opts": page.opts, "page": page}
    if live:
        return own
    site = page.admin_site
    around = {**site.each_context(request), **surroundings(request, site, page.opts.model_name)}
    return {**around, **own, "title": capfirst(str(page.opts.verbose_name_plural)), "media": page.media}


def _fragment(request: HttpRequest, response: HttpResponse, as_of: datetime) -> HttpResponse:
    digest = hashlib.sha256(CHANGING.sub(rb"\1", response.content)).hexdigest()
    etag = f'"{digest[:32]}"'
    if etag in parse_etags(request.headers.get("If-None-Match", "")):
        response = HttpResponseNotModified()
    response.headers["ETag"] = etag
    response.headers["X-As-Of"] = as_of.isoformat()
    response.headers["Cache-Control"] = "private, no-cache"
    return response
