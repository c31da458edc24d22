"""Rows of a DataFrame on their way into a staging table: each checked, the bad ones set aside with the reason.

A DataFrame's columns are named like the arguments of ``enqueue``: ``queue`` and ``reference`` (text), ``payload`` and
``context`` (JSON text), ``priority`` and ``max_attempts`` (whole numbers), ``run_at`` (timestamp), ``delay``, ``ttl``
and ``lease`` (day-time intervals), ``group``, ``tag`` and ``payload_type`` (text).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import BY_NAME, ENQUEUED, TIMING
from django_dbtaskqueue.core.exceptions import PayloadError
from django_dbtaskqueue.core.outcomes import MAX_DELAY

RANGES = {"smallint": (-32768, 32767), "int": (1, 2**31 - 1)}  # of whole numbers; an int is a count
GIVEN = (BY_NAME["queue"], *ENQUEUED)
COLUMNS = {column.argument: column.db for column in GIVEN} | {name: name for name in TIMING}  # DataFrame's -> staging's
STAGED_TEXTS = tuple(column.argument for column in GIVEN if column.type == "text")
JSONS = tuple(column.argument for column in GIVEN if column.type == "jsonb")
STAGED_DURATIONS = (*(column.argument for column in GIVEN if column.type == "float8"), "delay", "ttl")
WHOLE = {column.argument: RANGES[column.type] for column in GIVEN if column.type in RANGES}
LAST_TIME = datetime(9000, 12, 31, tzinfo=UTC)
PREVIEW = 200  # characters of a rejected row's payload


class Reject(NamedTuple):
    """A row that was not enqueued, and why."""

    queue: str | None
    reference: str | None
    reason: str
    payload: str | None  # its first 200 characters


@dataclass(frozen=True)
class Rules:
    """What rows are checked against, and what stands for what they do not say."""

    queue: str | None = None
    queues: frozenset[str] | None = None  # the known ones; None: any name
    require_reference: bool = False
    max_attempts: int = 5
    ttl: float | None = None  # seconds
    limits: json_payload.Limits = field(default=json_payload.DEFAULT_LIMITS)


def stage(batch: pa.RecordBatch, rules: Rules) -> tuple[dict[str, pa.Array], list[Reject]]:
    """Return the good rows as the staging table's columns, and the bad ones."""
    given = {name: batch.column(name) for name in batch.schema.names if name in COLUMNS}
    count = batch.num_rows
    if "queue" not in given:
        given["queue"] = pa.array([rules.queue] * count, pa.string())
    reasons: dict[int, str] = {}
    for name, column in given.items():
        for row, reason in _faults(name, column, rules):
            reasons.setdefault(row, reason)
    rejects = [_reject(given, row, reasons[row]) for row in sorted(reasons)]
    if reasons:
        good = pa.array([row for row in range(count) if row not in reasons], pa.int64())
        given = {name: column.take(good) for name, column in given.items()}
    return _converted(given, rules, count - len(reasons)), rejects


def _faults(name: str, column: pa.Array, rules: Rules) -> Iterable[tuple[int, str]]:
    if name in JSONS:
        return _json_faults(name, column, rules.limits)
    if name in STAGED_TEXTS:
        return _text_faults(name, column, rules)
    if name in STAGED_DURATIONS:
        seconds = _seconds(column)
        low = pc.less_equal(seconds, 0.0) if name == "lease" else pc.less(seconds, 0.0)
        bad = pc.or_(low, pc.greater(seconds, MAX_DELAY.total_seconds()))
        return _said(bad, lambda row: f"{name}: {column[row].as_py()} is not between zero and a hundred years")
    if name in WHOLE:
        least, most = WHOLE[name]
        bad = pc.or_(pc.less(column, least), pc.greater(column, most))
        return _said(bad, lambda row: f"{name}: {column[row].as_py()} is not a whole number from {least} to {most}")
    bad = pc.greater(column, pa.scalar(LAST_TIME, column.type))
    return _said(bad, lambda row: f"{name}: {column[row]} is later than the year {LAST_TIME.year}")


def _said(bad: pa.Array, reason: Callable[[int], str]) -> list[tuple[int, str]]:
    return [(row, reason(row)) for row in pc.indices_nonzero(bad.fill_null(False)).to_pylist()]


def _text_faults(name: str, column: pa.Array, rules: Rules) -> list[tuple[int, str]]:
    length = pc.utf8_length(column)
    bad = pc.or_(pc.or_(pc.less(length, 1), pc.greater(length, 200)), pc.match_substring(column, "\0"))
    faults = _said(bad, lambda row: f"{name}: {column[row].as_py()!r:.80} is not text of 1 to 200 characters")
    if name == "queue" or (name == "reference" and rules.require_reference):
        faults += _said(column.is_null(), lambda row: f"{name}: is null, and each row must have one")
    if name == "queue" and rules.queues is not None:
        known = pc.or_kleene(pc.is_in(column, pa.array(sorted(rules.queues), pa.string())), column.is_null())
        names = ", ".join(sorted(rules.queues))
        faults += _said(pc.invert(known), lambda row: f"queue: {column[row].as_py()!r} is unknown. Known: {names}")
    return faults


def _json_faults(name: str, column: pa.Array, limits: json_payload.Limits) -> list[tuple[int, str]]:
    faults = []
    for row, text in enumerate(column.to_pylist()):
        if text is not None and (reason := json_fault(text, limits, mapping=name == "context")):
            faults.append((row, f"{name}: {reason}"))
    return faults


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


def _reject(given: dict[str, pa.Array], row: int, reason: str) -> Reject:
    texts: list[Any] = [
        given[name][row].as_py() if name in given else None for name in ("queue", "reference", "payload")
    ]
    return Reject(texts[0], texts[1], reason, None if texts[2] is None else texts[2][:PREVIEW])


def _converted(given: dict[str, pa.Array], rules: Rules, count: int) -> dict[str, pa.Array]:
    """Return the staging table's columns, defaults filled in; a column that is not given is left out."""
    columns = {
        COLUMNS[name]: _seconds(column) if name in STAGED_DURATIONS else column for name, column in given.items()
    }
    for name, value in {"priority": 0, "max_attempts": rules.max_attempts}.items():
        column = columns.get(name, pa.nulls(count, pa.int64()))
        columns[name] = pc.fill_null(column.cast(pa.int64()), value)
    if rules.ttl is not None:
        columns["ttl"] = pc.fill_null(columns.get("ttl", pa.nulls(count, pa.float64())), rules.ttl)
    return columns


def _seconds(column: pa.Array) -> pa.Array:
    return pc.divide(column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.float64()), 1e6)
