"""What one lane needs of the database beside its checkouts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import checkout, move, settle
from django_dbtaskqueue.poller.queue_state import Lane

logger = logging.getLogger("django_dbtaskqueue")


def clear_up(session: Session, lane: Lane, instance: str, held: Iterable[Lease]) -> None:
    """Give back, uncharged, what a checkout took whose answer was lost: nobody else would before the lease ends.

    ``held`` are the leases of the lane that its poller ``instance`` knows of.
    """
    rows = session.run(session.sql.leased_to, {"queue_name": lane.queue, "poller_instance": instance})
    known = {(lease.id, lease.total_attempt) for lease in held}
    leases = checkout.leases(rows, lane.port, 0.0)
    unknown = [lease for lease in leases if (lease.id, lease.total_attempt) not in known]
    pairs: list[settle.Pair] = [(lease, Release()) for lease in unknown]
    lost = settle.settle_surely(session, pairs) if pairs else set()
    lane.doubtful = False
    if lost:
        logger.info("Gave back %s tasks of %s: the answer to their checkout was lost", len(lost), lane.queue)


def next_due(session: Session, lane: Lane) -> float | None:
    """Return the seconds until the lane's first task that is scheduled for later is due; None when there is none."""
    priorities = lane.priorities()
    if session.postgresql and not priorities:
        return None
    params: dict[str, Any] = {"queue_name": lane.queue}
    if session.postgresql:  # SQLite, under DEBUG, cannot even show a list
        params["priorities"] = priorities
    return session.run(session.sql.next_due, params)[0][0]  # type: ignore[no-any-return]


def unpark(session: Session, lane: Lane) -> None:
    """Put tasks back in line that waited for a handler registered since."""
    lane.unpark = False
    types, untyped = registry.payload_types(lane.queue), registry.find(lane.queue, None) is not None
    try:
        back = move.unpark(session, lane.queue, types, untyped=untyped)
    except Exception:
        lane.unpark = True
        raise
    if back:
        logger.info("%s parked tasks of %s have a handler here and are back in line", back, lane.queue)
