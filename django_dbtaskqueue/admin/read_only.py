"""Read-only admin classes, and how they show values. Everything from a row is escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import NoReverseMatch, URLPattern, reverse
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.frame import show, when_migrated
from django_dbtaskqueue.core.context import standbys
from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import is_task_table, model_named
from django_dbtaskqueue.operations.permissions import VIEW_PAYLOAD, Actor, Verb, can_operate, narrow
from django_dbtaskqueue.operations.serializers import is_storable, message_of

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

V = TypeVar("V", bound=Verb)
MAX_ID = 2**63 - 1
EMPTY_VALUE = "-"
MAX_UNCUT = 16  # characters that each column has room for
STATUS_ICONS = {
    Status.CREATED: "○",
    Status.PROCESSING: "◐",
    Status.COMPLETED: "✓",
    Status.ERROR: "✕",
    Status.POISON: "◆",
}


def badge(kind: str, icon: str, word: object) -> SafeString:
    """Return an icon and a word in the colour of ``kind``."""
    return format_html(
        '<span class="dbtq-badge dbtq-{}"><span class="dbtq-icon" aria-hidden="true">{}</span>{}</span>',
        kind,
        icon,
        word,
    )


def status_badge(status: str) -> SafeString:
    """Return a status as icon, word and colour."""
    known = status in STATUS_ICONS
    return badge(status.lower() if known else "unknown", STATUS_ICONS[Status(status)] if known else "?", status)


def local(value: datetime) -> datetime:
    return localtime(value) if value.tzinfo else value


def stamp(value: datetime | None, text: str | None = None, *, ages: bool = False) -> str:
    """Return a time as ``<time>``: to the second, or as ``text`` with the full time as its title.

    With ``ages`` the text is an age, which the browser keeps up to date.
    """
    if value is None:
        return EMPTY_VALUE
    shown = local(value)
    exact = f"{shown:%Y-%m-%d %H:%M:%S%z}"
    return format_html(
        '<time class="dbtq-time{}" datetime="{}" title="{}">{}</time>',
        " dbtq-ago" if ages else "",
        value.isoformat(),
        exact,
        exact[: len("2026-11-20 08:00:00")] if text is None else text,
    )


def ago(value: datetime | None, now: datetime) -> str:
    """Return how long ago a time was, or in how long it will be."""
    if value is None:
        return EMPTY_VALUE
    age = timedelta(seconds=int(abs(now - value).total_seconds()))  # as the browser shows it
    words = _("%(time)s ago") if value <= now else _("in %(time)s")
    return stamp(value, words % {"time": format_duration(age, rough=True)}, ages=True)


def box(text: str | None) -> str:
    """Return a long text in a box that scrolls, its secrets masked."""
    return _box(masked_text(text)) if text else EMPTY_VALUE


def json_box(value: Any) -> str:
    """Return a JSON value, indented, in a box that scrolls, its secrets masked."""
    return EMPTY_VALUE if value is None else _box(json.dumps(masked(value), indent=2, ensure_ascii=False))


def _box(text: str) -> str:
    return format_html('<pre class="dbtq-box" tabindex="0">{}</pre>', text)


def line_of(task: Any) -> str:
    """Return the progress or the error of a task. A result needs the permission to see payloads, on its page."""
    return "" if task.status == Status.COMPLETED else message_of(task.process_result)


def own_text(text: str) -> SafeString:
    """Return a text that a program wrote: in its own direction, with itself as a title where it may be cut."""
    html = '<bdi title="{0}">{0}</bdi>' if len(text) > MAX_UNCUT else "<bdi>{0}</bdi>"
    return format_html(html, text)


Column = Callable[[Any, Any], str]  # a method of an admin class: the row as text


def column(title: StrOrPromise, show_row: Callable[[Any], object]) -> Column:
    """Return a column that shows what ``show_row`` makes of a row."""

    @admin.display(description=title)
    def cell(_page: object, row: Any) -> str:
        shown = show_row(row)
        return shown if isinstance(shown, str) else str(shown)

    return cell


def age_column(title: StrOrPromise, field: str) -> Column:
    return column(title, lambda row: ago(getattr(row, field), row.clock))


def box_column(title: StrOrPromise, field: str, show_value: Callable[[Any], str]) -> Column:
    """Return a column that shows a long value in a box: ``show_value`` is ``box`` or ``json_box``."""
    return column(title, lambda row: show_value(getattr(row, field)))


def number_column(title: StrOrPromise, field: str) -> Column:
    return column(title, lambda row: number(getattr(row, field)))


def number(value: int | None) -> str:
    """Return a number with thousands separators."""
    return EMPTY_VALUE if value is None else number_format(value, force_grouping=True)


class ReadOnlyAdmin(ModelAdmin):
    """A list and a detail page for tables of any size. No user adds, changes or deletes a row by hand."""

    actions: Any = None
    ordering = ("-pk",)
    show_facets = admin.ShowFacets.NEVER  # a full count per choice
    long_columns: tuple[str, ...] = ()  # not read for a list
    secrets: tuple[str, ...] = ()  # boxes for users who may see payloads
    page_lines: tuple[str, ...] = ()  # facts on the page of a row
    hints: ClassVar[dict[str, StrOrPromise]] = {}  # what a column's head says when it is pointed at
    list_template = "list"
    detail_template = "detail"
    view_permission = ""  # another codename than the model's own

    def _never(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    has_add_permission = has_change_permission = has_delete_permission = _never

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows the user may view, each with the database's time as ``clock``: the server's may differ."""
        rows: QuerySet[Any] = super().get_queryset(request).annotate(clock=Now())
        rows = rows.using(standbys.get().get(rows.db, rows.db))
        return narrow(rows, viewer(request))

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Check the model's own permission, or ``view_permission``."""
        if not self.view_permission:
            return bool(super().has_view_permission(request, obj))
        return request.user.has_perm(f"{self.opts.app_label}.{self.view_permission}")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show the page in the index to users who may see it."""
        return self.has_view_permission(request)

    def get_urls(self) -> list[URLPattern]:
        """Wrap each view: where the tables are missing it says so."""
        found = super().get_urls()
        for pattern in found:
            pattern.callback = when_migrated(self, pattern.callback)
        return found

    def url(self, model: type[Model], page: str, *args: int | str, **query: int | str) -> str:
        """Return the address of a page of this admin site; empty when the site does not show that model."""
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}"
        try:
            address = reverse(name, args=[quote(arg) for arg in args], current_app=self.admin_site.name)
        except NoReverseMatch:
            return ""
        return f"{address}?{urlencode(query)}" if query else address

    def task_url(self, location: str, pk: int) -> str:
        """Return the address of a task's page; empty also where SQL wrote a location that is no task table."""
        return self.url(model_named(location), "change", pk) if is_task_table(location) else ""

    def link(self, text: object, address: str) -> str:
        """Return a link, or the bare text when there is no address."""
        return format_html('<a href="{}">{}</a>', address, text) if address else str(text)

    def page_of(self, row: Model) -> str:
        return self.url(self.model, "change", row.pk)

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
        """Return the list or its part that refreshes, or do the action that was posted."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self.act(request)
        return show(self, request, self.list_template, lambda: self.list_context(request))

    def reply(self, request: HttpRequest, text: str, level: int, address: str = "") -> HttpResponseRedirect:
        """Show a message on the next page: that of ``address``, or this page again."""
        self.message_user(request, text, level)
        return HttpResponseRedirect(address or request.get_full_path())

    def act(self, request: HttpRequest) -> HttpResponse:
        """Do the action that was posted to the list."""
        return HttpResponseNotAllowed(["GET"])

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return the context of the list's template."""
        return {}

    # -- the page of one row -----------------------------------------------------------------------------------------

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Return the verbs that the page of a row offers."""
        return ()

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return more context for the page's template."""
        return {}

    def page_fields(self, row: Any) -> Sequence[str]:
        """Return the names of the facts that the page shows."""
        return self.page_lines

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Return the page of one row, or its part that refreshes."""
        row: Any = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, row) or request.method == "POST":
            raise PermissionDenied
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)  # type: ignore[attr-defined, no-any-return]
        return show(self, request, self.detail_template, lambda: self._detail(request, row))

    def _detail(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        self.prepare(request, [row])
        seen = may_see(request, row)
        return {
            "title": str(row),
            "original": row,
            "is_page_of_a_row": True,
            "verbs": self.page_verbs(request, row),
            "act_url": self.url(self.model, "changelist"),
            "log_url": self.url(self.model, "history", row.pk),
            "facts": [self._fact(row, name) for name in self.page_fields(row)],
            "boxes": [self._fact(row, name) for name in self.secrets] if seen else [],
            "withheld": bool(self.secrets) and not seen,
            **self.page_facts(request, row),
        }

    def _fact(self, row: Any, name: str) -> tuple[str, Any, str]:
        method = getattr(self, name, None)
        if method:
            return str(method.short_description), method(row), name
        field: Any = self.opts.get_field(name)
        value = getattr(row, name)
        text = stamp(value) if isinstance(value, datetime) else value
        return str(field.verbose_name), EMPTY_VALUE if text in (None, "") else text, name

    def back(self, request: HttpRequest) -> str:
        """Return the page of the row if the action began there; empty if it began on the list."""
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        return self.url(self.model, "change", selected[0]) if request.POST.get("origin") == "page" and selected else ""

    # -- columns that several tables have ----------------------------------------------------------------------------

    status_badge = column(gettext_lazy("status"), lambda row: status_badge(row.status))
    attempts = column(gettext_lazy("attempts"), lambda row: f"{row.attempt}/{row.max_attempts}")
    created = age_column(gettext_lazy("created"), "create_time")
    started = age_column(gettext_lazy("started"), "start_time")
    finished = age_column(gettext_lazy("finished"), "finish_time")
    payload_box = box_column(gettext_lazy("payload"), "payload", json_box)
    result_box = box_column(gettext_lazy("result"), "result", json_box)
    context_box = box_column(gettext_lazy("context"), "context", json_box)
    process_result_box = box_column(gettext_lazy("process result"), "process_result", box)


def viewer(request: HttpRequest) -> Actor:
    """Return the user of a request, one object for the whole request."""
    if not hasattr(request, "dbtaskqueue_viewer"):
        vars(request)["dbtaskqueue_viewer"] = Actor(request.user, "admin")
    found: Actor = vars(request)["dbtaskqueue_viewer"]
    return found


def permitted(request: HttpRequest, verbs: Iterable[V], queue: str | None = None) -> list[V]:
    """Return those of the verbs that the user may use, on a queue or on any."""
    return [verb for verb in verbs if can_operate(request.user, verb, queue)]


def may_see(request: HttpRequest, row: Any = None) -> bool:
    """Return whether the user may see payloads, results and tracebacks: of a row's queue, or of any queue."""
    return can_operate(request.user, VIEW_PAYLOAD, getattr(row, "queue", None))


def id_of(term: str) -> int | None:
    """Return the text as an id, or None if it cannot be one."""
    digits = term.isascii() and term.isdecimal() and len(term) <= len(str(MAX_ID))
    return int(term) if digits and int(term) <= MAX_ID else None
