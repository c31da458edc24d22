"""The overview: is all well, in a sentence; every queue by status; what goes in and out, and how long it takes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.admin.base import ReadOnlyAdmin
from django_dbtaskqueue.admin.charts import charts
from django_dbtaskqueue.admin.display import NOTHING, badge
from django_dbtaskqueue.admin.pages import show
from django_dbtaskqueue.admin.searching import text_of
from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.models import FailureGroup, Poller, Queue, Task
from django_dbtaskqueue.operations.bounded_reads import ApproxCount
from django_dbtaskqueue.operations.stats.queue_stats import Overview, QueueStats, health, overview

MOST = 100  # queues in the grid; those that need care come first, others are found by name
NAME = "name"


class OverviewAdmin(ReadOnlyAdmin):
    """A page about all queues."""

    view_permission = "view_queue"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The page, or its part that refreshes."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return show(self, request, "overview", lambda: self._facts(request))

    def _facts(self, request: HttpRequest) -> dict[str, Any]:
        found, part = overview(), request.GET.get(NAME, "").strip()
        queues = [row for row in found.queues if part.lower() in row.queue.lower()]
        shown = sorted(queues, key=_care)[:MOST]
        return {
            "health": health(found),
            "cards": self._cards(found),
            "statuses": [str(status) for status in Status],
            "rows": [row_of(self, row) for row in shown],
            "totals": [_cell(self, number, Task, status=status) for status, number in found.statuses.items()]
            + [_cell(self, found.total, Task)]
            if len(found.queues) > 1
            else [],
            "left": _left(len(queues), len(shown)),
            "part": part,
            "charts": charts(self.get_queryset(request).db),
        }

    def _cards(self, found: Overview) -> list[tuple[str, str]]:
        pollers = self.link(found.pollers, self.url(Poller, "changelist"))
        failed = self.link(number_format(found.failed, force_grouping=True), self.url(FailureGroup, "changelist"))
        return [
            (_("oldest due"), _age(found.oldest)),
            (_("in / min"), per_minute(sum(row.rate_in for row in found.queues))),
            (_("out / min"), per_minute(sum(row.rate_out for row in found.queues))),
            (_("attempts failed in the last hour"), failed),
            (_("pollers alive"), pollers),
        ]


def row_of(page: Any, row: QueueStats) -> dict[str, Any]:
    """Return the figures of a queue as a row of the grid, each number with a link to the tasks it counts."""
    model = model_for(row.queue)
    cells = [_cell(page, number, model, queue=row.queue, status=status) for status, number in row.statuses.items()]
    return {
        "name": row.queue,
        "url": page.url(Queue, "change", row.queue),
        "late": row.late,
        "marks": _marks(row),
        "cells": [*cells, _cell(page, row.total, model, queue=row.queue)],
        "rate_in": per_minute(row.rate_in),
        "rate_out": per_minute(row.rate_out),
        "oldest": _age(row.oldest),
        "drain": _drain(row),
    }


def _cell(page: Any, number: ApproxCount, model: Any, **search: str) -> dict[str, Any]:
    address = page.url(model, "changelist")
    url = f"{address}?{urlencode({'q': text_of(**search)})}" if address and search else address
    return {"text": str(number), "some": bool(number), "url": url}


def _care(row: QueueStats) -> tuple[Any, ...]:
    """Late queues first, then those with failures, then those with work, then by name."""
    oldest = row.oldest or timedelta(0)
    return (
        not row.late,
        -oldest if row.late else timedelta(0),
        not row.statuses[Status.ERROR],
        not row.total,
        row.queue,
    )


def _marks(row: QueueStats) -> list[str]:
    if row.paused:
        return [badge("paused", "‖", _("paused"))]
    marks: list[str] = [badge("late", "✕", _("late"))] if row.late else []
    if row.unserved:
        marks.append(badge("paused", "!", _("no poller")))
    return marks


def _age(value: timedelta | None) -> str:
    return NOTHING if value is None else format_duration(value, rough=True)


def _drain(row: QueueStats) -> str:
    if row.drain is not None:
        return _age(row.drain)
    return _("never, at this rate") if row.oldest is not None and not row.paused else NOTHING


def _left(all_of_them: int, shown: int) -> str:
    left = all_of_them - shown
    words = ngettext("%(count)s more queue: search by name.", "%(count)s more queues: search by name.", left)
    return words % {"count": left} if left else ""


def per_minute(rate: float) -> str:
    """Return a rate per second as one per minute, to two digits below ten."""
    value = 60 * rate
    return number_format(round(value, 1) if 0 < value < 10 else round(value), force_grouping=True)
