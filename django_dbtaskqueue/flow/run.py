"""Run: a lease becomes an outcome. The life of a run, for the poller, the pull API, the test kit and Spark's workers:

1. ``refusal``: is the task expired, or is there no processor for it here? Then it does not start.
2. ``decode_task``: decode the payload and the context; what cannot be decoded fails for good.
3. ``perform_task``: call the processor in its middleware; an exception is a failure, all else an outcome it returns.
4. ``run``: the three together, decided (``decide_call``): what is to be written.

Nothing is written here, except in atomic mode: there the outcome and the processor's writes commit together.
``perform_all`` and ``run_all`` take the leases of one call, which are several for a processor with ``batch=``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

from django.db import transaction

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import codecs, context, exceptions, json as json_payload, logger, outcomes, retry, threads
from django_dbtaskqueue.core.lease import Lease, atomic_leases, current_lease
from django_dbtaskqueue.core.outcomes import Decidable, Fail, Outcome, Park, Poison, Settlement, as_outcome
from django_dbtaskqueue.core.sql.checkout import NO_HANDLER, UNREADABLE
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.flow.middleware import Call, Middleware, surrounded

DONE = outcomes.Complete()  # what nearly every processor means
NO_CONTEXT = nullcontext()
MEAN_SMOOTHING_SHARE = 0.3  # weight of the latest value in a mean
PROCESS = "process"  # as ``executor=``: child processes of the poller


@dataclass(frozen=True, slots=True, eq=False)
class Processor:
    """The user's function for one queue (and one payload type of it), and how it wants to be run."""

    queue: str
    function: Call
    payload: type | None = None
    mode: str = "separate"
    policy: Any = None
    timeout: timedelta | None = None
    is_async: bool = False
    reenqueue: Any = None  # the policy of a reenqueue without a delay
    batch: int | None = None  # the most tasks of one call
    concurrency: int | None = None  # the most calls at a time in one poller
    executor: object = None  # where it runs: an executor, what makes one, or its dotted path
    using: str | None = None  # the database it says it writes to
    row_type: str | None = None  # what rows name it by, if that is no payload class
    declared: Mapping[str, object] = field(default_factory=dict)
    middleware: Sequence[Middleware] = ()  # its own, inside that of the settings
    plain: bool = field(init=False)  # one task per call, without a limit of its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.batch is None and self.concurrency is None)

    @lru_cache(maxsize=1024)  # noqa: B019 -- emptied when the settings change
    def with_middleware(self) -> Call:
        """Return ``function`` in all its middleware; raise ``ImproperlyConfigured`` for a wrong one."""
        return surrounded(self.function, (*conf.settings().middleware, *self.middleware), is_async=self.is_async)

    def invoke(self, given: Lease | list[Lease]) -> Any:
        """Call it, or return what awaits it, in a copy of the context: what it sets there is gone after it."""
        call = self.with_middleware()
        return context.in_copy(call, given) if self.is_async else copy_context().run(call, given)

    def decode(self, lease: Lease) -> None:
        """Set the lease's payload and context. Raise ``PayloadError``, or another error, for what cannot be decoded."""
        text = lease.payload_text
        plain = None if text is None else json_payload.loads(text)
        payload = plain if self.payload is None else codecs.decode(self.payload, plain)
        given = lease.context_text
        lease.decoded_context = {} if given is None else context.mapping(json_payload.loads(given))
        lease.decoded = payload

    @property
    def name(self) -> str:
        """The dotted path of the function, for people to read."""
        return exceptions.dotted(self.function)

    @property
    def payload_type(self) -> str | None:
        """The payload type as rows name it; None for plain JSON."""
        return self.row_type if self.payload is None else codecs.type_name(self.payload)


conf.on_change(Processor.with_middleware.cache_clear)


