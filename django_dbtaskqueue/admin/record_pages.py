"""Failed attempts, failure groups, the history, and reports of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import django_filters
from django.apps import apps
from django.contrib import admin
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import DEFAULT_DB_ALIAS
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.translation import gettext as _, gettext_lazy

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import id_of, may_see, permitted, viewer, when_migrated
from django_dbtaskqueue.admin.list_pages import FilterSet, ListAdmin, QueuePickFilter, SmallListAdmin
from django_dbtaskqueue.admin.page_actions import ACTION_ON_ALL_KEY
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AbstractTask, Attempt, FailureGroup, Poller, Task
from django_dbtaskqueue.models.tasks import TERMINAL_VALUES
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.permissions import Verb, narrow
from django_dbtaskqueue.operations.queue_stats import WINDOWS, new_releases, stats_of_groups
from django_dbtaskqueue.operations.report_page import content_policy, html_file, report_body
from django_dbtaskqueue.operations.search import text_of
from django_dbtaskqueue.operations.search.query import since
from django_dbtaskqueue.operations.serializers import message_of, short_error
from django_dbtaskqueue.operations.verbs import TASK_VERBS


class TaskIdFilter(QueuePickFilter):
    """Rows about a task, by its id."""

    task_id = django_filters.CharFilter(label=gettext_lazy("Task"), method="of_task")

    def of_task(self, rows: QuerySet[Any], _name: str, value: str) -> QuerySet[Any]:
        task_id = id_of(value.strip())
        # With the locations, because the index begins with them.
        tables = [model._meta.label_lower for model in apps.get_models() if issubclass(model, AbstractTask)]
        return rows.none() if task_id is None else rows.filter(location__in=tables, task_id=task_id)


class AttemptFilter(TaskIdFilter):
    error_type = django_filters.CharFilter(label=gettext_lazy("Exception"), lookup_expr="icontains")
    fingerprint = django_filters.CharFilter(label=gettext_lazy("Failure group"))


class HistoryFilter(TaskIdFilter):
    status = django_filters.ChoiceFilter(
        label=gettext_lazy("Status"), choices=[(one, one) for one in TERMINAL_VALUES], empty_label=gettext_lazy("any")
    )
    reference = django_filters.CharFilter(label=gettext_lazy("Reference"))


class AttemptAdmin(ListAdmin):
    list_display = ("id", "task_link", "queue", "attempt", "exception", "says", "failed")
    long_columns = ("traceback",)
    filterset = AttemptFilter
    secrets = ("message_box", "traceback_box")
    page_lines = (
        "task_link", "location", "queue", "attempt", "total_attempt", "poller_instance", "started", "failed",
        "error_type",
    )  # fmt: skip

    exception = cells.column(gettext_lazy("exception"), lambda attempt: short_error(attempt.error_type))
    says = cells.column(gettext_lazy("message"), lambda attempt: message_of(attempt.message))
    failed = cells.age_column(gettext_lazy("failed"), "finish_time")
    message_box = cells.box_column(gettext_lazy("message"), "message", cells.box)
    traceback_box = cells.box_column(gettext_lazy("traceback"), "traceback", cells.box)

    @admin.display(description=gettext_lazy("task"))
    def task_link(self, attempt: Any) -> str:
        return self.link(attempt.task_id, self.task_url(attempt.location, attempt.task_id))


class TaskHistoryAdmin(ListAdmin):
    filterset = HistoryFilter
    plural = gettext_lazy("tasks in history")
    secrets = ("process_result_box", "payload_box", "result_box", "context_box")
    list_display = ("id", "task_id", "reference", "queue", "status_badge", "says", "created", "finished", "moved")
    list_display_links = ("id", "reference")
    long_columns = ("payload", "result", "context")
    page_lines = (
        "task_id", "location", "status_badge", "situation", "queue", "reference", "attempts", "poller_instance",
        "created", "started", "finished", "moved",
    )  # fmt: skip

    situation = cells.column(gettext_lazy("now"), lambda task: explain(task).sentence)
    moved = cells.age_column(gettext_lazy("moved"), "moved_time")
    says = cells.column(gettext_lazy("error"), cells.line_of)


def _window(name: str) -> cells.Column:
    def count(group: Any) -> str:
        found = group.figures.failed[name]
        return cells.number(found) if found else "·"

    return cells.column(f"{name[:-1]} {name[-1]}", count)


MAX_NEWS = 4  # links to what is new
MAX_SHOWN_TRACES = 50  # groups of the page with a traceback
MAX_SPOT_VERBS = 2  # buttons of a group in the list; its page has all


def check_since(text: str) -> None:
    """Refuse what is no time as a search has it: ``10:00``, ``1h``, ``2026-11-20``."""
    try:
        since("first_seen", text, DEFAULT_DB_ALIAS)
    except SearchError as error:
        raise ValidationError(str(error)) from None


class FailureFilter(QueuePickFilter):
    error_type = django_filters.CharFilter(label=gettext_lazy("Exception"), lookup_expr="icontains")
    release = django_filters.CharFilter(label=gettext_lazy("Release"))
    new = django_filters.CharFilter(
        label=gettext_lazy("First seen since"), method="first_seen_since", validators=[check_since]
    )
    sort = django_filters.OrderingFilter(
        label=gettext_lazy("Order"),
        choices=[
            ("-last_seen", gettext_lazy("last seen")),
            ("-first_seen", gettext_lazy("first seen")),
            ("release", gettext_lazy("release")),
        ],
        fields=["last_seen", "first_seen", "release"],
        empty_label=None,
    )

    def first_seen_since(self, rows: QuerySet[FailureGroup], _name: str, value: str) -> QuerySet[FailureGroup]:
        return rows.filter(since("first_seen", value, rows.db))


class FailureGroupAdmin(SmallListAdmin):
    """Failures by queue, exception, line of the project's code, and message."""

    detail_template = "failure"
    list_template = "failures"
    filterset = FailureFilter
    ordering = ("-last_seen",)
    empty = gettext_lazy("Nothing has failed.")
    list_display = ("failure", "in_1h", "in_24h", "in_7d", "first", "last", "release", "tasks")
    list_display_links = None
    page_lines = ("queue", "error_type", "says", "pattern", "frame", "first", "last", "release", "tasks", "attempts")

    in_1h, in_3h, in_24h, in_3d, in_7d = map(_window, WINDOWS)

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        """Add links to what is new since the last hour, and since each new release."""
        pollers = narrow(Poller.objects.using(self.get_queryset(request).db), viewer(request))
        times = [(_("the last hour"), "1h")]
        for time, release in new_releases(pollers, WINDOWS["7d"]):
            here = cells.local(time)
            words = _("%(release)s came (%(time)s)") % {"release": release, "time": date_format(here, "D H:i")}
            times.append((words, here.replace(tzinfo=None).isoformat(timespec="seconds")))
        links = [(words, f"{request.path}?{urlencode({'new': time})}") for words, time in reversed(times)]
        return {**super().list_context(request), "news": links[:MAX_NEWS]}

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        traces = newest_traces([group for group in rows[:MAX_SHOWN_TRACES] if may_see(request, group)])
        stats = stats_of_groups([group.pk for group in rows], str(rows[0]._state.db)) if rows else []
        for group, found in zip(rows, stats, strict=True):
            group.figures = found
            group.trace, group.verbs = traces.get(group.pk, ""), self.page_verbs(request, group)[:MAX_SPOT_VERBS]

    @admin.display(description=gettext_lazy("failure"))
    def failure(self, group: Any) -> str:
        """Show the error as a link, where it happens, the newest traceback folded, and what can be done at once."""
        quiet, place = '<div class="quiet">{}</div>', (group.queue, group.frame or cells.EMPTY_VALUE)
        parts = [self.title(group), format_html(quiet, format_html("{} · <code>{}</code>", *place))]
        if group.newest and group.message != group.newest:
            parts.append(format_html(quiet, masked_text(group.message)))
        if group.trace:
            html, name = '<details id="{}"><summary>{}</summary>{}</details>', f"dbtq-trace-{group.pk}"
            parts.append(format_html(html, name, _("Newest traceback"), cells.box(group.trace)))
        parts.append(self.buttons(group))
        return format_html_join("", "{}", ((part,) for part in parts))

    @admin.display(description=gettext_lazy("failure"))
    def title(self, group: Any) -> str:
        is_new = group.first_seen and group.clock - group.first_seen < WINDOWS["1h"]
        shown = self.link(self.what(group), self.page_of(group))
        return format_html("<strong>{}</strong> {}", shown, cells.badge("late", "✱", _("new")) if is_new else "")

    @admin.display(description="")
    def buttons(self, group: Any) -> str:
        if not group.verbs or not group.figures.open:
            return ""
        address = self.url(Task, "changelist", q=text_of(fingerprint=group.fingerprint, status=Status.ERROR))
        html = '<button type="submit" form="dbtq-act" formaction="{}" name="{}" value="{}" class="button">{}…</button> '
        rows = ((address, ACTION_ON_ALL_KEY, verb.name, verb.label) for verb in group.verbs)
        return format_html('<div class="dbtq-spot">{}</div>', format_html_join("", html, rows))

    def what(self, group: Any) -> str:
        message = masked_text(group.newest or group.message)
        return f"{short_error(group.error_type)}: {message}" if group.error_type else message or group.fingerprint

    says = cells.column(gettext_lazy("newest message"), lambda group: masked_text(group.newest))
    pattern = cells.column(gettext_lazy("messages of this kind"), lambda group: masked_text(group.message))
    first = cells.age_column(gettext_lazy("first seen"), "first_seen")
    last = cells.age_column(gettext_lazy("last seen"), "last_seen")

    @admin.display(description=gettext_lazy("tasks in ERROR or POISON"))
    def tasks(self, group: Any) -> str:
        found = group.figures.open
        query = text_of(fingerprint=group.fingerprint)
        return self.link(found, self.url(Task, "changelist", q=query)) if found else str(found)

    @admin.display(description=gettext_lazy("failed attempts"))
    def attempts(self, group: Any) -> str:
        return self.link(_("all"), self.url(Attempt, "changelist", fingerprint=group.fingerprint))

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        return permitted(request, [verb for verb in TASK_VERBS.values() if Status.ERROR in verb.sources], row.queue)

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Add the counts, and the address that actions on the group are posted to."""
        query = text_of(fingerprint=row.fingerprint, status=Status.ERROR)
        return {
            "act_url": self.url(Task, "changelist", q=query),
            "windows": row.figures.failed.items(),
            "title": self.what(row),
            "boxes": [(_("newest traceback"), cells.box(row.trace), "traceback")] if row.trace else [],
        }


def newest_traces(groups: Sequence[FailureGroup]) -> dict[str, str]:
    """Return the traceback of the newest failed attempt of each group, in one query."""
    if not groups:
        return {}
    attempts = Attempt.objects.filter(fingerprint=OuterRef("pk")).order_by("-pk").values("traceback")[:1]
    rows = type(groups[0])._default_manager.using(groups[0]._state.db).filter(pk__in=[group.pk for group in groups])
    return {pk: trace or "" for pk, trace in rows.values_list("pk", Subquery(attempts))}


CHART_FIGURES = ("over_time", "curve")
MAX_FIGURES_CHARS = 20_000  # longer figures are not shown as JSON


class ReportFilter(FilterSet):
    kind = django_filters.CharFilter(label=gettext_lazy("Job"))


class PipelineReportAdmin(ListAdmin):
    detail_template = "report"
    filterset = ReportFilter
    empty = gettext_lazy("No report yet. Make one with: manage.py runtaskpipeline report")
    list_display = ("id", "kind", "made", "span_from", "span_to", "says")
    list_display_links = ("id", "kind")
    long_columns = ("data",)
    page_lines = ("kind", "made", "span_from", "span_to", "summary", "location")

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(when_migrated(self, self.file))
        own = path("<int:pk>/report/", view, name="dbtaskqueue_pipelinereport_report")
        return [own, *super().get_urls()]

    def file(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Return the report as a file to save: in a sandbox, in which only the file's own scripts run."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, str(pk))
        try:
            html = html_file(row.kind, row.data) if row else ""
        except ValueError as error:
            raise Http404(str(error)) from error
        if not html:
            raise Http404
        return HttpResponse(html, headers={"Content-Security-Policy": f"sandbox allow-scripts; {content_policy()}"})

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        figures = cells.json_box({key: row.data[key] for key in row.data if key not in CHART_FIGURES} or None)
        return {
            "report": report_body(row.kind, row.data),
            "report_url": self.url(self.model, "report", row.pk),
            "figures": figures if len(figures) <= MAX_FIGURES_CHARS else "",
        }

    made = cells.age_column(gettext_lazy("made"), "create_time")
    span_from = cells.column(gettext_lazy("from"), lambda report: cells.stamp(report.since))
    span_to = cells.column(gettext_lazy("to"), lambda report: cells.stamp(report.until))
    says = cells.column(gettext_lazy("summary"), lambda report: message_of(report.summary))
