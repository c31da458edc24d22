"""When a task that was reenqueued without a delay is due: the failure policies' family, asked for another reason."""

from __future__ import annotations

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.exceptions import ReenqueueDelayMissing
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, Reenqueue


def timed(lease: Lease, outcome: Outcome) -> Outcome:
    """Return the outcome; a reenqueue without a delay with the one its policy gives.

    Raises ``ReenqueueDelayMissing`` when there is no policy, or when it gives up.
    """
    if not isinstance(outcome, Reenqueue) or outcome.delay is not None:
        return outcome
    number = lease.reenqueue_attempt + 1
    policy = lease.door.reenqueue or conf.reenqueue_policy(lease.queue, lease.processor and lease.processor.reenqueue)
    delay = None if policy is None else retry.next_delay(policy, number)
    if delay is None:
        raise ReenqueueDelayMissing(lease.queue, number, ended=policy is not None)
    return Reenqueue(delay, outcome.result, outcome.keep_attempts)
