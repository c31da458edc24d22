"""Free slots: how many tasks a queue may take now, the executors that run them, and crash isolation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from django_dbtaskqueue import registry
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import observe, settle
from django_dbtaskqueue.flow.run import PROCESS, Processor
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Executor, Finish, Job
from django_dbtaskqueue.poller.executors.pool import PoolExecutor
from django_dbtaskqueue.poller.executors.process import IsolatedExecutor, ProcessExecutor, can_isolate
from django_dbtaskqueue.poller.executors.thread import AsyncExecutor, ThreadExecutor
from django_dbtaskqueue.poller.queue_state import Options, Placement, QueueState

if TYPE_CHECKING:
    from django_dbtaskqueue.poller.held_leases import Settler

BUFFER_SECONDS = 0.1  # of work of all slots that may wait in memory: few leases age there
MAX_BUFFERED_CALLS = 1000  # calls of one processor with a concurrency limit
MAX_BUFFERED_BATCHES = 4  # one runs, one is settled, one is on its way, and one is next
MAX_UNKNOWN_BUFFERED_TASKS = 100  # of a queue without timing data
MIN_RUN_SECONDS = 1e-6  # assumed, so that nothing is divided by 0
PROBE_TASKS = 2  # the first fetch of such a queue when no more slots are free


class Executors:
    """Threads, one event loop, child processes, and one pool for each executor that a processor brings along."""

    def __init__(self, options: Options, finish: Finish) -> None:
        self._options = options
        self._finish = finish
        self.limiter = ConcurrencyLimiter()
        self._threads = ThreadExecutor(options.threads, finish, self.limiter)
        self._made: dict[Hashable, Executor] = {}  # the others: each for the first processor or task that needs it
        self._lock = threading.Lock()
        self.all: list[Executor] = [self._threads]  # those in use; threads always are
        self.placed: set[Executor] = set()  # those with a processor of a polled queue

    def of(self, processor: Processor | None) -> Executor:
        """Return the executor of a processor; raise ``ImproperlyConfigured`` if ``executor=`` is not an executor."""
        if processor is None:
            return self._threads
        if processor.is_async:
            return self._one(AsyncExecutor, AsyncExecutor, self._options.coroutines)
        wanted = self._options.executor if processor.executor is None else processor.executor
        if wanted is None:
            return self._threads
        if wanted == PROCESS:
            return self._one(PROCESS, ProcessExecutor, self._threads.slots)
        return self._one(wanted if isinstance(wanted, str) else id(wanted), PoolExecutor, wanted)

    def _one(self, key: Hashable, kind: Callable[..., Executor], *options: object) -> Executor:
        """Return the one executor with this key, which keeps its ``options``; made at the first call."""
        with self._lock:
            if (made := self._made.get(key)) is None:
                made = self._made[key] = kind(*options, self._finish, self.limiter)
                self.all.append(made)
        return made

    def place(self, queue: QueueState) -> Placement:
        """Set and return where the queue's processors run. Tasks without a processor count as jobs of threads."""
        found, processors = registry.found.get(queue.name), registry.processors(queue.name)
        executors = frozenset(map(self.of, processors or (None,)))
        self.placed |= executors
        one, plain = len(processors) < 2, all(processor.plain for processor in processors)
        executor = next(iter(executors)) if one and plain else None
        queue.placement = Placement(found, processors, executors, executor, one or (len(executors) == 1 and plain))
        return queue.placement

    def slots(self, queues: Iterable[str]) -> int:
        """Return how many jobs can run at a time in the executors of these queues' processors."""
        used = {self.of(processor) for queue in queues for processor in registry.processors(queue)}
        return sum(executor.slots for executor in used or {self._threads})

    def waiting(self) -> bool:
        return any([executor.todo for executor in self.all])  # noqa: C419 -- a generator costs a call for each executor

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        executors = {one: self.of(one) for one in {job.processor for job in jobs}}
        if len(executors) == 1:
            executors[jobs[0].processor].submit(jobs, fast=fast)
            return
        for executor in set(executors.values()):
            executor.submit([job for job in jobs if executors[job.processor] is executor], fast=fast)

    def submit_special(self, processor: Processor, leases: list[Lease]) -> None:
        """Run tasks of a processor that takes batches or has a concurrency limit."""
        size = processor.batch or 1
        chunks = [leases[start : start + size] for start in range(0, len(leases), size)]
        if admitted := self.limiter.admit([Job(chunk[0], processor, tuple(chunk[1:])) for chunk in chunks]):
            self.of(processor).submit(admitted, fast=False)

    def contains(self, processor: Processor | None) -> bool:
        """Whether each call of this processor runs in a process of its own anyway."""
        return PROCESS in self._made and processor is not None and self.of(processor) is self._made[PROCESS]

    def isolates(self, processor: Processor | None) -> bool:
        """Whether a task of this processor can run in a process of its own."""
        made = self._made.get(IsolatedExecutor)
        fails = isinstance(made, IsolatedExecutor) and not made.works
        return self.contains(processor) or (not fails and can_isolate(processor))

    def submit_isolated(self, jobs: list[Job]) -> None:
        """Run jobs of one task each that may kill their process."""
        for job in jobs:
            if self.contains(job.processor):
                self.submit_special(job.processor, [job.lease])
            else:
                self._one(IsolatedExecutor, IsolatedExecutor).submit([job], fast=False)

    def withdraw(self) -> list[Job]:
        jobs = self.limiter.withdraw()
        for executor in self.all:
            jobs.extend(executor.withdraw())
        return jobs


