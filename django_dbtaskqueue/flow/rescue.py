"""Rescue: a task whose process died during its last attempt ends in ERROR. No checkout takes it again."""

from __future__ import annotations

from collections.abc import Sequence

from django_dbtaskqueue.core.exceptions import ProcessDied
from django_dbtaskqueue.core.lease import Lease, Port
from django_dbtaskqueue.core.outcomes import Fail, Failed
from django_dbtaskqueue.db.session import Row, Session
from django_dbtaskqueue.flow import dependencies, groups, observe, usage
from django_dbtaskqueue.flow.checkout import leases
from django_dbtaskqueue.flow.settle import settle

MAX_TASKS_PER_RESCUE = 100


def rescue(session: Session, queue: str, port: Port, *, keep: str = "keep") -> list[tuple[Lease, Failed]]:
    """Settle at most 100 such tasks of a queue as ERROR, with an ``Attempt`` row each; return those really settled.

    The rows are locked, and their leases judged again, in the transaction that settles them. A holder that comes back
    to life either renewed its lease before, and keeps the task, or finds that the lease is gone.
    """

    def lock_rows() -> tuple[list[Lease], groups.Groups]:
        found = leases(exhausted(session, queue), port, 0.0)
        return found, {queue: {lease.group for lease in found if lease.group is not None}}

    with session.atomic():
        dead = groups.lock_in_order(session, lock_rows)
        errors = [ProcessDied(lease.poller_instance, lease.attempt, lease.max_attempts) for lease in dead]
        pairs = [(lease, Failed(Fail(error, retry=False))) for lease, error in zip(dead, errors, strict=True)]
        settled = settle(session, pairs, keep=keep, counted=False) if pairs else set()
    rescued = [(lease, outcome) for lease, outcome in pairs if lease.id in settled]
    if rescued:
        usage.settled(session.connection, rescued, settled)
        usage.after_commit(session.connection, {(queue, "lease_expired"): [lease.id for lease, _ in rescued]})
        dependencies.after_commit(session, settled)
    for lease, outcome in rescued:
        observe.ended(lease, outcome)
    return rescued


def exhausted(session: Session, queue: str, *, limit: int = MAX_TASKS_PER_RESCUE) -> list[Row]:
    """Return and lock the leased rows whose lease ran out on the last attempt. Call it in ``atomic``."""
    return session.run(session.sql.exhausted, {"queue_name": queue, "limit": limit})


def seconds_until_exhausted(session: Session, queue: str) -> float | None:
    """Return the seconds until the first lease on a last attempt runs out: negative when it has, None without one."""
    left: float | None = session.run(session.sql.seconds_until_exhausted, {"queue_name": queue})[0][0]
    return left


def seconds_until_exhausted_by_queue(session: Session, queues: Sequence[str]) -> dict[str, float]:
    """Return ``seconds_until_exhausted`` of those queues that have such a lease.

    On PostgreSQL one statement finds the queues without a task in the ready order, and they are skipped. One statement
    for all queues would be slower: for names it does not know, the planner reads the whole table for each.
    """
    if session.postgresql and len(queues) > 1:
        queues = list(dict(session.run(session.sql.priorities_of_many, {"queues": list(queues)})))
    found = {queue: seconds_until_exhausted(session, queue) for queue in queues}
    return {queue: left for queue, left in found.items() if left is not None}
