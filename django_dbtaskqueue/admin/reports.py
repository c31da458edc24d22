"""Reports of the data pipeline: the list, and each report's page, which runs nothing and reaches nothing."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext_lazy
from django.views.decorators.clickjacking import xframe_options_sameorigin

from django_dbtaskqueue.admin.display import ago, json_box, stamp
from django_dbtaskqueue.admin.filters import ReportFilter
from django_dbtaskqueue.admin.lists import ListAdmin
from django_dbtaskqueue.operations.serializers import message_of

# A report is a file of its own with its styles inside; whatever else it holds is text to the browser.
SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
LONGEST_FIGURES = 20_000  # characters shown of a report's figures


class PipelineReportAdmin(ListAdmin):
    """What the pipeline's jobs found."""

    detail_template = "report"
    filterset = ReportFilter
    empty = gettext_lazy("No report yet. Make one with: manage.py runtaskpipeline report")
    list_display = ("id", "kind", "made", "span_from", "span_to", "says")
    list_display_links = ("id", "kind")
    long_columns = ("data", "html")
    page_lines = ("kind", "made", "span_from", "span_to", "summary", "location")

    def get_urls(self) -> list[URLPattern]:
        """With the report by itself."""
        view = self.admin_site.admin_view(self.alone)
        own = path("<int:pk>/report/", view, name="dbtaskqueue_pipelinereport_report")
        return [own, *super().get_urls()]

    def alone(self, request: HttpRequest, pk: int) -> HttpResponse:
        """The report as it was written, in a sandbox: no script runs, nothing is fetched, no cookie is seen."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        html = self.get_queryset(request).filter(pk=pk).values_list("html", flat=True).first()
        if not html:
            raise Http404
        response = HttpResponse(html, headers={"Content-Security-Policy": SANDBOX})
        return xframe_options_sameorigin(lambda _request: response)(request)

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Where the report stands by itself, and its figures."""
        figures = json_box(row.data or None)
        url = self.url(self.model, "report", row.pk) if row.html else ""
        return {"report_url": url, "figures": figures if len(figures) <= LONGEST_FIGURES else ""}

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
