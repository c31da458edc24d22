"""Many at once, on the same rows: every task is started, none of them twice, and no rule is broken."""

import random
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Poison, Reenqueue, enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Park, Release
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import move, settle
from django_dbtaskqueue.flow.run import decide
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.held_leases import renew
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.factories import LEASE
from tests.support import PATIENCE, Audit, at_once, counted, sql


@pytest.fixture
def started(taskqueue_registry: None) -> list[int]:
    ids: list[int] = []
    registry.register("parcels", lambda task: ids.append(task.id))
    return ids


def drain(number: int, alias: str) -> list[Poller]:
    pollers = [Poller({"parcels": 1}, Options(threads=2, drain=True), using=alias) for _ in range(number)]
    for poller in pollers:
        poller.start()
    ended = [poller.wait(PATIENCE) for poller in pollers]
    for poller in pollers:
        poller.close()
    assert ended == [True] * number
    return pollers


def check_all_done_once(alias: str, pollers: list[Poller], started: list[int], number: int) -> None:
    tasks = Task.objects.using(alias)
    assert sorted(started) == list(tasks.order_by("pk").values_list("pk", flat=True))
    assert tasks.filter(status="COMPLETED", total_attempt=1).count() == tasks.count() == number
    assert not Attempt.objects.using(alias).exists()
    assert sum(poller.counts.finished for poller in pollers) == number
    assert sum(poller.counts.outcomes["lost"] for poller in pollers) == 0


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_four_pollers_in_threads(place: str, taskqueue_registry: None, caplog: pytest.LogCaptureFixture) -> None:
    started: list[int] = []
    pollers_seen: set[str | None] = set()
    together = threading.Event()

    def work(task: Lease) -> None:
        started.append(task.id)
        pollers_seen.add(task.poller_instance)
        if len(pollers_seen) > 1:
            together.set()
        assert together.wait(PATIENCE), "one poller took all tasks"

    registry.register("parcels", work)
    enqueue_many("parcels", [{}] * 4_000, using=place)
    check_all_done_once(place, drain(4, place), started, 4_000)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("strategy", ["skip_locked", "optimistic"])
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.usefixtures("postgres_process_database")
def test_a_stricter_isolation_costs_no_task(settings: Any, started: list[int], level: str, strategy: str) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": strategy}}}
    database = connection.ops.quote_name(connection.settings_dict["NAME"])
    sql(f"ALTER DATABASE {database} SET default_transaction_isolation = '{level}'")
    connection.close()
    enqueue_many("parcels", [{}] * 1_000)
    check_all_done_once("default", drain(3, "default"), started, 1_000)


# -- everything that writes many rows at once, at once: nobody waits in a circle, and no rule is broken ----------------
TASKS, ROUNDS = 300, 60
NO_TIME = timedelta(0)


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
            pairs[0][0].port.keep = dice.choice(["keep", "keep", "history", "delete"])
            settle.settle(Session.on(self.alias), pairs)

    def renews(self, dice: random.Random) -> None:
        if leases := self.some(dice):
            renew(Session.on(self.alias), leases, 60.0)

    def operates(self, dice: random.Random) -> None:
        tasks = self.tasks.filter(priority__in=dice.sample(range(10), 5)).order_by(dice.choice(["id", "-id", "?"]))
        getattr(tasks, dice.choice(["release_all", "reprocess", "mark_poison", "unpoison", "cancel"]))()
        tasks.kick(50)

    def cleans(self, dice: random.Random) -> None:
        self.tasks.order_by("-id").housekeep(older_than=NO_TIME, statuses=["COMPLETED"])
        self.tasks.filter(priority=dice.randrange(10)).order_by("?")[:3].purge()
        move.unpark(Session.on(self.alias), "parcels", [])

    def produces(self, dice: random.Random) -> None:
        references = dice.sample([f"r-{number}" for number in range(TASKS)], 100)
        items = [{"reference": reference, "priority": dice.randrange(10)} for reference in references]
        enqueue_many("parcels", items, on_duplicate="ignore", using=self.alias)


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_six_kinds_of_writers_over_the_same_rows(place: str, audit: Audit) -> None:
    many = ManyLeases(place)
    enqueue_many("parcels", [{"reference": f"r-{n}", "priority": n % 10} for n in range(TASKS)], using=place)
    writers = [many.takes, many.settles, many.settles, many.renews, many.operates, many.cleans, many.produces]

    def write(index: int) -> int:
        dice = random.Random(index)
        for _ in range(ROUNDS):
            writers[index](dice)
        return ROUNDS

    assert at_once(len(writers), write) == [ROUNDS] * len(writers)
    assert len(audit.edges()) > 3 and counted(place) >= TASKS
    # When everybody comes to rest, then every task that is left can still be brought to an end
    many.tasks.release_all()
    move.unpark(Session.on(place), "parcels", [])
    for lease in many.tasks.checkout("parcels", poller_instance="p", limit=TASKS, lease=LEASE):
        lease.complete()
    assert not many.tasks.filter(status__in=["CREATED", "PROCESSING"], ready_time__lte=Now()).exists()
