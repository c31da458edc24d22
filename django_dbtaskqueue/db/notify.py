"""The wake-up of pollers: sent after commit, coalesced, and never needed, for polling is the truth.

NOTIFY inside the caller's transaction would make all commits of the server take turns. So the commit only marks the
queue, and a daemon thread with a connection of its own sends at most one NOTIFY per 5 ms, fewer on a busy machine.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.creation import TEST_DATABASE_PREFIX

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db.session import Session

logger = logging.getLogger(__name__)

CHANNEL = "dbtaskqueue"
COALESCE = 0.005  # seconds between two NOTIFYs
SHARE = 40  # and on average as many times what one takes: on a busy machine they cost the enqueueing little
BURST = 0.2  # seconds saved up in quiet times, so that one slow NOTIFY does not delay the next
MOST = 0.1  # seconds, however slow they are
LINGER = 1.0  # seconds the idle connection is kept
FLUSH = 2.0  # seconds a process waits at its end for its last wake-up
# A notification does not survive a crash of the server, so that nobody need wait until its commit does.
SEND = f"""
SELECT set_config('synchronous_commit', 'off', true), pg_notify('{CHANNEL}', q) FROM unnest(%(queues)s::text[]) AS q
"""


class Notifier:
    """One alias's wake-ups in one process. Its thread starts with the first and ends when idle."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._pending: set[str] = set()
        self._linger = LINGER
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def notify(self, queue: str) -> None:
        """Wake the pollers of ``queue`` soon. Returns at once; never raises."""
        with self._changed:
            self._pending.add(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name=f"{CHANNEL}-notifier", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: float = FLUSH) -> None:
        """Wait until all is sent and the connection is closed."""
        deadline = monotonic() + timeout
        with self._changed:
            self._linger = 0.0
            self._changed.notify_all()
            while self._thread is not None and (left := deadline - monotonic()) > 0:
                self._changed.wait(left)

    def _send(self) -> None:
        session = Session(connections.create_connection(self.alias))  # nothing of a session is set: it may be pooled
        self._linger = 0.0 if _is_for_tests(session.connection.settings_dict) else LINGER
        owed, begun = 0.0, monotonic()
        while queues := self._take(session):
            owed, begun = max(owed - (monotonic() - begun), -BURST), monotonic()
            try:
                session.repeat(SEND, {"queues": sorted(queues)})
            except Exception as error:  # whatever it is: a thread that died would leave this process without wake-ups
                logger.debug("Wake-up of %s not sent, polling will find the tasks: %s", queues, error)
                _close(session)
            owed += SHARE * (monotonic() - begun)
            threading.Event().wait(min(max(owed, COALESCE), MOST))

    def _take(self, session: Session) -> set[str]:
        """Return the queues to wake; empty when the thread is to end, which it then has."""
        with self._changed:
            idle_since = monotonic()
            while not self._pending:
                left = idle_since + self._linger - monotonic()
                if left <= 0:
                    _close(session)
                    self._thread = None
                    self._changed.notify_all()
                    return set()
                self._changed.wait(left)
            queues, self._pending = self._pending, set()
            return queues


def _close(session: Session) -> None:
    with suppress(Exception):  # a connection this broken may not even close, and must not end the thread
        session.connection.close()


def _is_for_tests(settings: Mapping[str, Any]) -> bool:
    """Whether this is a test database, which cannot be dropped while somebody is connected to it."""
    name = str(settings["NAME"])
    return name.startswith(TEST_DATABASE_PREFIX) or name == settings["TEST"].get("NAME")


_notifiers: dict[str, Notifier] = {}
_listeners: set[Callable[[str], None]] = set()


def after_commit(connection: BaseDatabaseWrapper, queue: str) -> None:
    """Wake the pollers of ``queue`` once the current transaction commits, or now when there is none."""
    on_commit(connection, partial(notify, connection.alias, connection.vendor, queue))


def on_commit(connection: BaseDatabaseWrapper, tell: Callable[[], object]) -> None:
    """Call ``tell`` once the current transaction commits, or now when there is none; what it raises is logged.

    Nobody is told when a transaction without autocommit (``set_autocommit(False)``) ends: there it is never called.
    """

    if not hasattr(tell, "__qualname__"):  # Django names by it a hook that raised, and a partial has none
        tell = _named(tell)
    if connection.in_atomic_block or connection.get_autocommit():
        connection.on_commit(tell, robust=True)


def _named(tell: Callable[[], object]) -> Callable[[], object]:
    return lambda: tell()


def notify(alias: str, vendor: str, queue: str) -> None:
    """Wake the pollers of ``queue``: those of this process at once, others through the database."""
    for listener in tuple(_listeners):
        listener(queue)
    if vendor == "postgresql" and conf.settings().notify:
        notifier = _notifiers.get(alias)
        if notifier is None:
            notifier = _notifiers.setdefault(alias, Notifier(alias))
        notifier.notify(queue)


def listen(listener: Callable[[str], None]) -> None:
    """Call ``listener(queue)`` for each wake-up in this process."""
    _listeners.add(listener)


def unlisten(listener: Callable[[str], None]) -> None:
    """Take back ``listen``."""
    _listeners.discard(listener)


def flush() -> None:
    """Wait until every wake-up of this process is sent and no connection of a notifier is open."""
    for notifier in tuple(_notifiers.values()):
        notifier.flush()


def _after_fork() -> None:
    # The thread and its connection stayed with the parent.
    _notifiers.clear()
    _listeners.clear()


atexit.register(flush)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
