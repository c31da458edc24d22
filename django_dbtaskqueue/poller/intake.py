"""The way in: whose turn it is, how much there is room for, and who processes what was taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from django_dbtaskqueue import registry
from django_dbtaskqueue.flow import checkout, move, observe, settle
from django_dbtaskqueue.flow.process import expiry
from django_dbtaskqueue.lease import Lease
from django_dbtaskqueue.poller.carrier import Carrier
from django_dbtaskqueue.poller.executors import Done, Executor, Job
from django_dbtaskqueue.poller.lane import Lane
from django_dbtaskqueue.poller.options import Options
from django_dbtaskqueue.poller.settler import Counts, Settler

logger = logging.getLogger("django_dbtaskqueue")

SOON = 5.0  # seconds: a draining poller waits for what becomes due within them
FAST = 0.0002  # seconds of a task so short that waking a second thread for it costs more than running it


class Intake:
    """Takes tasks out of the lanes, by weight, as far as the executors have room."""

    def __init__(
        self,
        instance: str,
        lanes: Mapping[str, Lane],
        executors: list[Executor],
        settler: Settler,
        expect: Callable[[Lane, float], None],
        counts: Counts,
        options: Options,
    ) -> None:
        self.instance = instance
        self.lanes = lanes
        self.executors = executors
        self.settler = settler
        self._expect = expect
        self.counts = counts
        self.options = options
        self._lock = threading.Lock()

    def choose(self) -> tuple[Lane, int] | None:
        """Return the lane whose turn it is and how much to take, reserved; None when no lane is due and has room."""
        with self._lock:
            ready = [(lane, room) for lane in self._due() if (room := self._room(lane)) > 0]
            if not ready:
                return None
            total = sum(lane.weight for lane, _ in ready)
            for lane, _ in ready:
                lane.credit += lane.weight
            chosen, room = max(ready, key=lambda pair: pair[0].credit)
            chosen.credit -= total
            asked = min(room, chosen.settings.batch_size)
            chosen.reserved += asked
            return chosen, asked

    def take(self, carrier: Carrier, lane: Lane, asked: int) -> bool:
        """Check out and hand to the executors; return whether there was as much as asked for."""
        wakes = lane.wakes
        try:
            leases = self._checkout(carrier, lane, asked)
            self._dispatch(lane, leases)
        finally:
            with self._lock:
                lane.reserved -= asked
        next_due = None if leases else self._next_due(carrier, lane)
        with self._lock:
            lane.taken(got=len(leases), wakes=wakes, next_due=next_due)
        if self.options.once or (not leases and self._drained(carrier, lane)):
            lane.over = True
        return len(leases) == asked

    def pending(self) -> bool:
        """Whether a checkout is under way."""
        return any(lane.reserved for lane in self.lanes.values())

    def spent(self) -> bool:
        """Whether a run that ends by itself has nothing more to take."""
        most = self.options.max_tasks
        return all(lane.over for lane in self.lanes.values()) or (most is not None and self.counts.started >= most)

    def _due(self) -> list[Lane]:
        now = monotonic()
        return [lane for lane in self.lanes.values() if lane.next_poll <= now and not lane.over]

    def _room(self, lane: Lane) -> int:
        executor = self.executor_of(lane)
        waiting = len(executor.todo)
        reserved = sum(other.reserved for other in self.lanes.values())
        ahead = lane.ahead()
        room = executor.slots + ahead - waiting - executor.busy() - len(self.settler.done) - reserved
        if (waiting or reserved) and room < min(lane.settings.batch_size, ahead / 2):
            return 0  # worth a statement only when the slots run dry or half of what may wait fits
        if self.options.max_tasks is not None:
            room = min(room, self.options.max_tasks - self.counts.started - reserved)
        return room

    def _checkout(self, carrier: Carrier, lane: Lane, asked: int) -> list[Lease]:
        session = carrier.session(lane)
        if lane.strategy is None:
            lane.strategy = checkout.strategy_for(session, lane.settings.strategy)
        return checkout.take(
            session,
            lane.line,
            strategy=lane.strategy,
            poller_instance=self.instance,
            limit=asked,
            lease=lane.settings.lease,
            door=lane.door,
            tags=self.options.tags,
        )

    def _dispatch(self, lane: Lane, leases: list[Lease]) -> None:
        self.settler.held.update(leases)
        self.counts.started += len(leases)
        if "retry" in lane.overrides:
            for lease in leases:
                lease.policy = lane.settings.retry
        jobs: dict[int, list[Job]] = {}
        for lease in leases:
            if lease.lease_seconds is not None:
                self._expect(lane, lease.lease_seconds)
            processor = registry.find(lease.queue, lease.payload_type)
            if (expired := expiry(lease, lane.settings.expired)) is not None:
                self.settler.finish(Done(lease, expired, 0.0), idle=True)
            elif processor is None:
                self._park(lease)
            else:
                jobs.setdefault(int(processor.is_async), []).append(Job(lease, processor))
        for kind, batch in jobs.items():
            self.executors[kind].submit(batch, fast=lane.mean is not None and lane.mean < FAST)

    def _park(self, lease: Lease) -> None:
        reason = move.no_handler(lease.queue, lease.payload_type)
        logger.warning("Task %s parked: %s", lease.id, reason, extra=observe.fields(lease))
        self.settler.finish(Done(lease, settle.Park(reason), 0.0), idle=True)

    def _next_due(self, carrier: Carrier, lane: Lane) -> float | None:
        session = carrier.session(lane)
        if session.postgresql and not lane.line.bounds:
            return None
        params: dict[str, Any] = {"queue_name": lane.queue}
        if session.postgresql:  # SQLite, under DEBUG, cannot even show a list
            params["priorities"] = sorted(lane.line.bounds)
        return session.run(session.sql.next_due, params)[0][0]  # type: ignore[no-any-return]

    def _drained(self, carrier: Carrier, lane: Lane) -> bool:
        if not self.options.drain or any(lease.door is lane.door for lease in self.settler.held.copy()):
            return False
        session = carrier.session(lane)
        if not session.run(session.sql.soon, {"queue_name": lane.queue, "horizon": SOON}):
            return True
        lane.next_poll = min(lane.next_poll, monotonic() + lane.settings.poll_interval.total_seconds())
        return False

    def executor_of(self, lane: Lane) -> Executor:
        """Return where most of a lane's tasks run."""
        processors = registry.processors(lane.queue)
        return self.executors[int(bool(processors) and all(processor.is_async for processor in processors))]
