"""Calls: a signal for each use of a verb, and how often each was used, by queue and minute.

Counted in memory when the caller's transaction commits, and appended to ``CallCount`` in batches by a daemon thread,
at the end of the process, and when statistics are asked for. A killed process loses what it counted since its last
batch, at most ``EVERY`` seconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, timedelta
from functools import partial
from time import monotonic
from typing import NamedTuple

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Count, Sum
from django.db.models.functions import Now, Trunc

from django_dbtaskqueue import signals
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.observe import send
from django_dbtaskqueue.models import CallCount

logger = logging.getLogger(__name__)

EVERY = 5.0  # seconds between two batches
FLUSH = 2.0  # seconds a process waits at its end for its last batch
STUCK = 1.0  # seconds to wait for a batch under way on another thread
MERGE_EVERY = 600.0  # seconds between two merges of a process
MERGE = (("minute", timedelta(minutes=5)), ("day", timedelta(days=2)))  # what is older than that becomes one row per …
MERGED = 200  # groups of rows that one merge takes on


class Key(NamedTuple):
    """What is counted. The database's name tells one alias from another database under the same alias, as in tests."""

    alias: str
    database: str
    queue: str
    call: str


def after_commit(connection: BaseDatabaseWrapper, queue: str, call: str, number: int, ids: Sequence[int] = ()) -> None:
    """Count ``number`` calls and tell the signal's receivers, once the current transaction commits."""
    key = Key(connection.alias, str(connection.settings_dict["NAME"]), queue, call)
    notify.on_commit(connection, partial(_happened, key, number, ids))


def put_after_commit(connection: BaseDatabaseWrapper, queue: str, number: int, ids: Sequence[int] = ()) -> None:
    """Wake the pollers of ``queue`` and count ``number`` puts, once the current transaction commits."""
    key = Key(connection.alias, str(connection.settings_dict["NAME"]), queue, "put")

    def put() -> None:
        try:
            notify.notify(key.alias, connection.vendor, queue)
        finally:
            counter.add(key, number)
            if signals.task_changed.receivers:
                _send(key, ids)

    notify.on_commit(connection, put)


def watched() -> bool:
    """Whether anybody wants to know of each call."""
    return bool(signals.task_changed.receivers)


def _happened(key: Key, number: int, ids: Sequence[int]) -> None:
    counter.add(key, number)
    if watched():
        _send(key, ids)


def _send(key: Key, ids: Sequence[int]) -> None:
    send(signals.task_changed, key.queue, call=key.call, task_ids=tuple(ids), using=key.alias)


