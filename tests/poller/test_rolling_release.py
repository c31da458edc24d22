"""A rolling release: pollers whose code lacks a payload type run beside one that has it."""

import logging
import os
from dataclasses import replace

import pytest

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.models import Poller, Task
from django_dbtaskqueue.operations import doctor
from tests.conftest import ProcessDatabase
from tests.poller.processes import completed, polling, runtaskpoller, status_of
from tests.support import until
from tests.testapp.tasks import NEW_RELEASE, Order


def test_tasks_of_a_new_type_start_at_once_beside_old_pollers(
    postgres_process_database: ProcessDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """Two pollers are of the old release, and one of the new one, which alone has a processor for orders."""
    assert not registry.payload_types("work")
    new = replace(postgres_process_database, extra={NEW_RELEASE: "1"})
    with polling({"work": 1}), polling({"work": 1}), runtaskpoller(new, "--queue", "work", "--threads", "2") as newest:
        until(Poller.objects.filter(state="RUNNING").exclude(pid=os.getpid()).exists)
        with caplog.at_level(logging.WARNING, "django_dbtaskqueue"):
            enqueue_many("work", [Order(number) if number % 2 else {"payload": {}} for number in range(200)])
            until(lambda: completed() == 200)
        assert not [message for message in caplog.messages if "parked" in message]
        assert "are ready again" not in newest.log
        assert not Task.objects.exclude(attempt=1).exists()
        newest.stop()


def test_a_type_that_no_poller_has_is_parked_and_told_to_the_operator(process_database: ProcessDatabase) -> None:
    with polling({"work": 1}):
        order, known = enqueue("work", payload=Order(1)), enqueue("work", payload={})
        until(lambda: status_of(known) == "COMPLETED")
        until(Task.objects.filter(pk=order.pk, parked_by__isnull=False).exists)
    order.refresh_from_db()
    assert (order.status, order.attempt) == ("CREATED", 0)
    assert order.parked_by == "no handler for payload type tests.testapp.tasks.Order on queue work"
    assert "task.parked" in [finding.id for finding in doctor.examine()]


def test_what_another_poller_has_is_parked_once_that_poller_is_gone(process_database: ProcessDatabase) -> None:
    types = {"queue": "work", "weight": 1, "idle_seconds": 0, "types": ["tests.testapp.tasks.Order"]}
    Poller.objects.create(instance="new", state="RUNNING", queues=[types])
    with polling({"work": 1}) as poller:
        order = enqueue("work", payload=Order(1))
        until(lambda: poller.queues["work"].foreign_types)
        until(Task.objects.filter(pk=order.pk, status="CREATED", parked_by=None, attempt=0).exists)
        Poller.objects.filter(pk="new").update(state="STOPPED")
        poller.queues["work"].foreign_until = 0.0
        poller.wake("work")
        until(lambda: Task.objects.get(pk=order.pk).parked_by is not None)
