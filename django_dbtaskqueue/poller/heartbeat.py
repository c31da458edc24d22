"""Heartbeat: a poller reports, obeys operators, unparks, enforces timeouts, and rescues the tasks of dead processes.

It has two threads. One enforces timeouts and never waits for the database. The other runs the periodic jobs, with
Django connections of its own; a database that is away never ends it.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import getpid
from typing import TypeVar

from django.db import connections
from django.db.models.functions import Now
from django.db.utils import Error

from django_dbtaskqueue import models, registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import changed_settings
from django_dbtaskqueue.core import __version__, logger
from django_dbtaskqueue.core.durations import Pauses, clock, jittered, next_pause
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.db.liveness import ANSWER_TIMEOUT_S
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies, observe
from django_dbtaskqueue.flow.rescue import rescue, seconds_until_exhausted, seconds_until_exhausted_by_queue
from django_dbtaskqueue.flow.schedule import FAILED_SCHEDULE_S, Definition, declare, enqueue_due, home_of
from django_dbtaskqueue.flow.usage import delete_old, roll_up
from django_dbtaskqueue.metrics import Collector
from django_dbtaskqueue.operations import bulk, housekeeping, schedules
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.poller.executors.thread import tidy
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import QueueState, reports_of_others, unpark_queue

T = TypeVar("T")

TIMEOUT_CHECK_SECONDS = 0.25
# Between two checks for parked tasks that have a processor by now: after a check that found some, and at most. Pollers
# of an older release park what they take of a type that is new.
UNPARK_SECONDS = 1.0, 30.0
MAX_RUNNING_SHOWN = 20  # running tasks in one heartbeat
RESCUE_SECONDS = 5.0  # at most, between two checks of one queue for tasks to rescue
SWEEP_SECONDS = 5.0  # between two looks for tasks that ended without a word to what waits for them
SWEEP_MISSING_SECONDS = 60.0  # between two looks for such tasks whose rows are gone
EARLY_RESCUE_SHARE = 0.2  # of that time: a queue may be checked so much earlier, together with other queues
MAX_QUEUES_PER_RESCUE = 50  # in one statement
LOCKED_RESCUE_SECONDS = 1.0  # before the next check of a lease that ran out but is locked
RESCUE_TIME_SHARE = 1 / 20  # of the time, at most, for these checks
HEARTBEAT_RETRY_SECONDS = 0.5, 5.0
DEAD_POLLER_RETENTION = timedelta(days=1)  # of the row of a poller that died
# Settings that a running poller cannot change: they say where and how the tasks are stored.
RESTART_SETTINGS = ("database", "model", "temporary", "strategy")
COMMANDS: dict[str, Callable[[Poller], None]] = {
    "pause": Poller.pause,
    "start": Poller.resume,
    "drain": Poller.stop,
    "stop": Poller.cancel,
}


class Heartbeat:
    """Runs the heartbeat's threads and the maintenance of one poller, from ``start`` to ``stop``."""

    def __init__(self, poller: Poller) -> None:
        self.reported_at = 0.0  # clock.monotonic() of the last report that was stored
        self._poller = poller
        self._background = background_jobs(poller.aliases, poller.settler.metrics, poller.options.siblings)
        self._sweep_missing_after: dict[tuple[str, type], int] = {}  # by alias and model
        self.jobs = PeriodicThread(  # those that the poller cannot do without
            "Heartbeat and rescue",
            "dbtaskqueue-heartbeat",
            self._all_jobs(),
            retry=HEARTBEAT_RETRY_SECONDS,
            timeout=ANSWER_TIMEOUT_S,
        )
        self._timeouts = WatchedThread(target=self._enforce_timeouts, name="dbtaskqueue-timeouts", daemon=True)
        self.threads: list[WatchedThread] = [self._timeouts, self.jobs, self._background]  # that run until ``stop``

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Report a last time, as STOPPED, and end."""
        self.jobs.stop()
        self._timeouts.join(timeout=HEARTBEAT_RETRY_SECONDS[1])
        self._background.stop()

    def _all_jobs(self) -> Iterator[PeriodicJob]:
        interval = conf.settings().heartbeat.total_seconds()
        for alias in self._poller.aliases:
            yield PeriodicJob(alias, "heartbeat", partial(_every, interval, self._report, alias), at_end=True)
            yield PeriodicJob(alias, "deleting dead pollers", partial(_delete_dead_pollers, alias))
            yield PeriodicJob(alias, "operators' changes", partial(_every, interval, self._apply_changes, alias))
            yield PeriodicJob(alias, "counting pollers", partial(self._count_pollers, alias))
            yield PeriodicJob(alias, "schedules", ScheduleJob(alias, self._poller.wake).run)
        tables: dict[tuple[str, type], list[QueueState]] = {}
        for queue in self._poller.queues.values():
            yield PeriodicJob(queue.port.alias, f"unparking {queue.name}", partial(self._unpark, queue))
            tables.setdefault((queue.port.alias, queue.port.model), []).append(queue)
        for (alias, model), queues in tables.items():
            yield PeriodicJob(alias, "rescue", Rescuer(queues, self._poller.settler.metrics).look)
            for seconds, sweep in ((SWEEP_SECONDS, self._sweep), (SWEEP_MISSING_SECONDS, self._sweep_missing)):
                yield PeriodicJob(alias, "telling ends of tasks", partial(_every, seconds, sweep, (alias, model)))

    def _enforce_timeouts(self) -> None:
        while not clock.wait(self.jobs.ending, TIMEOUT_CHECK_SECONDS):
            try:
                self._poller.overdue()
            except Exception:  # of any kind: without this thread no timeout would be enforced again
                logger.exception("Timeouts could not be enforced, trying again")

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _report(self, alias: str) -> None:
        """Write this poller's row, by an UPDATE alone unless there is no row or a command: run that."""
        poller, now, ended = self._poller, clock.monotonic(), self.jobs.ending.is_set()
        blocked = poller.state == "RUNNING" and any(one.blocked for one in poller.executors.all)
        report = {
            "host": socket.gethostname()[:200],
            "pid": getpid(),
            "version": __version__,
            "release": conf.settings().release,
            "queues": [
                {
                    "queue": queue.name,
                    "weight": queue.weight,
                    "idle_seconds": int(now - queue.taken_at),
                    "types": registry.types_of(queue.name, registry.processors(queue.name)),
                    "tags": poller.options.tags,
                }
                for queue in poller.queues.values()
            ],
            "state": "STOPPED" if ended else "BLOCKED" if blocked else poller.state,
            "slots": poller.slots(),
            "held": len(poller.settler.held),
            "finished": poller.counts.finished,
            "failed": poller.counts.failed,
            "running": self._running(),
            "heartbeat_time": Now(),
        }
        rows = models.Poller.objects.using(alias)
        if not rows.filter(pk=poller.instance, requested_command="").update(**report):
            row = models.Poller(instance=poller.instance, **report)
            rows.bulk_create([row], update_conflicts=True, unique_fields=["instance"], update_fields=list(report))
            if not ended:
                self._run_command(alias)
        self.reported_at = clock.monotonic()

    def _apply_changes(self, alias: str) -> None:
        """Bring queues to the settings in force; report what changed, like ``claims: lease=PT5M<PT15M``."""
        queues = [queue for queue in self._poller.queues.values() if queue.port.alias == alias]
        rows = models.Queue.objects.using(alias).filter(pk__in=[queue.name for queue in queues])
        overrides = dict(rows.values_list("name", "overrides"))
        if applied := [text for queue in queues for text in _apply(queue, overrides.get(queue.name) or {})]:
            row = models.Poller.objects.using(alias).filter(pk=self._poller.instance)
            row.update(applied_settings="\n".join(applied))
            self._poller.wake("")

    def _count_pollers(self, alias: str) -> float:
        """Note how many other pollers serve each queue: they share the work of its scans."""
        began, session = clock.monotonic(), Session.on(alias)
        reports = reports_of_others(session, self._poller.instance)
        others = Counter(name for report in reports for name in {*models.control.queue_names_in(report)})
        shares = bool(reports) and not session.run(session.sql.is_telling_dear, {})[0][0]
        for queue in self._poller.queues.values():
            if queue.port.alias == alias:
                queue.cursor.others = max(others[queue.name], self._poller.options.siblings)  # some may still start
                queue.cursor.shares = shares
        return max(_spread(conf.settings().heartbeat.total_seconds()), (clock.monotonic() - began) / RESCUE_TIME_SHARE)

    def _run_command(self, alias: str) -> None:
        rows = models.Poller.objects.using(alias).filter(pk=self._poller.instance).exclude(requested_command="")
        if (requested := rows.values_list("requested_command", flat=True).first()) in COMMANDS:
            logger.info("An operator requested: %s", requested)
            COMMANDS[requested](self._poller)
            rows.filter(requested_command=requested).update(requested_command="")
            self._report(alias)

    def _running(self) -> list[dict[str, object]]:
        now = clock.monotonic()
        longest = sorted(self._poller.running(), key=lambda run: run.started)[:MAX_RUNNING_SHOWN]
        runs = [(run.job.lease, now - run.started) for run in longest]
        return [{**observe.fields(one), "seconds": round(took, 1), "given_up": one.cancelled} for one, took in runs]

    def _unpark(self, queue: QueueState) -> float:
        if unpark_queue(Session.on(queue.port.alias, queue.port.model), queue):
            self._poller.wake(queue.name)
            queue.unpark_pause = 0.0
        queue.unpark_pause = next_pause(queue.unpark_pause, *UNPARK_SECONDS)
        return _spread(queue.unpark_pause)

    def _sweep(self, table: tuple[str, type]) -> None:
        dependencies.sweep(Session.on(*table))

    def _sweep_missing(self, table: tuple[str, type]) -> None:
        after = self._sweep_missing_after.get(table, 0)
        self._sweep_missing_after[table] = dependencies.sweep_missing(Session.on(*table), after)


