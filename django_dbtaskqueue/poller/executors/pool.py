"""Processors on an executor that the site provides: threads or processes of ``concurrent.futures``, or a cluster.

It gets at most as many calls as it has slots, because the poller cannot count calls that wait inside it. The poller
renews the leases and settles the outcomes: a process pool needs no connection to the queue's database.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.failure_signature import RemoteError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Outcome, Release, Settlement, with_error
from django_dbtaskqueue.db.liveness import DatabaseUse, database_use
from django_dbtaskqueue.flow.run import PROCESS, Processor, decide_all, decide_call, perform_all
from django_dbtaskqueue.poller.executors import Answer, ConcurrencyLimiter, Executor, Finish, Job
from django_dbtaskqueue.poller.executors.thread import check_connections, tidied

SUBMIT_SECONDS = 1.0  # at most, that a cancel waits for a call to be submitted: some executors run it meanwhile
Perform = Callable[[Sequence[Lease], Processor], Sequence[Outcome | Settlement | None]]  # such as ``perform_all``
SHORT_NAMES = {"spark": "django_dbtaskqueue.contrib.spark.SparkExecutor"}


class PoolExecutor(Executor):
    """Runs jobs on the executor that ``executor=`` names; all processors that name the same one share it."""

    def __init__(self, given: object, finish: Finish, limiter: ConcurrencyLimiter) -> None:
        super().__init__(finish, limiter)
        self._given = given
        self._pool, self._owned = made_executor(given)
        self._futures: set[Future[list[Answer]]] = set()
        self._feeding = threading.Lock()
        self._closed = False
        self.slots  # noqa: B018 -- raises early if the executor does not report its slots

    @property
    def slots(self) -> int:  # type: ignore[override]  # the poller only reads it
        """How many calls the site's executor takes at a time; it may change."""
        for name in ("slots", "_max_workers"):
            slots = getattr(self._pool, name, None)
            if isinstance(slots, int) and slots > 0:
                return slots
        raise ImproperlyConfigured(
            f"executor={self._given!r} does not say how many calls it takes at a time: give it an attribute slots."
        )

    def nudge(self) -> None:
        """Submit as many jobs as slots are free. One thread at a time does this, and checks again before it ends."""
        while self._has_free_slot() and self._feeding.acquire(blocking=False):
            try:
                while self._has_free_slot():
                    self._submit_one(self.todo.popleft())
            except IndexError:  # another thread withdrew it
                continue
            finally:
                self._feeding.release()

    def _has_free_slot(self) -> bool:
        return bool(self.todo) and not self._closed and len(self.runs) < self.slots

    def cancel(self) -> None:
        self._closed = True
        # A call that another thread submits now can be cancelled only after that, and must not be given up before.
        submitted = self._feeding.acquire(timeout=SUBMIT_SECONDS)
        try:
            for future in self._futures.copy():
                future.cancel()
        finally:
            if submitted:
                self._feeding.release()

    def close(self) -> None:
        """Shut the executor down if it was created here. The site shuts down an executor that it provided."""
        if self._owned and hasattr(self._pool, "shutdown"):
            self._pool.shutdown(wait=False)

    def _submit_one(self, job: Job) -> None:
        slot = job.lease
        if (run := self._begin(slot, job)) is None:
            return
        try:
            future = self._submitted(portable(run.job))
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._futures.add(future)
        future.add_done_callback(partial(self._ended, slot, run.job.leases))

    def _ended(self, slot: Lease, leases: Sequence[Lease], future: Future[list[Answer]]) -> None:
        seconds = 0.0
        outcomes: Sequence[Outcome | Settlement | None]
        try:
            answers = future.result()
            seconds = sum(answer.seconds for answer in answers)
            outcomes = applied(answers, leases)
        except CancelledError:
            outcomes = [Release()] * len(leases)
        except BaseException as error:  # the pool broke, or could not transport the call or its answer
            outcomes = [Fail(error)] * len(leases)
        self._futures.discard(future)
        self._end(slot, decide_all(leases, outcomes), seconds)
        self.nudge()

    def _submitted(self, job: Job) -> Future[list[Answer]]:
        try:
            return self._pool.submit(run_remotely, job)
        except Exception:
            if not self._owned:
                raise
        self.close()  # its processes died, and it accepts no more calls
        self._pool, self._owned = made_executor(self._given)
        return self._pool.submit(run_remotely, job)


