"""Processors on an executor of the user's: threads or processes of ``concurrent.futures``, or a cluster.

It gets no more calls than it has slots, so that none waits in there where nobody counts it. Leases are renewed and
outcomes settled by the poller: a process pool needs no connection of the queue's.
"""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections
from django.utils.module_loading import import_string

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Outcome, Release, Settlement, facts
from django_dbtaskqueue.flow import observe
from django_dbtaskqueue.flow.run import Processor, decide_all, perform_all
from django_dbtaskqueue.poller.executors import Finish, Job, Run, shared, still_held
from django_dbtaskqueue.poller.executors.concurrency import Gates
from django_dbtaskqueue.poller.executors.thread import tidy


class Answer(NamedTuple):
    """What came of one lease, wherever it was processed."""

    outcome: Outcome | Settlement | None
    settled: Settlement | None  # what the processor settled by itself
    lost: str
    seconds: float = 0.0  # it ran, where the executor says so; 0: as long as the call was under way


class PoolExecutor:
    """Runs jobs on what ``executor=`` of a processor names; one for all processors that name the same."""

    def __init__(self, given: Any, finish: Finish, gates: Gates) -> None:
        self.todo: deque[Job] = deque()
        self._given = given
        self._finish = finish
        self._gates = gates
        self._pool, self._owned = made(given)
        self._runs: dict[Run, Future[list[Answer]] | None] = {}
        self._given_up: set[Run] = set()
        self._feeding = threading.Lock()
        self._closed = False
        self.slots  # noqa: B018 -- raises early for an executor that does not say how many calls it takes

    @property
    def slots(self) -> int:
        """How many calls the user's executor takes at a time, as it says now."""
        for name in ("slots", "_max_workers"):
            slots = getattr(self._pool, name, None)
            if isinstance(slots, int) and slots > 0:
                return slots
        raise ImproperlyConfigured(
            f"executor={self._given!r} does not say how many calls it takes at a time: give it an attribute slots."
        )

    def submit(self, jobs: list[Job], *, fast: bool) -> None:
        """Queue jobs and hand over as many as there are slots for."""
        self.todo.extend(jobs)
        self.nudge()

    def nudge(self) -> None:
        """Hand over what there are slots for. One thread at a time does, and looks again before it ends."""
        while self._has_room() and self._feeding.acquire(blocking=False):
            try:
                while self._has_room():
                    self._hand_over(self.todo.popleft())
            except IndexError:  # taken back meanwhile
                continue
            finally:
                self._feeding.release()

    def _has_room(self) -> bool:
        return bool(self.todo) and not self._closed and len(self._runs) < self.slots

    def busy(self) -> int:
        """Return how many calls are under way."""
        return len(self._runs)

    def running(self) -> list[Run]:
        """Return what is under way."""
        return list(self._runs.copy())

    def overrun(self, run: Run) -> bool:
        """Forget a run: what others run cannot be stopped from here, so its slot stays taken until it ends."""
        if run in self._given_up or run not in self._runs:
            return False
        self._given_up.add(run)
        _note_processor(run.job)
        return True

    def cancel(self) -> None:
        """Take back what has not begun."""
        self._closed = True
        for future in self._runs.copy().values():
            if future is not None:
                future.cancel()

    def close(self) -> None:
        """Shut the user's executor down if it was made here; one that was given is its owner's."""
        if self._owned and hasattr(self._pool, "shutdown"):
            self._pool.shutdown(wait=False)

    def _hand_over(self, job: Job) -> None:
        started = monotonic()
        held = still_held(job, started, self._finish)
        if held is None:
            self.todo.extendleft(reversed(self._gates.leave(job.processor, None)))
            return
        run = Run(held, started)
        self._runs[run] = None
        for lease in held.leases:
            observe.started(lease)
        try:
            future = self._submitted(held._replace(processor=_portable(held.processor)))
        except Exception as error:
            self._end(run, [Fail(error)] * len(held.leases))
            return
        self._runs[run] = future
        future.add_done_callback(partial(self._ended, run))

    def _ended(self, run: Run, future: Future[list[Answer]]) -> None:
        leases = run.job.leases
        settlements: Sequence[Outcome | Settlement | None]
        seconds = 0.0
        try:
            answers = future.result()
            seconds = sum(answer.seconds for answer in answers)
            settlements = [_taken_in(lease, answer) for lease, answer in zip(leases, answers, strict=True)]
        except CancelledError:
            settlements = [Release()] * len(leases)
        except BaseException as error:  # the pool broke, or could not carry the call or its answer
            settlements = [Fail(error)] * len(leases)
        self._end(run, settlements, seconds)
        self.nudge()

    def _end(self, run: Run, outcomes: Sequence[Outcome | Settlement | None], seconds: float = 0.0) -> None:
        self._runs.pop(run, None)
        _note_processor(run.job)
        seconds = seconds or monotonic() - run.started
        self.todo.extendleft(reversed(self._gates.leave(run.job.processor, seconds)))
        if run in self._given_up:
            self._given_up.discard(run)
            return
        for done in shared(run.job, decide_all(run.job.leases, outcomes), seconds):
            self._finish(done, idle=not self.todo)

    def _submitted(self, job: Job) -> Future[list[Answer]]:
        try:
            return self._pool.submit(there, job)  # type: ignore[no-any-return]
        except Exception:
            if not self._owned:
                raise
        self.close()  # its processes died, and it takes nothing any more
        self._pool, self._owned = made(self._given)
        return self._pool.submit(there, job)  # type: ignore[no-any-return]


def made(given: Any) -> tuple[Any, bool]:
    """Return the executor that ``executor=`` names, and whether it was made here and now.

    Raises ``ImproperlyConfigured`` for what is no executor.
    """
    try:
        found = import_string(given) if isinstance(given, str) else given
    except ImportError as error:
        raise ImproperlyConfigured(f"executor={given!r} cannot be imported: {error}") from error
    owned = isinstance(found, type) or not hasattr(found, "submit")
    pool = found() if owned and callable(found) else found
    if not callable(getattr(pool, "submit", None)):
        raise ImproperlyConfigured(f"executor={given!r} is {pool!r}, which has no submit(function, *arguments).")
    return pool, owned


def there(job: Job) -> list[Answer]:
    """Run a job where the user's executor runs it. Never raises."""
    outcomes = perform_all(job.leases, job.processor)
    tidy()
    close_old_connections()  # nobody tells these threads when they end
    for outcome in outcomes:
        _keep_traceback(outcome)
    return [
        Answer(outcome, lease.outcome if lease.settled else None, lease.lost)
        for lease, outcome in zip(job.leases, outcomes, strict=True)
    ]


def _keep_traceback(outcome: Outcome | None) -> None:
    """A traceback does not travel from process to process; its text does."""
    error = None if outcome is None else facts(outcome).error
    if isinstance(error, BaseException) and error.__traceback__ and multiprocessing.parent_process() is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))


def _portable(processor: Processor) -> Processor:
    """Return the processor without what cannot go to another process and is not needed there."""
    return replace(processor, executor=None, declared={})


def _note_processor(job: Job) -> None:
    """Have failures retried as the processor declares: it was noted on the leases elsewhere, if at all."""
    for lease in job.leases:
        lease.processor = job.processor


def _taken_in(lease: Lease, answer: Answer) -> Outcome | Settlement | None:
    """Note on our lease what happened to its twin elsewhere."""
    lease.lost = answer.lost
    if answer.settled is not None:
        lease.settled, lease.outcome = True, answer.settled
    return answer.outcome
