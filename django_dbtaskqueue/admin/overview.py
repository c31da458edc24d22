"""The overview: is all well, in a sentence; every queue by status; what goes in and out, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
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
from django_dbtaskqueue.admin.display import NOTHING, badge, duration
from django_dbtaskqueue.admin.pages import show
from django_dbtaskqueue.admin.searching import text_of
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.models import FailureGroup, Poller, Queue, Task
from django_dbtaskqueue.operations.stats.overview import Amount, Overview, QueueFigures, overview

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
            (_("oldest due"), NOTHING if found.oldest is None else duration(found.oldest)),
            (_("in / min"), per_minute(sum(row.rate_in for row in found.queues))),
            (_("out / min"), per_minute(sum(row.rate_out for row in found.queues))),
            (_("attempts failed in the last hour"), failed),
            (_("pollers alive"), pollers),
        ]


def health(found: Overview) -> dict[str, Any]:
    """Return how the queues are: one sentence first, then what else should be known."""
    late = [row for row in found.late if not row.paused]  # what waits in a paused queue is meant to
    unserved = [row for row in found.queues if row.statuses[Status.CREATED] and not row.pollers and not row.paused]
    paused = [row.queue for row in found.queues if row.paused]
    notes = [_("Nothing serves %(queues)s.") % {"queues": _names([row.queue for row in unserved])}] if unserved else []
    notes += [_("Paused: %(queues)s.") % {"queues": _names(paused)}] if paused else []
    notes += [_("No poller is running.")] if not found.pollers and not unserved else []
    if not late:
        level = "warned" if notes else ""
        return {"level": level, "sentence": _("All queues are on time."), "notes": notes}
    words = ngettext("%(count)s queue late, oldest %(age)s", "%(count)s queues late, oldest %(age)s", len(late))
    sentence = words % {"count": len(late), "age": duration(late[0].oldest or timedelta(0))}
    names = _names([f"{row.queue} ({duration(row.oldest or timedelta(0))})" for row in late])
    return {"level": "late", "sentence": sentence, "notes": [_("Late: %(queues)s.") % {"queues": names}, *notes]}


def row_of(page: Any, row: QueueFigures) -> dict[str, Any]:
    """Return the figures of a queue as a row of the grid, each number with a link to the tasks it counts."""
    model = model_for(row.queue)
    cells = [_cell(page, number, model, queue=row.queue, status=status) for status, number in row.statuses.items()]
    return {
        "name": row.queue,
        "url": page.url(Queue, "change", row.queue),
        "late": row.late and not row.paused,
        "marks": _marks(row),
        "cells": [*cells, _cell(page, row.total, model, queue=row.queue)],
        "rate_in": per_minute(row.rate_in),
        "rate_out": per_minute(row.rate_out),
        "oldest": NOTHING if row.oldest is None else duration(row.oldest),
        "drain": _drain(row),
    }


def _cell(page: Any, number: Amount, model: Any, **search: str) -> dict[str, Any]:
    address = page.url(model, "changelist")
    url = f"{address}?{urlencode({'q': text_of(**search)})}" if address and search else address
    return {"text": str(number), "some": bool(number), "url": url}


def _names(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    left = len(names) - most
    return shown if left <= 0 else _("%(shown)s and %(count)s more") % {"shown": shown, "count": left}


def _care(row: QueueFigures) -> tuple[Any, ...]:
    """Late queues first, then those with failures, then those with work, then by name."""
    oldest = row.oldest or timedelta(0)
    return (
        not row.late,
        -oldest if row.late else timedelta(0),
        not row.statuses[Status.ERROR],
        not row.total,
        row.queue,
    )


def _marks(row: QueueFigures) -> list[str]:
    if row.paused:
        return [badge("paused", "‖", _("paused"))]
    marks: list[str] = [badge("late", "✕", _("late"))] if row.late else []
    if row.statuses[Status.CREATED] and not row.pollers:
        marks.append(badge("paused", "!", _("no poller")))
    return marks


def _drain(row: QueueFigures) -> str:
    if row.drain is not None:
        return duration(row.drain)
    return _("never, at this rate") if row.oldest is not None and not row.paused else NOTHING


def _left(all_of_them: int, shown: int) -> str:
    left = all_of_them - shown
    words = ngettext("%(count)s more queue: search by name.", "%(count)s more queues: search by name.", left)
    return words % {"count": left} if left else ""


def per_minute(rate: float) -> str:
    """Return a rate per second as one per minute, to two digits below ten."""
    value = 60 * rate
    return number_format(round(value, 1) if 0 < value < 10 else round(value), force_grouping=True)