# -- operators' settings -----------------------------------------------------------------------------------------------


def _apply(queue: QueueState, overrides: dict[str, object]) -> list[str]:
    refused, queue.refused = queue.refused, None
    try:
        settings = conf.overlay(conf.default_settings(queue.name), overrides)
    except Exception as error:  # of this queue: the others follow their rows
        if overrides != refused:
            logger.error("Overrides of queue %s are not applied: %s", queue.name, error)
        queue.refused = overrides
        return []
    changed = changed_settings(queue.settings, settings)
    changes = [f"{name}={after}<{before}" for name, before, after in changed if name not in RESTART_SETTINGS]
    if changes or overrides != queue.overrides:
        queue.overrides = overrides
        queue.apply(settings)
    if changes:
        logger.info("Queue %s: %s", queue.name, " ".join(changes))
    return [f"{queue.name}: {change}" for change in changes]


# -- rescue ------------------------------------------------------------------------------------------------------------


class Rescuer:
    """Checks the queues of one table for tasks to rescue, each when it is due."""

    def __init__(self, queues: Iterable[QueueState], metrics: Collector | None = None) -> None:
        self._due = dict.fromkeys(queues, 0.0)
        self._metrics = metrics

    def look(self) -> float:
        """Check the queues that are due now or soon; return the seconds until the next check."""
        began = clock.monotonic()
        if min(self._due.values()) <= began:
            soon = began + EARLY_RESCUE_SHARE * RESCUE_SECONDS
            queues = sorted([queue for queue, due in self._due.items() if due <= soon], key=self._due.__getitem__)
            del queues[MAX_QUEUES_PER_RESCUE:]
            session = Session.on(queues[0].port.alias, queues[0].port.model)
            left = seconds_until_exhausted_by_queue(session, [queue.name for queue in queues])
            for queue in queues:
                self._due[queue] = rescue_due(session, queue, left.get(queue.name), self._metrics) + clock.monotonic()
        now, share = clock.monotonic(), max(queue.cursor.scan_share for queue in self._due)
        return max(min(self._due.values()) - now, (now - began) / RESCUE_TIME_SHARE * share)


