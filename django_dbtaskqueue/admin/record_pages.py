"""Failed attempts, failure groups, the history, and reports of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.filters import (
    AttemptFilter,
    FailureFilter,
    HistoryFilter,
    ReportFilter,
    text_of,
)
from django_dbtaskqueue.admin.list_pages import ListAdmin, SmallListAdmin
from django_dbtaskqueue.admin.read_only import (
    age_column,
    box,
    box_column,
    json_box,
    number,
    stamp,
)
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AbstractTask, Attempt, FailureGroup, Task
from django_dbtaskqueue.operations.paging import Page
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.report_page import html_file, policy, report_body
from django_dbtaskqueue.operations.serializers import masked_text, message_of, short_error
from django_dbtaskqueue.operations.trends import WINDOWS, FailureStats, stats_of_groups
from django_dbtaskqueue.operations.verbs import TASK_VERBS, Verb


class AttemptAdmin(ListAdmin):
    """Failed attempts."""

    list_display = ("id", "task_link", "queue", "attempt", "exception", "says", "failed")
    list_display_links = ("id",)
    long_columns = ("traceback",)
    filterset = AttemptFilter
    secrets = ("message_box", "traceback_box")
    page_lines = (
        "task_link",
        "location",
        "queue",
        "attempt",
        "total_attempt",
        "poller_instance",
        "started",
        "failed",
        "error_type",
    )

    def filtered(self, request: HttpRequest) -> Any:
        """Search in the task tables that this site shows."""
        return located(super().filtered(request), self.admin_site)

    @admin.display(description=gettext_lazy("task"))
    def task_link(self, attempt: Any) -> str:
        """Link to the task."""
        table = task_tables(self.admin_site).get(attempt.location)
        return self.link(attempt.task_id, self.url(table, "change", attempt.task_id) if table else "")

    @admin.display(description=gettext_lazy("exception"))
    def exception(self, attempt: Any) -> str:
        """Show the class of the exception, without the module."""
        return short_error(attempt.error_type)

    @admin.display(description=gettext_lazy("message"))
    def says(self, attempt: Any) -> str:
        """Its first line."""
        return message_of(attempt.message)

    failed = age_column(gettext_lazy("failed"), "finish_time")

    message_box = box_column(gettext_lazy("message"), "message", box)

    traceback_box = box_column(gettext_lazy("traceback"), "traceback", box)


class TaskHistoryAdmin(ListAdmin):
    """Tasks that left TASKS."""

    filterset = HistoryFilter
    plural = gettext_lazy("tasks in history")
    secrets = ("process_result_box", "payload_box", "result_box", "context_box")
    list_display = ("id", "task_id", "reference", "queue", "status_badge", "says", "created", "finished", "moved")
    list_display_links = ("id", "reference")
    long_columns = ("payload", "result", "context")
    page_lines = (
        "task_id",
        "location",
        "status_badge",
        "queue",
        "reference",
        "attempts",
        "poller_instance",
        "created",
        "started",
        "finished",
        "moved",
    )

    def filtered(self, request: HttpRequest) -> Any:
        """Search in the task tables that this site shows."""
        return located(super().filtered(request), self.admin_site)

    moved = age_column(gettext_lazy("moved"), "moved_time")

    @admin.display(description=gettext_lazy("error"))
    def says(self, task: Any) -> str:
        """Show one line of an error. A result needs the permission to see payloads, on the page of the row."""
        return "" if task.status == Status.COMPLETED else message_of(task.process_result)


def task_tables(site: admin.AdminSite) -> dict[str, type[AbstractTask]]:
    """Return the task tables this admin site shows, by location. A location in a row is looked up here only."""
    shown: Iterable[Any] = site._registry
    return {model._meta.label_lower: model for model in shown if issubclass(model, AbstractTask)}


def located(filterset: Any, site: admin.AdminSite) -> Any:
    """Return the FilterSet with the task tables that the site shows."""
    filterset.locations = tuple(task_tables(site))
    return filterset


def _window(name: str) -> Callable[[Any, Any], str]:
    @admin.display(description=f"{name[:-1]} {name[-1]}")
    def column(_page: Any, group: Any) -> str:
        count = figures(group).counts[name]
        return number(count) if count else "·"

    return column


class FailureGroupAdmin(SmallListAdmin):
    """Failures by queue, exception, line of the project's code, and message."""

    detail_template = "failure"
    filterset = FailureFilter
    ordering = ("-last_seen",)
    empty = gettext_lazy("Nothing has failed.")
    list_display = ("what", "queue", "frame", "in_1h", "in_3h", "in_24h", "in_3d", "in_7d", "first", "last", "tasks")
    list_display_links = ("what",)
    page_lines = ("queue", "error_type", "says", "frame", "first", "last", "tasks", "attempts")

    in_1h, in_3h, in_24h, in_3d, in_7d = map(_window, WINDOWS)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the group with its counts."""
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            fill([found])
        return found

    def read_page(
        self, request: HttpRequest, filterset: Any, rows: QuerySet[Any], before: int | None, after: int | None
    ) -> Page:
        """Return the latest groups with their counts."""
        found = super().read_page(request, filterset, rows, before, after)
        fill(found.slice.rows)
        return found

    @admin.display(description=gettext_lazy("failure"))
    def what(self, group: Any) -> str:
        """Show the exception and its message."""
        message = masked_text(group.message)
        return f"{short_error(group.error_type)}: {message}" if group.error_type else message or group.fingerprint

    @admin.display(description=gettext_lazy("message"))
    def says(self, group: Any) -> str:
        """Show the message, without the parts that differ between failures."""
        return masked_text(group.message)

    first = age_column(gettext_lazy("first seen"), "first_seen")

    last = age_column(gettext_lazy("last seen"), "last_seen")

    @admin.display(description=gettext_lazy("tasks in ERROR or POISON"))
    def tasks(self, group: Any) -> str:
        """Link to its tasks in ERROR or POISON."""
        found = figures(group).open
        query = text_of(fingerprint=group.fingerprint)
        return self.link(found, self.url(Task, "changelist", q=query)) if found else str(found)

    @admin.display(description=gettext_lazy("failed attempts"))
    def attempts(self, group: Any) -> str:
        """Link to its failed attempts."""
        return self.link(_("all"), self.url(Attempt, "changelist", fingerprint=group.fingerprint))

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Return the verbs for all its tasks in ERROR."""
        fitting = [verb for verb in TASK_VERBS.values() if Status.ERROR in verb.sources]
        return [verb for verb in fitting if can_operate(request.user, verb, row.queue)]

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Add the counts, and the address that actions on the group are posted to."""
        query = text_of(fingerprint=row.fingerprint, status=Status.ERROR)
        windows = figures(row).counts.items()
        return {"act_url": self.url(Task, "changelist", q=query), "windows": windows, "title": self.what(row)}


def fill(groups: Sequence[FailureGroup]) -> None:
    """Read the figures of all groups of a page in one query."""
    if groups:
        for group, found in zip(groups, stats_of_groups(groups, str(groups[0]._state.db)), strict=True):
            vars(group)["figures"] = found


def figures(group: FailureGroup) -> FailureStats:
    """Return what ``fill`` read."""
    found: FailureStats = vars(group)["figures"]
    return found


CHART_FIGURES = ("over_time", "curve")
MAX_FIGURES_CHARS = 20_000  # longer figures are not shown as JSON


class PipelineReportAdmin(ListAdmin):
    """The reports of the pipeline's jobs."""

    detail_template = "report"
    filterset = ReportFilter
    empty = gettext_lazy("No report yet. Make one with: manage.py runtaskpipeline report")
    list_display = ("id", "kind", "made", "span_from", "span_to", "says")
    list_display_links = ("id", "kind")
    long_columns = ("data",)
    page_lines = ("kind", "made", "span_from", "span_to", "summary", "location")

    def get_urls(self) -> list[URLPattern]:
        """Add the address of the report as a file."""
        view = self.admin_site.admin_view(self.file)
        own = path("<int:pk>/report/", view, name="dbtaskqueue_pipelinereport_report")
        return [own, *super().get_urls()]

    def file(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Return the report as a file to save: in a sandbox, in which only the file's own scripts run."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_queryset(request).filter(pk=pk).first()
        try:
            html = html_file(row.kind, row.data) if row else ""
        except ValueError as error:
            raise Http404(str(error)) from error
        if not html:
            raise Http404
        return HttpResponse(html, headers={"Content-Security-Policy": f"sandbox allow-scripts; {policy()}"})

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Add the report, the address of its file, and its figures without those of the charts."""
        figures = json_box({key: row.data[key] for key in row.data if key not in CHART_FIGURES} or None)
        return {
            "report": report_body(row.kind, row.data),
            "report_url": self.url(self.model, "report", row.pk),
            "figures": figures if len(figures) <= MAX_FIGURES_CHARS else "",
        }

    made = age_column(gettext_lazy("made"), "create_time")

    @admin.display(description=gettext_lazy("from"))
    def span_from(self, report: Any) -> str:
        """Where the time it is about begins."""
        return stamp(report.since)

    @admin.display(description=gettext_lazy("to"))
    def span_to(self, report: Any) -> str:
        """Where it ends."""
        return stamp(report.until)

    @admin.display(description=gettext_lazy("summary"))
    def says(self, report: Any) -> str:
        """Its first line."""
        return message_of(report.summary)