def made_executor(given: object) -> tuple[futures.Executor, bool]:
    """Return the executor that ``executor=`` names, and whether this call created it."""
    found = conf.imported(f"executor={given!r}", given) if isinstance(given, str) else given
    owned = isinstance(found, type) or not hasattr(found, "submit")
    pool: Any = found() if owned and callable(found) else found
    if not callable(getattr(pool, "submit", None)):
        raise ImproperlyConfigured(f"executor={given!r} is {pool!r}, which has no submit(function, *arguments).")
    return pool, owned


def portable(job: Job) -> Job:
    """Return a job without what another process does not need of it, and what cannot be pickled."""
    return job._replace(processor=replace(job.processor, executor=None, declared={}))


def run_remotely(job: Job) -> list[Answer]:
    """Run a job in a thread or process of the site's executor. Never raises."""
    check_connections()
    return run_here(job, perform_all)


def run_here(job: Job, perform: Perform) -> list[Answer]:
    """Run a job on this thread, whose connections are checked. Never raises."""
    database_use.set(DatabaseUse())
    outcomes = tidied(perform(job.leases, job.processor))
    close_old_connections()  # these threads get no signal when they end
    answers = []
    for lease, outcome in zip(job.leases, outcomes, strict=True):
        failed = outcome is not None and isinstance(outcome.facts.error, BaseException)
        sent = portable_outcome(lease, outcome) if failed and multiprocessing.parent_process() is not None else outcome
        answers.append(Answer(sent, lease.outcome if lease.settled else None, lease.lost))
    return answers


def portable_outcome(lease: Lease, outcome: Outcome | Settlement) -> Outcome | Settlement:
    """Return an outcome as another process can send it. An error that cannot be pickled is decided here, and text."""
    error = outcome.facts.error
    try:
        pickle.loads(pickle.dumps(outcome))  # noqa: S301 -- made in the same line
    except Exception:
        if error is None:
            return Fail(f"{type(outcome).__name__} with a result that is not JSON could not be stored.")
        return with_error(decide_call(lease, outcome), RemoteError.of(error, lease.queue))
    if isinstance(error, BaseException) and error.__traceback__:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))  # a traceback object cannot be pickled
    return outcome


def applied(answers: Sequence[Answer], leases: Sequence[Lease]) -> list[Outcome | Settlement | None]:
    """Copy to the leases what happened to their copies in the other process; return the outcomes."""
    for lease, answer in zip(leases, answers, strict=True):
        lease.lost = answer.lost
        if answer.settled is not None:
            lease.settled, lease.outcome = True, answer.settled
    return [answer.outcome for answer in answers]


@contextmanager
def named_executor(path: str | None, given: Mapping[str, Any]) -> Iterator[futures.Executor | str | None]:
    """Yield the executor that a command line names, made with what is ``given``; shut down afterwards if made here.

    Where there is no path None, and PROCESS itself, of which each poller makes its own. Raises ``ImproperlyConfigured``
    for what is no executor, or does not take its options.
    """
    if path is None or path == PROCESS:
        yield path
        return
    named = conf.imported(f"--executor {path}", SHORT_NAMES.get(path, path))
    try:
        executor, owned = made_executor(partial(named, **given) if given else named)
    except TypeError as error:
        raise ImproperlyConfigured(f"--executor {path} does not take what it was given: {error}") from error
    try:
        yield executor
    finally:
        if owned and hasattr(executor, "shutdown"):
            executor.shutdown(wait=False)
