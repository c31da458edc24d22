"""The poll loop: settle outcomes, fetch tasks, and compute the wait until the next poll."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from uuid import uuid4

from django.db import connections

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.context import wake_listeners
from django_dbtaskqueue.core.durations import clock, jittered, next_pause
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Release
from django_dbtaskqueue.core.threads import WatchedThread
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.db.notify import LEASES_LOST, Wakeup
from django_dbtaskqueue.db.session import aliases_of
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import decide
from django_dbtaskqueue.poller.executors import LOST, Done, Executor, Job, Run, done_by_lease
from django_dbtaskqueue.poller.fetch import MANY_OTHERS, Fetcher
from django_dbtaskqueue.poller.free_slots import Capacity, Executors
from django_dbtaskqueue.poller.held_leases import FULL_BATCH_OUTCOMES, Renewer, Settler
from django_dbtaskqueue.poller.queue_state import ConnectionSet, Options, QueueState

FETCH_THREADS = 2  # while the database works on the batch of one, the other handles its own
BUSY_POLL_SECONDS = 0.05  # between two polls while tasks run
PAUSED_POLL_SECONDS = 5.0  # between two polls of a paused poller
MIN_POLL_SECONDS = 0.001
# Between two attempts while the database is away. With the jitter, polling goes on at most 3 s after it is back.
POLL_RETRY_SECONDS = 0.1, 2.0


class Poller:
    """Polls queues by weight until it is stopped.

    ``start`` returns at once; ``wait`` for the end, then ``close``. ``stop``, ``cancel`` and ``wake`` may be called
    from any thread and from signal handlers.
    """

    def __init__(self, weights: Mapping[str, int], options: Options | None = None, *, using: str | None = None) -> None:
        self.options = options or Options(threads=conf.settings().threads)
        self.instance = f"{self.options.name or socket.gethostname()}:{os.getpid()}:{uuid4().hex[:12]}"[-200:]
        self._by_name: dict[str, list[QueueState]] = {name: [] for name in weights}  # of each of its shards
        for name, weight in weights.items():
            for alias in aliases_of(name, using):
                with liveness.bounded_answers(connections[alias]):
                    self._by_name[name].append(QueueState.of(name, alias, weight))
        queues = [*chain.from_iterable(self._by_name.values())]
        self.queues = {queue.port.key: queue for queue in queues}
        self.state = "INIT"
        self._changing = threading.Lock()  # of the state, by a poll that failed or worked
        self.stopping = False
        self.cancelling = False
        self.paused = False
        self.polled_at = 0.0  # clock.monotonic() of the last poll that worked
        self.busy_since: dict[str, float | None] = {}  # by fetch thread: since when it polls; None while it waits
        self._wake_first = threading.Event()
        self._wake_second = threading.Event()
        self._ended = threading.Event()
        self._threads: list[WatchedThread] = []
        self._withdrawn: deque[Job] = deque()  # at the end: tasks that are to be released
        self.settler = Settler(self.queues, self._wake_first.set)
        self.counts = self.settler.counts
        self.executors = Executors(self.options, self.settler.finish)
        self._renewer = Renewer(self.queues.values(), self._held_of, self._lost)
        capacity = Capacity(self.executors, self.settler, self.options)
        self.fetcher = Fetcher(self.instance, self.queues, capacity, self._renewer.expect)
        self.aliases = sorted({queue.port.alias for queue in queues})
        self._wakeups = [Wakeup(alias, self._notified) for alias in self.aliases]

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. A poller starts once: a second start is refused."""
        if self._threads:
            raise RuntimeError(f"Poller {self.instance} is {self.state} and cannot be started again.")
        signals.load_listeners()
        for queue in self._by_name:
            for processor in registry.processors(queue):
                processor.with_middleware()  # a wrong one is refused here, before a task is taken
        self.state = "ENDING" if self.stopping else "STARTUP"
        registry.listeners.append(self._registered)
        observe.of_poller("poller_started", self)
        self._renewer.start()
        wake_listeners.add(self._notified)
        for wakeup in self._wakeups:
            wakeup.start()
        for number in range(FETCH_THREADS):
            name = f"dbtaskqueue-fetch-{number}"
            thread = WatchedThread(target=self._fetch_until_end, args=[number], name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Fetch no more tasks, release those that have not started, let the others finish. Returns at once."""
        self.stopping = True
        self.state = "ENDING"
        self._wake_first.set()
        self._wake_second.set()

    def pause(self) -> None:
        """Fetch no more tasks until ``resume``; tasks that are held go on."""
        self.paused = True
        if self.state == "RUNNING":
            self.state = "PAUSED"

    def resume(self) -> None:
        """Fetch again after ``pause``."""
        self.paused = False
        if self.state == "PAUSED":
            self.state = "RUNNING"
        self._wake_first.set()

    def cancel(self) -> None:
        """Do not wait for running tasks: cancel async ones, end child processes, tell threads. Attempts stay.

        Tasks that have not started are released. The next poll cancels one that another thread starts meanwhile.
        """
        self.stop()
        self._release_waiting()
        for executor in self.executors.all:
            executor.cancel()
        self.cancelling = True
        self._give_up_running()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended; return False if ``timeout`` seconds were not enough."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Stop the helper threads, after the loop has ended or was given up."""
        closed = self.state == "STOPPED"
        self._ended.set()
        self.stop()
        self._renewer.stop()
        wake_listeners.discard(self._notified)
        for wakeup in self._wakeups:
            wakeup.stop()
        for executor in self.executors.all:
            executor.close()
        for thread in self._threads:
            thread.join(timeout=5)
        if self._threads and not closed:
            registry.listeners.remove(self._registered)
            observe.of_poller("poller_finished", self)
        self.state = "STOPPED"

    async def shutdown(self, timeout: timedelta) -> list[Lease]:
        """Stop and wait for running tasks without blocking the event loop; return the leases still running then.

        If all have ended, the poller is closed. The leases returned are renewed until ``close``.
        """
        self.stop()
        if await asyncio.to_thread(self.wait, timeout.total_seconds()):
            await asyncio.to_thread(self.close)
            return []
        return [lease for run in self.running() for lease in run.job.leases]

    def wake(self, queue: str) -> None:
        """Fetch soon: there may be a task in ``queue``, or in any queue if the name is empty."""
        queues = self._by_name.get(queue, ()) if queue else self.queues.values()
        for state in queues:
            state.wake()
        if queues:
            self._wake_first.set()

    def _notified(self, payload: str) -> None:
        """Fetch soon; and renew at once if leases of the queue were ended, to find those of this poller."""
        queue = payload.removeprefix(LEASES_LOST)
        if queue != payload:
            self._renewer.renew_now(self._by_name.get(queue, ()))
        self.wake(queue)

    def _registered(self, queue: str) -> None:
        """Unpark the queue's tasks: a processor for them was registered in this process."""
        for state in self._by_name.get(queue, ()):
            state.unpark_due, state.foreign_until = True, 0.0
        self.wake(queue)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _fetch_until_end(self, number: int) -> None:
        """Poll until the poller ends. The second thread polls only while there is enough work for two."""
        first = number == 0
        wakeup = self._wake_first if first else self._wake_second
        delay: float | None = 0.0 if first else None
        connection_set, pause, name = ConnectionSet(), 0.0, f"fetch {number}"
        while not self._ended.is_set():
            if delay is None or delay > 0:
                self.busy_since[name] = None
                clock.wait(wakeup, delay)
                wakeup.clear()
            self.busy_since[name] = clock.monotonic()
            try:
                delay = self.poll(connection_set, second=not first)
            except Exception as error:
                connection_set.close()
                connections.close_all()
                self._poll_failed(error)
                pause = next_pause(pause, *POLL_RETRY_SECONDS)
                clock.wait(self._ended, jittered(pause))
                delay = 0.0
                continue
            pause, self.polled_at = 0.0, clock.monotonic()
            if self.state != "RUNNING":
                self._poll_worked()
            if not first and delay > 0 and not self.stopping:
                delay = None
        connection_set.close()
        connections.close_all()  # those that listeners opened on this thread

    def _poll_failed(self, error: Exception) -> None:
        observe.of_poller("poll_failed", self, error=error)
        liveness.outages.seen += 1
        with self._changing:  # both fetch threads notice it
            if self.state in ("STARTUP", "RUNNING"):
                self.state = "WAITING"
                logger.warning("Polling failed, trying again until it works: %s: %s", type(error).__name__, error)

    def _poll_worked(self) -> None:
        with self._changing:
            if self.state == "WAITING":
                logger.info("The database is back, polling goes on")
            if self.state in ("STARTUP", "WAITING"):
                self.state = "RUNNING"

    def poll(self, connection_set: ConnectionSet, *, second: bool = False) -> float:
        """Settle outcomes, fetch what free slots allow; return the seconds until the next poll.

        The ``second`` thread leaves queues alone that many pollers serve: checkouts that overlap read rows in vain. If
        many serve each queue, it rests: they keep the database busy, and one thread settles larger batches.
        """
        stopping = self.stopping
        if stopping:
            return self._wind_up(connection_set)
        if second and all(queue.cursor.others >= MANY_OTHERS for queue in self.queues.values()):
            return BUSY_POLL_SECONDS
        if self.settler.done and (self.settler.is_due() or not self.executors.waiting()):
            if len(self.settler.done) >= FULL_BATCH_OUTCOMES:
                self._wake_second.set()  # it fetches while this thread settles
            self.settler.settle(connection_set)
        chosen = None if self.paused else self.fetcher.choose(alone=second)
        if chosen is None:
            return self._seconds_until_next_poll()
        if self.stopping:  # since this poll began: it would take again what the other fetch thread releases
            self.fetcher.reserve(chosen[0], -chosen[1])
            return 0.0
        before = self.counts.started
        if self.fetcher.poll(connection_set, *chosen):
            self._wake_second.set()
        if self.counts.started > before:
            observe.of_poller("poller_executed", self, tasks=self.counts.started - before)
        return 0.0

    def _seconds_until_next_poll(self) -> float:
        """Return how long there is nothing to do, unless the poller is woken."""
        if self.settler.held or self.fetcher.capacity.reserved or any(executor.runs for executor in self.executors.all):
            for executor in self.executors.all:
                executor.nudge()
            return BUSY_POLL_SECONDS
        if self.paused:
            return PAUSED_POLL_SECONDS
        if self.fetcher.is_exhausted():
            self.stop()
            return 0.0
        observe.of_poller("poller_idle", self)
        now = clock.monotonic()
        polls = [queue.next_poll for queue in self.queues.values() if not queue.exhausted]
        return max(MIN_POLL_SECONDS, min(polls, default=now) - now)

    def _wind_up(self, connection_set: ConnectionSet) -> float:
        """Release the tasks that have not started; end the loop as soon as no task is held."""
        self._release_waiting()
        if self.cancelling:
            self._give_up_running()
        self.settler.settle(connection_set)
        if not self.settler.held and not self.settler.done and not self.fetcher.capacity.reserved:
            self._ended.set()
            self._wake_second.set()
        return BUSY_POLL_SECONDS

    def _release_waiting(self) -> None:
        """Let waiting tasks not start, and release them when no checkout is under way that would take them again."""
        self._withdrawn.extend(self.executors.withdraw())
        with suppress(IndexError):  # the other fetch thread was faster
            while self._withdrawn and not self.fetcher.capacity.reserved:
                for lease in self._withdrawn.popleft().leases:
                    self.settler.finish(Done(lease, Release(), 0.0), idle=False)

    def _give_up_running(self) -> None:
        for executor, run in self._runs():
            self._give_up(executor, run, Fail("Cancelled while the poller was stopping", delay=timedelta(0)))

    # -- state and timeouts ------------------------------------------------------------------------------------------

    def running(self) -> list[Run]:
        return [run for _, run in self._runs()]

    def _runs(self) -> list[tuple[Executor, Run]]:
        return [(executor, run) for executor in self.executors.all for run in executor.running()]

    def threads(self) -> list[WatchedThread]:
        found = [*self._threads, self._renewer, *(wakeup.thread for wakeup in self._wakeups if wakeup.thread)]
        return found + [thread for executor in self.executors.all for thread in executor.threads]

    def can_settle(self) -> bool:
        return not all(thread.ended for thread in self._threads)

    def slots(self) -> int:
        return self.executors.slots(self._by_name)

    def overdue(self) -> None:
        """Fail the tasks past their timeout, with the fence. Their slots become free when they really end."""
        now = clock.monotonic()
        for executor in self.executors.all:
            executor.look()
        for executor, run in self._runs():
            limit = run.job.processor.timeout or self.queues[run.job.lease.port.key].settings.timeout
            if limit is not None and now - run.started > limit.total_seconds():
                error = TimeoutError(f"The processor ran longer than its timeout of {limit}")
                self._give_up(executor, run, Fail(error))

    def _give_up(self, executor: Executor, run: Run, failure: Fail) -> None:
        if executor.overrun(run):
            for lease in run.job.leases:
                lease.cancelled = True
            decided = [decide(lease, failure) for lease in run.job.leases]
            for done in done_by_lease(run.job, decided, clock.monotonic() - run.started):
                self.settler.finish(done, idle=True)

    def _held_of(self, queue: QueueState) -> list[Lease]:
        return [lease for lease in self.settler.held.copy() if lease.port is queue.port]

    def _lost(self, leases: list[Lease]) -> None:
        """Note that leases are not ours any more: their tasks do not start, and those that run are told to stop."""
        gone = self.settler.held.intersection(leases)
        for lease in gone:
            lease.deadline, lease.cancelled = LOST, True
        for executor, run in self._runs():
            if not gone.isdisjoint(run.job.leases):
                executor.stop(run)
