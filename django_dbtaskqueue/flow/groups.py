"""Groups and limits: which tasks may run at the same time.

A group has at most one live lease, and strict order. One task of it is ready, the head. The others wait out of the
ready order, so that a busy group costs it one row. ``max_running_per_group`` is the number of heads of a group.

Each change of a group's head is made under the group's lock, in its own transaction: entering (enqueue,
reprocess, kick) and leaving (settle, cancel, delete). Producers of one group therefore take turns until they commit.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from math import floor, inf
from operator import itemgetter
from typing import Any, TypeVar
from uuid import uuid4

from django.db import OperationalError

from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.conf.queue import QueueSettings
from django_dbtaskqueue.conf.settings import default_settings
from django_dbtaskqueue.core.exceptions import TooManyGroups, UnknownQueue
from django_dbtaskqueue.core.lease import POSITION, Lease
from django_dbtaskqueue.db.liveness import sqlstate
from django_dbtaskqueue.db.session import Params, Row, Session

T = TypeVar("T")
Statement = tuple[str, Mapping[str, Any]]
GROUPS_PER_TRANSACTION = 500
OUT_OF_MEMORY_SQLSTATE = "53200"  # PostgreSQL keeps all locks in shared memory of a fixed size
Groups = Mapping[str, set[str]]  # the keys of groups, by queue
LEASES = re.compile(r"[0-9]{1,18}:[0-9]{1,10}(?:,[0-9]{1,18}:[0-9]{1,10})*")  # as a row of ``Limit`` holds them
settings_in_poller: dict[tuple[str, str], QueueSettings] = {}  # by alias and queue, as the poller last applied them


def groups_of(pairs: Iterable[tuple[str, str | None]]) -> Groups:
    """Return the queues of tasks, each with the groups of its tasks."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for queue, group in pairs:
        found[queue].update([group] if group is not None else [])
    return found


def lock(session: Session, queue: str, groups: Iterable[str]) -> None:
    """Lock groups to the end of the current transaction, in one order everywhere. Raises ``TooManyGroups``."""
    if wanted := set(groups):
        try:
            session.run(*locking(session, queue, wanted))
        except OperationalError as error:
            if sqlstate(error) != OUT_OF_MEMORY_SQLSTATE:
                raise
            raise TooManyGroups(queue, len(wanted)) from error


def lock_all(session: Session, groups: Groups) -> None:
    """``lock`` groups of several queues, in one order everywhere."""
    for queue in sorted(groups):
        lock(session, queue, groups[queue])


class _NotLocked(Exception):
    """A row was locked before its group."""


def lock_in_order(session: Session, lock_rows: Callable[[], T], groups_in: Callable[[T], Groups]) -> T:
    """Lock the groups of some rows, then the rows, to the end of the caller's transaction; return what was locked.

    Groups are locked before rows everywhere. In the other order this transaction would hold a row and wait for its
    group, while a settle holds the group and waits for the row. ``lock_rows`` locks rows and returns them. If one of
    their groups is not locked yet, a savepoint unlocks the rows, and all is locked again, groups first.
    """
    if not session.postgresql:
        return lock_rows()
    locked: defaultdict[str, set[str]] = defaultdict(set)
    while True:
        with suppress(_NotLocked), session.atomic():
            lock_all(session, locked)
            rows = lock_rows()
            missing = {queue: keys for queue, keys in groups_in(rows).items() if keys - locked[queue]}
            if not missing:
                return rows
            for queue, keys in missing.items():
                locked[queue] |= keys
            raise _NotLocked


def regroup(session: Session, queue: str, groups: Iterable[str]) -> None:
    """Make the right heads of each group ready and take the others out. The groups must be locked."""
    if wanted := sorted(set(groups)):
        session.run(*placing(session, queue, wanted))


def run_and_regroup(
    session: Session, queue: str, batch: Sequence[Statement], groups: Collection[str], *, every: bool = False
) -> list[list[Row]]:
    """Run statements under the locks of groups and regroup these, in one transaction; return the statements' rows."""
    locked, placed = locking(session, queue, groups), placing(session, queue, groups, every=every)
    return session.together([locked, *batch, placed])[1:-1]


def placing(session: Session, queue: str, groups: Collection[str], *, every: bool = False) -> Statement:
    """Return the statement of ``regroup``.

    A poller passes over groups without a parked task, unless ``every``: after ``park_excess`` for a lowered number.
    """
    found = settings_of(session, queue)
    rules = {"number": found.max_running_per_group, "hold": found.group_retry == "hold"}
    return session.sql.place_heads, {**_params(session, queue, groups), **rules, "every": every or not session.owned}


