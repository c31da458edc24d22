"""Rows of a DataFrame as tasks: what `stage` checks, and what it makes of them. These are the rules of ``enqueue()``.

A DataFrame's columns are named like the arguments of ``enqueue``: ``queue`` and ``reference`` (text), ``payload`` and
``context`` (JSON text, or a struct, map or array), ``priority`` and ``max_attempts`` (whole numbers), ``run_at``
(timestamp), ``delay``, ``ttl`` and ``lease`` (day-time intervals), ``group``, ``tag`` and ``payload_type`` (text).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import BY_NAME, ENQUEUED, TIMING
from django_dbtaskqueue.core.durations import MIN_LEASE
from django_dbtaskqueue.core.exceptions import PayloadError
from django_dbtaskqueue.core.outcomes import MAX_DELAY
from django_dbtaskqueue.pipeline.source.files import PREVIEW_CHARS, ROW, as_json

GIVEN = (BY_NAME["queue"], *ENQUEUED)
COLUMNS = {column.argument: column.db for column in GIVEN} | {name: name for name in TIMING}  # DataFrame's -> staging's
STAGED_TEXTS = tuple(column.argument for column in GIVEN if column.type == "text")
JSONS = tuple(column.argument for column in GIVEN if column.type == "jsonb")
STAGED_DURATIONS = (*(column.argument for column in GIVEN if column.type == "float8"), "delay", "ttl")
WHOLE = ("priority", "max_attempts")
# Of each column with an order: its least and its greatest value, and what they are
BOUNDS: dict[str, tuple[object, object, str]] = {
    **dict.fromkeys(STAGED_DURATIONS, (timedelta(0), MAX_DELAY, "between zero and a hundred years")),
    "lease": (MIN_LEASE, MAX_DELAY, "between 100 ms and a hundred years"),
    "priority": (-32768, 32767, "a whole number from -32768 to 32767"),
    "max_attempts": (1, 2**31 - 1, "a whole number from 1 to 2147483647"),
    "run_at": (datetime(2, 1, 1, tzinfo=UTC), datetime(9000, 12, 31, tzinfo=UTC), "a time of the years 2 to 9000"),
}


class Reject(NamedTuple):
    """A row that was not enqueued, and why: the ``value`` of a ``column``. Values are cut."""

    queue: str | None
    reference: str | None
    reason: str
    payload: str | None
    file: str | None = None
    line: int | None = None
    column: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class Rules:
    """What rows are checked against, and the values for columns that are missing or null."""

    queue: str | None = None
    queues: frozenset[str] | None = None  # the known ones; None: any name
    require_reference: bool = False
    max_attempts: int = 5
    priority: int = 0
    ttl: float | None = None  # seconds
    limits: json_payload.Limits = json_payload.DEFAULT_LIMITS


def stage(batch: pa.RecordBatch, rules: Rules) -> tuple[dict[str, pa.Array], list[Reject]]:
    """Return the good rows as the staging table's columns, and the bad ones."""
    count, names = batch.num_rows, batch.schema.names
    given = _filled({name: batch.column(name) for name in names if name in COLUMNS}, rules, count)
    places = batch.column(ROW) if ROW in names else pa.nulls(count, pa.struct([("fault", pa.null())]))
    unread = pc.indices_nonzero(places.field("fault").is_valid()).to_pylist()
    faults = {row: places[row]["fault"].as_py() for row in unread}
    for name, column in [*given.items()]:
        if pa.types.is_nested(column.type):
            given[name], found = _in_json(name, column, rules.limits)
        else:
            found = [*_faults(name, column, rules)]
        for row, reason in found:
            faults.setdefault(row, {"column": name, "value": _preview(given[name], row), "reason": f"{name}: {reason}"})
    where = [name for name in ("file", "line") if places.type.get_field_index(name) >= 0]  # tables have none
    rejects = [
        _reject(given, row, faults[row])._replace(**{name: places[row][name].as_py() for name in where})
        for row in sorted(faults)
    ]
    if faults:
        good = pa.array([row for row in range(count) if row not in faults], pa.int64())
        given = {name: column.take(good) for name, column in given.items()}
    seconds = {name: _seconds(column) for name, column in given.items() if name in STAGED_DURATIONS}
    return {COLUMNS[name]: column for name, column in {**given, **seconds}.items()}, rejects


