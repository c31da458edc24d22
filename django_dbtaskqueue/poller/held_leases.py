"""The leases that a poller holds: their outcomes wait for a batch and are written together, and they are renewed."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

from django.db.utils import Error

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import COMPLETE_FACTS, Release
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import observe, settle
from django_dbtaskqueue.flow.run import smoothed
from django_dbtaskqueue.flow.settle import Decided, resolve
from django_dbtaskqueue.metrics import Collector, Ended
from django_dbtaskqueue.poller.executors import Done
from django_dbtaskqueue.poller.queue_state import ConnectionSet, QueueState

FULL_BATCH_OUTCOMES = 500  # that are worth a commit at once
MAX_BATCH_OUTCOMES = 1000  # in one commit
RUN_AGAIN = {"retried": "will retry", "reenqueued": "will run again"}  # how the closing line tells it
MAX_TASKS_AGAIN = 100_000  # that are remembered to be told
UNSTORED_OUTCOME_SECONDS = 5.0  # before the task is blamed for a database error that hits only its outcome
LEASE, SECONDS = itemgetter(0), itemgetter(2)  # of a Done
Batch = dict[str, list[Done]]  # by queue key: what is settled together


@dataclass(slots=True)
class Counts:
    """How many attempts of tasks one poller started, finished and failed."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # of those finished, where the outcome is looked at
    again: dict[tuple[str, str, int], str] = field(default_factory=dict)  # tasks to run again, by their last outcome
    later: deque[tuple[str, str, int, int]] = field(default_factory=lambda: deque(maxlen=100))  # Spark keeps no order


class Settler:
    """Collects outcomes and settles them in batches, on any fetch thread. The fence makes a repeat harmless."""

    def __init__(self, queues: Mapping[str, QueueState], wake: Callable[[], None]) -> None:
        self.held: set[Lease] = set()  # leases that have no stored outcome yet
        self.done: deque[Done] = deque()
        self.counts = Counts()
        self.metrics = Collector()
        self.mean_run_seconds: float | None = None  # of one task of any queue, smoothed
        self._queues = queues
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
        with suppress(IndexError):  # the other fetch thread was faster
            for _ in range(min(len(self.done), MAX_BATCH_OUTCOMES)):
                done = self.done.popleft()
                by_queue.setdefault(done.lease.port.key, []).append(done)
        batches: dict[Hashable, Batch] = {}
        for key, ended in by_queue.items():
            # Groups are locked, and their next tasks made ready, by queue.
            port, settings = self._queues[key].port, self._queues[key].settings
            rules = (port.alias, port.model, settings.keep, settings.settle)
            batches.setdefault(key if any(done.lease.group is not None for done in ended) else rules, {})[key] = ended
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
        settled: set[int] = set()
        for chunk in [pairs] if settings.settle == "batch" else [[pair] for pair in pairs]:
            settled |= settle.settle_surely(session, chunk, patience=UNSTORED_OUTCOME_SECONDS)
        return set() if len(settled) == len(pairs) else settle.find_out(session, pairs, settled)

    def _account(self, queue: QueueState, batch: list[Done]) -> None:
        """Count and tell what became of these leases. Fetch soon if that made a task ready."""
        ended: list[Ended] = [
            (done.lease, done.lease.result_of(done.settlement), done.seconds)
            if done.settlement is None or done.lease.settled or done.lease.lost
            else done
            for done in batch
        ]
        ran = [one for one in ended if one[1] is None or one[1].facts.counts_as]
        if len(ran) < len(ended):
            _see_to_returned(queue, ended)
        if ran:
            self.metrics.add(queue.port.alias, queue.name, ran)
            total = sum(map(SECONDS, ran))
            with self._lock:
                before, queue.timed = queue.timed, len(ran)
                share = len(ran) / (len(ran) + before) if len(ran) > before else 0.0  # few slow first calls say little
                queue.run_seconds = smoothed(queue.run_seconds, total / len(ran), share)
                self.mean_run_seconds = smoothed(self.mean_run_seconds, total / len(ran))
                self.counts.finished += len(ran)
        observed = queue.port.log_level or signals.registered or any(signal.receivers for signal in observe.ENDINGS)
        wakes = False
        for lease, result, seconds in ended:
            known = COMPLETE_FACTS if result is None else result.facts
            # It may be due again soon, or the next task of its group is ready.
            wakes = wakes or known.wakes or lease.group is not None
            if lease.total_attempt > 1 and known.counts_as:
                self.counts.again.pop((lease.port.alias, lease.queue, lease.id), None)
                self.counts.later.append((lease.port.alias, lease.queue, lease.id, lease.total_attempt))
            if known is COMPLETE_FACTS and not observed:
                continue
            self.counts.failed += known.error is not None
            self.counts.outcomes[known.counts_as] += 1
            if known.counts_as in RUN_AGAIN and len(self.counts.again) < MAX_TASKS_AGAIN:
                task = (lease.port.alias, lease.queue, lease.id)
                if (*task, lease.total_attempt + 1) not in self.counts.later:
                    self.counts.again[task] = known.counts_as
            observe.ended(lease, result, seconds)
        if wakes:
            queue.wake()


