"""The overview with its charts, and the doctor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.utils.formats import date_format, number_format
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import ReadOnlyAdmin, show, viewer
from django_dbtaskqueue.admin.list_pages import COUNT_TIMEOUT, PageTable, table_of
from django_dbtaskqueue.core.durations import format_age, format_seconds
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.metrics import CLASSES_PER_DECADE, upper
from django_dbtaskqueue.models import FailureGroup, Poller, Queue, Task
from django_dbtaskqueue.operations import queue_stats
from django_dbtaskqueue.operations.bounded_reads import NONE_COUNTED, count_within
from django_dbtaskqueue.operations.doctor import Finding, examine
from django_dbtaskqueue.operations.permissions import Actor, narrow, visible_queues
from django_dbtaskqueue.operations.related_tasks import awaited
from django_dbtaskqueue.operations.report_page import MAX_HEAT_LEVEL, Chart, Line
from django_dbtaskqueue.operations.search import parse, text_of, to_text
from django_dbtaskqueue.operations.search.query import select, tasks_for

CHART_SPAN = timedelta(hours=1)
POINTS_PER_STEP = 5  # of a heat map


def chart_context(using: str, actor: Actor, queue: str | None = None) -> dict[str, object]:
    """Return the charts and heat maps of the last hour, of one queue, or of all that the actor may view."""
    points = ended(queue_stats.series(using, CHART_SPAN, queue, among=visible_queues(actor)))
    times = [cells.stamp(point.time, date_format(cells.local(point.time), "H:i")) for point in points]
    throughput = [
        Line(_("completed"), "--dbtq-good", [60 * point.rate_of("completed", "deleted") for point in points]),
        Line(_("failed"), "--dbtq-bad", [60 * point.rate_of("failed", "retried") for point in points]),
        Line(_("poison"), "--dbtq-aside", [60 * point.rate_of("poisoned") for point in points]),
        Line(_("requeued"), "--dbtq-warn", [60 * point.rate_of("reenqueued") for point in points]),
    ]
    latency = [
        Line(_("run p50"), "--dbtq-busy", [point.run.p50 for point in points]),
        Line(_("run p95"), "--dbtq-aside", [point.run.p95 for point in points]),
        Line(_("wait p50"), "--dbtq-good", [point.wait.p50 for point in points]),
        Line(_("wait p95"), "--dbtq-warn", [point.wait.p95 for point in points]),
    ]
    title = _("Run time and wait time in seconds, last hour")
    marks = [
        {"iso": time.isoformat(), "clock": date_format(cells.local(time), "H:i"), "release": release}
        for time, release in queue_stats.new_releases(narrow(Poller.objects.using(using), actor), CHART_SPAN)
    ]
    outcomes = _("Attempts per minute, last hour")
    charts = [
        Chart("throughput", outcomes, times, throughput, _figure, axis="", bars=True, marks=marks),
        Chart("latency", title, times, latency, _figure, " s", axis="", marks=marks),
    ]
    maps = [
        heat_map("runs", _("Attempts by run time, last hour"), points),
        heat_map("waits", _("Attempts by wait time, last hour"), points),
    ]
    return {"charts": charts, "maps": [one for one in maps if one["rows"]]}


def heat_map(kind: str, title: str, points: Sequence[queue_stats.Point]) -> dict[str, Any]:
    """Return the histograms of steps of points as a map: of each duration, the longest first, the counts by step.

    The heat of a cell is its share of the step's attempts.
    """
    steps = [points[max(end - POINTS_PER_STEP, 0) : end] for end in range(len(points), 0, -POINTS_PER_STEP)][::-1]
    counts = [Counter[int]() for _step in steps]
    for step, found in zip(steps, counts, strict=True):
        for point in step:
            for number, count in getattr(point, kind).items():
                found[max(number - 1, 0) // CLASSES_PER_DECADE] += count
    decades = sorted({decade for found in counts for decade in found})
    rows = [
        (
            _("up to %(time)s") % {"time": format_seconds(upper(CLASSES_PER_DECADE * (decade + 1)))},
            [_heat_cell(found[decade], found.total()) for found in counts],
        )
        for decade in (range(decades[-1], decades[0] - 1, -1) if decades else ())
    ]
    times = [cells.stamp(step[0].time, date_format(cells.local(step[0].time), "H:i")) for step in steps]
    return {"name": kind, "title": title, "times": times, "rows": rows}


def _heat_cell(count: int, total: int) -> tuple[str, int]:
    if not count:
        return "", 0
    return cells.number(count), math.ceil(MAX_HEAT_LEVEL * count / total)


def ended(points: list[queue_stats.Point]) -> list[queue_stats.Point]:
    """Leave out the current minute. Pollers have not reported all of it, so it would look as if work had stopped."""
    if any(point.total for point in points[:-1]):
        return points[:-1]
    return points if points[-1].total else []


def _figure(value: float | None) -> str:
    if value is None:
        return cells.EMPTY_VALUE
    digits = 0 if value >= 100 else 1 if value >= 10 else 3
    return number_format(round(value, digits), force_grouping=True)


CHARTS_KEY = "charts"  # query key of the page's other tab
TO_ANSWER = parse("signal:*")  # tasks that wait for somebody's answer
MAX_HOME_QUEUES, MAX_HOME_FAILURES, MAX_HOME_WAITS = 8, 3, 3  # rows, which fit into one screen
QUEUE_COLUMNS = ("name", "state", "oldest", "created", "processing", "error", "failed", "in_out", "wait", "drain")
FAILURE_COLUMNS = ("title", "queue", "first", "in_1h", "tasks", "buttons")


class OverviewAdmin(ReadOnlyAdmin):
    """The home: what needs an operator, in one screen. Charts have a tab of their own."""

    view_permission = "view_queue"
    list_template = "overview"

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        actor, alias = viewer(request), self.get_queryset(request).db
        if CHARTS_KEY in request.GET:
            return chart_context(alias, actor)
        found = queue_stats.overview(only=visible_queues(actor))
        return {
            "health": found.health,
            "cards": self._cards(found),
            "failures": self._failures(request),
            "failures_url": self.url(FailureGroup, "changelist"),
            **self._queues(request, found),
            **self._waits(request, alias, found.as_of),
        }

    def _cards(self, found: queue_stats.QueuesOverview) -> list[tuple[str, str]]:
        waiting = found.statuses[Status.CREATED]
        failed = self.link(cells.number(found.failed), self.url(FailureGroup, "changelist"))
        rates = [sum(of_queues) for of_queues in zip(*(row.rates for row in found.queues), strict=True)]
        rate_in, rate_out = (sum(getattr(row, name) for row in found.queues) for name in ("rate_in", "rate_out"))
        return [
            (_("waiting"), self.link(waiting, self.url(Task, "changelist", q=text_of(status=Status.CREATED)))),
            (_("oldest waiting"), format_age(found.oldest)),
            (_("in / out per min"), cells.in_and_out(rate_in, rate_out, rates)),
            (_("attempts failed in the last hour"), failed),
            (_("pollers alive"), self.link(found.pollers, self.url(Poller, "changelist"))),
        ]

    def _shown_to(self, request: HttpRequest, model: type[Model]) -> Any:
        """Return the site's own page of a model; None if there is none, or the user may not see it."""
        page = self.admin_site._registry.get(model)
        return page if page and page.has_view_permission(request) else None

    def _failures(self, request: HttpRequest) -> PageTable | None:
        page = self._shown_to(request, FailureGroup)
        if page is None:
            return None
        groups = page.get_queryset(request).filter(last_seen__gte=Now() - CHART_SPAN)
        rows = list(groups.order_by("-first_seen")[:MAX_HOME_FAILURES])
        page.prepare(request, rows)
        for group in rows:
            group.verbs = group.verbs[:1]
        return table_of(page, rows, columns=FAILURE_COLUMNS, caption=_("Failures of the last hour"), tickable=False)

    def _queues(self, request: HttpRequest, found: queue_stats.QueuesOverview) -> dict[str, Any]:
        """Return a table of the queues that need care, the worst first, and a line on the others."""
        page = self._shown_to(request, Queue)
        if page is None:
            return {}
        queues = page.with_figures(found, page.get_queryset(request))
        care = sorted((one for one in queues if one.stats.needs_care), key=lambda one: _care(one.stats))
        quiet = [one.name for one in queues if not one.stats.needs_care]
        text = ngettext("%(count)s queue is quiet: %(names)s.", "%(count)s queues are quiet: %(names)s.", len(quiet))
        shown, caption = care[:MAX_HOME_QUEUES], _("Queues that need care")
        return {
            "queues": table_of(page, shown, columns=QUEUE_COLUMNS, caption=caption, tickable=False),
            "left": len(care) - len(shown),
            "quiet": text % {"count": len(quiet), "names": queue_stats.names_of(quiet)} if quiet else "",
            "queues_url": page.url(Queue, "changelist"),
        }

    def _waits(self, request: HttpRequest, alias: str, now: datetime) -> dict[str, Any]:
        """Return how many tasks wait for somebody's answer, and the first of them: with the signal, and since when."""
        rows = narrow(select(TO_ANSWER, tasks_for(TO_ANSWER, alias)), viewer(request))
        count = count_within(rows, COUNT_TIMEOUT) if self._shown_to(request, Task) else NONE_COUNTED
        # By time, of those just counted: by id, the server might read the whole table.
        some = rows.order_by("create_time")[:MAX_HOME_WAITS] if count and not count.more else ()
        waits = [
            (self.link(task, self.url(Task, "change", task.pk)), wait.name, cells.ago(wait.create_time, now))
            for task in some
            if (wait := awaited(task))
        ]
        address = self.url(Task, "changelist", q=to_text(TO_ANSWER))
        return {"waits": waits, "waiting": "?" if count is None else str(count) if count else "", "waits_url": address}


