"""Numbers, shares and times as text for people; an unknown value is a dash. Standard library only."""

from __future__ import annotations

import re

from django_dbtaskqueue.core.durations import format_seconds

UNKNOWN = "-"
RESULT_ID = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")  # of a Django task


def task_number(text: str) -> str:
    """Return the number of the task if this is the id of a Django task's result, else the text as it is."""
    found = RESULT_ID.fullmatch(text.lower())
    return str(int(found[1] + found[2], 16)) if found else text


def number(value: float | None) -> str:
    """Return a number with its thousands apart; a fraction below 1,000 has three digits."""
    if value is None:
        return UNKNOWN
    is_small_fraction = isinstance(value, float) and abs(value) < 1000
    return f"{value:.3g}" if is_small_fraction else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share (0 to 1) as a percentage; a share just below 1 does not become 100 %."""
    if share is None:
        return UNKNOWN
    text = f"{share * 100:.2f}".rstrip("0").rstrip(".")
    return "> 99.99 %" if text == "100" and share < 1 else f"{text} %"


def seconds(value: float | None) -> str:
    """Return a number of seconds as a rough duration."""
    return UNKNOWN if value is None else format_seconds(value)
