"""The pages of the pipeline's reports, made from their figures: for the admin, and as one HTML file that works offline.

The pages are in English, as the reports' summaries are. Their templates load this module for its filters.
"""

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

from django.template import Context, Engine, Library
from django.utils.html import conditional_escape, format_html
from django.utils.safestring import SafeString
from django.utils.translation import override

from django_dbtaskqueue.core.durations import UNKNOWN, percent, seconds, thousands
from django_dbtaskqueue.core.masking import masked_text

__all__ = ["html_file"]

PACKAGE_FOLDER = Path(__file__).parents[1]
STATIC_FOLDER = PACKAGE_FOLDER / "static" / "dbtaskqueue"
STYLE_FILES = ("vendor/uplot-1.6.32/uPlot.min.css", "admin.css", "operations.css", "report.css")
SCRIPT_FILES = ("vendor/uplot-1.6.32/uPlot.iife.min.js", "charts.js")
LINE_COLOURS = ("--dbtq-busy", "--dbtq-warn", "--dbtq-good", "--dbtq-aside", "--dbtq-bad", "--dbtq-waiting")
DAY_NAMES = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY_HOURS = 24
MAX_HEAT_LEVEL = 9

Figures = Mapping[str, Any]

register = Library()
for name, form in (("number", thousands), ("percent", percent), ("seconds", seconds)):
    register.filter(name, form)


@register.filter
def minute(value: str | None) -> str:
    """Return a time of JSON to the minute, in UTC."""
    return UNKNOWN if value is None else f"{datetime.fromisoformat(value).astimezone(UTC):%Y-%m-%d %H:%M}"


def report_body(kind: str, figures: Figures) -> SafeString | None:
    """Return a report for another page to show, secrets masked; None for figures of another version or kind."""
    if kind not in CONTEXTS:
        return None
    found: Figures = cast("Figures", _texts_masked(figures))
    try:
        context = Context({"figures": found, **CONTEXTS[kind](found)})
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    with override("en"):
        return _engine().get_template(f"admin/dbtaskqueue/reports/{kind}.html").render(context)


