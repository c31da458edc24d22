"""The loop: settle what is done, check out what there is room for, and say how long to wait before the next time."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from uuid import uuid4

from django.db import connections

from django_dbtaskqueue import listeners, registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Release
from django_dbtaskqueue.db.listen import Wakeup
from django_dbtaskqueue.db.session import aliases_of, model_for
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.decide import decide
from django_dbtaskqueue.flow.enqueue import queue_settings
from django_dbtaskqueue.flow.scan import ScanCursor
from django_dbtaskqueue.flow.settle_port import SettlePort
from django_dbtaskqueue.poller.connections import Carrier
from django_dbtaskqueue.poller.executors import Done, Executor, Run, shared
from django_dbtaskqueue.poller.executors.pool_of_executors import Places
from django_dbtaskqueue.poller.fetch import Intake
from django_dbtaskqueue.poller.options import Options
from django_dbtaskqueue.poller.queue_state import Lane
from django_dbtaskqueue.poller.renew import Renewer
from django_dbtaskqueue.poller.settle_batches import FLUSH, Counts, Settler

logger = logging.getLogger("django_dbtaskqueue")

CARRIERS = 2
TICK = 0.05  # seconds between two looks while tasks run
PAUSED = 5.0  # seconds between two looks while nothing is to be taken
MOST_PAUSE = 2.0  # seconds between two attempts while the database is away: it works again 3 s after it is back


class Poller:
    """Polls queues by weight until told to stop.

    ``start`` returns at once; ``wait`` for the end, then ``close``. ``stop``, ``cancel`` and ``wake`` may be called
    from any thread and from signal handlers.
    """

    def __init__(self, weights: Mapping[str, int], options: Options | None = None, *, using: str | None = None) -> None:
        self.options = options or Options(threads=conf.settings().threads)
        self.instance = f"{self.options.name or socket.gethostname()}:{os.getpid()}:{uuid4().hex[:12]}"[-200:]
        lanes = [_lane(queue, weight, alias) for queue, weight in weights.items() for alias in aliases_of(queue, using)]
        self.lanes = {lane.key: lane for lane in lanes}
        self._of_queue: dict[str, list[Lane]] = {}
        for lane in lanes:
            self._of_queue.setdefault(lane.queue, []).append(lane)
        self.counts = Counts()
        self.state = "INIT"
        self.stopping = False
        self.paused = False
        self._bell = threading.Event()
        self._busy = threading.Event()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self.settler = Settler(self.lanes, self.counts, self._bell.set)
        self.places = Places(self.options.threads, self.options.coroutines, self.settler.finish, self.options.executor)
        self.executors = self.places.executors
        self._renewer = Renewer(self.lanes.values(), self._held_of, self._lost)
        self.intake = Intake(
            self.instance, self.lanes, self.places, self.settler, self._renewer.expect, self.counts, self.options
        )
        self._wakeups = [Wakeup(alias, self.wake) for alias in {lane.port.alias for lane in self.lanes.values()}]

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. A poller starts once: a second start is refused."""
        if self._threads:
            raise RuntimeError(f"Poller {self.instance} is {self.state} and cannot be started again.")
        listeners.load()
        self.state = "ENDING" if self.stopping else "STARTUP"
        registry.watch(self._appeared)
        observe.of_poller("started", self)
        self._renewer.start()
        for wakeup in self._wakeups:
            wakeup.start()
        for number in range(CARRIERS):
            name = f"dbtaskqueue-carry-{number}"
            thread = threading.Thread(target=self._carry, args=[Carrier(number)], name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Check nothing out any more, give back what has not started, let what runs finish. Returns at once."""
        self.stopping = True
        self.state = "ENDING"
        self._bell.set()
        self._busy.set()

    def pause(self) -> None:
        """Take nothing more until ``resume``; what is held goes on."""
        self.paused = True
        if self.state == "RUNNING":
            self.state = "PAUSED"

    def resume(self) -> None:
        """Take tasks again after ``pause``."""
        self.paused = False
        if self.state == "PAUSED":
            self.state = "RUNNING"
        self._bell.set()

    def cancel(self) -> None:
        """Do not wait for what runs: async tasks are cancelled, threads left behind. Their attempts stay charged."""
        self.stop()
        for executor in self.executors:
            executor.cancel()
            for run in executor.running():
                self._give_up(executor, run, Fail("Cancelled while the poller was stopping", delay=timedelta(0)))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended; False when it has not within ``timeout`` seconds."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Stop the helper threads, after the loop has ended or has been given up."""
        closed = self.state == "STOPPED"
        self._ended.set()
        self.stop()
        self._renewer.stop()
        for wakeup in self._wakeups:
            wakeup.stop()
        for executor in self.executors:
            executor.close()
        for thread in self._threads:
            thread.join(timeout=5)
        if self._threads and not closed:
            registry.unwatch(self._appeared)
            observe.of_poller("finished", self)
        self.state = "STOPPED"

    async def shutdown(self, timeout: timedelta) -> list[Lease]:
        """Stop, wait for what runs without blocking the event loop, and return what is still alive after ``timeout``.

        Empty when all has ended; the poller is then closed. What is left keeps its lease, renewed until ``close``.
        """
        self.stop()
        if await asyncio.to_thread(self.wait, timeout.total_seconds()):
            await asyncio.to_thread(self.close)
            return []
        return [lease for run in self.running() for lease in run.job.leases]

    def wake(self, queue: str) -> None:
        """There may be something to take: in ``queue``, or in any when it is empty."""
        lanes = self._of_queue.get(queue, ()) if queue else self.lanes.values()
        for lane in lanes:
            lane.wake()
        if lanes:
            self._bell.set()

    def _appeared(self, queue: str) -> None:
        """A processor was registered in this process: tasks may have been parked for want of it."""
        for lane in self.lanes.values():
            if lane.queue == queue:
                lane.unpark = True
        self.wake(queue)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _carry(self, carrier: Carrier) -> None:
        """The first carrier always polls; the second joins while there is enough to do for two."""
        first = carrier.number == 0
        bell = self._bell if first else self._busy
        delay: float | None = 0.0 if first else None
        while not self._ended.is_set():
            if delay is None or delay > 0:
                bell.wait(delay)
                bell.clear()
            delay = self._attempt(carrier)
            if not first and delay > 0:
                delay = None
        carrier.close()
        connections.close_all()  # what listeners opened on this thread

    def _attempt(self, carrier: Carrier) -> float:
        """``poll``, whatever happens to the database."""
        try:
            delay = self.poll(carrier)
        except Exception as error:
            self._trouble(carrier, error)
            return 0.0
        carrier.pause = 0.0
        if self.state == "WAITING":
            logger.info("The database is back, polling goes on")
        if self.state in ("STARTUP", "WAITING"):
            self.state = "RUNNING"
        return delay

    def _trouble(self, carrier: Carrier, error: Exception) -> None:
        carrier.close()
        connections.close_all()
        observe.of_poller("crashed", self, error=error)
        if self.state in ("STARTUP", "RUNNING"):
            self.state = "WAITING"
            logger.warning("Polling failed, trying again until it works: %s: %s", type(error).__name__, error)
        carrier.pause = min(MOST_PAUSE, carrier.pause * 2 or 0.1)
        self._ended.wait(carrier.pause * random.uniform(0.5, 1.5))

    def poll(self, carrier: Carrier) -> float:
        """Settle what is done, check out what there is room for; return the seconds until the next poll."""
        if self.stopping:
            return self._wind_up(carrier)
        if self.settler.is_due() or not self._waiting():
            if len(self.settler.done) >= FLUSH:
                self._busy.set()  # there is work for two: the other refills while this one settles
            self.settler.settle(carrier)
        turn = None if self.paused else self.intake.choose()
        if turn is None:
            return self._pause()
        before = self.counts.started
        if self.intake.take(carrier, *turn):
            self._busy.set()
        if self.counts.started > before:
            observe.of_poller("executed", self, tasks=self.counts.started - before)
        return 0.0

    def _pause(self) -> float:
        """Return how long there is nothing to do unless the bell rings."""
        if self.settler.held or self.intake.pending() or self.running():
            self.places.nudge()
            return TICK
        if self.paused:
            return PAUSED
        if self.intake.spent():
            self.stop()
            return 0.0
        observe.of_poller("idle", self)
        now = monotonic()
        return max(0.001, min((lane.next_poll for lane in self.lanes.values() if not lane.over), default=now) - now)

    def _wind_up(self, carrier: Carrier) -> float:
        """Give back what has not started; end when nothing is held any more."""
        for job in self.places.withdraw():
            for lease in job.leases:
                self.settler.finish(Done(lease, Release(), 0.0), idle=False)
        self.settler.settle(carrier)
        if not self.settler.held and not self.settler.done and not self.intake.pending():
            self._ended.set()
            self._busy.set()
        return TICK

    # -- what others ask ---------------------------------------------------------------------------------------------

    def running(self) -> list[Run]:
        """Return what runs now, for the heartbeat and the status line."""
        return [run for executor in self.executors for run in executor.running()]

    def slots(self) -> int:
        """Return how many tasks can run at the same time, in the executors that have processors."""
        return sum(executor.slots for executor in self.places.used({lane.queue for lane in self.lanes.values()}))

    def overdue(self) -> None:
        """Fail, with the fence, the tasks whose time is over. Their slots free when they really end."""
        now = monotonic()
        for executor in self.executors:
            for run in executor.running():
                limit = run.job.processor.timeout or self.lanes[run.job.lease.port.key].settings.timeout
                if limit is not None and now - run.started > limit.total_seconds():
                    error = TimeoutError(f"The processor ran longer than its timeout of {limit}")
                    self._give_up(executor, run, Fail(error))

    def _give_up(self, executor: Executor, run: Run, failure: Fail) -> None:
        if executor.overrun(run):
            decided = [decide(lease, failure) for lease in run.job.leases]
            for done in shared(run.job, decided, monotonic() - run.started):
                self.settler.finish(done, idle=True)

    def _waiting(self) -> int:
        return sum([len(executor.todo) for executor in self.executors])

    def _held_of(self, lane: Lane) -> list[Lease]:
        return [lease for lease in self.settler.held.copy() if lease.port is lane.port]

    def _lost(self, lease: Lease) -> None:
        """A lease could not be renewed because it is not ours any more; what has not started will not."""
        if lease in self.settler.held:
            lease.deadline = 0.0


def _lane(queue: str, weight: int, alias: str) -> Lane:
    settings = queue_settings(queue, alias)
    key = f"{queue}@{alias}" if settings.shards else queue
    port = SettlePort(alias, model_for(queue), key=key, keep=settings.keep, group_retry=settings.group_retry)
    return Lane(queue=queue, settings=settings, port=port, line=ScanCursor(queue, settings.max_wait), weight=weight)
