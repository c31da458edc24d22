"""Tasks that sleep, or wait for a signal: they hold no slot, spend no attempt, and lose no wake-up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from django_dbtaskqueue import PayloadError, SignalRefused, SignalTimeout, enqueue, processor, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.retry import Fixed
from django_dbtaskqueue.models import Signal, Step, Task
from django_dbtaskqueue.testing import advance, drain
from tests.conftest import ProcessDatabase
from tests.patience import PATIENCE
from tests.processing import pools
from tests.processing.conftest import QUEUE, Site, both
from tests.support import Audit, actors, backend_pid, until, until_blocked
from tests.testapp.models import Booking

in_a_test = pytest.mark.django_db(databases=["default", "sqlite"])
DAYS = timedelta(days=3)
NOW = Fixed(timedelta(0))


def on_both(test: Any) -> Any:
    return in_a_test(both(test))


def columns(site: Site, task: Task) -> tuple[Any, ...]:
    row = site.task(task)
    return row.status, row.attempt, row.total_attempt, row.parked_by, row.lost_leases


@on_both
@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_a_sleep_spends_no_attempt_and_is_passed_when_it_is_over(site: Site, mode: str) -> None:
    calls: list[str] = []

    @processor(QUEUE, mode=mode, max_attempts=1)
    def ship(task: Lease) -> str:
        task.step("before", calls.append, "before")
        task.sleep(DAYS)
        task.step("after", calls.append, "after")
        return "shipped"

    task = site.enqueue()
    assert site.drain().suspended == 1
    assert columns(site, task) == ("CREATED", 0, 1, None, 0)

    advance(DAYS - timedelta(hours=1), using=site.alias)
    assert site.drain().suspended == 0

    advance(timedelta(hours=1), using=site.alias)
    assert site.drain().completed == 1
    assert site.task(task).result == "shipped"
    assert calls == ["before", "after"]


@in_a_test
def test_a_sleeping_task_that_starts_early_sleeps_the_rest(site: Site) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        task.sleep(DAYS)

    task = site.enqueue()
    site.drain()
    advance(timedelta(days=1), using=site.alias)
    site.tasks(pk=task.pk).run_now()
    assert site.drain().suspended == 1

    advance(timedelta(days=1), using=site.alias)
    assert str(site.drain()) == "nothing was due"
    assert site.drain(with_scheduled=True).completed == 1


@in_a_test
def test_async_processors_sleep_and_wait(site: Site) -> None:
    @processor(QUEUE)
    async def ship(task: Lease) -> Any:
        try:
            await task.asleep(DAYS)
        except Exception as error:  # what ends a call is none
            raise AssertionError from error
        return await task.await_for("approved")

    task = site.enqueue()
    assert site.drain(with_scheduled=True).suspended == 2
    assert signal(site.task(task), "approved", {"by": "Ana"}) is True
    site.drain()
    assert site.task(task).result == {"by": "Ana"}


@on_both
@pytest.mark.parametrize("sent", ["before", "while it waits"])
@pytest.mark.parametrize("group", [None, "ana"])
def test_a_signal_is_received_whenever_it_is_sent(site: Site, sent: str, group: str | None) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        return [task.wait_for("approved"), task.wait_for("approved")]

    task = site.enqueue(group=group)
    if sent == "before":
        assert signal(task, "approved", 1) is False
        assert signal(task, "approved", 2) is False
    else:
        site.drain()
        assert columns(site, task) == ("CREATED", 0, 1, "signal", 0)
        assert signal(task, "another", 0) is False
        assert str(site.drain()) == "nothing was due"
        assert signal(task, "approved", 1) is True
        assert site.drain().suspended == 1
        assert signal(task, "approved", 2) is True
    site.drain()

    assert site.task(task).result == [1, 2]
    received = Signal.objects.using(site.alias).filter(name="approved").order_by("pk")
    assert list(received.values_list("data", "position")) == [(1, 1), (2, 2)]


@on_both
def test_a_wait_ends_at_its_timeout_and_gives_the_same_answer_ever_after(site: Site) -> None:
    answers: list[str] = []

    @processor(QUEUE, retry=NOW)
    def ship(task: Lease) -> str:
        try:
            task.wait_for("approved", timeout=DAYS)
        except SignalTimeout:
            answers.append("timeout")
        if task.attempt == 1:
            raise ValueError("again")
        return "sent back"

    task = site.enqueue()
    site.drain()
    assert columns(site, task) == ("CREATED", 0, 1, None, 0)
    advance(DAYS, using=site.alias)
    site.drain()

    assert site.task(task).result == "sent back"
    assert answers == ["timeout", "timeout"]
    assert Step.objects.using(site.alias).get().kind == "timeout"


@on_both
def test_a_signal_ends_a_wait_that_has_a_timeout(site: Site) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        return task.wait_for("approved", timeout=DAYS)

    task = site.enqueue()
    site.drain()
    assert signal(task.pk, "approved", "yes", queue=QUEUE, using=site.alias) is True
    assert site.drain().completed == 1
    assert site.task(task).result == "yes"


@in_a_test
def test_an_uncaught_timeout_fails_at_once(site: Site) -> None:
    @processor(QUEUE, retry=NOW)
    def ship(task: Lease) -> None:
        task.wait_for("approved", timeout=timedelta(0))

    task = site.enqueue()
    site.drain()
    assert site.task(task).status == "ERROR"
    assert "waited for the signal 'approved'" in site.attempts(task)[0].message


@on_both
def test_others_of_the_group_run_while_one_waits(site: Site) -> None:
    ran: list[str] = []

    @processor(QUEUE)
    def ship(task: Lease) -> None:
        if task.reference == "first":
            task.wait_for("approved")
        ran.append(str(task.reference))

    first = site.enqueue(reference="first", group="ana")
    site.enqueue(reference="second", group="ana")
    site.drain()
    assert ran == ["second"]
    signal(first, "approved")
    site.drain()
    assert ran == ["second", "first"]


@in_a_test
def test_a_signal_to_a_task_that_has_ended_or_is_not_there_is_refused(site: Site) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        return None

    task = site.enqueue()
    site.drain()
    with pytest.raises(SignalRefused, match=f"task {task.pk} is COMPLETED"):
        signal(task, "approved")
    with pytest.raises(SignalRefused, match="there is no task 4711"):
        signal(4711, "approved", using=site.alias)
    with pytest.raises(PayloadError):
        signal(site.enqueue(), "approved", object())
    with pytest.raises(TypeError, match="1 to 200 characters"):
        signal(task, "")
    assert not Signal.objects.using(site.alias).exists()


@on_both
def test_a_signal_is_sent_with_the_caller_s_transaction(site: Site) -> None:
    task = site.enqueue()
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=site.alias):
        signal(task, "approved")
        _ = 1 / 0
    assert not Signal.objects.using(site.alias).exists()
    assert site.task(task).signals is None


@in_a_test
def test_a_sleep_inside_a_transaction_is_refused(site: Site) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        with transaction.atomic(using=site.alias):
            task.sleep(DAYS)

    site.enqueue()
    [error] = site.drain().errors
    assert "inside transaction.atomic()" in str(error)
    assert not Step.objects.using(site.alias).exists()


@on_both
def test_time_to_live_moves_with_a_sleep_and_runs_on_in_a_wait(site: Site) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        if task.reference == "sleeps":
            task.sleep(DAYS)
        else:
            task.wait_for("approved")

    sleeper, waiter = (
        site.enqueue(reference="sleeps", ttl=timedelta(hours=1)),
        site.enqueue(reference="waits", ttl=timedelta(hours=1)),
    )
    site.drain()
    for task, wanted in ((sleeper, DAYS), (waiter, timedelta(0))):
        row = site.task(task)
        assert abs(row.expire_time - row.next_process_time - timedelta(hours=1)) < timedelta(seconds=PATIENCE)
        assert abs(row.next_process_time - row.start_time - wanted) < timedelta(seconds=PATIENCE)


# -- no lost wake-up: real transactions -------------------------------------------------------------------------------


@pytest.fixture
def watched(process_database: ProcessDatabase) -> Audit:
    audit = Audit()
    audit.install()
    return audit


@pytest.mark.parametrize("timeout", [None, DAYS])
@pytest.mark.parametrize("group", [None, "ana"])
def test_a_signal_between_the_look_and_the_settle_wakes(
    watched: Audit, timeout: timedelta | None, group: str | None
) -> None:
    calls: list[int] = []

    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        calls.append(1)
        try:
            return task.wait_for("approved", timeout)
        finally:
            if len(calls) == 1:  # it has looked, and its settle comes
                assert actor.do(signal, task.id, "approved", "yes").result(PATIENCE) is False

    with actors(1) as [actor]:
        task = enqueue(QUEUE, group=group)
        drain(QUEUE)
    row = Task.objects.get(pk=task.pk)
    assert (row.status, row.result, row.attempt) == ("COMPLETED", "yes", 1)
    assert watched.problems() == []


def test_a_signal_that_commits_while_the_settle_waits_for_it_wakes(
    postgres_process_database: ProcessDatabase,
) -> None:
    sending: list[Future[None]] = []
    main = backend_pid()

    def send(task_id: int) -> Callable[[], None]:
        """Send, and return what commits."""
        connections["default"].set_autocommit(False)
        signal(task_id, "approved", "yes")

        def commit() -> None:
            connections["default"].commit()
            connections["default"].set_autocommit(True)

        return commit

    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        try:
            return task.wait_for("approved")
        finally:
            if not sending:
                commit = sender.do(send, task.id).result(PATIENCE)
                watch.do(until_blocked, main).add_done_callback(lambda _: sender.do(commit))
                sending.append(Future())

    with actors(2) as [sender, watch]:
        task = enqueue(QUEUE)
        drain(QUEUE)
    assert Task.objects.get(pk=task.pk).result == "yes"


def test_a_signal_that_waits_for_the_settle_sees_what_the_task_waits_for(
    postgres_process_database: ProcessDatabase,
) -> None:
    answers: list[Future[bool]] = []

    @processor(QUEUE, mode="atomic")
    def ship(task: Lease) -> Any:
        try:
            return task.wait_for("approved")
        finally:
            if not answers:  # this transaction holds the row until the task is parked
                pid = sender.do(backend_pid).result(PATIENCE)
                answers.append(sender.do(signal, task.id, "approved", "yes"))
                watch.do(until_blocked, pid).result(PATIENCE)

    with actors(2) as [sender, watch]:
        task = enqueue(QUEUE)
        drain(QUEUE)
        assert answers[0].result(PATIENCE) is True
        drain(QUEUE)
    assert Task.objects.get(pk=task.pk).result == "yes"


def _sync(seen: list[str]) -> Callable[[Lease], Any]:
    def ship(task: Lease) -> Any:
        seen.append("called")
        task.step("before", lambda: 1)
        return task.wait_for("approved")

    return ship


def _async(seen: list[str]) -> Callable[[Lease], Any]:
    async def ship(task: Lease) -> Any:
        await asyncio.sleep(0)
        seen.append("called")
        return await task.await_for("approved")

    return ship


@both
@pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
@pytest.mark.parametrize(
    ("make", "options"),
    [(_sync, {}), (_sync, {"mode": "atomic"}), (_async, {})],
    ids=["thread", "atomic", "asyncio"],
)
def test_a_poller_goes_on_after_the_signal(site: Site, make: Any, options: dict[str, Any]) -> None:
    seen: list[str] = []
    processor(QUEUE, max_attempts=1, **options)(make(seen))
    task = site.enqueue()
    with site.poller() as poller:
        until(lambda: site.task(task).parked_by == "signal")
        until(lambda: not poller.running())  # the row shows it first, then the poller frees the slot
        assert signal(site.task(task), "approved", "yes") is True
        until(lambda: site.task(task).status == "COMPLETED")
    assert (site.task(task).result, site.task(task).attempt, len(seen)) == ("yes", 1, 2)


@pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
def test_a_task_in_a_process_of_its_own_goes_on_after_the_signal(
    site: Site, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", settings.SERVER_URL)  # of another database than the test's
    processor(QUEUE, executor="process", max_attempts=1)(pools.wait)
    task = site.enqueue(reference="r1")
    with site.poller():
        until(lambda: site.task(task).parked_by == "signal")
        assert signal(site.task(task), "approved", "yes") is True
        until(lambda: site.task(task).status == "COMPLETED")
    pid, answer = site.task(task).result
    assert (pid != os.getpid(), answer) == (True, "yes")
    assert Booking.objects.using(site.alias).get().reference == "r1"


@on_both
@pytest.mark.parametrize("group", [None, "ana"])
def test_steps_and_signals_in_a_table_with_names_of_its_own(site: Site, settings: Any, group: str | None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"model": "testapp.Parcel", "database": site.alias}}}

    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        task.step("weigh", lambda: 7)
        return task.wait_for("approved", timeout=DAYS)

    task = enqueue(QUEUE, "P-1", group=group)
    assert drain(QUEUE).suspended == 1
    assert signal(task.pk, "approved", "yes", queue=QUEUE) is True
    assert drain(QUEUE).completed == 1
    steps = Step.objects.using(site.alias).order_by("position")
    assert list(steps.values_list("location", "name", "kind")) == [
        ("testapp.parcel", "weigh", "step"),
        ("testapp.parcel", "approved", "signal"),
    ]
