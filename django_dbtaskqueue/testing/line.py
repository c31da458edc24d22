"""One queue, worked on as a poller does, with the calling thread's connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, Settlement, facts, said
from django_dbtaskqueue.db.session import Row, Session, model_for
from django_dbtaskqueue.flow import checkout, enqueue, move, observe, run, settle
from django_dbtaskqueue.flow.rescue import rescue
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.flow.scan import ScanCursor
from django_dbtaskqueue.flow.settle import SettlePort
from django_dbtaskqueue.models import AbstractTask, Attempt, TaskHistory

INSTANCE = "testing"


@dataclass(frozen=True, slots=True)
class Ran:
    """One attempt: what became of it, the outcome that is stored, and what the processor raised."""

    kind: str
    outcome: Outcome | None = None
    raised: BaseException | None = None


class _Exactly:
    """A checkout strategy that takes one task, wherever in the line it stands."""

    def __init__(self, task_id: int, total_attempt: int) -> None:
        self.rows = json.dumps([{"task_id": task_id, "token": total_attempt}])

    def take(self, session: Session, line: ScanCursor, params: dict[str, Any]) -> list[Row]:
        """Take it, if it is due."""
        return session.run(session.sql.checkout_optimistic, {**params, "queue_name": line.queue, "rows": self.rows})


class Line:
    """One queue, worked on with the calling thread's connection."""

    def __init__(self, queue: str, alias: str) -> None:
        self.queue = queue
        self.alias = alias
        self.session = Session.on(alias, model_for(queue))
        self.settings = enqueue.queue_settings(queue, alias)
        self.port = SettlePort(
            alias,
            self.session.model,
            key=f"{queue}@{alias}" if self.settings.shards else queue,
            keep=self.settings.keep,
            group_retry=self.settings.group_retry,
        )
        self.tags: set[str] = set()
        signals.load()

    @property
    def tasks(self) -> QuerySet[AbstractTask]:
        """The table of the queue's tasks."""
        return self.session.model._base_manager.using(self.alias)

    def tend(self) -> list[Lease]:
        """Do what pollers do from time to time: unpark tasks, and end those whose process died on its last attempt.

        Return the latter; they are in ERROR.
        """
        self._find_tags()
        untyped = registry.find(self.queue, None) is not None
        move.unpark(self.session, self.queue, registry.payload_types(self.queue), untyped=untyped)
        return [lease for lease, _ in rescue(self.session, self.queue, self.port, keep=self.settings.keep)]

    def take(self) -> Lease | None:
        """Check out the head of the line, whatever its tag."""
        strategy = checkout.strategy_for(self.session, self.settings.strategy)
        taken = self._take(strategy)
        if taken is None and self._find_tags():
            taken = self._take(strategy)
        return taken

    def take_task(self, task: AbstractTask, processor: Processor | None, attempt: int, reenqueue_attempt: int) -> Lease:
        """Check out one task that has just been enqueued, as its ``attempt``-th attempt."""
        if not 1 <= attempt <= task.max_attempts:
            raise ValueError(f"perform(attempt={attempt}): queue {self.queue!r} has {task.max_attempts} attempts.")
        before = {"attempt": attempt - 1, "total_attempt": attempt - 1, "reenqueue_attempt": reenqueue_attempt}
        if processor is not None and processor.payload is not None:
            before["payload_type"] = codecs.type_name(processor.payload)  # type: ignore[assignment]
        self.tasks.filter(pk=task.pk).update(**before)
        lease = self._take(_Exactly(task.pk, attempt - 1))
        if lease is None:
            raise TaskQueueError(f"Queue {self.queue!r} is paused, so perform() cannot take a task. Resume it first.")
        return lease

    def _take(self, strategy: checkout.Strategy) -> Lease | None:
        taken = checkout.take(
            self.session,
            ScanCursor(self.queue, max_wait=self.settings.max_wait),
            strategy=strategy,
            poller_instance=INSTANCE,
            limit=1,
            lease=self.settings.lease,
            port=self.port,
            tags=sorted(self.tags),
        )
        observe.checked_out(taken)
        return taken[0] if taken else None

    def _find_tags(self) -> bool:
        """Look which tags tasks carry; whether there are new ones."""
        tagged = self.tasks.filter(queue=self.queue, ready_time__isnull=False, tag__isnull=False)
        before = len(self.tags)
        self.tags.update(tag for tag in tagged.values_list("tag", flat=True).distinct() if tag is not None)
        return len(self.tags) > before

    def remove(self, task: AbstractTask) -> None:
        """Take back all that the queue itself wrote for ``task``."""
        self.tasks.filter(pk=task.pk)._raw_delete(self.alias)
        for model in (TaskHistory, Attempt):
            traces = model._base_manager.using(self.alias).filter(location=self.session.location, task_id=task.pk)
            traces._raw_delete(self.alias)

    def next_due(self) -> float | None:
        """Return the seconds until the next task is due."""
        params: dict[str, Any] = {"queue_name": self.queue}
        if self.session.postgresql:
            params["priorities"] = [priority for (priority,) in self.session.run(self.session.sql.priorities, params)]
        seconds: float | None = self.session.run(self.session.sql.next_due, params)[0][0]
        return seconds

    def run(self, lease: Lease, processor: Processor | None) -> Ran:
        """Process and settle one lease."""
        refused = run.refusal(lease, processor, self.settings.expired)
        if refused is not None or processor is None:
            return self._refuse(lease, refused)
        observe.started(lease)
        returned: list[Any] = []
        with _sheltered():
            outcome = _call(lease, _watched(processor, returned))
        stored = self._store(lease, outcome)
        if stored is None:
            observe.lost(lease, lease.lost or (facts(outcome).verb if outcome is not None else ""))
            return Ran("lost")
        observe.finished(lease, stored)
        return _ran(lease, stored, returned)

    def _refuse(self, lease: Lease, refused: Settlement | None) -> Ran:
        stored = self._store(lease, refused)
        if stored is None or facts(stored).parks:
            return Ran("parked")
        observe.finished(lease, stored)
        return Ran("expired", _outcome(stored))

    def _store(self, lease: Lease, outcome: Settlement | None) -> Settlement | None:
        """Settle. Return what is stored: the outcome, or what the processor settled by itself, or nothing."""
        if outcome is not None and self._settled(lease, outcome):
            return outcome
        _, standing = settle.resolve(self.session, [lease])
        return None if standing else lease.outcome

    def _settled(self, lease: Lease, outcome: Settlement) -> bool:
        port = self.port
        return bool(
            settle.settle_surely(self.session, [(lease, outcome)], keep=port.keep, group_retry=port.group_retry)
        )


