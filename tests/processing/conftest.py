"""Processors registered by the test itself, run by a real poller or by ``drain``."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import Fixed, enqueue, testing
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.loop import Poller
from tests.poller.processes import Held
from tests.support import until
from tests.testapp.models import Booking

QUEUE = "parcels"
both = pytest.mark.parametrize("alias", ["default", "sqlite"], ids=["postgresql", "sqlite"])
on_real_connections = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
SOON = Fixed(timedelta(milliseconds=20), jitter=0)


@dataclass
class Letter:
    text: str


@dataclass
class Crate:
    weight: int


@dataclass
class Site:
    """One database with the queue ``parcels``."""

    alias: str

    def enqueue(self, payload: Any = None, reference: str | None = None, **options: Any) -> Task:
        return enqueue(QUEUE, reference, payload, using=self.alias, **options)

    def fill(self, *payloads: Any) -> list[Task]:
        return [self.enqueue(payload) for payload in payloads]

    def poller(self, **options: Any) -> AbstractContextManager[Poller]:
        """Run a real poller for a ``with`` block, at whose end the queue is empty."""
        return testing.run_poller(QUEUE, using=self.alias, **options)

    def run(self, **options: Any) -> Poller:
        """Run a real poller until the queue is empty."""
        with self.poller(**options) as poller:
            return poller

    def drain(self, **options: Any) -> testing.DrainReport:
        return testing.drain(QUEUE, using=self.alias, **options)

    def drained(self, payload: Any = None, reference: str | None = None, **options: Any) -> Task:
        """Enqueue a task, drain the queue, and return what became of the task."""
        task = self.enqueue(payload, reference, **options)
        self.drain()
        return self.task(task)

    def ran(self, payload: Any = None, reference: str | None = None, **options: Any) -> Task:
        """The same by a real poller."""
        task = self.enqueue(payload, reference, **options)
        self.run()
        return self.task(task)

    def task(self, task: Any) -> Task:
        return Task.objects.using(self.alias).get(pk=getattr(task, "pk", None) or task.id)

    def tasks(self, **selection: Any) -> Any:
        return Task.objects.using(self.alias).filter(queue=QUEUE, **selection)

    def values(self, *columns: str) -> list[Any]:
        return list(self.tasks().order_by("pk").values_list(*columns, flat=len(columns) == 1))

    def until(self, task: Task, status: str = "COMPLETED") -> None:
        until(lambda: self.task(task).status == status)

    def attempts(self, task: Task) -> list[Attempt]:
        return list(Attempt.objects.using(self.alias).filter(task_id=task.pk).order_by("total_attempt"))

    def book(self, reference: Any) -> int:
        return Booking.objects.using(self.alias).create(reference=reference).pk

    def booked(self) -> list[str]:
        return list(Booking.objects.using(self.alias).order_by("pk").values_list("reference", flat=True))


@pytest.fixture
def alias() -> str:
    """What is around a processor is the same on any database; a test of what is not is marked ``both``."""
    return "default"


@pytest.fixture(autouse=True)
def _registrations(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}, "NOTIFY": False}  # who listens takes a second to end


@pytest.fixture
def site(alias: str) -> Site:
    return Site(alias)


@pytest.fixture
def held() -> Iterator[Held]:
    yield (one := Held())
    one.go_on.set()  # also if its test fails: else its transaction holds up those after it