def _texts_masked(value: object) -> object:
    """Mask the texts only: the keys are ours, and a queue may have a name that looks like a secret's."""
    if isinstance(value, dict):
        return {key: _texts_masked(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_texts_masked(one) for one in value]
    return masked_text(value) if isinstance(value, str) else value


def html_file(kind: str, figures: Figures) -> str:
    """Return the page as one HTML file. Raises ValueError for figures of another version or kind."""
    if (body := report_body(kind, figures)) is None:
        raise ValueError(f"These are no figures of {' or '.join(CONTEXTS)}, or of another version.")
    given = {"styles": _contents(STYLE_FILES), "scripts": _contents(SCRIPT_FILES), "policy": content_policy()}
    context = Context({"body": body, "kind": kind, **given})
    return _engine().get_template("admin/dbtaskqueue/reports/file.html").render(context)


@cache
def content_policy() -> str:
    """Return the Content-Security-Policy of the HTML file: it fetches nothing, and runs no script but its own."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in _contents(SCRIPT_FILES))
    scripts = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def _engine() -> Engine:
    libraries = {"i18n": "django.templatetags.i18n", "report_page": __name__}
    return Engine(dirs=[str(PACKAGE_FOLDER / "templates")], libraries=libraries)


@cache
def _contents(names: tuple[str, ...]) -> list[str]:
    return [(STATIC_FOLDER / name).read_text(encoding="utf-8") for name in names]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    colour: str  # a CSS variable
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """A chart of a page; the browser draws it from its rows. Values of the unit "duration" are seconds.

    Without ``axis`` the times are local, and the template names them.
    """

    name: str
    title: str
    places: Sequence[str]
    heads: Sequence[Line]
    form: Callable[[float | None], str]
    unit: str = ""
    axis: str = "Time (UTC)"
    bars: bool = False
    marks: Sequence[Mapping[str, str]] = ()  # moments to name: iso, clock, version

    @property
    def body(self) -> SafeString:
        """Return the rows of the table, the last one first. A template would need several times as long."""
        values = zip(self.places, *(line.values for line in self.heads), strict=True)
        rows = (
            f'<tr><th scope="row">{conditional_escape(place)}</th>{"".join(map(self._cell, found))}</tr>'
            for place, *found in reversed(list(values))
        )
        return SafeString("\n".join(rows))  # each part is escaped

    def _cell(self, value: float | None) -> str:
        raw = "" if value is None else f"{value * (100 if self.form is percent else 1):.6g}"
        return f'<td class="number" data-value="{raw}">{conditional_escape(self.form(value))}</td>'


def report_context(figures: Figures) -> Mapping[str, object]:
    """Return the charts of a service report."""
    found = figures["over_time"]
    times = _times(found["times"])
    ended = [Line("completed", "--dbtq-good", found["completed"]), Line("failed", "--dbtq-bad", found["failed"])]
    names = ("wait_p95", "run_p95", "backlog", "failure_rate", "budget_spent")
    wait, run, backlog, failures, budget = (_lines(found[name]) for name in names)
    return {
        "charts": _drawn(
            Chart("ended", "Tasks ended", times, ended, thousands, bars=True),
            Chart("wait", "Wait, p95", times, wait, seconds, "duration"),
            Chart("run", "Run, p95", times, run, seconds, "duration"),
            Chart("backlog", "Backlog", times, backlog, thousands),
            Chart("budget", "Error budget spent; 100 % is all of it", times, budget, percent, " %"),
            Chart("failures", "Failures, share of what ended", times, failures, percent, " %"),
        )
    }


def forecast_context(figures: Figures) -> Mapping[str, object]:
    """Return the maps of the week of a forecast."""
    hours, slots = figures["hours"], figures["slots"]
    return {
        "hours": [f"{hour:02}" for hour in range(DAY_HOURS)],
        "maps": [
            ("Arrivals per hour", _week({one["hour"]: one["arrivals"] for one in hours})),
            ("Pollers needed", _week({one["hour"]: math.ceil(one["servers"] / slots) for one in hours})),
        ],
    }


def whatif_context(figures: Figures) -> Mapping[str, object]:
    """Return the charts and the waits of a replay."""
    found, curve = figures["over_time"], figures["curve"]
    shares = [format_html('<data value="{}">{} %</data>', share, share) for share in range(101)]
    names = ("now", "then")
    waits = _lines([{"name": name, "values": found[name]} for name in names])
    curves = _lines([{"name": name, "values": curve[name]} for name in names])
    return {
        "charts": _drawn(
            Chart("wait", "Wait, p95, by time of arrival", _times(found["times"]), waits, seconds, "duration"),
            Chart("curve", "Longest wait by share of tasks", shares, curves, seconds, "duration", "Share of tasks"),
        ),
        "waits": [
            (name, *(figures[replay][name] for replay in ("recorded", "now", "then")))
            for name in figures["now"]
            if name != "mean_lead"
        ],
    }


def _drawn(*charts: Chart) -> list[Chart]:
    return [chart for chart in charts if any(value for line in chart.heads for value in line.values)]


def _times(times: Sequence[str]) -> list[SafeString]:
    moments = [datetime.fromisoformat(time).astimezone(UTC) for time in times]
    form = "%Y-%m-%d %H:%M:%S" if any(one.second for one in moments) else "%Y-%m-%d %H:%M"
    names = [one.strftime(form) for one in moments]
    return [format_html('<time datetime="{}">{}</time>', *both) for both in zip(times, names, strict=True)]


def _lines(found: Sequence[Mapping[str, Any]]) -> list[Line]:
    return [Line(one["name"], colour, one["values"]) for one, colour in zip(found, LINE_COLOURS, strict=False)]


def _week(values: Mapping[int, float]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return a row for each day: of each hour the value as text, and its size from 0 to `MAX_HEAT_LEVEL`."""
    most = max(values.values(), default=0) or 1
    known = {hour: (thousands(value), math.ceil(MAX_HEAT_LEVEL * value / most)) for hour, value in values.items()}
    cells = [known.get(hour, ("", 0)) for hour in range(DAY_HOURS * len(DAY_NAMES))]
    return [(day, cells[DAY_HOURS * place :][:DAY_HOURS]) for place, day in enumerate(DAY_NAMES)]


CONTEXTS: Mapping[str, Callable[[Figures], Mapping[str, object]]] = {
    "report": report_context, "forecast": forecast_context, "whatif": whatif_context,
}  # fmt: skip
