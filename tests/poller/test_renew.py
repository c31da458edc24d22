"""Renewal: nothing keeps a lease from being renewed while its processor runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.backends.signals import connection_created
from django.db.models.functions import Now

from django_dbtaskqueue import Complete, enqueue, enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.settle import settle
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import QueueState
from django_dbtaskqueue.poller.renew import RETRY_SECONDS, Renewer
from django_dbtaskqueue.testing import TaskQueueKit
from tests.clock import SteppedClock
from tests.support import PATIENCE, until

LEASE = timedelta(hours=1)  # it is renewed after a third


@pytest.fixture
def thrown() -> Iterator[list[str]]:
    """Make the first connection of the renewing thread fail with what is no database error, as a receiver may."""
    threads: list[str] = []

    def fail_once(**_: Any) -> None:
        name = threading.current_thread().name
        if name == "dbtaskqueue-renew" and name not in threads:
            threads.append(name)
            raise RuntimeError("a receiver of connection_created failed")

    connection_created.connect(fail_once)
    yield threads
    connection_created.disconnect(fail_once)


@pytest.mark.django_db(transaction=True)
def test_renewal_goes_on_after_an_error_that_is_not_the_database_s(
    taskqueue: TaskQueueKit, settings: Any, thrown: list[str], clock: SteppedClock
) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"long": {"lease": LEASE}}}
    done = threading.Event()

    @processor("long")
    def long(task: Any) -> None:
        done.wait(PATIENCE)

    task = enqueue("long")
    with taskqueue.run_poller("long"):
        until(lambda: Task.objects.filter(pk=task.pk, status="PROCESSING").exists())
        first = Task.objects.get(pk=task.pk).next_process_time
        clock.advance(LEASE.total_seconds() / 2)
        until(lambda: thrown)
        clock.advance(RETRY_SECONDS)
        until(lambda: Task.objects.get(pk=task.pk).next_process_time > first)
        done.set()
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("COMPLETED", 1)


@pytest.mark.django_db(transaction=True)
def test_a_lease_made_shorter_while_running_is_renewed_in_time(
    taskqueue: TaskQueueKit, settings: Any, clock: SteppedClock
) -> None:
    """Given a poller that plans to renew in hours, when an operator shortens the lease, then renewal follows it."""
    settings.DBTASKQUEUE = {"HEARTBEAT": "100ms", "QUEUES": {"long": {"lease": 10 * LEASE}}}
    done = threading.Event()

    @processor("long")
    def long(task: Any) -> None:
        done.wait(PATIENCE)

    with taskqueue.run_poller("long") as poller:
        until(lambda: poller.state == "RUNNING")
        Queue.objects.create(name="long", overrides={"lease": "PT1H"})
        until(lambda: poller.queues["long"].settings.lease == LEASE)
        task = enqueue("long")
        until(lambda: Task.objects.filter(pk=task.pk, status="PROCESSING").exists())
        first = Task.objects.get(pk=task.pk).next_process_time
        clock.advance(LEASE.total_seconds() / 2)
        until(lambda: Task.objects.get(pk=task.pk).next_process_time > first)
        done.set()
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("COMPLETED", 1)


@pytest.mark.django_db(transaction=True)
def test_a_short_lease_taken_during_a_renewal_is_renewed_in_time(settings: Any) -> None:
    """Given a renewal under way whose next one is far off, then a short lease taken meanwhile brings it forward."""
    settings.DBTASKQUEUE = {"QUEUES": {"long": {"lease": 10 * LEASE}}}
    poller = Poller({"long": 1})
    [queue] = poller.queues.values()
    asked: list[QueueState] = []

    def held(queue: QueueState) -> list[Lease]:
        asked.append(queue)
        if len(asked) == 1:
            renewer.expect(queue, 0.3)  # by a checkout, while the renewal looks at what is held
        return []

    renewer = Renewer([queue], held, lambda lease: None)
    renewer.start()
    until(lambda: len(asked) >= 2)
    renewer.stop()
    poller.close()


@pytest.mark.django_db(transaction=True)
def test_a_task_with_a_short_lease_of_its_own_is_renewed_again_and_again(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"long": {"lease": "10m"}}}
    poller = Poller({"long": 1})
    [queue] = poller.queues.values()
    enqueue("long", lease=timedelta(milliseconds=300))
    leases = Task.objects.checkout("long", poller_instance="p")
    asked: list[QueueState] = []

    def held(queue: QueueState) -> list[Lease]:
        asked.append(queue)
        return leases

    renewer = Renewer([queue], held, lambda lost: None)
    renewer.start()
    try:
        until(lambda: len(asked) >= 3)
    finally:
        renewer.stop()
        poller.close()


@pytest.mark.django_db(transaction=True)
def test_waiting_tasks_do_not_outlive_their_leases_in_memory(
    taskqueue: TaskQueueKit, settings: Any, clock: SteppedClock
) -> None:
    """Given tasks that wait in memory behind a slow one, when their leases get old, then they are renewed, too."""
    settings.DBTASKQUEUE = {"QUEUES": {"long": {"lease": LEASE}}}
    done, started = threading.Event(), []

    @processor("long")
    def long(task: Any) -> None:
        if task.payload == "slow":
            started.append(task.id)
            done.wait(PATIENCE)

    # After quick tasks a poller takes many ahead.
    enqueue_many("long", [{"payload": "quick"}] * 200 + [{"payload": "slow"}] * 20)
    with taskqueue.run_poller("long", threads=1):
        in_memory = Task.objects.filter(status="PROCESSING", payload="slow")
        until(lambda: bool(started) and in_memory.exclude(pk__in=started).exists())
        first = dict(in_memory.exclude(pk__in=started).values_list("pk", "next_process_time"))
        clock.advance(LEASE.total_seconds() / 2)
        until(lambda: all(row.next_process_time > first[pk] for pk, row in Task.objects.in_bulk(first).items()))
        assert len(started) == 1
        done.set()
    assert set(Task.objects.values_list("status", "total_attempt")) == {("COMPLETED", 1)}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["thread", "coroutine", "batch"])
def test_a_lease_that_was_lost_in_memory_is_not_started(
    taskqueue: TaskQueueKit, settings: Any, clock: SteppedClock, kind: str
) -> None:
    """Given tasks that wait in memory for a slot, when another poller takes one of them, then it runs there alone."""
    settings.DBTASKQUEUE = {"QUEUES": {"long": {"lease": LEASE}}}
    done, started = threading.Event(), []

    def begin(task: Any) -> None:
        if task.payload == "slow":
            started.append(task.id)
            done.wait(PATIENCE)

    async def begin_on_the_loop(task: Any) -> None:
        await asyncio.to_thread(begin, task)

    def begin_all(tasks: Any) -> None:
        for task in tasks:
            begin(task)

    function = {"thread": begin, "coroutine": begin_on_the_loop, "batch": begin_all}[kind]
    processor("long", **({"batch": 1} if kind == "batch" else {}))(function)
    # After quick tasks a poller takes many ahead.
    enqueue_many("long", [{"payload": "quick"}] * 200 + [{"payload": "slow"}] * 20)
    with taskqueue.run_poller("long", threads=1, coroutines=1) as poller:
        in_memory = Task.objects.filter(status="PROCESSING", payload="slow")
        until(lambda: bool(started) and in_memory.exclude(pk__in=started).exists())
        with transaction.atomic():  # renewal passes over a locked row
            task = in_memory.exclude(pk__in=started).select_for_update().order_by("pk")[0]
            Task.objects.filter(pk=task.pk).update(next_process_time=Now())
            (lease,) = Task.objects.checkout("long", poller_instance="another", limit=1, lease=2 * LEASE)
        ours = [held for held in poller.settler.held.copy() if held.id == task.pk]
        clock.advance(LEASE.total_seconds() / 2)
        until(lambda: all(held.deadline == 0.0 for held in ours))
        settle(Session.on("default"), [(lease, Complete())])
        done.set()
    assert [held.id for held in ours] == [lease.id] == [task.pk]
    assert task.pk not in started
    assert set(Task.objects.values_list("status", "total_attempt")) == {("COMPLETED", 1), ("COMPLETED", 2)}
