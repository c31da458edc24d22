"""Tasks as data, for the command line's JSON and for the API: secrets masked, no payload where none may be seen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Attempt, BulkOperation, TaskHistory
from django_dbtaskqueue.operations.masking import masked, masked_text
from django_dbtaskqueue.operations.stats.overview import Overview, QueueFigures

LONG = ("payload", "result", "context")
FIELDS = (
    "id", "queue", "reference", "status", "attempt", "max_attempts", "total_attempt", "reenqueue_attempt", "priority",
    "payload_type", "group_key", "tag", "parked_by", "poller_instance", "create_time", "ready_time", "start_time",
    "next_process_time", "finish_time", "expire_time",
)  # fmt: skip
WIDEST = 72  # characters of the one line of an error


def summary(task: Any, *, payload: bool = True) -> dict[str, Any]:
    """Return what a list says of a task; without ``payload`` no result, but the one line of an error."""
    word = last_word(task.process_result) if payload or task.status != Status.COMPLETED else ""
    return {name: getattr(task, name, None) for name in FIELDS} | {"last_word": word}


def detail(task: Any, *, payload: bool) -> dict[str, Any]:
    """Return all of a task, secrets masked; what was enqueued and what came of it only with ``payload``."""
    document = summary(task, payload=payload)
    if payload:
        document |= {name: masked(getattr(task, name)) for name in LONG}
        document["process_result"] = masked_text(task.process_result or "")
    return document


def detail_of_history(row: TaskHistory, *, payload: bool) -> dict[str, Any]:
    """Return the same of a task that left its table, and when it did; what only a table knows is None."""
    return detail(row, payload=payload) | {"id": row.task_id, "moved_time": row.moved_time}


def attempt_of(row: Attempt, *, payload: bool = True) -> dict[str, Any]:
    """Return a failed attempt, secrets masked; without ``payload`` the one line of its error only."""
    document = {
        "task_id": row.task_id,
        "queue": row.queue,
        "attempt": row.attempt,
        "poller": row.poller_instance,
        "failed": row.finish_time,
        "error": last_word(error_of(row)),
    }
    if payload:
        document |= {"error": masked_text(error_of(row)), "traceback": masked_text(row.traceback)}
    return document


def error_of(row: Attempt) -> str:
    """Return what a failed attempt failed of, not masked."""
    return f"{row.error_type}: {row.message}" if row.error_type else row.message


def last_word(text: str | None) -> str:
    """Return the one line of a result or error that says most, masked and cut: of a traceback its end."""
    lines = [line.strip() for line in masked_text(text or "").splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[-1] if lines[0].startswith("Traceback (") else lines[0]
    return line if len(line) <= WIDEST else line[: WIDEST - 1] + "…"


def operation_document(operation: BulkOperation) -> dict[str, Any]:
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


def overview_document(view: Overview, rows: Sequence[QueueFigures]) -> dict[str, Any]:
    """Return queues at a glance; a number that is an estimate is not ``exact``."""
    return {
        "as_of": view.as_of,
        "pollers": view.pollers,
        "queues": [
            {
                "queue": row.queue,
                "paused": row.paused,
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
