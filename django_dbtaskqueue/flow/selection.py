"""Selections of rows and their locks, as the verbs of ``move`` and ``retention`` need them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import transaction
from django.db.models import F, QuerySet

from django_dbtaskqueue.core.states import COMPLETED, TERMINAL
from django_dbtaskqueue.models import AbstractTask, BulkOperation, MinuteCount, Schedule, Step, UsedReference
from django_dbtaskqueue.models.control import DELETION, LEFT_BATCH

if TYPE_CHECKING:
    from django_dbtaskqueue.db.session import Session

Tasks = QuerySet[AbstractTask]
Rows = TypeVar("Rows", bound=QuerySet[Any])
M = TypeVar("M", BulkOperation, Schedule)


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


def with_row_locks(rows: Rows, *, wait: bool = False) -> Rows:
    """Return rows, so that reading them locks them in the order of their ids.

    All that wait for row locks lock in this order, so there are no deadlocks. Locked rows are skipped, unless ``wait``.
    """
    features = transaction.get_connection(rows.db).features
    if features.has_select_for_update_skip_locked:
        rows = rows.select_for_update(skip_locked=not wait, of=("self",) * features.has_select_for_update_of)
    return rows.order_by("pk")


def lock_first(rows: QuerySet[M]) -> M | None:
    """Return the first row that no other transaction has, locked; None if there is none. Call it in ``atomic``."""
    if transaction.get_connection(rows.db).features.has_select_for_update_skip_locked:
        return rows.select_for_update(skip_locked=True).first()
    return rows.first() if rows.update(note=F("note")) else None  # first a write: SQLite locks by it


def delete_locked(session: Session, ids: Sequence[int], *, counted: bool = True) -> int:
    """Delete locked tasks and their steps. Count them, or only those that leave a batch uncompleted."""
    alias = session.connection.alias
    delete_steps(session.model, alias, ids)
    gone = session.run(session.sql.delete_chosen, {"ids": session.sql.dialect.array(ids)})
    counts = Counter((DELETION, queue, "") for queue, *_ in gone if counted)
    for queue, batch, end in gone:
        if batch is not None and end != COMPLETED:
            counts[f"{LEFT_BATCH}{batch}", queue, end if end in TERMINAL else "DELETED"] += 1
    MinuteCount.objects.using(alias).bulk_create(
        MinuteCount(kind=kind, queue=queue, name=name, count=number) for (kind, queue, name), number in counts.items()
    )
    return len(gone)


def delete_steps(model: type[AbstractTask], alias: str, ids: Iterable[int], **wanted: Iterable[str]) -> None:
    """Delete the steps and signals of tasks, or the ``wanted`` ones of them."""
    of_tasks = Step._base_manager.using(alias).filter(location=model._meta.label_lower, task_id__in=ids)
    of_tasks.filter(**wanted)._raw_delete(alias)


def free_references(alias: str, queue: str, references: Any) -> int:
    """Let references, of a collection or a query, be used again; return how many were taken."""
    return int(UsedReference.objects.using(alias).filter(queue=queue, reference__in=references)._raw_delete(alias) or 0)
