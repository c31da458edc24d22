"""The hand-over of a task to an idle thread of the poller."""

from __future__ import annotations

import sys

import pytest

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.executors import ConcurrencyLimiter, Done, Job, thread
from tests.patience import PATIENCE
from tests.support import until

pytestmark = pytest.mark.django_db


def test_the_task_starts_before_the_thread_that_fetched_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a fetch thread that would keep the interpreter, when it hands a task over, then an idle thread has it."""
    monkeypatch.setattr(thread, "HAND_OVER_SECONDS", PATIENCE)
    ran: list[int] = []
    ended: list[Done] = []
    processor = Processor("work", lambda task: ran.append(task.id))
    executor = thread.ThreadExecutor(2, lambda done, idle: ended.append(done), ConcurrencyLimiter())

    def hand_over() -> Lease:
        enqueue("work")
        [lease] = Task.objects.checkout("work", poller_instance="poller")
        executor.submit([Job(lease, processor)], fast=False)
        return lease

    try:
        first = hand_over()
        until(lambda: ended and executor._idle)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(PATIENCE)
        try:
            second = hand_over()
            assert ran == [first.id, second.id]
        finally:
            sys.setswitchinterval(interval)
    finally:
        executor.close()
