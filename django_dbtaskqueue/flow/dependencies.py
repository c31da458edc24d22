"""Dependencies: tasks that wait for the ends of others, their parents.

``watched`` on the row of a parent says that something waits. The statement that ends the parent returns it, so a task
that nothing waits for costs nothing. What waits is told in a transaction of its own, which takes ``watched`` away. If
the process dies between the two, the row itself is the reminder: pollers look for such rows every few seconds.

A task that waits is parked, so that no checkout reads it. Its row in ``Hold`` counts the parents that are left. At zero
one statement takes the parking reason away, which can happen only once.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from django.db import OperationalError

from django_dbtaskqueue.core.durations import Pauses
from django_dbtaskqueue.core.states import COMPLETED, TERMINAL
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, is_task_table, model_named, statements_of
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.groups import Groups, lock, lock_in_order, regroup

logger = logging.getLogger("django_dbtaskqueue")

ENDED_PER_TRANSACTION = 1000  # tasks whose ends are told in one transaction
FAILED_END_S = 5.0, 300.0  # before an end that could not be told is told again
EDGES_PER_SWEEP = 50_000  # dependencies that one turn of ``sweep_missing`` looks at


class TaskKey(NamedTuple):
    """A task of any table of one database."""

    location: str
    id: int


@dataclass
class Changes:
    """What one transaction did to tasks that waited."""

    released: list[tuple[str, str, str | None]] = field(default_factory=list)  # location, queue, group
    cancelled: dict[str, list[tuple[int, str, bool]]] = field(default_factory=dict)  # id, queue, watched; by location

    @property
    def groups(self) -> Groups:
        """The groups that released tasks enter."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for _location, queue, group in self.released:
            found[queue].update([group] if group is not None else [])
        return found


# -- a task ends -------------------------------------------------------------------------------------------------------


def after_commit(session: Session, ids: Collection[int], completed: Collection[int] = ()) -> None:
    """Tell the ends of tasks once the current transaction commits. ``completed``: tasks whose rows are gone."""
    gone = dict.fromkeys(completed, str(COMPLETED))
    notify.on_commit(session.connection, partial(_quietly, partial(ended, session, ids, gone), session))


def sweep_after_commit(session: Session) -> None:
    """Tell all ends of tasks of one table that are not told once the current transaction commits."""
    notify.on_commit(session.connection, partial(_quietly, partial(sweep, session), session))


def _quietly(tell: Callable[[], object], session: Session) -> None:
    try:
        tell()
    except Exception as error:  # the next sweep of a poller tells it, or says why not
        logger.debug("Ends of tasks in %s are told later: %s", session.location, error)


def ended(session: Session, ids: Collection[int], gone: Mapping[int, str] | None = None) -> None:
    """Tell the ends of tasks of one table to what waits for them: each end once, however often it is called.

    ``gone``: the last statuses of tasks whose rows are gone. Children that are cancelled end, too: a loop, not a
    recursion, goes on with theirs. Not inside the transaction that ended the tasks.
    """
    waiting = [(session, sorted(ids), dict(gone or {}))]
    while waiting:
        there, known, missing = waiting.pop()
        for start in range(0, max(len(known), 1), ENDED_PER_TRANSACTION):
            part = known[start : start + ENDED_PER_TRANSACTION]
            with there.atomic():
                statuses, changes = lock_in_order(there, partial(_tell, there, part, missing if not start else {}))
                enter_groups(there, changes)
            announce(there, changes)
            for task_id in statuses:  # clients that wait for the task
                notify.notify(there.connection.alias, there.connection.vendor, f"{notify.TASK_ENDED}{task_id}")
            for location, rows in changes.cancelled.items():
                watched = [task_id for task_id, _queue, is_watched in rows if is_watched]
                waiting += [(at(there, location), watched, {})] if watched else []