class Capacity:
    """What ``free_slots`` reads besides the queue. ``reserved`` changes under the fetcher's lock."""

    def __init__(self, executors: Executors, settler: Settler, options: Options) -> None:
        self.executors = executors
        self.settler = settler
        self.isolation = CrashIsolation(settler, executors.isolates)
        self.options = options
        self.reserved = 0  # tasks that fetches under way asked for, in all queues


def free_slots(queue: QueueState, capacity: Capacity, *, shared: bool = False) -> int:
    """Return how many tasks ``queue`` may take now; 0 or less means none.

    The queue has been placed. These are the rules, for each processor of the queue:

    1. Slots: a task may take a free slot of the executor that runs its processor, unless that is blocked. A slot runs
       ``batch`` tasks of a batch processor. A task without a processor counts as one for a thread.
    2. Buffer: as many more may wait in memory as all slots run in ``BUFFER_SECONDS`` by the queue's mean (one slot if a
       limit over all pollers counts them), at most ``MAX_BUFFERED_BATCHES``. The first fetch uses the poller's mean.
    3. Tasks that wait for their settle, and tasks that fetches under way asked for, count as taken.
    4. Worth a statement: while jobs wait for a slot or a fetch is under way, less than a batch and less than half of
       the buffer is not worth a statement, and counts as none.
    5. Processor concurrency: not more than its limit, plus as many calls as it runs in ``BUFFER_SECONDS`` by its mean.

    And for the whole queue:

    6. Processors with different limits: the sum of theirs, and only one fetch at a time.
    7. Queue concurrency: not more than its limit, less the tasks that this poller holds or asks for.
    8. ``max_tasks``: not more than the run has left.
    9. Crash isolation: one task while isolated tasks wait, none while one is in quarantine.
    10. Batch size.
    11. Probe: a queue without timing data gets the free slots, or ``PROBE_TASKS`` if there are fewer.

    ``shared``: for a statement that serves several queues. Rules 10 and 11 then limit each queue's share of it.
    """
    placement, settings, options = queue.placement, queue.settings, capacity.options
    if placement.one_limit:
        free = processor_slots(queue, placement.processors[0] if placement.processors else None, capacity)
    elif queue.reserved:
        free = 0
    else:
        free = sum([max(0, processor_slots(queue, each, capacity)) for each in placement.processors])
    if settings.concurrency is not None:
        held = sum([lease.port is queue.port for lease in capacity.settler.held.copy()])
        free = min(free, settings.concurrency - held - queue.reserved)
    if options.max_tasks is not None:
        free = min(free, options.max_tasks - capacity.settler.counts.started - capacity.reserved)
    if capacity.isolation.queues and capacity.isolation.active():
        free = min(free, capacity.isolation.limit(capacity.reserved))
    if shared:
        return free
    if queue.run_seconds is None and (executor := placement.executor) is not None:
        free = min(free, max(executor.slots - len(executor.todo) - len(executor.runs), PROBE_TASKS))
    return min(free, settings.batch_size)


def processor_slots(queue: QueueState, processor: Processor | None, capacity: Capacity, *, own: int = 0) -> int:
    """Return rules 1 to 5 of ``free_slots`` for a processor; ``own``: tasks that the calling fetch has reserved."""
    executor = queue.placement.executor or capacity.executors.of(processor)
    if executor.blocked:
        return 0
    batch = 1 if processor is None else processor.batch or 1
    buffer = buffered_tasks(queue, capacity.settler.mean_run_seconds, 1 if queue.limiter else executor.slots)
    reserved = capacity.reserved - own
    slots = (executor.slots - len(executor.todo) - len(executor.runs)) * batch
    free = slots + buffer - len(capacity.settler.done) - reserved
    if (reserved or executor.todo) and free < min(queue.settings.batch_size, buffer / 2):
        return 0
    calls = None if processor is None or processor.plain else free_calls(processor, capacity.executors)
    return free if calls is None else min(free, calls * batch - queue.reserved + own)


def buffered_tasks(queue: QueueState, mean_run_seconds: float | None, slots: int) -> int:
    """Return how many tasks of a queue may wait in memory: rule 2 of ``free_slots``, with the mean of all queues."""
    run_seconds, limit = queue.run_seconds, MAX_BUFFERED_BATCHES * queue.settings.batch_size
    if run_seconds is None and not queue.probed and queue.placement.executor is not None:
        run_seconds, limit = mean_run_seconds, MAX_UNKNOWN_BUFFERED_TASKS
    return 0 if run_seconds is None else min(limit, int(slots * BUFFER_SECONDS / max(run_seconds, MIN_RUN_SECONDS)))


