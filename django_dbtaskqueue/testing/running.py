"""``drain`` and ``perform``: run tasks as a poller does, on the calling thread and its connection."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, cast

from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.models import QuerySet

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.exceptions import LeaseLost, TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, Settlement, said
from django_dbtaskqueue.db.session import Row, Session, aliases_of, model_for
from django_dbtaskqueue.flow import checkout, dependencies, enqueue, move, observe, run, settle
from django_dbtaskqueue.flow.rescue import rescue
from django_dbtaskqueue.flow.run import Processor, no_handler
from django_dbtaskqueue.flow.scan import ScanCursor
from django_dbtaskqueue.flow.settle_port import SettlePort
from django_dbtaskqueue.models import AbstractTask, Attempt, Step, TaskHistory
from django_dbtaskqueue.pull import leases
from django_dbtaskqueue.testing.clock import advance, known_queues

TEST_INSTANCE = "testing"
MAX_RUNS = 10_000
CLOCK_TICK = timedelta(milliseconds=1)  # every database can tell two times apart that differ by this much


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What ``drain`` did, counted in attempts; ``outcomes`` are in the order they were stored."""

    completed: int = 0
    reenqueued: int = 0
    retried: int = 0  # failed, to be tried again
    failed: int = 0  # failed, now in ERROR
    poisoned: int = 0
    expired: int = 0  # past their time to live, not run
    parked: int = 0  # no processor here takes their payload type
    suspended: int = 0  # began to sleep, or to wait for a signal
    lost: int = 0  # the lease was gone before an outcome could be stored
    outcomes: tuple[Outcome, ...] = ()

    @property
    def errors(self) -> list[BaseException | str]:
        """What the failed attempts failed with."""
        return [error for outcome in self.outcomes if (error := outcome.facts.error) is not None]

    def __str__(self) -> str:
        counts = {field.name: getattr(self, field.name) for field in fields(self)[:-1]}
        return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number) or "nothing was due"


def drain(
    queue: str | None = None,
    *,
    using: str | None = None,
    limit: int = MAX_RUNS,
    with_scheduled: bool = False,
    raising: bool = False,
) -> DrainReport:
    """Run what is due in ``queue`` (None: in every known queue), and what that enqueues, until nothing is due.

    One task at a time, in the order (priority, ready_time, id), each settled before the next is taken.
    ``with_scheduled=True`` goes on with what is due later, letting time pass (``advance``) up to the next task.
    A failed attempt is stored as a poller would store it; ``raising=True`` then raises the processor's exception.
    Raises ``AssertionError`` naming the queue when there is more to do after ``limit`` attempts.
    """
    queues = [queue] if queue is not None else known_queues()
    runners = [QueueRunner(name, alias) for name in queues for alias in aliases_of(name, using)]
    counts = Counter({"failed": sum(len(runner.unpark_and_rescue()) for runner in runners)})
    outcomes: list[Outcome] = []
    for runner, lease in _due(runners, with_scheduled=with_scheduled):
        if counts.total() >= limit:
            raise AssertionError(
                f"drain() ran {limit:,} attempts and queue {lease.queue!r} still has a task due (id {lease.id}, "
                f"reference {lease.reference!r}, attempt {lease.attempt}, reenqueued {lease.reenqueue_attempt} times). "
                "Does its processor enqueue or reenqueue itself without end? If it should, pass a higher limit=."
            )
        ran = runner.run(lease, registry.find(lease.queue, lease.payload_type))
        counts[ran.kind] += 1
        outcomes += [] if ran.outcome is None else [ran.outcome]
        if raising and ran.raised is not None:
            raise ran.raised
    return DrainReport(**counts, outcomes=tuple(outcomes))


def perform(
    queue: Any,
    payload: Any = None,
    *,
    reference: str | None = None,
    attempt: int = 1,
    reenqueue_attempt: int = 0,
    context: Mapping[str, Any] | None = None,
    raising: bool = True,
    using: str | None = None,
) -> Outcome:
    """Run one payload through its whole round trip (enqueue, checkout, decode, processor, settle); return the outcome.

    ``queue`` is a queue's name or its processor. The task is a real row, gone afterwards; what the processor wrote
    stays. ``attempt`` is the number the processor sees; the last of the budget fails for good.
    What the processor raises is raised here, unless ``raising=False``; an outcome it returns never is. Raises
    ``LeaseLost`` when the lease was gone before an outcome could be stored.
    """
    processor = _processor(queue)
    name = queue if processor is None else processor.queue
    runner = QueueRunner(name, aliases_of(name, using)[0])
    with transaction.atomic(using=runner.alias):  # no poller may take it before us
        task = enqueue.enqueue(name, reference, payload, context=context, using=runner.alias)
        lease = runner.take_task(task, processor, attempt, reenqueue_attempt)
    try:
        ran = runner.run(lease, processor or registry.find(lease.queue, lease.payload_type))
    finally:
        runner.delete_traces(task)
    if raising and ran.raised is not None:
        raise ran.raised
    if ran.kind == "parked":
        raise TaskQueueError(f"perform(): {no_handler(lease.queue, lease.payload_type)}.")
    if ran.kind == "suspended":
        raise TaskQueueError(
            "perform(): the processor called task.sleep() or task.wait_for(), and perform() runs one attempt. Enqueue "
            "the task, and use drain(with_scheduled=True), advance() and signal()."
        )
    if ran.outcome is None:
        raise LeaseLost(lease.id, lease.total_attempt, "settle")
    return ran.outcome


