"""Move: what operators do to tasks, and what pollers do for tasks without a lease.

Each verb changes only rows whose status allows it, judged by the database at that moment, and returns their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Case, Expression, F, Q, When
from django.db.models.functions import Coalesce, Least, Now

from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core.exceptions import QueueFull, UnknownQueue
from django_dbtaskqueue.core.lease import note_own_end
from django_dbtaskqueue.core.sql.dialects import GROUP, MOVING, PARENT_FAILED, PARENTS
from django_dbtaskqueue.core.states import BY_VERB, CREATED, PROCESSING, SIGNAL, TERMINAL, sources
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Row, Session, is_task_table
from django_dbtaskqueue.flow import dependencies, placement, selection, usage
from django_dbtaskqueue.flow.dependencies import TaskKey, by_table
from django_dbtaskqueue.flow.groups import Groups, groups_of, lock_all, lock_in_order, regroup
from django_dbtaskqueue.flow.selection import Tasks, as_filterable, base_rows, with_row_locks
from django_dbtaskqueue.models import AbstractTask, Dependency, UsedReference
from django_dbtaskqueue.models.tasks import RECEIVED, SENT, TIMED_OUT, WAIT

ROWS_PER_PUT_BACK = 100  # rows in one statement of ``set_back``
IDS_PER_STATEMENT = 10_000  # ids in one statement: databases bound the number of its parameters
FILLING = ("reprocess", "kick", "edit", "move")  # verbs that put tasks into a queue
Columns = dict[str, Any]
LOCKED = "pk", "queue", "group_key", "status"  # what is read of the tasks that a verb changes


def _due(time: Expression) -> Columns:
    """Return the times of a task that becomes due at ``time``. Its time to live begins again then.

    It was due at the earlier of two columns: ``next_process_time`` may be the end of a lease, and ``ready_time`` is
    later for the head of a group, and NULL for a task that is not in the ready order.
    """
    was = Least("next_process_time", Coalesce("ready_time", "next_process_time"))
    return {"next_process_time": time, "ready_time": time, "expire_time": F("expire_time") + (time - was)}


def _due_in_place(time: Expression) -> Columns:
    """``_due`` for a task that waits. Behind the head of its group it stays there."""
    return {**_due(time), "ready_time": Case(When(parked_by__isnull=True, then=time), default=None)}


READY_NOW = {
    **_due(Now()),
    # Without a start, a row that others than its holder have ended does not look as if that had settled it.
    "start_time": Case(When(Q(poller_instance=None) | Q(lost_leases__gt=0), then=None), default=F("start_time")),
    "poller_instance": None,
    "finish_time": None,
    "watched": Case(When(watched=False, then=True), default=F("watched")),  # the task ends once more
}
STAYS_PARKED = Q(parked_by__in=(PARENTS, SIGNAL))  # for what another queue does not change

# The columns that a verb changes beside the status. A verb that changes ``ready_time`` changes groups' heads, too.
CHANGES: dict[str, Columns] = {
    "reprocess": {"attempt": 0, **READY_NOW},
    "mark_poison": {},
    "unpoison": {},
    # Without its poller, a row does not look as if its holder had settled it (``outcome_of``). While a task is held,
    # next_process_time is the end of the lease.
    "cancel": {
        "next_process_time": Case(When(status=PROCESSING, then=F("ready_time")), default=F("next_process_time")),
        "ready_time": None,
        "parked_by": None,
        "poller_instance": None,
        "process_result": Case(When(process_result__startswith=PARENT_FAILED, then=None), default=F("process_result")),
        "finish_time": Now(),
    },
    # A last attempt is given back: without an attempt left no poller could ever take the task.
    "release_all": {**READY_NOW, "attempt": Least(F("attempt"), F("max_attempts") - 1), "start_time": None},
    "kick": {"attempt": 0, **READY_NOW},
    "run_now": _due_in_place(Now()),
}
# The same of verbs that are given values.
CHANGES_BY_VALUE: dict[str, Callable[[Mapping[str, Any]], Columns]] = {
    "snooze": lambda given: _due_in_place(Now() + given["delay"]),
    "change_priority": lambda given: {"priority": given["priority"], "ready_time": F("ready_time")},
    "move": lambda given: {
        "queue": given["queue"],
        "parked_by": Case(When(STAYS_PARKED, then=F("parked_by")), default=None),
        "ready_time": Case(When(STAYS_PARKED, then=None), default=F("next_process_time")),
    },
    "edit": lambda given: {"payload": given["payload"], **CHANGES["reprocess"]},
}
CHANGE_GROUPS = {*CHANGES_BY_VALUE, "delete", "signal", *(verb for verb in CHANGES if "ready_time" in CHANGES[verb])}
CALLS = {"mark_poison": "poison", "release_all": "release"}  # verbs that are counted as what pollers do
# What a task must fulfil besides its status. No verb changes a task that another database may have already.
CONDITIONS = {
    verb: ~Q(parked_by__startswith=MOVING) if CREATED in edge.sources else Q() for verb, edge in BY_VERB.items()
}
CONDITIONS["run_now"] &= Q(parked_by__isnull=True) | Q(parked_by=GROUP)  # a task without a processor stays parked


def change_statuses(tasks: Tasks, verb: str, *, call: str = "") -> int:
    """Do one of ``CHANGES`` to a selection, or "delete": from the verb's statuses to its target (``core.states``).

    Deletions are counted; their holders get ``LeaseLost``. ``call``: how it is counted, if not by its verb.
    """
    allowed = as_filterable(tasks).filter(CONDITIONS[verb], status__in=sources(verb))
    with transaction.atomic(using=allowed.db), locked_groups(allowed, verb):
        rows = list(with_row_locks(allowed, wait=True).values_list(*LOCKED))
        return _change(base_rows(allowed), rows, verb, call=call)


def kick(tasks: Tasks, n: int) -> int:
    """POISON → CREATED for at most ``n`` tasks, the oldest first."""
    if n < 0:
        raise ValueError(f"kick({n}) needs a number of tasks that is not negative.")
    tasks = as_filterable(tasks).filter(status__in=sources("kick"))
    with transaction.atomic(using=tasks.db), not_overfull(tasks):
        first = with_row_locks(tasks).values_list(*LOCKED)
        rows = lock_in_order(_session(tasks), lambda: list(first[:n]), lambda rows: groups_of(row[1:3] for row in rows))
        return _change(base_rows(tasks), rows, "kick")


@contextmanager
def locked_groups(tasks: Tasks, verb: str, given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Lock the groups of some tasks if the verb changes them, before the block locks the rows, as a settle does."""
    found, fills = tasks.order_by().values_list("queue", "group_key").distinct(), verb in FILLING
    groups = groups_of((found if fills else found.filter(group_key__isnull=False)) if verb in CHANGE_GROUPS else ())
    with not_overfull(tasks, () if not fills else [given["queue"]] if given and verb == "move" else groups):
        if any(groups.values()):
            lock_all(_session(tasks), _with_entered(groups, given) if verb == "move" else groups)
        yield


