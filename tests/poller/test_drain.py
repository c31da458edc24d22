"""A run that ends by itself ends when there is nothing more for it to do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue import enqueue, processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import TaskQueueKit


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
    with taskqueue.run_poller("long", using=alias, timeout=timedelta(seconds=10)):
        pass
    rows = dict(Task.objects.using(alias).values_list("pk", "status"))
    assert rows == {ours.pk: "COMPLETED", blue.pk: "CREATED", planned.pk: "CREATED"}
