"""No question of a face may keep the database busy for long: each has a time limit, and an answer that helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

from django.db import OperationalError, connections

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import SearchTooSlow
from django_dbtaskqueue.operations.paginators import overran, time_limit

STEPS = 20_000  # of SQLite's virtual machine between two looks at the clock


@contextmanager
def bounded(alias: str, within: timedelta | None = None) -> Iterator[None]:
    """Give up any statement in this block that runs longer than ``within`` (``DBTASKQUEUE["OPERATIONS_TIMEOUT"]``).

    Raises ``SearchTooSlow``, which says how to narrow the search. On PostgreSQL the block is a transaction with its own
    ``statement_timeout``, so it also reads one state of things; on SQLite the limit is of the whole block. Elsewhere
    nothing is limited.
    """
    limit = conf.settings().operations_timeout if within is None else within
    try:
        with time_limit(alias, limit), _interrupted(alias, limit):
            yield
    except OperationalError as error:
        if overran(error) or str(error) == "interrupted":
            raise SearchTooSlow(limit.total_seconds()) from error
        raise


@contextmanager
def _interrupted(alias: str, limit: timedelta) -> Iterator[None]:
    """SQLite asks now and then whether it may go on."""
    connection = connections[alias]
    if connection.vendor != "sqlite":
        yield
        return
    connection.ensure_connection()
    deadline = monotonic() + limit.total_seconds()
    connection.connection.set_progress_handler(lambda: monotonic() > deadline, STEPS)
    try:
        yield
    finally:
        connection.connection.set_progress_handler(None, 0)