def change_locked(tasks: Sequence[AbstractTask], verb: str, given: Mapping[str, Any] | None = None) -> int:
    """Do a verb to tasks of one table that this transaction has read and locked, in ``locked_groups``."""
    rows = [(task.pk, task.queue, task.group_key, task.status) for task in tasks]
    return _change(type(tasks[0])._base_manager.using(tasks[0]._state.db), rows, verb, given)


def set_back(
    tasks: Tasks, before: Mapping[int, Columns], unchanged: Callable[[AbstractTask], bool]
) -> list[AbstractTask]:
    """Give tasks the columns back that they had before an action. Call it in ``atomic``; return the tasks changed.

    Rows that another transaction has locked, and rows that are not ``unchanged`` since the action, stay as they are.
    """
    now = tasks.filter(group_key__isnull=False).values_list("pk", "queue", "group_key")
    pairs = [pair for pk, queue, key in now for pair in ((queue, key), (before[pk]["queue"], key))]
    lock_all(_session(tasks), groups_of(pairs))
    rows = [row for row in with_row_locks(tasks) if unchanged(row)]
    for row in rows:
        ends_again = row.watched is False and before[row.pk]["final_status"] is None
        given = {"last_update_time": Now(), "watched": ends_again or row.watched}
        for name, value in {**before[row.pk], **given}.items():
            setattr(row, name, value)
    if rows:
        with _regrouped(tasks, groups_of([*pairs, *((row.queue, None) for row in rows)])):
            base_rows(tasks).bulk_update(rows, {*given}.union(*before.values()), batch_size=ROWS_PER_PUT_BACK)
            wait_again(_session(tasks), [row.pk for row in rows if row.parked_by == PARENTS])
        _count(tasks, "put_back", [(row.pk, row.queue, row.group_key, row.status) for row in rows])
    for queue in {row.queue for row in rows if row.status == CREATED}:
        notify.wake_after_commit(transaction.get_connection(tasks.db), queue)
    return rows


@contextmanager
def not_overfull(tasks: Tasks, queues: Iterable[str] | None = None) -> Iterator[None]:
    """Lock the tasks' queues, or those given, as an enqueue does; raise ``QueueFull`` if the block overfills one."""
    limited = {}
    for queue in sorted(tasks.order_by().values_list("queue", flat=True).distinct() if queues is None else queues):
        with suppress(UnknownQueue):
            if (capacity := overridden_settings(queue, tasks.db).capacity) is not None:
                placement.lock_live(_session(tasks), queue, capacity)
                limited[queue] = capacity
    yield
    for queue, capacity in limited.items():
        if placement.lock_live(_session(tasks), queue, capacity) > capacity:
            raise QueueFull(queue, capacity)


def wait_again(session: Session, ids: list[int]) -> None:
    """Let tasks that wait again start if their parents have ended; parents that failed are told of once more."""
    of = {"location": session.location, "ids": session.sql.dialect.array(sorted(ids))}
    held = {row[0] for row in session.run(session.sql.lock_holds, of)}  # waits for who takes the last parent off
    dependencies.Changes().let_go(session, session.location, {*ids} - held)
    edges = Dependency.objects.using(session.connection.alias).filter(child_location=session.location, outcome=None)
    parents = {TaskKey(*pair) for pair in edges.filter(child_id__in=held).values_list("parent_location", "parent_id")}
    for there, ended in by_table(session, (key for key in parents if is_task_table(key.location))):
        there.run(there.sql.ask_again, {"ids": ended})
        dependencies.after_commit(there, dependencies.sweep)


