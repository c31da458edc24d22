"""Leases are renewed on a thread and a connection of their own, at a third of the lease.

Neither a busy handler nor a slow settle can then let a lease run out, and a renewal never waits for a row that a
handler has locked itself.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from time import monotonic

from django.db.utils import Error

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.poller.queue_state import Lane

logger = logging.getLogger(__name__)
RETRY = 1.0  # seconds after a renewal that could not reach the database


class Renewer:
    """Keeps the leases that ``held`` reports alive; tells ``lost`` of each that is gone."""

    def __init__(
        self, lanes: Iterable[Lane], held: Callable[[Lane], list[Lease]], lost: Callable[[Lease], None]
    ) -> None:
        self._lanes = list(lanes)
        self._held = held
        self._lost = lost
        self._due = {lane.key: 0.0 for lane in self._lanes}
        self._lock = threading.Lock()  # of _due
        self._bell = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._loop, name="dbtaskqueue-renew", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; leases still held run out by themselves."""
        self._ended = True
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def expect(self, lane: Lane, seconds: float) -> None:
        """A lease of only so many seconds was taken: renew in time for it."""
        if self._bring_forward(lane, seconds / 3):
            self._bell.set()

    def _loop(self) -> None:
        tables = {(lane.port.alias, lane.port.model) for lane in self._lanes}
        sessions = {table: Session.open(*table) for table in tables}  # one connection, however many queues
        while not self._ended:
            self._bell.wait(max(0.01, min(self._due.values()) - monotonic()))
            self._bell.clear()
            for lane in self._lanes:
                if monotonic() >= self._due[lane.key]:
                    self._due[lane.key] = float("inf")  # a lease taken meanwhile brings it forward
                    self._bring_forward(lane, self._renew(lane, sessions[lane.port.alias, lane.port.model]))
        for session in sessions.values():
            session.close()

    def _bring_forward(self, lane: Lane, seconds: float) -> bool:
        """Renew in so many seconds, or before if that was the plan; return whether it was not."""
        with self._lock:
            due = monotonic() + seconds
            sooner = due < self._due[lane.key]
            self._due[lane.key] = min(due, self._due[lane.key])
        return sooner

    def _renew(self, lane: Lane, session: Session) -> float:
        """Renew one queue's leases; return the seconds until the next time."""
        leases = self._held(lane)
        seconds = lane.settings.lease.total_seconds()
        third = min([lease.lease_seconds or seconds for lease in leases], default=seconds) / 3
        if not leases:
            return third
        try:
            for lease in renew(session, leases, seconds):
                self._lost(lease)
        except Exception as error:  # whatever it is: without this thread every lease would run out
            logger.log(
                logging.DEBUG if isinstance(error, Error) else logging.ERROR,
                "Leases of %s not renewed: %s", lane.queue, error,
                exc_info=not isinstance(error, Error),
            )  # fmt: skip
            session.close()
            return min(RETRY, third)
        return third


def renew(session: Session, leases: list[Lease], seconds: float) -> list[Lease]:
    """Extend leases to ``seconds`` (or their own length) from now; return those that are gone.

    A lease whose row is locked (by its own handler's transaction) is neither extended nor gone.
    """
    now = monotonic()
    rows = json.dumps([{"i": lease.id, "k": lease.total_attempt} for lease in leases])
    extended = {row[0] for row in session.run(session.sql.renew, {"rows": rows, "lease": seconds})}
    missing = []
    for lease in leases:
        if lease.id in extended:
            lease.deadline = now + (lease.lease_seconds or seconds)
        else:
            missing.append(lease)
    if not missing:
        return []
    rows = json.dumps([{"i": lease.id, "k": lease.total_attempt} for lease in missing])
    standing = {row[0] for row in session.run(session.sql.held, {"rows": rows})}
    return [lease for lease in missing if lease.id not in standing]
