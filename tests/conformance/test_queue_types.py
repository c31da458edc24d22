"""Queue types: groups, priorities that age, time to live, capacity, tags, a lease per task, tables of one's own."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import Complete, Fail, Fixed, Poison, QueueFull, Reenqueue, TaskQueueError, enqueue_many
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release, Suspend
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.checkout import START, ScanCursor, strategy_for
from tests.conformance.conftest import STRATEGIES, World, any_strategy
from tests.flow.test_many_groups import nodes_of, plan_of, read_rows

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
SECOND = timedelta(seconds=1)


def references(leases: list[Lease]) -> list[str | None]:
    return [lease.reference for lease in leases]


def taken(leases: list[Lease]) -> list[str]:
    """Who was taken; tasks of different groups that came into line in the same millisecond have no order."""
    return sorted(str(lease.reference) for lease in leases)


LATER = timedelta(hours=1)
AGAIN = (Reenqueue(LATER), Reenqueue(LATER, keep_attempts=True), Reenqueue(LATER, "so far", keep_attempts=True))
GO_ON = (Complete(), Poison("bad"), Fail("no", retry=False), Suspend(LATER), Suspend(), *AGAIN)
NEXT = [*(("hold", one, ["a2"]) for one in GO_ON), ("hold", Release(), ["a1"])]
NEXT += [("hold", Fail("later"), []), ("skip", Fail("later"), ["a2"])]


@pytest.mark.parametrize("joined", [0, 4])
@pytest.mark.parametrize(("retry", "outcome", "then"), NEXT)
def test_what_becomes_of_a_head_says_who_is_next(
    world: World, retry: str, outcome: Any, then: Any, joined: int
) -> None:
    """Also of one that failed before, and whether the others join its group before its outcome or after."""
    world.configure(group_retry=retry)
    others = [{"reference": one, "group": one[0]} for one in ("b1", "a2", "a3", "b2")]
    world.enqueue("a1", group="a")
    settle_head(world, Fail("once"), timedelta(0))
    world.tasks.enqueue_many("parcels", others[:joined])
    settle_head(world, outcome, LATER)
    world.tasks.enqueue_many("parcels", [*others[joined:], {"reference": "free"}])
    assert taken(world.checkout(10)) == [*then, "b1", "free"]


def settle_head(world: World, outcome: Any, delay: timedelta) -> None:
    [head] = world.checkout(1)
    head.port.retry = Fixed(delay, jitter=0)
    head.port.settle(head, outcome)


def test_a_busy_group_in_front_costs_the_others_nothing(world: World) -> None:
    """Of 10,000 tasks of one group one stands in line, so a checkout for the others looks at no more rows."""
    others = [{"reference": f"o{n}", "group": f"other-{n}"} for n in range(20)]
    enqueue_many("parcels", ({"reference": f"b{n}", "group": "busy"} for n in range(10_000)), using=world.alias)
    enqueue_many("parcels", others, using=world.alias)
    assert world.tasks.filter(ready_time__isnull=False).count() == 21
    assert rows_looked_at(world) <= 21
    assert references(world.checkout(21)) == ["b0", *(f"o{n}" for n in range(20))]


def rows_looked_at(world: World) -> int:
    """How many tasks PostgreSQL looks at to find the head of the line; SQLite does not tell."""
    if world.alias == "sqlite":
        return 0
    session, line = world.session, ScanCursor("parcels", watermarks={0: START})
    session.run("ANALYZE dbtaskqueue_task", {})
    session.run("SET LOCAL enable_seqscan = off", {})  # how large the other tests left the table is not the question
    params = {"tags": [], "limit": 50, **line.params(line.watermarks)}
    nodes = nodes_of(plan_of(session, session.sql.candidates, params))
    return int(sum(read_rows(node) for node in nodes if node.get("Relation Name") == "dbtaskqueue_task"))


# A driver of one's own has strict priorities only, and says so.
ageing = pytest.mark.parametrize("world", sorted(STRATEGIES.keys() - {"postgresql-own_driver"}), indirect=True)


@ageing
def test_a_priority_that_waited_too_long_goes_first(world: World) -> None:
    world.configure(max_wait=timedelta(minutes=1))
    world.make(priority=5, reference="old", ready_time=-timedelta(hours=1))
    world.make(priority=5, reference="old too", ready_time=-timedelta(minutes=59))
    world.make(priority=1, reference="new")
    assert references(world.checkout(3)) == ["old", "old too", "new"]


@ageing
def test_under_twice_the_load_it_can_carry_no_priority_waits_for_ever(world: World) -> None:
    """Given two urgent tasks a second and hands for one, then the patient one is taken soon after ``max_wait``."""
    world.configure(max_wait=timedelta(seconds=10))
    world.enqueue("patient", priority=9)
    waits: dict[str | None, timedelta] = {}
    for second in range(30):
        for number in range(2):
            world.enqueue(f"urgent-{second}-{number}", priority=0)
        lease = world.checkout(1)[0]
        waits[lease.reference] = lease.start_time - lease.ready_time
        world.settle(lease, Complete())
        world.age(SECOND)
    assert waits["patient"] >= 10 * SECOND
    assert list(waits).index("patient") <= 12  # a slow machine makes it wait less
    assert len(waits) == 30  # and nobody's hands were idle


@any_strategy
def test_a_task_past_its_time_to_live_is_not_started(world: World) -> None:
    world.configure(expired="poison")
    late, alive = world.enqueue("late", ttl=SECOND), world.enqueue("alive", ttl=60 * SECOND)
    world.age(2 * SECOND)
    (lease,) = world.checkout(5)
    assert lease.id == alive.id
    lease.complete_delete()
    row = world.row(late)
    assert row["status"] == Status.POISON and row["process_result"].startswith("Expired at ")
    world.tasks.purge()
    world.configure(expired="delete")
    before = len(world.everything()[3])
    world.enqueue("late", ttl=SECOND)
    world.age(2 * SECOND)
    assert world.checkout(1) == []
    assert not world.tasks.exists() and len(world.everything()[3]) == before + 1


def test_the_time_to_live_counts_from_the_due_time_and_a_running_task_may_outlive_it(world: World) -> None:
    world.enqueue("delayed", delay=10 * SECOND, ttl=5 * SECOND)
    world.age(12 * SECOND)
    lease = world.checkout(1)[0]
    world.age(10 * SECOND)
    assert world.settle(lease, Complete())
    world.configure(ttl=SECOND)  # of every task
    world.enqueue("late")
    enqueue_many("parcels", [("late, too", 1)], using=world.alias)
    world.age(2 * SECOND)
    assert world.checkout(5) == []


def test_a_full_queue_refuses_and_finished_tasks_do_not_count(world: World) -> None:
    world.configure(capacity=2)
    world.make(Status.COMPLETED)
    with pytest.raises(QueueFull):  # many fit as a whole, or not at all
        enqueue_many("parcels", [{}] * 3, using=world.alias)
    for reference in "12":
        world.enqueue(reference, group="g")  # one of them waits in its group, and counts
    with pytest.raises(QueueFull, match="capacity of 2"):
        world.enqueue("3")
    world.settle(world.checkout(1)[0], Complete())
    world.enqueue("3")
    assert set(world.tasks.values_list("reference", flat=True)) == {None, "1", "2", "3"}


@any_strategy
def test_a_tagged_task_is_taken_only_by_who_names_its_tag(world: World) -> None:
    world.enqueue("blue", tag="blue")
    world.enqueue("any")
    assert references(world.checkout(10)) == ["any"]
    green = world.tasks.checkout("parcels", poller_instance="g", limit=10, tags=["green"])
    blue = world.tasks.checkout("parcels", poller_instance="b", limit=10, tags=["green", "blue"])
    assert (references(green), references(blue)) == ([], ["blue"])


@pytest.mark.parametrize(
    ("alias", "strategy", "words"),
    [
        ("default", "tests.conformance.driver.Lame", r"conformance\.driver\.Lame.*lacks take\(\)"),
        ("default", "tests.nowhere.Driver", "='tests.nowhere.Driver' cannot be made"),
        ("sqlite", "skip_locked", r'needs SELECT … FOR UPDATE SKIP LOCKED.*"auto"'),
    ],
)
def test_a_driver_without_its_methods_is_refused_by_name(alias: str, strategy: str, words: str) -> None:
    with pytest.raises((ImproperlyConfigured, TaskQueueError), match=words):
        strategy_for(Session.on(alias), strategy)
