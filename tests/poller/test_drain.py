"""A run that ends by itself ends when there is nothing more for it to do."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue import enqueue, enqueue_many, processor, registry
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from django_dbtaskqueue.testing import TaskQueueKit
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.patience import PATIENCE
from tests.poller.processes import polling
from tests.support import until


@pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_a_draining_poller_does_not_wait_for_tasks_it_never_takes(
    taskqueue: TaskQueueKit, settings: Any, alias: str
) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"long": {}}}

    @processor("long")
    def long(task: Any) -> None: ...

    ours, blue = enqueue("long", using=alias), enqueue("long", tag="blue", using=alias)
    planned = Task.objects.using(alias).create(queue="long", next_process_time=Now() + timedelta(hours=1))
    with taskqueue.run_poller("long", using=alias, timeout=timedelta(seconds=PATIENCE)):
        pass
    rows = dict(Task.objects.using(alias).values_list("pk", "status"))
    assert rows == {ours.pk: "COMPLETED", blue.pk: "CREATED", planned.pk: "CREATED"}


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("taskqueue_registry")
def test_slow_first_calls_do_not_keep_batches_small(clock: SteppedClock) -> None:
    calls: list[Any] = []

    @processor("cold")
    def cold(task: Any) -> None:
        calls.append(task.id)
        if len(calls) <= 4:  # as a call that imports and connects
            clock.advance(0.05)

    enqueue_many("cold", ({} for _ in range(1500)))
    clock.stop()
    with polling({"cold": 1}, threads=2):
        until(lambda: clock.advance(0.001) or len(calls) == 1500)
    assert Task.objects.values("start_time").distinct().count() <= 18


@pytest.mark.usefixtures("taskqueue_registry")
def test_a_draining_poller_ends_soon_after_its_last_task(
    sqlite_process_database: ProcessDatabase, settings: Any
) -> None:
    """Given a task that still runs when its queue is empty, then the poller waits for its end alone."""
    settings.DBTASKQUEUE = {"QUEUES": {"long": {"poll_interval": "1h", "idle_interval": "1h", "lease": "20h"}}}
    go = threading.Event()
    registry.register("long", lambda task: go.wait(PATIENCE) and None)
    enqueue("long")
    poller = Poller({"long": 1}, Options(drain=True))
    poller.start()
    until(lambda: poller.running() and poller.queues["long"].idle_pause)
    go.set()
    until(lambda: poller.wait(0))
    poller.close()
