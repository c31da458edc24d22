"""Housekeeping: the batches of ``flow.retention`` in turns. Many processes may do it: a batch skips locked rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from math import inf
from typing import Self

from django.db import DatabaseError, OperationalError, connections, transaction

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import Pauses, clock
from django_dbtaskqueue.core.exceptions import UnknownQueue
from django_dbtaskqueue.core.states import COMPLETED, ERROR, POISON
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.db.storage import is_partitioned, make_month, missing_months, months
from django_dbtaskqueue.flow import retention
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.flow.rescue import end_expired
from django_dbtaskqueue.flow.schedule import aware
from django_dbtaskqueue.metrics import Collector
from django_dbtaskqueue.models import TaskHistory
from django_dbtaskqueue.operations.bounded_reads import queue_names
from django_dbtaskqueue.operations.lookup import Location, aliases_in, locations

HISTORY_TABLE = TaskHistory._meta.db_table
MAX_STEP_WINDOWS = 40  # of 1,000 rows, of steps and signals, in one turn
MAX_TURN = timedelta(seconds=30)  # of a poller; its next turn continues there
FAILED_PART_S = 60.0, 3600.0  # how long what raised rests: at first, and at most


@dataclass(frozen=True)
class RetentionPolicy:
    """How long rows are kept; None: without limit. ``of_settings`` reads them from ``DBTASKQUEUE``."""

    completed: timedelta | None = None
    error: timedelta | None = None
    poison: timedelta | None = None
    history: timedelta | None = None
    attempts: timedelta | None = None
    audit: timedelta | None = None  # audit entries, and bulk operations that have ended

    @classmethod
    def of_settings(cls) -> Self:
        return cls(**{age.name: getattr(conf.settings(), f"keep_{age.name}") for age in fields(cls)})


@dataclass
class RetentionReport:
    """What one turn did."""

    moved: int = 0  # tasks, to the history
    deleted: int = 0  # tasks, for good and counted, from the table or the history
    expired: int = 0  # tasks past their time to live that no poller took
    attempts: int = 0
    audit: int = 0  # audit entries and bulk operations
    partitions: list[str] = field(default_factory=list)  # made
    dropped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # what raised, and its error; the rest was done
    end: float = inf  # by clock.monotonic()
    over: bool = True  # False: the time was up before all was done

    def __str__(self) -> str:
        parts = (
            f"moved {self.moved} tasks to the history, deleted {self.deleted} tasks, {self.attempts} attempts"
            f" and {self.audit} records of operators' actions",
            f"ended {self.expired} tasks past their time to live" if self.expired else "",
            f"made {', '.join(self.partitions)}" if self.partitions else "",
            f"dropped {', '.join(self.dropped)}" if self.dropped else "",
            *(f"failed for {one}" for one in self.failed),
            "" if self.over else "more is left for the next turn",
        )
        return "; ".join(filter(None, parts))

    def has_time(self) -> bool:
        self.over = self.over and clock.monotonic() <= self.end
        return self.over

    def repeat(self, batch: Callable[[], int]) -> int:
        """Do batches until one finds nothing, or the time is up; return the sum of their numbers."""
        total = 0
        while self.has_time() and (number := batch()):
            total += number
        return total


class Housekeeper:
    """Does the turns on the calling thread's connections, and remembers where the last turn ended."""

    def __init__(self) -> None:
        self._cursors: dict[tuple[Location, str, str], retention.RetentionCursor] = {}
        self._steps_read: dict[Location, int] = {}  # the last id
        self._pauses = Pauses[tuple[str, str]](*FAILED_PART_S, beyond=OperationalError)
        self.upkeep_due: dict[str, float] = {}  # by alias: clock.monotonic() of a poller's next turn without retention

    def turn(
        self,
        policy: RetentionPolicy,
        *,
        using: str | None = None,
        queues: Iterable[str] | None = None,
        to: str = "history",
        within: timedelta | None = None,
    ) -> RetentionReport:
        """Do what is due, for ``within`` at most; raises if the database is away. Each batch done before stays done.

        A queue, or another part, that raises for another reason rests, and the others go on. With ``queues`` the
        history, failed attempts and the audit stay as they are: those are of all queues.
        """
        report = RetentionReport(end=inf if within is None else clock.monotonic() + within.total_seconds())

        def attempt(alias: str, part: str, act: Callable[..., object], *given: object) -> None:
            def note(error: Exception) -> None:
                report.failed.append(f"{part} on {alias}: {_line(error)}")
                logger.warning("Housekeeping of %s, tried again later", report.failed[-1])

            if (alias, part) not in self._pauses.resting():
                with self._pauses.around((alias, part), note):
                    act(*given)

        places = locations(using)
        for alias in aliases_in(places):
            report.partitions += _months_ahead(alias)
        for alias, model in places:
            for queue in queue_names((alias, model)) if queues is None else queues:
                attempt(alias, f"queue {queue}", self._tasks, (alias, model), queue, policy, report, to)
            attempt(alias, f"steps and signals of {model._meta.label}", self._steps, (alias, model), report)
        for alias in aliases_in(places) if queues is None else ():
            attempt(alias, "history and audit", _delete_old, alias, policy, report)
        return report

    def _steps(self, place: Location, report: RetentionReport) -> None:
        """Delete steps and signals of tasks that have left the table. The next turn goes on behind the rows read."""
        for _window in range(MAX_STEP_WINDOWS):
            if not report.has_time():
                return
            self._steps_read[place] = retention.delete_left_steps(Session.on(*place), self._steps_read.get(place, 0))
            if not self._steps_read[place]:
                return

    def _tasks(self, place: Location, queue: str, policy: RetentionPolicy, report: RetentionReport, to: str) -> None:
        session = Session.on(*place)
        report.expired += report.repeat(partial(_end_expired, session, queue))
        for status, age in ((COMPLETED, policy.completed), (ERROR, policy.error), (POISON, policy.poison)):
            cursor = self._cursors.setdefault((place, queue, status), retention.RetentionCursor(queue, status))
            while age is not None and report.has_time():
                number = retention.housekeep_batch(session, cursor, older_than=age, to=to)
                report.moved += number if to == "history" else 0
                report.deleted += number if to != "history" else 0
                if cursor.at_end:
                    break


