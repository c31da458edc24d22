"""The loop: settle what is done, check out what there is room for, and say how long to wait before the next time."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from uuid import uuid4

from django_dbtaskqueue import conf, registry
from django_dbtaskqueue.flow import checkout, move, observe, settle
from django_dbtaskqueue.flow.enqueue import queue_settings
from django_dbtaskqueue.lease import Lease
from django_dbtaskqueue.outcomes import CompleteDelete, Fail, Reenqueue
from django_dbtaskqueue.poller.executors import Done, Executor, Job
from django_dbtaskqueue.poller.executors.asyncio import AsyncExecutor
from django_dbtaskqueue.poller.executors.thread import ThreadExecutor
from django_dbtaskqueue.poller.lane import Lane
from django_dbtaskqueue.poller.renew import Renewer
from django_dbtaskqueue.poller.wakeup import Wakeup
from django_dbtaskqueue.session import Session, alias_for

logger = logging.getLogger("django_dbtaskqueue")

CARRIERS = 2  # threads that settle and check out: the database works on one batch while we work on the other
TICK = 0.05  # seconds between two looks while tasks run
SOON = timedelta(seconds=5)  # a draining poller waits for what becomes due within this
MOST_SETTLED = 1000  # outcomes in one settle
MOST_PAUSE = 5.0  # seconds between two attempts while the database is away
FAST = 0.0002  # seconds of a task so short that waking a second thread for it costs more than running it


@dataclass(frozen=True, slots=True)
class Options:
    """How one poller runs."""

    threads: int = 4
    coroutines: int = 100
    once: bool = False  # one checkout per queue
    drain: bool = False  # until nothing is in line, being processed, or due within five seconds
    max_tasks: int | None = None
    name: str = ""


@dataclass(slots=True)
class Counts:
    """What one poller did."""

    finished: int = 0
    failed: int = 0
    lost: int = 0
    started: int = 0


@dataclass(slots=True)
class Carrier:
    """One of the threads that talk to the database, its sessions, and how it fares."""

    number: int
    sessions: dict[str, Session] = field(default_factory=dict)
    pause: float = 0.0  # back-off while the database is away

    def session(self, lane: Lane) -> Session:
        """Return this carrier's session for a lane."""
        key = f"{lane.door.alias} {lane.door.model._meta.label}"
        if key not in self.sessions:
            self.sessions[key] = Session.open(lane.door.alias, lane.door.model)
        return self.sessions[key]

    def close(self) -> None:
        """Close its connections."""
        for session in self.sessions.values():
            session.close()


