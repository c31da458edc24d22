"""One queue on each database, under the audit. What takes from it runs with each strategy, too."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, Settlement
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import settle
from django_dbtaskqueue.flow.run import decide
from django_dbtaskqueue.models import Attempt, Task, TaskHistory
from tests import factories
from tests.support import Audit, minute_counts

STRATEGIES = {
    "postgresql-skip_locked": ("default", "skip_locked"),
    "postgresql-optimistic": ("default", "optimistic"),
    "postgresql-own_driver": ("default", "tests.conformance.driver.Plain"),
    "sqlite-single_writer": ("sqlite", "auto"),
}
DATABASES = ("postgresql-skip_locked", "sqlite-single_writer")
CHECKOUTS = {**STRATEGIES, "postgresql-shared": ("default", "tests.conformance.driver.Shared")}
FIRST, SECOND = "poller-1:100:abc", "poller-2:200:def"


@dataclass
class World:
    """A database and a checkout strategy, and the verbs of the flow on them."""

    alias: str
    strategy: str
    settings: Any

    def configure(self, **queue: Any) -> None:
        self.settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": self.strategy, **queue}, "other": {}}}

    @property
    def tasks(self) -> Any:
        return Task.objects.db_manager(self.alias)

    @property
    def session(self) -> Session:
        return Session.on(self.alias)

    def enqueue(self, reference: str | None = None, payload: Any = None, **options: Any) -> Task:
        return enqueue("parcels", reference, payload, using=self.alias, **options)

    def make(self, status: Status | str = Status.CREATED, **columns: Any) -> Task:
        return factories.make_task(status, using=self.alias, **columns)

    def checkout(self, limit: int = 1, *, poller: str = FIRST, queue: str = "parcels", **options: Any) -> list[Lease]:
        return self.tasks.checkout(queue, poller_instance=poller, limit=limit, **{"lease": factories.LEASE} | options)

    def take(self, **columns: Any) -> Lease:
        wanted = self.make(**columns)
        return next(lease for lease in self.checkout(50) if lease.id == wanted.id)

    def take_many(self, number: int) -> list[Lease]:
        self.tasks.enqueue_many("parcels", [{}] * number)
        leases = self.checkout(number)
        assert len(leases) == number
        return leases

    def take_over(self, lease: Lease, **options: Any) -> Lease:
        """Let ``lease`` run out, and another poller take the task."""
        self.age(factories.LEASE)
        return next(other for other in self.checkout(50, poller=SECOND, **options) if other.id == lease.id)

    def settle(self, lease: Lease, outcome: Outcome | Settlement) -> bool:
        return lease.id in settle.settle(self.session, [(lease, decide(lease, outcome))])

    def age(self, delta: timedelta) -> None:
        factories.age(delta, using=self.alias)

    def row(self, task: Any) -> dict[str, Any]:
        return Task.objects.using(self.alias).values().get(pk=task.id)

    def everything(self) -> list[list[Any]]:
        tables = [table._default_manager.using(self.alias) for table in (Task, TaskHistory, Attempt)]
        return [list(rows.order_by("pk").values()) for rows in (*tables, minute_counts("deletion", self.alias))]


any_strategy = pytest.mark.parametrize("world", STRATEGIES, indirect=True)


@pytest.fixture(params=DATABASES)
def world(request: pytest.FixtureRequest, audits: dict[str, Audit], db: None, settings: Any) -> Iterator[World]:
    """Run the test on each database, and let the audit judge it at the end."""
    alias, strategy = CHECKOUTS[request.param]
    audits[alias].clear()
    made = World(alias, strategy, settings)
    made.configure()
    yield made
    assert audits[alias].problems() == []


@pytest.fixture
def audit(world: World, audits: dict[str, Audit]) -> Audit:
    return audits[world.alias]


@pytest.fixture(scope="session")
def audits(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> dict[str, Audit]:
    found = {alias: Audit(alias) for alias in ("default", "sqlite")}
    with django_db_blocker.unblock():
        for one in found.values():
            one.install()
            one.connection.close()
    return found
