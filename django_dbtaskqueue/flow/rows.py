"""Selections of task rows, as the verbs of ``move`` and ``housekeep`` need them."""

from __future__ import annotations

from django.db import transaction
from django.db.models import Count, QuerySet

from django_dbtaskqueue.models import AbstractTask, DeletedTasks

Tasks = QuerySet[AbstractTask]


def plain(tasks: Tasks) -> Tasks:
    """Return all tasks of the same table and database: updates and deletes refuse slices and orderings."""
    return tasks.model._base_manager.using(tasks.db)


def lockable(tasks: Tasks, *, wait: bool = False) -> Tasks:
    """Return the selection so that reading it locks its rows: passing over rows others have locked, or waiting."""
    connection = transaction.get_connection(tasks.db)
    if connection.features.has_select_for_update_skip_locked:
        own = ("self",) if connection.vendor == "postgresql" else ()
        return tasks.select_for_update(skip_locked=not wait, of=own)
    return tasks


def remove(tasks: Tasks) -> int:
    """Delete rows this transaction has locked, and count them per queue in the same transaction."""
    counts = tasks.order_by().values("queue").annotate(number=Count("pk")).values_list("queue", "number")
    DeletedTasks.objects.using(tasks.db).bulk_create(
        [DeletedTasks(queue=queue, count=number) for queue, number in counts]
    )
    return int(tasks._raw_delete(tasks.db) or 0)  # None where Django sees that nothing can match