def _filled(given: dict[str, pa.Array], rules: Rules, count: int) -> dict[str, pa.Array]:
    """Return the columns with the values of the rules where there is none; the queue only if it is no column."""
    values = {
        "priority": pa.scalar(rules.priority, pa.int64()),
        "max_attempts": pa.scalar(rules.max_attempts, pa.int64()),
    }
    if rules.ttl is not None:
        values["ttl"] = pa.scalar(timedelta(seconds=rules.ttl), pa.duration("us"))
    columns = {name: given.get(name, pa.nulls(count, value.type)).cast(value.type) for name, value in values.items()}
    queue = {"queue": pa.array([rules.queue] * count, pa.string())}
    return {**queue, **given, **{name: pc.fill_null(column, values[name]) for name, column in columns.items()}}


def _faults(name: str, column: pa.Array, rules: Rules) -> Iterable[tuple[int, str]]:
    if name in JSONS:
        return _json_faults(name, column, rules.limits)
    if name in STAGED_TEXTS:
        return _text_faults(name, column, rules)
    least, most, kind = BOUNDS[name]
    bad = pc.or_(pc.less(column, pa.scalar(least, column.type)), pc.greater(column, pa.scalar(most, column.type)))
    return _said(bad, lambda row: f"{_preview(column, row)} is not {kind}")


def _said(bad: pa.Array, reason: Callable[[int], str]) -> list[tuple[int, str]]:
    return [(row, reason(row)) for row in pc.indices_nonzero(bad.fill_null(False)).to_pylist()]


def _text_faults(name: str, column: pa.Array, rules: Rules) -> list[tuple[int, str]]:
    length = pc.utf8_length(column)
    bad = pc.or_(pc.or_(pc.less(length, 1), pc.greater(length, 200)), pc.match_substring(column, "\0"))
    faults = _said(bad, lambda row: f"{column[row].as_py()!r:.80} is not text of 1 to 200 characters")
    if name == "queue" or (name == "reference" and rules.require_reference):
        faults += _said(column.is_null(), lambda row: "is null, and each row must have one")
    if name == "queue" and rules.queues is not None:
        known = pc.or_kleene(pc.is_in(column, pa.array(sorted(rules.queues), pa.string())), column.is_null())
        names = ", ".join(sorted(rules.queues))
        faults += _said(pc.invert(known), lambda row: f"{column[row].as_py()!r} is unknown. Known: {names}")
    return faults


def _json_faults(name: str, column: pa.Array, limits: json_payload.Limits) -> list[tuple[int, str]]:
    texts = ((row, text) for row, text in enumerate(column.to_pylist()) if text is not None)
    reasons = ((row, json_fault(text, limits, mapping=name == "context")) for row, text in texts)
    return [(row, reason) for row, reason in reasons if reason]


def json_fault(text: str, limits: json_payload.Limits, *, mapping: bool = False) -> str | None:
    """Return why a database cannot hold this JSON text, or None."""
    try:
        value = json_payload.loads(text)
        plain = len(text) <= min(json_payload.INT_DIGITS, limits.size // 4) and "\\u" not in text
        if not plain or text.count("[") + text.count("{") > limits.depth:
            json_payload.dumps(value, limits=limits)
    except PayloadError as error:
        return f"{error.path}: {error.reason}" if error.path else error.reason
    return f"is {text:.40}, and must be a JSON object" if mapping and not isinstance(value, dict) else None


def _in_json(name: str, column: pa.Array, limits: json_payload.Limits) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return structs, maps or arrays as JSON, and why the database cannot hold some."""
    texts: list[str | None] = []
    faults = []
    for row, value in enumerate(column):
        try:
            texts.append(as_json(value.as_py(maps_as_pydicts="strict")) if value.is_valid else None)
        except (ValueError, OverflowError, KeyError, TypeError) as error:  # a date beyond Python's, a key twice
            texts.append(None)
            faults.append((row, str(error)))
    found = pa.array(texts, pa.string())
    return found, [*faults, *_json_faults(name, found, limits)]


def _preview(column: pa.Array, row: int) -> str | None:
    try:
        value = column[row].as_py()
    except (OverflowError, ValueError):  # a time beyond Python's
        value = column.slice(row, 1).cast(pa.string())[0].as_py()
    return None if value is None else str(value)[:PREVIEW_CHARS]


def _reject(given: dict[str, pa.Array], row: int, fault: Mapping[str, str]) -> Reject:
    queue, reference = (given[name][row].as_py() if name in given else None for name in ("queue", "reference"))
    payload = _preview(given["payload"], row) if "payload" in given else None
    return Reject(queue, reference, fault["reason"], payload, column=fault["column"], value=fault["value"])


def _seconds(column: pa.Array) -> pa.Array:
    return pc.divide(column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.float64()), 1e6)