def _end_expired(session: Session, queue: str) -> int:
    """End tasks that wait and are past their time to live, as a poller does that takes one; return how many."""
    alias, ids = session.connection.alias, retention.expired(session, queue)
    if not ids:
        return 0
    try:
        settings = overridden_settings(queue, alias)
    except UnknownQueue:  # it has tasks all the same
        settings = conf.default_settings(queue)
    port = SettlePort(alias, session.model, key=queue)
    port.follow(settings)
    ended = end_expired(session, queue, port, ids, expired=settings.expired)
    metrics = Collector()
    metrics.add(alias, queue, ended)
    metrics.store(alias)
    return len(ended)


def _months_ahead(alias: str) -> list[str]:
    """Make the history's next partitions. If that fails, the default partition takes their rows."""
    if not is_partitioned(connections[alias], HISTORY_TABLE):
        return []
    made = []
    for month in missing_months(connections[alias], HISTORY_TABLE):
        try:
            with transaction.atomic(using=alias):
                make_month(connections[alias], HISTORY_TABLE, month)
            made.append(month.name)
        except DatabaseError as error:
            logger.warning("Partition %s of the history could not be made: %s", month.name, _line(error))
    return made


def _delete_old(alias: str, policy: RetentionPolicy, report: RetentionReport) -> None:
    session, repeat = Session.on(alias), report.repeat
    repeat(partial(retention.delete_past_periods, alias))
    if session.postgresql:
        repeat(partial(retention.delete_unread_events, session))
    if policy.history is not None:
        tables = [model for _alias, model in locations(alias)]
        repeat(partial(retention.delete_empty_batches, alias, tables, older_than=policy.history))
        table = _drop_months(session, policy.history, report)
        report.deleted += repeat(partial(retention.delete_history, session, older_than=policy.history, table=table))
    if policy.attempts is not None:
        report.attempts += repeat(partial(retention.delete_attempts, session, older_than=policy.attempts))
    if policy.audit is not None:
        report.audit += repeat(partial(retention.delete_audit, alias, older_than=policy.audit))


def _drop_months(session: Session, age: timedelta, report: RetentionReport) -> str:
    """Drop the partitions that are old enough; return the table whose rows are to be deleted one by one."""
    if not is_partitioned(session.connection, HISTORY_TABLE):
        return ""
    now = aware(session.now(), session.connection.alias)
    for partition in months(session.connection, HISTORY_TABLE):
        if partition.end <= now - age and report.has_time():
            try:
                report.deleted += retention.delete_month(session, partition.name)
                report.dropped.append(partition.name)
            except DatabaseError as error:
                logger.warning("%s could not be dropped, trying again later: %s", partition.name, _line(error))
    return f"{HISTORY_TABLE}_default"


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
