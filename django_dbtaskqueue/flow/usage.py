"""Counters by the minute, and what they count of usage: each use of a verb, for which a signal is sent, too.

Counted in memory, and appended to ``MinuteCount`` in batches. Uses of verbs are counted when the caller's transaction
commits. A daemon thread appends them; so do the end of the process and a reader of statistics. A killed process loses
what it counted since its last batch, at most ``FLUSH_INTERVAL_S`` seconds.
"""

from __future__ import annotations

import atexit
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import add
from typing import Any, Generic, NamedTuple, TypeVar

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from django_dbtaskqueue import signals
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.context import wake_listeners
from django_dbtaskqueue.core.durations import Pauses, clock
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Settlement
from django_dbtaskqueue.core.sql.stats import StatsStatements
from django_dbtaskqueue.core.threads import after_fork
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.selection import with_row_locks
from django_dbtaskqueue.models import FailureGroup, MinuteCount
from django_dbtaskqueue.models.control import CALL, DELETION, FAILURE, OUTCOME
from django_dbtaskqueue.models.readable import Total

FLUSH_INTERVAL_S = 5.0  # between two batches
FLUSH_AT_EXIT_S = 2.0  # that a process waits at its end for its last batch
ROLL_UP_INTERVAL_S = 600.0  # between two roll-ups of a process
STORE_WAIT_S = 1.0  # seconds that a reader waits for a batch that another thread is storing

# The ids of tasks by (queue, call); only how many where their ids are not known.
TasksByCall = Mapping[tuple[str, str], Sequence[int] | int]


def count_calls(
    connection: BaseDatabaseWrapper, calls: TasksByCall, *, wake: Callable[[str, str, str], object] | None = None
) -> None:
    """Once the current transaction commits, count calls and tell the signal's receivers.

    ``wake(alias, vendor, queue)`` is called first if somebody may be there. Without autocommit as ``on_commit``.
    """
    alias, vendor, database = connection.alias, connection.vendor, str(connection.settings_dict["NAME"])

    def happened() -> None:
        for (queue, call), ids in calls.items():
            if not ids:
                continue
            try:
                if wake is not None and (wake_listeners or vendor == "postgresql"):
                    wake(alias, vendor, queue)
            finally:
                number, ids = (ids, ()) if isinstance(ids, int) else (len(ids), ids)
                counter.add(CountKey(alias, CALL, queue, call, database), number)
                if signals.task_changed.receivers:
                    signals.task_changed.send_robust(queue, call=call, task_ids=tuple(ids), using=alias)

    if connection.in_atomic_block:
        connection.on_commit(happened, robust=True)
    elif connection.autocommit or connection.get_autocommit():
        try:  # as Django would, which asks twice more whether there is a transaction
            happened()
        except Exception:
            logger.exception("Not all was told of calls that are stored")


def settled(connection: BaseDatabaseWrapper, pairs: Iterable[tuple[Lease, Settlement]], ids: Container[int]) -> None:
    """Count the outcomes of those leases whose tasks are really settled."""
    calls: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for lease, outcome in pairs:
        if lease.id in ids:
            facts = outcome.facts
            # Only a task that must not start any more is settled as an attempt after it expired.
            call = "ttl" if facts.counts_as and lease.expire_text is not None and lease.is_expired() else facts.call
            calls[lease.queue, lease.port.calls.get(call, call)].append(lease.id)
    if calls:
        count_calls(connection, calls)


def discard(alias: str, queue: str) -> None:
    """Forget the counts of a queue that is gone."""
    counter.discard(lambda key: key.alias == alias and key.queue == queue)


# -- counters ---------------------------------------------------------------------------------------------------------


class CountKey(NamedTuple):
    """What is counted. The database's name tells one alias from another database under the same alias, as in tests."""

    alias: str
    kind: str
    queue: str
    name: str
    database: str = ""  # any


V = TypeVar("V")


