"""Tasks that end without a run: their process died during their last attempt, or they waited past their time to live.

No checkout takes the former again, and nobody may ever take the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from django_dbtaskqueue.core.exceptions import ProcessDied
from django_dbtaskqueue.core.lease import Lease, Port
from django_dbtaskqueue.core.outcomes import Fail, Failed, Release, Settlement
from django_dbtaskqueue.db.session import Row, Session
from django_dbtaskqueue.flow import groups, observe, usage
from django_dbtaskqueue.flow.checkout import leases
from django_dbtaskqueue.flow.run import expiry
from django_dbtaskqueue.flow.settle import settle

MAX_TASKS_PER_RESCUE = 100
Ended = tuple[Lease, Settlement, float]  # as metrics count it; it ran for no time
HOUSEKEEPING = "housekeeping"  # as the poller that took an expired task


def rescue(session: Session, queue: str, port: Port) -> list[Ended]:
    """Settle at most 100 dead tasks of a queue as ERROR, with an ``Attempt`` row each; return those really settled.

    The rows are locked, and their leases judged again, in the transaction that settles them. A holder that comes back
    to life either renewed its lease before, and keeps the task, or finds that the lease is gone.
    """

    def died(lease: Lease) -> Failed:
        return Failed(Fail(ProcessDied(lease.poller_instance, lease.attempt, lease.max_attempts), retry=False))

    if rescued := _end(session, queue, port, partial(exhausted, session, queue), died):
        usage.count_calls(session.connection, {(queue, "lease_expired"): [lease.id for lease, *_ in rescued]})
    return rescued


def end_expired(session: Session, queue: str, port: Port, ids: Sequence[int], *, expired: str) -> list[Ended]:
    """End those of some tasks of a queue that wait past their time to live, as a poller ends one that it takes.

    Paused and parked ones, too. ``expired`` is the queue's setting. Return those really settled.
    """
    params = {"ids": session.sql.dialect.array(ids), "poller_instance": HOUSEKEEPING, "lease": 1.0, "min_lease": 0.0}
    take = partial(session.run, session.sql.checkout_expired, params)
    return _end(session, queue, port, take, lambda lease: expiry(lease, expired) or Release())


def _end(
    session: Session, queue: str, port: Port, take: Callable[[], list[Row]], outcome_of: Callable[[Lease], Settlement]
) -> list[Ended]:
    """Lock the groups of leased rows, and the rows, settle them in the same transaction, and tell it."""

    def groups_in(found: list[Lease]) -> groups.Groups:
        return groups.groups_of((queue, lease.group) for lease in found)

    with session.atomic():
        found = groups.lock_in_order(session, lambda: leases(take(), port, 0.0), groups_in)
        pairs = [(lease, outcome_of(lease)) for lease in found]
        settled = settle(session, pairs) if pairs else set()
    ended = [(lease, outcome, 0.0) for lease, outcome in pairs if lease.id in settled]
    for lease, outcome, _seconds in ended:
        observe.ended(lease, outcome)
    return ended


def exhausted(session: Session, queue: str, *, limit: int = MAX_TASKS_PER_RESCUE) -> list[Row]:
    """Return and lock the leased rows whose lease ran out on the last attempt. Call it in ``atomic``."""
    return session.run(session.sql.exhausted, {"queue_name": queue, "limit": limit})


def seconds_until_exhausted(session: Session, queue: str) -> float | None:
    """Return the seconds until the first lease on a last attempt runs out: negative when it has, None without one."""
    return session.run(session.sql.seconds_until_exhausted, {"queue_name": queue})[0][0]  # type: ignore[no-any-return]


def seconds_until_exhausted_by_queue(session: Session, queues: Sequence[str]) -> dict[str, float]:
    """Return ``seconds_until_exhausted`` of those queues that have such a lease.

    On PostgreSQL one statement finds the queues without a task in the ready order, and they are skipped. One statement
    for all queues would be slower: for names it does not know, the planner reads the whole table for each.
    """
    if session.postgresql and len(queues) > 1:
        queues = list(dict(session.run(session.sql.priorities_of_many, {"queues": list(queues)})))
    found = {queue: seconds_until_exhausted(session, queue) for queue in queues}
    return {queue: left for queue, left in found.items() if left is not None}
