"""``runtaskpoller`` as a process of its own, and what tests want to know of it and of its database."""

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import pytest
from django.db import connections
from django.db.models import Count
from django.db.models.functions import Now
from django.db.utils import Error

from django_dbtaskqueue import models
from django_dbtaskqueue.models import Task
from tests.factories import age
from tests.forks import Fork
from tests.patience import DEFAULT_S
from tests.poller.processes import alive
from tests.support import eventually


class PollerProcess(Fork):
    def ready(self) -> Self:
        def reports() -> None:
            if self.code is not None:
                pytest.fail(f"it ended with {self.code}:\n{self.log[-4000:]}")
            assert models.Poller.objects.filter(pid=self.pid, state="RUNNING").exists()

        eventually(reports)
        return self


Start = Callable[..., PollerProcess]
Configure = Callable[..., None]


def on(*databases: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("database", databases, indirect=True)


def statuses(**selection: Any) -> dict[str, int]:
    """Return how many tasks have each status; the connection may have to be made anew."""
    counted = Task.objects.filter(**selection).values_list("status").annotate(Count("pk")).order_by()
    try:
        return dict(counted)
    except Error as error:
        connections["default"].close()
        raise AssertionError(f"the database did not answer: {error}") from error


def until_all(*ends: str, timeout: float = DEFAULT_S, **selection: Any) -> None:
    """Wait until every task has one of these statuses, while the leases of dead pollers run out."""

    def all_of_them() -> None:
        found = statuses(**selection)
        if found.get("PROCESSING"):
            expire_orphans()
        assert found and found.keys() <= {*ends}, found

    eventually(all_of_them, timeout=timeout)


def expire_orphans() -> None:
    held = Task.objects.filter(status="PROCESSING").values_list("poller_instance", flat=True)
    for instance in held.distinct().order_by():
        if instance and not alive(int(instance.split(":")[1])):
            age(timedelta(hours=1), status="PROCESSING", next_process_time__gt=Now(), poller_instance=instance)


def until_dead(*processes: PollerProcess) -> None:
    for process in processes:
        process.ended(-signal.SIGKILL)
