"""Which tasks an action changed and how they were before: the history of one task, and "put back as it was"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.flow.move import put_back
from django_dbtaskqueue.flow.selection import same_rows
from django_dbtaskqueue.models import AbstractTask, AuditEntry, FailureGroup, TaskChange
from django_dbtaskqueue.models.querysets import TaskQuerySet

if TYPE_CHECKING:
    from django_dbtaskqueue.operations.verbs import TaskVerb

# What an action can change of a task.
RESTORED = (
    "queue", "status", "final_status", "attempt", "priority", "ready_time", "next_process_time", "finish_time",
    "expire_time", "poller_instance", "parked_by",
)  # fmt: skip
MAX_ACTIONS_OF_TASK = 100
MAX_TASKS_NAMED_IN_ENTRY = 100
ABSENT = "(absent)"  # in a difference: the key is not there
Columns = dict[str, Any]


def columns_of(verb: TaskVerb) -> tuple[str, ...]:
    """Return the columns that an action reads of each task."""
    named = ("queue", "status", "group_key", "reference", "fingerprint")
    if verb.deletes:
        return named
    return (*dict.fromkeys((*named, *RESTORED)), *(["payload"] if verb.name == "edit" else []))


def record_changes(entry: AuditEntry, verb: TaskVerb, tasks: Sequence[AbstractTask]) -> None:
    """Record the tasks of one table that an action just changed; ``tasks`` are as they were before."""
    if not tasks or verb.deletes:
        return
    edited = None
    if verb.name == "edit":
        edited = difference(masked(tasks[0].payload), masked(same_rows(tasks).values_list("payload", flat=True)[0]))
    _about(
        entry,
        tasks[0]._meta.label_lower,
        [task.pk for task in tasks],
        before={name: _packed(tasks, name) for name in RESTORED} if verb.undoable else None,
        after_time=same_rows(tasks).values_list("last_update_time", flat=True)[0],
        difference=edited,
    ).save(using=entry._state.db)


def record_skips(entry: AuditEntry, location: str, skips: Mapping[str, list[int]]) -> None:
    """Record the tasks that a step of a bulk operation left as they were, by reason."""
    rows = [_about(entry, location, ids, skip_reason=reason[:500]) for reason, ids in skips.items()]
    TaskChange.objects.using(entry._state.db).bulk_create(rows)


def _about(entry: AuditEntry, location: str, ids: list[int], **columns: Any) -> TaskChange:
    span = {"first_task_id": min(ids), "last_task_id": max(ids), "task_ids": ids}
    return TaskChange(audit=entry, operation_id=entry.operation_id, location=location, **span, **columns)


def difference(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """Return what differs between two JSON values, both masked: the path, before, after."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [
            row
            for key in keys
            if before.get(key, ABSENT) != after.get(key, ABSENT)
            for row in difference(before.get(key, ABSENT), after.get(key, ABSENT), f"{path}.{key}" if path else key)
        ]
    return [] if before == after else [{"path": path, "before": masked(before), "after": masked(after)}]


def named(tasks: Sequence[AbstractTask]) -> list[dict[str, Any]]:
    """Return the first tasks by id and reference, with the error that each failed of."""
    shown = tasks[:MAX_TASKS_NAMED_IN_ENTRY]
    prints = {task.fingerprint for task in shown if task.fingerprint}
    groups = FailureGroup.objects.using(shown[0]._state.db).filter(pk__in=prints) if prints else ()
    errors = {group.pk: group.error_type for group in groups}
    facts = [{"id": t.pk, "reference": t.reference, "error": errors.get(t.fingerprint or "")} for t in shown]
    return [{name: value for name, value in one.items() if value} for one in facts]


