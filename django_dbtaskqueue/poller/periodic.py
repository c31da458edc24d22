"""What a poller does beside its tasks and could do without: it stores metrics, keeps house, does bulk operations.

One thread with Django connections of its own. Whatever fails here is tried again later, and no task notices.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import monotonic

from django.db import connections
from django.db.utils import Error

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db.minute_counts import METRICS, delete_old, roll_up
from django_dbtaskqueue.metrics.collector import Collector
from django_dbtaskqueue.operations import bulk, housekeeping
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy

logger = logging.getLogger("django_dbtaskqueue")

STORE = 10.0  # seconds between two writes of metrics
MERGE = 120.0  # seconds between two looks for metrics to merge
FORGET = 3600.0  # seconds between two looks for metrics to delete
IDLE = 3.0  # seconds between two looks for bulk operations
BUSY = 0.05  # and between two chunks of one
UNASKED = 60.0  # seconds between two looks whether housekeeping has been switched on
PAUSE = (1.0, 60.0)  # seconds before something that failed is tried again, at first and at most


class Maintenance:
    """Looks after the databases of one poller, from ``start`` to ``stop``."""

    def __init__(self, aliases: Iterable[str], metrics: Collector) -> None:
        self._metrics = metrics
        self._housekeeper = Housekeeper()
        self._ended = threading.Event()
        self._chores = list(self._all_chores(sorted(set(aliases))))
        self._thread = threading.Thread(target=self._run, name="dbtaskqueue-maintain", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Store the last metrics and end; a database that is away keeps nobody longer than ``timeout`` seconds."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _all_chores(self, aliases: Iterable[str]) -> Iterator[_Chore]:
        for alias in aliases:
            yield _Chore(alias, "metrics", partial(self._store, alias), STORE)
            yield _Chore(alias, "merging metrics", partial(_merge, alias), MERGE)
            yield _Chore(alias, "old metrics", partial(_forget, alias), FORGET)
            yield _Chore(alias, "housekeeping", partial(self._housekeep, alias), UNASKED)
            yield _Chore(alias, "bulk operations", partial(_bulk, alias), IDLE)

    def _run(self) -> None:
        while not self._ended.is_set():
            for chore in self._chores:
                if not self._ended.is_set():
                    chore.look()
            self._ended.wait(max(0.0, min(chore.due for chore in self._chores) - monotonic()))
        for chore in self._chores:
            if chore.name == "metrics":
                chore.look(last=True)
        connections.close_all()

    def _store(self, alias: str) -> float:
        self._metrics.store(alias)
        return STORE

    def _housekeep(self, alias: str) -> float:
        every = conf.settings().housekeeping
        if every is None:
            return UNASKED
        swept = self._housekeeper.turn(RetentionPolicy.of_settings(), using=alias, within=housekeeping.MAX_TURN)
        if swept.moved or swept.deleted or swept.attempts or swept.partitions:
            logger.info("Housekeeping: %s", swept)
        return every.total_seconds() if swept.over else IDLE


class _Chore:
    """Something to do again and again; ``run`` returns the seconds until the next time."""

    def __init__(self, alias: str, name: str, run: Callable[[], float], first: float) -> None:
        self.alias = alias
        self.name = name
        self._run = run
        self.due = monotonic() + first * random.uniform(0.5, 1.0)
        self._pause = 0.0

    def look(self, *, last: bool = False) -> None:
        """Do it when it is due, whatever happens to the database."""
        if monotonic() < self.due and not last:
            return
        try:
            wait = self._run() * random.uniform(0.9, 1.0)
            self._pause = 0.0
        except Exception as error:
            connections[self.alias].close()
            first, most = PAUSE
            level = logging.DEBUG if self._pause else logging.WARNING
            self._pause = wait = min(most, 2 * self._pause or first)
            told = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            logger.log(
                level, "Failed and tried again later: %s: %s", self.name, told, exc_info=not isinstance(error, Error)
            )
        self.due = monotonic() + wait


def _merge(alias: str) -> float:
    roll_up(alias, *METRICS)
    return MERGE


def _forget(alias: str) -> float:
    delete_old(alias)
    return FORGET


def _bulk(alias: str) -> float:
    return BUSY if bulk.turn(alias) else IDLE
