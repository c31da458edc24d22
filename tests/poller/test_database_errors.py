"""What the database refuses: good work stays good, a row that cannot be taken or read is alone with its fault."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import Complete, enqueue, enqueue_many, registry
from django_dbtaskqueue.conf.settings import default_settings
from django_dbtaskqueue.core import durations
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import settle
from django_dbtaskqueue.flow.checkout import ScanCursor
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.models.tasks import MAX_TOTAL_ATTEMPT
from django_dbtaskqueue.poller import held_leases
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import QueueState, release_unknown
from django_dbtaskqueue.testing import TaskQueueKit
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.poller.processes import Held, completed, cut_connections, polling, status_of
from tests.support import PATIENCE, actors, refused, sql, until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _processors(taskqueue_registry: None) -> None:
    for queue in ("letters", "parcels"):
        registry.register(queue, lambda task: 1 / 0 if task.reference == "fails" else None)


def until_tried(poller: Poller) -> None:
    """Wait until an outcome was tried so often that only time keeps it from being blamed."""
    until(lambda: any(lease.unstored_tries > settle.BLAMED_TRIES for lease in poller.settler.held.copy()))


@pytest.mark.parametrize("condition", ["NEW.status <> 'PROCESSING'", "NEW.status <> 'PROCESSING' AND NEW.id % 3 = 0"])
def test_an_internal_error_for_a_while_spoils_no_good_work(condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_leases, "UNSTORED_OUTCOME_SECONDS", PATIENCE)
    with refused(condition):
        enqueue_many("letters", [{}] * 30)
        with polling({"letters": 1}) as poller:
            until_tried(poller)
            sql("ALTER TABLE dbtaskqueue_task DISABLE TRIGGER test_refuse")
            until(lambda: completed() == 30)
    assert set(Task.objects.values_list("total_attempt", flat=True)) == {1} and not Attempt.objects.exists()


def test_an_outcome_whose_row_is_locked_is_stored_when_it_is_free() -> None:
    held = Held()
    registry.unregister("parcels")
    registry.register("parcels", held)
    task = enqueue("parcels")
    with polling({"letters": 1, "parcels": 1}) as poller, actors(1) as [other]:
        held.until_started()
        with transaction.atomic():
            Task.objects.select_for_update().get(pk=task.pk)
            held.go_on.set()
            until(lambda: not poller.running())
            later = other.do(lambda: enqueue("letters")).result(PATIENCE)
            until(lambda: status_of(later) == "COMPLETED")  # so the other outcome was tried
            assert status_of(task) == "PROCESSING"
        until(lambda: status_of(task) == "COMPLETED")


def test_a_schema_change_that_hits_every_outcome_is_an_outage() -> None:
    with polling({"letters": 1}) as poller:
        until(lambda: poller.state == "RUNNING")
        sql("ALTER TABLE dbtaskqueue_attempt RENAME TO elsewhere")
        task = enqueue("letters", "fails")
        until(lambda: poller.state == "WAITING")
        sql("ALTER TABLE elsewhere RENAME TO dbtaskqueue_attempt")
        until(Attempt.objects.exists)
    assert Attempt.objects.get(task_id=task.pk).error_type == "builtins.ZeroDivisionError"


def test_a_process_that_was_stopped_between_two_tries_blames_no_task(clock: SteppedClock) -> None:
    task = enqueue("letters")
    (lease,) = Task.objects.checkout("letters", poller_instance="a")
    pairs: list[settle.Decided] = [(lease, Complete())]
    with refused("NEW.status = 'COMPLETED'"):
        assert settle.settle_surely(Session.on("default"), pairs, patience=60) == set()
        clock.advance(3600)
        assert settle.settle_surely(Session.on("default"), pairs, patience=60) == set()
    assert settle.settle_surely(Session.on("default"), pairs, patience=60) == {lease.id}
    assert status_of(task) == "COMPLETED"


@pytest.mark.parametrize(("takes_no", "end"), [("= 'COMPLETED'", "ERROR"), ("<> 'PROCESSING'", "PROCESSING")])
def test_a_row_that_takes_no_outcome_is_at_fault_alone(takes_no: str, end: str, clock: SteppedClock) -> None:
    with refused(f"NEW.status {takes_no} AND NEW.reference_number = 'bad'"), polling({"letters": 1}) as poller:
        bad = enqueue("letters", "bad")
        enqueue_many("letters", [{}] * 20)
        until(lambda: completed() == 20)
        until_tried(poller)
        clock.advance(held_leases.UNSTORED_OUTCOME_SECONDS)
        until(lambda: not poller.settler.held)
        enqueue_many("letters", [{}] * 20)
        until(lambda: completed() == 40)
        assert (poller.state, status_of(bad)) == ("RUNNING", end)
    assert ("could not be stored" in str(Task.objects.get(pk=bad.pk).process_result)) == (end == "ERROR")


def test_a_release_that_is_refused_for_a_while_blames_no_task() -> None:
    """A task of a lost checkout, which had not run, ended in ERROR when the database refused its release once."""
    enqueue_many("letters", [{}] * 3)
    session, held = Session.on("default"), Task.objects.checkout("letters", limit=1, poller_instance="a")
    Task.objects.checkout("letters", limit=2, poller_instance="a")
    queue = QueueState("letters", default_settings("letters"), held[0].port, ScanCursor("letters"))
    queue.reply_lost = True
    with refused(f"NEW.status <> 'PROCESSING' AND NEW.id = {held[0].id + 1}"):
        for _ in range(settle.BLAMED_TRIES + 1):  # more than blame an outcome
            release_unknown(session, queue, "a", held)
    assert queue.reply_lost
    # Then it is released later, uncharged, and so was the other one; the task that runs stays
    release_unknown(session, queue, "a", held)
    assert not queue.reply_lost
    left = Task.objects.order_by("pk").values_list("status", "attempt")
    assert list(left) == [("PROCESSING", 1), ("CREATED", 0), ("CREATED", 0)]


UNREADABLE = Task.objects.filter(queue="letters", parked_by__startswith="unreadable: ")


def insert(column: str, value: object) -> None:
    sql(f"INSERT INTO dbtaskqueue_task (queue_name, {column}) VALUES ('letters', %s)", [value])


@pytest.mark.parametrize("queues", [{"letters": 1}, {"letters": 1, "parcels": 1}])
def test_a_row_that_breaks_the_checkout(process_database: ProcessDatabase, queues: dict[str, int]) -> None:
    enqueue("letters")
    insert("total_attempt", MAX_TOTAL_ATTEMPT)  # its next checkout would break a CHECK
    enqueue("letters")
    with polling(queues) as poller:
        until(lambda: completed() == 2 and UNREADABLE.exists())
        enqueue("letters")
        until(lambda: completed() == 3 and poller.state == "RUNNING")
    bad = Task.objects.get(total_attempt=MAX_TOTAL_ATTEMPT)
    assert (bad.status, bad.ready_time) == ("CREATED", None)


def test_a_row_that_cannot_be_read(sqlite_process_database: ProcessDatabase) -> None:
    insert("expire_time", "2030-13-45 00:00:00")  # SQLite compares text, so its CHECK lets this pass
    enqueue("letters")
    with polling({"letters": 1}):
        until(lambda: completed() == UNREADABLE.count() == 1)


def test_a_lease_that_is_shorter_than_its_checkout(process_database: ProcessDatabase) -> None:
    task = enqueue("letters", lease=timedelta(seconds=1))
    Task.objects.update(lease_seconds=0.000001)  # as SQL may write it
    with polling({"letters": 1}):
        until(lambda: completed() == 1)
    task.refresh_from_db()
    assert task.attempt == 1 and task.total_attempt < 10


def test_tasks_of_a_lost_checkout_are_given_back_uncharged(taskqueue: TaskQueueKit, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"letters": {"lease": "10m"}}}
    held = Held()
    registry.unregister("letters")
    registry.register("letters", lambda task: held(task) if task.reference == "long" else None)
    with taskqueue.run_poller("letters") as poller:
        until(lambda: poller.state == "RUNNING")
        long = enqueue("letters", "long")
        held.until_started()
        # A lease in the poller's name that it never heard of, as a commit leaves it whose answer was lost
        lost = Task.objects.create(queue="letters", tag="lost")
        assert Task.objects.checkout("letters", poller_instance=poller.instance, tags=["lost"])
        Task.objects.filter(pk=lost.pk).update(tag=None)
        # So that its next checkout fails: what a fetch asks after its checkout would be lost without a loss.
        until(lambda: poller.queues["letters"].next_poll > durations.clock.monotonic())
        cut_connections()
        other = enqueue("letters")
        until(lambda: completed() == 2)  # long before the lease is over
        held.go_on.set()
    rows = Task.objects.in_bulk()
    assert (rows[lost.pk].attempt, rows[lost.pk].total_attempt) == (1, 2) and rows[other.pk].attempt == 1
    assert rows[long.pk].total_attempt == 1, "a task that runs is not given back"