def _due(runners: list[QueueRunner], *, with_scheduled: bool) -> Iterator[tuple[QueueRunner, Lease]]:
    """Yield leases for as long as there is something due in any runner."""
    more, swept = True, False
    while more:
        wait = _wait(runners) if with_scheduled else None  # asked first: a task may become due meanwhile
        more = False
        for runner in runners:
            while lease := runner.take():
                more, swept = True, False
                yield runner, lease
        if not more and not swept:  # in a test's transaction nothing is committed, so no end of a task was told
            more = swept = True
            for runner in runners:
                dependencies.sweep(runner.session)
                dependencies.sweep_missing(runner.session, 0)
        elif not more and wait is not None:
            more = True
            for alias in {runner.alias for runner in runners}:
                advance(wait, using=alias)


def _wait(runners: list[QueueRunner]) -> timedelta | None:
    """Return the time until the next task is due; None when none is scheduled for later."""
    waits = [wait for runner in runners if (wait := leases.next_due(runner.queue, runner.alias)) is not None]
    return timedelta(seconds=max(0.0, min(waits))) + CLOCK_TICK if waits else None


def _processor(target: Any) -> Processor | None:
    """Return the one processor that ``target`` (a function or class) is registered as; None for a queue's name."""
    if isinstance(target, str):
        return None
    known = [processor for queue in registry.queues() for processor in registry.processors(queue)]
    found = [processor for processor in known if _is_of(processor.function, target)]
    if len(found) != 1:
        queues = ", ".join(repr(processor.queue) for processor in found) or "no queue"
        name = getattr(target, "__qualname__", repr(target))
        raise TaskQueueError(f"perform(): {name} is the processor of {queues}; give perform() the queue's name.")
    return found[0]


def _is_of(function: Callable[[Lease], Any], target: Any) -> bool:
    owner = getattr(function, "__self__", function)
    return function == target or (isinstance(target, type) and isinstance(owner, target))


@dataclass(frozen=True, slots=True)
class Ran:
    """One attempt: what became of it, the outcome that is stored, and what the processor raised."""

    kind: str
    outcome: Outcome | None = None
    raised: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Exactly:
    """A checkout strategy that takes one task, wherever it stands in the ready order."""

    rows: str

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        return session.run(session.sql.checkout_optimistic, {**params, "queue_name": cursor.queue, "rows": self.rows})


