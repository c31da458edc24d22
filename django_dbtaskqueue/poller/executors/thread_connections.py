"""The Django connections of a thread that runs processors: none harms the next task, and a dead one harms no task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.utils import InterfaceError, OperationalError
from django.dispatch import receiver

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.outcomes import Outcome, Release, Settlement
from django_dbtaskqueue.db import liveness

# After a failed connect: a server may refuse this thread and not the poller, which takes the same task again.
RECONNECT_PAUSE_S = 1.0
IDLE_SECONDS = 5.0  # without a task, after which a thread's connections are checked before the next one


class _Opened(threading.local):
    """The connections of a thread; ``changed`` if it opened one since the list was made."""

    def __init__(self) -> None:
        self.connections: list[BaseDatabaseWrapper] = []
        self.changed = True
        self.runs_tasks = False
        self.tidied_at = clock.monotonic()
        self.outages = liveness.outages.seen


_opened = _Opened()


class Doubt:
    """Whether the connections of one thread may have died since its last job: in an idle time, or in an outage."""

    def __init__(self) -> None:
        self._job_at = 0.0  # no job yet: whatever the thread has open is checked before the first one
        self._outages = liveness.outages.seen

    def arises(self) -> bool:
        """Return it, once for each reason. To be asked before a job is taken."""
        before, self._job_at = self._job_at, clock.monotonic()
        outages, self._outages = self._outages, liveness.outages.seen
        return self._job_at - before > IDLE_SECONDS or outages != self._outages


@receiver(connection_created)
def _note(connection: BaseDatabaseWrapper, **_: object) -> None:
    _opened.changed = True
    liveness.connected()
    if _opened.runs_tasks:
        liveness.watch_statements(connection)


def check() -> None:
    """Before a task: watch the statements on each connection, and close those that died in an idle time."""
    _opened.runs_tasks = True
    if _opened.changed:
        _list_connections()
    if not _opened.connections:
        return
    idle = clock.monotonic() - _opened.tidied_at > IDLE_SECONDS  # or there was an outage: they may have died
    ask, _opened.outages = idle or _opened.outages != liveness.outages.seen, liveness.outages.seen
    for connection in _opened.connections:
        liveness.watch_statements(connection)
        if ask and connection.connection is not None and connection.vendor != "sqlite":
            liveness.close_if_dead(connection)


def unless_dead(outcomes: Sequence[Outcome | Settlement | None]) -> list[Any]:
    """Return what is to be written of a call that had no live connection for its first statement."""
    spared, number = _spared(outcomes)
    if number and not any(connection.connection for connection in connections.all(initialized_only=True)):
        clock.wait(threading.Event(), RECONNECT_PAUSE_S)
    return spared


def tidied(outcomes: Sequence[Outcome | Settlement | None]) -> list[Any]:
    """After a call: ``tidy``; return what is to be written of it."""
    call = liveness.ended_call()
    written = unless_dead(outcomes) if call.dead else list(outcomes)
    tidy(doubtful=call.doubtful)
    return written


async def unless_dead_async(outcomes: Sequence[Outcome | Settlement | None]) -> list[Any]:
    """``unless_dead`` for a call on an event loop, whose other calls go on meanwhile."""
    spared, number = _spared(outcomes)
    if number:
        await tidy_async(doubtful=True)
        try:
            await clock.wait_async(asyncio.Event(), RECONNECT_PAUSE_S)
        except asyncio.CancelledError:  # the poller stops: the tasks are given back all the same
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 -- for the type checker; a coroutine on a loop has a task
            task.uncancel()
    return spared


def _spared(outcomes: Sequence[Outcome | Settlement | None]) -> tuple[list[Any], int]:
    """Release the tasks that failed by their dead connection; return what is to be written, and how many they are."""
    errors = [None if one is None else one.facts.error for one in outcomes]
    lost = [isinstance(error, OperationalError | InterfaceError) for error in errors]
    if any(lost):
        liveness.outages.report()  # other threads may have such connections, too
    return [Release() if dead else one for one, dead in zip(outcomes, lost, strict=True)], sum(lost)


def tidy(now: float | None = None, *, doubtful: bool = False) -> None:
    """Close each connection that would harm the next task: in an open transaction, after an error, too old.

    ``doubtful``: each, because the call failed by one, or has changed a session. How that was before, only the project
    knows.
    """
    _opened.tidied_at = clock.monotonic() if now is None else now
    if _opened.changed:
        _list_connections()
    for connection in _opened.connections:
        if connection.connection is None:
            continue
        dirty = doubtful or connection.in_atomic_block or not connection.autocommit or connection.errors_occurred
        pooled = connection.settings_dict["OPTIONS"].get("pool")  # of fewer connections than there are threads
        if dirty or pooled or _aged(connection):
            with suppress(Exception):  # even close() may fail on a broken connection
                connection.in_atomic_block = connection.closed_in_transaction = False
                if dirty and pooled:
                    connection.connection.close()  # the pool makes another
                connection.close()


async def tidy_async(*, doubtful: bool) -> None:
    """``tidy`` the connections of Django's async ORM thread."""
    with suppress(Exception):
        await sync_to_async(tidy)(doubtful=doubtful)


def _list_connections() -> None:
    _opened.connections, _opened.changed = list(connections.all(initialized_only=True)), False


def _aged(connection: BaseDatabaseWrapper) -> bool:
    """Whether a connection is older than CONN_MAX_AGE. With 0 it is kept, because the next task follows at once."""
    close_at = connection.settings_dict["CONN_MAX_AGE"] and connection.close_at
    return bool(close_at and clock.monotonic() >= close_at)