def actions_on(task: AbstractTask) -> list[TaskChange]:
    """Return what operators did to a task, the newest first, each with its audit entry."""
    near: QuerySet[TaskChange] = (
        TaskChange.objects.using(task._state.db)
        .filter(location=task._meta.label_lower, first_task_id__lte=task.pk, last_task_id__gte=task.pk, skip_reason="")
        .select_related("audit")
        .defer("before")
        .order_by("-pk")
    )
    return [change for change in near[:MAX_ACTIONS_OF_TASK] if task.pk in change.task_ids]


def restore(
    change: TaskChange, tasks: TaskQuerySet, verb: TaskVerb, may: Callable[[str], bool]
) -> tuple[list[int], dict[str, list[int]]]:
    """Put the tasks of a change back as they were; return the ids of those put back, and of the others by reason.

    ``may`` says whether the actor may do so on a queue. A task that changed since the action stays as it is; one that
    is not in ``tasks`` counts as not there.
    """
    before = dict(zip(change.task_ids, map(_as_waiting, _unpacked(change, tasks.model)), strict=True))
    rows = tasks.filter(pk__in=change.task_ids)
    now = {task.pk: task for task in rows.only("queue", "reference", "last_update_time")}
    taken = _taken(now.values(), before) if verb.name == "move" else frozenset()
    skips: dict[str, list[int]] = defaultdict(list)
    for pk in change.task_ids:
        if pk not in now:
            skips[_("there is no such task")].append(pk)
        elif now[pk].last_update_time != change.after_time:
            skips[_("changed since")].append(pk)
        elif pk in taken:
            skips[_("its reference is taken in its old queue")].append(pk)
        else:
            denied = [queue for queue in {now[pk].queue, before[pk]["queue"]} if not may(queue)]
            if denied:
                skips[_("not permitted on queue %(queue)s") % {"queue": denied[0]}].append(pk)
    left = {pk for ids in skips.values() for pk in ids}
    wanted = {pk: before[pk] for pk in change.task_ids if pk not in left}
    chosen = rows.filter(pk__in=list(wanted))
    back = put_back(chosen, wanted, lambda task: task.last_update_time == change.after_time) if wanted else []
    if missed := sorted(set(wanted) - set(back)):
        skips[_("another transaction is changing it")] += missed
    return back, dict(skips)


def _as_waiting(before: Columns) -> Columns:
    """Return what a task was, or before its attempt if it ran: an attempt that was ended cannot go on."""
    if before["status"] != Status.PROCESSING:
        return before
    held = {
        "attempt": max(0, before["attempt"] - 1),
        "next_process_time": before["ready_time"],
        "poller_instance": None,
    }
    return {**before, **held, "status": Status.CREATED}


def _taken(tasks: Iterable[AbstractTask], before: Mapping[int, Columns]) -> set[int]:
    """Return the tasks whose reference another task has in the queue they came from."""
    found = set()
    wanted = {(str(before[task.pk]["queue"]), task.reference): task for task in tasks}
    for queue in {queue for queue, _reference in wanted}:
        some = next(task for (name, _reference), task in wanted.items() if name == queue)
        references = [reference for name, reference in wanted if name == queue and reference is not None]
        rows = type(some)._default_manager.using(some._state.db).filter(queue=queue, reference__in=references)
        found |= {wanted[queue, reference].pk for reference in rows.values_list("reference", flat=True) if reference}
    return found


def _packed(tasks: Sequence[AbstractTask], name: str) -> list[Any]:
    values = [getattr(task, name) for task in tasks]
    plain = [value.isoformat() if isinstance(value, datetime) else value for value in values]
    return plain[:1] if len(set(plain)) == 1 else plain


def _unpacked(change: TaskChange, model: type[AbstractTask]) -> list[Columns]:
    number = len(change.task_ids)
    columns = {}
    for name, packed in (change.before or {}).items():
        field: Any = model._meta.get_field(name)
        read = field.to_python
        columns[name] = [read(value) for value in (packed * number if len(packed) == 1 else packed)]
    return [{name: values[at] for name, values in columns.items()} for at in range(number)]
