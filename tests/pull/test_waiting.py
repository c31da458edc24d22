"""Waiting for a task: woken by events, served in the order of coming, and never a busy loop. And ``take(group=…)``."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.db.utils import OperationalError

from django_dbtaskqueue import LeaseLost, UnknownQueue, enqueue_many, queue
from django_dbtaskqueue.core import durations
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.pull import blocking
from django_dbtaskqueue.pull.handle import QueueHandle
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.factories import age
from tests.flow.test_many_groups import nodes_of, plan_of, read_rows
from tests.operations.site import refused
from tests.poller.processes import counted_queries
from tests.pull.conftest import HOUR, SECOND, Configure, Told, status, waiters
from tests.support import PATIENCE, Actor, at_once, backend_pid, sql, until

LONG = timedelta(seconds=PATIENCE)
SOON = PATIENCE / 2  # seconds: well before a poll would find anything
Waiter = Callable[..., "Future[Any]"]


@pytest.fixture(autouse=True)
def _no_polls(configure: Configure) -> None:
    """So seldom that only an event can be in time."""
    configure(poll_interval="10m", lease="10h")


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    """Start a thread that waits in ``take``, or what is given, behind those that wait already; return its future."""
    cast: list[Actor] = []

    def start(call: Callable[..., Any] | None = None, actor: Actor | None = None, name: str = "mail") -> Future[Any]:
        before = waiters(name)
        cast.append(actor or Actor(f"waiter-{len(cast)}"))
        future = cast[-1].do(call or queue("mail").take, LONG)
        until(lambda: waiters(name) == before + 1)
        return future

    yield start
    for actor in cast:
        actor.close()


def got(future: Future[Lease | None]) -> int:
    return future.result(SOON).id


def test_a_put_wakes_at_its_commit_and_not_before(mail: QueueHandle, waiter: Waiter) -> None:
    future = waiter()
    with transaction.atomic():
        task = mail.put()
        assert not future.done()
    assert got(future) == task.pk


def test_a_put_of_another_process_wakes(postgres_process_database: ProcessDatabase, waiter: Waiter) -> None:
    future = waiter()
    with transaction.atomic():  # as another process does
        sql("INSERT INTO dbtaskqueue_task (queue_name) VALUES ('mail')")
        sql("SELECT pg_notify(%s, 'mail')", [notify.CHANNEL])
    assert got(future) == Task.objects.get().pk


def test_a_task_scheduled_for_later_is_taken_when_it_is_due(mail: QueueHandle) -> None:
    task = mail.put(delay=timedelta(milliseconds=300))
    assert mail.wait(LONG)
    assert Task.objects.filter(pk=task.pk, ready_time__lte=Now()).exists()
    mail.ack(mail.take())
    task = mail.put(delay=timedelta(milliseconds=300))
    taken = mail.take(LONG)
    assert taken is not None and taken.id == task.pk
    assert taken.start_time >= taken.ready_time


def test_without_events_polls_find_it(mail: QueueHandle, waiter: Waiter, configure: Configure, settings: Any) -> None:
    configure(poll_interval="100ms")
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "NOTIFY": False}
    future = waiter()
    Task.objects.create(queue="mail")  # as a plain INSERT does it: nobody is told
    assert got(future) == Task.objects.get().pk


def test_wait_returns_at_a_put_to_all_who_wait_and_takes_nothing(mail: QueueHandle, waiter: Waiter) -> None:
    futures = [waiter(mail.wait) for _ in range(3)]
    task = mail.put()
    assert [future.result(SOON) for future in futures] == [True] * 3
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("CREATED", 0)
    assert mail.take() is not None


def test_wait_knows_what_can_be_taken(mail: QueueHandle, configure: Configure) -> None:
    now = timedelta(0)
    assert not mail.wait(now)
    task = mail.put(delay=HOUR)
    mail.put(tag="eu")
    assert not mail.wait(now), "none is due for this handle"
    assert queue("mail", tags=["eu"]).wait(now)
    Task.objects.filter(pk=task.pk).run_now()
    assert mail.wait(now)
    assert mail.take() is not None
    assert not mail.wait(now), "a live lease holds it"
    for limit in ({"max_running": 2}, {"rate": "1/h"}):
        configure(**limit)
        mail.put()
        mail.put()
        assert mail.wait(now) and mail.take() is not None
        assert not mail.wait(now), "the limit of the queue is reached"


def test_wait_of_a_group_ignores_the_others(mail: QueueHandle, waiter: Waiter, clock: SteppedClock) -> None:
    mail.put(group="a")
    future = waiter(partial(mail.wait, group="b"))
    assert not future.done()
    clock.advance(LONG.total_seconds())
    assert not future.result(SOON)
    future = waiter(partial(mail.wait, group="b"))
    mail.put(group="b")
    assert future.result(SOON)


def test_waiters_are_served_longest_first(mail: QueueHandle, waiter: Waiter) -> None:
    futures = [waiter() for _ in range(5)]
    enqueue_many("mail", [{}] * 5)
    assert [got(future) for future in futures] == sorted(Task.objects.values_list("pk", flat=True))
    futures = [waiter() for _ in range(3)]
    for place, future in enumerate(futures):
        assert mail.put().pk == got(future)
        assert not any(later.done() for later in futures[place + 1 :])


def test_a_newcomer_gets_only_what_the_waiters_leave(mail: QueueHandle, waiter: Waiter, monkeypatch: Any) -> None:
    monkeypatch.setattr(blocking, "GIVE_WAY_S", PATIENCE)  # on a busy machine those before it take long
    for _ in range(10):
        future = waiter()
        task = mail.put()
        assert mail.take() is None
        assert got(future) == task.pk
    future = waiter()
    enqueue_many("mail", [{}, {}])
    second = mail.take()
    *_, first, last = Task.objects.order_by("pk").values_list("pk", flat=True)
    assert (got(future), second.id) == (first, last)


def test_waiters_of_other_tags_do_not_wait_for_each_other(mail: QueueHandle, waiter: Waiter) -> None:
    plain, tagged = waiter(), waiter(queue("mail", tags=["eu"]).take)
    assert mail.put(tag="eu").pk == got(tagged) and not plain.done()
    assert mail.put().pk == got(plain)


def test_a_wait_ends_in_time_with_few_looks(mail: QueueHandle, waiter: Waiter, clock: SteppedClock) -> None:
    with counted_queries() as statements:
        future = waiter()
        clock.advance(LONG.total_seconds())
        assert future.result(SOON) is None
    assert len(statements) < 30
    waiter()  # who waits behind another leaves in time, too
    assert mail.take(timedelta(milliseconds=100)) is None
    assert waiters() == 1
    mail.put()


def test_a_listener_that_ends_takes_no_wake_up_and_a_queue_that_goes_is_told(mail: QueueHandle, waiter: Waiter) -> None:
    """The listener of another database had the same function, and took it back when nobody waited there any more."""
    future = waiter()
    other = blocking.NotifyListener("default", 0.0)
    with other.listening():
        pass
    until(lambda: other._stopping and not other._stopping.is_alive())
    assert mail.put().pk == got(future)
    future = waiter(queue("brief-queue").create().take, name="brief-queue")
    Queue.objects.filter(pk="brief-queue").delete()
    blocking.wake("brief-queue")
    refused(None, future.result, SOON, error=UnknownQueue)


def test_who_fails_leaves_the_line_to_the_next(postgres_process_database: ProcessDatabase, waiter: Waiter) -> None:
    first = Actor("first")
    pid = first.do(backend_pid).result(SOON)
    cut_off, after = waiter(actor=first), waiter()
    sql("SELECT pg_terminate_backend(%s)", [pid])
    task = queue("mail").put()
    refused(None, cut_off.result, SOON, error=OperationalError)
    assert got(after) == task.pk


def test_a_transaction_waits_where_news_reach_it(postgres_process_database: ProcessDatabase, waiter: Waiter) -> None:
    future = waiter(transaction.atomic(queue("mail").take))
    task = queue("mail").put()
    assert got(future) == task.pk and status(task) == "PROCESSING"


def test_a_transaction_that_sees_no_news_does_not_wait(mail: QueueHandle, clock: Any, monkeypatch: Any) -> None:
    with transaction.atomic(), monkeypatch.context() as patch:
        patch.setattr(durations.clock, "wait_for", None)  # who waits all the same fails
        if connection.vendor == "postgresql":
            sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert mail.take(LONG) is None


def test_a_transaction_gives_way_to_nobody(mail: QueueHandle, waiter: Waiter) -> None:
    """It may hold locks that those in front wait for; and only it can see what it put itself."""
    future = waiter()
    with transaction.atomic():
        own = mail.put()
        task = mail.take()
        assert task.id == own.pk
        mail.ack(task)
    assert mail.put().pk == got(future)


def test_nobody_listens_any_more_when_nobody_waits(postgres_process_database: ProcessDatabase, waiter: Waiter) -> None:
    def listeners() -> int:
        return len(sql("SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()"))

    future = waiter()
    until(lambda: listeners() == 1)
    queue("mail").put()
    got(future)
    until(lambda: listeners() == 0)


# -- from one group of a queue, in its order, under the same fence, by an index ----------------------------------------
def test_only_its_tasks_are_taken_in_order_and_one_at_a_time(mail: QueueHandle, waiter: Waiter) -> None:
    mail.put(reference="free")
    for reference in ("a1", "b1", "a2", "b2"):
        mail.put(reference=reference, group=reference[0])
    head = mail.take(group="b")
    assert head.reference == "b1" and mail.take(group="b") is None, "its next task waits behind it"
    assert mail.take(group="a").reference == "a1"
    mail.ack(head)
    assert mail.take(group="b").reference == "b2"
    assert mail.take(group="c") is None
    assert mail.take().reference == "free" and mail.take() is None
    # Priority goes before age
    mail.put(reference="late", group="d", priority=5)
    mail.put(reference="soon", group="d", priority=1)
    assert mail.take(group="d").reference == "soon"
    # One of many consumers gets its task
    task = mail.put(group="g")
    assert [lease.id for lease in at_once(4, lambda _: mail.take(group="g")) if lease is not None] == [task.pk]
    # A put into it wakes who waits
    future = waiter(partial(mail.take, group="f"))
    mail.put(group="e")
    assert mail.put(group="f").pk == got(future)


def test_a_lease_that_ran_out_is_taken_over_and_its_holder_fenced_off(mail: QueueHandle, told: Told) -> None:
    task = mail.put(group="a")
    late = mail.take(group="a")
    age(11 * HOUR)
    newer = mail.take(group="a")
    assert newer.total_attempt == late.total_attempt + 1
    refused(None, mail.ack, late, error=LeaseLost)
    mail.ack(newer)
    assert told.calls() == ["put", "take", "lease_expired", "take", "ack"] and status(task) == "COMPLETED"


def test_of_a_group_tags_pauses_and_due_times_hold(mail: QueueHandle) -> None:
    mail.put(group="tagged", tag="eu")
    mail.put(group="later", delay=HOUR)
    mail.put(group="a")
    assert mail.take(group="tagged") is mail.take(group="later") is None
    assert queue("mail", tags=["eu"]).take(group="tagged") is not None
    Queue.objects.create(name="mail", paused_time="2000-01-01T00:00:00Z")
    assert mail.take(group="a") is None


def test_what_cannot_be_a_timeout_or_a_group_is_refused(mail: QueueHandle) -> None:
    for verb, wrong_time in ((mail.take, "5s"), (mail.wait, None)):
        for value in (wrong_time, 5, -SECOND):
            with pytest.raises((TypeError, ValueError), match="timeout="):
                verb(value)  # type: ignore[arg-type]
    for wrong in (7, "", "a\0b", "x" * 201):
        refused("group=", mail.take, group=wrong)


def test_it_is_found_by_the_index_of_groups(mail: QueueHandle) -> None:
    """Given 3,000 ready tasks of other groups, then one index with the group in it is read, and no other task."""
    enqueue_many("mail", ({"group": f"g{number}"} for number in range(3000)))
    session = Session.on("default")
    params = {"queue_name": "mail", "group": "g2999", "tags": session.sql.dialect.array([]), "limit": 1}
    sql = session.sql.first_ready_of_group
    assert len(session.run(sql, params)) == 1
    if not session.postgresql:
        steps = [row[3] for row in session.run(f"EXPLAIN QUERY PLAN {sql}", params)]
        (step,) = [step for step in steps if "dbtaskqueue_task" in step]
        assert "queue_name=? AND group_key=?" in step
        return
    for statistics in ("SELECT 1", "ANALYZE dbtaskqueue_task"):  # those of an empty table at first
        session.run(statistics, {})
        nodes = [*nodes_of(plan_of(session, sql, params))]
        names = [node.get("Index Name", "") for node in nodes]
        assert [name for name in names if name.startswith("dbtaskqueue_task")] == ["dbtaskqueue_task_lead"]
        assert [read_rows(node) for node in nodes if node.get("Relation Name") == "dbtaskqueue_task"] == [1]
