"""Waiting for a task: woken by events, served in the order of coming, and never a busy loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.db.utils import OperationalError

from django_dbtaskqueue import UnknownQueue, enqueue_many, queue
from django_dbtaskqueue.core import durations
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.pull import blocking
from django_dbtaskqueue.pull.handle import QueueHandle
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.support import PATIENCE, Actor, actors, at_once, backend_pid, until

LONG = timedelta(seconds=PATIENCE)
SOON = PATIENCE / 2  # seconds: well before a poll would find anything
Waiter = Callable[[], "Future[Lease | None]"]


@pytest.fixture(autouse=True)
def _no_polls(configure: Callable[..., None]) -> None:
    """So seldom that only an event can be in time."""
    configure(poll_interval="10m", lease="10h")


@pytest.fixture
def waiter(mail: QueueHandle) -> Iterator[Callable[..., Future[Lease | None]]]:
    """Start a thread that waits in ``take``, behind those that wait already; return its future."""
    cast: list[Actor] = []

    def start(handle: QueueHandle = mail, timeout: timedelta = LONG) -> Future[Lease | None]:
        before = waiters(handle)
        cast.append(Actor(f"waiter-{len(cast)}"))
        future = cast[-1].do(handle.take, timeout)
        until(lambda: waiters(handle) == before + 1)
        return future

    yield start
    for actor in cast:
        actor.close()


def waiters(handle: QueueHandle) -> int:
    return blocking.waiters(handle.name, ["default"])


def got(future: Future[Lease | None]) -> int:
    """Return the id of the task that a waiter got in time."""
    task = future.result(SOON)
    assert task is not None
    return task.id


def test_a_put_wakes_at_its_commit_and_not_before(mail: QueueHandle, waiter: Waiter) -> None:
    future = waiter()
    with transaction.atomic():
        task = mail.put()
        assert not future.done()
    assert got(future) == task.pk
    future = waiter()
    task = mail.put()
    assert got(future) == task.pk


def test_a_put_of_another_process_wakes(postgres_process_database: ProcessDatabase) -> None:
    with actors(1) as (actor,):
        future = actor.do(queue("mail").take, LONG)
        until(lambda: waiters(queue("mail")) == 1)
        with transaction.atomic(), connection.cursor() as cursor:  # as another process does
            cursor.execute("INSERT INTO dbtaskqueue_task (queue_name) VALUES ('mail')")
            cursor.execute("SELECT pg_notify(%s, 'mail')", [notify.CHANNEL])
        assert got(future) == Task.objects.get().pk


def test_a_task_scheduled_for_later_is_taken_when_it_is_due(mail: QueueHandle) -> None:
    task = mail.put(delay=timedelta(milliseconds=300))
    taken = mail.take(LONG)
    assert taken is not None and taken.id == task.pk
    assert taken.start_time >= taken.ready_time


def test_without_events_polling_finds_the_task(
    mail: QueueHandle, waiter: Waiter, configure: Callable[..., None], settings: Any
) -> None:
    configure(poll_interval="100ms")
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "NOTIFY": False}
    future = waiter()
    Task.objects.create(queue="mail")  # as a plain INSERT does it: nobody is told
    assert got(future) == Task.objects.get().pk


# -- wait: until a task can be taken ----------------------------------------------------------------------------------


def test_wait_returns_at_a_put_to_all_who_wait_and_takes_nothing(mail: QueueHandle) -> None:
    with actors(3) as waiting:
        futures = [actor.do(mail.wait, LONG) for actor in waiting]
        until(lambda: waiters(mail) == 3)
        task = mail.put()
        assert [future.result(SOON) for future in futures] == [True] * 3
    task.refresh_from_db()
    assert (task.status, task.total_attempt) == ("CREATED", 0)
    assert mail.take() is not None


def test_wait_knows_what_can_be_taken(mail: QueueHandle) -> None:
    now = timedelta(0)
    assert not mail.wait(now)
    task = mail.put(delay=timedelta(hours=1))
    mail.put(tag="eu")
    assert not mail.wait(now), "none is due for this handle"
    assert queue("mail", tags=["eu"]).wait(now)
    Task.objects.filter(pk=task.pk).run_now()
    assert mail.wait(now)
    assert mail.take() is not None
    assert not mail.wait(now), "a live lease holds it"


def test_wait_of_a_group_ignores_the_others(mail: QueueHandle, clock: SteppedClock) -> None:
    mail.put(group="a")
    with actors(1) as (actor,):
        future = actor.do(lambda: mail.wait(LONG, group="b"))
        until(lambda: waiters(mail) == 1)
        assert not future.done()
        clock.advance(LONG.total_seconds())
        assert not future.result(SOON)
        future = actor.do(lambda: mail.wait(LONG, group="b"))
        until(lambda: waiters(mail) == 1)
        mail.put(group="b")
        assert future.result(SOON)


def test_wait_returns_when_a_scheduled_task_is_due(mail: QueueHandle) -> None:
    task = mail.put(delay=timedelta(milliseconds=300))
    assert mail.wait(LONG)
    assert Task.objects.filter(pk=task.pk, ready_time__lte=Now()).exists()


def test_a_take_of_a_group_is_woken_by_a_put_into_it(mail: QueueHandle) -> None:
    with actors(1) as (actor,):
        future = actor.do(lambda: mail.take(LONG, group="b"))
        until(lambda: waiters(mail) == 1)
        mail.put(group="a")
        task = mail.put(group="b")
        assert got(future) == task.pk


# -- fairness --------------------------------------------------------------------------------------------------------


def test_waiters_are_served_longest_first(mail: QueueHandle, waiter: Waiter) -> None:
    # Given five waiters, who came one after the other
    futures = [waiter() for _ in range(5)]
    # When five tasks come at once, then each gets the one that is its turn
    enqueue_many("mail", [{"payload": n} for n in range(5)])
    ids = [got(future) for future in futures]
    assert ids == sorted(Task.objects.values_list("pk", flat=True))


def test_each_single_task_goes_to_who_waits_longest(mail: QueueHandle, waiter: Waiter) -> None:
    futures = [waiter() for _ in range(3)]
    for place, future in enumerate(futures):
        task = mail.put()
        assert got(future) == task.pk
        assert not any(later.done() for later in futures[place + 1 :])


def test_a_newcomer_gets_only_what_the_waiters_leave(mail: QueueHandle, waiter: Waiter) -> None:
    for _ in range(10):
        future = waiter()
        task = mail.put()
        assert mail.take() is None
        assert got(future) == task.pk
    future = waiter()
    enqueue_many("mail", [{}, {}])
    second = mail.take()
    *_, first, last = Task.objects.order_by("pk").values_list("pk", flat=True)
    assert got(future) == first
    assert second is not None and second.id == last


def test_waiters_of_other_tags_do_not_wait_for_each_other(mail: QueueHandle, waiter: Any) -> None:
    plain = waiter()
    with actors(1) as (actor,):
        tagged = actor.do(queue("mail", tags=["eu"]).take, LONG)
        until(lambda: waiters(mail) == 2)
        task = mail.put(tag="eu")
        assert got(tagged) == task.pk
        assert not plain.done()
        other = mail.put()
        assert got(plain) == other.pk


def test_many_waiters_get_every_task_once(mail: QueueHandle) -> None:
    enqueue_many("mail", [{} for _ in range(60)])

    def drain(_: int) -> list[int]:
        ids = []
        while task := mail.take():
            ids.append(task.id)
            mail.ack(task)
        return ids

    taken = [task_id for ids in at_once(4, drain) for task_id in ids]
    assert sorted(taken) == sorted(Task.objects.values_list("pk", flat=True))
    assert not Task.objects.exclude(status="COMPLETED").exists()


# -- the end of patience ---------------------------------------------------------------------------------------------


def test_a_wait_ends_in_time_with_few_looks(mail: QueueHandle, clock: SteppedClock) -> None:
    statements: list[str] = []

    def watch(execute: Any, sql: str, *rest: Any) -> Any:
        statements.append(sql)
        return execute(sql, *rest)

    def look() -> Lease | None:
        with connection.execute_wrapper(watch):
            return mail.take(LONG)

    with actors(1) as (actor,):
        future = actor.do(look)
        until(lambda: waiters(mail) == 1)
        assert not future.done()
        clock.advance(LONG.total_seconds())
        assert future.result(SOON) is None
    assert len(statements) < 30


def test_who_waits_behind_another_leaves_in_time_too(mail: QueueHandle, waiter: Any) -> None:
    waiter()
    assert mail.take(timedelta(milliseconds=100)) is None
    assert waiters(mail) == 1
    mail.put()


def test_a_timeout_is_a_duration(sqlite_process_database: ProcessDatabase) -> None:
    for verb, wrong in ((queue("mail").take, "5s"), (queue("mail").wait, None)):
        for value in (wrong, 5, -timedelta(seconds=1)):
            with pytest.raises((TypeError, ValueError), match="timeout="):
                verb(value)  # type: ignore[arg-type]


def test_a_waiter_of_a_queue_that_goes_is_told(mail: QueueHandle, waiter: Any) -> None:
    brief = queue("brief-queue").create()
    future = waiter(brief)
    Queue.objects.filter(pk="brief-queue").delete()
    blocking.wake("brief-queue")
    with pytest.raises(UnknownQueue):
        future.result(SOON)


def test_who_fails_leaves_the_line_to_the_next(postgres_process_database: ProcessDatabase) -> None:
    mail = queue("mail")
    with actors(2) as (first, second):
        pid = first.do(backend_pid).result(SOON)
        futures = []
        for number, actor in enumerate((first, second), start=1):
            futures.append(actor.do(mail.take, LONG))
            until(lambda number=number: waiters(mail) == number)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
        task = mail.put()
        with pytest.raises(OperationalError):
            futures[0].result(SOON)
        assert got(futures[1]) == task.pk


# -- inside a transaction --------------------------------------------------------------------------------------------


def test_a_transaction_waits_where_news_can_reach_it(postgres_process_database: ProcessDatabase) -> None:
    mail = queue("mail")

    def inside() -> Lease | None:
        with transaction.atomic():
            return mail.take(LONG)

    with actors(1) as (actor,):
        future = actor.do(inside)
        until(lambda: waiters(mail) == 1)
        task = mail.put()
        assert got(future) == task.pk
    assert Task.objects.get().status == "PROCESSING"


@pytest.fixture
def nobody_waits(clock: SteppedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits all the same fails."""
    monkeypatch.setattr(durations.clock, "wait_for", None)