def _ran(lease: Lease, stored: Settlement, returned: list[Any]) -> Ran:
    """Return what became of a run; ``raised`` if the processor neither returned nor settled the failure by itself."""
    outcome, error = _outcome(stored), facts(stored).error
    own = stored is lease.outcome or any(outcome is value for value in returned)
    kind = facts(stored).counts_as
    kind = "completed" if kind == "deleted" else kind
    return Ran(kind, outcome, error if isinstance(error, BaseException) and not own else None)


def _outcome(stored: Settlement) -> Outcome | None:
    return cast(Outcome, said(stored)) if facts(stored).counts_as else None  # a release and a park are no attempts


def _call(lease: Lease, processor: Processor) -> Settlement | None:
    if processor.is_async:
        return async_to_sync(run.run_async)(lease, processor)
    outcome = run.run(lease, processor)
    error = None if outcome is None else facts(outcome).error
    if isinstance(error, BaseException) and not isinstance(error, Exception | SystemExit):
        raise error  # Ctrl-C, or the test framework ending the test
    return outcome


def _watched(processor: Processor, returned: list[Any]) -> Processor:
    """Return the processor so that what it returns is noted: what it did not return, it raised."""

    def noted(value: Any) -> Any:
        returned.extend(value if isinstance(value, list) else [value])  # a batch processor may return a list
        return value

    def call(task: Any) -> Any:
        return noted(processor.function(task))

    async def call_async(task: Any) -> Any:
        return noted(await processor.function(task))

    return replace(processor, function=call_async if processor.is_async else call)


@contextmanager
def _sheltered() -> Iterator[None]:
    """Keep what a processor breaks (a poller's connection would survive it) from breaking the test's transaction."""
    with ExitStack() as savepoints:
        around = [connection for connection in connections.all(initialized_only=True) if connection.in_atomic_block]
        for connection in around:
            savepoint = transaction.atomic(using=connection.alias)
            savepoint._from_testcase = True  # type: ignore[attr-defined] # atomic(durable=True) must work inside
            savepoints.enter_context(savepoint)
        yield
        for connection in around:
            if _is_broken(connection):
                transaction.set_rollback(True, using=connection.alias)


def _is_broken(connection: BaseDatabaseWrapper) -> bool:
    if connection.needs_rollback or connection.vendor != "postgresql":
        return connection.needs_rollback
    from psycopg.pq import TransactionStatus

    raw: Any = connection.connection
    return bool(raw.info.transaction_status == TransactionStatus.INERROR)