class QueueRunner:
    """Works on one queue as a poller does, with the calling thread's connection."""

    def __init__(self, queue: str, alias: str) -> None:
        self.queue = queue
        self.alias = alias
        self.session = Session.on(alias, model_for(queue))
        self.tasks: QuerySet[AbstractTask] = self.session.model._base_manager.using(alias)  # of the table
        self.settings = settings = queue_settings(queue, alias)
        self.port = leases.port_of(SettlePort, queue, alias, settings)
        self.tags: set[str] = set()
        signals.load()

    def unpark_and_rescue(self) -> list[Lease]:
        """Do what pollers do from time to time: unpark tasks, and end those whose process died on its last attempt.

        Return the latter; they are in ERROR.
        """
        self._find_tags()
        types, untyped = registry.payload_types(self.queue), registry.find(self.queue, None) is not None
        move.unpark(self.session, self.queue, types, untyped=untyped)
        return [lease for lease, *_ in rescue(self.session, self.queue, self.port, keep=self.settings.keep)]

    def take(self) -> Lease | None:
        """Check out the first task that is due, whatever its tag."""
        taken = self._take()
        return self._take() if taken is None and self._find_tags() else taken

    def take_task(self, task: AbstractTask, processor: Processor | None, attempt: int, reenqueue_attempt: int) -> Lease:
        """Check out one task that has just been enqueued, as its ``attempt``-th attempt."""
        if not 1 <= attempt <= task.max_attempts:
            raise ValueError(f"perform(attempt={attempt}): queue {self.queue!r} has {task.max_attempts} attempts.")
        before = {"attempt": attempt - 1, "total_attempt": attempt - 1, "reenqueue_attempt": reenqueue_attempt}
        if processor is not None and processor.payload is not None:
            before["payload_type"] = codecs.type_name(processor.payload)  # type: ignore[assignment]
        self.tasks.filter(pk=task.pk).update(**before)
        lease = self._take(_Exactly(json.dumps([{"task_id": task.pk, "token": attempt - 1}])))
        if lease is None:
            raise TaskQueueError(f"Queue {self.queue!r} is paused, so perform() cannot take a task. Resume it first.")
        return lease

    def _take(self, strategy: checkout.Strategy | None = None) -> Lease | None:
        tags = sorted(self.tags)
        taken = leases.take(
            self.queue, self.port, self.settings, poller_instance=TEST_INSTANCE, tags=tags, strategy=strategy,
            limited=False,
        )  # fmt: skip
        observe.checked_out(taken, [registry.find(lease.queue, lease.payload_type) for lease in taken])
        return taken[0] if taken else None

    def _find_tags(self) -> bool:
        """Look which tags tasks carry; whether there are new ones."""
        tagged = self.tasks.filter(queue=self.queue, ready_time__isnull=False, tag__isnull=False)
        before = len(self.tags)
        self.tags.update(map(str, tagged.values_list("tag", flat=True).distinct()))
        return len(self.tags) > before

    def delete_traces(self, task: AbstractTask) -> None:
        """Take back all that the queue itself wrote for ``task``."""
        self.tasks.filter(pk=task.pk)._raw_delete(self.alias)
        for model in (TaskHistory, Attempt, Step):
            traces = model._base_manager.using(self.alias).filter(location=self.session.location, task_id=task.pk)
            traces._raw_delete(self.alias)

    def run(self, lease: Lease, processor: Processor | None) -> Ran:
        """Process and settle one lease."""
        leases.apply_retry_override(lease, self.settings)
        refused = run.refusal(lease, processor, self.settings.expired)
        if refused is not None or processor is None:
            return self._refuse(lease, refused)
        observe.started(lease, processor)
        returned: list[Any] = []
        with _sheltered():
            outcome = _call(lease, _watched(processor, returned))
        stored = self._store(lease, outcome)
        if stored is None:
            lease.lost = lease.lost or (outcome.facts.verb if outcome is not None else "")
        observe.ended(lease, lease.result_of(stored))
        if stored is None or not stored.facts.counts_as:
            return Ran("lost" if stored is None else "suspended")
        final, error, kind = _outcome(stored), stored.facts.error, stored.facts.counts_as
        # A failure that the processor returned, or settled by itself, was not raised.
        own = stored is lease.outcome or any(final is value for value in returned)
        raised = error if isinstance(error, BaseException) and not own else None
        return Ran("completed" if kind == "deleted" else kind, final, raised)

    def _refuse(self, lease: Lease, refused: Settlement | None) -> Ran:
        stored = self._store(lease, refused)
        if stored is None or stored.facts.parks:
            return Ran("parked")
        observe.ended(lease, lease.result_of(stored))
        return Ran("expired", _outcome(stored))

    def _store(self, lease: Lease, outcome: Settlement | None) -> Settlement | None:
        """Settle. Return what is stored: the outcome, or what the processor settled by itself, or nothing."""
        keep, group_retry = self.port.keep, self.port.group_retry
        if outcome and settle.settle_surely(self.session, [(lease, outcome)], keep=keep, group_retry=group_retry):
            return outcome
        _, held = settle.resolve(self.session, [lease])
        return None if held else lease.outcome


def _outcome(stored: Settlement) -> Outcome | None:
    return cast(Outcome, said(stored)) if stored.facts.counts_as else None  # a release and a park are no attempts


def _call(lease: Lease, processor: Processor) -> Settlement | None:
    if processor.is_async:
        return async_to_sync(run.run_async)(lease, processor)
    outcome = run.run(lease, processor)
    error = None if outcome is None else outcome.facts.error
    if isinstance(error, BaseException) and not isinstance(error, Exception | SystemExit):
        raise error  # Ctrl-C, or the test framework ending the test
    return outcome


def _watched(processor: Processor, returned: list[Any]) -> Processor:
    """Return the processor so that what it returns is noted: what it did not return, it raised."""

    surrounded = processor.with_middleware()

    def call(task: Any) -> Any:
        value = surrounded(task)
        returned.extend(value if isinstance(value, list) else [value])  # a batch processor may return a list
        return value

    async def call_async(task: Any) -> Any:
        value = await surrounded(task)
        returned.extend(value if isinstance(value, list) else [value])
        return value

    watched = replace(processor)
    object.__setattr__(watched, "call", call_async if processor.is_async else call)
    return watched


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
            raw: Any = connection.connection
            if connection.needs_rollback or connection.vendor != "postgresql":
                continue
            if raw.info.transaction_status.name == "INERROR":
                transaction.set_rollback(True, using=connection.alias)