class MinuteCounter(Generic[V]):
    """Counts of this process that are not stored yet. Any thread may add.

    ``add_up`` returns the sum of two counts, ``columns`` those of a row. With ``max_keys`` no further key is counted.
    """

    def __init__(
        self, add_up: Callable[[V, V], V], columns: Callable[[V], dict[str, Any]], max_keys: int | None = None
    ) -> None:
        self._add_up, self._columns, self._max_keys = add_up, columns, max_keys
        self._pending: dict[CountKey, V] = {}
        self._lock = threading.RLock()
        self._storing = threading.Lock()  # held from taking counts out of memory until they are committed

    def add(self, key: CountKey, value: V) -> None:
        """Count. Returns at once."""
        with self._lock:
            if (known := self._pending.get(key)) is not None:
                self._pending[key] = self._add_up(known, value)
            elif self._max_keys is None or len(self._pending) < self._max_keys:
                self._pending[key] = value

    def aliases(self) -> set[str]:
        with self._lock:
            return {key.alias for key in self._pending}

    def pending(self) -> dict[CountKey, V]:
        with self._lock:
            return dict(self._pending)

    def discard(self, unwanted: Callable[[CountKey], bool]) -> None:
        """Forget counts that are not to be stored."""
        with self._lock:
            self._pending = {key: value for key, value in self._pending.items() if not unwanted(key)}

    def store(self, session: Session) -> None:
        """Append what was counted on one database, on the calling thread's connection. Raises its errors."""
        alias = session.connection.alias
        with self._storing:
            with self._lock:
                batch = {key: value for key, value in self._pending.items() if key.alias == alias}
                self.discard(batch.__contains__)
            try:
                if batch:
                    self._append(session, batch)
            except BaseException:
                with self._lock:
                    for key, value in batch.items():
                        self.add(key, value)
                raise

    def _append(self, session: Session, counts: Mapping[CountKey, V]) -> datetime:
        """Append rows of the present minute, by the database's clock; return the minute."""
        here = ("", str(session.connection.settings_dict["NAME"]))
        minute = session.stored_time(session.now().replace(second=0, microsecond=0))
        MinuteCount.objects.using(session.connection.alias).bulk_create(
            MinuteCount(kind=key.kind, queue=key.queue, name=key.name, minute=minute, **self._columns(value))
            for key, value in counts.items()
            if key.database in here
        )
        return minute


