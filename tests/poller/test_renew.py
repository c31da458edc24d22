"""Renewal: nothing keeps a lease from being renewed while its processor runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db.backends.signals import connection_created

from django_dbtaskqueue import enqueue, processor
from django_dbtaskqueue.conf.settings import overlay, queue_settings
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import QueueState
from django_dbtaskqueue.poller.renew import Renewer
from django_dbtaskqueue.testing import TaskQueueKit
from tests.support import PATIENCE, until

LEASE = timedelta(milliseconds=600)


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
    taskqueue: TaskQueueKit, settings: Any, thrown: list[str]
) -> None:
    """Given a renewal that failed, when a processor runs for three leases, then it is the only one that ever ran."""
    settings.DBTASKQUEUE = {"QUEUES": {"long": {"lease": LEASE}}}
    done = threading.Event()

    @processor("long")
    def long(task: Any) -> None:
        done.wait(PATIENCE)

    task = enqueue("long")
    with taskqueue.run_poller("long"):
        until(lambda: Task.objects.filter(pk=task.pk, status="PROCESSING").exists())
        first = Task.objects.get(pk=task.pk).next_process_time
        until(lambda: Task.objects.get(pk=task.pk).next_process_time > first + 2 * LEASE)
        done.set()
    assert thrown
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("COMPLETED", 1)


@pytest.mark.django_db(transaction=True)
def test_a_lease_made_shorter_while_running_is_renewed_in_time(taskqueue: TaskQueueKit, settings: Any) -> None:
    """Given a poller that plans to renew in 20 s, when an operator shortens the lease, then renewal follows it."""
    settings.DBTASKQUEUE = {"QUEUES": {"long": {}}}
    done = threading.Event()

    @processor("long")
    def long(task: Any) -> None:
        done.wait(PATIENCE)

    with taskqueue.run_poller("long") as poller:
        until(lambda: poller.state == "RUNNING")
        poller.queues["long"].apply(overlay(queue_settings("long"), {"lease": "600ms"}))
        task = enqueue("long")
        until(lambda: Task.objects.filter(pk=task.pk, status="PROCESSING").exists())
        first = Task.objects.get(pk=task.pk).next_process_time
        until(lambda: Task.objects.get(pk=task.pk).next_process_time > first + 2 * LEASE)
        done.set()
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("COMPLETED", 1)


@pytest.mark.django_db(transaction=True)
def test_a_short_lease_taken_during_a_renewal_is_renewed_in_time(settings: Any) -> None:
    """Given a renewal under way whose next one is far off, then a short lease taken meanwhile brings it forward."""
    settings.DBTASKQUEUE = {"QUEUES": {"long": {}}}
    poller = Poller({"long": 1})
    [queue] = poller.queues.values()
    asked: list[float] = []

    def held(_queue: QueueState) -> list[Lease]:
        asked.append(monotonic())
        if len(asked) == 1:
            renewer.expect(queue, 0.3)  # by a checkout, while the renewal looks at what is held
        return []

    renewer = Renewer([queue], held, lambda lease: None)
    renewer.start()
    until(lambda: len(asked) >= 2)
    renewer.stop()
    poller.close()
