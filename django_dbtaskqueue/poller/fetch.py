"""The way in: whose turn it is, how much there is room for, and who processes what was taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from time import monotonic

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Park, Settlement
from django_dbtaskqueue.flow import checkout, observe
from django_dbtaskqueue.flow.checkout import QueueShare
from django_dbtaskqueue.flow.run import Processor, refusal
from django_dbtaskqueue.flow.scan import SCAN_NOW
from django_dbtaskqueue.poller import errands
from django_dbtaskqueue.poller.connections import Carrier
from django_dbtaskqueue.poller.crash_isolation import Suspects
from django_dbtaskqueue.poller.executors import Done, Executor, Job
from django_dbtaskqueue.poller.executors.pool_of_executors import Places
from django_dbtaskqueue.poller.fetch_many import Company
from django_dbtaskqueue.poller.free_slots import Kind, Rooms
from django_dbtaskqueue.poller.options import Options
from django_dbtaskqueue.poller.queue_state import Lane
from django_dbtaskqueue.poller.settle_batches import Counts, Settler

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
        self._company = Company(instance, self._rooms, options)

    def choose(self) -> tuple[list[Lane], int] | None:
        """Return the lanes whose turn it is and how much to take of them in all, reserved.

        None when no lane is due and has room.
        """
        with self._lock:
            most = self._suspects.limit(self._rooms.reserved)
            if most == 0:
                return None
            due = sorted(self._due(), key=TURN)
            lane, room = self._turn(due)
            if lane is None:
                return None
            self._time = max(lane.turn, self._time)  # no turns are saved up while there is nothing to take
            lanes, asked = self._company.of(lane, room, due) if most is None else ([lane], min(room, most))
            for each in lanes:
                each.turn = max(each.turn, self._time) + 1 / each.weight
            self._rooms.reserve(lanes, asked)
            return lanes, asked

    def _turn(self, due: list[Lane]) -> tuple[Lane | None, int]:
        """Return whose turn it is, and the room there is. The weights are kept by stride: a turn costs 1 / weight.

        Nobody takes the turn of a lane that only waits for others' tasks to get done: one of slow tasks lets none of
        them wait in memory, and refills of a fast one would keep it out for ever.
        """
        blocked: set[Executor] = set()
        full: set[Kind | None] = set()  # of many lanes most are of one kind
        for lane in due:
            kind = self._rooms.kind(lane)
            if (kind is not None and kind in full) or (blocked and not blocked.isdisjoint(self._rooms.places(lane))):
                continue
            room = self._room(lane)
            if room > 0:
                return lane, room
            full.add(kind)
            if self._rooms.behind(lane):
                blocked |= self._rooms.places(lane)
                if blocked >= self._rooms.everywhere:
                    break
        return None, 0

    def take(self, carrier: Carrier, lanes: list[Lane], asked: int) -> bool:
        """Check out and hand to the executors; return whether there was as much as asked for."""
        return self._take_of_many(carrier, lanes, asked) if len(lanes) > 1 else self._take_of(carrier, lanes[0], asked)

    def _take_of_many(self, carrier: Carrier, lanes: list[Lane], asked: int) -> bool:
        wakes = [lane.wakes for lane in lanes]
        try:
            parts = self._company.take(carrier, lanes, asked)
            self._hand_over(carrier, lanes, parts, asked)
        except Exception:
            for lane in lanes:
                lane.doubtful = True
            raise
        finally:
            with self._lock:
                self._rooms.reserve(lanes, -asked)
        empty = [lane for lane, part in zip(lanes, parts, strict=True) if part.reached and not part.taken]
        dues = self._company.next_dues(carrier, empty)
        with self._lock:
            for lane, part, before in zip(lanes, parts, wakes, strict=True):
                if part.reached:
                    lane.taken(got=len(part.taken), asked=part.limit, wakes=before, next_due=dues.get(lane.queue))
                else:
                    lane.turn -= 1 / lane.weight
        for lane in empty:
            lane.over = not lane.unpark and self._drained(carrier, lane)
        return sum([len(part.taken) for part in parts]) == asked

    def _take_of(self, carrier: Carrier, lane: Lane, asked: int) -> bool:
        wakes = lane.wakes
        try:
            if lane.doubtful and lane.reserved == asked:
                held = [lease for lease in self.settler.held.copy() if lease.port is lane.port]
                errands.clear_up(carrier.session(lane), lane, self.instance, held)
            if lane.unpark:
                errands.unpark(carrier.session(lane), lane)
            got = self._take(carrier, lane, asked)
        except Exception:
            lane.doubtful = True
            raise
        finally:
            with self._lock:
                self._rooms.reserve([lane], -asked)
        next_due = None if got else errands.next_due(carrier.session(lane), lane)
        with self._lock:
            lane.taken(got=got, asked=asked, wakes=wakes, next_due=next_due)
        if self.options.once or (not got and not lane.unpark and self._drained(carrier, lane)):
            lane.over = True
        return got == asked

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
            and (lane.settings.concurrency != 0 or not self._shut(lane, now))
            and (lane.next_poll <= now or self._rooms.reopened(lane))
        ]

    def _shut(self, lane: Lane, now: float) -> bool:
        """Close a lane that has been resized to nothing; it opens by a setting, which wakes it."""
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
        line = lane.line_without(without)
        if self._suspects.around():
            line.next_full_scan = SCAN_NOW
        return checkout.take(
            session,
            line,
            strategy=lane.strategy,
            poller_instance=self.instance,
            limit=asked,
            lease=lane.settings.lease,
            port=lane.port,
            tags=self.options.tags,
            without=without,
        )

    def _hand_over(self, carrier: Carrier, lanes: list[Lane], parts: list[QueueShare], asked: int) -> None:
        """Run what was taken of several lanes as one batch."""
        taken = [lease for part in parts for lease in part.taken]
        if not taken:
            return
        kept = self._suspects.sift(carrier.session(lanes[0]), taken, alone=self._rooms.reserved == asked)
        left_out = set(taken).difference(kept) if len(kept) < len(taken) else ()
        jobs: list[Job] = []
        given = [(lane, part.taken) for lane, part in zip(lanes, parts, strict=True) if part.taken]
        for lane, leases in given:
            jobs += self._jobs(lane, [lease for lease in leases if lease not in left_out] if left_out else leases)
        self.places.submit(jobs, fast=all(_is_fast(lane) for lane, _ in given))

    def _dispatch(self, lane: Lane, leases: list[Lease]) -> None:
        self.places.submit(self._jobs(lane, leases), fast=_is_fast(lane))

    def _jobs(self, lane: Lane, leases: list[Lease]) -> list[Job]:
        """Return plain processors' jobs; other processors are given theirs."""
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
            refused = refusal(lease, processor, lane.settings.expired)
            if refused is not None or processor is None:
                self._refuse(lease, refused)
            elif processor.plain:
                jobs.append(Job(lease, processor))
            else:
                special.setdefault(processor, []).append(lease)
        for processor, batch in special.items():
            self.places.submit_special(processor, batch)
        return jobs

    def _refuse(self, lease: Lease, refused: Settlement | None) -> None:
        if isinstance(refused, Park):
            logger.warning("Task %s parked: %s", lease.id, refused.reason, extra=observe.fields(lease))
        self.settler.finish(Done(lease, refused, 0.0), idle=True)

    def _drained(self, carrier: Carrier, lane: Lane) -> bool:
        if not self.options.drain or any(lease.port is lane.port for lease in self.settler.held.copy()):
            return False
        session = carrier.session(lane)
        tags = session.sql.dialect.array(self.options.tags)
        if not session.run(session.sql.soon, {"queue_name": lane.queue, "horizon": SOON, "tags": tags}):
            return True
        lane.next_poll = min(lane.next_poll, monotonic() + lane.settings.poll_interval.total_seconds())
        return False


def _is_fast(lane: Lane) -> bool:
    return lane.mean is not None and lane.mean < FAST
