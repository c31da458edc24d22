"""Periodic jobs of a poller, each tried again with a growing pause while it fails; and the maintenance jobs."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from django.db import connections
from django.db.utils import Error

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import Pauses, clock, jittered, next_pause
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.db.minute_counts import delete_old, roll_up
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.schedule import FAILED_SCHEDULE_S, Definition, declare, enqueue_due, home_of
from django_dbtaskqueue.metrics import Collector
from django_dbtaskqueue.operations import bulk, housekeeping, schedules
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.poller.executors.thread import tidy

logger = logging.getLogger("django_dbtaskqueue")

STORE_METRICS_SECONDS = 10.0
ROLL_UP_SECONDS = 120.0
DELETE_METRICS_SECONDS = 3600.0
IDLE_BULK_SECONDS = 3.0  # between two polls for bulk operations
BUSY_BULK_SECONDS = 0.05  # between two chunks of one
DECLARE_SECONDS = 60.0  # between two comparisons of schedules with the code: another release may have changed them
FIRST_RETENTION_SECONDS = 5.0  # after a poller's start
RETENTION_OFF_SECONDS = 60.0  # between two checks whether retention has been switched on
UPKEEP_SECONDS = 3600.0  # between two turns that delete nothing by age, while it is off
PERIODIC_RETRY_SECONDS = 1.0, 60.0
PERIODIC_TIMEOUT_SECONDS = 60.0  # for one job, a batch of bulk work or retention at the most


@dataclass(slots=True, eq=False)
class Periodic:
    """A job on one database. ``run`` returns the seconds until its next run."""

    alias: str
    name: str  # as its failures are logged
    run: Callable[[], float]
    due: float = 0.0  # clock.monotonic()
    pause: float = 0.0  # before the next attempt; 0 while the job works


class ScheduleJob:
    """Enqueues the tasks of schedules on one database, and writes to their rows what the code declares."""

    def __init__(self, alias: str, wake: Callable[[str], None]) -> None:
        self._alias = alias
        self._wake = wake
        self._declared: dict[str, Definition] = {}
        self._declare_due = 0.0
        self._pauses = Pauses[str](*FAILED_SCHEDULE_S)

    def run(self) -> float:
        """Enqueue what is due; return the seconds until the next tick, or until the next look."""
        if clock.monotonic() >= self._declare_due:
            here = schedules.declared().items()
            self._declared = {name: one for name, one in here if home_of(one.queue) == self._alias}
            declare(self._alias, self._declared)
            self._declare_due = clock.monotonic() + DECLARE_SECONDS
        seconds, queues = enqueue_due(self._alias, self._declared, self._pauses)
        for queue in queues:
            self._wake(queue)
        return seconds


class PeriodicThread:
    """Runs jobs from ``start`` to ``stop`` on one thread, with its own Django connections. An exception never ends it.

    A database that is away is logged once, by the first job that notices; every other kind of failure once for each
    job, with its traceback.
    """

    def __init__(
        self,
        title: str,
        thread_name: str,
        jobs: Iterable[Periodic],
        *,
        last: Iterable[Periodic],
        retry: tuple[float, float],
        timeout: float,
    ) -> None:
        """``last``: jobs to run once at the end. ``retry``: the first and the longest pause after failures in a row.

        ``timeout``: the seconds after which a job's connection is taken to be dead. It grows for a job that is slow.
        """
        self.ended = threading.Event()
        self.busy_since: float | None = None  # since when a job runs; None between two jobs
        self._title = title
        self._jobs = list(jobs)
        self._last = list(last)
        self._retry = retry
        self._timeout = timeout
        self._deadlines: dict[str, liveness.Deadline] = {}  # by alias
        self.thread = WatchedThread(target=self._run, name=thread_name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Run the last jobs and end; wait at most ``timeout`` seconds if the database is away."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(timeout)

    def _run(self) -> None:
        while self._jobs and not self.ended.is_set():
            for job in self._jobs:
                if clock.monotonic() >= job.due and not self.ended.is_set():
                    job.due = clock.monotonic() + self._attempt(job)
            tidy()  # a connection of a pool goes back
            self.busy_since = None
            clock.wait(self.ended, max(0.0, min([job.due for job in self._jobs]) - clock.monotonic()))
        for job in self._last:
            self._attempt(job)
        connections.close_all()

    def _attempt(self, job: Periodic) -> float:
        """Run a job once; return the seconds until the next time. Never raises."""
        self.busy_since = clock.monotonic()
        try:
            with self._deadline(job.alias):
                seconds = job.run()
        except Exception as error:
            connections[job.alias].close()
            self._log(job, error)
            job.pause = next_pause(job.pause, *self._retry)
            return jittered(job.pause)
        if job.pause:
            job.pause = 0.0
            if not self._fails(job.alias):
                logger.info("%s work again", self._title)
        return seconds

    def _deadline(self, alias: str) -> liveness.Deadline:
        deadline = self._deadlines.get(alias)
        if deadline is None:
            liveness.bound_waits(connections[alias])
            deadline = self._deadlines[alias] = liveness.Deadline(connections[alias], self._timeout)
        liveness.ensure_thread()
        return deadline

    def _fails(self, alias: str) -> bool:
        return any(job.pause for job in self._jobs if job.alias == alias)

    def _log(self, job: Periodic, error: Exception) -> None:
        database_error = isinstance(error, Error)
        quiet = self._fails(job.alias) or self.ended.is_set() if database_error else bool(job.pause)
        log = logger.debug if quiet else logger.warning
        text = f"{type(error).__name__}: {error}".replace("\n", " ").strip()
        log("%s fail, trying again: %s: %s", self._title, job.name, text, exc_info=not database_error)


def background_jobs(aliases: Collection[str], metrics: Collector) -> PeriodicThread:
    """Return the thread that stores metrics, deletes old tasks and metrics, and works on bulk operations.

    A poller can run without it. A failure is tried again later and does not touch any task.
    """
    store = partial(_every, STORE_METRICS_SECONDS, metrics.store)
    kinds = (
        ("metrics", store, STORE_METRICS_SECONDS),
        ("roll-up of metrics", partial(_every, ROLL_UP_SECONDS, lambda on: roll_up(Session.on(on))), ROLL_UP_SECONDS),
        ("deleting metrics", partial(_every, DELETE_METRICS_SECONDS, delete_old), DELETE_METRICS_SECONDS),
        ("retention", partial(_apply_retention, Housekeeper()), FIRST_RETENTION_SECONDS),
        ("bulk operations", _bulk, IDLE_BULK_SECONDS),
    )
    jobs = [
        Periodic(alias, name, partial(run, alias), clock.monotonic() + first * random.uniform(0.5, 1.0))
        for alias in aliases
        for name, run, first in kinds
    ]
    last = [Periodic(alias, "metrics", partial(store, alias)) for alias in aliases]
    title = "Metrics, retention and bulk operations"
    return PeriodicThread(
        title, "dbtaskqueue-maintain", jobs, last=last, retry=PERIODIC_RETRY_SECONDS, timeout=PERIODIC_TIMEOUT_SECONDS
    )


def _every(seconds: float, work: Callable[[str], object], alias: str) -> float:
    work(alias)
    return _spread(seconds)


def _apply_retention(housekeeper: Housekeeper, alias: str) -> float:
    every = conf.settings().housekeeping
    if every is None and clock.monotonic() < housekeeper.upkeep_due.get(alias, 0.0):
        return _spread(RETENTION_OFF_SECONDS)
    policy = RetentionPolicy() if every is None else RetentionPolicy.of_settings()  # without an age nothing is old
    report = housekeeper.turn(policy, using=alias, within=housekeeping.MAX_TURN)
    if every is None and report.over:
        housekeeper.upkeep_due[alias] = clock.monotonic() + _spread(UPKEEP_SECONDS)
        every = timedelta(seconds=RETENTION_OFF_SECONDS)
    if report.expired or report.moved or report.deleted or report.attempts or report.partitions:
        logger.info("Housekeeping: %s", report)
    return _spread(every.total_seconds() if every is not None and report.over else IDLE_BULK_SECONDS)


def _bulk(alias: str) -> float:
    return _spread(BUSY_BULK_SECONDS if bulk.turn(alias) else IDLE_BULK_SECONDS)


def _spread(seconds: float) -> float:
    """Return a little less than ``seconds``, so that pollers do not all work at the same time."""
    return seconds * random.uniform(0.9, 1.0)