def _see_to_returned(queue: QueueState, ended: list[Ended]) -> None:
    """Fetch soon if tasks that were given back can be taken again."""
    # The processor was registered after the poller had looked for it.
    parked = [lease for lease, result, _ in ended if result is not None and result.facts.parks]
    if any(registry.find(lease.queue, lease.payload_type) for lease in parked):
        queue.unpark_due = True
        queue.wake()
    # They ran, and are ready again at their old place: behind the watermark.
    if any(seconds for _, result, seconds in ended if result == Release()):
        queue.cursor.rewind()
        queue.wake()


# -- renew -------------------------------------------------------------------------------------------------------------

# On a thread and a connection of their own, each third of the lease. So neither a busy processor nor a slow settle lets
# a lease run out. A renewal never waits for a locked row: the processor may have locked it itself.

RENEW_SOON_SECONDS = 0.005  # from a notification that leases were ended to the renewal: so a flood of them costs little
RETRY_SECONDS = 1.0  # at most, after a renewal that could not reach the database; of a short lease sooner


class Renewer(WatchedThread):
    """Renews the leases that ``held`` returns; calls ``lost`` with those that are gone."""

    def __init__(
        self,
        queues: Iterable[QueueState],
        held: Callable[[QueueState], list[Lease]],
        lost: Callable[[list[Lease]], None],
    ) -> None:
        super().__init__(target=self._loop, name="dbtaskqueue-renew", daemon=True)
        self._held = held
        self._lost = lost
        self._due = dict.fromkeys(queues, 0.0)
        self._lock = threading.Lock()  # of _due
        self._wakeup = threading.Event()
        self._ending = False

    def stop(self) -> None:
        """End; leases that are still held run out."""
        self._ending = True
        self._wakeup.set()
        if self.is_alive():
            self.join(timeout=2)

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
        while not self._ending:
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
            if gone := renew(session, leases, max(seconds, queue.min_lease), queue.min_lease):
                self._lost(gone)
        except Exception as error:  # of any kind: without this thread every lease would run out
            expected = isinstance(error, Error)
            level = logging.DEBUG if expected else logging.ERROR
            logger.log(level, "Leases of %s not renewed: %s", queue.name, error, exc_info=not expected)
            session.close()
            return min(RETRY_SECONDS, third / 4)
        return third


def renew(session: Session, leases: list[Lease], seconds: float, min_lease: float = 0.0) -> list[Lease]:
    """Extend leases of a queue to ``seconds`` (or their own length) from now; return those that are gone.

    A lease whose row is locked (by its processor's transaction) is neither extended nor gone, nor is one whose
    processor has settled it. One that ended too long ago is gone, if the queue's limit may have forgotten it.
    """
    now, revivable = clock.monotonic(), leases[0].port.revivable
    rows = json.dumps([{"task_id": lease.id, "token": lease.total_attempt} for lease in leases])
    asked = {"rows": rows, "lease": seconds, "min_lease": min_lease, "since": -revivable}
    kept = {row[0] for row in session.run(session.sql.renew, asked)}
    newest = dict(sorted((lease.id, lease.total_attempt) for lease in leases))  # of a task that was taken again
    mine = [lease for lease in leases if lease.total_attempt == newest[lease.id]]
    for lease in mine:
        if lease.id in kept:
            lease.deadline = now + (lease.lease_seconds or seconds)
    if len(kept) == len(leases):
        return []
    if len(kept) < len(mine):
        settled, _ = resolve(session, [lease for lease in mine if lease.id not in kept])
        kept |= settled.union(id for id, *_, left in session.run(session.sql.held_leases, asked) if left > -revivable)
    still_held = {lease for lease in mine if lease.id in kept}
    return [lease for lease in leases if lease not in still_held and not lease.touched]
