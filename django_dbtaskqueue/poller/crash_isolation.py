"""Crash isolation: a task that may have killed its process runs alone.

A process that dies ends the attempts of all its tasks without an outcome. One of those tasks may be the cause. If it
ran together with the others again, it would take one attempt of each of them with every crash, until none is left.
Tasks whose processors have a name run in another process (``executors.process``), and limit nobody. The others, such
as those of a function made at run time, run one by one in the poller's process; that is what this module does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import observe, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_dbtaskqueue.flow.run import Processor
    from django_dbtaskqueue.poller.settle_batches import Settler

logger = logging.getLogger("django_dbtaskqueue")

# A deadly task mostly kills soon after its start, and the other tasks must not wait long.
MIN_QUARANTINE_SECONDS, MAX_QUARANTINE_SECONDS = 0.2, 1.0
QUARANTINE_LEASE_SHARE = 1 / 40  # of the lease, within those limits
RELEASED_TASK_TIMEOUT_SECONDS = 5.0  # then we assume that another poller took the tasks that we released


class CrashIsolation:
    """Limits what a poller takes while isolated tasks wait, and releases those that must not run now."""

    def __init__(self, settler: Settler, isolates: Callable[[Processor | None], bool]) -> None:
        """``isolates``: whether a task of a processor can run in another process."""
        self._settler = settler
        self._isolates = isolates
        self._queues: set[str] = set()  # keys of queues with released tasks that no fetch has found since
        self._active_until = 0.0
        self._quarantine_until = 0.0

    def active(self) -> bool:
        """Whether isolated tasks wait, to run one by one. They wait behind the watermarks of their queues."""
        return bool(self._queues) and clock.monotonic() < self._active_until

    def limit(self, reserved: int) -> int | None:
        """Return how many tasks a fetch may take: 1, 0 while a quarantined task may still kill, None for no limit."""
        if not self._queues or clock.monotonic() >= self._active_until:  # as ``active``, without a call
            return None
        busy = reserved or self._settler.held or self._settler.done
        return 0 if busy and clock.monotonic() < self._quarantine_until else 1

    def sift(self, session: Session, leases: list[Lease], *, alone: bool) -> list[Lease]:
        """Return the leases to run now; release the others without a charge, to be taken one by one.

        ``alone`` is true if no other fetch is under way.
        """
        ids = {lease.id for lease in leases if lease.lost_leases and not self._has_process(lease)}
        if not ids:
            if len(leases) == 1:  # a larger batch was asked for before isolation began, so it tells nothing
                self._queues.discard(leases[0].port.key)
            return leases
        isolated = [lease for lease in leases if lease.id in ids]
        others = [lease for lease in leases if lease.id not in ids]
        chosen = isolated[:1] if alone and not others and not self._busy() else []
        # Release before any task of this batch starts: a crash would charge the isolated tasks that are still leased.
        for queue in {lease.queue for lease in isolated}:
            back = [lease for lease in isolated[len(chosen) :] if lease.queue == queue]
            settle.release(session, back)
            for lease in back:
                observe.ended(lease, Release())
        if not self.active():
            logger.warning(
                "Attempts of %s ended without an outcome, as when a process dies: running those tasks one by one",
                isolated[0].queue,
            )
        self._queues.update(lease.port.key for lease in isolated)
        self._quarantine_until = clock.monotonic() + _quarantine_seconds(isolated[0])
        self._active_until = clock.monotonic() + RELEASED_TASK_TIMEOUT_SECONDS
        return others + chosen

    def _has_process(self, lease: Lease) -> bool:
        return self._isolates(registry.find(lease.queue, lease.payload_type))

    def _busy(self) -> bool:
        return bool(self._settler.held or self._settler.done) and clock.monotonic() < self._quarantine_until


def _quarantine_seconds(lease: Lease) -> float:
    seconds = (lease.lease_until - lease.start_time).total_seconds() * QUARANTINE_LEASE_SHARE
    return min(max(seconds, MIN_QUARANTINE_SECONDS), MAX_QUARANTINE_SECONDS)