class Poller:
    """Polls queues by weight until told to stop. ``run`` blocks; everything else may be called from any thread."""

    def __init__(self, weights: Mapping[str, int], options: Options | None = None, *, using: str | None = None) -> None:
        self.options = options or Options(threads=conf.settings().threads)
        self.instance = f"{self.options.name or socket.gethostname()}:{os.getpid()}:{uuid4().hex[:12]}"[-200:]
        self.lanes = {queue: _lane(queue, weight, using) for queue, weight in weights.items()}
        self.counts = Counts()
        self.state = "INIT"
        self.stopping = False
        self.held: set[Lease] = set()  # leases a processor may still settle
        self._done: deque[Done] = deque()
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._busy = threading.Event()
        self._ended = threading.Event()
        self._executors = self._make_executors()
        self._renewer = Renewer(self.lanes.values(), self._held_of, self._lost)
        aliases = {lane.door.alias for lane in self.lanes.values()}
        self._wakeups = [Wakeup(alias, self.wake) for alias in aliases]

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads; a poller starts once."""
        if self.state != "INIT":
            raise RuntimeError(f"Poller {self.instance} is {self.state} and cannot be started again.")
        self.state = "RUNNING"
        self._renewer.start()
        for wakeup in self._wakeups:
            wakeup.start()
        self._threads = [
            threading.Thread(
                target=self._carry, args=[Carrier(number)], name=f"dbtaskqueue-carry-{number}", daemon=True
            )
            for number in range(CARRIERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Check nothing out any more, give back what has not started, let what runs finish. Returns at once."""
        self.stopping = True
        self.ring()

    def cancel(self) -> None:
        """Do not wait for what runs: async tasks are cancelled, threads left behind. Their attempts stay charged."""
        self.stop()
        for executor in self._executors:
            executor.cancel()
            for run in executor.running():
                if isinstance(executor, ThreadExecutor) and executor.overrun(run):
                    failure = Fail("Cancelled while the poller was stopping", delay=timedelta(0))
                    self.finish(Done(run.job.lease, failure, monotonic() - run.started))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended; False when it has not within ``timeout`` seconds."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Stop the helpers, after the loop has ended."""
        self._ended.set()
        self._busy.set()
        self.ring()
        self._renewer.stop()
        for wakeup in self._wakeups:
            wakeup.stop()
        for executor in self._executors:
            executor.close()
        for thread in self._threads:
            thread.join(timeout=5)
        self.state = "STOPPED"

    def wake(self, queue: str) -> None:
        """There may be something to take: in ``queue``, or in any when it is empty."""
        lanes = [self.lanes[queue]] if queue in self.lanes else [] if queue else list(self.lanes.values())
        for lane in lanes:
            lane.wake()
        if lanes:
            self.ring()

    def ring(self) -> None:
        """Wake the loop."""
        self._bell.set()
        if self.stopping:
            self._busy.set()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _carry(self, carrier: Carrier) -> None:
        gate = self._bell if carrier.number == 0 else self._busy
        delay = 0.0 if carrier.number == 0 else None
        while not self._ended.is_set():
            if delay is None or delay > 0:
                gate.wait(delay)
                gate.clear()
            delay = self._attempt(carrier)
            if carrier.number and delay:
                delay = None  # there is not enough to do for two
        carrier.close()

    def _attempt(self, carrier: Carrier) -> float:
        """``poll``, whatever happens to the database."""
        try:
            delay = self.poll(carrier)
        except Exception as error:
            return self._trouble(carrier, error)
        if carrier.pause:
            carrier.pause = 0.0
            if self.state == "WAITING":
                self.state = "RUNNING"
                logger.info("Database is back, polling goes on")
        return delay

    def _trouble(self, carrier: Carrier, error: Exception) -> float:
        carrier.close()
        if self.state == "RUNNING":
            self.state = "WAITING"
            logger.warning("Polling failed, trying again until it works: %s: %s", type(error).__name__, error)
        carrier.pause = min(MOST_PAUSE, carrier.pause * 2 or 0.1)
        self._ended.wait(carrier.pause * random.uniform(0.5, 1.5))
        return 0.0 if carrier.number == 0 else 0.001

    def poll(self, carrier: Carrier) -> float:
        """Settle what is done, check out what there is room for; return the seconds until the next poll."""
        self._settle(carrier)
        if self.stopping:
            return self._wind_up(carrier)
        with self._lock:
            lane, asked = self._choose()
            if lane is not None:
                lane.reserved += asked
        if lane is None:
            return self._pause()
        try:
            self._take(carrier, lane, asked)
        finally:
            with self._lock:
                lane.reserved -= asked
        return 0.0

    # -- take --------------------------------------------------------------------------------------------------------

    def _choose(self) -> tuple[Lane | None, int]:
        """Return the lane whose turn it is, by weight among those that are due and have room, and how much to take."""
        now = monotonic()
        ready = []
        for lane in self.lanes.values():
            if lane.next_poll <= now and not lane.over and (room := self._room(lane)) > 0:
                ready.append((lane, room))
        if not ready:
            return None, 0
        total = sum(lane.weight for lane, _ in ready)
        for lane, _ in ready:
            lane.credit += lane.weight
        chosen, room = max(ready, key=lambda pair: pair[0].credit)
        chosen.credit -= total
        return chosen, min(room, chosen.settings.batch_size)

    def _room(self, lane: Lane) -> int:
        executor = self._executor_of(lane)
        waiting = len(executor.todo)
        load = waiting + len(executor.running()) + len(self._done) + self._reserved(executor)
        room = executor.slots + lane.ahead() - load
        if waiting and room < min(lane.settings.batch_size, lane.ahead()) / 2:
            return 0  # worth a statement only when the slots run dry or half a batch fits
        if self.options.max_tasks is not None:
            room = min(
                room, self.options.max_tasks - self.counts.started - sum(x.reserved for x in self.lanes.values())
            )
        return room

    def _reserved(self, executor: Executor) -> int:
        return sum(lane.reserved for lane in self.lanes.values() if self._executor_of(lane) is executor)

    def _take(self, carrier: Carrier, lane: Lane, asked: int) -> None:
        session = carrier.session(lane)
        if lane.strategy is None:
            lane.strategy = checkout.strategy_for(session, lane.settings.strategy)
        wakes = lane.wakes
        leases = checkout.take(
            session,
            lane.line,
            strategy=lane.strategy,
            poller_instance=self.instance,
            limit=asked,
            lease=lane.settings.lease,
            door=lane.door,
        )
        if leases:
            self._dispatch(lane, leases)
            if len(leases) == asked:
                self._busy.set()
        next_due = None if leases else self._next_due(session, lane)
        with self._lock:
            lane.taken(asked, len(leases), wakes, next_due)
            if self.options.once or (not leases and self._drained(session, lane)):
                lane.over = True

    def _next_due(self, session: Session, lane: Lane) -> float | None:
        if session.postgresql and not lane.line.bounds:
            return None
        params = {"queue_name": lane.queue, "priorities": sorted(lane.line.bounds)}
        return session.run(session.sql.next_due, params)[0][0]  # type: ignore[no-any-return]

    def _drained(self, session: Session, lane: Lane) -> bool:
        if not self.options.drain or any(lease.queue == lane.queue for lease in self.held):
            return False
        params = {"queue_name": lane.queue, "horizon": SOON.total_seconds()}
        if session.run(session.sql.soon, params):
            lane.next_poll = min(lane.next_poll, monotonic() + lane.settings.poll_interval.total_seconds())
            return False
        return True

    def _dispatch(self, lane: Lane, leases: list[Lease]) -> None:
        self.held.update(leases)
        self.counts.started += len(leases)
        jobs: dict[int, list[Job]] = {}
        for lease in leases:
            processor = registry.find(lease.queue, lease.payload_type)
            if processor is None:
                reason = move.no_handler(lease.queue, lease.payload_type)
                self._done.append(Done(lease, settle.Park(reason), 0.0))
                logger.warning("Task %s parked: %s", lease.id, reason, extra=observe.fields(lease))
            else:
                jobs.setdefault(int(processor.is_async), []).append(Job(lease, processor))
        for kind, batch in jobs.items():
            self._executors[kind].submit(batch, fast=lane.mean is not None and lane.mean < FAST)

    # -- settle ------------------------------------------------------------------------------------------------------

    def finish(self, done: Done) -> None:
        """A processor is done with a lease. Called on the processor's own thread, once per task."""
        self._done.append(done)
        lease = done.lease
        if len(self._done) >= self.lanes[lease.queue].settings.batch_size or not self._waiting():
            self._bell.set()

    def _waiting(self) -> int:
        return sum(len(executor.todo) for executor in self._executors)

    def _settle(self, carrier: Carrier) -> None:
        """Settle everything that is done, one transaction per queue."""
        batches: dict[str, list[Done]] = {}
        for _ in range(min(len(self._done), MOST_SETTLED)):
            try:
                done = self._done.popleft()
            except IndexError:  # the other carrier was faster
                break
            batches.setdefault(done.lease.queue, []).append(done)
        pending = list(batches.items())
        try:
            while pending:
                self._settle_batch(carrier, self.lanes[pending[-1][0]], pending[-1][1])
                pending.pop()
        except Exception:
            for _, batch in pending:  # nothing is lost: it is settled again, and the fence makes that harmless
                self._done.extendleft(batch)
            raise

    def _settle_batch(self, carrier: Carrier, lane: Lane, batch: list[Done]) -> None:
        pairs = [(done.lease, done.settlement) for done in batch if done.settlement is not None]
        if pairs:
            session = carrier.session(lane)
            chunks = [pairs] if lane.settings.settle == "batch" else [[pair] for pair in pairs]
            settled: set[int] = set()
            for chunk in chunks:
                settled |= settle.settle_surely(session, chunk, keep=lane.settings.keep)
            if len(settled) < len(pairs):
                self._explain_missing(session, [pair for pair in pairs if pair[0].id not in settled])
        self.held.difference_update([done.lease for done in batch])
        self._account(lane, batch)

    def _explain_missing(self, session: Session, missing: list[settle.Pair]) -> None:
        """Tell a lease that was lost from an outcome that was stored before, by the processor or by a lost reply."""
        settled, _ = settle.resolve(session, [lease for lease, _ in missing])
        for lease, outcome in missing:
            gone = isinstance(outcome, CompleteDelete) or lease.touched
            if lease.id not in settled and not gone:
                self.counts.lost += 1
                observe.lost(lease, type(outcome).__name__)

    def _account(self, lane: Lane, batch: list[Done]) -> None:
        ran = [done for done in batch if not isinstance(done.settlement, settle.Release | settle.Park)]
        if ran:
            with self._lock:
                lane.learn(sum(done.seconds for done in ran), len(ran))
                self.counts.finished += len(ran)
        watched = observe.watched()
        for done in ran:
            outcome = done.settlement
            if isinstance(outcome, Fail | Reenqueue):
                self.counts.failed += isinstance(outcome, Fail)
                lane.wake()  # it may be due again soon
            if watched or isinstance(outcome, Fail):
                observe.finished(done.lease, outcome)

    # -- rest --------------------------------------------------------------------------------------------------------

    def _pause(self) -> float:
        """Return how long there is nothing to do unless the bell rings."""
        if self._done:
            return 0.0 if not self._waiting() else TICK
        if not self.held and all(lane.over for lane in self.lanes.values()):
            self.stop()
            return 0.0
        if self.options.max_tasks is not None and self.counts.started >= self.options.max_tasks and not self.held:
            self.stop()
            return 0.0
        now = monotonic()
        if self.held:
            for executor in self._executors:
                executor.nudge()
            return TICK
        return max(0.001, min((lane.next_poll for lane in self.lanes.values() if not lane.over), default=now) - now)

    def _wind_up(self, carrier: Carrier) -> float:
        """Give back what has not started; end when nothing is held any more."""
        for executor in self._executors:
            while executor.todo:
                try:
                    job = executor.todo.popleft()
                except IndexError:
                    break
                self._done.append(Done(job.lease, settle.Release(), 0.0))
        self._settle(carrier)
        with self._lock:
            reserved = any(lane.reserved for lane in self.lanes.values())
        if not self.held and not self._done and not reserved:
            self._ended.set()
            self._busy.set()
        return TICK

    # -- parts -------------------------------------------------------------------------------------------------------

    def running(self) -> list[Job]:
        """Return what runs now, for the heartbeat and the status line."""
        return [run.job for executor in self._executors for run in executor.running()]

    def slots(self) -> int:
        """Return how many tasks can run at the same time."""
        return sum(executor.slots for executor in self._executors)

    def overdue(self) -> None:
        """Fail, with the fence, the tasks whose time is over. Their slots free when they really end."""
        now = monotonic()
        for executor in self._executors:
            for run in executor.running():
                limit = run.job.processor.timeout or self.lanes[run.job.lease.queue].settings.timeout
                if limit is not None and now - run.started > limit.total_seconds() and executor.overrun(run):
                    error = TimeoutError(f"The processor ran longer than its timeout of {limit}")
                    self.finish(Done(run.job.lease, Fail(error), now - run.started))
                    self._bell.set()

    def _executor_of(self, lane: Lane) -> Executor:
        processors = registry.processors(lane.queue)
        return self._executors[int(bool(processors) and all(processor.is_async for processor in processors))]

    def _make_executors(self) -> list[Executor]:
        alias = next((lane.door.alias for lane in self.lanes.values()), "default")
        return [
            ThreadExecutor(self.options.threads, self.finish, alias),
            AsyncExecutor(self.options.coroutines, self.finish),
        ]

    def _held_of(self, lane: Lane) -> list[Lease]:
        return [lease for lease in self.held.copy() if lease.queue == lane.queue]

    def _lost(self, lease: Lease) -> None:
        """A lease could not be renewed because it is not ours any more; what has not started will not."""
        if lease in self.held:
            lease.deadline = 0.0


def _lane(queue: str, weight: int, using: str | None) -> Lane:
    alias = alias_for(queue, using)
    settings = queue_settings(queue, alias)
    return Lane(
        queue=queue,
        settings=settings,
        door=settle.SettleDoor(alias, keep=settings.keep),
        line=checkout.Line(queue),
        weight=weight,
    )