def tell_deleted(session: Session, ids: Collection[int]) -> None:
    """Tell that an operator deletes tasks, in the transaction that does it. A child on hold waits for an operator."""
    changes, _ = _changes(session, dict.fromkeys(ids, "DELETED"))
    for queue, keys in sorted(changes.groups.items()):
        lock(session, queue, keys)
    enter_groups(session, changes)
    announce(session, changes)


def _tell(
    session: Session, ids: Sequence[int], gone: Mapping[int, str]
) -> tuple[tuple[dict[int, str], Changes], Groups]:
    array = session.sql.dialect.array
    locked: dict[int, str] = dict(session.run(session.sql.lock_ended, {"ids": array(ids)})) if ids else {}
    statuses = {**locked, **gone}
    changes, still_open = _changes(session, statuses) if statuses else (Changes(), set())
    if locked:
        session.run(session.sql.mark_reported, {"ids": array(locked), "open": array(still_open & locked.keys())})
    return (statuses, changes), changes.groups


def _changes(session: Session, statuses: Mapping[int, str]) -> tuple[Changes, set[int]]:
    """End the waits for some tasks; return what that changed, and the tasks that children still wait for."""
    array, sql = session.sql.dialect.array, session.sql
    edges = session.run(sql.open_edges, {"location": session.location, "ids": array(statuses)})
    children: defaultdict[str, set[int]] = defaultdict(set)
    for _edge, _parent, location, child in edges:
        if is_task_table(location):  # SQL wrote the others
            children[location].add(child)
    policies: dict[TaskKey, str] = {}
    for location in sorted(children):
        rows = session.run(sql.lock_holds, {"location": location, "ids": array(sorted(children[location]))})
        policies |= {TaskKey(location, child): policy for child, policy in rows}
    closed: defaultdict[str, list[int]] = defaultdict(list)
    counts: Counter[TaskKey] = Counter()
    cancelled: defaultdict[str, dict[int, str]] = defaultdict(dict)
    still_open: set[int] = set()
    for edge, parent, location, child in edges:
        key, status = TaskKey(location, child), statuses[parent]
        policy = policies.get(key)  # None: the child waits no more, because an operator let it go
        if policy in (None, "run") or status == COMPLETED:
            closed[status].append(edge)
            counts[key] += policy is not None
            continue
        if policy == "cancel":
            cancelled[location][child] = f"Cancelled: parent task {parent} ended as {status}."
        if status in TERMINAL:
            still_open.add(parent)
        else:  # it was deleted and cannot end again
            closed[status].append(edge)
    for status, ids in closed.items():
        session.run(sql.end_edges, {"status": status, "ids": array(ids)})
    changes = _count_down(session, counts)
    for location, reasons in cancelled.items():
        changes.cancelled[location] = cancel(at(session, location), reasons)
    return changes, still_open


def _count_down(session: Session, counts: Mapping[TaskKey, int]) -> Changes:
    """Take ended parents off the counts of their children, and let those go that wait for no other."""
    changes = Changes()
    for location in sorted({key.location for key, number in counts.items() if number}):
        rows = [
            {"child": key.id, "number": number} for key, number in counts.items() if key.location == location and number
        ]
        left = session.run(session.sql.count_down, {"location": location, "rows": json.dumps(rows)})
        if free := [child for child, remaining in left if remaining <= 0]:
            ids = session.sql.dialect.array(sorted(free))
            session.run(session.sql.drop_holds, {"location": location, "ids": ids})
            changes.released += let_go(session, location, free)
    return changes


def let_go(session: Session, location: str, ids: Iterable[int]) -> list[tuple[str, str, str | None]]:
    """Let tasks start; return those that still waited, as (location, queue, group)."""
    there = at(session, location)
    rows = there.run(there.sql.let_go, {"ids": there.sql.dialect.array(sorted(ids))})
    return [(location, queue, group) for _, queue, group in rows]


