"""The charts of the overview, as the tables they are drawn from: what pollers counted by the minute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.utils.formats import date_format, number_format
from django.utils.translation import gettext as _

from django_dbtaskqueue.admin.display import local, stamp
from django_dbtaskqueue.operations.stats.trends import Point, series

SPAN = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; ``value`` None: there is nothing to say of that time."""

    label: str
    colour: str  # a CSS variable
    value: Callable[[Point], float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart and its table."""

    name: str
    title: str
    unit: str
    heads: Sequence[Line]
    rows: Sequence[dict[str, Any]]  # the newest first


def charts(using: str, queue: str | None = None) -> list[Chart]:
    """Return throughput and latency of the last hour, of one queue or of all."""
    points = ended(series(using, SPAN, queue))
    throughput = (
        Line(_("completed"), "--dbtq-good", lambda point: 60 * point.rate_of("completed", "deleted")),
        Line(_("failed"), "--dbtq-bad", lambda point: 60 * point.rate_of("failed", "retried")),
        Line(_("poison"), "--dbtq-aside", lambda point: 60 * point.rate_of("poisoned")),
        Line(_("put back"), "--dbtq-warn", lambda point: 60 * point.rate_of("reenqueued")),
    )
    latency = (
        Line(_("run p50"), "--dbtq-busy", lambda point: point.run(0.5)),
        Line(_("run p95"), "--dbtq-aside", lambda point: point.run(0.95)),
        Line(_("wait p50"), "--dbtq-good", lambda point: point.wait(0.5)),
        Line(_("wait p95"), "--dbtq-warn", lambda point: point.wait(0.95)),
    )
    return [
        _chart("throughput", _("Attempts per minute, last hour"), "", throughput, points),
        _chart("latency", _("Seconds to run, and waited in line, last hour"), " s", latency, points),
    ]


def ended(points: list[Point]) -> list[Point]:
    """Leave out the running minute, which pollers have not told all of: it would look as if work had stopped."""
    if any(point.total for point in points[:-1]):
        return points[:-1]
    return points if points[-1].total else []


def _chart(name: str, title: str, unit: str, lines: Sequence[Line], points: Sequence[Point]) -> Chart:
    rows = [
        {
            "time": stamp(point.time, date_format(local(point.time), "H:i")),
            "cells": [_cell(line.value(point)) for line in lines],
        }
        for point in reversed(points)
    ]
    return Chart(name, title, unit, lines, rows)


def _cell(value: float | None) -> dict[str, str]:
    if value is None:
        return {"raw": "", "text": "-"}
    digits = 0 if value >= 100 else 1 if value >= 10 else 3
    return {"raw": f"{value:.4g}", "text": number_format(round(value, digits), force_grouping=True)}
