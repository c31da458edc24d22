"""Batches: tasks that are enqueued together, and one task that runs when all of them have ended; workflows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any, Self

from django.db import connections, transaction
from django.db.models import Count, Sum

from django_dbtaskqueue.core.context import set_inside
from django_dbtaskqueue.core.exceptions import EnqueueError, near_match
from django_dbtaskqueue.core.json import is_name
from django_dbtaskqueue.core.sql.dialects import PARENT_FAILED
from django_dbtaskqueue.core.states import COMPLETED, ERROR, POISON, Status
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of, model_for
from django_dbtaskqueue.flow import move, usage
from django_dbtaskqueue.flow.dependencies import Members, TaskKey, attach, by_table, members
from django_dbtaskqueue.flow.enqueue import enqueue
from django_dbtaskqueue.models import Batch, Hold, MinuteCount, Task
from django_dbtaskqueue.models.control import LEFT_BATCH

OnComplete = str | Mapping[str, Any]  # a queue, or the arguments of ``enqueue``


class BatchHandle:
    """A batch: how far it is, and what an operator can do to all of its tasks."""

    def __init__(self, row: Batch, alias: str) -> None:
        self.row, self.name, self.alias = row, row.name, alias
        self.callback: Task | None = None
        self.queues: Sequence[str] | None = None  # acts change tasks of these only
        self.steps: dict[str, Task] = {}  # of a workflow

    @property
    def id(self) -> int | None:
        """Known at the end of the block."""
        return self.row.pk

    @property
    def _stored(self) -> Batch:
        if self.id is None:
            raise EnqueueError(f"The batch {self.name!r} is not stored yet: it is at the end of its block.")
        return self.row

    def tasks(self) -> Iterator[Any]:
        """Yield a queryset of its tasks for each of their tables."""
        for model in sorted({*map(model_for, self._stored.queues)}, key=lambda model: model._meta.label_lower):
            tasks = model._default_manager.using(self.alias).filter(batch=self.id)
            yield tasks if self.queues is None else tasks.filter(queue__in=self.queues)

    def progress(self) -> dict[str, int]:
        """Return how many tasks are in each status, and ``total``. One that has left its table counts as it ended."""
        [counts] = counts_of([self._stored])
        return {**{str(status): counts[str(status)] for status in Status}, "total": self.row.total}

    def cancel(self) -> int:
        """End all tasks that wait or run in POISON, as an operator's *cancel* does; return how many."""
        return sum(move.change_statuses(tasks, "cancel") for tasks in self.tasks())

    def retry(self) -> int:
        """Reprocess its tasks in ERROR, and return how many. Those that a parent's end has cancelled wait again."""
        number = 0
        for tasks in self.tasks():
            with transaction.atomic(using=self.alias), move.not_overfull(tasks.filter(status__in=(ERROR, POISON))):
                self._hold_again(Session(connections[self.alias], tasks.model), tasks)
                number += move.change_statuses(tasks, "reprocess")
        return number

    def _hold_again(self, session: Session, tasks: Any) -> None:
        ended = tasks.filter(status=POISON, process_result__startswith=PARENT_FAILED).values("pk")
        held = Hold.objects.using(self.alias).filter(location=session.location, task_id__in=ended)
        ids = session.sql.dialect.array(held.order_by("task_id").values_list("task_id", flat=True))
        calls: dict[tuple[str, str], list[int]] = {}
        for task_id, queue in session.run(session.sql.hold_again, {"ids": ids}):
            calls.setdefault((queue, "kick"), []).append(task_id)
        usage.count_calls(session.connection, calls)
        move.wait_again(session, [task_id for ids in calls.values() for task_id in ids])

    def close(self, inside: Members, on_complete: OnComplete | None, outer: Members | None) -> None:
        """Store the batch at the end of its block, what its tasks wait for, and the task that runs at its end."""
        row, session = self.row, Session(connections[self.alias])
        there, inner = _found(session, inside.keys, "joining"), _found(session, inside.inner, "present")
        joined = [key for key in inside.keys if key in there]
        keys = [*joined, *(key for key in inside.inner if key in inner)]
        row.total, row.queues = len(joined), sorted({inside.keys[key][0] for key in joined})
        row.save(using=self.alias)
        for place, ids in by_table(session, joined):
            place.run(place.sql.join_batch, {"batch": row.pk, "ids": ids})
        if waits := {key: related for key in joined if (related := inside.keys[key][1])}:
            edges = [edge for key, related in waits.items() for edge in related.edges([key])]
            attach(session, edges, {key: related.policy for key, related in waits.items()})
        if on_complete is not None:
            options = {"queue": on_complete} if isinstance(on_complete, str) else dict(on_complete)
            named = {name: one for name, one in self.steps.items() if (one._meta.label_lower, one.pk) in there}
            after = named if len({*named.values()}) == len(keys) else keys  # what a step calls may enqueue, too
            self.callback = enqueue(**options, after=after, on_parent_failure="run", using=self.alias)
            if self.callback.enqueue_note and options.get("on_duplicate") != "ignore":
                words = f"{self.callback.enqueue_note} That one does not wait for the batch: give yours a reference."
                raise EnqueueError(f"on_complete of batch {row.name!r}: {words}")
            row.callback_location, row.callback_id = self.callback._meta.label_lower, self.callback.pk
            row.save(using=self.alias, update_fields=["callback_location", "callback_id"])
        if outer is not None:
            outer.inner += keys