def cancel(session: Session, reasons: Mapping[int, str]) -> list[tuple[int, str, bool]]:
    """End tasks that still wait in POISON; return these, as (id, queue, whether something waits for it)."""
    rows = [{"child": child, "reason_text": text} for child, text in sorted(reasons.items())]
    found = session.run(session.sql.cancel_held, {"rows": json.dumps(rows)})
    return [(child, queue, bool(watched)) for child, queue, watched in found]


def enter_groups(session: Session, changes: Changes) -> None:
    """Make the right heads of the groups ready that released tasks have entered. The groups are locked."""
    places = {(location, queue) for location, queue, group in changes.released if group is not None}
    for location, queue in sorted(places):
        regroup(at(session, location), queue, changes.groups[queue])


def announce(session: Session, changes: Changes) -> None:
    """Wake the pollers of released tasks, and count the cancelled ones, once the transaction commits."""
    for queue in {queue for _location, queue, _group in changes.released}:
        notify.after_commit(session.connection, queue)
    calls: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rows in changes.cancelled.values():
        for child, queue, _watched in rows:
            calls[queue, "cancel"].append(child)
    if calls:
        usage.after_commit(session.connection, calls)


def at(session: Session, location: str) -> Session:
    """Return a session on the same connection for another task table."""
    if location == session.location:
        return session
    there = copy(session)
    there.model, there.location = model_named(location), location
    there.sql = statements_of(there.model, session.connection.vendor)
    return there


# -- what a dead process left ------------------------------------------------------------------------------------------


_pauses = Pauses[TaskKey](*FAILED_END_S, beyond=OperationalError)


def _log(key: TaskKey, error: Exception) -> None:
    logger.warning("What waits for task %s of %s is not told of its end: %s", key.id, key.location, error)


def sweep(session: Session) -> int:
    """Tell the ends of tasks of one table that no process has told; return how many."""
    number, after = 0, 0

    def tell(keys: Sequence[TaskKey]) -> None:
        ended(session, [key.id for key in keys])

    while True:
        params = {"after": after, "limit": ENDED_PER_TRANSACTION}
        ids = [row[0] for row in session.run(session.sql.ended_watched, params)]
        if ids:
            keys = {TaskKey(session.location, task_id) for task_id in ids}.difference(_pauses.resting())
            _pauses.apart(sorted(keys), tell, _log)
            number, after = number + len(ids), ids[-1]
        if len(ids) < ENDED_PER_TRANSACTION:
            return number


def sweep_missing(session: Session, after: int) -> int:
    """Tell the ends of parents of one table whose rows are gone, and delete what children waited for that are gone.

    Return where the next turn begins. One turn looks at ``EDGES_PER_SWEEP`` dependencies behind ``after``. A parent
    that is neither in the table nor in the history has completed: only its outcome removes a task that something waits
    for (``tell_deleted``).
    """
    [(lowest, highest)] = session.run(session.sql.edge_range, {})
    if highest is None:
        return 0
    after = max(after, lowest - 1)
    until, array = after + EDGES_PER_SWEEP, session.sql.dialect.array
    edges = {"after": after, "until": until, "location": session.location}
    if missing := _missing(session, session.sql.open_parents, edges):
        of = {"location": session.location, "ids": array(missing)}
        ended(
            session, (), {**dict.fromkeys(missing, str(COMPLETED)), **dict(session.run(session.sql.moved_statuses, of))}
        )
    if missing := _missing(session, session.sql.waited_for, edges):
        of = {"location": session.location, "ids": array(missing)}
        with session.atomic():
            session.run(session.sql.drop_holds, of)
            session.run(session.sql.drop_edges, of)
    return until if until < highest else 0


def _missing(session: Session, sql: str, edges: Mapping[str, object]) -> list[int]:
    """Return those tasks of some dependencies that are not in the table."""
    ids = sorted(row[0] for row in session.run(sql, edges))
    there = {row[0] for row in session.run(session.sql.present, {"ids": session.sql.dialect.array(ids)})} if ids else ()
    return [task_id for task_id in ids if task_id not in there]
