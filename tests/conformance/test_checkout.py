"""Checkout: which tasks, in which order, how many, and what it costs them."""

from datetime import timedelta
from functools import partial
from itertools import product

import pytest
from django.db import connections
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbtaskqueue.core.states import CREATED, ERROR, PROCESSING, Status
from django_dbtaskqueue.flow.checkout import Checkout, QueueShare, ScanCursor, strategy_for
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.models import Queue
from tests.conformance.conftest import CHECKOUTS, FIRST, SECOND, World
from tests.factories import LEASE
from tests.support import PATIENCE, sql, until

any_checkout = pytest.mark.parametrize("world", CHECKOUTS, indirect=True)
pytestmark = [pytest.mark.django_db(databases=["default", "sqlite"]), any_checkout]


def test_order_is_priority_then_ready_time_then_id(world: World) -> None:
    places = [*product((-5, 0, 7), (30, 20, 20, 10)), (7, 25), (-5, 25), (0, 25)]
    made = [(one, -ago, world.make(priority=one, ready_time=timedelta(minutes=-ago)).id) for one, ago in places]
    assert world.checkout(0) == world.checkout(-1) == []
    assert [lease.id for lease in world.checkout(50)] == [task_id for _, _, task_id in sorted(made)]


# The planner could choose plans without these by itself, when its statistics are old. The first reads in the order of
# the rows on disk. The second executes a subquery for each row, and its limit counts for each execution alone.
PLANS = {
    "by scans, in reverse": (-1, "indexscan indexonlyscan bitmapscan"),
    "by loops": (1, "hashjoin mergejoin hashagg sort material memoize tidscan"),
}


@pytest.mark.parametrize(("step", "without"), PLANS.values(), ids=PLANS)
def test_order_and_limit_hold_whatever_the_plan(world: World, step: int, without: str) -> None:
    ids = [world.make(ready_time=timedelta(minutes=step * number - 60)).id for number in range(12)][::step]
    if world.alias == "default":
        for name in without.split():
            sql(f"SET LOCAL enable_{name} = off")
        sql("SET LOCAL plan_cache_mode = force_custom_plan")
    else:
        table = "tbl_name = 'dbtaskqueue_task' AND sql IS NOT NULL"
        for (name,) in sql(f"SELECT name FROM sqlite_master WHERE type = 'index' AND {table}", alias="sqlite"):
            sql(f'DROP INDEX "{name}"', alias="sqlite")
    assert [[lease.id for lease in world.checkout(5)] for _ in range(4)] == [ids[:5], ids[5:10], ids[10:], []]


def test_what_checkout_writes(world: World) -> None:
    task = world.enqueue("ref-1", {"seats": [1, 2]}, priority=3, context={"trace": "t-1"})
    world.age(timedelta(seconds=10))
    before = world.row(task)
    with CaptureQueriesContext(connections[world.alias]) as seen:
        (lease,) = world.checkout(lease=timedelta(minutes=2))
    after, now = world.row(task), timezone.now()
    (write,) = [query["sql"] for query in seen.captured_queries if 'UPDATE "dbtaskqueue_task"' in query["sql"]]
    assert "attempt = attempt + 1" in write, "the attempt is charged in the statement that takes the row"
    changed = {name for name in after if after[name] != before[name]}
    times = {"start_time", "last_update_time", "next_process_time"}
    assert changed == {"status", "attempt", "total_attempt", "poller_instance", *times}
    assert (after["status"], after["attempt"], after["total_attempt"]) == (PROCESSING, 1, 1)
    assert after["poller_instance"] == FIRST and abs(after["start_time"] - now) < timedelta(seconds=PATIENCE)
    assert after["last_update_time"] == after["start_time"]
    assert after["next_process_time"] - after["start_time"] == timedelta(minutes=2)
    assert (lease.id, lease.queue, lease.reference, lease.priority) == (task.id, "parcels", "ref-1", 3)
    assert (lease.attempt, lease.total_attempt, lease.reenqueue_attempt, lease.max_attempts) == (1, 1, 0, 5)
    assert (lease.payload, lease.context) == ({"seats": [1, 2]}, {"trace": "t-1"})
    assert (lease.create_time, lease.ready_time) == (before["create_time"], before["ready_time"])
    assert (lease.start_time, lease.lease_until) == (after["start_time"], after["next_process_time"])


def test_a_task_is_not_taken_before_it_is_due_and_at_once_then(world: World) -> None:
    world.enqueue(delay=timedelta(minutes=10))
    world.make(ready_time=timedelta(hours=-1), next_process_time=timedelta(minutes=20))  # a retry keeps its place
    world.age(timedelta(minutes=5))
    assert world.checkout() == []
    world.age(timedelta(minutes=5))
    (lease,) = world.checkout(5)
    assert lease.start_time >= lease.ready_time


def test_a_live_lease_is_left_alone_and_an_expired_one_taken_over(world: World) -> None:
    first = world.take()
    assert world.checkout(poller=SECOND) == []
    ready_time = first.ready_time
    second = world.take_over(first)
    row = world.row(first)
    assert (second.attempt, second.total_attempt) == (2, 2)
    assert (row["status"], row["attempt"], row["total_attempt"]) == (PROCESSING, 2, 2)
    assert row["poller_instance"] == SECOND
    assert row["ready_time"] == ready_time - LEASE == second.ready_time  # the test made all times older by a lease


