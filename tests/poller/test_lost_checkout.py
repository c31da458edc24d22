"""A checkout whose reply was lost: the poller does not know of the tasks that are leased to it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection

from django_dbtaskqueue import enqueue, processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import TaskQueueKit
from tests.support import PATIENCE, until


@pytest.mark.django_db(transaction=True)
def test_tasks_of_a_lost_checkout_are_given_back_uncharged(taskqueue: TaskQueueKit, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"letters": {"lease": "10m"}}}

    started, done = threading.Event(), threading.Event()

    @processor("letters")
    def write(task: Any) -> None:
        if task.reference == "long":
            started.set()
            done.wait(PATIENCE)

    with taskqueue.run_poller("letters") as poller:
        until(lambda: poller.state == "RUNNING")
        long = enqueue("letters", "long")
        assert started.wait(PATIENCE)
        # Given a lease in the poller's name that it never heard of, as a commit leaves it whose answer was lost
        lost = Task.objects.create(queue="letters", tag="lost")
        assert Task.objects.checkout("letters", poller_instance=poller.instance, tags=["lost"])
        Task.objects.filter(pk=lost.pk).update(tag=None)
        # When the poller's connections are cut, so that its next checkout fails
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        other = enqueue("letters")
        # Then it gives the task back, and takes it, long before the lease is over
        until(lambda: Task.objects.filter(status="COMPLETED").count() == 2)
        done.set()
    rows = Task.objects.in_bulk()
    assert (rows[lost.pk].attempt, rows[lost.pk].total_attempt) == (1, 2)
    assert rows[other.pk].attempt == 1
    assert rows[long.pk].total_attempt == 1, "a task that runs is not given back"
