"""Move: what operators do to tasks, and what pollers do for tasks nobody holds any more.

Each verb changes only rows whose status allows it, judged by the database at that moment, and returns how many it
really changed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Least, Now

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.states import BY_VERB, TERMINAL, sources
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.groups import lock, regroup
from django_dbtaskqueue.flow.selection import Tasks, as_filterable, base_rows, delete_and_count, lockable

BATCH = 10_000  # ids in one statement: databases bound the number of its parameters
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
    """PROCESSING → CREATED, due now; the holders get ``LeaseLost``. A last attempt is given back."""
    attempt = Least(F("attempt"), F("max_attempts") - 1)  # without one left nobody could ever take the task
    return _move(tasks, "release_all", attempt=attempt, **BACK_IN_LINE)


def kick(tasks: Tasks, n: int) -> int:
    """POISON → CREATED for at most ``n`` tasks, the oldest first."""
    if n < 0:
        raise ValueError(f"kick({n}) needs a number of tasks that is not negative.")
    tasks = as_filterable(tasks).filter(status__in=sources("kick"))
    with transaction.atomic(using=tasks.db):
        return _move(lockable(tasks)[:n], "kick", attempt=0, **BACK_IN_LINE)


def delete(tasks: Tasks) -> int:
    """Delete tasks in any status and count the deletions in the same transaction; the holders get ``LeaseLost``."""
    tasks = as_filterable(tasks)
    with transaction.atomic(using=tasks.db):
        return _regroup(tasks, partial(_locked, tasks, delete_and_count))


def _locked(tasks: Tasks, act: Callable[[Tasks], int]) -> int:
    """Lock rows in order of id, then act on them in batches. One statement for both has plans that take for ever."""
    ids = list(lockable(tasks, wait=True).values_list("pk", flat=True))
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    return sum(act(base_rows(tasks).filter(pk__in=batch)) for batch in batches)


def _regroup(tasks: Tasks, change: Callable[[], int]) -> int:
    """Run a change of tasks under the locks of their groups, and see to the groups' heads."""
    connection = transaction.get_connection(tasks.db)
    session = Session(connection, tasks.model)
    grouped = tasks.order_by().filter(group_key__isnull=False)
    groups: dict[str, set[str]] = defaultdict(set)
    for queue, group in grouped.values_list("queue", "group_key").distinct():
        groups[queue].add(str(group))
    for queue in sorted(groups):
        lock(session, queue, groups[queue])
    number = change()
    for queue in sorted(groups):
        regroup(session, queue, groups[queue])
    return number


def _move(tasks: Tasks, verb: str, **changes: Any) -> int:
    edge = BY_VERB[verb]
    if edge.target is None:
        raise ValueError(f"{verb} takes rows out of the table; it is not a change of status.")
    allowed = as_filterable(tasks).filter(status__in=edge.sources)
    with transaction.atomic(using=allowed.db):
        final = edge.target if edge.target in TERMINAL else None
        update = methodcaller("update", status=edge.target, final_status=final, last_update_time=Now(), **changes)
        change = partial(_locked, allowed, update)
        if "ready_time" not in changes:
            return change()
        queues = set(allowed.values_list("queue", flat=True).distinct())
        changed = _regroup(allowed, change)
        if changed and changes.get("ready_time") is not None:
            for queue in queues:
                notify.after_commit(transaction.get_connection(allowed.db), queue)
    return changed


def without_outcome(session: Session, leases: list[Lease]) -> set[int]:
    """Return the ids of those tasks whose attempt before this one left no outcome: its process died, as a rule."""
    again = [lease for lease in leases if lease.attempt > 1 and not lease.reenqueue_attempt]
    if not again:
        return set()
    rows = json.dumps([{"i": lease.id} for lease in again])
    failed: dict[int, int] = dict(session.run(session.sql.last_failures, {"rows": rows, "location": session.location}))
    return {lease.id for lease in again if failed.get(lease.id) != lease.attempt - 1}


def unpark(session: Session, queue: str, payload_types: list[str], *, untyped: bool = True) -> int:
    """Put tasks parked for want of a handler back in line; return how many. Uncharged, never due in the past.

    ``untyped`` says whether rows without a payload type have a handler too.
    """
    types = session.sql.dialect.array(payload_types)
    with session.atomic():
        back = session.run(session.sql.unpark, {"queue_name": queue, "types": types, "untyped": untyped})
        groups = {group for _, group in back if group is not None}
        lock(session, queue, groups)
        regroup(session, queue, groups)
    return len(back)
