"""The way in: whose turn it is, how much there is room for, and who processes what was taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from time import monotonic
from typing import Any

from django_dbtaskqueue import registry
from django_dbtaskqueue.flow import checkout, move, observe, settle
from django_dbtaskqueue.flow.process import Processor, expiry
from django_dbtaskqueue.lease import Lease
from django_dbtaskqueue.poller.carrier import Carrier
from django_dbtaskqueue.poller.executors import Done, Executor, Job
from django_dbtaskqueue.poller.lane import Lane
from django_dbtaskqueue.poller.options import Options
from django_dbtaskqueue.poller.places import Places
from django_dbtaskqueue.poller.rooms import Kind, Rooms
from django_dbtaskqueue.poller.settler import Counts, Settler
from django_dbtaskqueue.poller.suspects import Suspects

logger = logging.getLogger("django_dbtaskqueue")

SOON = 5.0  # seconds: a draining poller waits for what becomes due within them
TURN = attrgetter("turn")
FAST = 0.0002  # seconds of a task so short that waking a second thread for it costs more than running it


class Intake:
    """Takes tasks out of the lanes, by weight, as far as the executors have room."""

    def __init__(
        self,
        instance: str,
        lanes: Mapping[str, Lane],
        places: Places,
        settler: Settler,
        expect: Callable[[Lane, float], None],
        counts: Counts,
        options: Options,
    ) -> None:
        self.instance = instance
        self.lanes = lanes
        self.places = places
        self.settler = settler
        self._expect = expect
        self.counts = counts
        self.options = options
        self._lock = threading.Lock()
        self._rooms = Rooms(places, settler)
        self._time = 0.0  # in turns: that of the lane that had the last one
        self._suspects = Suspects(settler)

    def choose(self) -> tuple[Lane, int] | None:
        """Return the lane whose turn it is and how much to take, reserved; None when no lane is due and has room."""
        with self._lock:
            most = self._suspects.limit(self._rooms.reserved)
            if most == 0:
                return None
            lane, room = self._turn(self._due())
            if lane is None:
                return None
            self._time = max(lane.turn, self._time)  # no turns are saved up while there is nothing to take
            lane.turn = self._time + 1 / lane.weight
            asked = min(room, lane.settings.batch_size, most or lane.settings.batch_size)
            self._rooms.reserve(lane, asked)
            return lane, asked

    def _turn(self, due: list[Lane]) -> tuple[Lane | None, int]:
        """Return whose turn it is, and the room there is. The weights are kept by stride: a turn costs 1 / weight.

        Nobody takes the turn of a lane that only waits for others' tasks to get done: one of slow tasks lets none of
        them wait in memory, and refills of a fast one would keep it out for ever.
        """
        blocked: set[Executor] = set()
        full: set[Kind | None] = set()  # of many lanes most are of one kind
        for lane in sorted(due, key=TURN) if len(due) > 1 else due:
            kind = self._rooms.kind(lane)
            if (kind is not None and kind in full) or (blocked and not blocked.isdisjoint(self._rooms.places(lane))):
                continue
            room = self._room(lane)
            if room > 0:
                return lane, room
            full.add(kind)
            if self._rooms.behind(lane):
                blocked |= self._rooms.places(lane)
        return None, 0

    def take(self, carrier: Carrier, lane: Lane, asked: int) -> bool:
        """Check out and hand to the executors; return whether there was as much as asked for."""
        wakes = lane.wakes
        try:
            if lane.doubtful and lane.reserved == asked:
                self._clear_up(carrier, lane)
            if lane.unpark:
                self._unpark(carrier, lane)
            got = self._take(carrier, lane, asked)
        except Exception:
            lane.doubtful = True
            raise
        finally:
            with self._lock:
                self._rooms.reserve(lane, -asked)
        next_due = None if got else self._next_due(carrier, lane)
        with self._lock:
            lane.taken(got=got, wakes=wakes, next_due=next_due)
        if self.options.once or (not got and not lane.unpark and self._drained(carrier, lane)):
            lane.over = True
        return got == asked

    def _clear_up(self, carrier: Carrier, lane: Lane) -> None:
        """Give back, uncharged, what a checkout took whose answer was lost: nobody else would before the lease ends."""
        session = carrier.session(lane)
        rows = session.run(session.sql.leased_to, {"queue_name": lane.queue, "poller_instance": self.instance})
        known = {(lease.id, lease.total_attempt) for lease in self.settler.held.copy() if lease.door is lane.door}
        leases = checkout.leases(rows, lane.door, 0.0)
        unknown = [lease for lease in leases if (lease.id, lease.total_attempt) not in known]
        pairs: list[settle.Pair] = [(lease, settle.Release()) for lease in unknown]
        lost = settle.settle_surely(session, pairs) if pairs else set()
        lane.doubtful = False
        if lost:
            logger.info("Gave back %s tasks of %s: the answer to their checkout was lost", len(lost), lane.queue)

    def _take(self, carrier: Carrier, lane: Lane, asked: int) -> int:
        processors = registry.processors(lane.queue)
        if not self._rooms.differ(processors):
            return self._take_some(carrier, lane, asked)
        return self._take_by_room(carrier, lane, asked, processors)

    def _take_by_room(self, carrier: Carrier, lane: Lane, asked: int, processors: Sequence[Processor]) -> int:
        """Take tasks so that no processor gets more than it has room for; full ones keep nobody from his turn.

        Each statement asks for as many as the processor with the least room can have, and leaves out those without.
        """
        got, passed = 0, set[Processor]()
        while True:
            rooms = {processor: self._rooms.of_processor(lane, processor, mine=asked) for processor in processors}
            fitting = {which: room for which, room in rooms.items() if room > 0 and which not in passed}
            lane.closed = frozenset(processors) - fitting.keys()
            limit = min([asked - got, *fitting.values()]) if fitting else 0
            if limit <= 0:
                return got
            taken = self._take_some(carrier, lane, limit, lane.closed)
            got += taken
            if taken < limit:
                return got
            least = min(fitting.values())
            passed |= {which for which, room in fitting.items() if room == least}

    def pending(self) -> bool:
        """Whether a checkout is under way."""
        return self._rooms.reserved > 0

    def spent(self) -> bool:
        """Whether a run that ends by itself has nothing more to take."""
        most = self.options.max_tasks
        return all(lane.over for lane in self.lanes.values()) or (most is not None and self.counts.started >= most)

    def _due(self) -> list[Lane]:
        now = monotonic()
        return [
            lane
            for lane in self.lanes.values()
            if (lane.next_poll <= now or lane.closed)
            and not lane.over
            and not self._shut(lane, now)
            and (lane.next_poll <= now or self._rooms.reopened(lane))
        ]

    def _shut(self, lane: Lane, now: float) -> bool:
        """Whether a lane has been resized to nothing; it opens by a setting, which wakes it."""
        if lane.settings.concurrency != 0:
            return False
        lane.next_poll = now + lane.settings.poll_interval.total_seconds()
        lane.over = self.options.drain or self.options.once
        return True

    def _room(self, lane: Lane) -> int:
        """Return how many tasks to take from a lane now."""
        room, most = self._rooms.of_lane(lane), self.options.max_tasks
        return room if most is None else min(room, most - self.counts.started - self._rooms.reserved)

    def _take_some(self, carrier: Carrier, lane: Lane, asked: int, closed: Iterable[Processor] = ()) -> int:
        without = tuple(sorted(processor.payload_type or "" for processor in closed))
        leases = self._checkout(carrier, lane, asked, without)
        if leases and not self.options.once:
            alone = self._rooms.reserved == asked
            self._dispatch(lane, self._suspects.sift(carrier.session(lane), leases, alone=alone))
        else:
            self._dispatch(lane, leases)
        return len(leases)

    def _checkout(self, carrier: Carrier, lane: Lane, asked: int, without: tuple[str, ...]) -> list[Lease]:
        session = carrier.session(lane)
        if lane.strategy is None:
            if lane.settings.paused:
                session.run(session.sql.start_paused, {"queue_name": lane.queue})
            lane.strategy = checkout.strategy_for(session, lane.settings.strategy)
        return checkout.take(
            session,
            lane.line_without(without),
            strategy=lane.strategy,
            poller_instance=self.instance,
            limit=asked,
            lease=lane.settings.lease,
            door=lane.door,
            tags=self.options.tags,
            without=without,
        )

    def _dispatch(self, lane: Lane, leases: list[Lease]) -> None:
        self.settler.held.update(leases)
        self.counts.started += len(leases)
        if "retry" in lane.overrides:
            for lease in leases:
                lease.policy = lane.settings.retry
        observe.picked(leases)
        self._expect(lane, lane.settings.lease.total_seconds())  # it may be shorter than when renewal was planned
        jobs: list[Job] = []
        special: dict[Processor, list[Lease]] = {}
        for lease in leases:
            if lease.lease_seconds is not None:
                self._expect(lane, lease.lease_seconds)
            processor = registry.find(lease.queue, lease.payload_type)
            if (expired := expiry(lease, lane.settings.expired)) is not None:
                self.settler.finish(Done(lease, expired, 0.0), idle=True)
            elif processor is None:
                self._park(lease)
            elif processor.plain:
                jobs.append(Job(lease, processor))
            else:
                special.setdefault(processor, []).append(lease)
        self.places.submit(jobs, fast=lane.mean is not None and lane.mean < FAST)
        for processor, batch in special.items():
            self.places.submit_special(processor, batch)

    def _park(self, lease: Lease) -> None:
        reason = move.no_handler(lease.queue, lease.payload_type)
        logger.warning("Task %s parked: %s", lease.id, reason, extra=observe.fields(lease))
        self.settler.finish(Done(lease, settle.Park(reason), 0.0), idle=True)

    def _next_due(self, carrier: Carrier, lane: Lane) -> float | None:
        session = carrier.session(lane)
        priorities = lane.priorities()
        if session.postgresql and not priorities:
            return None
        params: dict[str, Any] = {"queue_name": lane.queue}
        if session.postgresql:  # SQLite, under DEBUG, cannot even show a list
            params["priorities"] = priorities
        return session.run(session.sql.next_due, params)[0][0]  # type: ignore[no-any-return]

    def _drained(self, carrier: Carrier, lane: Lane) -> bool:
        if not self.options.drain or any(lease.door is lane.door for lease in self.settler.held.copy()):
            return False
        session = carrier.session(lane)
        tags = session.sql.dialect.array(self.options.tags)
        if not session.run(session.sql.soon, {"queue_name": lane.queue, "horizon": SOON, "tags": tags}):
            return True
        lane.next_poll = min(lane.next_poll, monotonic() + lane.settings.poll_interval.total_seconds())
        return False

    def _unpark(self, carrier: Carrier, lane: Lane) -> None:
        """Put tasks back in line that waited for a handler registered since."""
        lane.unpark = False
        types, untyped = registry.payload_types(lane.queue), registry.find(lane.queue, None) is not None
        try:
            back = move.unpark(carrier.session(lane), lane.queue, types, untyped=untyped)
        except Exception:
            lane.unpark = True
            raise
        if back:
            logger.info("%s parked tasks of %s have a handler here and are back in line", back, lane.queue)
