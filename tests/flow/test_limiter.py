"""Limits of a queue over all pollers: how many tasks run at a time, and how many start in a time."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from django_dbtaskqueue import Complete, LeaseLost, enqueue, enqueue_many, queue
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core.durations import Rate, parse_rate
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import retention, settle
from django_dbtaskqueue.flow.checkout import Checkout, QueueShare, ScanCursor
from django_dbtaskqueue.flow.groups import Limiter
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.models import Limit, Poller, Queue, Task
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_control import change_settings
from django_dbtaskqueue.poller.held_leases import renew
from django_dbtaskqueue.testing import advance
from tests.operations.site import command, data, refused
from tests.support import PATIENCE, actors, at_once, taken_back

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
SECOND, DATABASES = timedelta(seconds=1), [("default", "skip_locked"), ("sqlite", "auto")]
STRATEGIES = [*DATABASES, ("default", "optimistic"), ("default", "tests.conformance.driver.Plain")]
any_strategy = pytest.mark.parametrize("alias", STRATEGIES, indirect=True, ids="-".join)


@pytest.fixture(params=DATABASES, ids="-".join)
def alias(request: pytest.FixtureRequest, settings: Any) -> str:
    name, strategy = request.param
    limits = {
        "two": {"max_running": 2},
        "paced": {"rate": "10/h", "burst": 10},  # a slow machine gets no token between two lines of a test
        "each": {"rate_per_group": "2/m", "burst_per_group": 3, "max_running_per_group": 10},
        "slow": {"rate_per_group": "1/h", "max_running": 5},
        "both": {"max_running": 3, "rate": "1/m", "burst": 4},
        "keyed": {"max_running_per_group": 2},
        "rated": {"rate_per_group": "1/s", "burst_per_group": 2, "max_running_per_group": 2, "max_attempts": 100},
    }
    queues = {name: {"strategy": strategy, "lease": "60s", **limit} for name, limit in limits.items()}
    settings.DBTASKQUEUE = {"QUEUES": {**queues, "free": {}}}
    return str(name)


def take(name: str, alias: str, limit: int = 10, **options: Any) -> list[Lease]:
    return Task.objects.db_manager(alias).checkout(name, poller_instance="a", limit=limit, **options)


def counts(name: str, alias: str, *limits: int) -> list[int]:
    """Take so many at most, one time after the other."""
    return [len(take(name, alias, limit=limit)) for limit in limits]


@contextmanager
def one_poller(alias: str = "default") -> Iterator[tuple[Session, Callable[[int], list[Lease]]]]:
    """A session of its own, and how a poller takes tasks of the queue ``wide`` on it."""
    with closing(Session.open(alias)) as session:
        cursor, limiter = ScanCursor("wide"), Limiter.of("wide", overridden_settings("wide", alias))

        def take_one(limit: int) -> list[Lease]:
            share = QueueShare(cursor, limit, port=SettlePort(alias), limiter=limiter)
            return Checkout(session, "p", 60 * SECOND).take([share], limit)

        yield session, take_one


def settle_all(session: Session, leases: list[Lease]) -> None:
    settle.settle(session, [(lease, Complete()) for lease in leases])


def complete(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.complete()


@any_strategy
def test_no_more_run_at_a_time_than_the_limit(alias: str) -> None:
    enqueue_many("two", [{}] * 5, using=alias)
    first, second = take("two", alias)
    assert take("two", alias) == []
    first.complete()
    (third,) = take("two", alias)
    second.fail("broken")
    queue("two", using=alias).release(third)
    assert counts("two", alias, 10, 10) == [2, 0]  # of three that are left, one waits for its retry
    enqueue_many("free", [{}] * 5, using=alias)
    assert len(take("free", alias)) == 5
    assert not Limit.objects.using(alias).filter(queue="free").exists()


@any_strategy
def test_a_dead_poller_s_leases_are_taken_over_and_hold_no_place(alias: str) -> None:
    enqueue_many("two", [{}] * 3, using=alias)
    lost = take("two", alias)
    advance(61 * SECOND, using=alias)
    again = take("two", alias)
    assert {lease.id for lease in again} == {lease.id for lease in lost}  # not the third task
    assert [lease.attempt for lease in again] == [2, 2]
    assert take("two", alias) == []
    complete(again)
    assert len(take("two", alias)) == 1


def test_a_lease_that_nobody_here_can_take_over_counts_for_one_more_lease(alias: str) -> None:
    enqueue("two", tag="gpu", using=alias)
    enqueue_many("two", [{}] * 3, using=alias)
    assert len(take("two", alias, limit=1, tags=["gpu"])) == 1
    advance(61 * SECOND, using=alias)
    assert len(take("two", alias)) == 1
    advance(30 * SECOND, using=alias)
    assert take("two", alias) == []
    advance(31 * SECOND, using=alias)
    assert counts("two", alias, 10, 10) == [2, 0]  # the lease of the second ran out meanwhile: it is taken over


@pytest.mark.django_db(databases=["default"], transaction=True)
@pytest.mark.parametrize("alias", STRATEGIES[:1], indirect=True)
def test_a_lease_whose_row_a_processor_has_locked_counts_to_the_end_of_its_transaction(alias: str) -> None:
    enqueue_many("two", [{}] * 4)
    locked, _ = take("two", alias)
    advance(121 * SECOND)
    with actors(1) as (processor,):
        processor.do(transaction.set_autocommit, False).result(PATIENCE)
        processor.do(Task.objects.filter(pk=locked.id).update, tag=None).result(PATIENCE)
        assert counts("two", alias, 10, 10) == [1, 0]
        processor.do(transaction.rollback).result(PATIENCE)
    assert [lease.id for lease in take("two", alias)] == [locked.id]


def test_a_lease_that_the_limit_has_forgotten_is_extended_by_nobody(alias: str) -> None:
    enqueue_many("two", [{}] * 4, using=alias)
    first, second = stalled = take("two", alias)
    session = Session.on(alias)
    Task.objects.using(alias).filter(pk__in=[lease.id for lease in stalled]).update(priority=1)  # others go first
    advance(61 * SECOND, using=alias)
    assert renew(session, [first], 600.0) == []  # it counts, so it may go on
    advance(61 * SECOND, using=alias)
    assert counts("two", alias, 10, 10) == [1, 0]
    assert renew(session, stalled, 60.0) == [second] and not second.touched
    refused(None, second.touch, 120 * SECOND, error=LeaseLost)
    second.complete()  # nobody else has taken it


def test_leases_from_before_the_limit_count(alias: str, settings: Any) -> None:
    enqueue_many("free", [{}] * 6, using=alias)
    before = take("free", alias, limit=3)
    settings.DBTASKQUEUE = {"QUEUES": {"free": {"max_running": 4}}}
    assert counts("free", alias, 10, 10) == [1, 0]
    settings.DBTASKQUEUE = {"QUEUES": {"free": {"max_running": 2}}}
    for lease, count in zip(before, (0, 0, 1), strict=True):
        lease.complete()
        assert len(take("free", alias)) == count
    # While the limit is off, nobody counts; when it is on again after a while, the leases are found
    settings.DBTASKQUEUE = {"QUEUES": {"free": {}}}
    assert len(take("free", alias)) == 1
    advance(31 * SECOND, using=alias)
    settings.DBTASKQUEUE = {"QUEUES": {"free": {"max_running": 3}}}
    enqueue_many("free", [{}] * 6, using=alias)
    assert len(take("free", alias)) == 0


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_a_poller_reads_leases_only_near_the_limit(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"wide": {"max_running": 50, "lease": "60s"}}}
    enqueue_many("wide", [{}] * 200, using=alias)
    reads: list[str] = []

    def note_reads(execute: Any, sql: str, *rest: Any) -> Any:
        reads.extend(["leases"] * sql.startswith("SELECT id, total_attempt, "))
        return execute(sql, *rest)

    with one_poller(alias) as (session, take_one), session.connection.execute_wrapper(note_reads):
        first, second = take_one(20), take_one(20)
        settle_all(session, first)
        assert len([*first, *second, *take_one(20)]) == 60
        assert reads == [], "a poller knows what it has settled itself"
        # What others have taken and settled, it does not know
        theirs = take("wide", alias, limit=20)
        assert len(theirs) == 10
        theirs[0].complete()
        settle_all(session, second[:5])
        assert len(take_one(20)) == 6
        assert reads
        assert take("wide", alias, limit=20) == take_one(20) == []
    assert Task.objects.using(alias).filter(queue="wide", status="PROCESSING").count() == 50


@any_strategy
def test_no_more_start_in_a_time_than_the_rate(alias: str) -> None:
    enqueue_many("paced", [{}] * 60, using=alias)
    assert counts("paced", alias, 7, 7, 10) == [7, 3, 0]  # the burst
    advance(1800 * SECOND, using=alias)
    assert len(take("paced", alias)) == 5
    advance(24 * 3600 * SECOND, using=alias)
    assert len(take("paced", alias, limit=100)) == 10  # tokens are not saved up


def test_rate_and_number_together_and_what_is_rolled_back_holds_nothing(alias: str) -> None:
    enqueue_many("both", [{}] * 9, using=alias)
    with taken_back(alias):
        assert len(take("both", alias)) == 3
    first = take("both", alias)
    assert len(first) == 3
    complete(first[:2])
    assert counts("both", alias, 10, 10) == [1, 0]  # the burst of four
    advance(60 * SECOND, using=alias)
    assert len(take("both", alias)) == 1


def test_an_operator_changes_a_limit_and_a_rate_begins_with_its_burst(alias: str) -> None:
    enqueue_many("two", [{}] * 30, using=alias)
    for _ in range(10):
        complete(take("two", alias))
    Queue.objects.using(alias).create(name="two", overrides={"max_running": 5, "rate": "4/h", "burst": 4})
    assert len(take("two", alias)) == 4
    Queue.objects.using(alias).filter(name="two").get().delete()
    assert take("two", alias) == []


def test_a_limit_counts_what_started_while_it_was_off_and_what_a_damaged_row_hides(alias: str) -> None:
    enqueue_many("two", [{}] * 9, using=alias)
    first, second = take("two", alias)
    for number, taken in ((None, 1), (3, 0)):
        change_settings("two", {"max_running": number}, Actor(), reason="test", using=alias)
        assert len(take("two", alias, limit=1)) == taken
    Limit.objects.using(alias).filter(queue="two").update(leases="1:1,abc")
    assert explain(Task.objects.using(alias).filter(status="CREATED")[0])
    assert take("two", alias) == []
    complete([first, second])
    assert counts("two", alias, 10, 10) == [2, 0]


def test_the_pause_says_when_there_is_room_again(alias: str) -> None:
    enqueue_many("paced", [{}] * 15, using=alias)
    limiter = Limiter.of("paced", overridden_settings("paced", alias))
    session, params = Session.on(alias), {"limit": 10, "lease": 60.0}
    assert limiter.take(session, params, lambda allowed: [(0,) * 40] * allowed["limit"])
    assert limiter.pause is None
    assert limiter.take(session, params, lambda _: []) == []
    assert 0 < limiter.pause <= 360
    advance(3600 * SECOND, using=alias)
    assert limiter.take(session, params, lambda _: []) == []
    assert limiter.pause is None, "the queue is empty, and no limit holds a task back"


@any_strategy
@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_pollers_that_take_at_the_same_moment(alias: str) -> None:
    enqueue_many("both", [{}] * 50, using=alias)
    enqueue_many("two", [{}] * 50, using=alias)
    for _ in range(5):
        taken = at_once(4, lambda _: take("two", alias, limit=1) + take("two", alias, limit=5))
        leases = [lease for some in taken for lease in some]
        assert len(leases) == 2
        complete(leases)
    assert sum(map(len, at_once(4, lambda _: take("both", alias, limit=2)))) == 3


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_checkouts_that_count_after_they_took_exceed_nothing(alias: str, settings: Any) -> None:
    """Pollers far below a limit take rows before they count them. With too little room they take nothing ahead."""
    settings.DBTASKQUEUE = {"QUEUES": {"wide": {"max_running": 40, "rate": "100000/s", "lease": "60s"}}}
    enqueue_many("wide", [{}] * 300, using=alias)

    def fill(_: int) -> list[Lease]:
        held: list[Lease] = []
        with one_poller(alias) as (_session, take_one):
            while found := take_one(6):
                held += found
        return held

    taken = [lease for some in at_once(4, fill) for lease in some]
    assert len(taken) == 40
    complete(taken)

    def work(_: int) -> list[int]:
        running: list[int] = []
        with one_poller(alias) as (_session, take_one):
            while Task.objects.using(alias).exclude(status="COMPLETED").exists():
                found = take_one(6)
                running.append(Task.objects.using(alias).filter(status="PROCESSING").count())
                complete(found)
        return running

    assert max(map(max, at_once(4, work))) <= 40
    assert not Task.objects.using(alias).exclude(total_attempt=1).exists()


@pytest.mark.parametrize("limit", [{"max_running": 100}, {"rate": "1/h", "burst": 100}])
@pytest.mark.django_db(transaction=True)
def test_a_poller_that_is_alone_counts_by_one_statement(limit: dict[str, Any], settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"wide": {**limit, "lease": "60s"}}}
    enqueue_many("wide", [{}] * 300)
    asked: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        asked.extend([sql.partition(" ")[0]] * ("dbtaskqueue_limit" in sql))
        return execute(sql, *rest)

    def poll() -> list[Lease]:
        asked.clear()
        return take_one(10)

    with one_poller() as (session, take_one), session.connection.execute_wrapper(note):
        held = poll() + poll()
        held += poll()
        assert asked == ["UPDATE"]
        settle_all(session, held[:5])
        held += poll()
        assert asked == ["UPDATE"]
        # When another process has taken tasks, then it is not alone, and reads what the row says now
        room = 100 - 40 + 5 * ("max_running" in limit)
        assert len(take("wide", "default", limit=room - 12)) == room - 12
        assert len(poll()) == 10
        assert ("INSERT" in asked) == ("max_running" in limit)
        assert len(poll()) == 2
        assert poll() == take("wide", "default") == []


@pytest.mark.django_db(transaction=True)
def test_a_checkout_that_took_too_many_ahead_gives_them_back(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"wide": {"max_running": 10, "lease": "60s"}}}
    enqueue_many("wide", [{}] * 30)
    with one_poller() as (_session, take_one):
        first = take_one(2)
        others = take("wide", "default", limit=6)  # of another process, as far as the session's memory goes
        second = take_one(4)
        assert [len(first), len(others), len(second)] == [2, 6, 2]
        complete([*first, *others, *second])
        again = take_one(10)
    ids = [lease.id for lease in [*first, *others, *second, *again]]
    assert ids == [*range(ids[0], ids[0] + 20)]


def payloads(leases: list[Lease], group: str | None) -> list[object]:
    return [lease.payload for lease in leases if lease.group == group]


@any_strategy
def test_of_each_group_no_more_start_in_a_time_than_its_rate(alias: str) -> None:
    items = [{"group": "a", "payload": number} for number in range(6)]
    enqueue_many("each", [*items, {"group": "b", "payload": 6}, {"payload": 7}], using=alias)
    first = take("each", alias, limit=20)
    assert [payloads(first, group) for group in ("a", "b", None)] == [[0, 1, 2], [6], [7]]
    assert take("each", alias) == []
    complete(first)
    advance(31 * SECOND, using=alias)
    assert payloads(take("each", alias), "a") == [3]
    assert take("each", alias) == []
    assert Limit.objects.using(alias).count() == 2
    advance(3600 * SECOND, using=alias)
    enqueue_many("each", items, using=alias)
    again = take("each", alias, limit=20)
    assert payloads(again, "a") == [3, 4, 5], "the first is a lease that ran out; tokens are not saved up"
    # Rows of groups that have all their tokens again are deleted
    retention.delete_past_periods(alias)
    assert Limit.objects.using(alias).count() == 1
    advance(3600 * SECOND, using=alias)
    retention.delete_past_periods(alias)
    assert not Limit.objects.using(alias).exists()


def test_a_task_that_waits_for_a_token_keeps_its_place(alias: str) -> None:
    enqueue_many("slow", [{"group": "a", "payload": number} for number in range(2)], using=alias)
    (lease,) = take("slow", alias)
    lease.complete()
    assert take("slow", alias) == []
    waiting = enqueue("slow", group="a", payload=2, using=alias)
    assert take("slow", alias) == []
    head = Task.objects.using(alias).get(queue="slow", status="CREATED", parked_by=None)
    assert (head.payload, head.attempt) == (1, 0)
    Poller.objects.using(alias).create(instance="p", state="RUNNING", slots=4, queues=[{"queue": "slow"}])
    found = explain(head)
    assert found.code == "rate_per_group" and "tasks of group a may start 1/h" in found.sentence
    assert explain(waiting).code == "group"
    # A killed poller's start counts, and its task starts again when there is a token
    advance(3601 * SECOND, using=alias)
    (lost,) = take("slow", alias)
    advance(61 * SECOND, using=alias)
    assert take("slow", alias) == []
    refused(None, lost.complete, error=LeaseLost)
    advance(3600 * SECOND, using=alias)
    (again,) = take("slow", alias)
    assert (again.payload, again.attempt) == (1, 2) and again.lost_leases > 0


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_no_group_starts_too_often_and_none_waits_for_ever(alias: str, seed: int) -> None:
    chance, moved, held = random.Random(seed), 0.0, list[Lease]()
    starts = defaultdict[str, list[tuple[float, float, int]]](list)
    enqueue_many("rated", [{"group": f"g{number % 3}"} for number in range(24)], using=alias)

    def step() -> None:
        nonlocal moved
        asked = moved + monotonic()
        taken = take("rated", alias, limit=chance.randint(1, 6))
        for lease in taken:
            starts[str(lease.group)].append((asked, moved + monotonic(), lease.id))
        held.extend(taken)
        chance.shuffle(held)
        for lease in [held.pop() for _ in range(chance.randint(0, len(held)))]:
            with suppress(LeaseLost):
                chance.choice([lease.complete, lambda lease=lease: lease.fail("again", delay=SECOND)])()
        passed = chance.choice([0.0, 0.1, 0.7, 3.0, 61.0])
        advance(passed * SECOND, using=alias)
        moved += passed

    for _ in range(25):
        step()
    for times in starts.values():
        ids = dict.fromkeys(task_id for *_, task_id in times)
        assert [*ids] == sorted(ids), "its tasks start in order, apart from what was tried again"
        for first, (begin, *_) in enumerate(times):  # the database's clock stood between the two of each start
            for number, (_, time, _) in enumerate(times[first:], 1):
                assert number <= 2 + 1 * (time - begin) + 0.01
    while Task.objects.using(alias).filter(queue="rated", status__in=["CREATED", "PROCESSING"]).exists():
        advance(100 * SECOND, using=alias)
        complete(take("rated", alias, limit=50))
    assert len(starts) == 3


def test_a_rate_as_text(settings: Any) -> None:
    for text, rate, shown in (
        ("100/s", Rate(100, SECOND), "100/s"),
        ("5 / m", Rate(5, 60 * SECOND), "5/m"),
        ("1/10s", Rate(1, 10 * SECOND), "1/10s"),
        ("7/1h30m", Rate(7, 5400 * SECOND), "7/1h30m"),
    ):
        assert parse_rate(text) == rate == parse_rate(str(rate))
        assert str(rate) == shown
    for given in ("100", "0/s", "x/s", "1/0s", "-1/s", "1/x", 5, "1/5"):
        refused("such as 100/s, 5/m or 1/10s", parse_rate, given, error=ValueError)
        settings.DBTASKQUEUE = {"QUEUES": {"x": {"rate": given}}}
        refused("such as 100/s", overridden_settings, "x", "default", error=ImproperlyConfigured)


@pytest.mark.parametrize(("name", "word"), [("two", "max_running"), ("paced", "rate")])
def test_people_read_which_limit_holds_a_task_back(name: str, word: str, settings: Any, admin_client: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"two": {"max_running": 2}, "paced": {"rate": "3/h", "burst": 3}, "free": {}}}
    enqueue_many(name, [{}] * 9)
    task = enqueue(name)
    Poller.objects.create(instance="p", state="RUNNING", slots=4, queues=[{"queue": name}])
    assert explain(task).code == "waiting"
    assert len(take(name, "default")) == (2 if name == "two" else 3)
    found = explain(task)
    assert found.code == word
    assert f"The limit {word} of queue {name} is reached, over all pollers" in found.sentence
    used = "2 of 2 running" if name == "two" else "at most 3/h start, the next in 19m"
    assert f"; due tasks held back: {8 if name == 'two' else 7}." in found.sentence
    assert used in found.sentence and f"{name}: {used}" in command("status")
    shown = {one["queue"]: one["limits"] for one in data("status")["queues"]}
    assert shown["free"] == []
    [limits] = shown[name]
    assert limits["database"] == "default"
    assert (limits["running"], limits["max_running"]) == ((2, 2) if name == "two" else (0, None))
    assert (limits["rate"], limits["tokens"]) == ((None, 0) if name == "two" else ("3/h", 0))
    assert (limits["reached"], limits["held_back"]["number"]) == (word, 8 if name == "two" else 7)
    assert limits["next_seconds"] is None if name == "two" else 1100 < limits["next_seconds"] <= 1200
    assert used in admin_client.get(f"/admin/dbtaskqueue/queue/{name}/change/").content.decode()


def taken_keys(alias: str, leases: list[Lease] | None = None) -> list[str]:
    return sorted(str(lease.group) for lease in (take("keyed", alias, limit=50) if leases is None else leases))


def test_of_each_group_so_many_run_at_a_time(alias: str) -> None:
    big = [{"group": "big", "payload": number} for number in range(9)]
    enqueue_many("keyed", [*big, {"group": "small"}, {"group": "small"}, {}], using=alias)
    first = take("keyed", alias, limit=50)
    assert taken_keys(alias, first) == ["None", "big", "big", "small", "small"]
    assert [lease.payload for lease in first if lease.group == "big"] == [0, 1]
    assert taken_keys(alias) == []
    next(lease for lease in first if lease.payload == 1).complete()
    assert payloads(take("keyed", alias), "big") == [2]
    enqueue("keyed", group="new", using=alias)
    last = enqueue("keyed", group="big", using=alias)
    assert taken_keys(alias) == ["new"]
    Poller.objects.using(alias).create(instance="p", state="RUNNING", slots=4, queues=[{"queue": "keyed"}])
    assert explain(last).sentence.endswith("(max_running_per_group=2)")
    # A dead poller's leases are taken over, and no other task of the group passes them
    advance(61 * SECOND, using=alias)
    assert {lease.payload for lease in take("keyed", alias, limit=50) if lease.group == "big"} == {0, 2}


def test_a_queue_that_is_dropped_leaves_nothing(alias: str) -> None:
    made = queue("made", using=alias).create(max_running=1, rate_per_group="1/h")
    made.put(group="g")
    held = made.take()
    limits = Limit.objects.using(alias)
    assert {*limits.values_list("group", flat=True)} == {"", "g"}
    made.ack(held)
    made.drop()
    assert not limits.exists()


def test_a_retry_keeps_its_place_among_the_heads(alias: str) -> None:
    enqueue_many("keyed", [{"group": "g", "payload": number} for number in range(4)], using=alias)
    first, second = take("keyed", alias)
    first.fail("again", delay=timedelta(hours=1))
    assert taken_keys(alias) == []
    second.complete()
    assert payloads(take("keyed", alias), "g") == [2]


def test_the_number_of_heads_follows_the_setting(alias: str, settings: Any) -> None:
    enqueue_many("keyed", [{"group": "g", "payload": number} for number in range(9)], using=alias)
    first, second = take("keyed", alias)
    Queue.objects.using(alias).create(name="keyed", overrides={"max_running_per_group": 4})
    first.complete()
    assert [lease.payload for lease in take("keyed", alias)] == [2, 3, 4]
    Queue.objects.using(alias).get(name="keyed").delete()
    settings.DBTASKQUEUE = {"QUEUES": {"keyed": {}}}
    second.complete()
    assert taken_keys(alias) == []
