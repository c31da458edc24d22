"""The cursor that is kept for a Django connection, and whether statements are prepared on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django.conf import settings as django_settings
from django.db.backends.base.base import BaseDatabaseWrapper

if TYPE_CHECKING:
    from psycopg.abc import AdaptContext

TIMESTAMPTZ_OID = 1184
LIBPQ_IDLE = 0  # libpq's number of a connection that is in no transaction
MIN_STATEMENTS_TO_PREPARE = 3  # on one connection: fewer do not pay for the round trips of preparing


@dataclass(slots=True)
class Kept:
    """What is kept for a Django connection until it connects anew."""

    raw: Any  # psycopg's connection
    cursor: Any
    prepares: bool | None = None  # None: not known yet


_kept: WeakKeyDictionary[BaseDatabaseWrapper, Kept] = WeakKeyDictionary()
# By psycopg's connection, because a pool lends one again and again: how many so far; then whether to prepare.
_statement_counts: WeakKeyDictionary[Any, int | bool] = WeakKeyDictionary()


def kept_for(connection: BaseDatabaseWrapper, raw: Any) -> Kept:
    """Return what is kept for a connection, which is connected by ``raw``."""
    kept = _kept.get(connection)
    if kept is None or kept.raw is not raw or kept.cursor.closed:
        import psycopg

        _kept[connection] = kept = Kept(raw, psycopg.Cursor(raw))
        load_times_fast(kept.cursor)
    return kept


def load_times_fast(context: AdaptContext) -> None:
    """Django's loader, in Python, costs a checkout more than the database does."""
    if django_settings.USE_TZ:
        import psycopg

        loader = psycopg.adapters.get_loader(TIMESTAMPTZ_OID, psycopg.pq.Format.TEXT)
        context.adapters.register_loader(TIMESTAMPTZ_OID, loader)  # type: ignore[arg-type]  # there is one


def should_prepare(raw: Any) -> bool | None:
    """Whether a connection is used long enough, and keeps its server process. Asked per statement while it is None."""
    known = _statement_counts.get(raw, 0)
    if isinstance(known, bool):
        return known
    if known < MIN_STATEMENTS_TO_PREPARE:
        _statement_counts[raw] = known + 1
        return None
    [pid] = raw.execute("SELECT pg_backend_pid()").fetchone()
    _statement_counts[raw] = direct = bool(pid == raw.info.backend_pid)  # a pooler makes a number up
    return direct


def execute_prepared(cursor: Any, sql: str, params: Mapping[str, object], *, ends: bool) -> None:
    """Execute a prepared statement, whatever the site has set for its own statements.

    ``ends``: this is the last statement of the caller's transaction. If it is the first as well, it goes without BEGIN
    and needs no COMMIT, which are round trips of their own.
    """
    raw = cursor.connection
    threshold = raw.prepare_threshold
    alone = ends and not raw.autocommit and raw.info.transaction_status == LIBPQ_IDLE
    raw.prepare_threshold = 0
    if alone:
        raw.autocommit = True
    try:
        cursor.execute(sql, params)
    finally:
        raw.prepare_threshold = threshold
        if alone and not raw.closed:
            raw.autocommit = False