def expiry(lease: Lease, expired: str) -> outcomes.CompleteDelete | Poison | None:
    """Return what the setting ``expired`` makes of a task that had expired at the checkout; None if it had not."""
    if lease.expire_time is None or not lease.is_expired():
        return None
    if expired == "delete":
        return outcomes.CompleteDelete()
    what = "be started" if lease.total_attempt == 1 else "go on"  # it slept, waited for a signal, or failed before
    return Poison(f"Expired at {lease.expire_time.isoformat()}, before it could {what}")


def refusal(lease: Lease, processor: Processor | None, expired: str) -> outcomes.CompleteDelete | Poison | Park | None:
    """Return what becomes of a task that is expired, unreadable, or without a processor here; None: it can start."""
    try:
        if lease.expire_text is not None and (refused := expiry(lease, expired)) is not None:
            return refused
    except ValueError as error:  # a time that the database lets pass, but Python does not
        return Park(f"{UNREADABLE}: {error}")
    return Park(no_handler(lease.queue, lease.payload_type)) if processor is None else None


def is_without_handler(refused: Settlement | None) -> bool:
    """Whether a task is refused because there is no processor for it here."""
    return refused is not None and refused.facts.parks and getattr(refused, "reason", "").startswith(NO_HANDLER)


def no_handler(queue: str, payload_type: str | None) -> str:
    """Return the parking reason of a task no processor here can take."""
    return f"{NO_HANDLER} for payload type {payload_type or 'plain JSON'} on queue {queue}"


def smoothed(mean: float | None, latest: float, share: float = 0.0) -> float:
    """Return a smoothed mean of run times, in which the latest value has at least ``share`` of the weight."""
    return latest if mean is None else mean + max(MEAN_SMOOTHING_SHARE, share) * (latest - mean)


def decode_task(lease: Lease, processor: Processor) -> Fail | None:
    """Decode payload and context. Return the failure of a task that cannot be decoded: no retry can mend it."""
    lease.processor = processor
    try:
        processor.decode(lease)
    except Exception as error:
        return outcomes.Raised(error, retry=False)
    return None


def run(lease: Lease, processor: Processor) -> Settlement | None:
    """``perform_task``, decided: what is to be written; None for nothing. Never raises."""
    outcome = perform_task(lease, processor)
    try:  # else an error's traceback, this frame and the outcome keep each other, and the payload
        return outcome if outcome is None or outcome is DONE else decide_call(lease, outcome)
    finally:
        del outcome


def run_all(leases: Sequence[Lease], processor: Processor) -> list[Settlement | None]:
    """``run`` for the leases of one call. Never raises."""
    return decide_all(leases, perform_all(leases, processor))


async def run_all_async(leases: Sequence[Lease], processor: Processor) -> list[Settlement | None]:
    """``run_all`` for an async processor; a cancellation is left to the caller."""
    return decide_all(leases, await perform_all_async(leases, processor))


def decide_all(leases: Sequence[Lease], ended: Sequence[Outcome | Settlement | None]) -> list[Settlement | None]:
    """Return what is to be written of each lease's outcome."""
    pairs = zip(leases, ended, strict=True)
    return [one if one is None or one is DONE else decide_call(lease, one) for lease, one in pairs]


def perform_task(lease: Lease, processor: Processor) -> Decidable | None:
    """Decode and call; None when the task is already settled, or its lease is lost. Never raises."""
    if (unreadable := decode_task(lease, processor)) is not None:
        return unreadable
    with context.restored(lease.context) if lease.decoded_context or context.ambient.get() else NO_CONTEXT:
        return _call(lease, processor)


def _call(lease: Lease, processor: Processor) -> Decidable | None:
    token, forks = current_lease.set(lease), threads.forks
    try:
        if processor.mode == "atomic":
            _call_atomic([lease], processor)
            return None
        value = processor.invoke(lease)
        if forks != threads.forks:
            threads.end_copy(None)
        outcome = DONE if value is None else as_outcome(value)
    except BaseException as error:
        if forks != threads.forks:
            threads.end_copy(error)
        return _failed(lease, error)
    finally:
        current_lease.reset(token)
    return None if lease.settled else outcome


class ProcessorTransaction(transaction.Atomic):
    """A processor's transaction, in which a task may sleep."""

    is_of_processor = True


