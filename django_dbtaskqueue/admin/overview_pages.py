"""The overview with its charts, and the doctor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.utils.formats import date_format, number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.admin.frame import show
from django_dbtaskqueue.admin.list_pages import COUNT_TIMEOUT
from django_dbtaskqueue.admin.read_only import EMPTY_VALUE, ReadOnlyAdmin, badge, local, stamp, viewer
from django_dbtaskqueue.core.durations import format_duration, format_seconds
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.metrics import CLASSES_PER_DECADE, upper
from django_dbtaskqueue.models import FailureGroup, Poller, Queue, Task
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, count_within
from django_dbtaskqueue.operations.doctor import Finding, examine
from django_dbtaskqueue.operations.permissions import Actor, narrow, visible_queues
from django_dbtaskqueue.operations.queue_stats import (
    Overview,
    Pause,
    Point,
    Quantiles,
    QueueStats,
    new_releases,
    overview,
    series,
)
from django_dbtaskqueue.operations.report_page import MAX_HEAT_LEVEL, Chart, Line
from django_dbtaskqueue.operations.search import parse, text_of, to_text
from django_dbtaskqueue.operations.search.query import select, tasks_for

CHART_SPAN = timedelta(hours=1)
POINTS_PER_STEP = 5  # of a heat map


def chart_context(using: str, actor: Actor, queue: str | None = None) -> dict[str, object]:
    """Return the charts and heat maps of the last hour, of one queue, or of all that the actor may view."""
    points = ended(series(using, CHART_SPAN, queue, among=visible_queues(actor)))
    times = [stamp(point.time, date_format(local(point.time), "H:i")) for point in points]
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
        {"iso": time.isoformat(), "clock": date_format(local(time), "H:i"), "release": release}
        for time, release in new_releases(narrow(Poller.objects.using(using), actor), CHART_SPAN)
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
    return {"charts": charts, "maps": [one for one in maps if one.rows]}


@dataclass(frozen=True, slots=True)
class HeatMap:
    """How many attempts took how long, by steps of time."""

    name: str
    title: str
    times: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, int]]]]  # the longest first: duration, and of each step text and heat


def heat_map(kind: str, title: str, points: Sequence[Point]) -> HeatMap:
    """Return the histograms of steps of points as a map. The heat of a cell is its share of the step's attempts."""
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
    times = [stamp(step[0].time, date_format(local(step[0].time), "H:i")) for step in steps]
    return HeatMap(kind, title, times, rows)


def _heat_cell(count: int, total: int) -> tuple[str, int]:
    if not count:
        return "", 0
    return number_format(count, force_grouping=True), math.ceil(MAX_HEAT_LEVEL * count / total)


def sparkline(rates: Sequence[float]) -> SafeString:
    """Return the rates as small bars that say their numbers; empty if all are 0."""
    top = max(rates, default=0.0)
    if not top:
        return SafeString("")
    bars = "".join(f"M{5 * place + 2} 16v-{math.ceil(15 * rate / top)}" for place, rate in enumerate(rates) if rate)
    label = _("out per min in the last hour, by 5 minutes: %(rates)s") % {"rates": ", ".join(map(per_minute, rates))}
    html = '<svg class="dbtq-spark" role="img" width="60" height="16"><title>{}</title><path d="{}"/></svg>'
    return format_html(html, label, bars)


def ended(points: list[Point]) -> list[Point]:
    """Leave out the current minute. Pollers have not reported all of it, so it would look as if work had stopped."""
    if any(point.total for point in points[:-1]):
        return points[:-1]
    return points if points[-1].total else []


def _figure(value: float | None) -> str:
    if value is None:
        return EMPTY_VALUE
    digits = 0 if value >= 100 else 1 if value >= 10 else 3
    return number_format(round(value, digits), force_grouping=True)


MAX_GRID_QUEUES = 100  # those with problems come first; others are found by name
NAME_KEY = "name"  # query key
TO_ANSWER = parse("signal:*")  # tasks that wait for somebody's answer


class OverviewAdmin(ReadOnlyAdmin):
    """The overview: health in a sentence, every queue by status, rates and charts."""

    view_permission = "view_queue"
    list_template = "overview"

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        actor = viewer(request)
        found, part = overview(only=visible_queues(actor)), request.GET.get(NAME_KEY, "").strip()
        queues = [row for row in found.queues if part.lower() in row.queue.lower()]
        shown = sorted(queues, key=_care)[:MAX_GRID_QUEUES]
        return {
            "health": found.health,
            "cards": [*self._cards(found), *self._waiting(request)],
            "statuses": [str(status) for status in Status],
            "rows": [row_of(self, row) for row in shown],
            "totals": [_count_cell(self, number, Task, status=status) for status, number in found.statuses.items()]
            + [_count_cell(self, found.total, Task)]
            if len(found.queues) > 1
            else [],
            "left": _left(len(queues), len(shown)),
            "part": part,
            **chart_context(self.get_queryset(request).db, actor),
        }

    def _waiting(self, request: HttpRequest) -> Iterator[tuple[str, str]]:
        """Yield how many tasks wait for somebody's answer, if any do."""
        tasks = select(TO_ANSWER, tasks_for(TO_ANSWER, self.get_queryset(request).db))
        count = count_within(narrow(tasks, viewer(request)), COUNT_TIMEOUT)
        if count is None or count:
            yield _("wait for a signal"), self.link(count or "?", self.url(Task, "changelist", q=to_text(TO_ANSWER)))

    def _cards(self, found: Overview) -> list[tuple[str, str]]:
        pollers = self.link(found.pollers, self.url(Poller, "changelist"))
        failed = self.link(number_format(found.failed, force_grouping=True), self.url(FailureGroup, "changelist"))
        return [
            (_("oldest waiting"), age_text(found.oldest)),
            (_("in / min, last 5 min"), per_minute(sum(row.rate_in for row in found.queues))),
            (_("out / min, last 5 min"), per_minute(sum(row.rate_out for row in found.queues))),
            (_("attempts failed in the last hour"), failed),
            (_("pollers alive"), pollers),
        ]


