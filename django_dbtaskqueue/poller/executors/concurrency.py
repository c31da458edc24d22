"""Processors that may have only so many calls at a time: what goes beyond waits here, without a slot."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.poller.executors import Job

AHEAD = 0.1  # seconds of work that may wait in memory
MOST = 1000  # calls that may
SMOOTHING = 0.3


@dataclass(slots=True)
class Gate:
    """One processor's calls. ``inside`` are those that have a slot, or wait for nothing else."""

    inside: int = 0
    waiting: deque[Job] = field(default_factory=deque)
    mean: float | None = None  # seconds of one call, smoothed


class Gates:
    """The gates of one poller, by queue and payload type: a processor registered anew keeps the gate of the old one."""

    def __init__(self) -> None:
        self._gates: dict[tuple[str, type | None], Gate] = {}
        self._lock = threading.Lock()

    def enter(self, jobs: list[Job]) -> list[Job]:
        """Return those of one processor's jobs that may begin; the others wait their turn."""
        limit = jobs[0].processor.concurrency
        if limit is None:
            return jobs
        with self._lock:
            gate = self._gate(jobs[0].processor)
            admitted = jobs[: max(0, limit - gate.inside)]
            gate.inside += len(admitted)
            gate.waiting.extend(jobs[len(admitted) :])
        return admitted

    def leave(self, processor: Processor, seconds: float | None) -> list[Job]:
        """A call has really ended, after ``seconds`` (None: it never began); return those that may begin instead."""
        if processor.concurrency is None:
            return []
        with self._lock:
            gate = self._gate(processor)
            gate.inside -= 1
            if seconds is not None:
                gate.mean = seconds if gate.mean is None else gate.mean + SMOOTHING * (seconds - gate.mean)
            room = max(0, processor.concurrency - gate.inside)
            admitted = [gate.waiting.popleft() for _ in range(min(room, len(gate.waiting)))]
            gate.inside += len(admitted)
        return admitted

    def room(self, processor: Processor) -> int | None:
        """Return how many more calls to take, beyond those that may run only what is soon done; None: no limit."""
        if processor.concurrency is None:
            return None
        with self._lock:
            gate = self._gate(processor)
            ahead = 0 if gate.mean is None else min(MOST, int(AHEAD / max(gate.mean, 1e-6)))
            return processor.concurrency + ahead - gate.inside - len(gate.waiting)

    def withdraw(self) -> list[Job]:
        """Return all that waits, and forget it."""
        with self._lock:
            jobs = [job for gate in self._gates.values() for job in gate.waiting]
            for gate in self._gates.values():
                gate.waiting.clear()
        return jobs

    def _gate(self, processor: Processor) -> Gate:
        return self._gates.setdefault((processor.queue, processor.payload), Gate())
