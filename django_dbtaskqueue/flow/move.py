"""Move: what operators do to tasks, and what pollers do for tasks nobody holds any more.

Each verb changes only rows whose status allows it, judged by the database at that moment, and returns how many it
really changed.
"""

from __future__ import annotations

import json
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from django_dbtaskqueue import notifier
from django_dbtaskqueue.flow.rows import Tasks, lockable, plain, remove
from django_dbtaskqueue.flow.sql.statements import NO_HANDLER
from django_dbtaskqueue.session import Session
from django_dbtaskqueue.status import BY_VERB, sources

BACK_IN_LINE: dict[str, Any] = {
    "ready_time": Now(),
    "next_process_time": Now(),
    "poller_instance": None,
    "finish_time": None,
}
OUT_OF_LINE: dict[str, Any] = {"ready_time": None, "parked_by": None, "finish_time": Now()}


def reprocess(tasks: Tasks) -> int:
    """ERROR → CREATED, due now, with a new budget of attempts."""
    return _move(tasks, "reprocess", attempt=0, **BACK_IN_LINE)


def mark_poison(tasks: Tasks) -> int:
    """ERROR → POISON."""
    return _move(tasks, "mark_poison")


def unpoison(tasks: Tasks) -> int:
    """POISON → ERROR."""
    return _move(tasks, "unpoison")


def cancel(tasks: Tasks) -> int:
    """CREATED → POISON."""
    return _move(tasks, "cancel", **OUT_OF_LINE)


def release_all(tasks: Tasks) -> int:
    """PROCESSING → CREATED, due now; the holders get ``LeaseLost``."""
    return _move(tasks, "release_all", **BACK_IN_LINE)


def kick(tasks: Tasks, n: int) -> int:
    """POISON → CREATED for at most ``n`` tasks, the oldest first."""
    if n < 0:
        raise ValueError(f"kick({n}) needs a number of tasks that is not negative.")
    with transaction.atomic(using=tasks.db):
        oldest = lockable(tasks.filter(status__in=sources("kick"))).order_by("id")[:n]
        ids = list(oldest.values_list("pk", flat=True))
        return _move(plain(tasks).filter(pk__in=ids), "kick", attempt=0, **BACK_IN_LINE)


def delete(tasks: Tasks) -> int:
    """Delete tasks in any status and count the deletions in the same transaction; the holders get ``LeaseLost``."""
    with transaction.atomic(using=tasks.db):
        ids = list(lockable(tasks).order_by("pk").values_list("pk", flat=True))
        return remove(plain(tasks).filter(pk__in=ids))


def _move(tasks: Tasks, verb: str, **changes: Any) -> int:
    edge = BY_VERB[verb]
    if edge.target is None:
        raise ValueError(f"{verb} takes rows out of the table; it is not a change of status.")
    allowed = plain(tasks).filter(pk__in=tasks.order_by().values("pk"), status__in=edge.sources)
    with transaction.atomic(using=tasks.db):
        queues = set(allowed.values_list("queue", flat=True)) if "ready_time" in changes else set()
        changed = allowed.update(status=edge.target, last_update_time=Now(), **changes)
        if changed and changes.get("ready_time") is not None:
            for queue in queues:
                notifier.after_commit(transaction.get_connection(tasks.db), queue)
    return changed


def spent(session: Session, queue: str, *, limit: int = 100) -> list[tuple[int, int, int, str]]:
    """Return (id, total_attempt, attempt, poller) of tasks whose process died on their last attempt, locked."""
    return [
        (row[0], row[1], row[2], row[3])
        for row in session.run(session.sql.spent, {"queue_name": queue, "limit": limit})
    ]


def unpark(session: Session, queue: str, payload_types: list[str]) -> int:
    """Put tasks parked for want of a handler back in line; return how many. Uncharged, never due in the past."""
    types: Any = payload_types if session.postgresql else json.dumps(payload_types)
    return len(session.run(session.sql.unpark, {"queue_name": queue, "types": types}))


def no_handler(queue: str, payload_type: str | None) -> str:
    """Return the parking reason of a task no processor here can take."""
    return f"{NO_HANDLER} for payload type {payload_type or 'plain JSON'} on queue {queue}"
