"""Fetch: which queues are next, how many tasks to take, the checkout, and the way to the executors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from django_dbtaskqueue import registry
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock, next_pause
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Settlement
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.checkout import Checkout, QueueShare, SkipLocked, next_due
from django_dbtaskqueue.flow.run import Processor, refusal
from django_dbtaskqueue.poller import queue_state
from django_dbtaskqueue.poller.executors import Done, Executor, Job
from django_dbtaskqueue.poller.free_slots import Capacity, free_calls, free_slots, limits_key, processor_slots, share_of
from django_dbtaskqueue.poller.queue_state import ConnectionSet, QueueState

MAX_QUEUES_PER_STATEMENT = 50
MANY_OTHERS = 2  # pollers of a queue, with which the database is busy without a second checkout of this one
NEXT_TURN = attrgetter("next_turn")


@dataclass(eq=False)
class Fetcher:
    """Takes tasks from the queues, by weight, as many as the executors have room for."""

    instance: str
    queues: Mapping[str, QueueState]
    capacity: Capacity
    expect_lease: Callable[[QueueState, float], object]

    def __post_init__(self) -> None:
        self._settler, self._isolation = self.capacity.settler, self.capacity.isolation
        self._lock = threading.RLock()
        self._last_turn = 0.0  # of the queue that had the last turn
        self._drained = 0  # how often a queue that had tasks was found drained

    # -- choose ------------------------------------------------------------------------------------------------------

    def choose(self, *, alone: bool = False) -> tuple[list[QueueState], int] | None:
        """Reserve the next fetch: return its queues and how many tasks to take from them in all.

        ``alone``: of queues that few others serve. None if no queue is due and has free slots. Turns follow
        stride scheduling: a turn costs a queue 1 / weight.
        """
        with self._lock:
            due = sorted([one for one in self._due() if not alone or one.cursor.others < MANY_OTHERS], key=NEXT_TURN)
            queue, asked = self._first_with_free_slots(due) if due else (None, 0)
            if queue is None:
                return None
            self._last_turn = max(queue.next_turn, self._last_turn)  # an empty queue does not save up turns
            queues = [queue]
            if len(due) > 1 and self._can_share(queue) and not self._isolation.active():
                total = min(free_slots(queue, self.capacity, shared=True), queue.settings.batch_size)
                queues += self._sharing_queues(queue, total, due)
                asked = total if len(queues) > 1 else asked
            for each in queues:
                each.next_turn = max(each.next_turn, self._last_turn) + 1 / each.weight
                each.exhausted |= self.capacity.options.once  # now: the other fetch thread takes no second turn
            self.reserve(queues, asked)
            return queues, asked

    def _due(self) -> list[QueueState]:
        due, now = [], clock.monotonic()
        for queue in self.queues.values():
            if queue.exhausted or not (queue.next_poll <= now or queue.full_processors):
                continue
            if queue.settings.concurrency == 0:  # an operator's new setting wakes it
                queue.next_poll = now + queue.settings.poll_interval.total_seconds()
                queue.exhausted = self.capacity.options.drain or self.capacity.options.once
                queue.drained_at = self._ends()
            elif queue.next_poll <= now or any(
                processor_slots(queue, processor, self.capacity) > 0 for processor in queue.full_processors
            ):
                if queue.placement.found is not registry.found.get(queue.name):  # its processors have changed
                    self.capacity.executors.place(queue)
                due.append(queue)
        return due

    def _first_with_free_slots(self, due: list[QueueState]) -> tuple[QueueState | None, int]:
        """Return the first due queue with free slots, and their number.

        A queue keeps its turn while it only waits for the end of other queues' tasks: no queue after it on the same
        executor is chosen. Otherwise a queue of slow tasks, which buffers nothing, would starve behind a fast one.
        """
        blocked: set[Executor] = set()
        full: set[Hashable] = set()  # of many queues, most have equal limits
        for queue in due:
            if blocked and not blocked.isdisjoint(queue.placement.executors):
                continue
            key = limits_key(queue, self.capacity) if len(due) > 1 else None
            if key in full:
                continue
            free = free_slots(queue, self.capacity)
            if free > 0:
                return queue, free
            if key is not None:
                full.add(key)
            if self._waits_for_slots(queue):
                blocked |= queue.placement.executors
                if blocked >= self.capacity.executors.placed:
                    break
        return None, 0

    def _waits_for_slots(self, queue: QueueState) -> bool:
        """Whether a queue gets free slots as soon as the jobs that wait in its executors are done."""
        executors = self.capacity.executors
        return any(
            executors.of(processor).todo and free_calls(processor, executors) != 0
            for processor in queue.placement.processors or (None,)
        )

    def _can_share(self, queue: QueueState) -> bool:
        """Whether one statement can serve a queue together with others: it needs no statement of its own."""
        due = queue.unpark_due or queue.groups_due or queue.reply_lost or queue.alone
        apart = due or queue.full_processors or queue.foreign_types or self.capacity.options.once
        return type(queue.strategy) is SkipLocked and queue.settings.max_wait is None and not apart

    def _sharing_queues(self, first: QueueState, asked: int, due: list[QueueState]) -> Iterator[QueueState]:
        """Yield the due queues to serve in one statement with the first one, in the order of their turns.

        Each has free slots for the whole batch, so it does not matter how many tasks each of them gives. A queue that
        probably fills the batch is served alone.
        """
        key = limits_key(first, self.capacity)
        if key is None or first.likely_ready >= asked:
            return
        port, lease, executor = first.port, first.settings.lease, first.placement.executor
        found, likely_ready, has_slots = 1, first.likely_ready, {key: True, None: False}
        for queue in due:
            if queue is first or not self._can_share(queue) or queue.settings.lease != lease:
                continue
            if queue.port.model is not port.model or queue.port.alias != port.alias:
                continue
            if queue.placement.executor is not executor:  # another queue may have its turn there
                continue
            key = limits_key(queue, self.capacity)
            if key not in has_slots:
                has_slots[key] = free_slots(queue, self.capacity, shared=True) >= asked
            if has_slots[key]:
                yield queue
                found += 1
                likely_ready += queue.likely_ready
                if found == MAX_QUEUES_PER_STATEMENT or likely_ready >= asked:
                    return

    def reserve(self, queues: Iterable[QueueState], tasks: int) -> None:
        """Count tasks as asked for; a negative number ends that."""
        with self._lock:
            for queue in queues:
                queue.reserved += tasks
            self.capacity.reserved += tasks

    def is_exhausted(self) -> bool:
        """Whether a run that ends by itself has nothing more to take."""
        most = self.capacity.options.max_tasks
        if most is not None and self._settler.counts.started >= most:
            return True
        if not all(queue.exhausted for queue in self.queues.values()):
            return False
        if not self.capacity.options.drain:
            return True
        with self._lock:  # a task that has ended since may have brought one to another queue
            stale = [queue for queue in self.queues.values() if queue.drained_at != self._ends()]
            for queue in stale:
                queue.exhausted, queue.next_poll = False, 0.0
        return not stale

    def _ends(self) -> tuple[int, int]:
        """Return what a draining run has seen end: queues in which others' tasks ran, and tasks of its own."""
        return self._drained, self._settler.counts.finished

    # -- fetch -------------------------------------------------------------------------------------------------------

    def poll(self, connections: ConnectionSet, queues: list[QueueState], asked: int) -> bool:
        """Prepare and fetch what was chosen, and note what came; return whether there was as much as asked for."""
        wakes, ends = [queue.wakes for queue in queues], self._ends() if self.capacity.options.drain else None
        first = queues[0]
        try:
            session = connections.session(first)
            if first.reply_lost and first.reserved == asked:
                queue_state.release_unknown(session, first, self.instance, self._settler.held.copy())
            queue_state.prepare_checkout(session, first, self.queues.values(), self.instance)
            shares = self.fetch(session, queues, asked)
        except Exception:
            for queue in queues:
                queue.reply_lost, queue.exhausted, queue.alone = True, False, queue.alone or len(queues) > 1
            raise
        finally:
            self.reserve(queues, -asked)
        pairs = list(zip(queues, shares, strict=True))
        empty: dict[str, Iterable[int]] = {
            queue.name: {*chain(queue.cursor.watermarks, *(one.watermarks for one in queue.cursors.values()))}
            for queue, share in pairs
            if share.reached and not share.taken
        }
        next_dues = next_due(session, empty) if empty else {}
        with self._lock:
            for (queue, share), before in zip(pairs, wakes, strict=True):
                if share.reached:
                    queue.alone, due = False, next_dues.get(queue.name)
                    queue.fetched(got=len(share.taken), asked=share.limit, wakes=before, next_due=due)
                else:
                    queue.next_turn -= 1 / queue.weight
        if ends:
            for queue, share in pairs:
                if share.reached:
                    self._note_drained(session, queue, len(share.taken), ends)
        return sum([len(share.taken) for share in shares]) == asked

    def fetch(self, session: Session, queues: list[QueueState], asked: int) -> list[QueueShare]:
        """Check out of queues and hand the tasks to the executors; return what each queue gave."""
        if queues[0].placement.one_limit:
            return self._take(session, queues, asked)
        return [self._take_by_processor(session, queues[0], asked)]

    def _take_by_processor(self, session: Session, queue: QueueState, asked: int) -> QueueShare:
        """Take tasks so that no processor gets more than its free slots, and a full one does not block the others."""
        total, served = QueueShare(queue.cursor, asked, port=queue.port, reached=True), set[Processor]()
        processors = queue.placement.processors
        while True:
            free = {each: processor_slots(queue, each, self.capacity, own=asked) for each in processors}
            fitting = {each: slots for each, slots in free.items() if slots > 0 and each not in served}
            queue.full_processors = frozenset(processors) - fitting.keys()
            limit = min([asked - len(total.taken), *fitting.values()]) if fitting else 0
            if limit <= 0:
                return total
            (share,) = self._take(session, [queue], limit)
            total.taken += share.taken
            if len(share.taken) < limit:
                return total
            least = min(fitting.values())
            served |= {each for each, slots in fitting.items() if slots == least}

    def _take(self, session: Session, queues: list[QueueState], asked: int) -> list[QueueShare]:
        """Check out of queues and submit to the executors; return what each of them gave."""
        first, tags = queues[0], self.capacity.options.tags
        without = first.left_out() if first.full_processors or first.foreign_types else ()
        shares = [
            QueueShare(
                queue.cursor_without(without) if without else queue.cursor,
                share_of(queue, asked) if len(queues) > 1 else asked,
                port=queue.port,
                strategy=queue.strategy,
                limiter=queue.limiter,
                without=without,
            )
            for queue in queues
        ]
        if self._isolation.queues and self._isolation.active():
            shares[0].cursor.rewind()
        min_lease = max([queue.min_lease for queue in queues])
        taken = Checkout(session, self.instance, first.settings.lease, tags, min_lease).take(shares, asked)
        if not taken:
            return shares
        kept, given = taken, [(queue, share.taken) for queue, share in zip(queues, shares, strict=True) if share.taken]
        may_kill = self._isolation.queues or any(lease.lost_leases for lease in taken)
        if may_kill and not self.capacity.options.once:
            kept = self._isolation.sift(session, taken, alone=self.capacity.reserved == asked)
        released = set(taken).difference(kept) if len(kept) < len(taken) else ()
        jobs: list[Job] = []
        for queue, leases in given:
            left = [lease for lease in leases if lease not in released] if released else leases
            jobs += self._jobs(session, queue, left)
        means = [queue.run_seconds for queue, _ in given]
        fast = all(mean is not None and mean < queue_state.FAST_TASK_SECONDS for mean in means)
        self.capacity.executors.submit(jobs, fast=fast)
        return shares

    def _jobs(self, session: Session, queue: QueueState, leases: list[Lease]) -> list[Job]:
        """Return the jobs of plain processors; submit those of other processors."""
        self._settler.held.update(leases)
        self._settler.counts.started += len(leases)
        found = registry.found.get(queue.name, {})
        processors = [found.get(lease.payload_type) for lease in leases]
        observe.checked_out(leases, processors)
        self.expect_lease(queue, queue.settings.lease.total_seconds())  # it may be shorter than the last renewal knew
        now, late, expired = clock.monotonic(), False, queue.settings.expired
        jobs, isolated = list[Job](), list[Job]()
        special: dict[Processor, list[Lease]] = {}
        refusals: list[tuple[Lease, Settlement | None]] = []
        for lease, processor in zip(leases, processors, strict=True):
            if lease.lease_seconds is not None:
                self.expect_lease(queue, lease.lease_seconds)
            late = late or lease.deadline <= now
            refused = refusal(lease, processor, expired) if processor is None or lease.expire_text else None
            if refused is not None or processor is None:
                refusals.append((lease, refused))
            elif lease.lost_leases and self.capacity.executors.isolates(processor):
                isolated.append(Job(lease, processor))
            elif processor.plain:
                jobs.append(tuple.__new__(Job, (lease, processor, ())))  # half the time of Job's own function
            else:
                special.setdefault(processor, []).append(lease)
        if isolated:
            self.capacity.executors.submit_isolated(isolated)
        left = queue_state.leave_to_others(session, queue, refusals, self.instance) if refusals else ()
        for lease, settlement in left:
            self._refuse(lease, settlement)
        if late:
            queue.min_lease = next_pause(queue.min_lease, *queue_state.MIN_LEASE_SECONDS)
        for processor, batch in special.items():
            self.capacity.executors.submit_special(processor, batch)
        return jobs

    def _refuse(self, lease: Lease, refused: Settlement | None) -> None:
        if refused is not None and refused.facts.parks:
            logger.warning("Task %s parked: %s", lease.id, getattr(refused, "reason", ""), extra=observe.fields(lease))
        self._settler.finish(Done(lease, refused, 0.0), idle=True)

    def _note_drained(self, session: Session, queue: QueueState, got: int, ends: tuple[int, int]) -> None:
        """Note whether a draining run has taken all of a queue. ``ends``: what had ended before the look."""
        drained = not got and queue_state.is_drained(session, queue, self._settler.held.copy(), self.capacity.options)
        with self._lock:
            if drained and queue.busy:
                self._drained, ends = self._drained + 1, (ends[0] + 1, ends[1])
            queue.exhausted, queue.busy, queue.drained_at = drained, not drained, ends
