"""Process: a lease becomes an outcome. Decode, call the processor, decide; nothing is written here but in atomic mode.

An exception means failure and nothing else; every other wish of a processor is an outcome it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction

from django_dbtaskqueue import codecs, conf
from django_dbtaskqueue import payload as json_payload
from django_dbtaskqueue.exceptions import LeaseLost, PayloadError
from django_dbtaskqueue.lease import Lease
from django_dbtaskqueue.outcomes import OUTCOMES, Complete, CompleteDelete, Fail, Outcome, Poison

current_lease: ContextVar[Lease | None] = ContextVar("dbtaskqueue_lease", default=None)


@dataclass(frozen=True, slots=True)
class Processor:
    """The user's function for one queue (and one payload type of it), and how it wants to be run."""

    queue: str
    function: Callable[[Lease], Any]
    payload: type | None = None
    mode: str = "separate"
    policy: Any = None
    timeout: timedelta | None = None
    is_async: bool = False

    @property
    def name(self) -> str:
        """The dotted path of the function, for people to read."""
        function = self.function
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def decode(lease: Lease, processor: Processor) -> None:
    """Fill in the payload, as the processor's type, and the context. Raise ``PayloadError``."""
    text = lease.payload_text
    plain = None if text is None else json_payload.loads(text)
    lease.payload = plain if processor.payload is None else codecs.decode(processor.payload, plain)
    if lease.context_text is not None:
        lease.context = json_payload.loads(lease.context_text)
    lease.policy = lease.policy or conf.retry_policy(lease.queue, processor.policy)


def expiry(lease: Lease, expired: str) -> Outcome | None:
    """Return what becomes of a task whose time to live was over when it was taken; None while it lives."""
    if lease.expire_time is None or lease.expire_time > lease.start_time:
        return None
    if expired == "delete":
        return CompleteDelete()
    return Poison(f"Expired at {lease.expire_time.isoformat()}, before it could be started")


def decide(value: Any) -> Outcome:
    """Return what a processor's return value means: an outcome itself, anything else is a result."""
    return value if isinstance(value, OUTCOMES) else Complete(value)


def prepare(lease: Lease, processor: Processor) -> Outcome | None:
    """Decode; return the outcome of a task whose payload cannot be: ERROR at once, for no retry can mend it."""
    try:
        decode(lease, processor)
    except PayloadError as error:
        return Fail(error, retry=False)
    except Exception as error:
        return Fail(error, retry=False)
    return None


def perform(lease: Lease, processor: Processor) -> Outcome | None:
    """Run one task to its outcome; None when it is already settled. Never raises."""
    unreadable = prepare(lease, processor)
    if unreadable is not None:
        return unreadable
    token = current_lease.set(lease)
    try:
        if processor.mode == "atomic":
            _perform_atomic(lease, processor)
            return None
        outcome = decide(processor.function(lease))
    except LeaseLost as lost:
        return None if _is_own(lost, lease) else Fail(lost)
    except BaseException as error:
        return None if lease.settled else Fail(error)
    finally:
        current_lease.reset(token)
    return None if lease.settled else outcome


def _perform_atomic(lease: Lease, processor: Processor) -> None:
    """The processor's writes and the settle commit together, or neither does."""
    with transaction.atomic(using=lease.door.alias):
        outcome = decide(processor.function(lease))
        if not lease.touched:
            lease.door.settle(lease, outcome)


async def perform_async(lease: Lease, processor: Processor) -> Outcome | None:
    """``perform`` for an async processor; a cancellation is left to the caller."""
    unreadable = prepare(lease, processor)
    if unreadable is not None:
        return unreadable
    token = current_lease.set(lease)
    try:
        outcome = decide(await processor.function(lease))
    except LeaseLost as lost:
        return None if _is_own(lost, lease) else Fail(lost)
    except Exception as error:
        return None if lease.settled else Fail(error)
    finally:
        current_lease.reset(token)
    return None if lease.settled else outcome


def _is_own(lost: LeaseLost, lease: Lease) -> bool:
    """A processor may handle other leases; only the loss of its own means there is nothing left to settle."""
    return lost.task_id == lease.id and lost.total_attempt == lease.total_attempt
