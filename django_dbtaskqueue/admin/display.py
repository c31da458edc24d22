"""How values look: status, times, JSON, errors. Everything from a row is escaped."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import Any

from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.operations.masking import masked, masked_text

NOTHING = "-"
ICONS = {
    Status.CREATED: "○",
    Status.PROCESSING: "◐",
    Status.COMPLETED: "✓",
    Status.ERROR: "✕",
    Status.POISON: "◆",
}
SUMMARY = 160  # characters of an error in a list
FRAME = '  File "'  # how a line of a traceback begins


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


def duration(span: timedelta) -> str:
    """Return a duration in its two largest units, such as "4 m 12 s"; a negative one as none."""
    seconds = max(int(span.total_seconds()), 0)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return _("%(days)s d %(hours)s h") % {"days": days, "hours": hours % 24}
    if hours:
        return _("%(hours)s h %(minutes)s m") % {"hours": hours, "minutes": minutes % 60}
    if minutes:
        return _("%(minutes)s m %(seconds)s s") % {"minutes": minutes, "seconds": seconds % 60}
    return _("%(seconds)s s") % {"seconds": seconds}


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
    words = _("%(time)s ago") if value <= now else _("in %(time)s")
    return stamp(value, words % {"time": duration(abs(now - value))}, ages=True)


def box(text: str | None) -> str:
    """Return a long text in a box that scrolls, its secrets masked."""
    return _box(masked_text(text)) if text else NOTHING


def json_box(value: Any) -> str:
    """Return a JSON value, indented, in a box that scrolls, its secrets masked."""
    return NOTHING if value is None else _box(json.dumps(masked(value), indent=2, ensure_ascii=False))


def _box(text: str) -> str:
    return format_html('<pre class="dbtq-box" tabindex="0">{}</pre>', text)


def summary(text: str | None) -> str:
    """Return the one line that says most: of a traceback the error at its end, of any other text its first line."""
    lines = [line for line in masked_text(text or "").splitlines() if line.strip()]
    if not lines:
        return ""
    if any(line.startswith(FRAME) for line in lines):
        errors = [line for line in lines if not line[0].isspace() and not line.startswith("Traceback (")]
        lines = errors[-1:] or lines[-1:]
        lines = [short_error(lines[0])]
    line = lines[0].strip()
    return line if len(line) <= SUMMARY else line[: SUMMARY - 1] + "…"


def short_error(line: str) -> str:
    """Return "PlaneUnknown: N14228" for "flights.rules.PlaneUnknown: N14228", and any other text as it is."""
    kind, colon, message = line.partition(":")
    return kind.rpartition(".")[2] + colon + message if re.fullmatch(r"[\w.]+", kind) else line
