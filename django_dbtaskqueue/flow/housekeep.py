"""Housekeep: finished tasks age out, into the history or for good. A live lease is never touched."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.db import transaction
from django.db.models.functions import Coalesce, Now

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.states import sources
from django_dbtaskqueue.flow.selection import Tasks, chosen, lockable, plain, remove
from django_dbtaskqueue.models import TaskColumns, TaskHistory

BATCH = 1000
COLUMNS = [field.name for field in TaskColumns._meta.get_fields()]


def housekeep(
    tasks: Tasks, *, older_than: timedelta, statuses: Iterable[str] = sources("housekeep"), to: str = "history"
) -> int:
    """Move (``to="history"``) or delete and count (``to="delete"``) finished tasks of at least that age.

    Batches of 1,000, each atomic; returns the number of tasks that really left. Ages by the time a task finished.
    """
    wanted = _wanted(statuses)
    if to not in ("history", "delete"):
        raise TaskQueueError(f'housekeep(to={to!r}) must be "history" or "delete".')
    old = (
        chosen(tasks)
        .filter(status__in=wanted)
        .alias(ended=Coalesce("finish_time", "last_update_time"))
        .filter(ended__lte=Now() - older_than)
    )
    total = 0
    while moved := _batch(old, to):
        total += moved
    return total


def _batch(old: Tasks, to: str) -> int:
    with transaction.atomic(using=old.db):
        rows = list(lockable(old)[:BATCH])
        if not rows:
            return 0
        if to == "history":
            location = old.model._meta.label_lower
            TaskHistory.objects.using(old.db).bulk_create(
                TaskHistory(location=location, task_id=row.pk, **{name: getattr(row, name) for name in COLUMNS})
                for row in rows
            )
        leaving = plain(old).filter(pk__in=[row.pk for row in rows])
        return leaving._raw_delete(old.db) if to == "history" else remove(leaving)


def _wanted(statuses: Iterable[str]) -> list[str]:
    wanted = [statuses] if isinstance(statuses, str) else list(statuses)
    for status in wanted:
        if status not in sources("housekeep"):
            raise TaskQueueError(
                f"housekeep() ages out finished tasks ({', '.join(sources('housekeep'))}); {status!r} is not one."
            )
    return wanted