def rescue_due(session: Session, queue: QueueState, left: float | None, metrics: Collector | None) -> float:
    """Write ERROR for a queue's tasks whose process died on their last attempt; return the seconds to the next check.

    ``left`` is the result of ``seconds_until_exhausted``. It covers the leases that still run: it says when the first
    of them can run out. So a check every few seconds is enough to end an orphan within a tenth of its lease.
    """
    while left is not None and left <= 0:
        if not (ended := rescue(session, queue.name, queue.port)):
            break
        if metrics is not None:
            metrics.add(queue.port.alias, queue.name, ended)
        left = seconds_until_exhausted(session, queue.name)
    lease = queue.settings.lease.total_seconds()
    wait = _spread(min(RESCUE_SECONDS * queue.cursor.scan_share, lease / 3))
    if left is not None:
        wait = min(wait, left + lease * random.uniform(0.02, 0.1) if left > 0 else LOCKED_RESCUE_SECONDS)
    return wait


def _delete_dead_pollers(alias: str) -> float:
    models.Poller.objects.using(alias).filter(heartbeat_time__lt=Now() - DEAD_POLLER_RETENTION).delete()
    return float("inf")


# -- periodic jobs, each tried again with a growing pause while it fails; maintenance ----------------------------------

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
class PeriodicJob:
    """A job on one database. ``run`` returns the seconds until its next run."""

    alias: str
    name: str  # as its failures are logged
    run: Callable[[], float]
    due: float = 0.0  # clock.monotonic()
    at_end: bool = False  # it runs once more when the thread ends
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