def locking(session: Session, queue: str, groups: Collection[str]) -> Statement:
    """Return the statement of ``lock``, which sorts the groups."""
    return session.sql.lock_groups, _params(session, queue, groups)


def park_excess(session: Session, queue: str) -> None:
    """Park the tasks that a smaller ``max_running_per_group`` leaves over, in groups that nothing else regroups."""
    params = {"queue_name": queue, "number": settings_of(session, queue).max_running_per_group}
    found = sorted(group for (group,) in session.run(session.sql.groups_over, params))
    for start in range(0, len(found), GROUPS_PER_TRANSACTION):
        run_and_regroup(session, queue, [], found[start : start + GROUPS_PER_TRANSACTION], every=True)


def settings_of(session: Session, queue: str) -> QueueSettings:
    """Return the settings of a queue. A poller's own connection takes them from ``settings_in_poller``."""
    alias = session.connection.alias
    if not session.owned:
        with suppress(UnknownQueue):
            return overridden_settings(queue, alias)
    return settings_in_poller.get((alias, queue)) or default_settings(queue)


def _params(session: Session, queue: str, groups: Collection[str]) -> dict[str, Any]:
    return {"queue_name": queue, "groups": session.sql.dialect.array(groups)}


# -- limits of a queue over all pollers: how many of its tasks run at a time, and how many start in a time -------------

# A checkout of a limited queue is one transaction that begins with a lock on the queue's row in ``Limit``. The row
# names the leases that count, as ``id:total_attempt``. Some of them may have ended, so their number is an upper bound.
# A checkout reads the tasks only if the bound does not leave room. So a killed poller leaves no count behind. The row
# also has the tokens of the rate. Two pollers cannot exceed a limit together, because they take turns at the row.
#
# Far below the limits a checkout takes its rows before it locks the row, so that only counting waits for others. If it
# then finds that they are too many, it takes nothing, and begins again with the lock.
#
# The tokens of a group are in a row of its own. A task whose group has none is put off in the transaction
# that took it: it is ready again when the token is due, so no checkout reads it before.

MAX_UNWATCHED_S = 30.0  # without a checkout: then the leases are found anew, because the limit may have been off
MIN_TOKEN_PAUSE_S = 0.01  # until the next poll of a queue that waits for tokens
LOCKED_PAUSE_S = 0.05  # until the next poll of a queue whose row another transaction holds
LOCK_TIMEOUT_SQLSTATE = "55P03"
NO_RATE_TOKENS = 1e9  # of a queue without a rate: with the first rate it has a whole burst
TOKEN_ROUNDING = 1e-6  # tokens that are missing only because floats are rounded
MAX_ENDED_LEASES = 20_000  # that a process remembers for a queue; a forgotten one is found by the next exact count
ENDLESS_SECONDS = 1e9
TOTAL_ATTEMPT, GROUP, PRIORITY = POSITION["total_attempt"], POSITION["group"], POSITION["priority"]
SAFE_SHARE = 0.5  # of the room that is left, which a checkout may take before it has the lock
NEAR_SHARE = 0.8  # of the limit: when so many run, the row names no lease that ended
Fence = tuple[int, int]  # a lease: id and total_attempt of its task
Names = dict[str, set[str]]  # leases as the row has them, "id:total_attempt,…": those of them that may still run
TakeRows = Callable[[Params], list[Row]]  # takes at most ``limit`` rows


