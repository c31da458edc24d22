"""What all pages share: nothing is written by hand, nothing is counted to the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue import conf
from django_dbtaskqueue.admin.display import ago, box, json_box, status_badge
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.operations.paginators import BoundedPaginator
from django_dbtaskqueue.operations.verbs import Verb
from django_dbtaskqueue.status import Status

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

BIGGEST_ID = 2**63 - 1
MOST_QUEUES = 500  # choices of the queue filter


class LightChangeList(ChangeList):
    """A list that reads no column that can be long and that it does not show."""

    model_admin: Any

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Leave the long columns out."""
        return super().get_queryset(request, exclude_parameters).defer(*self.model_admin.long_columns)


class ReadOnlyAdmin(ModelAdmin):
    """A list and a detail page without a field to write in, for tables of any size."""

    actions: Any = None
    ordering = ("-id",)
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # a full count per choice
    paginator = BoundedPaginator
    filters_by: tuple[str, ...] = ()  # what may stand in the query string: another column would mean a table scan
    long_columns: tuple[str, ...] = ()

    class Media:
        css = {"all": ("dbtaskqueue/admin.css",)}  # noqa: RUF012 -- Django reads it

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

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """The list that reads no long column."""
        return LightChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only the filters on the page: a hand-made query string cannot scan the table by another column."""
        return lookup in self.filters_by

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

    # -- the page of one row -----------------------------------------------------------------------------------------

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Return the verbs that the page of a row offers."""
        return ()

    def page_facts(self, row: Any) -> dict[str, Any]:
        """Return what else the page's template shows."""
        return {}

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The page of one row."""
        response = super().change_view(request, object_id, form_url, extra_context)
        context: dict[str, Any] = getattr(response, "context_data", None) or {}
        row = context.get("original")
        if row is not None:
            context["verbs"] = self.page_verbs(request, row)
            context |= {"act_url": self.url(self.model, "changelist"), "checkbox_name": ACTION_CHECKBOX_NAME}
            context |= self.page_facts(row)
        return response

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


class StatusFilter(admin.SimpleListFilter):
    """``?status=ERROR``."""

    title = _("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """The five of them."""
        return [(str(status), str(status)) for status in Status]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The tasks in one."""
        return queryset.filter(status=self.value()) if self.value() else queryset


class QueueFilter(admin.SimpleListFilter):
    """``?queue=claims``. Its choices are the queues known by name; no row of the big table is read for them."""

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Queues from settings, from processors and from ``Queue``, and the one just looked at."""
        asked = request.GET.get(self.parameter_name)
        names = {*known_queues(), *([asked] if asked else [])}
        return [(name, name) for name in sorted(names)]

    def has_output(self) -> bool:
        """Show it even for one queue: it says which one."""
        return bool(self.lookup_choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The tasks of one."""
        return queryset.filter(queue=self.value()) if self.value() else queryset


def known_queues() -> set[str]:
    """Return the names of the queues in settings, of processors, and of the first 500 rows of ``Queue``."""
    rows = Queue.objects.order_by("name").values_list("name", flat=True)[:MOST_QUEUES]
    return {*conf.known_queues(), *rows}


def id_of(term: str) -> int | None:
    """Return the id that was typed, or None when the text is no number that an id can be."""
    digits = term.isascii() and term.isdecimal() and len(term) <= len(str(BIGGEST_ID))
    return int(term) if digits and int(term) <= BIGGEST_ID else None