def row_of(page: ReadOnlyAdmin, row: QueueStats) -> dict[str, Any]:
    """Return the figures of a queue as a row of the grid, each number with a link to the tasks it counts."""
    model = model_for(row.queue)
    cells = [
        _count_cell(page, number, model, queue=row.queue, status=status) for status, number in row.statuses.items()
    ]
    return {
        "name": row.queue,
        "url": page.url(Queue, "change", row.queue),
        "late": row.late,
        "marks": marks_of(row),
        "cells": [*cells, _count_cell(page, row.total, model, queue=row.queue)],
        "rate_in": per_minute(row.rate_in),
        "rate_out": per_minute(row.rate_out),
        "spark": sparkline(row.rates),
        "oldest": age_text(row.oldest),
        "drain": _drain(row),
        "pause": pause_text(row.pause) if row.pause else "",
        "failed": _failed_cell(page, row.failed),
        "run": quantiles_text(row.run),
        "wait": quantiles_text(row.wait),
    }


def _failed_cell(page: ReadOnlyAdmin, number: int) -> dict[str, Any]:
    url = page.url(FailureGroup, "changelist") if number else ""
    return {"text": number_format(number, force_grouping=True), "some": bool(number), "url": url}


def quantiles_text(found: Quantiles) -> str:
    """Return "12ms / 340ms": half and 95 % of the attempts."""
    if found.p50 is None or found.p95 is None:
        return EMPTY_VALUE
    return f"{format_seconds(found.p50)} / {format_seconds(found.p95)}"


def pause_text(pause: Pause) -> str:
    """Return why a queue is paused, by whom, and until when."""
    parts = [pause.reason or _("no reason given"), _("by %(who)s") % {"who": pause.by or "?"}]
    if pause.until:
        parts.append(_("until %(time)s") % {"time": f"{local(pause.until):%Y-%m-%d %H:%M}"})
    return ", ".join(parts)


def _count_cell(page: ReadOnlyAdmin, number: ApproxCount, model: type[Model], **search: str) -> dict[str, Any]:
    label = search.get("status") or _("TOTAL")
    address = page.url(model, "changelist")
    url = f"{address}?{urlencode({'q': text_of(**search)})}" if address and search else address
    return {"label": label, "text": str(number), "some": bool(number), "url": url}


def _care(row: QueueStats) -> tuple[Any, ...]:
    """Sort late queues first, then those with failures, then those with tasks, then by name."""
    oldest = row.oldest or timedelta(0)
    return (
        not row.late,
        -oldest if row.late else timedelta(0),
        not row.unserved,
        not row.statuses[Status.ERROR],
        not row.total,
        row.queue,
    )


def marks_of(row: QueueStats) -> list[str]:
    """Return the badges of a queue that is paused, late or not served."""
    if row.paused:
        return [badge("paused", "‖", _("paused"))]
    marks: list[str] = [badge("late", "✕", _("late"))] if row.late else []
    if row.unserved:
        marks.append(badge("late" if row.stale else "paused", "!", _("no poller")))
    return marks


def age_text(value: timedelta | None) -> str:
    """Return a duration for people, or a dash."""
    return EMPTY_VALUE if value is None else format_duration(value, rough=True)


def _drain(row: QueueStats) -> str:
    if row.drain is not None:
        return age_text(row.drain)
    return _("never, at this rate") if row.oldest is not None and not row.paused else EMPTY_VALUE


def _left(all_of_them: int, shown: int) -> str:
    left = all_of_them - shown
    text = ngettext("%(count)s more queue: search by name.", "%(count)s more queues: search by name.", left)
    return text % {"count": left} if left else ""


def per_minute(rate: float) -> str:
    """Return a rate per second as one per minute, to two digits below ten."""
    value = 60 * rate
    return number_format(round(value, 1) if 0 < value < 10 else round(value), force_grouping=True)


FINDING_BADGES = {"error": ("error", "✕"), "warning": ("paused", "!"), "info": ("created", "i")}


class DoctorAdmin(ReadOnlyAdmin):
    """The doctor: what is wrong with the queues and the database, and what helps."""

    view_permission = "view_queue"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Return all findings, the worst first."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        # Before the page's transaction: an error of the database would end it.
        sees = viewer(request).sees
        found = [one for one in examine(self.get_queryset(request).db) if all(map(sees, one.queues))]
        return show(self, request, "doctor", lambda: self._context(found))

    def _context(self, found: list[Finding]) -> dict[str, Any]:
        serious = [finding for finding in found if finding.level != "info"]
        text = ngettext("%(count)s thing needs care.", "%(count)s things need care.", len(serious))
        return {
            "findings": [(one, badge(*FINDING_BADGES[one.level], level_text(one.level))) for one in found],
            "worst": "" if not serious else "late" if serious[0].level == "error" else "warned",
            "sentence": text % {"count": len(serious)} if serious else _("All is well."),
        }


def level_text(level: str) -> str:
    return {"error": _("error"), "warning": _("warning"), "info": _("note")}[level]
