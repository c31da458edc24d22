"""What an operator does with a queue as a whole, and its statistics. ``pull.handle`` adds the verbs of consumers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from django.db import connections, transaction
from django.db.models import Count, Q
from django.db.models.functions import Now

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.conf.queue import stored
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.states import COMPLETED, CREATED, PROCESSING, Status, sources
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of, model_for
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.groups import Groups, lock_in_order
from django_dbtaskqueue.flow.selection import Tasks, with_row_locks
from django_dbtaskqueue.models import Limit, MinuteCount, Queue, Task, UsedReference
from django_dbtaskqueue.models.control import CALL
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.pull import blocking

BATCH_TASKS = 1000  # tasks that one transaction of a verb changes
# The CREATED tasks of a queue, told apart.
WAITING = {"ready": Q(ready_time__lte=Now()), "delayed": Q(ready_time__gt=Now()), "parked": Q(ready_time__isnull=True)}
Verb = Callable[[TaskQuerySet], int]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Where a queue stands. ``by_status`` has every status and ``total``, which does not count COMPLETED tasks.

    ``waiting`` tells the CREATED tasks apart: ``ready`` (due), ``delayed`` (due later) and ``parked`` (behind the head
    of their group, or without a processor).
    ``by_call`` counts tasks by what was done to them (put, take, ack, …) since the queue was made, in all processes, by
    pollers, the pull API, operators and housekeeping.
    """

    by_status: dict[str, int]
    by_call: dict[str, int]
    waiting: dict[str, int]