class Calls:
    """Calls counted in this process and not stored yet. The thread starts with the first and ends when idle."""

    def __init__(self) -> None:
        self._pending: Counter[Key] = Counter()
        self._changed = threading.Condition()
        self._writing = threading.Lock()  # held from taking counts out of memory until they are committed
        self._thread: threading.Thread | None = None
        self._ending = False
        self._next_merge = monotonic() + MERGE_EVERY

    def add(self, key: Key, number: int) -> None:
        """Count. Returns at once; never raises."""
        with self._changed:
            self._pending[key] += number
            if self._thread is None and not self._ending:
                self._thread = threading.Thread(target=self._run, name="dbtaskqueue-calls", daemon=True)
                self._thread.start()

    def store(self, alias: str) -> None:
        """Append what was counted on one database, on the calling thread's connection. Raises its errors."""
        with self._writing:
            batch = self._take(alias)
            try:
                _append(alias, batch)
            except BaseException:
                with self._changed:
                    self._pending.update(batch)
                raise

    def delete(self, alias: str, queue: str) -> None:
        """Do not store what was counted of a queue: it is gone."""
        with self._changed:
            for key in [key for key in self._pending if key.alias == alias and key.queue == queue]:
                del self._pending[key]

    def counted(self, alias: str, queue: str) -> dict[str, int]:
        """Return all calls of a queue by name: those stored by any process, and those of this one not stored yet."""
        if not connections[alias].in_atomic_block:
            self.store(alias)
        waited = self._writing.acquire(timeout=STUCK)  # a batch under way would be in neither place
        try:
            rows = CallCount.objects.using(alias).filter(queue=queue).values("call").order_by("call")
            total = Counter({row["call"]: int(row["number"]) for row in rows.annotate(number=Sum("count"))})
            database = str(connections[alias].settings_dict["NAME"])
            with self._changed:
                for key, number in self._pending.items():
                    if key[:3] == (alias, database, queue):
                        total[key.call] += number
        finally:
            if waited:
                self._writing.release()
        return dict(total)

    def flush(self, timeout: float = FLUSH) -> None:
        """Store what is left and end the thread: for the end of the process."""
        deadline = monotonic() + timeout
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            while self._thread is not None and (left := deadline - monotonic()) > 0:
                self._changed.wait(left)
            self._ending = False

    def _take(self, alias: str) -> Counter[Key]:
        with self._changed:
            batch = Counter({key: number for key, number in self._pending.items() if key.alias == alias})
            for key in batch:
                del self._pending[key]
        return batch

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending, EVERY)
                ending = self._ending
                aliases = {key.alias for key in self._pending}
            for alias in aliases:
                self._attempt(alias)
            with self._changed:
                if ending or not self._pending:
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _attempt(self, alias: str) -> None:
        """Store on a connection that is not kept: a test database can be dropped only when nobody is connected."""
        try:
            self.store(alias)
            if monotonic() >= self._next_merge:
                self._next_merge = monotonic() + MERGE_EVERY
                merge(alias)
        except Exception as error:
            logger.debug("Calls on %s not stored, trying again later: %s", alias, error)
        finally:
            with suppress(Exception):
                connections[alias].close()
                del connections[alias]


def _append(alias: str, batch: Counter[Key]) -> None:
    connection = connections[alias]
    batch = Counter({key: n for key, n in batch.items() if key.database == str(connection.settings_dict["NAME"])})
    if not batch:
        return
    session = Session(connection)
    now = session.time(session.run(f"SELECT {session.sql.dialect.now}", {})[0][0])
    minute = now.replace(second=0, microsecond=0)
    rows = [CallCount(queue=key.queue, minute=minute, call=key.call, count=n) for key, n in batch.items()]
    CallCount.objects.using(alias).bulk_create(rows)


def merge(alias: str) -> int:
    """Make one row of all those of a queue, call and minute, and later of a day; return how many rows went.

    Rows that another process is merging are passed over, so nobody waits and nothing is counted twice.
    """
    return sum(_merge(alias, unit, age) for unit, age in MERGE)


def _merge(alias: str, unit: str, age: timedelta) -> int:
    old = CallCount.objects.using(alias).filter(minute__lt=Trunc(Now() - age, unit, tzinfo=UTC))
    old = old.annotate(start=Trunc("minute", unit, tzinfo=UTC))
    several = old.values("queue", "call", "start").annotate(rows=Count("pk")).filter(rows__gt=1).order_by()
    gone = 0
    skip = connections[alias].features.has_select_for_update_skip_locked
    for group in list(several.values("queue", "call", "start")[:MERGED]):
        with transaction.atomic(using=alias):
            locked = old.select_for_update(skip_locked=skip).filter(**group).values_list("pk", "count")
            counts = dict(locked)
            if len(counts) > 1:
                CallCount.objects.using(alias).filter(pk__in=counts).delete()
                CallCount.objects.using(alias).create(
                    queue=group["queue"], call=group["call"], minute=group["start"], count=sum(counts.values())
                )
                gone += len(counts) - 1
    return gone


counter = Calls()


def _after_fork() -> None:
    # The thread and what it counts stayed with the parent.
    global counter
    counter = Calls()


atexit.register(lambda: counter.flush())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
