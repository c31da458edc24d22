"""What all pages share: navigation, the part that refreshes, a statement timeout, and that nobody edits a row."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import wraps
from typing import Any, ClassVar
from urllib.parse import quote

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote as quoted_key, unquote
from django.core.exceptions import ImproperlyConfigured, PermissionDenied, ValidationError
from django.db.models import AutoField, Model, QuerySet
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseNotModified
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, reverse
from django.utils.html import format_html
from django.utils.http import parse_etags, urlencode
from django.utils.text import capfirst
from django.utils.translation import gettext as _, gettext_lazy, pgettext_lazy

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.core.context import set_inside, shown_database
from django_dbtaskqueue.core.exceptions import SearchTooSlow, TaskQueueError
from django_dbtaskqueue.db import standby
from django_dbtaskqueue.db.session import Session, alias_for, is_task_table, migrated, model_named, task_aliases
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.permissions import APP, VIEW_PAYLOAD, Actor, Text, V, Verb, narrow
from django_dbtaskqueue.operations.serializers import is_storable

REFRESH_INTERVALS_S = (2, 5, 15, 60)
LIVE_KEY = "_live"  # the query key that asks for the part of a page that refreshes
DATABASE_KEY = "database"  # the query key that names the database that a page is about, if it is not the common one
# These differ between two responses with the same facts: ages, which the browser keeps up to date, and tokens.
VOLATILE_HTML = re.compile(rb'(<time[^>]*dbtq-ago[^>]*>)[^<]*|<input type="hidden" name="csrfmiddlewaretoken"[^>]*>')
MAIN_ENTRIES = 4  # that stand beside "More", not behind it
NAV_ENTRIES = (  # the key after "g", the model whose list it is, and the text of the link
    ("o", "overview", gettext_lazy("Overview")),
    ("t", "task", gettext_lazy("Tasks")),
    ("f", "failuregroup", gettext_lazy("Failures")),
    ("q", "queue", gettext_lazy("Queues")),
    ("p", "poisontask", gettext_lazy("Poison")),
    ("e", "attempt", gettext_lazy("Failed attempts")),
    ("m", "temporarytask", gettext_lazy("Temporary tasks")),
    ("s", "schedule", gettext_lazy("Schedules")),
    ("w", "batch", gettext_lazy("Batches")),
    ("l", "poller", gettext_lazy("Pollers")),
    ("d", "doctor", gettext_lazy("Doctor")),
    ("b", "bulkoperation", gettext_lazy("Bulk operations")),
    ("a", "auditentry", gettext_lazy("Audit")),
    ("h", "taskhistory", pgettext_lazy("tab", "History")),
    ("r", "pipelinereport", gettext_lazy("Reports")),
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


def address_here(path: str, **query: int | str) -> str:
    """Return the address of a page with its query, on the database that the page shown is about."""
    query = {**({DATABASE_KEY: chosen} if (chosen := shown_database.get()) else {}), **query}
    return f"{path}?{urlencode(query)}" if query else path


def nav_entries(request: HttpRequest, site: admin.AdminSite, here: str | None) -> Iterator[dict[str, object]]:
    shown = {model._meta.model_name: page for model, page in site._registry.items() if model._meta.app_label == APP}
    for place, (key, model, label) in enumerate(NAV_ENTRIES):
        if model in shown and shown[model].has_module_permission(request):
            url = address_here(reverse(f"admin:{APP}_{model}_changelist", current_app=site.name))
            yield {"key": key, "label": label, "main": place < MAIN_ENTRIES, "url": url, "current": model == here}


def list_in_order(site: admin.AdminSite) -> None:
    """Let the index and the sidebar of a site list our pages in the order of the navigation."""
    by_name, places = site.get_app_list, {model: place for place, (_key, model, _label) in enumerate(NAV_ENTRIES)}

    def get_app_list(request: HttpRequest, app_label: str | None = None) -> list[Any]:
        apps = by_name(request, app_label)
        for ours in (app["models"] for app in apps if app["app_label"] == APP):
            ours.sort(key=lambda one: places.get(one["model"]._meta.model_name, len(places)))
        return apps

    site.get_app_list = get_app_list  # type: ignore[method-assign]


def frame_of(page: "ReadOnlyAdmin", request: HttpRequest) -> dict[str, Any]:
    site = page.admin_site
    texts = {  # what the browser fills in
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
    return {
        **site.each_context(request),
        "shown_database": shown_database.get(),
        "plain": address_here(request.path),
        "nav_entries": list(nav_entries(request, site, page.opts.model_name)),
        "intervals": REFRESH_INTERVALS_S,
        "keys": SHORTCUTS,
        "texts": json.dumps(texts),
        "opts": page.opts,
        "page": page,
        "title": capfirst(str(page.opts.verbose_name_plural)),
    }


WROTE_COOKIE = "dbtaskqueue_wrote"
OWN_WRITES_S = 10  # after a change a user reads from the primary this long, so that each page shows the change


def show_page(
    page: "ReadOnlyAdmin", request: HttpRequest, templates: Sequence[str], context: Callable[[], Mapping[str, Any]]
) -> HttpResponse:
    """Return a page or its part that refreshes, by the first template that is there; statements have a time limit."""
    request.current_app = page.admin_site.name
    live = LIVE_KEY in request.GET
    whole, part = ([f"admin/dbtaskqueue/{one}{end}.html" for one in templates] for end in ("", "_live"))
    alias = page.get_queryset(request).db
    try:
        with statement_timeout(alias):
            as_of, names = Session.on(alias).now(), task_aliases()
            filled = {
                **({"opts": page.opts, "page": page} if live else frame_of(page, request)),
                "live_template": part,
                "as_of": as_of,
                "where_read": standby.where_read(),
                "databases": [(name, page.url(page.model, "changelist", database=name)) for name in names if names[1:]],
                **context(),
            }
            response = TemplateResponse(request, part if live else whole, filled).render()
            return _fragment(request, response, as_of) if live else response
    except SearchTooSlow:
        message = _("The database did not answer in time, and the question was given up.")
        return _no_answer(page, request, {"title": _("This takes too long"), "message": message})


def when_migrated(page: "ReadOnlyAdmin", view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Return a view that says what is wrong: tables, settings, permissions. It reads from a standby if there is one."""

    @wraps(view)
    def entry(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            chosen = request.GET.get(DATABASE_KEY, "")
            with migrated(), set_inside(shown_database, chosen) if chosen else nullcontext():
                if chosen and page.admin_site.has_permission(request) and chosen not in task_aliases():
                    raise Http404(f"No queue has tasks on the database {chosen!r}.")
                if request.method == "GET":
                    own_writes = WROTE_COOKIE in request.COOKIES
                    return standby.read_standby(lambda: view(request, *args, **kwargs), own_writes=own_writes)
                response = view(request, *args, **kwargs)
                if standby.read_aliases():
                    response.set_cookie(WROTE_COOKIE, "1", max_age=OWN_WRITES_S, httponly=True, samesite="Lax")
                return response
        except ImproperlyConfigured as error:
            return _no_answer(page, request, {"message": str(error)})
        except PermissionDenied as error:
            if not error.args:
                raise
            return _no_answer(page, request, {"message": str(error)}, status=403)

    return entry


def _no_answer(
    page: "ReadOnlyAdmin", request: HttpRequest, facts: dict[str, Any], *, status: int = 503
) -> HttpResponse:
    filled = {**frame_of(page, request), **facts}
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


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # Django cannot say the type of its rows
    """A list and a detail page for tables of any size. No user adds, changes or deletes a row by hand."""

    actions: Any = None
    ordering = ("-pk",)
    show_facets = admin.ShowFacets.NEVER  # a full count per choice
    long_columns: tuple[str, ...] = ()  # not read for a list
    secrets: tuple[str, ...] = ()  # boxes for users who may see payloads
    page_lines: tuple[str, ...] = ()  # facts on the page of a row
    hints: ClassVar[dict[str, Text]] = {}  # what a column's head says when it is pointed at
    list_template = "list"
    detail_template = "detail"
    row_keys: tuple[str, ...] = ()  # by which the forms of a row's page name it, beside those of the verbs

    def _never(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    has_add_permission = has_change_permission = has_delete_permission = _never

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows the user may view, each with the database's time as ``clock``: the server's may differ."""
        rows: QuerySet[Any] = super().get_queryset(request).annotate(clock=Now())
        return narrow(rows.using(alias_for("", None, write=False)), viewer(request))

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        if "view" in self.opts.default_permissions:
            return bool(super().has_view_permission(request, obj))
        return request.user.has_perm(f"{APP}.view_{self.model._meta.concrete_model._meta.model_name}")

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def get_urls(self) -> list[URLPattern]:
        found = super().get_urls()
        for pattern in found:
            pattern.callback = when_migrated(self, pattern.callback)
        return found

    def url(self, model: type[Model], page: str, *args: int | str, **query: int | str) -> str:
        """Return the address of a page of this admin site; empty when the site does not show that model."""
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}"
        try:
            path = reverse(name, args=[quoted_key(arg) for arg in args], current_app=self.admin_site.name)
        except NoReverseMatch:
            return ""
        return address_here(path, **query) if query or shown_database.get() else path

    def task_url(self, location: str, pk: int) -> str:
        """Return the address of a task's page; empty also where SQL wrote a location that is no task table."""
        return self.url(model_named(location), "change", pk) if is_task_table(location) else ""

    def link(self, text: object, address: str) -> str:
        """Return a link, or the bare text when there is no address; a dash for None."""
        if text is None:
            return cells.EMPTY_VALUE
        return format_html('<a href="{}">{}</a>', address, text) if address else str(text)

    def page_of(self, row: Model) -> str:
        return self.url(self.model, "change", self.key(row))

    def key(self, row: Any) -> int | str:
        """Return what names a row in the address of its page."""
        return row.pk  # type: ignore[no-any-return]

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the row; None for an id that no row can have."""
        try:
            key = self.opts.pk.to_python(object_id)
        except ValidationError:
            return None
        return self.get_queryset(request).filter(pk=key).first() if is_storable(object_id) else None

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        """Add to the rows of a list, or to the row of a page, what is shown of them: one query for all of them."""

    # -- the list ------------------------------------------------------------------------------------------------------

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method != "POST":
            return show_page(self, request, (self.list_template, "list"), lambda: self.list_context(request))
        try:
            return self.act(request)
        except TaskQueueError as error:
            return self.reply(request, str(error), messages.ERROR)

    def reply(
        self, request: HttpRequest, text: str, level: int = 0, address: str = "", *, changed: object = True
    ) -> HttpResponse:
        """Show a message on the next page: that of ``address``, or where the action began."""
        self.message_user(request, text, level or (messages.SUCCESS if changed else messages.WARNING))
        return redirect(address or self.back(request) or request.get_full_path())

    def act(self, request: HttpRequest) -> HttpResponse:
        return HttpResponseNotAllowed(["GET"])

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        return {}

    # -- the page of one row -----------------------------------------------------------------------------------------

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        return ()

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        return {}

    def page_fields(self, row: Any) -> Sequence[str]:
        return self.page_lines

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        alias, _colon, number = unquote(object_id).rpartition(":")
        if number and isinstance(self.opts.pk, AutoField) and alias in task_aliases():
            # As lists of several databases, and Django's log, name a row (``row_key``)
            return redirect(self.url(self.model, "change", number, database=alias))
        row: Any = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, row) or request.method == "POST":
            raise PermissionDenied
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)  # type: ignore[attr-defined, no-any-return]
        return show_page(self, request, (self.detail_template, "detail"), lambda: self._detail(request, row))

    def _detail(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        self.prepare(request, [row])
        seen = may_see(request, row)
        return {
            "title": str(row),
            "original": row,
            "key": self.key(row),
            "is_page_of_a_row": True,
            "verbs": self.page_verbs(request, row),
            "act_url": self.url(self.model, "changelist"),
            "log_url": "" if shown_database.get() else self.url(self.model, "history", self.key(row)),
            "facts": [self._fact(row, name) for name in self.page_fields(row)],
            "boxes": [self._fact(row, name) for name in self.secrets] if seen else [],
            "withheld": bool(self.secrets) and not seen,
            **self.page_facts(request, row),
        }

    def _fact(self, row: Any, name: str) -> tuple[str, Any, str]:
        if method := getattr(self, name, None):
            return str(method.short_description), method(row), name
        field: Any = self.opts.get_field(name)
        value = getattr(row, name)
        text = cells.stamp(value) if isinstance(value, datetime) else value
        return str(field.verbose_name), cells.EMPTY_VALUE if text in (None, "") else text, name

    def back(self, request: HttpRequest) -> str:
        """Return the page of the row if the action began there; empty if it began on the list."""
        keys = (ACTION_CHECKBOX_NAME,) if request.POST.get("origin") == "page" else self.row_keys
        named = [request.POST[key] for key in keys if key in request.POST]
        return self.url(self.model, "change", named[0]) if named else ""

    status_badge = cells.column(gettext_lazy("status"), lambda row: cells.status_badge(row.status))
    attempts = cells.column(gettext_lazy("attempts"), lambda row: f"{row.attempt}/{row.max_attempts}")
    created = cells.age_column(gettext_lazy("created"), "create_time")
    started = cells.age_column(gettext_lazy("started"), "start_time")
    finished = cells.age_column(gettext_lazy("finished"), "finish_time")
    payload_box = cells.field_column(gettext_lazy("payload"), "payload", cells.json_box)
    result_box = cells.field_column(gettext_lazy("result"), "result", cells.json_box)
    context_box = cells.field_column(gettext_lazy("context"), "context", cells.json_box)
    process_result_box = cells.field_column(gettext_lazy("process result"), "process_result", cells.box)


def viewer(request: HttpRequest) -> Actor:
    """Return the user of a request, one object for the whole request."""
    found: Actor = vars(request).setdefault("dbtaskqueue_viewer", Actor(request.user, "admin"))
    return found


def permitted(request: HttpRequest, verbs: Iterable[V], queue: str | None = None) -> list[V]:
    return [verb for verb in verbs if viewer(request).may(verb, queue)]


def may_see(request: HttpRequest, row: Any = None) -> bool:
    """Return whether the user may see payloads, results and tracebacks: of a row's queue, or of any queue."""
    return viewer(request).may(VIEW_PAYLOAD, getattr(row, "queue", None))
