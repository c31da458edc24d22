"""The way out: outcomes wait here for their batch, and leave it settled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from time import monotonic

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import COMPLETE, facts
from django_dbtaskqueue.flow import observe, settle
from django_dbtaskqueue.flow.settle import Decided
from django_dbtaskqueue.metrics.collector import Collector
from django_dbtaskqueue.poller.connections import Carrier
from django_dbtaskqueue.poller.executors import Done
from django_dbtaskqueue.poller.queue_state import Lane, smoothed

FLUSH = 500  # outcomes that make a batch worth its commit
MOST = 1000  # outcomes in one commit
Batch = dict[str, list[Done]]  # by lane, what is settled together


@dataclass(slots=True)
class Counts:
    """What one poller did."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    lost: int = 0


class Settler:
    """Collects outcomes and settles them in batches, from any carrier; the fence makes a repeat harmless."""

    def __init__(self, lanes: Mapping[str, Lane], counts: Counts, ring: Callable[[], None]) -> None:
        self.held: set[Lease] = set()  # leases a processor may still settle
        self.done: deque[Done] = deque()
        self.metrics = Collector()
        self.pace: float | None = None  # seconds a task takes, of whichever queue; smoothed
        self._lanes = lanes
        self._counts = counts
        self._ring = ring
        self._lock = threading.Lock()
        self._settled_at = monotonic()

    def finish(self, done: Done, *, idle: bool) -> None:
        """A processor is done with a lease; ``idle`` when nothing waits for its slot. On the processor's own thread."""
        self.done.append(done)
        if idle or len(self.done) >= FLUSH:
            self._ring()

    def is_due(self) -> bool:
        """Whether what is done has waited for its batch long enough."""
        if len(self.done) >= FLUSH:
            return True
        try:
            first = self.done[0]
        except IndexError:  # nothing, or the other carrier took it a moment ago
            return False
        interval = self._lanes[first.lease.port.key].settings.settle_interval
        return monotonic() - self._settled_at >= interval.total_seconds()

    def settle(self, carrier: Carrier) -> None:
        """Settle what is done, in one transaction what may. On an error it is all kept for the next time."""
        pending = self._batches()
        try:
            while pending:
                self._settle_batch(carrier, pending[-1])
                pending.pop()
        finally:
            for batch in pending:
                for ended in batch.values():
                    self.done.extendleft(ended)
            self._settled_at = monotonic()

    def _batches(self) -> list[Batch]:
        """Take what is done, by queue, those queues together that are settled alike."""
        queues: Batch = {}
        grouped: set[str] = set()
        for _ in range(min(len(self.done), MOST)):
            try:
                done = self.done.popleft()
            except IndexError:  # the other carrier was faster
                break
            lease = done.lease
            queues.setdefault(lease.port.key, []).append(done)
            if lease.group is not None:
                grouped.add(lease.port.key)
        batches: dict[Hashable, Batch] = {}
        for key, ended in queues.items():
            # Groups are locked and moved up by queue.
            batches.setdefault(key if key in grouped else _way(self._lanes[key]), {})[key] = ended
        return list(batches.values())

    def _settle_batch(self, carrier: Carrier, batch: Batch) -> None:
        lane = self._lanes[next(iter(batch))]
        pairs = [
            (done.lease, done.settlement) for ended in batch.values() for done in ended if done.settlement is not None
        ]
        locked = self._write(carrier, lane, pairs) if pairs else None
        for key, ended in batch.items():
            if locked:
                self.done.extend([done for done in ended if done.lease.id in locked])
                ended = [done for done in ended if done.lease.id not in locked]
            self.held.difference_update([done.lease for done in ended])
            self._account(self._lanes[key], ended)

    def _write(self, carrier: Carrier, lane: Lane, pairs: list[Decided]) -> set[int]:
        """Settle pairs as ``lane`` has it; return the ids of those that have to wait, as their rows are locked."""
        session, settings = carrier.session(lane), lane.settings
        chunks = [pairs] if settings.settle == "batch" else [[pair] for pair in pairs]
        settled: set[int] = set()
        for chunk in chunks:
            settled |= settle.settle_surely(session, chunk, keep=settings.keep, group_retry=settings.group_retry)
        return self._explain(_missing(pairs, settled), carrier, lane) if len(settled) < len(pairs) else set()

    def _explain(self, missing: list[Decided], carrier: Carrier, lane: Lane) -> set[int]:
        """Tell a lease that was lost from an outcome that was stored before, by the processor or by a lost reply.

        Return the ids of the others: somebody keeps their rows locked, so they have to wait.
        """
        stored, standing = settle.resolve(carrier.session(lane), [lease for lease, _ in missing])
        for lease, outcome in missing:
            gone = facts(outcome).deletes_or_returns or lease.touched
            if lease.id in stored:
                lease.settled = lease.outcome is not None  # by the processor, whose commit was answered to nobody
            elif lease.id not in standing and not gone:
                lease.lost = facts(outcome).verb
        return standing

    def _account(self, lane: Lane, batch: list[Done]) -> None:
        ran = [done for done in batch if done.settlement is None or facts(done.settlement).counts_as]
        if len(ran) < len(batch):
            _look_after_parked(lane, batch)
        if not ran:
            return
        self.metrics.add(lane.port.alias, lane.queue, ran)
        seconds = sum([done.seconds for done in ran])
        with self._lock:
            lane.learn(seconds, len(ran))
            self.pace = smoothed(self.pace, seconds / len(ran))
            self._counts.finished += len(ran)
        watched = observe.watched()
        for done in ran:
            lease, outcome = done.lease, done.settlement
            if lease.lost and not lease.settled:
                self._counts.lost += 1
                observe.lost(lease, lease.lost)
                continue
            if outcome is None or lease.settled:
                outcome = lease.outcome  # by which the processor settled it by itself
            known = COMPLETE if outcome is None else facts(outcome)
            if known is COMPLETE and not watched and lease.group is None:
                continue
            self._counts.failed += known.error is not None
            if known.wakes or lease.group is not None:
                lane.wake()  # it may be due again soon, or the next of its group is in line
            if watched or known.error is not None:
                observe.finished(lease, outcome)


def _way(lane: Lane) -> Hashable:
    """Return what queues have in common whose outcomes may be written together."""
    return lane.port.alias, lane.port.model, lane.settings.keep, lane.settings.settle


def _missing(pairs: list[Decided], settled: set[int]) -> list[Decided]:
    """Return what was not settled: of two leases of one task (this poller took its own lost one) the older one."""
    newest: dict[int, int] = {}
    for lease, _ in pairs:
        newest[lease.id] = max(lease.total_attempt, newest.get(lease.id, 0))
    return [
        (lease, outcome)
        for lease, outcome in pairs
        if lease.id not in settled or lease.total_attempt < newest[lease.id]
    ]


def _look_after_parked(lane: Lane, batch: list[Done]) -> None:
    """A processor may have been registered between the look for one and the parking."""
    parked = [done.lease for done in batch if done.settlement is not None and facts(done.settlement).parks]
    if any(registry.find(lease.queue, lease.payload_type) for lease in parked):
        lane.unpark = True
        lane.wake()
