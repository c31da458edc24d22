"""What all pages of the operations area share: navigation, the part that refreshes, and a statement timeout."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from django.contrib.admin import AdminSite
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotModified
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import parse_etags
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy

from django_dbtaskqueue.core.exceptions import SearchTooSlow
from django_dbtaskqueue.db import standby
from django_dbtaskqueue.db.minute_counts import database_now
from django_dbtaskqueue.db.session import Session, migrated
from django_dbtaskqueue.operations.bounded_reads import statement_timeout

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django_stubs_ext import StrOrPromise

    PageAdmin = ModelAdmin[Any]

REFRESH_INTERVALS_S = (2, 5, 15, 60)
LIVE_KEY = "_live"  # the query key that asks for the part of a page that refreshes
# These differ between two responses with the same facts: ages, which the browser keeps up to date, and tokens.
VOLATILE_HTML = re.compile(rb'(<time[^>]*dbtq-ago[^>]*>)[^<]*|<input type="hidden" name="csrfmiddlewaretoken"[^>]*>')


APP_LABEL = "dbtaskqueue"


@dataclass(frozen=True, slots=True)
class NavEntry:
    """A link of the navigation."""

    key: str  # after "g"
    model: str  # whose list it is
    label: StrOrPromise
    main: bool = False  # whether it stands beside "More", not behind it
    url: str = ""
    current: bool = False


NAV_ENTRIES = (
    NavEntry("o", "overview", gettext_lazy("Overview"), main=True),
    NavEntry("t", "task", gettext_lazy("Tasks"), main=True),
    NavEntry("f", "failuregroup", gettext_lazy("Failures"), main=True),
    NavEntry("q", "queue", gettext_lazy("Queues"), main=True),
    NavEntry("p", "poisontask", gettext_lazy("Poison")),
    NavEntry("e", "attempt", gettext_lazy("Failed attempts")),
    NavEntry("m", "temporarytask", gettext_lazy("Temporary tasks")),
    NavEntry("s", "schedule", gettext_lazy("Schedules")),
    NavEntry("w", "batch", gettext_lazy("Batches")),
    NavEntry("l", "poller", gettext_lazy("Pollers")),
    NavEntry("d", "doctor", gettext_lazy("Doctor")),
    NavEntry("b", "bulkoperation", gettext_lazy("Bulk operations")),
    NavEntry("a", "auditentry", gettext_lazy("Audit")),
    NavEntry("h", "taskhistory", pgettext_lazy("tab", "History")),
    NavEntry("r", "pipelinereport", gettext_lazy("Reports")),
)
SHORTCUTS = (
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


def nav_entries(request: HttpRequest, site: AdminSite, here: str | None) -> Iterator[NavEntry]:
    """Yield the pages that the site has and the user may see."""
    shown: dict[str | None, Any] = {
        model._meta.model_name: admin for model, admin in site._registry.items() if model._meta.app_label == APP_LABEL
    }
    for entry in NAV_ENTRIES:
        if entry.model in shown and shown[entry.model].has_module_permission(request):
            url = reverse(f"admin:{APP_LABEL}_{entry.model}_changelist", current_app=site.name)
            yield replace(entry, url=url, current=entry.model == here)


def list_in_order(site: AdminSite) -> None:
    """Let the index and the sidebar of a site list our pages in the order of the navigation."""
    by_name, places = site.get_app_list, {entry.model: place for place, entry in enumerate(NAV_ENTRIES)}

    def get_app_list(request: HttpRequest, app_label: str | None = None) -> list[Any]:
        apps = by_name(request, app_label)
        for ours in (app["models"] for app in apps if app["app_label"] == APP_LABEL):
            ours.sort(key=lambda one: places.get(one["model"]._meta.model_name, len(places)))
        return apps

    site.get_app_list = get_app_list  # type: ignore[method-assign]


def browser_texts() -> str:
    """Return, as JSON, the texts that the browser fills in."""
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


def frame_of(page: PageAdmin, request: HttpRequest) -> dict[str, Any]:
    """Return the context of the frame of a page: navigation, refresh intervals, shortcuts."""
    site = page.admin_site
    return {
        **site.each_context(request),
        "nav_entries": list(nav_entries(request, site, page.opts.model_name)),
        "intervals": REFRESH_INTERVALS_S,
        "keys": SHORTCUTS,
        "texts": browser_texts(),
        "opts": page.opts,
        "page": page,
        "title": capfirst(str(page.opts.verbose_name_plural)),
    }


WROTE_COOKIE = "dbtaskqueue_wrote"
OWN_WRITES_S = 10  # after a change a user reads from the primary this long, so that each page shows the change


def show(
    page: PageAdmin, request: HttpRequest, template: str, context: Callable[[], Mapping[str, Any]], *, status: int = 200
) -> HttpResponse:
    """Return a page, or its part that refreshes when that was asked for.

    ``DBTASKQUEUE["OPERATIONS_TIMEOUT"]`` limits each statement. After that a page says how to narrow the search.
    """
    request.current_app = page.admin_site.name
    live = LIVE_KEY in request.GET
    name = f"admin/dbtaskqueue/{template}{'_live' if live else ''}.html"
    alias = page.get_queryset(request).db

    try:
        with statement_timeout(alias):
            as_of = database_now(Session.on(alias))
            filled = {
                **({"opts": page.opts, "page": page} if live else frame_of(page, request)),
                "as_of": as_of,
                "where_read": standby.where_read(),
                **context(),
            }
            response = TemplateResponse(request, name, filled, status=status).render()
            return _fragment(request, response, as_of) if live else response
    except SearchTooSlow:
        message = _("The database did not answer in time, and the question was given up.")
        return _no_answer(page, request, {"title": _("This takes too long"), "message": message, "plain": request.path})


def when_migrated(page: PageAdmin, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Return a view that says what is wrong: no tables, settings that cannot be read, or what the user may not do.

    A page is read from a standby if there is one.
    """

    @wraps(view)
    def entry(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            with migrated():
                if request.method == "GET":
                    own_writes = WROTE_COOKIE in request.COOKIES
                    return standby.read(lambda: view(request, *args, **kwargs), own_writes=own_writes)
                response = view(request, *args, **kwargs)
                if standby.configured():
                    response.set_cookie(WROTE_COOKIE, "1", max_age=OWN_WRITES_S, httponly=True, samesite="Lax")
                return response
        except ImproperlyConfigured as error:
            return _no_answer(page, request, {"message": str(error)})
        except PermissionDenied as error:
            if not error.args:
                raise
            return _no_answer(page, request, {"message": str(error)}, status=403)

    return entry


def _no_answer(page: PageAdmin, request: HttpRequest, context: dict[str, Any], *, status: int = 503) -> HttpResponse:
    filled = {**frame_of(page, request), **context}
    response = TemplateResponse(request, "admin/dbtaskqueue/too_slow.html", filled, status=status)
    response.headers["Retry-After"] = "60"  # for the browser's automatic refresh
    return response.render()


def _fragment(request: HttpRequest, response: HttpResponse, as_of: datetime) -> HttpResponse:
    digest = hashlib.sha256(VOLATILE_HTML.sub(rb"\1", response.content)).hexdigest()
    etag = f'"{digest[:32]}"'
    if etag in parse_etags(request.headers.get("If-None-Match", "")):
        response = HttpResponseNotModified()
    response.headers["ETag"] = etag
    response.headers["X-As-Of"] = as_of.isoformat()
    if where := standby.where_read():
        response.headers["X-Read-From"] = quote(where)
    response.headers["Cache-Control"] = "private, no-cache"
    return response
