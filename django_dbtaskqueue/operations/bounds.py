"""The bounds of what comes in: texts, numbers, times and JSON from outside, read once or refused with the field's name.

Pages, the API and the command line read through here, so that no value reaches the database that it cannot store, or
that Python cannot read back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone

from django_dbtaskqueue.conf.queue import duration
from django_dbtaskqueue.core.exceptions import TaskQueueError, near_match

MAX_BODY_BYTES = 262_144
MAX_BODY_DEPTH = 32  # of lists and objects in each other
MAX_INPUT_LENGTH = 4096  # characters of a text; a search may have as many
MAX_WHOLE_NUMBER = 2**63 - 1
YEARS = range(1970, 2201)


class BadInput(TaskQueueError):
    """A value from outside is not valid; ``field`` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        super().__init__(f"{field!r} {reason}")


def text(field: str, value: object, max_length: int = MAX_INPUT_LENGTH) -> str:
    """Return a text that the database can store."""
    if not isinstance(value, str):
        raise BadInput(field, f"must be a text, not {shown(value)}.")
    if len(value) > max_length:
        raise BadInput(field, f"has {len(value):,} characters; at most {max_length:,} are allowed.")
    if not is_storable(value):
        raise BadInput(field, "has a NUL character or half of a surrogate pair; leave it out.")
    return value


def is_storable(value: str) -> bool:
    """Whether the database can store a text: it has no NUL character and no lone surrogate."""
    return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def whole(field: str, value: object, low: int = 0, high: int = MAX_WHOLE_NUMBER) -> int:
    """Return a whole number, also from text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_WHOLE_NUMBER)):
        value = int(value)
    if type(value) is not int:
        raise BadInput(field, f"must be a whole number, not {shown(value)}.")
    if not low <= value <= high:
        raise BadInput(field, f"must be a whole number from {low} to {high}, not {shown(value)}.")
    return value


def whole_list(field: str, value: object) -> list[int]:
    """Return a list of whole numbers."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise BadInput(field, f"must be a list of whole numbers, not {shown(value)}.")
    return [whole(field, one) for one in value]


def choice(field: str, value: object, known: Sequence[str]) -> str:
    """Return one of a few words."""
    if value not in known:
        names = ", ".join(f'"{one}"' for one in known)
        raise BadInput(field, f"must be one of {names}, not {shown(value)}.{near_match(str(value)[:100], known)}")
    return str(value)


def length(field: str, value: object) -> timedelta:
    """Return a length of time of at most 100 years."""
    if not isinstance(value, str | timedelta):
        raise BadInput(field, f'must be a length of time such as "30m", not {shown(value)}.')
    try:
        found = duration(value, where=repr(field))
    except ImproperlyConfigured as error:
        raise BadInput(field, str(error).partition(": ")[2]) from None
    if found < timedelta(0):
        raise BadInput(field, f"must not be negative: {shown(value)}.")
    return found


def moment(field: str, value: object) -> datetime:
    """Return a time from 1970 to 2200; without an offset it is in the current time zone."""
    try:
        found = datetime.fromisoformat(text(field, value))
    except ValueError:
        raise BadInput(field, f"must be a time such as 2026-11-20T08:00+00:00, not {shown(value)}.") from None
    if found.year not in YEARS:
        raise BadInput(field, f"must be a time from the year {YEARS[0]} to {YEARS[-1]}, not {shown(value)}.")
    return found if found.tzinfo else timezone.make_aware(found)


def json_object(body: bytes) -> dict[str, object]:
    """Return the JSON object of a request's body."""
    if len(body) > MAX_BODY_BYTES:
        raise BadInput("body", f"has {len(body):,} bytes; at most {MAX_BODY_BYTES:,} are allowed.")
    if _depth(body) > MAX_BODY_DEPTH:
        raise BadInput("body", f"has lists and objects more than {MAX_BODY_DEPTH} deep.")
    try:
        found = json.loads(body or b"{}")
    except ValueError as error:
        raise BadInput("body", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput("body", f"must be a JSON object, not {type(found).__name__}.")
    return found


def shown(value: object) -> str:
    """Return a refused value as an error message shows it."""
    described = repr(value)
    return described if len(described) <= 100 else f"{described[:100]}…"


def _depth(body: bytes) -> int:
    """Return how deep brackets are nested; those inside of texts count, too, which is never too few."""
    deepest = depth = 0
    for char in body:
        if char in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in b"]}":
            depth -= 1
    return deepest