def _change(
    table: Tasks, rows: Sequence[Row], verb: str, given: Mapping[str, Any] | None = None, *, call: str = ""
) -> int:
    """Do a verb to locked rows. Where it changes ``ready_time``, see to the groups' heads and wake the queues' pollers.

    One statement that locks and changes rows would have very slow plans.
    """
    target, ids, groups = BY_VERB[verb].target, [row[0] for row in rows], groups_of(row[1:3] for row in rows)
    if verb == "move":
        groups = _with_entered(groups, given)
    elif verb == "edit":
        # What was approved has changed, so the tasks wait again.
        selection.delete_steps(table.model, table.db, ids, kind__in=(WAIT, RECEIVED, TIMED_OUT, SENT))
    _count(table, call or CALLS.get(verb, verb), rows)
    if target in TERMINAL:
        dependencies.after_commit(_session(table), dependencies.sweep)
    changed, changes_groups = 0, verb in CHANGE_GROUPS
    with _regrouped(table, groups if changes_groups else {}):
        for start in range(0, len(ids), IDS_PER_STATEMENT):
            some = ids[start : start + IDS_PER_STATEMENT]
            batch = table.filter(pk__in=some)
            changed += _delete(batch, some) if target is None else _update(batch, verb, given)
    if changed and changes_groups and verb not in ("cancel", "snooze", "delete"):  # after these no poller has to look
        for queue in groups:
            notify.wake_after_commit(transaction.get_connection(table.db), queue)
    return changed


def _delete(tasks: Tasks, ids: Sequence[int]) -> int:
    """Delete locked rows, and free their references. What waits for one of them is told in this transaction."""
    if watched := list(tasks.filter(watched__isnull=False).values_list("pk", flat=True)):
        dependencies.announce(_session(tasks), dependencies.end_deleted(_session(tasks), watched))
    if UsedReference.objects.using(tasks.db).exists():
        named = tasks.filter(reference__isnull=False)
        for queue in named.order_by().values_list("queue", flat=True).distinct():
            selection.free_references(tasks.db, queue, named.filter(queue=queue).values("reference"))
    return selection.delete_locked(_session(tasks), ids)


def _update(tasks: Tasks, verb: str, given: Mapping[str, Any] | None) -> int:
    edge = BY_VERB[verb]
    final = edge.target if edge.target in TERMINAL else None
    columns = CHANGES[verb] if verb in CHANGES else CHANGES_BY_VALUE[verb](given or {})
    return tasks.filter(status__in=edge.sources).update(
        status=edge.target, final_status=final, last_update_time=Now(), **columns
    )


def _count(tasks: Tasks, call: str, rows: Iterable[Row]) -> None:
    """Count what is done to locked rows, after the commit. Where it ends leases, their pollers look at once."""
    calls, lost = defaultdict[tuple[str, str], list[int]](list), set[str]()
    for pk, queue, _group, status in rows:
        calls[queue, call].append(pk)
        if status == PROCESSING:
            lost.add(queue)
    connection = transaction.get_connection(tasks.db)
    usage.count_calls(connection, calls)
    for queue in lost:
        note_own_end(tasks.db, queue, calls[queue, call])
        notify.wake_after_commit(connection, notify.LEASES_LOST + queue)


def _with_entered(groups: Groups, given: Mapping[str, Any] | None) -> Groups:
    """Add the groups that moved tasks enter in another queue."""
    return {**groups, given["queue"]: set().union(*groups.values())} if given else groups


@contextmanager
def _regrouped(tasks: Tasks, groups: Groups) -> Iterator[None]:
    """Change tasks in the block under the locks of their groups; then see to the groups' heads."""
    if not any(groups.values()):
        yield
        return
    session = _session(tasks)
    lock_all(session, groups)
    yield
    for queue in sorted(groups):
        regroup(session, queue, groups[queue])


def _session(tasks: Tasks) -> Session:
    return Session(transaction.get_connection(tasks.db), tasks.model)


def unpark(session: Session, queue: str, payload_types: list[str], *, untyped: bool = True) -> int:
    """Make tasks ready again that were parked without a processor; return how many. Uncharged, never due in the past.

    ``untyped`` says whether rows without a payload type have a handler too.
    """
    if not session.run(session.sql.parked, {"queue_name": queue}):  # as a rule: one statement, and no transaction
        return 0
    params = {"queue_name": queue, "types": session.sql.dialect.array(payload_types), "untyped": untyped}

    def groups_in(rows: list[Row]) -> Groups:
        return groups_of((queue, group) for _, group in rows)

    with session.atomic():
        back = lock_in_order(session, partial(session.run, session.sql.unpark, params), groups_in)
        regroup(session, queue, groups_in(back)[queue] if back else ())
    return len(back)
