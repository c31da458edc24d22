"""Durations as people write them, and the pause between two attempts."""

from __future__ import annotations

import random
import re
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.dateparse import parse_duration

UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def duration(value: Any, *, where: str) -> timedelta:
    """Return a ``timedelta`` from one, or from text such as "90s", "15m", "2h", "1d", "250ms" or "PT15M"."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        short = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", value.strip())
        if short:
            return timedelta(**{UNITS[short[2]]: float(short[1])})
        parsed = parse_duration(value)
        if parsed is not None and value.strip():  # Django takes no text at all for a duration of zero
            return parsed
    raise ImproperlyConfigured(f'{where} must be a timedelta or text such as "15m", not {value!r}.')


def short(value: timedelta) -> str:
    """Return a duration in its largest whole unit, as people write it: 90s, 15m, 50ms, 2d; else as ``iso`` does."""
    for name, unit in reversed(UNITS.items()):
        one = timedelta(**{unit: 1})
        if value >= one and not value % one:
            return f"{value // one}{name}"
    return iso(value)


def iso(value: timedelta) -> str:
    """Return a duration in short ISO 8601, as ``duration`` reads it: PT15M, PT1H30M, PT0.25S, P2D."""
    seconds = value.total_seconds() - value.days * 86_400
    parts = [(int(seconds // 3600), "H"), (int(seconds % 3600 // 60), "M")]
    time = "".join(f"{number}{unit}" for number, unit in parts if number)
    rest = f"{seconds % 60:.6f}".rstrip("0").rstrip(".")
    time += f"{rest}S" if float(rest) or not (time or value.days) else ""
    return f"P{f'{value.days}D' if value.days else ''}{f'T{time}' if time else ''}"


def next_pause(pause: float, first: float, longest: float) -> float:
    """Return the seconds to wait after one more failure: twice the last ``pause`` (0: none yet), within the limits."""
    return min(longest, 2 * pause or first)


def jittered(seconds: float) -> float:
    """Return between half and one and a half times ``seconds``, so that processes do not retry all at once."""
    return seconds * random.uniform(0.5, 1.5)
