"""How values look: status, times, JSON, errors. Everything from a row is escaped."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.operations.serializers import masked, masked_text

NOTHING = "-"
ICONS = {
    Status.CREATED: "○",
    Status.PROCESSING: "◐",
    Status.COMPLETED: "✓",
    Status.ERROR: "✕",
    Status.POISON: "◆",
}


def badge(kind: str, icon: str, word: Any) -> SafeString:
    """Return an icon and a word in the colour of ``kind``."""
    return format_html(
        '<span class="dbtq-badge dbtq-{}"><span class="dbtq-icon" aria-hidden="true">{}</span>{}</span>',
        kind,
        icon,
        word,
    )


def status_badge(status: str) -> SafeString:
    """Return a status as icon, word and colour."""
    known = status in ICONS
    return badge(status.lower() if known else "unknown", ICONS[Status(status)] if known else "?", status)


def local(value: datetime) -> datetime:
    """Return a time in the viewer's time zone."""
    return localtime(value) if value.tzinfo else value


def stamp(value: datetime | None, text: str | None = None, *, ages: bool = False) -> str:
    """Return a time as ``<time>``, shown to the second, or as ``text`` with the full time on hovering.

    With ``ages`` the text is a distance from now, which the browser counts on.
    """
    if value is None:
        return NOTHING
    shown = local(value)
    exact = f"{date_format(shown, 'Y-m-d H:i:s')}{shown:%z}"
    return format_html(
        '<time class="dbtq-time{}" datetime="{}" title="{}">{}</time>',
        " dbtq-ago" if ages else "",
        value.isoformat(),
        exact,
        date_format(shown, "Y-m-d H:i:s") if text is None else text,
    )


def ago(value: datetime | None, now: datetime) -> str:
    """Return a time as its distance from now, either way."""
    if value is None:
        return NOTHING
    age = timedelta(seconds=int(abs(now - value).total_seconds()))  # as the browser counts on
    words = _("%(time)s ago") if value <= now else _("in %(time)s")
    return stamp(value, words % {"time": format_duration(age, rough=True)}, ages=True)


def box(text: str | None) -> str:
    """Return a long text in a box that scrolls, its secrets masked."""
    return _box(masked_text(text)) if text else NOTHING


def json_box(value: Any) -> str:
    """Return a JSON value, indented, in a box that scrolls, its secrets masked."""
    return NOTHING if value is None else _box(json.dumps(masked(value), indent=2, ensure_ascii=False))


def _box(text: str) -> str:
    return format_html('<pre class="dbtq-box" tabindex="0">{}</pre>', text)
