"""What one poller is started with, and the state of each queue it polls: settings, scan cursor, timing, next fetch."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import known_overrides, overridden_settings
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.json import read
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release, Settlement
from django_dbtaskqueue.db.liveness import ANSWER_TIMEOUT_S, MIN_ANSWER_TIMEOUT_S
from django_dbtaskqueue.db.session import Session, model_for
from django_dbtaskqueue.flow import checkout, groups, move, observe, settle
from django_dbtaskqueue.flow.checkout import ScanCursor, Strategy
from django_dbtaskqueue.flow.groups import Limiter
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.flow.run import Processor, is_without_handler
from django_dbtaskqueue.models import AbstractTask
from django_dbtaskqueue.models.control import MISSED_HEARTBEATS
from django_dbtaskqueue.models.readable import as_list
from django_dbtaskqueue.poller.executors import Executor

MIN_LIKELY_READY_TASKS = 20  # that a full fetch suggests are left
FOREIGN_TYPES_SECONDS = 10.0  # between two looks whether other pollers still have a processor for what we leave out
Refusal = tuple[Lease, Settlement | None]  # a task that must not start here, and what becomes of it
POLL_JITTER = (0.8, 1.2)  # factors of the idle pause
FAST_TASK_SECONDS = 0.0002  # one thread runs such a task sooner than a second thread wakes
# After a lease that ran out before its task reached the poller, leases last at least so long: at first, and at most.
MIN_LEASE_SECONDS = 0.2, 60.0
MIN_RUNNING_PAUSE_SECONDS = 0.005  # between two polls of a queue with as many running tasks as its limit allows
# After so many looks in vain, each soon after the one before, wake-ups lead to one look in so many seconds: any role
# of the database can send wake-ups.
MAX_VAIN_LOOKS = 20
WOKEN_LOOK_SECONDS = 0.005
SOON_SECONDS = 0.05
MIN_DRAIN_PAUSE_S = 0.005  # between two looks of a draining poller whether all has ended
DRAIN_HORIZON_SECONDS = 5.0  # a draining poller waits for tasks that are due within this time
DUE_MARGIN_SECONDS = 0.001  # after a scheduled task's time


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    threads: int = 4
    coroutines: int = 100
    once: bool = False  # one checkout per queue
    drain: bool = False  # until nothing is due, being processed, or due within five seconds
    max_tasks: int | None = None
    name: str = ""
    executor: object = None  # where plain functions run whose processors name no executor; None: on threads
    tags: tuple[str, ...] = ()  # tasks with another tag are left to other pollers
    siblings: int = 0  # other processes of its supervisor, which poll the same queues


class Placement(NamedTuple):
    """The processors of one queue and their executors."""

    found: Mapping[str | None, Processor] | None  # by each name that a row may have, as in the registry
    processors: tuple[Processor, ...]
    executors: frozenset[Executor]
    executor: Executor | None  # set if the queue has one executor, and at most one processor, which is plain
    one_limit: bool  # False: the processors have room for different numbers of tasks


UNPLACED = Placement({}, (), frozenset(), None, one_limit=True)  # until the first fetch


@dataclass(slots=True, eq=False)
class QueueState:
    """State of one queue in one poller. Change it under the fetcher's lock."""

    name: str
    settings: QueueSettings
    port: SettlePort
    cursor: ScanCursor
    strategy: Strategy | None = None
    weight: int = 1
    next_turn: float = 0.0  # its place in the order of turns; see ``Fetcher.choose``
    next_poll: float = 0.0
    idle_pause: float = 0.0  # seconds; grows while the queue is empty
    full_scan_awaited: bool = False  # a poll was planned for the full scan that is due after the last task
    run_seconds: float | None = None  # mean run time of one task, smoothed
    timed: int = 0  # tasks of the latest measurement of ``run_seconds``
    probed: bool = False  # tasks were taken
    taken_at: float = field(default_factory=lambda: clock.monotonic())  # when a fetch last gave a task, or the start
    likely_ready: int = 0  # tasks that are probably left, because the last fetch got all it asked for
    reserved: int = 0  # tasks that fetches under way asked for
    exhausted: bool = False  # a run that ends has nothing more to take here
    busy: bool = False  # at the last look of a draining run: there were tasks
    drained_at: tuple[int, int] = (0, 0)  # what had ended before the look that found it drained
    wakes: int = 0
    vain_looks: int = 0  # fetches in a row that gave no task, each soon after the one before
    vain_look_at: float = 0.0
    overrides: dict[str, object] = field(default_factory=dict)  # of the queue's row, as last applied
    refused: object = None  # what the row said last, if it could not be applied
    min_lease: float = 0.0  # seconds that a lease lasts at least, so that it does not run out during its checkout
    alone: bool = False  # a fetch of several queues failed: its next fetch says whether it is this one's fault
    reply_lost: bool = False  # a fetch failed, but may have taken tasks
    unpark_due: bool = True  # parked tasks may have a processor by now
    unparking: threading.Lock = field(default_factory=threading.Lock)  # held while they are made ready
    unpark_pause: float = 0.0  # seconds between two checks of the heartbeat for such tasks
    full_processors: frozenset[Processor] = frozenset()  # those without a free slot at the last fetch
    foreign_types: frozenset[str] = frozenset()  # payload types that only other pollers have a processor for
    foreign_until: float = 0.0  # when to ask again whether they have one
    cursors: dict[tuple[str, ...], ScanCursor] = field(default_factory=dict)  # by the payload types left out
    limiter: Limiter | None = None  # of its limits over all pollers
    groups_due: bool = True  # groups may have more ready tasks than ``max_running_per_group``
    placement: Placement = UNPLACED  # its processors and executors, as of the last fetch

    @classmethod
    def of(cls, name: str, alias: str, weight: int = 1) -> QueueState:
        """Return the state of a queue on one database, with its settings and their runtime overrides."""
        settings = overridden_settings(name, alias)
        port = SettlePort(alias, model_for(name), key=f"{name}@{alias}" if settings.shards else name)
        state = cls(name, settings, port, ScanCursor(name), weight=weight, overrides=known_overrides(name, alias))
        state.apply(settings)
        return state

    def apply(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.cursor.max_wait = settings.max_wait
        self.port.follow(settings, self.overrides)
        self.limiter = Limiter.of(self.name, settings)
        key, number = (self.port.alias, self.name), settings.max_running_per_group
        last = groups.settings_in_poller.get(key, settings)
        self.groups_due = self.groups_due or number < last.max_running_per_group
        groups.settings_in_poller[key] = settings

    def left_out(self) -> tuple[str, ...]:
        """Return the payload types that fetches leave out at present; '' stands for none."""
        return tuple(sorted({*registry.types_of(self.name, self.full_processors), *self.foreign_types}))

    def cursor_without(self, types: tuple[str, ...]) -> ScanCursor:
        """Return the scan cursor of fetches that leave out some payload types: they scan from elsewhere."""
        cursor = self.cursors.setdefault(types, ScanCursor(self.name))
        cursor.max_wait, cursor.others = self.cursor.max_wait, self.cursor.others
        return cursor

    def wake(self) -> None:
        self.wakes += 1
        self.idle_pause, self.full_scan_awaited = 0.0, False
        self.next_poll = self._next_woken_look()

    def _next_woken_look(self) -> float:
        """Return when a wake-up leads to a look: at once, unless many were in vain."""
        return self.vain_look_at + WOKEN_LOOK_SECONDS if self.vain_looks > MAX_VAIN_LOOKS else 0.0

    def fetched(self, *, got: int, asked: int, wakes: int, next_due: float | None) -> None:
        """Decide after a fetch when to fetch again; ``wakes`` is the count before the fetch began."""
        now = clock.monotonic()
        if got:
            self.probed, self.taken_at, self.vain_looks = True, now, 0
        else:
            self.vain_looks = self.vain_looks + 1 if now - self.vain_look_at < SOON_SECONDS else 0
            self.vain_look_at = now
        self.likely_ready = max(got, MIN_LIKELY_READY_TASKS) if got == asked else 0
        pause = None if self.limiter is None else self.limiter.pause
        if got or wakes != self.wakes or pause is not None:
            self.idle_pause, self.full_scan_awaited = 0.0, False
            soon = now if got else max(now, self._next_woken_look())
            self.next_poll = soon if pause is None else now + (pause or self._pause_until_one_ends())
            return
        tenth = self.settings.lease.total_seconds() / 10  # so that an orphan starts soon after its lease ran out
        first = min(self.settings.poll_interval.total_seconds(), tenth)
        longest = max(first, min(self.settings.idle_interval.total_seconds(), tenth))
        without = self.left_out() if self.full_processors or self.foreign_types else ()
        next_full_scan = (self.cursor_without(without) if without else self.cursor).next_full_scan
        if not self.full_scan_awaited and next_full_scan > now:
            self.full_scan_awaited = True  # one more full scan soon finds the rows behind the watermark
            wait = next_full_scan - now
        else:
            self.idle_pause = min(longest, 2 * self.idle_pause or first)
            wait = self.idle_pause * random.uniform(*POLL_JITTER)
        if next_due is not None:
            wait = min(wait, max(0.0, next_due) + DUE_MARGIN_SECONDS)
        self.next_poll = now + wait

    def _pause_until_one_ends(self) -> float:
        """Return the seconds until one of the tasks that run under the limit probably ends."""
        seconds = (self.run_seconds or 0.0) / (self.settings.max_running or 1)
        return min(max(seconds, MIN_RUNNING_PAUSE_SECONDS), self.settings.poll_interval.total_seconds())


def prepare_checkout(session: Session, queue: QueueState, queues: Iterable[QueueState], instance: str) -> None:
    """Do what is due before a checkout. ``queues``: all of the poller; the first checkout prepares others, too."""
    if queue.strategy is None:
        _prepare_new(session, queues)
    if queue.strategy is None:
        if queue.settings.paused:
            session.run(session.sql.start_paused, {"queue_name": queue.name})
        queue.strategy = checkout.strategy_for(session, queue.settings.strategy)
    if queue.unpark_due:
        unpark_queue(session, queue)
    if queue.groups_due:
        groups.park_excess(session, queue.name)
        queue.groups_due = False
    if queue.foreign_types and clock.monotonic() >= queue.foreign_until:
        find_foreign_types(session, queue, queue.foreign_types, instance)


def _prepare_new(session: Session, queues: Iterable[QueueState]) -> None:
    """Find out at once what all new queues of a table have to prepare: the others share their first checkouts."""
    new = {
        queue.name: queue
        for queue in queues
        if queue.strategy is None
        and queue.settings.strategy == "auto"
        and not queue.settings.paused
        and (queue.port.alias, queue.port.model) == (session.connection.alias, session.model)
    }
    if len(new) < 2:
        return
    for queue in new.values():  # before the look: what becomes due meanwhile stays due
        queue.unpark_due = queue.groups_due = False
    try:
        found = session.run(session.sql.to_prepare, {"queues": session.sql.dialect.array(new)})
    except Exception:
        for queue in new.values():
            queue.unpark_due = queue.groups_due = True
        raise
    for name, parked, grouped in found:
        queue = new[name]
        queue.strategy = checkout.strategy_for(session)
        queue.unpark_due |= bool(parked)
        queue.groups_due |= bool(grouped)


def unpark_queue(session: Session, queue: QueueState) -> int:
    """Make parked tasks ready again that have a processor by now; return how many there were."""
    with queue.unparking:
        queue.unpark_due = False
        types, untyped = registry.payload_types(queue.name), registry.find(queue.name, None) is not None
        try:
            count = move.unpark(session, queue.name, types, untyped=untyped)
        except Exception:
            queue.unpark_due = True
            raise
    if count:
        logger.info("%s parked tasks of %s have a processor in this poller and are ready again", count, queue.name)
    return count


def release_unknown(session: Session, queue: QueueState, instance: str, held: Iterable[Lease]) -> None:
    """Release, uncharged, the tasks of a checkout whose reply was lost: no poller runs them.

    A task that the database does not let go is released later. It has not run: its release says nothing of it.
    """
    params = {"queue_name": queue.name, "poller_instance": instance}
    leases = checkout.leases(session.run(session.sql.leased_to, params), queue.port, 0.0)
    known = {(lease.id, lease.total_attempt) for lease in held if lease.port is queue.port}
    unknown = [lease for lease in leases if (lease.id, lease.total_attempt) not in known]
    pairs: list[settle.Decided] = [(lease, Release()) for lease in unknown]
    released = settle.settle_surely(session, pairs, patience=math.inf) if pairs else set()
    queue.reply_lost = len(released) < len(unknown)
    if released:
        for lease in [lease for lease in unknown if lease.id in released]:
            observe.ended(lease, Release())
        logger.info("Released %s tasks of %s: the reply to their checkout was lost", len(released), queue.name)


def leave_to_others(session: Session, queue: QueueState, refusals: list[Refusal], instance: str) -> list[Refusal]:
    """Give tasks without a processor here to pollers that have one, as of a new release, or park them."""
    if not (types := {lease.payload_type or "" for lease, refused in refusals if is_without_handler(refused)}):
        return refusals
    find_foreign_types(session, queue, queue.foreign_types | types, instance)
    foreign = [is_without_handler(one) and (lease.payload_type or "") in queue.foreign_types for lease, one in refusals]
    return [
        (lease, Release() if is_foreign else refused)
        for (lease, refused), is_foreign in zip(refusals, foreign, strict=True)
    ]


def find_foreign_types(session: Session, queue: QueueState, types: Iterable[str], instance: str) -> None:
    """Leave out, from now on, those payload types that have no processor here, but in another poller that is alive."""
    queue.foreign_until = clock.monotonic() + FOREIGN_TYPES_SECONDS  # before the look: a new processor ends it
    reported = [one for report in reports_of_others(session, instance) for one in report if isinstance(one, dict)]
    served = {str(name) for one in reported if one.get("queue") == queue.name for name in as_list(one.get("types"))}
    queue.foreign_types = frozenset(
        name for name in types if name in served and registry.find(queue.name, name or None) is None
    )


def reports_of_others(session: Session, instance: str) -> list[list[Any]]:
    """Return what each other live poller says of its queues."""
    dialect = session.sql.dialect
    alive = f"state <> 'STOPPED' AND heartbeat_time > {dialect.later('%(seconds)s')}"
    sql = f"SELECT {dialect.text('queues')} FROM {session.sql.tables.poller} WHERE instance <> %(instance)s AND {alive}"  # noqa: S608 -- the name of a model
    since = -MISSED_HEARTBEATS * conf.settings().heartbeat.total_seconds()
    return [as_list(read(text)) for (text,) in session.run(sql, {"instance": instance, "seconds": since})]


def is_drained(session: Session, queue: QueueState, held: Iterable[Lease], options: Options) -> bool:
    """Whether a draining run has nothing left in an empty queue, neither here nor due soon."""
    unparking = queue.unpark_due or queue.unparking.locked()  # in this order: a thread that unparks locks first
    busy = unparking or any(lease.port is queue.port for lease in held)
    tags = session.sql.dialect.array(options.tags)
    params = {"queue_name": queue.name, "horizon": DRAIN_HORIZON_SECONDS, "tags": tags}
    if queue.foreign_types:
        session, params["without"] = session.narrowed(), session.sql.dialect.array(sorted(queue.foreign_types))
    now, longest = clock.monotonic(), queue.settings.poll_interval.total_seconds()
    pause = max(MIN_DRAIN_PAUSE_S, (now - queue.taken_at) / 10)  # so the run ends at most a tenth later
    queue.next_poll = min(queue.next_poll, now + min(longest, pause))
    return not busy and not session.run(session.sql.soon, params)


@dataclass(slots=True)
class ConnectionSet:
    """The database connections of one fetch thread, one for each table."""

    sessions: dict[tuple[str, type[AbstractTask]], Session] = field(default_factory=dict)

    def session(self, queue: QueueState) -> Session:
        """Return this thread's session for a queue; it connects at its first statement."""
        key = (queue.port.alias, queue.port.model)
        if (session := self.sessions.get(key)) is None:
            # A checkout or a renewal that takes longer than the lease is worth nothing.
            timeout = min(ANSWER_TIMEOUT_S, max(MIN_ANSWER_TIMEOUT_S, queue.settings.lease.total_seconds() / 3))
            session = self.sessions[key] = Session.open(*key, answer_timeout=timeout)
        return session

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()
