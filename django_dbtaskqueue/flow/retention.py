"""Aging: finished tasks, history, attempts and audit leave in small batches, without a look at the rest of the table.

Rows that others have locked are passed over, so a batch waits for nobody and nobody deadlocks with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

from django.db import transaction
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now

from django_dbtaskqueue.core.sql.retention import Aging
from django_dbtaskqueue.core.states import sources
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.db.statements import statements
from django_dbtaskqueue.models import AbstractTask, AuditEntry, BulkOperation, BulkSkip, TaskHistory
from django_dbtaskqueue.models.operations import UNFINISHED

BATCH = 1000


@dataclass(slots=True)
class Walk:
    """How far the finished tasks of one queue and status were looked through; they are in the order of their ids."""

    queue: str
    status: str
    after: int = 0
    over: bool = False  # nothing older is left behind it; the next walk begins at the start


def age_out(
    session: Session, walk: Walk, *, older_than: timedelta, to: str = "history", batch: int | None = None
) -> int:
    """Look through the next ``batch`` tasks of a walk, and move or delete and count those that ended long enough ago.

    One transaction; returns how many really left. Only for statuses that ``housekeep`` may take.
    """
    if walk.status not in sources("housekeep"):
        raise ValueError(f"Tasks in {walk.status} are not finished; only {', '.join(sources('housekeep'))} age out.")
    sql, limit = _sql(session.model, session.connection.vendor), batch or BATCH
    params = {"queue_name": walk.queue, "status": walk.status, "after": walk.after, "limit": limit}
    seen, seconds = session.run(sql.look, params), older_than.total_seconds()
    walk.over = len(seen) < limit or seen[-1][2] < seconds
    walk.after = 0 if walk.over else seen[-1][0]
    old = [number for number, ended, _ in seen if ended >= seconds]
    return _leave(session, sql, old, walk, to) if old else 0


def _leave(session: Session, sql: Aging, ids: list[int], walk: Walk, to: str) -> int:
    array = session.sql.dialect.array
    with session.atomic():
        locked = [row[0] for row in session.run(sql.lock, {"ids": array(ids), "status": walk.status})]
        if not locked:
            return 0
        chosen = {"ids": array(locked)}
        if to == "history":
            session.run(sql.keep, {**chosen, "location": session.location})
        else:
            session.run(sql.count, chosen)
        return len(session.run(sql.remove, chosen))


def forget_history(session: Session, *, older_than: timedelta, table: str = "", batch: int | None = None) -> int:
    """Delete and count a batch of rows that have been in the history for so long; return how many.

    ``table`` names one partition of it; without, the whole.
    """
    sql, name = _sql(session.model, session.connection.vendor), _quoted(session, table or _table(TaskHistory))
    with session.atomic():
        params = {"age": -older_than.total_seconds(), "limit": batch or BATCH}
        ids = [row[0] for row in session.run(sql.old_history.format(table=name), params)]
        if not ids:
            return 0
        chosen = {"ids": session.sql.dialect.array(ids)}
        count, delete = sql.forget
        session.run(count.format(table=name), chosen)
        return len(session.run(delete.format(table=name), chosen))


def drop_month(session: Session, table: str) -> int:
    """Drop one month of the history and count its tasks as deleted, in one transaction; return how many there were.

    Waits a second at most for those who use it, and then raises ``OperationalError``. Needs the table's owner.
    """
    sql, name = _sql(session.model, session.connection.vendor), _quoted(session, table)
    with session.atomic():
        session.run("SELECT set_config('lock_timeout', '1s', true)", {})
        session.run(f"LOCK TABLE {name} IN SHARE MODE", {})  # nobody adds to it between the count and the end
        number = int(session.run(f"SELECT count(*) FROM {name}", {})[0][0])  # noqa: S608 -- the name of a partition
        session.run(sql.count_all.format(table=name), {})
        session.run(f"DROP TABLE {name}", {})
    return number


def forget_attempts(session: Session, *, older_than: timedelta, batch: int | None = None) -> int:
    """Delete a batch of records of failed attempts that are that old; return how many."""
    sql = _sql(session.model, session.connection.vendor)
    return len(session.run(sql.forget_attempts, {"age": -older_than.total_seconds(), "limit": batch or BATCH}))


def forget_audit(alias: str, *, older_than: timedelta, batch: int | None = None) -> int:
    """Delete a batch of audit entries that are that old; return how many. Those of a running bulk operation stay."""
    rows = AuditEntry.objects.using(alias)
    old = Q(time__lte=Now() - older_than) & ~Q(operation__state__in=UNFINISHED)
    return _forget(rows, rows.filter(old), batch)


def forget_skips(alias: str, *, older_than: timedelta, batch: int | None = None) -> int:
    """Delete a batch of what bulk operations that ended so long ago had skipped; return how many."""
    rows = BulkSkip.objects.using(alias)
    ended = Q(operation__update_time__lte=Now() - older_than) & ~Q(operation__state__in=UNFINISHED)
    return _forget(rows, rows.filter(ended), batch)


def forget_operations(alias: str, *, older_than: timedelta, batch: int | None = None) -> int:
    """Delete a batch of bulk operations that ended so long ago, and of which nothing is left; return how many."""
    rows = BulkOperation.objects.using(alias)
    ended = Q(update_time__lte=Now() - older_than) & ~Q(state__in=UNFINISHED)
    return _forget(rows, rows.filter(ended, skipped_tasks__isnull=True, audit__isnull=True), batch)


def _forget(rows: QuerySet[Any], old: QuerySet[Any], batch: int | None) -> int:
    """Delete those of the oldest rows that are old: whoever looks further would read the whole table for nothing."""
    oldest = list(rows.order_by("pk").values_list("pk", flat=True)[: batch or BATCH])
    with transaction.atomic(using=rows.db):
        leaving = list(_locked(old.filter(pk__in=oldest)).values_list("pk", flat=True))
        return rows.filter(pk__in=leaving)._raw_delete(rows.db) if leaving else 0


def _locked(rows: QuerySet[Any]) -> QuerySet[Any]:
    features = transaction.get_connection(rows.db).features
    if features.has_select_for_update_skip_locked:
        rows = rows.select_for_update(skip_locked=True, of=("self",) * features.has_select_for_update_of)
    return rows.order_by("pk")


@lru_cache(maxsize=256)
def _sql(model: type[AbstractTask], vendor: str) -> Aging:
    known = statements(model, vendor)
    return Aging(known.tables, known.dialect)


def _table(model: type[Model]) -> str:
    return model._meta.db_table


def _quoted(session: Session, name: str) -> str:
    return session.connection.ops.quote_name(name)
