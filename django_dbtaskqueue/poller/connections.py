"""A thread that talks to the database for the loop: its connections, and how it fares when the database is away."""

from __future__ import annotations

from dataclasses import dataclass, field

from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.poller.queue_state import Lane


@dataclass(slots=True)
class Carrier:
    """Two of them keep two batches in flight: the database works on one while we work on the other."""

    number: int
    sessions: dict[tuple[str, str], Session] = field(default_factory=dict)
    pause: float = 0.0  # seconds of the present back-off

    def session(self, lane: Lane) -> Session:
        """Return this carrier's session for a lane; it connects at its first statement."""
        key = (lane.port.alias, lane.port.model._meta.label)
        if key not in self.sessions:
            self.sessions[key] = Session.open(lane.port.alias, lane.port.model)
        return self.sessions[key]

    def close(self) -> None:
        """Close its connections."""
        for session in self.sessions.values():
            session.close()