@pytest.mark.usefixtures("nobody_waits")
def test_a_stricter_transaction_does_not_wait_in_vain(postgres_process_database: ProcessDatabase) -> None:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert queue("mail").take(LONG) is None


@pytest.mark.usefixtures("nobody_waits")
def test_a_sqlite_transaction_does_not_wait_in_vain(sqlite_process_database: ProcessDatabase) -> None:
    with transaction.atomic():
        assert queue("mail").take(LONG) is None


def test_a_transaction_gives_way_to_nobody(mail: QueueHandle, waiter: Waiter) -> None:
    """It may hold locks that those in front wait for; and only it can see what it put itself."""
    future = waiter()
    with transaction.atomic():
        own = mail.put()
        task = mail.take()
        assert task is not None and task.id == own.pk
        mail.ack(task)
    other = mail.put()
    assert got(future) == other.pk


# -- listening -------------------------------------------------------------------------------------------------------


def test_nobody_listens_any_more_when_nobody_waits(postgres_process_database: ProcessDatabase) -> None:
    def listening() -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()"
            )
            return int(cursor.fetchone()[0])

    with actors(1) as (actor,):
        future = actor.do(queue("mail").take, LONG)
        until(lambda: listening() == 1)
        queue("mail").put()
        got(future)
        until(lambda: listening() == 0)
