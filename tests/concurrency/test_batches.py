"""Everything that writes many rows at once, at once: nobody waits in a circle, and no rule is broken."""

import random
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Poison, Reenqueue, enqueue_many
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Park, Release
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import move, settle
from django_dbtaskqueue.flow.decide import decide
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.renew import renew
from tests.factories import LEASE
from tests.support import Audit, at_once, counted

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
TASKS, ROUNDS = 300, 60
NO_TIME = timedelta(0)


@pytest.fixture
def audit(place: str, transactional_db: None) -> Iterator[Audit]:
    one = Audit(place)
    one.install()
    one.clear()
    yield one
    assert one.problems() == []


class ManyLeases:
    """Six actors over one set of tasks, each in another order every time."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.leases: list[Lease] = []
        self.lock = threading.Lock()

    @property
    def tasks(self) -> Any:
        return Task.objects.db_manager(self.alias)

    def some(self, dice: random.Random) -> list[Lease]:
        """Return leases, held or lost long ago, in any order."""
        with self.lock:
            return dice.sample(self.leases, min(60, len(self.leases)))

    def takes(self, dice: random.Random) -> None:
        taken = self.tasks.checkout("parcels", poller_instance="p", limit=dice.randint(1, 80), lease=LEASE)
        with self.lock:
            self.leases = [*self.leases, *taken][-600:]

    def settles(self, dice: random.Random) -> None:
        outcomes: list[settle.Settlement] = [
            Complete(), Complete("x"), CompleteDelete(), Fail("no"), Fail("no", retry=False), Poison("no"),
            Reenqueue(NO_TIME), Reenqueue(NO_TIME, keep_attempts=True), Release(), Park("no handler"),
        ]  # fmt: skip
        chosen = {lease.id: lease for lease in self.some(dice)}.values()
        if pairs := [(lease, decide(lease, dice.choice(outcomes))) for lease in chosen]:
            settle.settle(Session.on(self.alias), pairs, keep=dice.choice(["keep", "keep", "history", "delete"]))

    def renews(self, dice: random.Random) -> None:
        if leases := self.some(dice):
            renew(Session.on(self.alias), leases, 60.0)

    def operates(self, dice: random.Random) -> None:
        tasks = self.tasks.filter(priority__in=dice.sample(range(10), 5)).order_by(dice.choice(["id", "-id", "?"]))
        verb = dice.choice(["release_all", "reprocess", "mark_poison", "unpoison", "cancel"])
        getattr(tasks, verb)()
        tasks.kick(50)

    def cleans(self, dice: random.Random) -> None:
        self.tasks.order_by("-id").housekeep(older_than=NO_TIME, statuses=["COMPLETED"])
        self.tasks.filter(priority=dice.randrange(10)).order_by("?")[:3].purge()
        move.unpark(Session.on(self.alias), "parcels", [])

    def produces(self, dice: random.Random) -> None:
        references = dice.sample([f"r-{number}" for number in range(TASKS)], 100)
        items = [{"reference": reference, "priority": dice.randrange(10)} for reference in references]
        enqueue_many("parcels", items, on_duplicate="ignore", using=self.alias)


def test_six_kinds_of_writers_over_the_same_rows(place: str, audit: Audit) -> None:
    actors = ManyLeases(place)
    enqueue_many("parcels", [{"reference": f"r-{n}", "priority": n % 10} for n in range(TASKS)], using=place)
    writers: list[Callable[[random.Random], None]] = [
        actors.takes, actors.settles, actors.settles, actors.renews, actors.operates, actors.cleans, actors.produces,
    ]  # fmt: skip

    def write(index: int) -> int:
        dice = random.Random(index)
        for _ in range(ROUNDS):
            writers[index](dice)
        return ROUNDS

    assert at_once(len(writers), write) == [ROUNDS] * len(writers)
    assert len(audit.edges()) > 3
    assert counted(place) >= TASKS
    # When everybody comes to rest, then every task that is left can still be brought to an end
    actors.tasks.release_all()
    move.unpark(Session.on(place), "parcels", [])
    for lease in actors.tasks.checkout("parcels", poller_instance="p", limit=TASKS, lease=LEASE):
        lease.complete()
    assert not actors.tasks.filter(status__in=["CREATED", "PROCESSING"], ready_time__lte=Now()).exists()
