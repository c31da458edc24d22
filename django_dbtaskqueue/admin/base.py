"""What all pages share: nothing is written by hand, nothing is counted to the end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.admin.display import NOTHING, ago, box, json_box, stamp, status_badge
from django_dbtaskqueue.admin.pages import show
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.verbs import VIEW_PAYLOAD, Verb

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

BIGGEST_ID = 2**63 - 1


class ReadOnlyAdmin(ModelAdmin):
    """A list and a detail page without a field to write in, for tables of any size."""

    actions: Any = None
    ordering = ("-pk",)
    show_facets = admin.ShowFacets.NEVER  # a full count per choice
    long_columns: tuple[str, ...] = ()  # not read for a list
    secrets: tuple[str, ...] = ()  # boxes of a page for those who may see payloads
    page_lines: tuple[str, ...] = ()  # what the page of a row shows in lines
    detail_template = "detail"
    view_permission = ""  # another codename than the model's own

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody adds a row by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody changes a row by hand."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody deletes a row by hand."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Every row knows the database's time as ``clock``: the web server's may differ from it."""
        rows: QuerySet[Any] = super().get_queryset(request).annotate(clock=Now())
        return rows

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """By the model's own permission, or by the one of the model a page is about."""
        if not self.view_permission:
            return bool(super().has_view_permission(request, obj))
        return request.user.has_perm(f"{self.opts.app_label}.{self.view_permission}")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Who may see the page finds it in the index."""
        return self.has_view_permission(request)

    def url(self, model: type[Model], page: str, *args: Any, **query: Any) -> str:
        """Return the address of a page of this admin site; empty when the site does not show that model."""
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}"
        try:
            address = reverse(name, args=[quote(arg) for arg in args], current_app=self.admin_site.name)
        except NoReverseMatch:
            return ""
        return f"{address}?{urlencode(query)}" if query else address

    def link(self, text: Any, address: str) -> str:
        """Return a link, or the bare text when there is no address."""
        return format_html('<a href="{}">{}</a>', address, text) if address else str(text)

    def page_of(self, row: Any) -> str:
        """Return the address of the page of a row."""
        return self.url(self.model, "change", row.pk)

    # -- the page of one row -----------------------------------------------------------------------------------------

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Return the verbs that the page of a row offers."""
        return ()

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return what else the page's template shows."""
        return {}

    def page_fields(self, row: Any) -> Sequence[str]:
        """Return the names of what the page shows in lines."""
        return self.page_lines

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The page of one row, or its part that refreshes."""
        row: Any = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, row) or request.method == "POST":
            raise PermissionDenied
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)  # type: ignore[attr-defined, no-any-return]
        return show(self, request, self.detail_template, lambda: self._detail(request, row))

    def _detail(self, request: HttpRequest, row: Any) -> dict[str, Any]:
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
        return str(field.verbose_name), NOTHING if text in (None, "") else text, name

    def back(self, request: HttpRequest) -> str:
        """Return the page of the row when an act began there; empty when it began on the list."""
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        return self.url(self.model, "change", selected[0]) if request.POST.get("origin") == "page" and selected else ""

    # -- columns that several tables have ----------------------------------------------------------------------------

    @admin.display(description=_("status"))
    def status_badge(self, row: Any) -> str:
        """Icon, word and colour."""
        return status_badge(row.status)

    @admin.display(description=_("created"))
    def created(self, row: Any) -> str:
        """How long ago the task was enqueued."""
        return ago(row.create_time, row.clock)

    @admin.display(description=_("started"))
    def started(self, row: Any) -> str:
        """How long ago it was last taken."""
        return ago(row.start_time, row.clock)

    @admin.display(description=_("finished"))
    def finished(self, row: Any) -> str:
        """How long ago it reached its end."""
        return ago(row.finish_time, row.clock)

    @admin.display(description=_("attempts"))
    def attempts(self, row: Any) -> str:
        """Of how many."""
        return f"{row.attempt}/{row.max_attempts}"

    @admin.display(description=_("payload"))
    def payload_box(self, row: Any) -> str:
        """What was enqueued."""
        return json_box(row.payload)

    @admin.display(description=_("result"))
    def result_box(self, row: Any) -> str:
        """What the processor returned."""
        return json_box(row.result)

    @admin.display(description=_("context"))
    def context_box(self, row: Any) -> str:
        """What the caller said of itself."""
        return json_box(row.context)

    @admin.display(description=_("process result"))
    def process_result_box(self, row: Any) -> str:
        """The last result or error, as text."""
        return box(row.process_result)


def may_see(request: HttpRequest, row: Any = None) -> bool:
    """Whether the user may see payloads, results and tracebacks: of a row of some queue, or of any at all."""
    return can_operate(request.user, VIEW_PAYLOAD, getattr(row, "queue", None))


def id_of(term: str) -> int | None:
    """Return the id that was typed, or None when the text is no number that an id can be."""
    digits = term.isascii() and term.isdecimal() and len(term) <= len(str(BIGGEST_ID))
    return int(term) if digits and int(term) <= BIGGEST_ID else None