def _care(row: queue_stats.QueueStats) -> tuple[Any, ...]:
    """Sort late queues first, then those without a poller, paused ones, and those with the most failures."""
    oldest = row.oldest or timedelta(0)
    return not row.late, row.late and -oldest, not row.unserved, not row.paused, -row.failed, row.queue


FINDING_BADGES = {
    "error": ("error", "✕", gettext_lazy("error")),
    "warning": ("paused", "!", gettext_lazy("warning")),
    "info": ("created", "i", gettext_lazy("note")),
}


class DoctorAdmin(ReadOnlyAdmin):
    """The doctor: what is wrong with the queues and the database, and what helps."""

    view_permission = "view_queue"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        # Before the page's transaction: an error of the database would end it.
        sees = viewer(request).sees
        found = [one for one in examine(self.get_queryset(request).db) if all(map(sees, one.queues))]
        return show(self, request, ["doctor"], lambda: self._context(found))

    def _context(self, found: list[Finding]) -> dict[str, Any]:
        serious = [finding for finding in found if finding.level != "info"]
        text = ngettext("%(count)s thing needs care.", "%(count)s things need care.", len(serious))
        return {
            "findings": [(one, cells.badge(*FINDING_BADGES[one.level])) for one in found],
            "worst": "" if not serious else "late" if serious[0].level == "error" else "warned",
            "sentence": text % {"count": len(serious)} if serious else _("All is well."),
        }
