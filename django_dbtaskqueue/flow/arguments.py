"""What a caller hands to enqueue, checked and turned into column values before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import codecs, context
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import ENQUEUED, OPTIONS
from django_dbtaskqueue.core.exceptions import EnqueueError, PayloadError, near_match
from django_dbtaskqueue.core.outcomes import MAX_DELAY

LAST_YEAR = 9000
LONGEST = 200  # characters of a reference, group or tag
TEXTS = tuple((column.option, column.db) for column in ENQUEUED if column.option and column.type == "text")
SPANS = tuple((column.option, column.db) for column in ENQUEUED if column.option and column.type == "float8")
ON_DUPLICATE = ("error", "ignore", "replace")


def options_of(index: int, item: Any) -> Mapping[str, Any]:
    """Return one item of ``enqueue_many`` as ``enqueue``'s arguments."""
    if isinstance(item, Mapping):
        for key in item:
            if key not in OPTIONS:
                raise EnqueueError(
                    f"items[{index}] has no argument {key!r}.{near_match(str(key), OPTIONS)} An item is a mapping of "
                    f'enqueue()\'s arguments: put a plain JSON payload under {{"payload": …}}.'
                )
        return item
    if isinstance(item, tuple) and len(item) == 2:
        return {"reference": item[0], "payload": item[1]}
    if is_payload(item):
        return {"payload": item}
    raise EnqueueError(
        f"items[{index}] is {item!r:.80}: an item is a mapping of enqueue()'s arguments, a (reference, payload) pair, "
        "or a dataclass or pydantic payload."
    )


def is_payload(item: Any) -> bool:
    """Whether an item of ``enqueue_many`` is a payload of its own class."""
    return (is_dataclass(item) or hasattr(item, "model_dump")) and not isinstance(item, Mapping | tuple)


def constants(settings: conf.QueueSettings) -> dict[str, Any] | None:
    """Return the column values of every task enqueued with no more than a reference and a payload, but these two.

    None when these tasks still have to be looked at one by one.
    """
    try:
        row = row_of({}, settings)
    except EnqueueError:
        return None
    return None if row["ttl"] is not None else row


def row_of(options: Mapping[str, Any], settings: conf.QueueSettings) -> dict[str, Any]:
    """Check one task's arguments and return its column values, payload and context as JSON text."""
    get = options.get
    payload_type, plain = codecs.encode(get("payload"))
    row = {
        "payload": None if plain is None else json_payload.dumps(plain, limits=limits_in_force()),
        "payload_type": payload_type,
        "priority": get("priority") or 0,
        "context": _context(get("context")),
        "max_attempts": settings.max_attempts,
        "delay": _seconds("delay", get("delay")),
        "run_at": get("run_at"),
        "ttl": _seconds("ttl", get("ttl") or settings.ttl),
    }
    for option, column in TEXTS:
        row[column] = None if (text := get(option)) is None else _text(option, text)
    for option, column in SPANS:
        row[column] = None if (span := get(option)) is None else _seconds(option, span) or None
    if type(row["priority"]) is not int or not -32768 <= row["priority"] <= 32767:
        raise EnqueueError(f"priority={row['priority']!r} must be a whole number from -32768 to 32767, lower first.")
    if row["run_at"] is not None and not (isinstance(row["run_at"], datetime) and row["run_at"].year <= LAST_YEAR):
        raise EnqueueError(f"run_at={row['run_at']!r} must be a datetime up to the year {LAST_YEAR}.")
    return row


def limits_in_force() -> json_payload.Limits:
    """Return what the settings allow of a payload."""
    return _limits_of(conf.settings().payload_max_bytes)


@lru_cache(maxsize=8)
def _limits_of(size: int) -> json_payload.Limits:
    return json_payload.Limits(size=size)


def _context(value: Any) -> str | None:
    if value is not None and not isinstance(value, Mapping):
        raise EnqueueError(f"context={value!r:.80} must be a mapping, e.g. {{'trace': '…'}}.")
    taken_along = context.captured(value)
    if taken_along is None:
        return None
    try:
        return json_payload.dumps(dict(taken_along), limits=limits_in_force())
    except PayloadError as error:
        raise EnqueueError(f"Context cannot be stored: {joined('context', error.path)}: {error.reason}") from None


def joined(place: str, path: str) -> str:
    """Return ``path`` as a path inside ``place``."""
    return f"{place}{path}" if not path or path.startswith("[") else f"{place}.{path}"


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST or "\0" in value:
        raise EnqueueError(f"{name}={value!r:.80} must be None or text of 1 to {LONGEST} characters without NUL.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnqueueError(f"{name}={value!r:.80} holds a lone surrogate at {error.start}; it is not text.") from None
    return value


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, timedelta) or not timedelta(0) <= value <= MAX_DELAY:
        raise EnqueueError(f"{name}={value!r} must be a timedelta from zero to a hundred years.")
    return value.total_seconds()


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is none of ``choices``."""
    if value not in choices:
        raise EnqueueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