def _call_atomic(leases: list[Lease], processor: Processor) -> None:
    """The processor's writes and the settle commit together, or neither does."""
    token = atomic_leases.set(leases)
    try:
        with ProcessorTransaction(leases[0].port.alias, savepoint=True, durable=False):
            try:
                with threads.NoCopies():
                    value = processor.invoke(leases[0] if processor.batch is None else leases)
                values = [value] if processor.batch is None else _each(value, leases)
                ended: list[Decidable] = [as_outcome(own) for own in values]
            except exceptions.TaskSuspended as suspended:  # what it has done so far is committed with its steps
                ended = [suspended.outcome] * len(leases)
            if pairs := [pair for pair in zip(leases, ended, strict=True) if _is_open(pair[0])]:
                leases[0].port.settle_all(pairs, last=len(pairs) == 1)
    finally:
        atomic_leases.reset(token)


def _is_open(lease: Lease) -> bool:
    """Whether an atomic processor has left its task to be settled; raise ``LeaseLost`` again if it hushed that up."""
    if lease.lost:
        raise lease.gone(lease.lost)
    return not lease.touched or lease.port.stands(lease)


async def perform_async(lease: Lease, processor: Processor) -> Decidable | None:
    """``perform_task`` for an async processor; a cancellation is left to the caller."""
    if (unreadable := decode_task(lease, processor)) is not None:
        return unreadable
    with context.restored(lease.context) if lease.decoded_context or context.ambient.get() else NO_CONTEXT:
        token = current_lease.set(lease)
        try:
            with threads.NoCopies():
                value = await processor.invoke(lease)
            outcome = DONE if value is None else as_outcome(value)
        except (Exception, exceptions.TaskSuspended) as error:
            return _failed(lease, error)
        finally:
            current_lease.reset(token)
    return None if lease.settled else outcome


def _failed(lease: Lease, error: BaseException) -> Decidable | None:
    """Return the outcome of a call that raised; None when the task is settled all the same, or lost."""
    if lease.settled:
        return None
    if isinstance(error, exceptions.TaskSuspended):
        return error.outcome
    # A processor may handle other leases; only the loss of its own means there is nothing left to settle.
    own = lease.id, lease.total_attempt
    if isinstance(error, exceptions.LeaseLost) and (error.task_id, error.total_attempt) == own:
        return None
    liveness.note_failure(error, lease.port.alias)
    return failure_of(error)


# -- the leases of one call, which are several for a processor with ``batch=`` -----------------------------------------


def perform_all(leases: Sequence[Lease], processor: Processor) -> list[Decidable | None]:
    """``perform_task`` for the leases of one call, in order, not decided yet. Never raises.

    Of a batch processor, an exception fails each task of the call by its own budget. In atomic mode the call is one
    transaction; when it fails, each task is called alone in a transaction of its own, and only those that fail then
    have failed. What cannot be decoded is left out of the call.
    """
    if processor.batch is None:
        return [perform_task(lease, processor) for lease in leases]
    ended, readable = _sorted_out(leases, processor)
    if readable:
        call = _atomic_batch if processor.mode == "atomic" else _separate_batch
        with context.only({}):
            ended.update(zip(readable, call(readable, processor), strict=True))
    return list(ended.values())


async def perform_all_async(leases: Sequence[Lease], processor: Processor) -> list[Decidable | None]:
    """``perform_all`` for an async processor; a cancellation is left to the caller."""
    if processor.batch is None:
        return [await perform_async(lease, processor) for lease in leases]
    ended, readable = _sorted_out(leases, processor)
    if readable:
        with context.only({}):
            try:
                with threads.NoCopies():
                    shared = _shared_out(await processor.invoke(readable), readable)
            except Exception as error:
                shared = [_failed(lease, error) for lease in readable]
        ended.update(zip(readable, shared, strict=True))
    return list(ended.values())


