"""Move: what operators do to tasks, and what pollers do for tasks nobody holds any more.

Each verb changes only rows whose status allows it, judged by the database at that moment, and returns how many it
really changed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Least, Now

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.sql.statements import NO_HANDLER
from django_dbtaskqueue.core.states import BY_VERB, TERMINAL, sources
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Row, Session
from django_dbtaskqueue.flow.groups import lock, regroup
from django_dbtaskqueue.flow.selection import Tasks, chosen, lockable, plain, remove

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
    tasks = chosen(tasks).filter(status__in=sources("kick"))
    with transaction.atomic(using=tasks.db):
        return _move(lockable(tasks)[:n], "kick", attempt=0, **BACK_IN_LINE)


def delete(tasks: Tasks) -> int:
    """Delete tasks in any status and count the deletions in the same transaction; the holders get ``LeaseLost``."""
    tasks = chosen(tasks)
    with transaction.atomic(using=tasks.db):
        return _regroup(tasks, partial(_locked, tasks, remove))


def _locked(tasks: Tasks, act: Callable[[Tasks], int]) -> int:
    """Lock rows in order of id, then act on them in batches. One statement for both has plans that take for ever."""
    ids = list(lockable(tasks, wait=True).values_list("pk", flat=True))
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    return sum(act(plain(tasks).filter(pk__in=batch)) for batch in batches)


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
    allowed = chosen(tasks).filter(status__in=edge.sources)
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


def spent_in(session: Session, queue: str) -> float | None:
    """Return the seconds until the first lease on a last attempt runs out: negative when it has, None without one."""
    left: float | None = session.run(session.sql.spent_in, {"queue_name": queue})[0][0]
    return left


def spent_in_each(session: Session, queues: Sequence[str]) -> dict[str, float]:
    """Return ``spent_in`` of several queues, those that have such a lease.

    On PostgreSQL one statement passes over the queues without anything in line. Not more than that: a plan for names
    it does not know reads the whole table for each.
    """
    if session.postgresql and len(queues) > 1:
        queues = list(dict(session.run(session.sql.priorities_of_many, {"queues": list(queues)})))
    found = {queue: spent_in(session, queue) for queue in queues}
    return {queue: left for queue, left in found.items() if left is not None}


def spent(session: Session, queue: str, *, limit: int = 100) -> list[Row]:
    """Return leases of tasks whose process died on their last attempt, as columns, locked: call it in ``atomic``."""
    return session.run(session.sql.spent, {"queue_name": queue, "limit": limit})


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


def no_handler(queue: str, payload_type: str | None) -> str:
    """Return the parking reason of a task no processor here can take."""
    return f"{NO_HANDLER} for payload type {payload_type or 'plain JSON'} on queue {queue}"
