"""Decide: when a failed or reenqueued task is due again. The policies are asked here, before anything is written."""

from __future__ import annotations

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.exceptions import ReenqueueDelayMissing, SignalTimeout, StepChanged
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Fail, Failed, Outcome, Raised, Reenqueue, Settlement, checked


def decide(lease: Lease, outcome: Outcome | Settlement) -> Settlement:
    """Return what is to be written of an outcome, its result as JSON. One that is decided is returned as it is.

    Raises ``ReenqueueDelayMissing`` for a reenqueue without a delay when no policy gives one, and what ``json.kept``
    raises for a result that is not JSON.
    """
    match outcome:
        case Fail():
            return _decide_failure(lease, outcome)
        case Reenqueue(delay=None):
            outcome = _decide_reenqueue(lease, outcome)
    if isinstance(outcome, Complete | Reenqueue) and outcome.result is not None:
        object.__setattr__(outcome, "text", json_payload.kept("The result", outcome.result, conf.payload_limits()))
    return outcome


def decide_call(lease: Lease, outcome: Outcome | Settlement) -> Settlement:
    """``decide`` for what a call ended with: an outcome that cannot be decided is a failure. Never raises."""
    try:
        return decide(lease, checked(outcome))
    except Exception as error:  # such as a missing delay of a reenqueue, or a field that was altered
        return decide(lease, failure(error))


def failure(error: BaseException) -> Fail:
    """Return what an exception means: a failure, retried unless each retry would end in the same way."""
    gave_up = isinstance(error, ReenqueueDelayMissing) and error.ended
    return Raised(error, retry=not (gave_up or isinstance(error, SignalTimeout | StepChanged)))


def _decide_failure(lease: Lease, outcome: Fail) -> Failed:
    delay = retry.decide(
        outcome,
        attempt=lease.attempt,
        max_attempts=lease.max_attempts,
        policy=lease.policy or conf.policy("retry", lease.queue, lease.processor and lease.processor.policy),
    )
    return Failed(outcome, delay)


def _decide_reenqueue(lease: Lease, outcome: Reenqueue) -> Reenqueue:
    number = lease.reenqueue_attempt + 1
    declared = lease.processor and lease.processor.reenqueue
    policy = lease.port.reenqueue or conf.policy("reenqueue", lease.queue, declared)
    delay = None if policy is None else retry.next_delay(policy, number)
    if delay is None:
        raise ReenqueueDelayMissing(lease.queue, number, ended=policy is not None)
    return Reenqueue(delay, outcome.result, outcome.keep_attempts)
