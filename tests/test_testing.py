"""The test kit as a project uses it: inside pytest-django's ``db``, inside ``TestCase``, and beside a real poller."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import IntegrityError, connections, transaction
from django.db.models.functions import Now

from django_dbtaskqueue import Fixed, enqueue, periodic, processor, testing
from django_dbtaskqueue.core.exceptions import DuplicateTask, LeaseLost, PayloadError, TaskQueueError, UnknownQueue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, CompleteDelete, Fail, Poison, Reenqueue
from django_dbtaskqueue.models import Attempt, Queue, Task, TaskHistory
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.testing import advance, assert_enqueued, drain, perform, refute_enqueued, run_poller
from tests.patience import PATIENCE, until
from tests.testapp.models import Booking

pytestmark = [pytest.mark.usefixtures("taskqueue_registry"), pytest.mark.django_db(databases=["default", "sqlite"])]
REPOSITORY, MINUTE = Path(__file__).resolve().parent.parent, timedelta(minutes=1)
both = pytest.mark.parametrize("alias", ["default", "sqlite"])


@dataclass
class Order:
    number: int
    note: str = ""


def status(reference: str, alias: str = "default") -> str:
    return str(Task.objects.using(alias).get(reference=reference).status)


@both
def test_drain_runs_what_is_due_in_ready_order_and_counts(alias: str) -> None:
    outcomes = {"poison": Poison("bad"), "again": Reenqueue(MINUTE), "gone": CompleteDelete(), "x": "x"}
    processor("labour", max_attempts=1)(lambda task: outcomes[task.payload])
    for reference, payload, priority in [("a", "x", 5), ("b", "poison", 0), ("c", "again", 0), ("d", "gone", -1)]:
        enqueue("labour", reference, payload, priority=priority, using=alias)
    report = drain("labour", using=alias)
    assert (report.completed, report.poisoned, report.reenqueued) == (2, 1, 1)
    assert report.outcomes == (CompleteDelete(), Poison("bad"), Reenqueue(MINUTE), Complete("x"))
    assert str(report) == "2 completed, 1 reenqueued, 1 poisoned"
    left = dict(Task.objects.using(alias).values_list("reference", "status"))
    assert left == {"a": "COMPLETED", "b": "POISON", "c": "CREATED"}
    assert str(drain("labour", using=alias)) == "nothing was due"


@both
def test_drain_runs_every_known_queue_and_what_processors_enqueue(alias: str) -> None:
    for where, name in (("default", "no queue"), ("default", "made here"), ("sqlite", "made there"), ("sqlite", "é")):
        Queue.objects.using(where).create(name=name)
    processor("first")(lambda task: enqueue("second", task.reference, using=alias) and None)
    processor("second")(lambda task: task.reference)
    enqueue("first", "a", using=alias)
    assert drain(using=alias).outcomes == (Complete(), Complete("a")) and str(drain()) == "nothing was due"


def test_a_failure_is_retried_by_policy_once_time_has_passed() -> None:
    processor("flaky", retry=Fixed(60 * MINUTE, jitter=0), max_attempts=3)(lambda task: Fail(ConnectionError("busy")))
    enqueue("flaky", "a")
    report = drain("flaky")
    assert (report.retried, str(report.errors[0])) == (1, "busy")
    assert_enqueued("flaky", delay=60 * MINUTE)
    advance("59m")
    assert str(drain("flaky")) == "nothing was due"
    advance(MINUTE)
    assert drain("flaky").retried == 1
    assert str(drain("flaky", with_scheduled=True)) == "1 failed"
    assert status("a") == "ERROR"
    failed = Attempt.objects.order_by("attempt").values_list("attempt", "error_type", "message")
    assert list(failed) == [(number, "builtins.ConnectionError", "busy") for number in (1, 2, 3)]


@both
def test_with_scheduled_misses_no_task_that_becomes_due_while_it_looks_and_keeps_their_order(alias: str) -> None:
    """Given a task that is due again after about the time that two questions to the database take."""
    delays = [timedelta(microseconds=number % 40 * 50) for number in range(300)]
    processor("again")(lambda task: Reenqueue(delays.pop()) if delays else None)
    enqueue("again", using=alias)
    assert drain("again", with_scheduled=True, using=alias).completed == 1
    processor("late")(lambda task: task.reference)
    for reference, hours in (("in two days", 48), ("in an hour", 1), ("now", 0)):
        enqueue("late", reference, delay=timedelta(hours=hours), using=alias)
    assert drain("late", using=alias).outcomes == (Complete("now"),)
    assert drain("late", with_scheduled=True, using=alias).outcomes == (Complete("in an hour"), Complete("in two days"))


def test_atomic_mode_rolls_back_the_processors_writes_and_not_the_tests() -> None:
    book = Booking.objects.create
    processor("bookings", mode="atomic", max_attempts=1)(lambda task: book(reference=task.payload) and 1 / task.payload)
    book(reference="of the test")
    for payload in (1, 0):
        enqueue("bookings", payload=payload)
    report = drain("bookings")
    assert (report.completed, report.failed, report.outcomes[0]) == (1, 1, Complete(1.0))
    assert set(Booking.objects.values_list("reference", flat=True)) == {"of the test", "1"}


@both
def test_a_database_error_of_a_processor_does_not_break_the_tests_transaction(alias: str) -> None:
    bookings = Booking.objects.using(alias)
    processor("broken", max_attempts=1)(lambda task: bookings.create(reference="taken"))
    bookings.create(reference="taken")
    enqueue("broken", "a", using=alias)
    assert isinstance(drain("broken", using=alias).errors[0], IntegrityError) and status("a", alias) == "ERROR"


def test_a_processor_may_insist_on_an_outermost_transaction_and_settle_in_it() -> None:
    @processor("own")
    def own(task: Lease) -> None:
        with transaction.atomic(durable=True):
            Booking.objects.create(reference=task.reference or "")
            task.complete({"by": "itself"})

    enqueue("own", "a")
    assert drain("own", raising=True).outcomes == (Complete({"by": "itself"}),)
    assert Task.objects.get().result == {"by": "itself"}


def test_a_lease_that_an_operator_revokes_meanwhile_is_counted_as_lost() -> None:
    processor("revoked")(lambda task: Task.objects.filter(pk=task.id).purge())
    enqueue("revoked")
    report = drain("revoked")
    assert (report.lost, report.completed, report.outcomes) == (1, 0, ())
    with pytest.raises(LeaseLost):
        perform("revoked")


def test_async_processors_run_on_the_tests_connection_and_async_tests_can_drain() -> None:
    @processor("async")
    async def book(task: Lease) -> int:
        await Booking.objects.acreate(reference=task.payload)
        return await Booking.objects.acount()

    enqueue("async", None, "a")
    assert drain("async").outcomes == (Complete(1),)
    async_to_sync(sync_to_async(enqueue))("async", None, "b")
    assert async_to_sync(sync_to_async(drain))("async").outcomes == (Complete(2),)


def test_a_task_without_a_processor_is_parked_and_goes_on_when_there_is_one() -> None:
    processor("typed", payload=dict)(lambda task: None)
    enqueue("typed", "a", Order(1))
    assert drain("typed").parked == 1
    processor("typed", payload=Order)(lambda task: task.payload.number)
    assert drain("typed").outcomes == (Complete(1),)


@both
def test_a_task_whose_process_died_on_its_last_attempt_ends_in_error(alias: str) -> None:
    processor("dying", max_attempts=1)(lambda task: None)
    enqueue("dying", "a", using=alias)
    assert Task.objects.db_manager(alias).checkout("dying", poller_instance="dead")
    assert str(drain("dying", using=alias)) == "nothing was due"
    advance(MINUTE, using=alias)
    assert str(drain("dying", using=alias)) == "1 failed" and status("a", alias) == "ERROR"
    assert Attempt.objects.using(alias).get().poller_instance == "dead"


def test_a_batch_processor_gets_its_tasks_together() -> None:
    processor("batched", batch=2)(lambda tasks: [f"{task.reference} of {len(tasks)}" for task in tasks])
    for reference in "abc":
        enqueue("batched", reference)
    assert drain("batched").outcomes == (Complete("a of 2"), Complete("b of 2"), Complete("c of 1"))
    assert perform("batched", reference="d") == Complete("d of 1")


@both
def test_limits_hold_and_time_brings_what_they_held_back(alias: str, settings: Any) -> None:
    slow = {"rate": "1/h", "burst": 2, "max_running": 1}
    settings.DBTASKQUEUE = {"QUEUES": {"slow": slow, "off": {"concurrency": 0}}}
    for queue in ("slow", "off"):
        processor(queue)(lambda task: task.reference)
        for reference in "abcd":
            enqueue(queue, reference, using=alias)
    assert drain(using=alias).outcomes == (Complete("a"), Complete("b"))
    assert str(drain(using=alias)) == "nothing was due"
    advance("1h", using=alias)
    assert drain(using=alias).outcomes == (Complete("c"),)
    assert drain(using=alias, with_scheduled=True).outcomes == (Complete("d"),)
    assert perform("slow", reference="e", using=alias) == Complete("e"), "whatever the limits say"


def test_a_schedule_that_is_due_gets_its_task() -> None:
    periodic("*/5 * * * *", name="report")(processor("reports")(lambda task: None))
    assert str(drain("reports", with_scheduled=True)) == "nothing was due"
    advance("5m")
    assert drain("reports").completed == 1


def test_an_endless_queue_is_named_and_exactly_the_limit_is_not_endless() -> None:
    processor("three")(lambda task: None)
    for _ in range(3):
        enqueue("three")
    assert drain("three", limit=3).completed == 3
    processor("endless")(lambda task: Reenqueue(timedelta(0)))
    enqueue("endless", "a")
    with pytest.raises(AssertionError, match=r"ran 20 attempts and queue 'endless' still has a task due .*reenqueue"):
        drain(limit=20)


def test_raising_shows_the_processors_exception_and_those_of_the_framework_end_the_test() -> None:
    processor("raising", max_attempts=1)(lambda task: 1 / 0)
    enqueue("raising", "a")
    with pytest.raises(ZeroDivisionError):
        drain("raising", raising=True)
    assert status("a") == "ERROR"
    processor("interrupted")(lambda task: pytest.fail("the test is over"))
    enqueue("interrupted")
    with pytest.raises(pytest.fail.Exception, match="the test is over"):
        drain("interrupted")


def test_unknown_queues_are_refused_and_an_open_transaction_of_a_poller() -> None:
    processor("mail")(lambda task: None)
    for call in (drain, assert_enqueued, refute_enqueued, perform):
        with pytest.raises(UnknownQueue, match="Did you mean 'mail'"):
            call("mial")
    with pytest.raises(TaskQueueError, match="see nothing of the open transaction on 'default'"):
        run_poller("mail").__enter__()


def test_a_paused_queue_is_left_alone_until_its_pause_runs_out() -> None:
    processor("paused")(lambda task: None)
    enqueue("paused")
    Queue.objects.create(name="paused", paused_time=Now(), paused_until=Now() + MINUTE)
    assert str(drain("paused", with_scheduled=True)) == "nothing was due"
    with pytest.raises(TaskQueueError, match="Queue 'paused' is paused"):
        perform("paused")
    advance(MINUTE)
    assert drain("paused").completed == 1


@both
def test_advance_moves_every_time_of_the_queue_and_no_other(alias: str) -> None:
    processor("times", max_attempts=1)(lambda task: 1 / 0)
    enqueue("times", "a", ttl=timedelta(hours=1), using=alias)
    drain("times", using=alias)
    enqueue("times", "b", delay=MINUTE, ttl=timedelta(hours=1), using=alias)
    Queue.objects.using(alias).create(name="q", paused_until=Task.objects.using(alias).get(reference="b").ready_time)

    def times() -> dict[Any, datetime]:
        rows = [(model, row) for model in (Task, Attempt, Queue) for row in model.objects.using(alias).values()]
        columns = [(model, row.get("id"), name, row[name]) for model, row in rows for name in row]
        return {tuple(where): time for *where, time in columns if isinstance(time, datetime)}

    before = times()
    advance("2h", using=alias)
    after = times()
    assert after.keys() == before.keys() and before
    assert max(map(abs, {before[key] - after[key] - timedelta(hours=2) for key in before})) <= timedelta(milliseconds=1)
    with pytest.raises(ValueError, match="is negative"):
        advance(-MINUTE)


@both
def test_assert_enqueued_finds_what_waits(alias: str) -> None:
    processor("mail", payload=Order)(lambda task: None)
    enqueue("mail", "a", Order(1, "first"), priority=3, group="g", tag="blue", context={"user": 7}, using=alias)
    task = enqueue("mail", "b", Order(2), delay=5 * MINUTE, using=alias)
    assert assert_enqueued("mail", count=2, using=alias).reference == "a"
    assert assert_enqueued("mail", payload=Order(2), delay=5 * MINUTE, using=alias) == task
    assert assert_enqueued("mail", payload={"number": ANY, "note": ""}, using=alias) == task
    exactly = {"reference": "a", "priority": 3, "group": "g", "tag": "blue", "context": {"user": 7}, "count": 1}
    assert_enqueued("mail", **exactly, using=alias)
    refute_enqueued("mail", payload=Order(3), using=alias)
    refute_enqueued("mail", delay=4 * MINUTE, using=alias)


def test_a_failed_assertion_lists_what_is_there_nearest_first() -> None:
    processor("mail")(lambda task: None)
    enqueue("mail", "done", {"to": "ann"})
    drain("mail")
    enqueue("mail", "a", {"to": "bob"}, priority=9)
    enqueue("mail", "b", {"to": "ann"})
    with pytest.raises(AssertionError) as caught:
        assert_enqueued("mail", reference="c", payload={"to": "ann"}, priority=0)
    assert str(caught.value).splitlines() == [
        "Expected a task waiting in queue 'mail' with reference='c', payload={'to': 'ann'}, priority=0, found none.",
        "Queue 'mail' has:",
        "  CREATED reference='b' payload={'to': 'ann'} priority=0  <- differs in reference",
        "  COMPLETED reference='done' payload={'to': 'ann'} priority=0  <- differs in status, reference",
        "  CREATED reference='a' payload={'to': 'bob'} priority=9  <- differs in reference, payload, priority",
    ]


def test_a_wrong_count_and_a_task_too_many_are_told() -> None:
    processor("mail")(lambda task: None)
    for number in range(12):
        enqueue("mail", f"r{number}")
    with pytest.raises(AssertionError, match=r"Expected exactly 1 waiting in queue 'mail', found 12(.|\n)*and 2 more"):
        assert_enqueued("mail", count=1)
    with pytest.raises(AssertionError, match=r"Expected no task waiting .* with reference='r3', found 1(.|\n)*'r3'"):
        refute_enqueued("mail", reference="r3")
    with pytest.raises(TypeError, match=r"no 'referense' to assert. Did you mean 'reference'"):
        refute_enqueued("mail", referense="a")  # type: ignore[call-arg]


def test_an_empty_queue_points_to_where_tasks_are() -> None:
    for name in ("mail", "letters"):
        processor(name)(lambda task: None)
    for there in ("no other queue", r"'letters' \(1\)"):
        with pytest.raises(AssertionError, match=rf"Queue 'mail' is empty\. Tasks wait in {there}"):
            assert_enqueued("mail")
        enqueue("letters")


@both
def test_perform_makes_the_whole_round_trip_and_leaves_no_task(alias: str) -> None:
    @processor("orders", payload=Order, mode="atomic")
    def book(task: Lease) -> Any:
        assert isinstance(task.payload, Order)
        Booking.objects.using(alias).create(reference=task.reference or "", amount=task.payload.number)
        return {"attempt": task.attempt, "total": task.total_attempt, "context": task.context}

    outcome = perform(book, Order(7), reference="a", attempt=2, context={"user": 1}, using=alias)
    assert outcome == Complete({"attempt": 2, "total": 2, "context": {"user": 1}})
    assert Booking.objects.using(alias).get().amount == 7 and not Task.objects.using(alias).exists()
    assert perform("orders", {"number": 8}, reference="b", using=alias) == Complete(ANY)


def test_perform_raises_what_the_processor_raises_and_returns_what_it_returns() -> None:
    @processor("fails", max_attempts=2)
    def fails(task: Lease) -> Any:
        if task.payload == "return":
            return Fail(ValueError("decided"), retry=False)
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        perform(fails)
    assert isinstance(perform(fails, raising=False).error, KeyError)
    assert str(perform(fails, "return").error) == "decided"
    assert not Attempt.objects.exists()
    processor("orders", payload=Order)(lambda task: None)
    with pytest.raises(PayloadError, match="number"):
        perform("orders", {"number": "seven"})


def test_perform_finds_classes_and_tells_what_is_no_processor() -> None:
    @processor("class")
    class Books:
        def process(self, task: Lease) -> str:
            return f"read {task.payload}"

    assert perform(Books, "a") == Complete("read a")
    with pytest.raises(TaskQueueError, match="status is the processor of no queue"):
        perform(status)
    processor("one")(status)
    processor("two")(status)
    with pytest.raises(TaskQueueError, match="status is the processor of 'one', 'two'"):
        perform(status)


def test_perform_takes_its_own_task_and_no_other() -> None:
    processor("mail")(lambda task: task.payload)
    enqueue("mail", "a", "other", priority=-100)
    assert perform("mail", "mine") == Complete("mine") and status("a") == "CREATED"
    with pytest.raises(DuplicateTask):
        perform("mail", "mine", reference="a")
    with pytest.raises(ValueError, match="has 5 attempts"):
        perform("mail", attempt=6)


@pytest.mark.parametrize("keep", ["keep", "history", "delete"])
def test_perform_leaves_nothing_behind_whatever_the_queue_keeps(keep: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"kept": {"keep": keep, "unique": "throttle:1h"}}}
    processor("kept")(lambda task: None)
    waits = enqueue("kept", payload={})
    assert [perform("kept", {}), perform("kept", {})] == [Complete(), Complete()]
    assert Task.objects.get() == waits and not TaskHistory.objects.exists()


@pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
@both
def test_run_poller_runs_a_real_poller_and_drains_it_at_the_end(alias: str) -> None:
    processor("labour")(lambda task: threading.current_thread().name)
    rows = Task.objects.using(alias).filter(status="COMPLETED")
    with run_poller("labour", using=alias) as poller:
        enqueue("labour", "a", using=alias)
        until(rows.exists)
        enqueue("labour", "b", using=alias)
    assert (poller.counts.finished, rows.count(), poller.state) == (2, 2, "STOPPED")
    assert threading.current_thread().name not in [row.result for row in rows]


@pytest.mark.django_db(transaction=True)
def test_run_poller_tells_what_it_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started, release, cancel = threading.Event(), threading.Event(), Poller.cancel
    monkeypatch.setattr(Poller, "cancel", lambda poller: (release.set(), cancel(poller)))

    @processor("stuck")
    def wait(task: Lease) -> None:
        started.set()
        release.wait(PATIENCE)

    enqueue("stuck", "a")
    told = pytest.raises(AssertionError, match=r"not done after 0:00:00.001.*running stuck/a")
    with told, run_poller("stuck", timeout=timedelta(milliseconds=1)):
        assert started.wait(PATIENCE)


class KitInTestCase(testing.TaskQueueTestCase):
    databases = {"default", "sqlite"}  # noqa: RUF012 -- Django's way to declare it

    def setUp(self) -> None:
        super().setUp()
        processor("unit", retry=Fixed(MINUTE), max_attempts=2)(self.work)

    def work(self, task: Lease) -> str:
        if task.attempt == 1:
            raise ValueError("first")
        return "second"

    def test_the_whole_kit(self) -> None:
        for alias in ("default", "sqlite"):
            enqueue("unit", "a", {"n": 1}, using=alias)
            self.assert_enqueued("unit", payload={"n": 1}, using=alias)
            self.assertEqual(self.drain("unit", using=alias).retried, 1)
            self.advance(2 * MINUTE, using=alias)
            self.assertEqual(self.drain("unit", using=alias).outcomes, (Complete("second"),))
            self.refute_enqueued("unit", using=alias)
            self.assertEqual(self.perform("unit", attempt=2, using=alias), Complete("second"))
            self.assertTrue(connections[alias].in_atomic_block)

    def test_nothing_is_left_of_another_test(self) -> None:
        self.assertFalse(Task.objects.exists())
        self.assertFalse(Task.objects.using("sqlite").exists())


def test_the_fixture_has_the_whole_kit(taskqueue: testing.TaskQueueKit) -> None:
    processor("fixture")(lambda task: None)
    enqueue("fixture", "a")
    taskqueue.assert_enqueued("fixture", reference="a")
    assert taskqueue.drain().completed == 1
    taskqueue.refute_enqueued("fixture")


def pytest_of(folder: Path, test: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(textwrap.dedent(test))
    (folder / "pytest.ini").write_text("[pytest]\n")  # else it looks for settings in the folders above
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider -p no:randomly test_it.py".split()
    env |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{REPOSITORY}"}
    return subprocess.run([*command, *options], cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)


def test_processors_of_a_test_are_gone_after_it(tmp_path: Path) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings = {"SECRET_KEY": "x", "INSTALLED_APPS": ["django_dbtaskqueue"], "DATABASES": {"default": database}}
    (tmp_path / "small.py").write_text(f"globals().update({settings})")
    test = """
        from django_dbtaskqueue import processor, registry

        def test_registers(taskqueue):
            processor("mine")(print)
            assert registry.queues() == ["mine"]

        def test_finds_nothing(taskqueue):
            assert registry.queues() == []
    """
    done = pytest_of(tmp_path, test, "--no-migrations", DJANGO_SETTINGS_MODULE="small")
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_plugin_imports_no_django_before_a_test_asks_for_it(tmp_path: Path) -> None:
    test = """
        import sys

        def test_plugin_is_there_and_django_models_are_not(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("dbtaskqueue")
            ours = {"django_dbtaskqueue." + name for name in ("core", "testing", "testing.plugin")}
            assert not [name for name in sys.modules if name.startswith(("django.", "django_dbtaskqueue."))
                        and name not in ours]
    """
    done = pytest_of(tmp_path, test, "-p", "no:django")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