def share_of(queue: QueueState, asked: int) -> int:
    """Return how many tasks of a shared statement a queue may give."""
    return min(asked, queue.settings.batch_size if queue.run_seconds is not None or queue.probed else PROBE_TASKS)


def free_calls(processor: Processor | None, executors: Executors) -> int | None:
    """Return how many more calls of a processor may run or wait: rule 5 of ``free_slots``. None for no limit."""
    if processor is None or processor.concurrency is None:
        return None
    taken, call_seconds = executors.limiter.load(processor)
    if call_seconds is None:
        return processor.concurrency - taken
    buffer = min(MAX_BUFFERED_CALLS, int(processor.concurrency * BUFFER_SECONDS / max(call_seconds, MIN_RUN_SECONDS)))
    return processor.concurrency + buffer - taken


def limits_key(queue: QueueState, capacity: Capacity) -> Hashable | None:
    """Return a key: queues with the same key have the same ``free_slots(shared=True)``. None for a queue of its own."""
    executor = queue.placement.executor
    if executor is None or queue.settings.concurrency is not None or queue.limiter is not None:
        return None
    return executor, buffered_tasks(queue, capacity.settler.mean_run_seconds, executor.slots), queue.settings.batch_size


# -- crash isolation: a task that may have killed its process runs alone -----------------------------------------------

# A process that dies ends the attempts of all its tasks without an outcome. One of those tasks may be the cause. If it
# ran together with the others again, it would take one attempt of each of them with every crash, until none is left.
# Tasks whose processors have a name run in another process (``executors.process``), and limit nobody. The others, such
# as those of a function made at run time, run one by one in the poller's process; those are meant here.

# A deadly task mostly kills soon after its start, and the other tasks must not wait long.
MIN_QUARANTINE_SECONDS, MAX_QUARANTINE_SECONDS = 0.2, 1.0
QUARANTINE_LEASE_SHARE = 1 / 40  # of the lease, within those limits
RELEASED_TASK_TIMEOUT_SECONDS = 5.0  # then we assume that another poller took the tasks that we released


class CrashIsolation:
    """Limits what a poller takes while isolated tasks wait, and releases those that must not run now."""

    def __init__(self, settler: Settler, isolates: Callable[[Processor | None], bool]) -> None:
        """``isolates``: whether a task of a processor can run in another process."""
        self._settler = settler
        self._isolates = isolates
        self.queues: set[str] = set()  # keys of queues with released tasks that no fetch has found since
        self._active_until = 0.0
        self._quarantine_until = 0.0

    def active(self) -> bool:
        """Whether isolated tasks wait, to run one by one. They wait behind the watermarks of their queues."""
        return bool(self.queues) and clock.monotonic() < self._active_until

    def limit(self, reserved: int) -> int:
        """Return how many tasks a fetch may take while this is active: 1, or 0 while a quarantined task may kill."""
        busy = reserved or self._settler.held or self._settler.done
        return 0 if busy and clock.monotonic() < self._quarantine_until else 1

    def sift(self, session: Session, leases: list[Lease], *, alone: bool) -> list[Lease]:
        """Return the leases to run now; release the others uncharged. ``alone``: no other fetch is under way."""
        lost = [lease for lease in leases if lease.lost_leases]
        ids = {lease.id for lease in lost if not self._isolates(registry.find(lease.queue, lease.payload_type))}
        if not ids:
            if len(leases) == 1:  # a larger batch was asked for before isolation began, so it tells nothing
                self.queues.discard(leases[0].port.key)
            return leases
        isolated = [lease for lease in leases if lease.id in ids]
        others = [lease for lease in leases if lease.id not in ids]
        is_busy = (self._settler.held or self._settler.done) and clock.monotonic() < self._quarantine_until
        chosen = isolated[:1] if alone and not others and not is_busy else []
        # Release before any task of this batch starts: a crash would charge the isolated tasks that are still leased.
        for queue in {lease.queue for lease in isolated[len(chosen) :]}:
            back = [lease for lease in isolated[len(chosen) :] if lease.queue == queue]
            settle.settle(session, [(lease, Release()) for lease in back])
            for lease in back:
                observe.ended(lease, Release())
        if not self.active():
            logger.warning(
                "Attempts of %s ended without an outcome, as when a process dies: running those tasks one by one",
                isolated[0].queue,
            )
        self.queues.update(lease.port.key for lease in isolated)
        seconds = (isolated[0].lease_until - isolated[0].start_time).total_seconds() * QUARANTINE_LEASE_SHARE
        seconds = min(max(seconds, MIN_QUARANTINE_SECONDS), MAX_QUARANTINE_SECONDS)
        self._quarantine_until = clock.monotonic() + seconds
        self._active_until = clock.monotonic() + RELEASED_TASK_TIMEOUT_SECONDS
        return others + chosen