def test_the_fencing_token_grows_through_everything(world: World) -> None:
    lease = world.take()
    tokens, row = [lease.total_attempt], world.tasks.filter(pk=lease.id)
    for back in (
        lambda lease: row.release_all(),
        lambda lease: lease.reenqueue(timedelta(0)),
        lambda lease: lease.fail("no", delay=timedelta(0)),
        lambda lease: lease.fail("no", retry=False) or row.reprocess(),
    ):
        back(lease)
        (lease,) = world.checkout()
        tokens.append(lease.total_attempt)
    assert tokens == [1, 2, 3, 4, 5]


def test_a_task_without_attempts_left_is_not_taken(world: World) -> None:
    last = []
    for status in (CREATED, PROCESSING):
        world.make(status, attempt=3, max_attempts=3)
        last.append((world.make(status, attempt=2, max_attempts=3).id, 3))
    world.age(2 * LEASE)
    assert sorted((lease.id, lease.attempt) for lease in world.checkout(5)) == last


def test_a_paused_queue_gives_nothing(world: World) -> None:
    task = world.make()
    queue = Queue.objects.using(world.alias).create(name="parcels", paused_time=Now())
    assert world.checkout() == []
    world.make(queue="other")
    assert len(world.checkout(queue="other")) == 1
    Queue.objects.using(world.alias).update(paused_until=Now() + timedelta(hours=1))
    assert world.checkout() == []
    Queue.objects.using(world.alias).update(paused_until=Now() - timedelta(seconds=1))
    (lease,) = world.checkout()
    assert lease.id == task.id
    lease.reenqueue(timedelta(0))
    queue.delete()
    assert len(world.checkout()) == 1


def test_due_and_stale_say_what_checkout_takes(world: World) -> None:
    stale = [world.make(PROCESSING, next_process_time=timedelta(seconds=-1)).id, world.make(PROCESSING, attempt=5).id]
    world.tasks.filter(pk=stale[1]).update(next_process_time=Now())
    world.make(PROCESSING)
    world.make(CREATED)
    assert sorted(world.tasks.stale().values_list("pk", flat=True)) == stale
    world.tasks.purge()
    for status in Status:
        for priority in (2, 1):
            world.make(status, priority=priority)
            world.make(status, priority=priority, next_process_time=timedelta(hours=-1))
    world.make(attempt=5)
    world.make(ready_time=timedelta(hours=1))
    world.make(parked_by="no handler for x")
    world.make(queue="elsewhere")
    due = list(world.tasks.filter(queue="parcels").due().values_list("pk", flat=True))
    assert len(due) == 6
    assert [lease.id for lease in world.checkout(50)] == due


def test_a_payload_that_cannot_be_decoded_ends_alone(world: World) -> None:
    """A row written past enqueue holds what no reader takes; those around it are handed out."""
    good = [world.make(payload={"n": 1}).id, world.make(payload={"n": 2}).id]
    bad = world.make()
    if world.alias == "sqlite":
        sql("PRAGMA ignore_check_constraints = 1", alias="sqlite")
        sql("UPDATE dbtaskqueue_task SET payload = %s WHERE id = %s", ["{not json", bad.id], "sqlite")
        sql("PRAGMA ignore_check_constraints = 0", alias="sqlite")
    else:
        # jsonb lets nothing in that is not JSON; but a context must be an object
        sql("UPDATE dbtaskqueue_task SET context = '[1]' WHERE id = %s", [bad.id])
    assert sorted(lease.id for lease in world.checkout(5)) == sorted(good)
    row = world.row(bad)
    assert row["status"] == ERROR
    assert ("not JSON" if world.alias == "sqlite" else "context of a task is a JSON object") in row["process_result"]


def test_what_comes_to_stand_behind_the_remembered_bound_is_found(world: World) -> None:
    session, got = world.session, list[int]()
    strategy = strategy_for(session, world.strategy)
    share = QueueShare(ScanCursor("parcels"), 2, port=SettlePort(world.alias), strategy=strategy)
    take = partial(Checkout(session, FIRST, LEASE).take, [share], 2)
    front = [world.make().id for _ in range(4)]
    assert [lease.id for lease in take()] == front[:2]
    wanted = [*front[2:], world.make(ready_time=timedelta(hours=-1)).id, world.make(priority=-9).id]
    until(lambda: got.extend(lease.id for lease in take()) or sorted(got) == sorted(wanted))


def test_ids_of_any_size_go_through(world: World) -> None:
    for task_id in (2**31 - 1, 2**53 + 1, 2**62):
        world.make(id=task_id, total_attempt=2**53 + 1)
        (lease,) = world.checkout()
        assert (lease.id, lease.total_attempt) == (task_id, 2**53 + 2)
        lease.fail("no", delay=timedelta(0))
        (lease,) = world.checkout()
        lease.complete({"id": task_id})
        assert world.row(lease)["result"] == {"id": task_id}