def _found(session: Session, keys: Iterable[TaskKey], statement: str) -> set[TaskKey]:
    """Return those of some tasks that a statement answers with: a savepoint may have taken others back."""
    pairs = by_table(session, keys)
    return {TaskKey(at.location, pk) for at, ids in pairs for (pk,) in at.run(getattr(at.sql, statement), {"ids": ids})}


@contextmanager
def batch(name: str, *, on_complete: OnComplete | None = None, using: str | None = None) -> Iterator[BatchHandle]:
    """Make one batch of all tasks that are enqueued inside the block, which is a transaction.

    ``on_complete``: a queue, or a mapping of ``enqueue``'s arguments. This task is enqueued with the batch and runs
    once, when all tasks of the batch have ended; ``task.parents.counts`` says how. A batch inside another is a batch of
    its own, and the outer one waits for its tasks, too. A task that was there before (``on_duplicate="ignore"``) does
    not join. If the block raises, nothing is stored.
    """
    if not is_name(name):
        raise EnqueueError(f"batch({name!r:.80}) needs a name of 1 to 200 characters.")
    alias = alias_for("", using or None)
    handle, inside, outer = BatchHandle(Batch(name=name), alias), Members(name, alias), members.get()
    if outer is not None and outer.alias != alias:
        raise EnqueueError(f"The batch {name!r} is in database {alias!r}, and the one around it in {outer.alias!r}.")
    with transaction.atomic(using=alias):
        with set_inside(members, inside):
            yield handle
        handle.close(inside, on_complete, outer)


def chain(*steps: Mapping[str, Any], on_parent_failure: str = "hold", using: str | None = None) -> list[Task]:
    """Enqueue tasks of which each waits for the one before, in one transaction; a step is ``enqueue``'s arguments."""
    tasks: list[Task] = []
    with ExitStack() as stack:
        for step in steps:
            options = {"on_parent_failure": on_parent_failure, "using": using, **step}
            queue = options.get("queue", "")
            for alias in () if tasks else aliases_of(getattr(queue, "value", queue), options["using"]):
                stack.enter_context(transaction.atomic(using=alias))  # the others go where the first one goes
            tasks.append(enqueue(**options, after=tasks[-1] if tasks else None))
    return tasks


class Workflow:
    """Tasks with names, of which each says by name which ones it waits for. It is stored as a batch.

    The task of ``on_complete`` has all of them as its parents, by name. ``enqueue`` refuses unknown names and cycles.
    """

    def __init__(self, name: str, *, on_complete: OnComplete | None = None, using: str | None = None) -> None:
        self.name, self._on_complete, self._using = name, on_complete, using
        self._steps: dict[str, tuple[list[str], Callable[..., Task]]] = {}

    def add(self, name: str, queue: str, *args: Any, after: str | Iterable[str] = (), **options: Any) -> Self:
        """Add a task: ``name``, then ``enqueue``'s arguments; ``after`` holds names, also of tasks added later."""
        if name in self._steps:
            raise EnqueueError(f"The workflow {self.name!r} has two tasks with the name {name!r}.")
        call = partial(enqueue, queue, *args, **{"using": self._using, **options})
        self._steps[name] = [after] if isinstance(after, str) else list(after), call
        return self

    def enqueue(self) -> tuple[BatchHandle, dict[str, Task]]:
        """Enqueue all tasks in one transaction; return their batch, and the tasks by their names."""
        with batch(self.name, on_complete=self._on_complete, using=self._using) as handle:
            tasks = handle.steps
            for name in self._order():
                parents, call = self._steps[name]
                tasks[name] = call(after={parent: tasks[parent] for parent in parents} or None)
        return handle, tasks

    def _order(self) -> list[str]:
        """Return the names in an order in which each task comes after its parents."""
        for name, (parents, _call) in self._steps.items():
            for parent in parents:
                if parent not in self._steps:
                    raise EnqueueError(
                        f"In the workflow {self.name!r} the task {name!r} waits for {parent!r}, which is none of its "
                        f"tasks.{near_match(parent, self._steps)}"
                    )
        graph = {name: parents for name, (parents, _call) in self._steps.items()}
        try:
            return list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            path = " → ".join(error.args[1])
            raise EnqueueError(f"In the workflow {self.name!r} tasks wait for each other: {path}.") from None


def counts_of(rows: Sequence[Batch]) -> list[Counter[str]]:
    """Return how many tasks of each batch are in each status: one query for each of their tables."""
    found: dict[tuple[str, int], Counter[str]] = {(str(row._state.db), row.pk): Counter() for row in rows}
    for alias, model in sorted({(str(row._state.db), model_for(name)) for row in rows for name in row.queues}, key=str):
        tasks = model._base_manager.using(alias).filter(batch__in=[row.pk for row in rows if row._state.db == alias])
        for pk, status, number in tasks.order_by().values_list("batch", "status").annotate(number=Count("pk")):
            found[alias, pk][status] += number
    for alias in {str(row._state.db) for row in rows}:
        here = [row for row in rows if row._state.db == alias and row.total > found[alias, row.pk].total()]
        kinds = {f"{LEFT_BATCH}{row.pk}": row for row in here}
        left = MinuteCount.objects.using(alias).filter(kind__in=kinds).order_by().values_list("kind", "name")
        for kind, status, number in left.annotate(number=Sum("count")):
            found[alias, kinds[kind].pk][status] += number
        for row in here:  # the others have completed
            found[alias, row.pk][str(COMPLETED)] += max(0, row.total - found[alias, row.pk].total())
    return [found[str(row._state.db), row.pk] for row in rows]