def _sorted_out(leases: Iterable[Lease], processor: Processor) -> tuple[dict[Lease, Decidable | None], list[Lease]]:
    """Decode; return the outcomes of all, None of those that can be decoded, and these."""
    prepared: dict[Lease, Decidable | None] = {lease: decode_task(lease, processor) for lease in leases}
    return prepared, [lease for lease, outcome in prepared.items() if outcome is None]


def _separate_batch(leases: list[Lease], processor: Processor) -> Sequence[Decidable | None]:
    try:
        with threads.NoCopies():
            return _shared_out(processor.invoke(leases), leases)
    except BaseException as error:
        return [_failed(lease, error) for lease in leases]


def _shared_out(value: Any, leases: list[Lease]) -> list[Decidable | None]:
    """Return each task's outcome: its own of a list, or the one for all; None where it is settled already."""
    return [None if lease.settled else as_outcome(own) for lease, own in zip(leases, _each(value, leases), strict=True)]


def _each(value: Any, leases: list[Lease]) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * len(leases)
    if len(value) != len(leases):
        raise exceptions.TaskQueueError(
            f"A batch processor of queue {leases[0].queue!r} got {len(leases)} tasks and returned {len(value)} "
            "outcomes. Return one outcome for all of them, or a list with one for each, in order; a list that is the "
            "result of all is Complete([...])."
        )
    return value


def _atomic_batch(leases: list[Lease], processor: Processor) -> Sequence[Decidable | None]:
    try:
        _call_atomic(leases, processor)
        return [None] * len(leases)
    except BaseException as error:
        if len(leases) == 1 or not isinstance(error, Exception):
            return [_failed(lease, error) for lease in leases]
        logger.info("A batch of %s tasks of %s failed, each runs alone: %s", len(leases), leases[0].queue, error)
    for lease in leases:
        lease.touched = False  # whatever they settled is rolled back
    return [_atomic_batch([lease], processor)[0] for lease in leases]


# -- decide: the policies are asked before anything is written ---------------------------------------------------------


def decide(lease: Lease, outcome: Outcome | Settlement) -> Settlement:
    """Return what is to be written of an outcome, its result as JSON. One that is decided is returned as it is.

    Raises ``ReenqueueDelayMissing`` for a reenqueue without a delay when no policy gives one, and what ``json.kept``
    raises for a result that is not JSON.
    """
    match outcome:
        case Fail():
            policy = lease.port.retry or conf.policy("retry", lease.queue, lease.processor and lease.processor.policy)
            attempts = {"attempt": lease.attempt, "max_attempts": lease.max_attempts}
            return outcomes.Failed(outcome, retry.retry_delay(outcome, **attempts, policy=policy))
        case outcomes.Reenqueue(delay=None):
            number, declared = lease.reenqueue_attempt + 1, lease.processor and lease.processor.reenqueue
            policy = lease.port.reenqueue or conf.policy("reenqueue", lease.queue, declared)
            delay = None if policy is None else retry.next_delay(policy, number)
            if delay is None:
                raise exceptions.ReenqueueDelayMissing(lease.queue, number, ended=policy is not None)
            outcome = outcomes.Reenqueue(delay, outcome.result, outcome.keep_attempts)
    if isinstance(outcome, outcomes.WITH_RESULT) and outcome.result is not None:
        text = json_payload.kept("The result", outcome.result, conf.settings().payload_limits)
        object.__setattr__(outcome, "text", text)
    return outcome


def decide_call(lease: Lease, outcome: Outcome | Settlement) -> Settlement:
    """``decide`` for what a call ended with: an outcome that cannot be decided is a failure. Never raises."""
    try:
        return decide(lease, outcomes.checked(outcome))
    except Exception as error:  # such as a missing delay of a reenqueue, or a field that was altered
        return decide(lease, failure_of(error))


def failure_of(error: BaseException) -> Fail:
    """Return what an exception means: a failure, retried unless each retry would end in the same way."""
    gave_up = isinstance(error, exceptions.ReenqueueDelayMissing) and error.ended
    lasting = exceptions.SignalTimeout | exceptions.StepChanged
    return outcomes.Raised(error, retry=not (gave_up or isinstance(error, lasting)))
