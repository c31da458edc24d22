"""Move: what operators do to tasks, and what pollers do for tasks nobody holds any more.

Each verb changes only rows whose status allows it, judged by the database at that moment, and returns how many it
really changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Count, F, QuerySet
from django.db.models.functions import Least, Now

from django_dbtaskqueue.core.states import BY_VERB, TERMINAL, sources
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.groups import lock, regroup
from django_dbtaskqueue.models import AbstractTask, DeletedTasks

Tasks = QuerySet[AbstractTask]


def base_rows(tasks: Tasks) -> Tasks:
    """Return all tasks of the same table, on the database it is written to: a replica may show what was."""
    pinned = tasks.all()
    pinned._for_write = True  # type: ignore[attr-defined]  # what Django's own update() and delete() do
    return tasks.model._base_manager.using(pinned.db)


def same_rows(rows: Sequence[AbstractTask]) -> Tasks:
    """Return rows of one table, at least one, as a selection on the database they were read from."""
    return type(rows[0])._base_manager.using(rows[0]._state.db).filter(pk__in=[row.pk for row in rows])


def as_filterable(tasks: Tasks) -> Tasks:
    """Return a selection of any kind as one that can be filtered, ordered, locked, updated and deleted.

    A slice is settled here and now: what remains must not move up into it between two statements.
    """
    everything = base_rows(tasks)
    selection = tasks.using(everything.db)
    if tasks.query.is_sliced:
        return everything.filter(pk__in=list(selection.values_list("pk", flat=True)))
    if _is_a_filter(tasks):
        everything.query.where = tasks.query.where.clone()
        return everything
    return everything.filter(pk__in=selection.order_by().values("pk"))


def _is_a_filter(tasks: Tasks) -> bool:
    """Return whether a selection is this table with a condition and no more, which needs no query inside the query.

    Two looks at one table are compared row by row where PostgreSQL still holds it for empty: 40,000 tasks take minutes.
    """
    query = tasks.query
    more = (query.distinct, query.combinator, query.annotations, query.extra, query.group_by)
    return not any(more) and set(query.alias_map) <= {tasks.model._meta.db_table}


def lockable(tasks: Tasks, *, wait: bool = False) -> Tasks:
    """Return what ``as_filterable`` gave so that reading it locks the rows, in the order of their ids.

    All that wait for row locks lock in this order, so there are no deadlocks. Rows that another transaction has locked
    are skipped, or waited for (``wait``).
    """
    if transaction.get_connection(tasks.db).features.has_select_for_update_skip_locked:
        tasks = tasks.select_for_update(skip_locked=not wait)
    return tasks.order_by("pk")


def delete_and_count(tasks: Tasks) -> int:
    """Delete rows this transaction has locked, and count them per queue in the same transaction."""
    counts = tasks.order_by().values("queue").annotate(number=Count("pk")).values_list("queue", "number")
    DeletedTasks.objects.using(tasks.db).bulk_create(
        [DeletedTasks(queue=queue, count=number) for queue, number in counts]
    )
    return int(tasks._raw_delete(tasks.db) or 0)  # None where Django sees that nothing can match


Groups = Mapping[str, set[str]]  # the keys of groups, by queue
BATCH = 10_000  # ids in one statement: databases bound the number of its parameters
BACK_IN_LINE: dict[str, Any] = {
    "ready_time": Now(),
    "next_process_time": Now(),
    "poller_instance": None,
    "finish_time": None,
}
# The columns that a verb changes beside the status. A verb that changes ``ready_time`` changes groups' heads, too.
CHANGES: dict[str, dict[str, Any]] = {
    "reprocess": {"attempt": 0, **BACK_IN_LINE},
    "mark_poison": {},
    "unpoison": {},
    "cancel": {"ready_time": None, "parked_by": None, "finish_time": Now()},
    # A last attempt is given back: without an attempt left no poller could ever take the task.
    "release_all": {"attempt": Least(F("attempt"), F("max_attempts") - 1), **BACK_IN_LINE},
    "kick": {"attempt": 0, **BACK_IN_LINE},
}


def reprocess(tasks: Tasks) -> int:
    """ERROR → CREATED, due now, with a new budget of attempts."""
    return _move(tasks, "reprocess")


def mark_poison(tasks: Tasks) -> int:
    """ERROR → POISON."""
    return _move(tasks, "mark_poison")


def unpoison(tasks: Tasks) -> int:
    """POISON → ERROR."""
    return _move(tasks, "unpoison")


def cancel(tasks: Tasks) -> int:
    """CREATED → POISON."""
    return _move(tasks, "cancel")


def release_all(tasks: Tasks) -> int:
    """PROCESSING → CREATED, due now; the holders get ``LeaseLost``. A last attempt is given back."""
    return _move(tasks, "release_all")


def kick(tasks: Tasks, n: int) -> int:
    """POISON → CREATED for at most ``n`` tasks, the oldest first."""
    if n < 0:
        raise ValueError(f"kick({n}) needs a number of tasks that is not negative.")
    tasks = as_filterable(tasks).filter(status__in=sources("kick"))
    with transaction.atomic(using=tasks.db):
        return _move(lockable(tasks)[:n], "kick")


def delete(tasks: Tasks) -> int:
    """Delete tasks in any status and count the deletions in the same transaction; the holders get ``LeaseLost``."""
    tasks = as_filterable(tasks)
    with transaction.atomic(using=tasks.db):
        groups = _groups(tasks.filter(group_key__isnull=False))
        return _regroup(tasks, groups, partial(_locked, tasks, delete_and_count))


def change_locked(rows: Sequence[AbstractTask], verb: str) -> int:
    """Do a verb to rows of one table that this transaction has locked and read with their queue and group.

    The rows are not read again. The statement that changes them still tests their status.
    """
    tasks = same_rows(rows)
    groups: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        groups[row.queue].update([row.group_key] if row.group_key is not None else [])
    if BY_VERB[verb].target is None:
        return _regroup(tasks, groups, partial(delete_and_count, tasks))
    return _change(tasks, verb, groups, partial(_update, verb, tasks))


def _move(tasks: Tasks, verb: str) -> int:
    allowed = as_filterable(tasks).filter(status__in=sources(verb))
    with transaction.atomic(using=allowed.db):
        groups = _groups(allowed) if "ready_time" in CHANGES[verb] else {}
        return _change(allowed, verb, groups, partial(_locked, allowed, partial(_update, verb)))


def _change(tasks: Tasks, verb: str, groups: Groups, update: Callable[[], int]) -> int:
    """Run an update. Where it changes ``ready_time``, see to the groups' heads and wake the queues' pollers."""
    if "ready_time" not in CHANGES[verb]:
        return update()
    changed = _regroup(tasks, groups, update)
    if changed and CHANGES[verb]["ready_time"] is not None:
        for queue in groups:
            notify.after_commit(transaction.get_connection(tasks.db), queue)
    return changed


def _update(verb: str, tasks: Tasks) -> int:
    edge = BY_VERB[verb]
    final = edge.target if edge.target in TERMINAL else None
    return tasks.filter(status__in=edge.sources).update(
        status=edge.target, final_status=final, last_update_time=Now(), **CHANGES[verb]
    )


def _locked(tasks: Tasks, act: Callable[[Tasks], int]) -> int:
    """Lock rows in order of id, then act on them in batches. One statement for both has plans that take for ever."""
    ids = list(lockable(tasks, wait=True).values_list("pk", flat=True))
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    return sum(act(base_rows(tasks).filter(pk__in=batch)) for batch in batches)


def _groups(tasks: Tasks) -> Groups:
    """Return the queues of tasks, each with the groups of its tasks."""
    groups: dict[str, set[str]] = defaultdict(set)
    for queue, group in tasks.order_by().values_list("queue", "group_key").distinct():
        groups[queue].update([group] if group is not None else [])
    return groups


def _regroup(tasks: Tasks, groups: Groups, change: Callable[[], int]) -> int:
    """Run a change of tasks under the locks of their groups, and see to the groups' heads."""
    session = Session(transaction.get_connection(tasks.db), tasks.model)
    for queue in sorted(groups):
        lock(session, queue, groups[queue])
    number = change()
    for queue in sorted(groups):
        regroup(session, queue, groups[queue])
    return number


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
