"""Settle: outcomes wait here for their batch and are written together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from django_dbtaskqueue import registry
from django_dbtaskqueue.core.durations import clock, smoothed
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import COMPLETE_FACTS, Complete, Release
from django_dbtaskqueue.flow import observe, settle
from django_dbtaskqueue.flow.settle import Decided
from django_dbtaskqueue.metrics import Collector
from django_dbtaskqueue.poller.executors import Done

if TYPE_CHECKING:
    from django_dbtaskqueue.poller.queue_state import ConnectionSet, QueueState

FULL_BATCH_OUTCOMES = 500  # that are worth a commit at once
MAX_BATCH_OUTCOMES = 1000  # in one commit
UNSTORED_OUTCOME_SECONDS = 5.0  # before the task is blamed for a database error that hits only its outcome
LEASE, SECONDS = attrgetter("lease"), attrgetter("seconds")
COMPLETE = Complete()  # of a processor that settled its task by itself
Batch = dict[str, list[Done]]  # by queue key: what is settled together


@dataclass(slots=True)
class Counts:
    """How many tasks one poller started, finished, failed and lost."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    lost: int = 0


class Settler:
    """Collects outcomes and settles them in batches, on any fetch thread. The fence makes a repeat harmless."""

    def __init__(self, queues: Mapping[str, QueueState], counts: Counts, wake: Callable[[], None]) -> None:
        self.held: set[Lease] = set()  # leases that have no stored outcome yet
        self.done: deque[Done] = deque()
        self.metrics = Collector()
        self.mean_run_seconds: float | None = None  # of one task of any queue, smoothed
        self._queues = queues
        self._counts = counts
        self._wake = wake
        self._lock = threading.Lock()
        self._settled_at = clock.monotonic()

    def finish(self, done: Done, *, idle: bool) -> None:
        """Take an outcome; ``idle`` if no job waits for the slot. Called on the processor's own thread."""
        self.done.append(done)
        if idle or len(self.done) >= FULL_BATCH_OUTCOMES:
            self._wake()

    def is_due(self) -> bool:
        """Whether the outcomes have waited long enough for their batch, or fill it."""
        if len(self.done) >= FULL_BATCH_OUTCOMES:
            return True
        try:
            first = self.done[0]
        except IndexError:  # no outcome, or the other fetch thread has just taken it
            return False
        interval = self._queues[first.lease.port.key].settings.settle_interval
        return clock.monotonic() - self._settled_at >= interval.total_seconds()

    def settle(self, connections: ConnectionSet) -> None:
        """Settle all outcomes, with as few transactions as possible. After an error they wait for the next call."""
        pending = self._batches()
        try:
            while pending:
                self._settle_batch(connections, pending[-1])
                pending.pop()
        except Exception:
            for done in chain.from_iterable(pending[-1].values()):
                done.lease.unanswered = True
            raise
        finally:
            for batch in pending:
                for ended in batch.values():
                    self.done.extendleft(ended)
            self._settled_at = clock.monotonic()

    def _batches(self) -> list[Batch]:
        """Take the outcomes by queue, and put queues together that are settled by the same rules."""
        by_queue: Batch = {}
        grouped: set[str] = set()
        for _ in range(min(len(self.done), MAX_BATCH_OUTCOMES)):
            try:
                done = self.done.popleft()
            except IndexError:  # the other fetch thread was faster
                break
            lease = done.lease
            by_queue.setdefault(lease.port.key, []).append(done)
            if lease.group is not None:
                grouped.add(lease.port.key)
        batches: dict[Hashable, Batch] = {}
        for key, ended in by_queue.items():
            # Groups are locked, and their next tasks made ready, by queue.
            port, settings = self._queues[key].port, self._queues[key].settings
            rules = (port.alias, port.model, settings.keep, settings.settle)
            batches.setdefault(key if key in grouped else rules, {})[key] = ended
        return list(batches.values())

    def _settle_batch(self, connections: ConnectionSet, batch: Batch) -> None:
        queue = self._queues[next(iter(batch))]
        every = chain.from_iterable(batch.values())
        pairs = [(done.lease, done.settlement) for done in every if done.settlement is not None]
        locked = self._write(connections, queue, pairs) if pairs else None
        for key, ended in batch.items():
            if locked:
                self.done.extend([done for done in ended if done.lease.id in locked])
                ended = [done for done in ended if done.lease.id not in locked]
            self.held.difference_update(map(LEASE, ended))
            self._account(self._queues[key], ended)

    def _write(self, connections: ConnectionSet, queue: QueueState, pairs: list[Decided]) -> set[int]:
        """Settle pairs by the settings of ``queue``; return the ids that wait because their rows are locked."""
        session, settings = connections.session(queue), queue.settings
        chunks = [pairs] if settings.settle == "batch" else [[pair] for pair in pairs]
        settled: set[int] = set()
        for chunk in chunks:
            settled |= settle.settle_surely(
                session,
                chunk,
                keep=settings.keep,
                group_retry=settings.group_retry,
                patience=UNSTORED_OUTCOME_SECONDS,
            )
        if len(settled) == len(pairs):
            return set()
        return settle.find_out(session, pairs, settled, keep=settings.keep)

    def _account(self, queue: QueueState, batch: list[Done]) -> None:
        """Count and tell what became of these leases. Fetch soon if that made a task ready."""
        ran = [done for done in batch if (done.settlement or done.lease.outcome or COMPLETE).facts.counts_as]
        if len(ran) < len(batch):
            _unpark_soon(queue, batch)
            if any(done.seconds for done in batch if done.settlement == Release()):
                queue.cursor.rewind()  # they ran, and are ready again at their old place: behind the watermark
                queue.wake()
        if ran:
            self._measure(queue, ran)
        watched, wakes = observe.watched() or queue.port.log_level, False
        for done in batch:
            lease, stored = done.lease, done.lease.stored(done.settlement)
            known = COMPLETE_FACTS if stored is None else stored.facts
            if lease.is_lost:
                self._counts.lost += 1
            else:
                self._counts.failed += known.error is not None
                # It may be due again soon, or the next task of its group is ready.
                wakes = wakes or known.wakes or lease.group is not None
                if known is COMPLETE_FACTS and not watched:
                    continue
            observe.ended(lease, done.settlement, done.seconds)
        if wakes:
            queue.wake()

    def _measure(self, queue: QueueState, ran: list[Done]) -> None:
        """Count attempts, and how long they ran."""
        self.metrics.add(queue.port.alias, queue.name, ran)
        seconds = sum(map(SECONDS, ran))
        with self._lock:
            before, queue.timed = queue.timed, len(ran)
            share = len(ran) / (len(ran) + before) if len(ran) > before else 0.0  # a few slow first calls say little
            queue.run_seconds = smoothed(queue.run_seconds, seconds / len(ran), share)
            self.mean_run_seconds = smoothed(self.mean_run_seconds, seconds / len(ran))
            self._counts.finished += len(ran)


def _unpark_soon(queue: QueueState, batch: list[Done]) -> None:
    """Have tasks unparked whose processor was registered after the poller had looked for it."""
    parked = [done.lease for done in batch if done.settlement is not None and done.settlement.facts.parks]
    if any(registry.find(lease.queue, lease.payload_type) for lease in parked):
        queue.unpark_due = True
        queue.wake()
