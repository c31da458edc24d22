"""How pages show values: times, numbers, statuses, long texts, and columns made of them. All of a row is escaped."""

import json
import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.durations import format_age, format_duration, format_seconds
from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.operations import permissions
from django_dbtaskqueue.operations.queue_stats import Quantiles, QueueStats
from django_dbtaskqueue.operations.serializers import message_of

EMPTY_VALUE = "-"
MAX_UNCUT = 16  # characters that each column has room for
STATUS_ICONS = dict(zip(map(str, Status), "○◐✓✕◆", strict=True))


def badge(kind: str, icon: str, word: object) -> SafeString:
    """Return an icon and a word in the colour of ``kind``."""
    html = '<span class="dbtq-badge dbtq-{}"><span class="dbtq-icon" aria-hidden="true">{}</span>{}</span>'
    return format_html(html, kind, icon, word)


def status_badge(status: str) -> SafeString:
    icon = STATUS_ICONS.get(status)
    return badge(status.lower() if icon else "unknown", icon or "?", status)


def local(value: datetime) -> datetime:
    return localtime(value) if value.tzinfo else value


def stamp(value: datetime | None, text: str | None = None, *, ages: bool = False) -> str:
    """Return a time as ``<time>``: to the second, or as ``text``, which with ``ages`` the browser keeps up to date."""
    if value is None:
        return EMPTY_VALUE
    exact = f"{local(value):%Y-%m-%d %H:%M:%S%z}"
    html = '<time class="dbtq-time{}" datetime="{}" title="{}">{}</time>'
    shown = exact[: len("2026-11-20 08:00:00")] if text is None else text
    return format_html(html, " dbtq-ago" if ages else "", value.isoformat(), exact, shown)


def ago(value: datetime | None, now: datetime) -> str:
    """Return how long ago a time was, or in how long it will be."""
    if value is None:
        return EMPTY_VALUE
    age = timedelta(seconds=int(abs(now - value).total_seconds()))  # as the browser shows it
    words = _("%(time)s ago") if value <= now else _("in %(time)s")
    return stamp(value, words % {"time": format_duration(age, rough=True)}, ages=True)


def box(text: str | None) -> str:
    """Return a long text in a box that scrolls, its secrets masked."""
    return _box(masked_text(text)) if text else EMPTY_VALUE


def json_box(value: Any) -> str:
    """Return a JSON value, indented, in a box that scrolls, its secrets masked."""
    return EMPTY_VALUE if value is None else _box(json.dumps(masked(value), indent=2, ensure_ascii=False))


def _box(text: str) -> str:
    return format_html('<pre class="dbtq-box" tabindex="0">{}</pre>', text)


def line_of(task: Any) -> str:
    """Return the progress or the error of a task. A result needs the permission to see payloads, on its page."""
    return "" if task.status == Status.COMPLETED else message_of(task.process_result)


def own_text(text: str) -> SafeString:
    """Return a text that a program wrote: in its own direction, with itself as a title where it may be cut."""
    return format_html('<bdi title="{0}">{0}</bdi>' if len(text) > MAX_UNCUT else "<bdi>{0}</bdi>", text)


Column = Callable[[Any, Any], str]  # a method of an admin class: the row as text


def column(title: permissions.Text, show_row: Callable[[Any], object]) -> Column:
    """Return a column that shows what ``show_row`` makes of a row."""

    @admin.display(description=title)
    def cell(_page: object, row: Any) -> str:
        shown = show_row(row)
        return shown if isinstance(shown, str) else str(shown)

    return cell


def age_column(title: permissions.Text, field: str) -> Column:
    return column(title, lambda row: ago(getattr(row, field), row.clock))


def field_column(title: permissions.Text, field: str, show_value: Callable[[Any], str]) -> Column:
    """Return a column that shows one field: ``show_value`` is ``number``, ``box`` or ``json_box``."""
    return column(title, lambda row: show_value(getattr(row, field)))


def number(value: int | None) -> str:
    return EMPTY_VALUE if value is None else number_format(value, force_grouping=True)


def progress(percent: int, text: str = "") -> str:
    html = '<progress max="100" value="{0}" aria-label="{1}">{0}%</progress> {2}'
    return format_html(html, percent, _("progress"), text or f"{percent}%")


def in_and_out(rows: Sequence[QueueStats]) -> str:
    rates = [sum(of_queues) for of_queues in zip(*(row.rates for row in rows), strict=True)]
    rate_in, rate_out = sum(row.rate_in for row in rows), sum(row.rate_out for row in rows)
    return format_html("{} / {} {}", per_minute(rate_in), per_minute(rate_out), sparkline(rates))


def sparkline(rates: Sequence[float]) -> SafeString:
    """Return the rates as small bars that say their numbers; empty if all are 0."""
    if not (top := max(rates, default=0.0)):
        return SafeString("")
    bars = "".join(f"M{5 * place + 2} 16v-{math.ceil(15 * rate / top)}" for place, rate in enumerate(rates) if rate)
    label = _("out per min in the last hour, by 5 minutes: %(rates)s") % {"rates": ", ".join(map(per_minute, rates))}
    html = '<svg class="dbtq-spark" role="img" width="60" height="16"><title>{}</title><path d="{}"/></svg>'
    return format_html(html, label, bars)


def quantiles_text(found: Quantiles) -> str:
    """Return "12ms / 340ms": half and 95 % of the attempts."""
    if found.p50 is None or found.p95 is None:
        return EMPTY_VALUE
    return f"{format_seconds(found.p50)} / {format_seconds(found.p95)}"


def drain_text(row: QueueStats) -> str:
    if row.drain is not None:
        return format_age(row.drain)
    return _("never, at this rate") if row.oldest is not None and not row.paused else EMPTY_VALUE


def per_minute(rate: float) -> str:
    """Return a rate per second as one per minute, to two digits below ten."""
    value = 60 * rate
    return number_format(round(value, 1) if 0 < value < 10 else round(value), force_grouping=True)
