"""Retention: finished tasks, history, failed attempts and audit records leave in small batches.

A batch reads only the oldest rows, never the whole table. It passes over rows that another transaction has locked, so
it does not wait and cannot deadlock. A task under a live lease is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import CharField, Exists, Model, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Cast, Coalesce, Concat, Now
from django.db.models.lookups import LessThanOrEqual

from django_dbtaskqueue import models
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.sql.pipeline import ABSENT_LOCATIONS_SQL, RESET_ABSENT_SQL, FinishEventStatements
from django_dbtaskqueue.core.states import sources
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.selection import Tasks, as_filterable, delete_locked, with_row_locks
from django_dbtaskqueue.models.control import LEFT_BATCH, UNFINISHED

ROWS_PER_BATCH = 1000
FINISHED = sources("housekeep")


# -- tasks of a selection, which an operator made ----------------------------------------------------------------------


def housekeep(tasks: Tasks, *, older_than: timedelta, statuses: Iterable[str] = FINISHED, to: str = "history") -> int:
    """Move (``to="history"``) or delete and count (``to="delete"``) finished tasks of at least that age.

    Batches of 1,000, each atomic; returns the number of tasks that really left. Ages by the time a task finished.
    """
    wanted = [statuses] if isinstance(statuses, str) else list(statuses)
    for status in wanted:
        if status not in FINISHED:
            raise TaskQueueError(f"housekeep() ages out finished tasks ({', '.join(FINISHED)}); {status!r} is not one.")
    if to not in ("history", "delete"):
        raise TaskQueueError(f'housekeep(to={to!r}) must be "history" or "delete".')
    old = as_filterable(tasks).exclude(watched=True).filter(finished_before(older_than), status__in=wanted)
    session, total, after = Session(transaction.get_connection(old.db), old.model), 0, 0
    while True:
        with session.atomic():
            rows = dict(with_row_locks(old.filter(pk__gt=after)).values_list("pk", "watched")[:ROWS_PER_BATCH])
            total += _remove(session, sorted(rows.keys() - still_needed(session, rows)), to)
        if len(rows) < ROWS_PER_BATCH:
            return total
        after = max(rows)


def still_needed(session: Session, watched: Mapping[int, bool | None]) -> set[int]:
    """Return those of locked tasks whose end is not told yet, or that a task waits for; ``watched`` by id."""
    reported = [pk for pk in watched if watched[pk] is not None]
    selected = {"ids": session.sql.dialect.array(reported), "location": session.location}
    needed = {pk for (pk,) in session.run(session.sql.needed, selected)} if reported else set()
    return needed | {pk for pk, one in watched.items() if one}


def finished_before(age: timedelta) -> Q:
    """Return the condition that a task finished at least this long ago."""
    return Q(LessThanOrEqual(Coalesce("finish_time", "last_update_time"), Now() - age))


def _remove(session: Session, ids: list[int], to: str) -> int:
    if ids and to == "history":
        session.run(session.sql.keep, {"ids": session.sql.dialect.array(ids), "location": session.location})
    return delete_locked(session, ids, counted=to == "delete") if ids else 0


# -- all tasks of a queue and status, by the settings ------------------------------------------------------------------


@dataclass(slots=True)
class RetentionCursor:
    """How far the finished tasks of one queue and status were read, in the order of their ids."""

    queue: str
    status: str
    after: int = 0
    at_end: bool = False  # no older task is left behind the cursor; the next batch begins at the first task


def housekeep_batch(session: Session, cursor: RetentionCursor, *, older_than: timedelta, to: str = "history") -> int:
    """Read the next tasks behind a cursor; move, or delete and count, those that ended long enough ago.

    One transaction; returns how many really left. Only for statuses that ``housekeep`` may take.
    """
    if cursor.status not in FINISHED:
        raise ValueError(f"Tasks in {cursor.status} are not finished; only {', '.join(FINISHED)} age out.")
    params = {"queue_name": cursor.queue, "status": cursor.status, "after": cursor.after, "limit": ROWS_PER_BATCH}
    seen, seconds = session.run(session.sql.finished, params), older_than.total_seconds()
    cursor.at_end = len(seen) < ROWS_PER_BATCH or seen[-1][2] < seconds
    cursor.after = 0 if cursor.at_end else seen[-1][0]
    if not (old := [number for number, ended, _ in seen if ended >= seconds]):
        return 0
    with session.atomic():
        selected = {"ids": session.sql.dialect.array(old), "status": cursor.status}
        locked: dict[int, bool | None] = dict(session.run(session.sql.lock_finished, selected))
        return _remove(session, sorted(locked.keys() - still_needed(session, locked)), to)


# -- steps and signals whose task has left the table by a settle or a job ----------------------------------------------


def delete_left_steps(session: Session, after: int) -> int:
    """Delete those of the next rows behind an id whose task is no longer in its table.

    Return the id of the last row that was read; 0 at the end. A window reads no more than a batch of rows.
    """
    alias = session.connection.alias
    behind = models.Step._base_manager.using(alias).filter(location=session.location, pk__gt=after)
    if not (window := list(behind.order_by("pk").values_list("pk", "task_id")[:ROWS_PER_BATCH])):
        return 0
    # By their ids: beside a large table the planner would read all of it for one window.
    tasks = session.model._base_manager.using(alias).filter(pk__in={task_id for _, task_id in window})
    there = set(tasks.values_list("pk", flat=True))
    if left := [pk for pk, task_id in window if task_id not in there]:
        behind.filter(pk__in=left)._raw_delete(alias)
    return window[-1][0] if len(window) == ROWS_PER_BATCH else 0


# -- history, failed attempts, audit -----------------------------------------------------------------------------------


def delete_history(session: Session, *, older_than: timedelta, table: str = "") -> int:
    """Delete and count a batch of rows (of the partition ``table``) that have been in the history for so long."""
    name = session.connection.ops.quote_name(table or models.TaskHistory._meta.db_table)
    with session.atomic():
        params = {"age": -older_than.total_seconds(), "limit": ROWS_PER_BATCH}
        if not (ids := [row[0] for row in session.run(session.sql.old_history.format(table=name), params)]):
            return 0
        selected = {"ids": session.sql.dialect.array(ids)}
        count, delete = session.sql.delete_history
        session.run(count.format(table=name), selected)
        return len(session.run(delete.format(table=name), selected))


def delete_month(session: Session, table: str) -> int:
    """Drop one month of the history and count its tasks as deleted, in one transaction; return how many there were.

    Waits at most a second while the table is in use, and then raises ``OperationalError``. Needs the table's owner.
    """
    name = session.connection.ops.quote_name(table)
    with session.atomic():
        session.run("SELECT set_config('lock_timeout', '1s', true)", {})
        session.run(f"LOCK TABLE {name} IN SHARE MODE", {})  # its count stays the same until it is dropped
        number = int(session.run(f"SELECT count(*) FROM {name}", {})[0][0])  # noqa: S608 -- the name of a partition
        session.run(session.sql.count_all.format(table=name), {})
        session.run(f"DROP TABLE {name}", {})
    return number


def delete_attempts(session: Session, *, older_than: timedelta) -> int:
    """Delete a batch of records of failed attempts that are that old; return how many."""
    return _delete(models.Attempt._base_manager.using(session.connection.alias), Q(finish_time__lte=Now() - older_than))


def delete_audit(alias: str, *, older_than: timedelta) -> int:
    """Delete a batch of audit entries that are that old, and of bulk operations that ended so long ago.

    Return how many rows went. Entries of a running operation stay; an operation stays until its own rows are gone.
    """
    limit, ended = Now() - older_than, ~Q(operation__state__in=UNFINISHED)
    empty = Q(audit__isnull=True) & ~Q(state__in=UNFINISHED)
    batches: list[tuple[type[Model], Q]] = [
        (models.AuditEntry, Q(time__lte=limit) & ended),
        (models.TaskChange, Q(time__lte=limit)),
        (models.BulkOperation, Q(update_time__lte=limit) & empty),
    ]
    return sum(_delete(model._base_manager.using(alias), old) for model, old in batches)


def delete_empty_batches(alias: str, tables: Iterable[type[models.AbstractTask]], *, older_than: timedelta) -> int:
    """Delete batches of at least that age whose tasks have all left the task tables; return how many."""
    batches, old = models.Batch.objects.using(alias), Q(create_time__lte=Now() - older_than)
    empty = batches.filter(old)
    for model in tables:
        empty = empty.exclude(Exists(model._base_manager.using(alias).filter(batch=OuterRef("pk"))))
    if deleted := _delete(batches.all(), old, empty.order_by("pk")):
        counts = models.MinuteCount.objects.using(alias).filter(kind__startswith=LEFT_BATCH)
        known = batches.annotate(kind=Concat(Value(LEFT_BATCH), Cast("pk", CharField()))).values("kind")
        counts.exclude(kind__in=known).delete()
    return deleted


def delete_past_periods(alias: str) -> int:
    """Delete a batch of references whose period is over, and of limits of groups with all their tokens; count them."""
    deleted = 0
    for model, column in ((models.UsedReference, "expire_time"), (models.Limit, "full_time")):
        rows, past = model._base_manager.using(alias), Q(**{f"{column}__lte": Now()})
        deleted += _delete(rows.all(), past, rows.filter(past).order_by(column))
    return deleted


def delete_unread_events(session: Session) -> int:
    """Delete a batch of the events of finished tasks that only a stream waits for that has not read for long.

    Return how many there were. Streams that read delete the others themselves. PostgreSQL only.
    """
    session.run(RESET_ABSENT_SQL, {})
    deleted, sql = 0, FinishEventStatements(session.sql.tables, session.sql.dialect)
    for (location,) in session.run(ABSENT_LOCATIONS_SQL, {}):
        with session.atomic():
            session.run(sql.lock_positions, {"location": location})
            deleted += session.count(sql.trim, {"location": location, "limit": ROWS_PER_BATCH})
    return deleted


def _delete(rows: QuerySet[Any], old: Q, first: QuerySet[Any] | None = None) -> int:
    """Delete those of the ``first`` rows, by default the oldest, that are old and that nobody has locked."""
    first = rows.order_by("pk") if first is None else first
    ids = list(first.values_list("pk", flat=True)[:ROWS_PER_BATCH])
    if not ids:  # mostly; on SQLite a transaction would lock the database
        return 0
    with transaction.atomic(using=rows.db):
        leaving = with_row_locks(rows.filter(old, pk__in=ids))
        found = rows.filter(pk__in=list(leaving.values_list("pk", flat=True)))
        return found._raw_delete(rows.db) or 0  # None where Django sees that nothing can match


def expired(session: Session, queue: str) -> list[int]:
    """Return the ids of some tasks of a queue that wait and are past their time to live."""
    return [row[0] for row in session.run(session.sql.expired, {"queue_name": queue, "limit": ROWS_PER_BATCH})]
