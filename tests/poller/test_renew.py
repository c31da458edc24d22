"""Renewal: nothing keeps a lease from being renewed while its processor runs."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.db.backends.signals import connection_created
from django.db.models.functions import Now

from django_dbtaskqueue import Complete, enqueue, enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.settle import settle
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.poller.held_leases import RETRY_SECONDS, Renewer
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import QueueState
from django_dbtaskqueue.testing import TaskQueueKit
from tests.clock import SteppedClock
from tests.support import PATIENCE, until, with_settings

LEASE = timedelta(hours=1)  # it is renewed after a third
HALF = LEASE.total_seconds() / 2
pytestmark = pytest.mark.django_db(transaction=True)
_settings = with_settings(HEARTBEAT="100ms", QUEUES={"long": {"lease": LEASE}})


class Slow:
    """A processor that holds tasks with the payload "slow" until ``done`` is set."""

    def __init__(self) -> None:
        self.done, self.started = threading.Event(), list[int]()

    def __call__(self, task: Lease) -> None:
        if task.payload == "slow":
            self.started.append(task.id)
            self.done.wait(PATIENCE)

    def all(self, tasks: list[Lease]) -> None:
        for task in tasks:
            self(task)

    def in_memory(self) -> Any:
        """Return the slow tasks that a poller has taken ahead and not started, as it does after quick ones."""
        enqueue_many("long", [{"payload": "quick"}] * 200 + [{"payload": "slow"}] * 20)
        taken = Task.objects.filter(status="PROCESSING", payload="slow")
        until(lambda: self.started and taken.exclude(pk__in=self.started).exists())
        return taken.exclude(pk__in=self.started)


@pytest.fixture
def slow() -> Slow:
    return Slow()


def until_renewed(first: dict[int, Task]) -> None:
    rows = Task.objects.filter(pk__in=first)
    until(lambda: all(row.next_process_time > first[row.pk].next_process_time for row in rows.all()))


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


def test_renewal_goes_on_after_any_error(taskqueue: Any, slow: Slow, thrown: list[str], clock: SteppedClock) -> None:
    processor("long")(slow)
    task = enqueue("long", payload="slow")
    with taskqueue.run_poller("long"):
        until(lambda: slow.started)
        first = Task.objects.in_bulk()
        clock.advance(HALF)
        until(lambda: thrown)
        clock.advance(RETRY_SECONDS)
        until_renewed(first)
        slow.done.set()
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("COMPLETED", 1)


def test_a_lease_made_shorter_is_renewed_in_time(taskqueue: Any, slow: Slow, settings: Any, clock: Any) -> None:
    settings.DBTASKQUEUE["QUEUES"]["long"]["lease"] = 10 * LEASE
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE}
    processor("long")(slow)
    with taskqueue.run_poller("long") as poller:
        until(lambda: poller.state == "RUNNING")
        Queue.objects.create(name="long", overrides={"lease": "PT1H"})
        until(lambda: poller.queues["long"].settings.lease == LEASE)
        enqueue("long", payload="slow")
        until(lambda: slow.started)
        first = Task.objects.in_bulk()
        clock.advance(HALF)
        until_renewed(first)
        slow.done.set()
    assert Task.objects.get().total_attempt == 1


@pytest.mark.parametrize("taken", ["before", "meanwhile"])
def test_a_short_lease_is_renewed_in_time_again_and_again(taken: str) -> None:
    """Given a renewal whose next one is far off, then a short lease taken meanwhile brings it forward."""
    poller = Poller({"long": 1})
    [queue] = poller.queues.values()
    enqueue("long", lease=timedelta(milliseconds=300))
    leases = Task.objects.checkout("long", poller_instance="p") if taken == "before" else []
    asked: list[QueueState] = []

    def held(queue: QueueState) -> list[Lease]:
        asked.append(queue)
        if taken == "meanwhile" and len(asked) == 1:
            renewer.expect(queue, 0.3)  # by a checkout, while the renewal looks at what is held
        return leases

    renewer = Renewer([queue], held, lambda lost: None)
    renewer.start()
    until(lambda: len(asked) >= (3 if leases else 2))
    renewer.stop()
    poller.close()


def test_waiting_tasks_do_not_outlive_their_leases_in_memory(taskqueue: Any, slow: Slow, clock: SteppedClock) -> None:
    processor("long")(slow)
    with taskqueue.run_poller("long", threads=1):
        first = slow.in_memory().in_bulk()
        clock.advance(HALF)
        until_renewed(first)
        assert len(slow.started) == 1
        slow.done.set()
    assert set(Task.objects.values_list("status", "total_attempt")) == {("COMPLETED", 1)}


@pytest.mark.parametrize("kind", ["thread", "coroutine", "batch"])
def test_a_lease_lost_in_memory_never_runs(taskqueue: TaskQueueKit, slow: Slow, clock: SteppedClock, kind: str) -> None:
    function = {"thread": slow, "coroutine": sync_to_async(slow, thread_sensitive=False), "batch": slow.all}[kind]
    processor("long", batch=1 if kind == "batch" else None)(function)
    with taskqueue.run_poller("long", threads=1, coroutines=1) as poller:
        in_memory = slow.in_memory()
        with transaction.atomic():  # renewal passes over a locked row
            task = in_memory.select_for_update().order_by("pk")[0]
            Task.objects.filter(pk=task.pk).update(next_process_time=Now())
            (lease,) = Task.objects.checkout("long", poller_instance="another", limit=1, lease=2 * LEASE)
        ours = [held for held in poller.settler.held.copy() if held.id == task.pk]
        clock.advance(HALF)
        until(lambda: all(held.deadline == 0.0 for held in ours))
        settle(Session.on("default"), [(lease, Complete())])
        slow.done.set()
    assert [held.id for held in ours] == [lease.id] == [task.pk] and task.pk not in slow.started
    assert set(Task.objects.values_list("status", "total_attempt")) == {("COMPLETED", 1), ("COMPLETED", 2)}
