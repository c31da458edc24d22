"""Renewal: nothing keeps a lease from being renewed while its processor runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.backends.signals import connection_created

from django_dbtaskqueue import enqueue, processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import TaskQueueKit
from tests.support import until

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
        done.wait(20)

    task = enqueue("long")
    with taskqueue.run_poller("long"):
        until(lambda: Task.objects.filter(pk=task.pk, status="PROCESSING").exists())
        first = Task.objects.get(pk=task.pk).next_process_time
        until(lambda: Task.objects.get(pk=task.pk).next_process_time > first + 2 * LEASE)
        done.set()
    assert thrown
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("COMPLETED", 1)