class PeriodicThread(WatchedThread):
    """Runs jobs from ``start`` to ``stop`` on one thread, with its own Django connections. An exception never ends it.

    A database that is away is logged once, by the first job that notices; any other failure once a job, with traceback.
    """

    def __init__(
        self, title: str, thread_name: str, jobs: Iterable[PeriodicJob], *, retry: tuple[float, float], timeout: float
    ) -> None:
        super().__init__(target=self._work, name=thread_name, daemon=True)
        self.ending = threading.Event()
        self.busy_since: float | None = None  # since when a job runs; None between two jobs
        self._title = title
        self._jobs = list(jobs)
        self._retry = retry  # the first and the longest pause after failures in a row
        self._timeout = timeout  # seconds, after which a job's connection is taken to be dead; it grows for a slow job
        self._deadlines: dict[str, liveness.Deadline] = {}  # by alias

    def stop(self, timeout: float = 5.0) -> None:
        """Run the jobs of the end, and end; wait at most ``timeout`` seconds if the database is away."""
        self.ending.set()
        if self.is_alive():
            self.join(timeout)

    def _work(self) -> None:
        while self._jobs and not self.ending.is_set():
            for job in self._jobs:
                if clock.monotonic() >= job.due and not self.ending.is_set():
                    job.due = clock.monotonic() + self._attempt(job)
            tidy()  # a connection of a pool goes back
            self.busy_since = None
            clock.wait(self.ending, max(0.0, min([job.due for job in self._jobs]) - clock.monotonic()))
        for job in self._jobs:
            if job.at_end:
                self._attempt(job)
        connections.close_all()

    def _attempt(self, job: PeriodicJob) -> float:
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
        if (deadline := self._deadlines.get(alias)) is None:
            liveness.bound_waits(connections[alias])
            deadline = self._deadlines[alias] = liveness.Deadline(connections[alias], self._timeout)
        liveness.ensure_thread()
        return deadline

    def _fails(self, alias: str) -> bool:
        return any(job.pause for job in self._jobs if job.alias == alias)

    def _log(self, job: PeriodicJob, error: Exception) -> None:
        database_error = isinstance(error, Error)
        quiet = self._fails(job.alias) or self.ending.is_set() if database_error else bool(job.pause)
        log = logger.debug if quiet else logger.warning
        text = f"{type(error).__name__}: {error}".replace("\n", " ").strip()
        log("%s fail, trying again: %s: %s", self._title, job.name, text, exc_info=not database_error)


def background_jobs(aliases: Collection[str], metrics: Collector, siblings: int = 0) -> PeriodicThread:
    """Return the thread for what a poller can run without: metrics, retention and bulk operations."""
    kinds = (
        ("metrics", partial(_every, STORE_METRICS_SECONDS, metrics.store), STORE_METRICS_SECONDS),
        ("roll-up of metrics", partial(_every, ROLL_UP_SECONDS, lambda on: roll_up(Session.on(on))), ROLL_UP_SECONDS),
        ("deleting metrics", partial(_every, DELETE_METRICS_SECONDS, delete_old), DELETE_METRICS_SECONDS),
        ("retention", partial(_apply_retention, Housekeeper()), FIRST_RETENTION_SECONDS * (1 + siblings)),
        ("bulk operations", _bulk, IDLE_BULK_SECONDS),
    )
    now = clock.monotonic()
    jobs = [
        PeriodicJob(alias, name, partial(run, alias), now + first * random.uniform(0.5, 1.0), at_end=name == "metrics")
        for alias in aliases
        for name, run, first in kinds
    ]
    title = "Metrics, retention and bulk operations"
    return PeriodicThread(
        title, "dbtaskqueue-maintain", jobs, retry=PERIODIC_RETRY_SECONDS, timeout=PERIODIC_TIMEOUT_SECONDS
    )


def _apply_retention(housekeeper: Housekeeper, alias: str) -> float:
    every = conf.settings().housekeeping
    if every is not None or clock.monotonic() >= housekeeper.upkeep_due.get(alias, 0.0):
        policy = RetentionPolicy() if every is None else RetentionPolicy.of_settings()  # without an age nothing is old
        report = housekeeper.turn(policy, using=alias, within=housekeeping.MAX_TURN)
        if report.expired or report.moved or report.deleted or report.attempts or report.partitions:
            logger.info("Housekeeping: %s", report)
        if not report.over:
            return _spread(IDLE_BULK_SECONDS)
        housekeeper.upkeep_due[alias] = clock.monotonic() + _spread(UPKEEP_SECONDS)
    return _spread(RETENTION_OFF_SECONDS if every is None else every.total_seconds())


def _bulk(alias: str) -> float:
    return _spread(BUSY_BULK_SECONDS if bulk.turn(alias) else IDLE_BULK_SECONDS)


def _every(seconds: float, work: Callable[[T], object], on: T) -> float:
    work(on)
    return _spread(seconds)


def _spread(seconds: float) -> float:
    """Return a little less than ``seconds``, so that pollers do not all work at the same time."""
    return seconds * random.uniform(0.8, 1.0)
