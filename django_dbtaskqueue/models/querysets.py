"""The manager and queryset of a task table. Reads are made here; the verbs are functions of ``flow/`` and ``pull/``.

Those import the models. Each verb therefore imports its function when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Unpack, cast

from django.db import models
from django.db.models.functions import Now

from django_dbtaskqueue.core.states import TERMINAL, Status

if TYPE_CHECKING:
    from django.db.models.expressions import Combinable
    from typing_extensions import TypeVar

    from django_dbtaskqueue.core.columns import EnqueueManyOptions, EnqueueOptions
    from django_dbtaskqueue.core.lease import Lease
    from django_dbtaskqueue.flow.enqueue_many import EnqueueReport
    from django_dbtaskqueue.models import AbstractTask, Task

    T = TypeVar("T", bound=AbstractTask, default=AbstractTask)

__all__ = ["TaskManager", "TaskQuerySet"]


class Waiting:
    """A task that ``enqueue`` returned, or another instance of it, can be waited for."""

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Wait until the task has ended, and return its result.

        ``timeout`` (seconds or a ``timedelta``; None: without end) raises ``TimeoutError``; the task goes on.
        ``TaskFailed`` is raised for a task in ERROR or POISON, with its failure, and ``TaskGone`` for one that has left
        the table and the history. Inside a transaction it is refused, because the task would not start before its end.
        On PostgreSQL the end of the task wakes the thread. It keeps a thread, and in a processor a slot, all the time.
        """
        from django_dbtaskqueue.pull import blocking

        return blocking.wait(cast("AbstractTask", self), timeout)

    async def await_result(self, timeout: float | timedelta | None = None) -> Any:
        """``wait`` for a coroutine, which keeps no thread."""
        from django_dbtaskqueue.pull import blocking

        return await blocking.await_result(cast("AbstractTask", self), timeout)


class TaskSelection:
    """The operator's verbs over a selection of tasks, which is a queryset or the manager ``Task.objects``.

    Each verb is atomic, changes only rows whose status allows it, and returns the number of rows changed.
    """

    def _change(self, verb: str) -> int:
        from django_dbtaskqueue.flow import move

        return move.change_statuses(cast("Any", self), verb)

    def reprocess(self) -> int:
        """ERROR → CREATED, due now, with a new budget of attempts."""
        return self._change("reprocess")

    def mark_poison(self) -> int:
        """ERROR → POISON."""
        return self._change("mark_poison")

    def unpoison(self) -> int:
        """POISON → ERROR."""
        return self._change("unpoison")

    def kick(self, n: int) -> int:
        """POISON → CREATED for at most ``n`` tasks, the oldest first."""
        from django_dbtaskqueue.flow import move

        return move.kick(cast("Any", self), n)

    def cancel(self) -> int:
        """CREATED or PROCESSING → POISON. A running task loses its lease, and its poller tells it to stop."""
        return self._change("cancel")

    def run_now(self) -> int:
        """CREATED tasks become due now. Those without a processor stay parked, and are not counted."""
        return self._change("run_now")

    def release_all(self) -> int:
        """PROCESSING → CREATED, due now. Revokes live leases: their holders get ``LeaseLost``."""
        return self._change("release_all")

    def purge(self) -> int:
        """Delete the tasks and count the deletions. Revokes live leases."""
        return self._change("delete")

    def housekeep(self, *, older_than: timedelta, statuses: Iterable[str] = TERMINAL, to: str = "history") -> int:
        """Move finished tasks of that age or older to the history, or delete and count them (``to="delete"``)."""
        from django_dbtaskqueue.flow import retention

        return retention.housekeep(cast("Any", self), older_than=older_than, statuses=statuses, to=to)


class TaskQuerySet(TaskSelection, models.QuerySet["T"]):
    """Tasks, and the operator's verbs over a selection of them."""

    def due(self) -> TaskQuerySet[T]:
        """Tasks a checkout could take now, in ready order: due, attempts left, and not under a live lease."""
        return self.filter(
            ready_time__lte=Now(), next_process_time__lte=Now(), attempt__lt=models.F("max_attempts")
        ).order_by("priority", "ready_time", "id")

    def stale(self) -> TaskQuerySet[T]:
        """Tasks whose lease ran out: the next checkout takes them, or rescue ends them if no attempt is left."""
        return self.filter(status=Status.PROCESSING, next_process_time__lte=Now())

    def finished(self) -> TaskQuerySet[T]:
        """Tasks in a terminal status."""
        return self.filter(status__in=TERMINAL)


if TYPE_CHECKING:

    class _Manager(TaskSelection, models.Manager[T]):
        """What ``from_queryset`` makes, as type checkers without Django's plugin must be told."""

        def get_queryset(self) -> TaskQuerySet[T]: ...
        def all(self) -> TaskQuerySet[T]: ...
        def none(self) -> TaskQuerySet[T]: ...
        def using(self, alias: str | None) -> TaskQuerySet[T]: ...
        def filter(self, *args: object, **kwargs: object) -> TaskQuerySet[T]: ...
        def exclude(self, *args: object, **kwargs: object) -> TaskQuerySet[T]: ...
        def order_by(self, *field_names: str | Combinable) -> TaskQuerySet[T]: ...
        def due(self) -> TaskQuerySet[T]: ...
        def stale(self) -> TaskQuerySet[T]: ...
        def finished(self) -> TaskQuerySet[T]: ...

else:
    _Manager = models.Manager.from_queryset(TaskQuerySet)


class TaskManager(_Manager["T"]):
    """``Task.objects``: the queue's verbs on the model."""

    def enqueue(
        self, queue: str, reference: str | None = None, payload: object = None, **options: Unpack[EnqueueOptions]
    ) -> Task:
        """Insert a task on the caller's connection; see ``django_dbtaskqueue.enqueue``."""
        from django_dbtaskqueue.flow.enqueue import enqueue

        options.setdefault("using", self._db)
        return enqueue(queue, reference, payload, **options)

    def enqueue_many(self, queue: str, items: Iterable[object], **options: Unpack[EnqueueManyOptions]) -> EnqueueReport:
        """Insert many tasks in one transaction; see ``django_dbtaskqueue.enqueue_many``."""
        from django_dbtaskqueue.flow.enqueue_many import enqueue_many

        options.setdefault("using", self._db)
        return enqueue_many(queue, items, **options)

    def checkout(
        self,
        queue: str,
        *,
        poller_instance: str,
        limit: int = 1,
        lease: timedelta | None = None,
        tags: Sequence[str] = (),
    ) -> list[Lease]:
        """Take at most ``limit`` due tasks under a lease, in ready order, charging an attempt each.

        Tasks with a tag are taken only when it is among ``tags``. If the queue has shards, a call takes from one.

        Atomic: no task is ever handed to two callers while a lease lives. The tasks' payloads are decoded.
        """
        from django_dbtaskqueue.pull.leases import checkout

        return checkout(queue, poller_instance=poller_instance, limit=limit, lease=lease, tags=tags, using=self._db)
