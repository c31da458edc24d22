"""Tasks as data, for the command line's JSON and for the API, with secrets masked before they are shown or exported.

A secret is recognised by the name of its key: ``DBTASKQUEUE["MASK"]`` lists parts of keys, in any case and however the
key joins its words. ``api_key`` masks ``X-Api-Key`` and ``apiKey``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import lru_cache

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.columns import LISTED, LONG
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AbstractTask, Attempt, BulkOperation, TaskHistory
from django_dbtaskqueue.operations.queue_stats import Overview, QueueStats, health

MESSAGE_WIDTH = 160  # characters of a message in one line
FRAME = '  File "'  # how a line of a traceback begins
Document = dict[str, object]
MASKED = "•••"
KEY_JOINTS = re.compile(r"[\s_.-]+")
URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):[^\s/@]+@")


def summary(task: AbstractTask | TaskHistory, *, payload: bool = True) -> Document:
    """Return what a list shows of a task; without ``payload`` no result, but the one line of an error."""
    message = message_of(task.process_result) if payload or task.status != Status.COMPLETED else ""
    return {name: getattr(task, name, None) for name in LISTED} | {"message": message}


def detail(task: AbstractTask | TaskHistory, *, payload: bool) -> Document:
    """Return all of a task, secrets masked; what was enqueued and what came of it only with ``payload``."""
    document = summary(task, payload=payload)
    if payload:
        document |= {name: masked(getattr(task, name)) for name in LONG}
        document["process_result"] = masked_text(task.process_result or "")
    return document


def detail_of_history(row: TaskHistory, *, payload: bool) -> Document:
    """Return the same of a task that left its table, and when it did; what only a table knows is None."""
    return detail(row, payload=payload) | {"id": row.task_id, "moved_time": row.moved_time}


def attempt_of(row: Attempt, *, payload: bool = True) -> Document:
    """Return a failed attempt, secrets masked; without ``payload`` the one line of its error only."""
    document = {
        "task_id": row.task_id,
        "queue": row.queue,
        "attempt": row.attempt,
        "poller": row.poller_instance,
        "failed": row.finish_time,
        "error": message_of(error_of(row)),
    }
    if payload:
        document |= {"error": masked_text(error_of(row)), "traceback": masked_text(row.traceback)}
    return document


def error_of(row: Attempt) -> str:
    """Return the error of a failed attempt, not masked."""
    return f"{row.error_type}: {row.message}" if row.error_type else row.message


def message_of(text: str | None, width: int = MESSAGE_WIDTH) -> str:
    """Return a result or error as one line of at most ``width`` characters, with secrets masked.

    Of a traceback it is the error, without the module of its class. Of any other text it is the first line. A stored
    traceback can lack its beginning, so the frames tell what it is.
    """
    lines = [line for line in masked_text(text or "").splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[0]
    frames = [place for place, one in enumerate(lines) if one.startswith((FRAME, "Traceback ("))]
    if frames:
        after = lines[frames[-1] + 1 :] or lines
        line = short_error(next((one for one in after if not one[0].isspace()), after[-1]))
    line = line.strip()
    return line if len(line) <= width else line[: width - 1] + "…"


def short_error(line: str) -> str:
    """Return "PlaneUnknown: N14228" for "flights.rules.PlaneUnknown: N14228", and any other text as it is."""
    kind, colon, message = line.partition(":")
    return kind.rpartition(".")[2] + colon + message if re.fullmatch(r"[\w.]+", kind) else line


def operation_document(operation: BulkOperation) -> Document:
    """Return a bulk operation as data."""
    return {
        "operation": operation.pk,
        "verb": operation.verb,
        "query": operation.query,
        "actor": operation.actor,
        "reason": operation.reason,
        "state": operation.state,
        "progress": round(operation.progress, 4),
        "expected": operation.estimate,
        "expected_more": operation.estimate_more,
        "changed": operation.changed,
        "skipped": operation.skipped,
        "skips": operation.skips,
        "note": operation.note,
    }


def overview_document(view: Overview, rows: Sequence[QueueStats]) -> Document:
    """Return queues at a glance; a number that is an estimate is not ``exact``."""
    return {
        "as_of": view.as_of,
        "health": asdict(health(view)),
        "pollers": view.pollers,
        "queues": [
            {
                "queue": row.queue,
                "paused": row.paused,
                "late": row.late,
                "pollers": row.pollers,
                "oldest_seconds": _seconds(row.oldest),
                "rate_in": row.rate_in,
                "rate_out": row.rate_out,
                "failed_last_hour": row.failed,
                "drain_seconds": _seconds(row.drain),
                "tasks": {name: {"count": one.number, "exact": one.exact} for name, one in row.statuses.items()},
            }
            for row in rows
        ],
    }


def _seconds(value: timedelta | None) -> float | None:
    return None if value is None else value.total_seconds()


# -- secrets -----------------------------------------------------------------------------------------------------------


def masked(value: object) -> object:
    """Return a JSON value with the values of secret keys replaced, however deep; the value itself stays as it is.

    Text inside it is treated as ``masked_text`` does.
    """
    parts = _parts()
    return _masked(value, parts, _pattern(parts))


def masked_text(text: str) -> str:
    """Return a text, such as a traceback, without the values of secret keys and the passwords in addresses.

    ``password=x``, ``password: x``, ``"password": "x"``, ``Authorization: Bearer x``.
    """
    return _masked_text(text, _pattern(_parts()))


def _masked(value: object, parts: tuple[str, ...], pattern: re.Pattern[str]) -> object:
    if isinstance(value, Mapping):
        return {
            key: MASKED if _is_secret(str(key), parts) else _masked(inner, parts, pattern)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(inner, parts, pattern) for inner in value]
    return _masked_text(value, pattern) if isinstance(value, str) else value


def _masked_text(text: str, pattern: re.Pattern[str]) -> str:
    return URL_PASSWORD.sub(rf"\1:{MASKED}@", pattern.sub(_mask, text))


def _is_secret(key: str, parts: tuple[str, ...]) -> bool:
    plain = KEY_JOINTS.sub("", key).lower()
    return any(part in plain for part in parts)


def _parts() -> tuple[str, ...]:
    """Return the parts of secret keys in lower case, without what joins words."""
    return tuple(part for one in conf.settings().mask if (part := KEY_JOINTS.sub("", one).lower()))


@lru_cache(maxsize=16)
def _pattern(parts: tuple[str, ...]) -> re.Pattern[str]:
    """Find a key with a secret part, and what joins it to its value: ``before``; the value; a closing quote: ``after``.

    A bare value ends at the next gap. After a bare key and a colon, as in a header, it ends with the line, because its
    real end is not known: too much masked is better than too little.
    """
    words = "|".join(r"[\s_.-]?".join(re.escape(part)) for part in parts) or r"(?!)"
    key = rf"""(?:{words})[\w.-]{{0,64}}"""  # what stands before it in the key stays as it is
    quoted = r"""[bru]*(?P<quote>\\?["'])"""
    kinds = (
        rf"""(?P<before>{key}\\?["']?\s*(?:=>|[=:])\s*{quoted})(?:(?!(?P=quote))(?:\\.|.))*(?P<after>(?P=quote)|\Z)""",
        rf"""(?P<before_2>{key}(?:\\?["']\s*:|\s*=>?)\s*)[^\s,;&)}}\]"']+""",
        rf"""(?P<before_3>{key}\s*:[^\S\n]*)[^\n]+""",
    )
    return re.compile("|".join(kinds), re.IGNORECASE | re.DOTALL)


def _mask(found: re.Match[str]) -> str:
    before = found["before"] or found["before_2"] or found["before_3"]
    return f"{before}{MASKED}{found['after'] or ''}"
