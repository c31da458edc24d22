"""Tasks that sleep, or wait for a signal: they hold no slot, spend no attempt, and lose no wake-up."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from django_dbtaskqueue import Fixed, PayloadError, SignalRefused, SignalTimeout, enqueue, processor, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Step, Task
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.testing import advance, drain
from tests.conftest import ProcessDatabase
from tests.operations.site import refused
from tests.processing import named
from tests.processing.conftest import QUEUE, Site, both, on_real_connections
from tests.support import PATIENCE, Audit, actors, backend_pid, taken_back, until, until_blocked

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
NOW = Fixed(timedelta(0))


def wait(task: Lease) -> Any:
    return task.wait_for("approved")


async def wait_async(task: Lease) -> Any:
    return await task.await_for("approved")


def suspended(site: Site) -> list[tuple[Any, ...]]:
    return site.values("status", "attempt", "total_attempt", "parked_by", "lost_leases")


@both
@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_a_sleep_spends_no_attempt_and_is_passed_when_it_is_over(site: Site, mode: str) -> None:
    calls: list[str] = []

    @processor(QUEUE, mode=mode, max_attempts=1)
    def ship(task: Lease) -> str:
        task.step("before", calls.append, "before")
        task.sleep(3 * DAY)
        task.step("after", calls.append, "after")
        return "shipped"

    site.enqueue()
    assert site.drain().suspended == 1
    assert suspended(site) == [("CREATED", 0, 1, None, 0)]
    advance(3 * DAY - HOUR, using=site.alias)
    assert site.drain().suspended == 0
    advance(HOUR, using=site.alias)
    assert site.drain().completed == 1
    assert (site.values("result"), calls) == (["shipped"], ["before", "after"])


def test_a_sleeping_task_that_starts_early_sleeps_the_rest(site: Site) -> None:
    processor(QUEUE)(lambda task: task.sleep(3 * DAY))
    site.drained()
    advance(DAY, using=site.alias)
    site.tasks().run_now()
    assert site.drain().suspended == 1
    advance(DAY, using=site.alias)
    assert str(site.drain()) == "nothing was due"
    assert site.drain(with_scheduled=True).completed == 1


def test_async_processors_sleep_and_wait(site: Site) -> None:
    @processor(QUEUE)
    async def ship(task: Lease) -> Any:
        try:
            await task.asleep(3 * DAY)
        except Exception as error:  # what ends a call is none
            raise AssertionError from error
        return await task.await_for("approved")

    task = site.enqueue()
    assert site.drain(with_scheduled=True).suspended == 2
    assert signal(site.task(task), "approved", {"by": "Ana"}) is True
    site.drain()
    assert site.values("result") == [{"by": "Ana"}]


@both
@pytest.mark.parametrize("sent", ["before", "while it waits"])
@pytest.mark.parametrize("group", [None, "ana"])
def test_a_signal_is_received_whenever_it_is_sent(site: Site, sent: str, group: str | None) -> None:
    processor(QUEUE)(lambda task: [task.wait_for("approved"), task.wait_for("approved")])
    task = site.enqueue(group=group)
    if sent == "before":
        assert signal(task, "approved", 1) is signal(task, "approved", 2) is False
    else:
        site.drain()
        assert suspended(site) == [("CREATED", 0, 1, "signal", 0)]
        assert signal(task, "another", 0) is False
        assert str(site.drain()) == "nothing was due"
        assert signal(task, "approved", 1) is True
        assert site.drain().suspended == 1
        assert signal(task, "approved", 2) is True
    site.drain()
    assert site.values("result") == [[1, 2]]
    received = Step.objects.using(site.alias).filter(name="approved").order_by("position")
    assert list(received.values_list("kind", "result", "position")) == [("signal", 1, 1), ("signal", 2, 2)]


def test_a_task_whose_time_to_live_ends_while_it_waits_is_said_to_have_begun(site: Site) -> None:
    processor(QUEUE)(wait)
    site.enqueue(ttl=HOUR)
    site.drain()
    site.enqueue(ttl=HOUR)
    advance(DAY, using=site.alias)
    Housekeeper().turn(RetentionPolicy())
    ends = [text.partition("before ")[2] for text in site.values("process_result")]
    assert ends == ["it could go on", "it could be started"]


@both
def test_a_wait_ends_at_its_timeout_and_gives_the_same_answer_ever_after(site: Site) -> None:
    answers: list[str] = []

    @processor(QUEUE, retry=NOW)
    def ship(task: Lease) -> None:
        try:
            task.wait_for("approved", timeout=DAY)
        except SignalTimeout:
            answers.append("timeout")
        if task.attempt == 1:
            raise ValueError("again")

    site.drained()
    assert suspended(site) == [("CREATED", 0, 1, None, 0)]
    advance(DAY, using=site.alias)
    site.drain()
    assert (site.values("status"), answers) == (["COMPLETED"], ["timeout", "timeout"])
    assert Step.objects.using(site.alias).get().kind == "timeout"


def test_an_uncaught_timeout_fails_at_once(site: Site) -> None:
    processor(QUEUE, retry=NOW)(lambda task: task.wait_for("approved", timeout=timedelta(0)))
    task = site.drained()
    assert site.values("status", "attempt") == [("ERROR", 1)]
    assert "waited for the signal 'approved'" in site.attempts(task)[0].message


def test_a_signal_to_a_task_that_has_ended_or_is_not_there_is_refused(site: Site) -> None:
    processor(QUEUE)(lambda task: None)
    task, waiting = site.drained(), site.enqueue()
    refused(f"task {task.pk} is COMPLETED", signal, task, "approved", error=SignalRefused)
    for pk, queue in ((4711, None), (waiting.pk, "letters")):
        refused(f"there is no task {pk}", signal, pk, "approved", queue=queue, using=site.alias, error=SignalRefused)
    refused(None, signal, waiting, "approved", object(), error=PayloadError)
    for name in ("", "x" * 201, "a\0", "a\ud800"):  # the last two no database stores
        refused("1 to 200 characters", signal, task, name, error=TypeError)
    assert not Step.objects.using(site.alias).exists()


@both
def test_a_signal_is_sent_with_the_caller_s_transaction(site: Site) -> None:
    task = site.enqueue()
    with taken_back(site.alias):
        signal(task, "approved")
    assert not Step.objects.using(site.alias).exists() and site.task(task).signals is None


@both
def test_time_to_live_moves_with_a_sleep_and_runs_on_in_a_wait(site: Site) -> None:
    processor(QUEUE)(lambda task: task.sleep(3 * DAY) if task.payload == "sleeps" else wait(task))
    sleeper, waiter = site.enqueue("sleeps", ttl=HOUR), site.enqueue("waits", ttl=HOUR)
    site.drain()
    for task, wanted in ((sleeper, 3 * DAY), (waiter, timedelta(0))):
        row = site.task(task)
        assert abs(row.expire_time - row.next_process_time - HOUR) < timedelta(seconds=PATIENCE)
        assert abs(row.next_process_time - row.start_time - wanted) < timedelta(seconds=PATIENCE)


@both
@pytest.mark.parametrize("group", [None, "ana"])
def test_steps_and_signals_in_a_table_with_names_of_its_own(site: Site, settings: Any, group: str | None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"model": "testapp.Parcel", "database": site.alias}}}

    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        task.step("weigh", lambda: 7)
        return task.wait_for("approved", timeout=DAY)

    task = enqueue(QUEUE, "P-1", group=group)
    assert drain(QUEUE).suspended == 1
    assert signal(task.pk, "approved", "yes", queue=QUEUE) is True
    assert drain(QUEUE).completed == 1
    steps = Step.objects.using(site.alias).order_by("position").values_list("location", "name", "kind")
    assert list(steps) == [("testapp.parcel", "weigh", "step"), ("testapp.parcel", "approved", "signal")]


# -- no lost wake-up: real transactions -------------------------------------------------------------------------------
def wait_and(meanwhile: Callable[[Lease], Any], timeout: timedelta | None = None) -> Callable[[Lease], Any]:
    """A processor that waits; in its first call something happens after it has looked, and before its settle."""
    calls: list[int] = []

    def ship(task: Lease) -> Any:
        calls.append(1)
        try:
            return task.wait_for("approved", timeout)
        finally:
            if len(calls) == 1:
                meanwhile(task)

    return ship


@pytest.mark.parametrize("timeout", [None, DAY])
@pytest.mark.parametrize("group", [None, "ana"])
@pytest.mark.usefixtures("process_database")
@on_real_connections
def test_a_signal_between_the_look_and_the_settle_wakes(timeout: timedelta | None, group: str | None) -> None:
    audit = Audit()
    audit.install()

    def send(task: Lease) -> None:
        assert actor.do(signal, task.id, "approved", "yes").result(PATIENCE) is False

    processor(QUEUE)(wait_and(send, timeout))
    with actors(1) as [actor]:
        enqueue(QUEUE, group=group)
        drain(QUEUE)
    row = Task.objects.get()
    assert (row.status, row.result, row.attempt) == ("COMPLETED", "yes", 1) and audit.problems() == []


@on_real_connections
def test_a_signal_that_commits_while_the_settle_waits_for_it_wakes(postgres_process_database: ProcessDatabase) -> None:
    main = backend_pid()

    def send(task: Lease) -> None:
        sender.do(lambda: connection.set_autocommit(False))
        sender.do(signal, task.id, "approved", "yes").result(PATIENCE)
        watch.do(until_blocked, main).add_done_callback(lambda _: sender.do(commit))

    def commit() -> None:
        connection.commit()
        connection.set_autocommit(True)

    processor(QUEUE)(wait_and(send))
    with actors(2) as [sender, watch]:
        enqueue(QUEUE)
        drain(QUEUE)
    assert Task.objects.get().result == "yes"


@pytest.mark.usefixtures("postgres_process_database")
@on_real_connections
def test_a_signal_that_waits_for_the_settle_sees_what_the_task_waits_for() -> None:
    answers: list[Future[bool]] = []

    def send(task: Lease) -> None:  # this transaction holds the row until the task is parked
        Task.objects.filter(pk=task.id).update(tag=None)
        pid = sender.do(backend_pid).result(PATIENCE)
        answers.append(sender.do(signal, task.id, "approved", "yes"))
        watch.do(until_blocked, pid).result(PATIENCE)

    processor(QUEUE, mode="atomic")(wait_and(send))
    with actors(2) as [sender, watch]:
        enqueue(QUEUE)
        drain(QUEUE)
        assert answers[0].result(PATIENCE) is True
        drain(QUEUE)
    assert Task.objects.get().result == "yes"


@on_real_connections
@both
@pytest.mark.parametrize(("function", "options"), [(wait, {}), (wait, {"mode": "atomic"}), (wait_async, {})])
def test_a_poller_goes_on_after_the_signal(site: Site, function: Any, options: dict[str, Any]) -> None:
    processor(QUEUE, max_attempts=1, **options)(function)
    task = site.enqueue()
    with site.poller() as poller:
        until(lambda: site.task(task).parked_by == "signal")
        until(lambda: not poller.running())  # the row shows it first, then the poller frees the slot
        assert signal(site.task(task), "approved", "yes") is True
    assert site.values("status", "result", "attempt", "total_attempt") == [("COMPLETED", "yes", 1, 2)]


@on_real_connections
def test_a_task_in_a_process_goes_on_after_a_signal(site: Site, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", settings.SERVER_URL)  # of another database than the test's
    processor(QUEUE, executor="process", max_attempts=1)(named.wait)
    task = site.enqueue(reference="r1")
    with site.poller():
        until(lambda: site.task(task).parked_by == "signal")
        assert signal(site.task(task), "approved", "yes") is True
    pid, answer = site.task(task).result
    assert (pid != os.getpid(), answer) == (True, "yes") and site.booked() == ["r1"]
