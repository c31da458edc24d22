"""Dependencies: tasks that wait for the ends of others, their parents.

``watched`` on the row of a parent says that something waits. The statement that ends the parent returns it, so a task
that nothing waits for costs nothing. What waits is told in a transaction of its own, which takes ``watched`` away. If
the process dies between the two, the row itself is the reminder: pollers look for such rows every few seconds.

A task that waits is parked, so that no checkout reads it. Its row in ``Hold`` counts the parents that are left. At zero
one statement takes the parking reason away, which can happen only once.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from django.db import OperationalError
from django.db.models import Count

from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.columns import InsertOptions
from django_dbtaskqueue.core.durations import Pauses
from django_dbtaskqueue.core.exceptions import EnqueueError, near_match
from django_dbtaskqueue.core.json import is_name, short_repr
from django_dbtaskqueue.core.sql.dependencies import EDGE_TYPES, HOLD_TYPES
from django_dbtaskqueue.core.sql.dialects import PARENT_FAILED
from django_dbtaskqueue.core.states import COMPLETED, ERROR, POISON, TERMINAL
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, alias_of, is_task_table, model_named, model_of, statements_of
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.groups import Groups, groups_of, lock_in_order, regroup
from django_dbtaskqueue.flow.placement import check_choice, refused
from django_dbtaskqueue.models import AbstractTask, Dependency, TaskHistory, TemporaryTask
from django_dbtaskqueue.models.tasks import ON_PARENT_FAILURE

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
    cancelled: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # as ``usage`` counts calls
    watched: dict[str, list[int]] = field(default_factory=dict)  # those of them that something waits for, by location

    @property
    def groups(self) -> Groups:
        """The groups that released tasks enter."""
        return groups_of(released[1:] for released in self.released)

    def let_go(self, session: Session, location: str, ids: Iterable[int]) -> None:
        """Let tasks start that still wait."""
        there = at(session, location)
        rows = there.run(there.sql.let_go, {"ids": there.sql.dialect.array(sorted(ids))})
        self.released += [(location, queue, group) for _, queue, group in rows]

    def cancel(self, session: Session, reasons: Mapping[str, Mapping[int, str]]) -> None:
        """End tasks that still wait in POISON; ``reasons`` by location and id."""
        for location, texts in reasons.items():
            there = at(session, location)
            rows = [{"child": child, "reason_text": text} for child, text in sorted(texts.items())]
            for child, queue, watched in there.run(there.sql.cancel_held, {"rows": json.dumps(rows)}):
                self.cancelled.setdefault((queue, "cancel"), []).append(child)
                if watched:
                    self.watched.setdefault(location, []).append(child)


# -- a task ends -------------------------------------------------------------------------------------------------------


def after_commit(session: Session, tell: Callable[..., object], *ends: object) -> None:
    """Call ``tell(session, *ends)``, which tells ends of tasks, once the current transaction commits."""

    def quietly() -> None:
        try:
            tell(session, *ends)
        except Exception as error:  # the next sweep of a poller tells it, or says why not
            logger.debug("Ends of tasks in %s are told later: %s", session.location, error)

    notify.on_commit(session.connection, quietly)


def tell_ends(session: Session, ids: Collection[int], gone: Mapping[int, str] | None = None) -> None:
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
                tell = partial(_tell, there, part, missing if not start else {})
                statuses, changes = lock_in_order(there, tell, lambda found: found[1].groups)
                enter_groups(there, changes)
            announce(there, changes)
            for task_id in statuses:  # clients that wait for the task
                notify.notify(there.connection.alias, there.connection.vendor, f"{notify.TASK_ENDED}{task_id}")
            waiting += [(at(there, location), watched, {}) for location, watched in changes.watched.items()]


def end_deleted(session: Session, ids: Collection[int]) -> Changes:
    """End the waits for tasks in the transaction that deletes them; a child on hold waits for an operator."""
    tell = partial(_changes, session, dict.fromkeys(ids, "DELETED"))
    changes, _ = lock_in_order(session, tell, lambda found: found[0].groups)
    enter_groups(session, changes)
    return changes


def _tell(session: Session, ids: Sequence[int], gone: Mapping[int, str]) -> tuple[dict[int, str], Changes]:
    array = session.sql.dialect.array
    locked: dict[int, str] = dict(session.run(session.sql.lock_ended, {"ids": array(ids)})) if ids else {}
    statuses = {**locked, **gone}
    changes, still_open = _changes(session, statuses) if statuses else (Changes(), set())
    if locked:
        session.run(session.sql.mark_reported, {"ids": array(locked), "open": array(still_open & locked.keys())})
    return statuses, changes


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
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    cancelled: defaultdict[str, dict[int, str]] = defaultdict(dict)
    still_open: set[int] = set()
    for edge, parent, location, child in edges:
        status = statuses[parent]
        policy = policies.get(TaskKey(location, child))  # None: it waits no more, because an operator let it go
        if policy in (None, "run") or status == COMPLETED:
            closed[status].append(edge)
            if policy is not None:
                counts[location][child] += 1
            continue
        if policy == "cancel":
            cancelled[location][child] = f"{PARENT_FAILED} {parent} ended as {status}."
        if status in TERMINAL:
            still_open.add(parent)
        else:  # it was deleted and cannot end again
            closed[status].append(edge)
    for status, ids in closed.items():
        session.run(sql.end_edges, {"status": status, "ids": array(ids)})
    changes = Changes()
    for location in sorted(counts):  # take ended parents off the counts of their children
        ended_of = json.dumps([{"child": child, "number": number} for child, number in counts[location].items()])
        left = session.run(sql.count_down, {"location": location, "rows": ended_of})
        if free := sorted(child for child, remaining in left if remaining <= 0):
            session.run(sql.drop_holds, {"location": location, "ids": array(free)})
            changes.let_go(session, location, free)
    changes.cancel(session, cancelled)
    return changes, still_open


def enter_groups(session: Session, changes: Changes) -> None:
    """Make the right heads of the groups ready that released tasks have entered. The groups are locked."""
    places = {(location, queue) for location, queue, group in changes.released if group is not None}
    for location, queue in sorted(places):
        regroup(at(session, location), queue, changes.groups[queue])


def announce(session: Session, changes: Changes) -> None:
    """Wake the pollers of released tasks, and count the cancelled ones, once the transaction commits."""
    for queue in {queue for _location, queue, _group in changes.released}:
        notify.wake_after_commit(session.connection, queue)
    if changes.cancelled:
        usage.count_calls(session.connection, changes.cancelled)


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
    while True:
        params = {"after": after, "limit": ENDED_PER_TRANSACTION}
        if ids := [row[0] for row in session.run(session.sql.ended_watched, params)]:
            keys = {TaskKey(session.location, task_id) for task_id in ids}.difference(_pauses.resting())
            _pauses.apart(sorted(keys), lambda some: tell_ends(session, [key.id for key in some]), _log)
            number, after = number + len(ids), ids[-1]
        if len(ids) < ENDED_PER_TRANSACTION:
            return number


def sweep_missing(session: Session, after: int) -> int:
    """Tell the ends of parents of one table whose rows are gone, and delete what children waited for that are gone.

    Return where the next turn begins. One turn looks at ``EDGES_PER_SWEEP`` dependencies behind ``after``. A parent
    that is neither in the table nor in the history has completed: other deletions are told at once (``end_deleted``).
    """
    [(lowest, highest)] = session.run(session.sql.edge_range, {})
    if highest is None:
        return 0
    after = max(after, lowest - 1)
    until, array = after + EDGES_PER_SWEEP, session.sql.dialect.array
    edges = {"after": after, "until": until, "location": session.location}
    if missing := _missing(session, session.sql.open_parents, edges):
        of = {"location": session.location, "ids": array(missing)}
        moved: dict[int, str] = dict(session.run(session.sql.moved_statuses, of))
        tell_ends(session, (), {**dict.fromkeys(missing, str(COMPLETED)), **moved})
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


# -- what a task waits for: as an enqueue writes it, as its processor reads it -----------------------------------------

ROWS_PER_INSERT = 10_000  # dependencies written, or parents locked, by one statement
MAX_PARENTS_READ = 1000  # parents whose results one processor reads
TEMPORARY = TemporaryTask._meta.label_lower
POLICIES = tuple(policy for policy, _ in ON_PARENT_FAILURE)


class ParentEdge(NamedTuple):
    """A child waits for a parent, and may have a name for it."""

    parent: TaskKey
    child: TaskKey
    name: str = ""


def attach(session: Session, edges: Sequence[ParentEdge], policies: Mapping[TaskKey, str]) -> None:
    """Let children wait for their parents. The children are parked for it and were inserted by this transaction.

    ``policies``: all children, each with its ``on_parent_failure``. A parent that has ended counts at once. Raises
    ``EnqueueError`` for a parent that does not exist. The parents stay locked to the end of the transaction, so none of
    them can end without seeing that something waits.
    """
    with session.atomic():
        changes = lock_in_order(session, partial(_attach, session, edges, policies), attrgetter("groups"))
        enter_groups(session, changes)
    announce(session, changes)
    for location, watched in changes.watched.items():
        after_commit(at(session, location), tell_ends, watched)


def _attach(session: Session, edges: Sequence[ParentEdge], policies: Mapping[TaskKey, str]) -> Changes:
    statuses = _lock_parents(session, {edge.parent for edge in edges})
    pending: set[TaskKey] = set()
    remaining: Counter[TaskKey] = Counter()
    cancelled: defaultdict[str, dict[int, str]] = defaultdict(dict)
    rows = []
    for parent, child, name in edges:
        status, policy = statuses[parent], policies[child]
        counts = status == COMPLETED or (policy == "run" and status in TERMINAL)
        if not counts:
            remaining[child] += 1
            pending.add(parent)
        if policy == "cancel" and status in (ERROR, POISON):
            cancelled[child.location][child.id] = f"{PARENT_FAILED} {parent.id} ended as {status}."
        rows.append(dict(zip(EDGE_TYPES, (*parent, *child, name, status if counts else None), strict=True)))
    for there, ids in by_table(session, pending):
        there.run(there.sql.watch, {"ids": ids})
    _insert(session, session.sql.insert_edges, rows)
    changes, free = Changes(), defaultdict(list)
    holds = []
    for child, policy in policies.items():
        if not remaining[child]:
            free[child.location].append(child.id)
            continue
        holds.append(dict(zip(HOLD_TYPES, (*child, remaining[child], policy), strict=True)))
    _insert(session, session.sql.insert_holds, holds)
    for location, ids in free.items():
        changes.let_go(session, location, ids)
    changes.cancel(session, cancelled)
    return changes


def _insert(session: Session, sql: str, rows: Sequence[Mapping[str, object]]) -> None:
    for start in range(0, len(rows), ROWS_PER_INSERT):
        session.run(sql, {"rows": json.dumps(rows[start : start + ROWS_PER_INSERT])})


def _lock_parents(session: Session, parents: Collection[TaskKey]) -> dict[TaskKey, str]:
    statuses: dict[TaskKey, str] = {}
    for there, ids in by_table(session, parents):
        rows = there.run(there.sql.lock_parents, {"ids": ids})
        statuses |= {TaskKey(there.location, task_id): status for task_id, status in rows}
    if missing := sorted(set(parents) - statuses.keys()):
        names = ", ".join(str(key.id) for key in missing[:5]) + ("" if len(missing) <= 5 else ", …")
        raise EnqueueError(
            f"after= names tasks that are not in the table {missing[0].location}: {names}. Enqueue parents first. A "
            "task that completed may have left the table: then leave it out. One may be on its way to another shard."
        )
    return statuses


def by_table(session: Session, keys: Iterable[TaskKey]) -> Iterator[tuple[Session, object]]:
    """Yield the ids of tasks, in order, as array parameters for statements on their tables."""
    for location, some in groupby(sorted(keys), attrgetter("location")):
        there, of_table = at(session, location), [key.id for key in some]
        for start in range(0, len(of_table), ROWS_PER_INSERT):
            yield there, there.sql.dialect.array(of_table[start : start + ROWS_PER_INSERT])


@dataclass(frozen=True, slots=True)
class Parent:
    """A task that another one waited for, as it is now. ``status`` is "" for one that is gone without a trace."""

    id: int
    name: str
    queue: str
    reference: str | None
    status: str
    result: object


class Parents(Sequence[Parent]):
    """The parents of a task: at most ``MAX_PARENTS_READ`` of them, the first ones; ``counts`` counts all.

    ``parents["name"]`` is the parent that ``after`` gave a name.
    """

    def __init__(self, found: Sequence[Parent], counts: Mapping[str, int]) -> None:
        self._found, self.counts = list(found), dict(counts)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self._found[key]
        for one in self._found:
            if one.name == key:
                return one
        raise KeyError(f"No parent has the name {key!r}.{near_match(key, [one.name for one in self._found])}")

    @property
    def results(self) -> list[object]:
        """The results of the parents, in the order in which ``after`` named them."""
        return [one.result for one in self._found]


READ_OF_PARENTS = ("queue", "reference", "status", "result")
GONE_TASK = ("", None, "", None)


def parents_of(child: TaskKey, alias: str) -> Parents:
    """Return the parents of a task, with their results, from their tables or the history."""
    edges = Dependency.objects.using(alias).filter(child_location=child.location, child_id=child.id)
    first = list(edges.order_by("pk")[:MAX_PARENTS_READ])
    counts = Counter(edge.outcome or "" for edge in first)
    if len(first) == MAX_PARENTS_READ:
        counted = edges.order_by().values_list("outcome").annotate(number=Count("pk"))
        counts = Counter({outcome or "": number for outcome, number in counted})
    keys = [TaskKey(edge.parent_location, edge.parent_id) for edge in first]
    rows = rows_of({*keys}, alias)
    found = [Parent(key.id, edge.name, *rows.get(key, GONE_TASK)) for key, edge in zip(keys, first, strict=True)]
    return Parents(found, counts)


def rows_of(keys: set[TaskKey], alias: str, names: Sequence[str] = READ_OF_PARENTS) -> dict[TaskKey, Any]:
    """Return some columns of tasks, by default (queue, reference, status, result), from their tables or the history."""
    found: dict[TaskKey, Any] = {}
    for location in sorted({key.location for key in keys if is_task_table(key.location)}):
        history = TaskHistory._base_manager.using(alias).filter(location=location)
        for rows, column in ((model_named(location)._base_manager.using(alias), "pk"), (history, "task_id")):
            if ids := [key.id for key in keys - found.keys() if key.location == location]:
                read = rows.filter(**{f"{column}__in": ids}).values_list(column, *names)
                found |= {TaskKey(location, row[0]): row[1:] for row in read}
    return found


# -- enqueue -----------------------------------------------------------------------------------------------------------

members: ContextVar[Members | None] = ContextVar("dbtaskqueue_members", default=None)


class Members:
    """Takes note of the tasks that are enqueued inside the block of a batch."""

    def __init__(self, name: str, alias: str) -> None:
        self.name, self.alias = name, alias
        self.keys: dict[TaskKey, tuple[str, Related | None]] = {}  # queues, and what waits from the block's end on
        self.inner: list[TaskKey] = []  # tasks of batches inside this one

    def add(self, alias: str, queue: str, keys: Sequence[TaskKey], related: Related) -> bool:
        """Take note of tasks, in the transaction that inserted them.

        Return whether they wait from the end of the block on: the block has all of their parents, unseen by others.
        """
        if alias != self.alias:
            raise EnqueueError(
                f"The batch {self.name!r} is in the database {self.alias!r}, and a task of queue {queue!r} goes to "
                f"{alias!r}. All tasks of a batch are in one database: name it with batch(…, using=…)."
            )
        later = related.parents is not None and self.keys.keys() >= related.parents.keys()
        self.keys.update(dict.fromkeys(keys, (queue, related if later else None)))
        return later


@dataclass(frozen=True, slots=True)
class Related:
    """What the tasks of one call wait for, with the names that they have for it, and the block that takes note."""

    parents: Mapping[TaskKey, str] | None
    policy: str
    block: Members | None

    def relate(self, session: Session, queue: str, ids: Sequence[int]) -> None:
        """Let tasks wait that this transaction has inserted, and have the block take note of them."""
        keys = [TaskKey(session.location, task_id) for task_id in ids]
        later = bool(keys) and self.block is not None and self.block.add(session.connection.alias, queue, keys, self)
        if self.parents is not None and keys and not later:
            attach(session, self.edges(keys), dict.fromkeys(keys, self.policy))

    def edges(self, keys: Iterable[TaskKey]) -> list[ParentEdge]:
        """Return the waits of tasks for their parents."""
        return [ParentEdge(parent, key, name) for key in keys for parent, name in (self.parents or {}).items()]


def related_of(how: InsertOptions, settings: QueueSettings, alias: str) -> tuple[str, Related | None]:
    """Return the database of the tasks of a call, which is that of their parents, and what they are related to."""
    check_choice("on_parent_failure", how.on_parent_failure, POLICIES)
    block, parents = members.get(), None
    if how.after is not None:
        alias, parents = _checked_parents(how, settings, alias)
    return alias, None if block is None and parents is None else Related(parents, how.on_parent_failure, block)


def _checked_parents(how: InsertOptions, settings: QueueSettings, alias: str) -> tuple[str, dict[TaskKey, str]]:
    """Return the database of some parents, and their keys with the names that the child has for them."""
    after = how.after
    if isinstance(after, TaskKey) or not isinstance(after, Iterable):
        after = [after]  # what is no task is refused below
    pairs = list(after.items()) if isinstance(after, Mapping) else [("", parent) for parent in after]
    location = model_of(settings)._meta.label_lower
    aliases = {alias_of(parent) for _, parent in pairs if isinstance(parent, AbstractTask) and parent.pk}
    if settings.shards and how.using is None:
        alias = next(iter(sorted(aliases)), alias)
    if aliases - {alias}:
        raise EnqueueError(
            f"after= names tasks of the database {min(aliases - {alias})!r}, and this task goes to {alias!r}. A task "
            "can wait only for tasks of its own database: no transaction spans two."
        )
    keys: dict[TaskKey, str] = {}
    for name, parent in pairs:
        key = _key(parent, location)
        if key.location == TEMPORARY != location:
            raise EnqueueError(
                f"after= names the temporary task {key.id}. A crash of the server empties the table of temporary "
                "tasks, and this task would wait for ever. Let both queues be temporary, or none."
            )
        if name != "" and not is_name(name):
            raise EnqueueError(
                f"after= has the name {short_repr(name)} for task {key.id}: use text of at most 200 characters."
            )
        keys[key] = name
    return alias, keys


def _key(parent: object, location: str) -> TaskKey:
    if isinstance(parent, AbstractTask) and parent.pk is not None:
        return TaskKey(parent._meta.label_lower, parent.pk)
    if isinstance(parent, TaskKey):
        return parent
    if type(parent) is int and 0 < parent < 2**63:
        return TaskKey(location, parent)
    wanted = f"must be a task that enqueue() returned with an id, or the id of a task in the table {location}"
    raise refused("after", parent, f"{wanted}; or a list of them, or a mapping of names to them.")