@dataclass(eq=False)
class _Memory:
    """What this process knows of a queue's row: its content, while ``stamp`` is the row's, and leases that ended."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: str = ""
    names: Names = field(default_factory=dict)
    alone: bool = False  # no other process had changed the row when this one read it last
    unused: float = 0.0  # tasks that the limits allowed after the last checkout
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_ENDED_LEASES))


class _TooManyTaken(Exception):
    """More rows were taken ahead of the lock than the limits allow."""


limit_memories: dict[tuple[str, str], _Memory] = {}  # by alias and queue, where a poller of this process takes tasks


class Limiter(threading.local):
    """The limits of one queue, as one process applies them.

    ``pause``, of the calling thread's last checkout: seconds until the limits allow a task; 0: until a task that runs
    ends; None: they held none back. A fetch on another thread must not change it.
    """

    def __init__(self, queue: str, settings: QueueSettings) -> None:
        self.queue = queue
        self.max_running = settings.max_running
        self.rate = 0.0 if settings.rate is None else settings.rate.per_second
        self.burst = float(settings.burst or max(1, floor(self.rate))) if self.rate else NO_RATE_TOKENS
        self.rate_per_group = 0.0 if settings.rate_per_group is None else settings.rate_per_group.per_second
        self.burst_per_group = float(settings.burst_per_group or max(1, floor(self.rate_per_group)))
        self.heads = settings.max_running_per_group
        self.pause: float | None = None
        self.put_off = False  # tasks, in the last checkout, whose groups have no token

    @classmethod
    def of(cls, queue: str, settings: QueueSettings) -> Limiter | None:
        """Return the limits of a queue; None if it has none."""
        return cls(queue, settings) if settings.max_running or settings.rate or settings.rate_per_group else None

    def used(self, session: Session) -> tuple[int, float]:
        """Return how many tasks run, and how many may start now by the rate. Locks nothing."""
        found = session.run(session.sql.limit_state, {"queue_name": self.queue})
        text, tokens, seconds = found[0] if found else ("", self.burst, 0.0)
        live, _ = _leases(session, _all(_stored(text) or {}), 0.0)
        return len(live), min(self.burst, tokens + max(0.0, seconds) * self.rate)

    def allows_one(self, session: Session) -> bool:
        """Whether the limits of the queue allow one more task now. Locks nothing."""
        running, tokens = self.used(session)
        return running < (self.max_running or inf) and (not self.rate or tokens >= 1 - TOKEN_ROUNDING)

    def take(
        self, session: Session, params: Params, take_rows: TakeRows, rewind: Callable[[], None] = lambda: None
    ) -> list[Row]:
        """Take at most ``params["limit"]`` rows within the limits; near one, leases that ran out first.

        ``rewind`` is called after rows of ``take_rows`` were not taken after all.
        """
        params, self.put_off = {**params, "queue_name": self.queue}, False
        if self.max_running is None and not self.rate:
            with session.atomic():
                rows = take_rows(params)
                taken = self._within_group_rates(session, rows)
            self.pause = MIN_TOKEN_PAUSE_S if len(taken) < len(rows) == params["limit"] else None
            return taken
        key = (session.connection.alias, self.queue)
        memory = limit_memories.setdefault(key, _Memory()) if session.owned else _Memory()
        # SQLite has one writer at a time: a checkout holds its lock from the begin.
        ahead = session.postgresql and params["limit"] <= memory.unused * SAFE_SHARE
        try:
            if ahead:
                with suppress(_TooManyTaken):
                    return self._take_ahead(session, params, take_rows, memory)
                rewind()
            with memory.lock:  # threads of a process take turns at the memory, as processes do at the row
                with session.atomic():
                    taken, stamp, names = self._take(session, params, take_rows, memory)
                memory.stamp, memory.names = stamp, names
        except OperationalError as error:
            if ahead:
                rewind()
            if not session.owned or sqlstate(error) != LOCK_TIMEOUT_SQLSTATE:
                raise
            self.pause = LOCKED_PAUSE_S  # code with a long transaction takes from the queue
            return []
        return taken

    def _take_ahead(self, session: Session, params: Params, take_rows: TakeRows, memory: _Memory) -> list[Row]:
        """Take rows first, then lock the row and count them. Raises ``_TooManyTaken``, and has taken nothing."""
        with ExitStack() as turn:  # it ends after the transaction
            with session.atomic():
                if not (rows := take_rows(params)):
                    self.pause = None
                    return []
                turn.enter_context(memory.lock)
                if (counted := self._count_unseen(session, rows, memory)) is None:
                    counted = self._take(session, params, lambda _: rows, memory, ahead=len(rows))
                taken, stamp, names = counted
            memory.stamp, memory.names = stamp, names
        return taken

    def _count_unseen(self, session: Session, rows: list[Row], memory: _Memory) -> tuple[list[Row], str, Names] | None:
        """Count rows by one statement, without reading the queue's row; None if this process does not know it.

        Until the commit the row is locked for no answer of the database to this process.
        """
        if not memory.alone or self.rate_per_group or (self.max_running is not None and not memory.stamp):
            return None
        names, running, stamp, ended = Names(), 0, "", list[str]()
        if self.max_running is not None:
            ended = _ended(memory)
            running = len(rows) + _drop(memory.names, ended)
            names = memory.names | _named([f"{row[0]}:{row[TOTAL_ATTEMPT]}" for row in rows])
            names, stamp = {text: some for text, some in names.items() if some}, uuid4().hex
        found = list[Row]()
        if self.max_running is None or running <= self.max_running * NEAR_SHARE:
            known = {"queue_name": self.queue, "rate": self.rate, "burst": self.burst, "known": memory.stamp}
            stored = {"leases": ",".join(names), "stamp": stamp, "taken": float(len(rows) * bool(self.rate))}
            found = session.run(session.sql.count_in_limit, {**known, **stored, "watched": MAX_UNWATCHED_S})
        if not found:
            memory.ended.extend(ended)
            return None
        tokens_left = found[0][0] if self.rate else inf
        memory.unused = tokens_left if self.max_running is None else min(tokens_left, self.max_running - running)
        self.pause = None
        return rows, stamp, names

    def _take(
        self, session: Session, params: Params, take_rows: TakeRows, memory: _Memory, *, ahead: int = 0
    ) -> tuple[list[Row], str, Names]:
        """Return the rows that were taken, and what the row of the queue holds now: its stamp and its leases.

        Raises ``_TooManyTaken`` if there is no room for so many as were taken ``ahead``.
        """
        memory.unused = 0.0
        limited = {"queue_name": self.queue, "rate": self.rate, "burst": self.burst, "stamp": memory.stamp}
        stamp, text, tokens, unwatched = session.run(session.sql.lock_limit, limited)[0]
        memory.alone = stamp == memory.stamp
        wanted: int = params["limit"]
        free = allowed = min(wanted, floor(tokens + TOKEN_ROUNDING)) if self.rate else wanted
        taken, names, running = list[Row](), Names(), 0
        if self.max_running is not None:
            known = memory.names if memory.alone else _stored(text)
            if known is None or not stamp or (unwatched or 0.0) > MAX_UNWATCHED_S:
                known = _named({_piece(*row) for row in session.run(session.sql.all_running, params)})
            names = known
            running = _drop(names, _ended(memory))
            if running + allowed > self.max_running:
                taken, names = self._count_exactly(session, params, _all(names), allowed)
                running = len(_all(names))
            free = min(allowed - len(taken), self.max_running - running)
        if ahead > max(free, 0):
            raise _TooManyTaken
        found = take_rows({**params, "limit": free}) if free > 0 else []
        rows, taken_over = taken + found, taken
        taken = self._within_group_rates(session, rows)
        refused = len(taken) < len(rows)
        if taken or self.max_running is not None:
            stored = {"queue_name": self.queue, "leases": "", "stamp": "", "taken": float(len(taken) * bool(self.rate))}
            if self.max_running is not None:
                new = _named([f"{row[0]}:{row[TOTAL_ATTEMPT]}" for row in taken])
                running += len(taken) - len(taken_over)
                if taken_over or running > self.max_running * NEAR_SHARE:
                    # Near the limit others count the names, so those of ended leases are left out.
                    names = _named(_all(names).difference([_piece(row[0], row[TOTAL_ATTEMPT]) for row in rows]))
                names, stamp = {text: some for text, some in (names | new).items() if some}, uuid4().hex
                stored |= {"leases": ",".join(names), "stamp": stamp}
            session.run(session.sql.store_limit, stored)
        tokens_left = tokens - len(taken) if self.rate else inf
        memory.unused = tokens_left if self.max_running is None else min(tokens_left, self.max_running - running)
        self.pause = None
        if len(taken) < wanted and len(found) >= free:  # there may be more tasks
            self.pause = self._pause(tokens_left, by_rate=len(taken) == allowed, refused=refused)
        return taken, stamp, names

    def _pause(self, tokens: float, *, by_rate: bool, refused: bool) -> float:
        if refused:
            return MIN_TOKEN_PAUSE_S
        return max(MIN_TOKEN_PAUSE_S, (1 - tokens) / self.rate) if self.rate and by_rate else 0.0

    def _within_group_rates(self, session: Session, rows: list[Row]) -> list[Row]:
        """Take a token of its group for each task; put those off that get none, until their group has one."""
        if not (keys := {row[GROUP] for row in rows if row[GROUP]} if self.rate_per_group else ()):
            return rows
        limits = {"queue_name": self.queue, "rate": self.rate_per_group, "burst": self.burst_per_group}
        groups = session.sql.dialect.array(sorted(keys))
        left: dict[str, float] = dict(session.run(session.sql.lock_group_limits, {**limits, "groups": groups}))
        before: dict[int, Row] = {}
        if self.heads > 1:  # others of a group may start before these, because they were put off
            rows = [row for _, some in groupby(rows, itemgetter(PRIORITY)) for row in sorted(some, key=itemgetter(0))]
            fences = fenced((row[0], row[TOTAL_ATTEMPT]) for row in rows if row[GROUP])
            before = {row[0]: row[1:] for row in session.run(session.sql.heads_before, {"rows": fences})}
        started, put_off = list[Row](), list[dict[str, float]]()
        charged: Counter[str] = Counter()
        for row in rows:
            if not (group := row[GROUP]):
                started.append(row)
                continue
            left[group] -= 1
            number, seconds = before.get(row[0], (0, 0.0))
            if not number and left[group] >= -TOKEN_ROUNDING:
                charged[group] += 1
                started.append(row)
            else:
                delay = max(MIN_TOKEN_PAUSE_S + max(seconds, 0.0), (number - left[group]) / self.rate_per_group)
                put_off.append({"task_id": row[0], "token": row[TOTAL_ATTEMPT], "delay": delay})
        if charged:
            taken = [{"group_name": group, "taken": number} for group, number in charged.items()]
            session.run(session.sql.charge_groups, {**limits, "rows": json.dumps(taken)})
        if put_off:
            self.put_off = True
            session.run(session.sql.put_off, {"rows": json.dumps(put_off)})
        return started

    def _count_exactly(
        self, session: Session, params: Params, leases: set[str], allowed: int
    ) -> tuple[list[Row], Names]:
        """Take over leases that ran out; return them, and all leases that count now."""
        live, lapsed = _leases(session, leases, params["lease"])
        over = lapsed[: max(0, min(allowed, (self.max_running or 0) - len(live)))]
        taken = session.run(session.sql.checkout_optimistic, {**params, "rows": fenced(over)}) if over else []
        again = {row[0]: row[TOTAL_ATTEMPT] for row in taken}
        held = [*live, *again.items(), *[fence for fence in lapsed if fence[0] not in again]]
        return taken, _named({_piece(*fence) for fence in held})


def note_ended(alias: str, leases: Iterable[Lease]) -> None:
    """Remember leases whose outcome this process has committed: they do not count any more."""
    for lease in leases:
        if (memory := limit_memories.get((alias, lease.queue))) is not None:
            memory.ended.append(_piece(lease.id, lease.total_attempt))


def _piece(task_id: int, token: int) -> str:
    return f"{task_id}:{token}"


def _stored(text: str | None) -> Names | None:
    """Return the leases of a row; None if that is damaged."""
    if not text:
        return {}
    return {text: set(text.split(","))} if LEASES.fullmatch(text) else None


def _named(leases: Collection[str]) -> Names:
    return {",".join(leases): set(leases)} if leases else {}


def _all(names: Names) -> set[str]:
    return set().union(*names.values())


def _ended(memory: _Memory) -> list[str]:
    return [memory.ended.popleft() for _ in range(len(memory.ended))]


def _drop(names: Names, ended: list[str]) -> int:
    """Take off leases that ended; return how many are left. They mostly end in the order in which they were taken."""
    left, missing = 0, len(ended)
    for some in names.values():
        if missing > 0:
            before = len(some)
            some.difference_update(ended)
            missing -= before - len(some)
        left += len(some)
    return left


def _leases(session: Session, known: set[str], lease: float) -> tuple[list[Fence], list[Fence]]:
    """Return which leases hold, and which ran out and may still be renewed or taken over.

    One that ran out counts for one more ``lease`` at most: nobody can extend it then (``Port.revivable``). It counts
    longer while a transaction has its row locked, as a processor in atomic mode may: no poller takes it over then.
    """
    ids = session.sql.dialect.array([int(piece.partition(":")[0]) for piece in known])
    rows = session.run(session.sql.running_of, {"ids": ids}) if known else []
    found = [(task_id, token, left) for task_id, token, left in rows if _piece(task_id, token) in known]
    live = [(task_id, token) for task_id, token, left in found if left > 0]
    if over := [(task_id, token) for task_id, token, left in found if left <= -lease]:
        unlocked = {task_id for (task_id,) in session.run(session.sql.unlocked, {"rows": fenced(over)})}
        live += [fence for fence in over if fence[0] not in unlocked]
    return live, [(task_id, token) for task_id, token, left in found if -lease < left <= 0]


def fenced(leases: Iterable[Fence]) -> str:
    """Return leases as the rows of a statement."""
    return json.dumps([{"task_id": task_id, "token": token} for task_id, token in sorted(leases)])
