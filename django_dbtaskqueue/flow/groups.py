"""Groups: at most one live lease each, strict order inside. Of each group one task is ready, the head. The
others wait out of the ready order, so that a busy group costs it one row. With the setting ``max_running_per_group``
a group has so many heads, which may run at the same time.

Each change of a group's head is made under the group's lock, in its own transaction: entering (enqueue,
reprocess, kick) and leaving (settle, cancel, delete). Producers of one group therefore take turns until they commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django.db import OperationalError

from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.conf.settings import default_settings
from django_dbtaskqueue.core.exceptions import TooManyGroups, UnknownQueue
from django_dbtaskqueue.db.liveness import sqlstate

if TYPE_CHECKING:
    from django_dbtaskqueue.db.session import Row, Session

T = TypeVar("T")
Statement = tuple[str, Mapping[str, Any]]
Rules = Sequence[tuple[Collection[str], bool]]  # groups, and whether a task that waits for a retry stays a head
GROUPS_PER_TRANSACTION = 500
OUT_OF_MEMORY_SQLSTATE = "53200"  # PostgreSQL keeps all locks in shared memory of a fixed size
Groups = Mapping[str, set[str]]  # the keys of groups, by queue
heads_in_poller: dict[tuple[str, str], int] = {}  # by alias and queue, as the poller last applied its settings


class Member(NamedTuple):
    """A task that is, or may become, the head of its group."""

    id: int
    is_ready: bool
    processing: bool
    retrying: bool  # an attempt failed and it waits for the next
    wait: float  # seconds until it is due
    priority: int


def lock(session: Session, queue: str, groups: Iterable[str]) -> None:
    """Lock groups to the end of the current transaction, in one order everywhere. Raises ``TooManyGroups``."""
    if wanted := set(groups):
        try:
            session.run(*locking(session, queue, wanted))
        except OperationalError as error:
            if sqlstate(error) != OUT_OF_MEMORY_SQLSTATE:
                raise
            raise TooManyGroups(queue, len(wanted)) from error


class _NotLocked(Exception):
    """A row was locked before its group."""


def lock_in_order(session: Session, lock_rows: Callable[[], tuple[T, Groups]]) -> T:
    """Lock the groups of some rows, then the rows, to the end of the caller's transaction; return what was locked.

    Groups are locked before rows everywhere. In the other order this transaction would hold a row and wait for its
    group, while a settle holds the group and waits for the row. ``lock_rows`` locks rows and returns them with their
    groups. If one of these is not locked yet, a savepoint unlocks the rows, and all is locked again, groups first.
    With a single writer no lock is needed.
    """
    if not session.postgresql:
        return lock_rows()[0]
    locked: defaultdict[str, set[str]] = defaultdict(set)
    while True:
        try:
            with session.atomic():
                for queue in sorted(locked):
                    lock(session, queue, locked[queue])
                rows, groups = lock_rows()
                if any(keys - locked[queue] for queue, keys in groups.items()):
                    raise _NotLocked
                return rows
        except _NotLocked:
            for queue, keys in groups.items():
                locked[queue] |= keys


def regroup(session: Session, queue: str, groups: Iterable[str], *, hold_retries: bool = True) -> None:
    """Make the right heads of each group ready and take the others out.

    The groups must be locked. ``hold_retries``: a task that waits for its next attempt stays a head.
    """
    wanted = sorted(set(groups))
    if not session.postgresql:
        _regroup_one_by_one(session, queue, wanted, hold_retries=hold_retries)
    elif wanted:
        session.together(placing(session, queue, wanted, hold_retries=hold_retries))


def run_and_regroup(
    session: Session, queue: str, batch: Sequence[Statement], rules: Rules, *, every: bool = False
) -> list[list[Row]]:
    """Run statements under the locks of groups and regroup these, in one transaction; return the statements' rows."""
    if session.postgresql:
        locked = locking(session, queue, [*chain.from_iterable(groups for groups, _ in rules)])
        placed = [placing(session, queue, groups, hold_retries=hold, every=every) for groups, hold in rules]
        return session.together([locked, *batch, *chain.from_iterable(placed)])[1 : 1 + len(batch)]
    with session.atomic():
        answers = [session.run(sql, params) for sql, params in batch]
        for groups, hold in rules:
            regroup(session, queue, groups, hold_retries=hold)
    return answers


