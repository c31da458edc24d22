"""Renew leases, on a thread and a connection of their own, each third of the lease.

So neither a busy processor nor a slow settle lets a lease run out. A renewal never waits for a locked row: the
processor may have locked it itself.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable

from django.db.utils import Error

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.settle import resolve
from django_dbtaskqueue.poller.queue_state import ConnectionSet, QueueState

logger = logging.getLogger("django_dbtaskqueue")
RENEW_SOON_SECONDS = 0.005  # from a notification that leases were ended to the renewal: so a flood of them costs little
RETRY_SECONDS = 1.0  # at most, after a renewal that could not reach the database; of a short lease sooner


class Renewer:
    """Renews the leases that ``held`` returns; calls ``lost`` with those that are gone."""

    def __init__(
        self,
        queues: Iterable[QueueState],
        held: Callable[[QueueState], list[Lease]],
        lost: Callable[[list[Lease]], None],
    ) -> None:
        self._held = held
        self._lost = lost
        self._due = dict.fromkeys(queues, 0.0)
        self._lock = threading.Lock()  # of _due
        self._wakeup = threading.Event()
        self._ended = False
        self.thread = WatchedThread(target=self._loop, name="dbtaskqueue-renew", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End; leases that are still held run out."""
        self._ended = True
        self._wakeup.set()
        if self.thread.is_alive():
            self.thread.join(timeout=2)

    def expect(self, queue: QueueState, seconds: float) -> None:
        """Renew in time for a lease of ``seconds``, which was just taken."""
        if clock.monotonic() + seconds / 3 < self._due[queue] and self._bring_forward(queue, seconds / 3):
            self._wakeup.set()

    def renew_now(self, queues: Iterable[QueueState]) -> None:
        """Renew soon, and so find the leases that are gone."""
        for queue in queues:
            self._bring_forward(queue, RENEW_SOON_SECONDS)
        self._wakeup.set()

    def _loop(self) -> None:
        connections = ConnectionSet()
        while not self._ended:
            clock.wait(self._wakeup, max(0.01, min(self._due.values()) - clock.monotonic()))
            self._wakeup.clear()
            for queue in self._due:
                if clock.monotonic() >= self._due[queue]:
                    self._due[queue] = float("inf")  # a lease taken from now on brings it forward
                    self._bring_forward(queue, self._renew(queue, connections.session(queue)))
        connections.close()

    def _bring_forward(self, queue: QueueState, seconds: float) -> bool:
        """Renew in ``seconds`` or, if planned, earlier; return whether this is earlier than planned."""
        with self._lock:
            due = clock.monotonic() + seconds
            sooner = due < self._due[queue]
            self._due[queue] = min(due, self._due[queue])
        return sooner

    def _renew(self, queue: QueueState, session: Session) -> float:
        """Renew one queue's leases; return the seconds until the next time."""
        leases = self._held(queue)
        seconds = queue.settings.lease.total_seconds()
        third = min([lease.lease_seconds or seconds for lease in leases], default=seconds) / 3
        if not leases:
            return third
        try:
            gone = renew(session, leases, max(seconds, queue.min_lease), queue.min_lease)
            if gone:
                self._lost(gone)
        except Exception as error:  # of any kind: without this thread every lease would run out
            expected = isinstance(error, Error)
            level = logging.DEBUG if expected else logging.ERROR
            logger.log(level, "Leases of %s not renewed: %s", queue.name, error, exc_info=not expected)
            session.close()
            return min(RETRY_SECONDS, third / 4)
        return third


def renew(session: Session, leases: list[Lease], seconds: float, min_lease: float = 0.0) -> list[Lease]:
    """Extend leases to ``seconds`` (or their own length) from now; return those that are gone.

    A lease whose row is locked (by its processor's transaction) is neither extended nor gone, nor is one whose
    processor has settled it.
    """
    now = clock.monotonic()
    rows = json.dumps([{"task_id": lease.id, "token": lease.total_attempt} for lease in leases])
    kept = {row[0] for row in session.run(session.sql.renew, {"rows": rows, "lease": seconds, "min_lease": min_lease})}
    newest = dict(sorted((lease.id, lease.total_attempt) for lease in leases))  # of a task that was taken again
    mine = [lease for lease in leases if lease.total_attempt == newest[lease.id]]
    for lease in mine:
        if lease.id in kept:
            lease.deadline = now + (lease.lease_seconds or seconds)
    if len(kept) == len(leases):
        return []
    if len(kept) < len(mine):
        kept = kept.union(*resolve(session, [lease for lease in mine if lease.id not in kept]))
    still_held = {lease for lease in mine if lease.id in kept}
    return [lease for lease in leases if lease not in still_held and not lease.touched]
