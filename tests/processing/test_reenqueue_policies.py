"""When a task is due again that was reenqueued without a delay."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from django_dbtaskqueue import Arithmetic, Fixed, Reenqueue, Staged, processor, registry
from django_dbtaskqueue.core.exceptions import ReenqueueDelayMissing
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.poller.heartbeat import apply_overrides
from django_dbtaskqueue.poller.loop import Poller
from tests.processing.conftest import QUEUE, Site
from tests.support import PATIENCE, until

pytestmark = pytest.mark.django_db
MINUTE = timedelta(minutes=1)


def wait_of(task: Task) -> float:
    """Seconds from the last write until the task is due."""
    assert task.ready_time is not None
    return (task.ready_time - task.last_update_time).total_seconds()


def again(_: Any) -> Reenqueue:
    return Reenqueue()


def test_the_policy_is_asked_with_the_number_of_the_reenqueue(site: Site) -> None:
    asked: list[tuple[int, BaseException | None]] = []

    def policy(number: int, error: BaseException | None) -> timedelta:
        asked.append((number, error))
        return number * MINUTE

    processor(QUEUE, reenqueue=policy)(again)
    task = site.enqueue()
    waits = []
    for _ in range(3):
        site.drain()
        row = site.task(task)
        waits.append(round(wait_of(row)))
        site.tasks().update(ready_time=row.create_time, next_process_time=row.create_time)
    assert asked == [(1, None), (2, None), (3, None)]
    assert waits == [60, 120, 180]
    assert (row.status, row.attempt, row.reenqueue_attempt, row.total_attempt) == ("CREATED", 0, 3, 3)


def test_a_processor_that_reenqueues_by_itself_gets_the_same_delay(site: Site) -> None:
    @processor(QUEUE, reenqueue=Arithmetic(MINUTE, jitter=0))
    def settle_it(task: Lease) -> None:
        task.reenqueue(result="half", keep_attempts=True)

    task = site.enqueue()
    site.drain()
    row = site.task(task)
    assert (round(wait_of(row)), row.result, row.attempt) == (60, "half", 1)


@pytest.mark.parametrize("declared", [None, "manual"])
def test_without_a_policy_the_attempt_fails_and_says_what_to_do(site: Site, declared: Any) -> None:
    processor(QUEUE, reenqueue=declared, retry=Fixed(MINUTE, jitter=0), max_attempts=2)(again)
    task = site.enqueue()
    assert site.drain().retried == 1
    row = site.task(task)
    assert (row.status, row.attempt, row.reenqueue_attempt, round(wait_of(row))) == ("CREATED", 1, 0, 60)
    assert "Reenqueue(timedelta(minutes=5))" in site.attempts(task)[0].message
    assert "Reenqueue(timedelta(minutes=5))" in (row.process_result or "")


def test_settling_by_oneself_without_a_policy_raises_and_writes_nothing(site: Site) -> None:
    seen: list[str] = []

    @processor(QUEUE)
    def settle_it(task: Lease) -> str:
        try:
            with transaction.atomic(using=site.alias):
                task.reenqueue()
        except ReenqueueDelayMissing as error:
            seen.append(str(error))
        return "went on"

    task = site.enqueue()
    site.drain()
    assert (site.task(task).status, site.task(task).result) == ("COMPLETED", "went on")
    assert QUEUE in seen[0] and "Give the delay" in seen[0]


def test_a_policy_that_gives_up_ends_in_error(site: Site) -> None:
    processor(QUEUE, reenqueue=Staged((1, timedelta(0)), jitter=0))(again)
    task = site.enqueue()
    site.drain()
    row = site.task(task)
    assert (row.status, row.reenqueue_attempt) == ("ERROR", 1)
    assert "gives up at reenqueue 2" in (row.process_result or "")


HOURLY = Fixed(timedelta(hours=1))
TWO_MINUTES = "fixed:2m,jitter=0"


@pytest.mark.parametrize(
    ("given", "options", "function", "seconds"),
    [
        ({}, {"reenqueue": HOURLY}, lambda task: Reenqueue(MINUTE), 60),
        ({"QUEUES": {QUEUE: {"reenqueue": TWO_MINUTES}}}, {"reenqueue": HOURLY}, again, 120),
        ({"DEFAULTS": {"reenqueue": Fixed(MINUTE, jitter=0)}}, {}, again, 60),
        ({}, {"batch": 5, "reenqueue": lambda number, error: number * MINUTE}, again, 60),
    ],
    ids=["the delay that is given", "the queue's settings before the processor", "the defaults", "a batch"],
)
def test_which_delay_counts(site: Site, settings: Any, given: Any, options: Any, function: Any, seconds: int) -> None:
    settings.DBTASKQUEUE = given
    processor(QUEUE, **options)(function)
    task = site.enqueue()
    site.drain()
    assert round(wait_of(site.task(task))) == seconds


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises((ImproperlyConfigured, TypeError), match="policy"):
        processor(QUEUE, reenqueue=5)(again)
    assert registry.processors(QUEUE) == ()


@pytest.mark.django_db(transaction=True)
def test_an_operator_changes_it_at_runtime(site: Site) -> None:
    processor(QUEUE, reenqueue=Fixed(MINUTE))(again)
    Queue.objects.using(site.alias).create(name=QUEUE, overrides={"reenqueue": "fixed:2m,jitter=0"})
    task = site.enqueue()
    poller = Poller({QUEUE: 1}, using=site.alias)
    apply_overrides(list(poller.queues.values()), site.alias)  # as at a heartbeat
    poller.start()
    try:
        until(lambda: site.task(task).reenqueue_attempt == 1)
    finally:
        poller.stop()
        assert poller.wait(PATIENCE)
        poller.close()
    assert round(wait_of(site.task(task))) == 120
