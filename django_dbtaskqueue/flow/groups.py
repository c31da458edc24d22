"""Groups: at most one live lease each, strict order inside. Of each group one task is ready, the head. The
others wait out of the ready order, so that a busy group costs it one row. With the setting ``max_running_per_group``
a group has so many heads, which may run at the same time.

Each change of a group's head is made under the group's lock, in its own transaction: entering (enqueue,
reprocess, kick) and leaving (settle, cancel, delete). Producers of one group therefore take turns until they commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.conf.settings import default_settings
from django_dbtaskqueue.core.exceptions import UnknownQueue

if TYPE_CHECKING:
    from django_dbtaskqueue.db.session import Session

T = TypeVar("T")
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
    """Lock groups to the end of the current transaction, in one order everywhere."""
    wanted = sorted(set(groups))
    if wanted:
        session.run(session.sql.lock_groups, _params(session, queue, wanted))


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


def regroup(session: Session, queue: str, groups: Iterable[str], *, hold_retries: bool = True) -> int:
    """Make the right head of each group ready and take the others out; return how many heads became ready.

    The groups must be locked. ``hold_retries``: a task that waits for its next attempt stays a head.
    """
    wanted, entered = sorted(set(groups)), 0
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
        entered += len(enter)
    return entered


def heads_of(session: Session, queue: str) -> int:
    """Return how many heads a group of the queue has. A poller's own connection takes it from ``heads_in_poller``."""
    alias = session.connection.alias
    if not session.owned:
        with suppress(UnknownQueue):
            return queue_settings(queue, alias).max_running_per_group
    return heads_in_poller.get((alias, queue)) or default_settings(queue).max_running_per_group


def choose(members: list[Member], *, hold_retries: bool, number: int = 1) -> list[Member]:
    """Return the heads: the tasks in process, then those that wait for a retry, then the first that are due, by
    priority and age. Pure.
    """

    def rank(member: Member) -> tuple[bool, bool, float, int, int]:
        held = hold_retries and member.is_ready and member.retrying
        return (not member.processing, not held, member.wait, member.priority, member.id)

    return sorted(members, key=rank)[:number] if number > 1 else [min(members, key=rank)]


def _params(session: Session, queue: str, groups: list[str]) -> dict[str, Any]:
    return {"queue_name": queue, "groups": session.sql.dialect.array(groups)}
