"""Reports of the data pipeline: the list, and each report's page, also as a file that works offline."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.display import ago, json_box, stamp
from django_dbtaskqueue.admin.filters import ReportFilter
from django_dbtaskqueue.admin.lists import ListAdmin
from django_dbtaskqueue.operations.report_page import html_file, policy, report_body
from django_dbtaskqueue.operations.serializers import message_of

CHART_FIGURES = ("over_time", "curve")
MAX_FIGURES_CHARS = 20_000  # longer figures are not shown as JSON


class PipelineReportAdmin(ListAdmin):
    """What the pipeline's jobs found."""

    detail_template = "report"
    filterset = ReportFilter
    empty = gettext_lazy("No report yet. Make one with: manage.py runtaskpipeline report")
    list_display = ("id", "kind", "made", "span_from", "span_to", "says")
    list_display_links = ("id", "kind")
    long_columns = ("data",)
    page_lines = ("kind", "made", "span_from", "span_to", "summary", "location")

    def get_urls(self) -> list[URLPattern]:
        """With the report by itself."""
        view = self.admin_site.admin_view(self.file)
        own = path("<int:pk>/report/", view, name="dbtaskqueue_pipelinereport_report")
        return [own, *super().get_urls()]

    def file(self, request: HttpRequest, pk: int) -> HttpResponse:
        """The report as a file to save: in a sandbox, in which only the file's own scripts run."""
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
        """The report, where it stands by itself, and its figures without those of the charts."""
        report = report_body(row.kind, row.data)
        figures = json_box({key: row.data[key] for key in row.data if key not in CHART_FIGURES} or None)
        return {
            "report": report,
            "report_url": self.url(self.model, "report", row.pk),
            "figures": figures if len(figures) <= MAX_FIGURES_CHARS else "",
        }

    @admin.display(description=gettext_lazy("made"))
    def made(self, report: Any) -> str:
        """How long ago."""
        return ago(report.create_time, report.clock)

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
