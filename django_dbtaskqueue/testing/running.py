"""``drain`` and ``perform``: run tasks as a poller does, on the calling thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.exceptions import LeaseLost, TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, facts
from django_dbtaskqueue.db.session import aliases_of
from django_dbtaskqueue.flow import enqueue
from django_dbtaskqueue.flow.run import Processor, no_handler
from django_dbtaskqueue.testing.clock import advance, known_queues
from django_dbtaskqueue.testing.line import Line

MOST_RUNS = 10_000
TICK = timedelta(milliseconds=1)  # the least that every database can tell apart


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What ``drain`` did, counted in attempts; ``outcomes`` are in the order they were stored."""

    completed: int = 0
    reenqueued: int = 0
    retried: int = 0  # failed, to be tried again
    failed: int = 0  # failed, now in ERROR
    poisoned: int = 0
    expired: int = 0  # past their time to live, not run
    parked: int = 0  # nobody here processes their payload type
    lost: int = 0  # the lease was gone before an outcome could be stored
    outcomes: tuple[Outcome, ...] = ()

    @property
    def errors(self) -> list[BaseException | str]:
        """What the failed attempts failed with."""
        return [error for outcome in self.outcomes if (error := facts(outcome).error) is not None]

    def __str__(self) -> str:
        kinds = ("completed", "reenqueued", "retried", "failed", "poisoned", "expired", "parked", "lost")
        return ", ".join(f"{getattr(self, kind)} {kind}" for kind in kinds if getattr(self, kind)) or "nothing was due"


def drain(
    queue: str | None = None,
    *,
    using: str | None = None,
    limit: int = MOST_RUNS,
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
    lines = [Line(name, alias) for name in queues for alias in aliases_of(name, using)]
    counts = Counter({"failed": sum(len(line.tend()) for line in lines)})
    outcomes: list[Outcome] = []
    for line, lease in _due(lines, with_scheduled=with_scheduled):
        if counts.total() >= limit:
            raise AssertionError(_endless(lease, limit))
        ran = line.run(lease, registry.find(lease.queue, lease.payload_type))
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
    line = Line(name, aliases_of(name, using)[0])
    with transaction.atomic(using=line.alias):  # no poller may take it before us
        task = enqueue.enqueue(name, reference, payload, context=context, using=line.alias)
        lease = line.take_task(task, processor, attempt, reenqueue_attempt)
    try:
        ran = line.run(lease, processor or registry.find(lease.queue, lease.payload_type))
    finally:
        line.remove(task)
    if raising and ran.raised is not None:
        raise ran.raised
    if ran.kind == "parked":
        raise TaskQueueError(f"perform(): {no_handler(lease.queue, lease.payload_type)}.")
    if ran.outcome is None:
        raise LeaseLost(lease.id, lease.total_attempt, "settle")
    return ran.outcome


def _due(lines: list[Line], *, with_scheduled: bool) -> Iterator[tuple[Line, Lease]]:
    """Yield leases for as long as there is something due in any line."""
    more = True
    while more:
        more = False
        for line in lines:
            while (lease := line.take()) is not None:
                more = True
                yield line, lease
        more = more or (with_scheduled and _wait(lines))


def _wait(lines: list[Line]) -> bool:
    """Let time pass until the next task is due; False when there is none."""
    waits = [wait for line in lines if (wait := line.next_due()) is not None]
    for alias in {line.alias for line in lines} if waits else ():
        advance(timedelta(seconds=max(0.0, min(waits))) + TICK, using=alias)
    return bool(waits)


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


def _endless(lease: Lease, limit: int) -> str:
    return (
        f"drain() ran {limit:,} attempts and queue {lease.queue!r} still has a task due (id {lease.id}, reference "
        f"{lease.reference!r}, attempt {lease.attempt}, reenqueued {lease.reenqueue_attempt} times). Does its "
        "processor enqueue or reenqueue itself for ever? If so many are meant, pass a higher limit=."
    )
