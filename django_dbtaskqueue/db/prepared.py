"""Prepared statements on connections that are not ours: when they pay, and where they would break.

A pooler in transaction mode may give each transaction another server process, which knows nothing of what was prepared
in the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper

from django_dbtaskqueue.conf import settings as conf

IDLE = 0  # libpq's number of a connection that is in no transaction
FEW = 3  # statements of a connection before the round trips of preparing them pay
_known: WeakKeyDictionary[Any, int | bool] = WeakKeyDictionary()  # how many so far; then whether to prepare


def pays(connection: BaseDatabaseWrapper) -> bool:
    """Whether a PostgreSQL connection is used long enough, and keeps its server process. Asked once per statement."""
    raw: Any = connection.connection
    known = _known.get(raw, 0)
    if isinstance(known, bool) or not conf.settings().prepare:
        return known is True
    if known < FEW:
        _known[raw] = known + 1
        return False
    with connection.wrap_database_errors:
        [pid] = raw.execute("SELECT pg_backend_pid()").fetchone()
    _known[raw] = direct = bool(pid == raw.info.backend_pid)  # a pooler makes a number up
    return direct


def execute(cursor: Any, sql: str, params: Mapping[str, Any], *, ends: bool) -> None:
    """Execute and prepare, whatever the site has set for its own statements.

    ``ends``: this is the last statement of the caller's transaction. If it is the first as well, it goes without BEGIN
    and needs no COMMIT, which are round trips of their own.
    """
    raw = cursor.connection
    threshold, autocommit = raw.prepare_threshold, raw.autocommit
    raw.prepare_threshold = 0
    if ends and not autocommit and raw.info.transaction_status == IDLE:
        raw.autocommit = True
    try:
        cursor.execute(sql, params)
    finally:
        raw.prepare_threshold = threshold
        if raw.autocommit != autocommit and not raw.closed:
            raw.autocommit = autocommit
