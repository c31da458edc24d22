"""The statements of each task table, and where a connection that is not ours should prepare them.

A pooler in transaction mode may give each transaction another server process, which does not have the statements that
the last transaction prepared.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.columns import TASK_COLUMNS
from django_dbtaskqueue.core.sql import Statements, Tables
from django_dbtaskqueue.core.sql.dialects import DIALECTS, SQLITE
from django_dbtaskqueue.models import AbstractTask, Attempt, DeletedTasks, Queue, TaskHistory

LIBPQ_IDLE = 0  # libpq's number of a connection that is in no transaction
MIN_STATEMENTS_TO_PREPARE = 3  # on one connection: fewer do not pay for the round trips of preparing
_statement_counts: WeakKeyDictionary[Any, int | bool] = WeakKeyDictionary()  # how many so far; then whether to prepare


@lru_cache(maxsize=256)
def statements_of(model: type[AbstractTask], vendor: str) -> Statements:
    """Return the statements for one task table; an unknown database gets those of SQLite."""
    quote = '"{}"'.format
    columns = {seed: quote(column) for seed, column in _columns(model).items() if seed != column}
    tables = Tables(
        task=quote(model._meta.db_table),
        history=quote(TaskHistory._meta.db_table),
        attempt=quote(Attempt._meta.db_table),
        deleted=quote(DeletedTasks._meta.db_table),
        queue=quote(Queue._meta.db_table),
        columns=columns,
    )
    return Statements(tables, DIALECTS.get(vendor, SQLITE))


def _columns(model: type[AbstractTask]) -> dict[str, str]:
    fields = {field.name: field for field in model._meta.concrete_fields}
    return {column.db: str(fields[column.name].column) for column in TASK_COLUMNS}


def should_prepare(connection: BaseDatabaseWrapper) -> bool:
    """Whether a PostgreSQL connection is used long enough, and keeps its server process. Asked once per statement."""
    raw: Any = connection.connection
    known = _statement_counts.get(raw, 0)
    if isinstance(known, bool) or not conf.settings().prepare:
        return known is True
    if known < MIN_STATEMENTS_TO_PREPARE:
        _statement_counts[raw] = known + 1
        return False
    with connection.wrap_database_errors:
        [pid] = raw.execute("SELECT pg_backend_pid()").fetchone()
    _statement_counts[raw] = direct = bool(pid == raw.info.backend_pid)  # a pooler makes a number up
    return direct


def execute_prepared(cursor: Any, sql: str, params: Mapping[str, Any], *, ends: bool) -> None:
    """Execute a prepared statement, whatever the site has set for its own statements.

    ``ends``: this is the last statement of the caller's transaction. If it is the first as well, it goes without BEGIN
    and needs no COMMIT, which are round trips of their own.
    """
    raw = cursor.connection
    threshold, autocommit = raw.prepare_threshold, raw.autocommit
    raw.prepare_threshold = 0
    if ends and not autocommit and raw.info.transaction_status == LIBPQ_IDLE:
        raw.autocommit = True
    try:
        cursor.execute(sql, params)
    finally:
        raw.prepare_threshold = threshold
        if raw.autocommit != autocommit and not raw.closed:
            raw.autocommit = autocommit