def placing(
    session: Session, queue: str, groups: Collection[str], *, hold_retries: bool, every: bool = False
) -> list[Statement]:
    """Return the statement of ``regroup`` on PostgreSQL; none without groups.

    A poller passes over groups without a parked task, unless ``every``: ``park_excess`` has parked what a number that
    was lowered leaves over.
    """
    if not groups:
        return []
    rules = {"number": heads_of(session, queue), "hold": hold_retries, "every": every or not session.owned}
    return [(session.sql.place_heads, {**_params(session, queue, groups), **rules})]


def locking(session: Session, queue: str, groups: Collection[str]) -> Statement:
    """Return the statement of ``lock``, which sorts the groups."""
    return session.sql.lock_groups, _params(session, queue, groups)


def park_excess(session: Session, queue: str) -> None:
    """Park the tasks that a smaller ``max_running_per_group`` leaves over, in groups that nothing else regroups."""
    params = {"queue_name": queue, "number": heads_of(session, queue)}
    found = sorted(group for (group,) in session.run(session.sql.groups_over, params))
    for start in range(0, len(found), GROUPS_PER_TRANSACTION):
        some = found[start : start + GROUPS_PER_TRANSACTION]
        run_and_regroup(session, queue, [], [(some, True)], every=True)


def _regroup_one_by_one(session: Session, queue: str, wanted: list[str], *, hold_retries: bool) -> None:
    """``regroup`` where SQL has no LATERAL: the heads are chosen here."""
    number = heads_of(session, queue) if wanted else 1
    while wanted:  # of each group the statement returns one task that is parked
        members: dict[str, list[Member]] = defaultdict(list)
        rows = session.run(session.sql.group_heads, _params(session, queue, wanted))
        for group, task_id, *flags, wait, priority in rows:
            is_ready, processing, retrying = map(bool, flags)
            members[group].append(Member(task_id, is_ready, processing, retrying, wait, priority))
        enter, leave, wanted = [], [], []
        for group, of_group in members.items():
            heads = choose(of_group, hold_retries=hold_retries, number=number)
            new = [member.id for member in heads if not member.is_ready]
            enter += new
            if new and len(heads) < number:
                wanted.append(group)
            leave += [one.id for one in of_group if one not in heads and one.is_ready and not one.processing]
        if leave:
            session.run(session.sql.park, {"ids": session.sql.dialect.array(leave)})
        if enter:
            session.run(session.sql.make_ready, {"ids": session.sql.dialect.array(enter)})


def heads_of(session: Session, queue: str) -> int:
    """Return how many heads a group of the queue has. A poller's own connection takes it from ``heads_in_poller``."""
    alias = session.connection.alias
    if not session.owned:
        with suppress(UnknownQueue):
            return queue_settings(queue, alias).max_running_per_group
    return heads_in_poller.get((alias, queue)) or default_settings(queue).max_running_per_group


def choose(members: list[Member], *, hold_retries: bool, number: int = 1) -> list[Member]:
    """Return the heads: tasks in process, then those that wait for a retry, then the first due, by priority and age."""

    def rank(member: Member) -> tuple[bool, bool, float, int, int]:
        held = hold_retries and member.is_ready and member.retrying
        return (not member.processing, not held, member.wait, member.priority, member.id)

    return sorted(members, key=rank)[:number] if number > 1 else [min(members, key=rank)]


def _params(session: Session, queue: str, groups: Collection[str]) -> dict[str, Any]:
    return {"queue_name": queue, "groups": session.sql.dialect.text_array(groups)}
