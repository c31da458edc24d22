"""Groups: at most one live lease each, strict order inside. Of each group one task is ready, the head. The
others wait out of the ready order, so that a busy group costs it one row.

Each change of a group's head is made under the group's lock, in its own transaction: entering (enqueue,
reprocess, kick) and leaving (settle, cancel, delete). Producers of one group therefore take turns until they commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from django_dbtaskqueue.db.session import Session

T = TypeVar("T")
Groups = Mapping[str, set[str]]  # the keys of groups, by queue


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

    The groups must be locked. ``hold_retries``: a task that waits for its next attempt stays the head.
    """
    wanted = sorted(set(groups))
    if not wanted:
        return 0
    members: dict[str, list[Member]] = defaultdict(list)
    for group, task_id, *flags, wait, priority in session.run(session.sql.group_heads, _params(session, queue, wanted)):
        is_ready, processing, retrying = map(bool, flags)
        members[group].append(Member(task_id, is_ready, processing, retrying, wait, priority))
    enter, leave = [], []
    for of_group in members.values():
        head = choose(of_group, hold_retries=hold_retries)
        enter += [member.id for member in of_group if member is head and not member.is_ready]
        leave += [member.id for member in of_group if member is not head and member.is_ready and not member.processing]
    if leave:
        session.run(session.sql.park, {"ids": session.sql.dialect.array(leave)})
    if enter:
        session.run(session.sql.make_ready, {"ids": session.sql.dialect.array(enter)})
    return len(enter)


def choose(members: list[Member], *, hold_retries: bool) -> Member:
    """Return the head: the task in process, else the one that waits for a retry, else the first that is due, by
    priority and age. Pure.
    """

    def rank(member: Member) -> tuple[bool, bool, float, int, int]:
        held = hold_retries and member.is_ready and member.retrying
        return (not member.processing, not held, member.wait, member.priority, member.id)

    return min(members, key=rank)


def _params(session: Session, queue: str, groups: list[str]) -> dict[str, Any]:
    return {"queue_name": queue, "groups": session.sql.dialect.array(groups)}