@dataclass(frozen=True, slots=True)
class QueueAdmin:
    """A queue by name, in all its shards or in the database ``using``."""

    name: str
    using: str | None = None

    def delete(self, id: int) -> bool:
        """Delete a task in any status and count the deletion; its holder gets ``LeaseLost``. False: there is none."""
        return self._one(id, TaskQuerySet.purge, tuple(Status))

    def kick(self, n: int) -> int:
        """Put at most ``n`` buried tasks back in the ready order, the oldest first; return how many."""
        if n < 0:
            raise ValueError(f"kick({n}) needs a number of tasks that is not negative.")
        done = 0
        for alias in self._aliases():
            buried = self._tasks(alias).filter(status__in=sources("kick"))
            kick = partial(self._change, buried, lambda tasks: tasks.kick(BATCH_TASKS))
            while kicked := kick(limit=min(BATCH_TASKS, n - done)):
                done += kicked
        return done

    def release_all(self) -> int:
        """Make every task that is being processed ready again; the holders get ``LeaseLost``. Return how many."""
        return self._each(TaskQuerySet.release_all, sources("release_all"))

    def truncate(self) -> int:
        """Delete all tasks, in any status, and count them; holders get ``LeaseLost``. All of them or none.

        Tasks put meanwhile stay.
        """
        with self._atomic():
            return self._each(TaskQuerySet.purge, tuple(Status))

    def tasks_by_status(self, status: str) -> Iterator[Task]:
        """Iterate over the tasks in a status, oldest first, in pages, so that no long transaction is needed."""
        if status not in tuple(Status):
            raise ValueError(f"{status!r} is not a status; they are {', '.join(Status)}.")
        for alias in self._aliases():
            last = 0
            while page := list(self._tasks(alias).filter(status=status, pk__gt=last).order_by("pk")[:BATCH_TASKS]):
                yield from page  # type: ignore[misc]
                last = page[-1].pk

    def statistics(self) -> Statistics:
        """Count tasks by status and calls by name, over all shards.

        Calls are counted when they are committed; those of other processes a few seconds later, and a killed process
        takes its last few seconds with it.
        """
        by_status = dict.fromkeys(map(str, Status), 0)
        by_call: Counter[str] = Counter()
        waiting = dict.fromkeys(WAITING, 0)
        for alias in self._aliases():
            counts = self._tasks(alias).order_by().values_list("status").annotate(number=Count("pk"))
            for status, number in counts:
                by_status[status] += number
            created = self._tasks(alias).filter(status=CREATED)
            kinds = created.aggregate(**{kind: Count("pk", filter=found) for kind, found in WAITING.items()})
            waiting = {kind: number + kinds[kind] for kind, number in waiting.items()}
            by_call.update(usage.counter.counted(alias, self.name))
        total = sum(by_status.values()) - by_status[COMPLETED]
        return Statistics({**by_status, "total": total}, dict(by_call), waiting)

    # -- the queue itself --------------------------------------------------------------------------------------------

    def create(self, *, if_not_exists: bool = False, **settings: Any) -> Self:
        """Make the queue: a row with these settings as its runtime overrides, known to all processes in a second.

        Raises ``TaskQueueError`` when there is such a queue (with ``if_not_exists`` it stays as it is), and
        ``ImproperlyConfigured`` for a bad setting and for those that say where tasks live: these belong to
        ``DBTASKQUEUE``.
        """
        where = f"queue({self.name!r}).create()"
        overrides = stored(settings, where=where)
        made = False
        if not conf.is_known(self.name):
            alias = alias_for(self.name, self.using)
            _, made = Queue.objects.using(alias).get_or_create(name=self.name, defaults={"overrides": overrides})
        if not made and not if_not_exists:
            raise TaskQueueError(
                f"{where}: there is a queue {self.name!r}. Pass if_not_exists=True to use it as it is, or change the "
                "overrides of its row."
            )
        return self

    def drop(self) -> int:
        """Delete the queue's tasks, counters and row; return the number of tasks. All or nothing.

        Raises ``TaskQueueError`` while there are live leases, or threads of this process inside ``take``. A thread of
        another process that waits gets ``UnknownQueue`` at its next poll. A queue in ``DBTASKQUEUE`` or with a
        processor remains known, empty.
        """
        aliases = self._aliases()
        if number := blocking.waiters(self.name, aliases):
            raise TaskQueueError(f"Queue {self.name!r} cannot be dropped: {number} threads are waiting in take().")
        dropped = 0
        with self._atomic():
            for alias in aliases:
                self._lock(alias)
                dropped += self._each(TaskQuerySet.purge, tuple(Status), (alias,))
                Queue.objects.using(alias).filter(pk=self.name).delete()
                MinuteCount.objects.using(alias).filter(kind=CALL, queue=self.name).delete()
                for model in (UsedReference, Limit):
                    model._default_manager.using(alias).filter(queue=self.name).delete()
                transaction.on_commit(partial(usage.discard, alias, self.name), alias)
        return dropped

    def _lock(self, alias: str) -> None:
        """Lock the queue and all its tasks, so that no task can be taken, or raise for a live lease."""
        list(Queue.objects.using(alias).select_for_update().filter(pk=self.name))
        tasks = self._tasks(alias)
        self._locked(with_row_locks(tasks, wait=True))
        if live := tasks.filter(status=PROCESSING, next_process_time__gt=Now()).count():
            raise TaskQueueError(
                f"Queue {self.name!r} cannot be dropped: {live} tasks are being processed. Wait for them, or call "
                "release_all() first; their holders then get LeaseLost."
            )

    # -- what the verbs are made of ----------------------------------------------------------------------------------

    def _aliases(self) -> tuple[str, ...]:
        """Return the databases of the queue; raise ``UnknownQueue`` when there is none."""
        aliases = aliases_of(self.name, self.using)
        queue_settings(self.name, aliases[0])
        return aliases

    def _only_alias(self) -> str:
        aliases = self._aliases()
        if len(aliases) > 1:
            raise TaskQueueError(
                f"Queue {self.name!r} has shards, and each has its own ids. Say which one: "
                f"queue({self.name!r}, using={aliases[0]!r})."
            )
        return aliases[0]

    def _tasks(self, alias: str) -> TaskQuerySet:
        found: TaskQuerySet = model_for(self.name)._default_manager.using(alias).filter(queue=self.name)
        return found

    def _atomic(self) -> ExitStack:
        """A transaction on each of the queue's databases."""
        stack = ExitStack()
        for alias in self._aliases():
            stack.enter_context(transaction.atomic(using=alias))
        return stack

    def _one(self, id: int, verb: Verb, statuses: Iterable[Status]) -> bool:
        task = self._tasks(self._only_alias()).filter(pk=id, status__in=statuses)
        return bool(self._change(task, verb, wait=True))

    def _each(self, verb: Verb, statuses: Iterable[Status], aliases: Iterable[str] = ()) -> int:
        """Run a verb over all tasks in some statuses, in portions; return how many were changed."""
        done = 0
        for alias in aliases or self._aliases():
            tasks = self._tasks(alias).filter(status__in=statuses)
            ids = list(tasks.order_by("pk").values_list("pk", flat=True))
            for start in range(0, len(ids), BATCH_TASKS):
                done += self._change(tasks.filter(pk__in=ids[start : start + BATCH_TASKS]), verb, wait=True)
        return done

    def _change(self, tasks: TaskQuerySet, verb: Verb, *, limit: int = BATCH_TASKS, wait: bool = False) -> int:
        """Run a verb over the first ``limit`` tasks that can be locked."""
        with transaction.atomic(using=tasks.db):
            ids = self._locked(with_row_locks(tasks, wait=wait)[:limit])
            return verb(self._tasks(tasks.db).filter(pk__in=ids)) if ids else 0

    def _locked(self, tasks: Tasks) -> list[int]:
        """Read a selection that locks its rows, and lock their groups before them; return the ids."""

        def lock_rows() -> tuple[list[int], Groups]:
            rows = list(tasks.values_list("pk", "group_key"))
            return [pk for pk, _group in rows], {self.name: {group for _pk, group in rows if group is not None}}

        return lock_in_order(Session(connections[tasks.db], tasks.model), lock_rows)
