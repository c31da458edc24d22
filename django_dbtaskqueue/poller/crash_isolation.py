"""A task that may have killed its process is run alone, so that it takes nobody with it when it does so again.

An attempt that ended without an outcome makes a task suspect: its process died, with all it held. One of those tasks
may be to blame, so the others would go down with it at each attempt, until none has an attempt left.
"""

from __future__ import annotations

import logging
from time import monotonic

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import move, settle
from django_dbtaskqueue.poller.settle_batches import Settler

logger = logging.getLogger("django_dbtaskqueue")

# Seconds a suspect is left alone: what kills mostly kills at once, and the others must not wait long.
PROBATION = (0.2, 1.0)
SHARE = 40  # of a lease, within those bounds
PATIENCE = 5.0  # seconds until those given back are taken to be with another poller


class Suspects:
    """Decides how much a poller may take while there are suspects, and gives back those that have to wait."""

    def __init__(self, settler: Settler) -> None:
        self._settler = settler
        self._lanes: set[str] = set()  # where some were given back that nobody has seen since
        self._patience = 0.0  # until when those are waited for
        self._until = 0.0  # when what is held now need not be waited for any more

    def around(self) -> bool:
        """Whether there are any to be taken one by one, from the front of their line, where they were given back to."""
        return bool(self._lanes) and monotonic() < self._patience

    def limit(self, reserved: int) -> int | None:
        """Return how many tasks the next checkout may take; None is any number. ``reserved``: under way already."""
        if not self.around():
            return None
        busy = reserved or self._settler.held or self._settler.done
        return 0 if busy and monotonic() < self._until else 1

    def sift(self, session: Session, leases: list[Lease], *, alone: bool) -> list[Lease]:
        """Return the leases to run now; the others are given back, uncharged, and will be taken one by one.

        ``alone``: nothing else is being taken.
        """
        wanting = move.without_outcome(session, leases)
        suspects = [lease for lease in leases if lease.id in wanting]
        if not suspects:
            if len(leases) == 1:  # of a larger batch, asked for before, it says nothing
                self._lanes.discard(leases[0].port.key)
            return leases
        innocent = [lease for lease in leases if lease.id not in wanting]
        chosen = suspects[:1] if alone and not innocent and not self._busy() else []
        # Before anything of this batch starts: what is given back later may be charged by a death.
        for queue in {lease.queue for lease in suspects}:
            settle.release(session, [lease for lease in suspects[len(chosen) :] if lease.queue == queue])
        if not self.around():
            logger.warning(
                "Attempts of %s ended without an outcome, as when a process dies: running those tasks one by one",
                suspects[0].queue,
            )
        self._lanes.update(lease.port.key for lease in suspects)
        self._until = monotonic() + _probation(suspects[0])
        self._patience = monotonic() + PATIENCE
        return innocent + chosen

    def _busy(self) -> bool:
        return bool(self._settler.held or self._settler.done) and monotonic() < self._until


def _probation(lease: Lease) -> float:
    seconds = (lease.lease_until - lease.start_time).total_seconds()
    return min(max(seconds / SHARE, PROBATION[0]), PROBATION[1])