class UsageCounter(MinuteCounter[int]):
    """Usage counts, stored by a thread of their own. The thread starts with the first count and ends when idle."""

    def __init__(self) -> None:
        super().__init__(add, lambda number: {"count": number})
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._ending = False
        self._next_roll_up = clock.monotonic() + ROLL_UP_INTERVAL_S

    def add(self, key: CountKey, value: int) -> None:
        """Count. Returns at once; never raises."""
        with self._lock:
            self._pending[key] = self._pending.get(key, 0) + value
            if self._thread is None and not self._ending:
                thread = threading.Thread(target=self._run, name="dbtaskqueue-usage", daemon=True)
                with suppress(RuntimeError):  # there can be no more threads now; the next count tries again
                    thread.start()
                    self._thread = thread

    def counted(self, alias: str, queue: str) -> dict[str, int]:
        """Return all calls of a queue by name: those stored by any process, and those of this one not stored yet."""
        if not connections[alias].in_atomic_block:
            self.store(Session.on(alias))
        # A batch that another thread is storing is neither in memory nor committed.
        waited = self._storing.acquire(timeout=STORE_WAIT_S)
        try:
            rows = MinuteCount.objects.using(alias).filter(kind=CALL, queue=queue).values_list("name").order_by("name")
            total = Counter({call: int(number) for call, number in rows.annotate(Total("count"))})
            here = str(connections[alias].settings_dict["NAME"])
            for key, number in self.pending().items():
                if (key.alias, key.database, key.queue) == (alias, here, queue):
                    total[key.name] += number
        finally:
            if waited:
                self._storing.release()
        return dict(total)

    def flush(self, timeout: float = FLUSH_AT_EXIT_S) -> None:
        """Store what is left and end the thread: for the end of the process."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            clock.wait_for(self._changed, lambda: self._thread is None, timeout)
            self._ending = False

    def _run(self) -> None:
        while True:
            with self._changed:
                clock.wait_for(self._changed, lambda: self._ending, FLUSH_INTERVAL_S)
                ending = self._ending
            for alias in self.aliases():
                self._try_to_store(alias)
            with self._changed:
                if ending or not self._pending:
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _try_to_store(self, alias: str) -> None:
        """Store on a connection that is not kept: a test database can be dropped only when no session is open."""
        try:
            self.store(Session.on(alias))
            if clock.monotonic() >= self._next_roll_up:
                self._next_roll_up = clock.monotonic() + ROLL_UP_INTERVAL_S
                roll_up(Session.on(alias), [CALL])  # the others are those of pollers
        except Exception as error:
            logger.debug("Usage counts of %s not stored, trying again later: %s", alias, error)
        finally:
            with suppress(Exception):
                connections[alias].close()
                del connections[alias]


counter = UsageCounter()


@after_fork
def _after_fork() -> None:
    # The thread and what it counts stayed with the parent.
    global counter
    counter = UsageCounter()


atexit.register(lambda: counter.flush())


# -- rows as they get older: rolled up, in the end deleted -------------------------------------------------------------

# Each process appends its own rows, so it never waits for another process. Several rows can stand for one minute. The
# roll-up makes one row of them, first for each minute, in the end for each hour or day. The sums stay the same.

SPANS_PER_ROLL_UP = 50  # spans of time that one roll-up takes on in each level
METRICS_MAX_AGE = timedelta(days=90)  # of outcomes and failures; calls and deletions are kept for ever
FAILED_SPAN_S = 300.0, 3600.0  # before a span whose rows cannot be rolled up is tried again


class Level(NamedTuple):
    """Rows that are older than ``age`` become one row for each span of ``seconds``."""

    seconds: int
    age: timedelta
    until: timedelta  # the age at which the next level takes over


UP_TO_HOURS = (
    Level(60, timedelta(minutes=3), timedelta(hours=3)),
    Level(600, timedelta(hours=3), timedelta(days=2)),
    Level(3600, timedelta(days=2), timedelta(days=4)),
)
UP_TO_DAYS = (*UP_TO_HOURS, Level(86_400, timedelta(days=4), timedelta(days=30)))
LEVELS = {OUTCOME: UP_TO_HOURS, FAILURE: UP_TO_HOURS, CALL: UP_TO_DAYS, DELETION: UP_TO_DAYS}  # by kind
_pauses = Pauses[tuple[str, str, int, datetime]](*FAILED_SPAN_S, beyond=OperationalError)


def roll_up(session: Session, kinds: Iterable[str] = LEVELS) -> int:
    """Roll up what is due of these kinds on one database; return how many rows went.

    Passes over rows that another process is rolling up, so it never waits, and nothing is counted twice.
    """
    gone = 0
    for kind in kinds:
        for level in LEVELS[kind]:
            for start in _crowded(session, kind, level):
                span = session.connection.alias, kind, level.seconds, start
                if span not in _pauses.resting():
                    with _pauses.around(span, partial(logger.warning, "Counts of %s are not rolled up: %s", span)):
                        gone += _merge(session, kind, start, timedelta(seconds=level.seconds))
    return gone


def delete_old(alias: str) -> int:
    """Delete metrics and groups of failures that are older than three months; return how many rows went."""
    limit = Now() - METRICS_MAX_AGE
    old = MinuteCount.objects.using(alias).filter(kind__in=(OUTCOME, FAILURE), minute__lt=limit)
    return sum(rows.delete()[0] for rows in (old, FailureGroup.objects.using(alias).filter(last_seen__lt=limit)))


def _crowded(session: Session, kind: str, level: Level) -> list[datetime]:
    """Return the beginnings of spans in which one queue has several rows of a name."""
    now = session.now()
    # Whole spans only: otherwise a span would be rolled up again and again while it ages.
    end = datetime.fromtimestamp((now.timestamp() - level.age.total_seconds()) // level.seconds * level.seconds, tz=UTC)
    params = {
        "kind": kind,
        "step": level.seconds,
        "start": session.time_text(now - level.until - timedelta(hours=1)),
        "end": session.time_text(end - timedelta(milliseconds=1)),
        "limit": SPANS_PER_ROLL_UP,
    }
    rows = session.run(StatsStatements(session.sql.tables, session.sql.dialect).crowded, params)
    return [datetime.fromtimestamp(row[0] * level.seconds, tz=UTC) for row in rows]


def _merge(session: Session, kind: str, start: datetime, length: timedelta) -> int:
    first, end = session.stored_time(start), session.stored_time(start + length)
    counts = MinuteCount.objects.using(session.connection.alias)
    with session.atomic():
        groups: defaultdict[tuple[str, str], list[MinuteCount]] = defaultdict(list)
        for row in with_row_locks(counts.filter(kind=kind, minute__gte=first, minute__lt=end)):
            groups[row.queue, row.name].append(row)
        several = [group for group in groups.values() if len(group) > 1]
        going = [row.pk for group in several for row in group]
        counts.filter(pk__in=going).delete()
        counts.bulk_create(_sum(group, first) for group in several)
    return len(going) - len(several)


def _sum(group: list[MinuteCount], minute: datetime) -> MinuteCount:
    total = MinuteCount(kind=group[0].kind, queue=group[0].queue, name=group[0].name, minute=minute)
    for name in ("count", "run_seconds", "wait_seconds"):
        setattr(total, name, sum(getattr(row, name) for row in group))
    for name in ("runs", "waits"):
        setattr(total, name, dict(sum((Counter(getattr(row, name)) for row in group), Counter[str]())))
    return total
