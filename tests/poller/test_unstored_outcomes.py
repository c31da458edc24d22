"""Database errors while outcomes are stored: good work stays good, and one bad row is alone with its fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection

from django_dbtaskqueue import Complete, enqueue, enqueue_many, registry
from django_dbtaskqueue.conf.settings import queue_settings
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import settle
from django_dbtaskqueue.flow.scan import ScanCursor
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller import settle_batches
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import QueueState, release_unknown
from tests.clock import SteppedClock
from tests.poller.processes import polling
from tests.support import PATIENCE, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("taskqueue_registry")]


def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


@contextmanager
def refused(condition: str, sqlstate: str = "XX000") -> Iterator[None]:
    """The database raises an error for each update of a task for which the condition holds."""
    execute(
        "CREATE OR REPLACE FUNCTION test_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {condition} THEN RAISE EXCEPTION 'refused by the test' USING ERRCODE = '{sqlstate}'; END IF;"
        " RETURN NEW; END $$"
    )
    execute("CREATE TRIGGER test_refuse BEFORE UPDATE ON dbtaskqueue_task FOR EACH ROW EXECUTE FUNCTION test_refuse()")
    try:
        yield
    finally:
        execute("DROP TRIGGER test_refuse ON dbtaskqueue_task")


def completed() -> int:
    return Task.objects.filter(status="COMPLETED").count()


def until_tried(poller: Poller) -> None:
    """Wait until an outcome was tried so often that only time keeps it from being blamed."""
    until(lambda: any(lease.unstored_tries > settle.BLAMED_TRIES for lease in poller.settler.held.copy()))


@pytest.mark.parametrize("condition", ["NEW.status <> 'PROCESSING'", "NEW.status <> 'PROCESSING' AND NEW.id % 3 = 0"])
def test_an_internal_error_for_a_while_makes_no_error_of_good_work(
    condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle_batches, "UNSTORED_OUTCOME_SECONDS", PATIENCE)
    registry.register("letters", lambda task: None)
    with refused(condition):
        enqueue_many("letters", [{}] * 30)
        with polling({"letters": 1}) as poller:
            until_tried(poller)
            execute("ALTER TABLE dbtaskqueue_task DISABLE TRIGGER test_refuse")
            until(lambda: completed() == 30)
    assert set(Task.objects.values_list("total_attempt", flat=True)) == {1}
    assert not Attempt.objects.exists()


def test_a_schema_change_that_hits_every_outcome_is_an_outage() -> None:
    # Given a processor that fails
    def fail(task: object) -> None:
        raise ValueError("as it must")

    registry.register("letters", fail)
    with polling({"letters": 1}) as poller:
        until(lambda: poller.state == "RUNNING")
        # When the table of failed attempts is away
        execute("ALTER TABLE dbtaskqueue_attempt RENAME TO elsewhere")
        task = enqueue("letters")
        until(lambda: poller.state == "WAITING")
        execute("ALTER TABLE elsewhere RENAME TO dbtaskqueue_attempt")
        # Then the failure is stored as it was
        until(lambda: Attempt.objects.exists())
    assert Attempt.objects.get(task_id=task.pk).error_type == "builtins.ValueError"


def test_a_process_that_was_stopped_between_two_tries_blames_no_task(clock: SteppedClock) -> None:
    # Given an outcome that could not be stored once, a while ago, for instance before its process was stopped
    registry.register("letters", lambda task: None)
    enqueue("letters", "good")
    (lease,) = Task.objects.checkout("letters", poller_instance="a")
    pairs: list[settle.Decided] = [(lease, Complete())]
    with refused("NEW.status = 'COMPLETED'"):
        assert settle.settle_surely(Session.on("default"), pairs, patience=60) == set()
        # When the database refuses the next try, too
        clock.advance(3600)
        assert settle.settle_surely(Session.on("default"), pairs, patience=60) == set()
    # Then the outcome is stored as soon as the database takes it
    assert settle.settle_surely(Session.on("default"), pairs, patience=60) == {lease.id}
    assert Task.objects.get().status == "COMPLETED"


def test_a_row_that_takes_no_completion_is_at_fault_alone(clock: SteppedClock) -> None:
    registry.register("letters", lambda task: None)
    with refused("NEW.status = 'COMPLETED' AND NEW.reference_number = 'bad'"), polling({"letters": 1}) as poller:
        bad = enqueue("letters", "bad")
        enqueue_many("letters", [{}] * 20)
        until(lambda: completed() == 20)
        until_tried(poller)
        clock.advance(settle_batches.UNSTORED_OUTCOME_SECONDS)
        until(lambda: Task.objects.filter(pk=bad.pk, status="ERROR").exists())
    assert "could not be stored" in str(Task.objects.get(pk=bad.pk).process_result)


def test_a_row_that_takes_no_outcome_at_all_stops_nobody(clock: SteppedClock) -> None:
    registry.register("letters", lambda task: None)
    refusing = refused("NEW.status <> 'PROCESSING' AND NEW.reference_number = 'bad'")
    with refusing, polling({"letters": 1}) as poller:
        enqueue("letters", "bad")
        enqueue_many("letters", [{}] * 20)
        until(lambda: completed() == 20)
        until_tried(poller)
        clock.advance(settle_batches.UNSTORED_OUTCOME_SECONDS)
        until(lambda: not poller.settler.held)
        enqueue_many("letters", [{}] * 20)
        until(lambda: completed() == 40)
        assert poller.state == "RUNNING"


def test_a_release_that_is_refused_for_a_while_blames_no_task() -> None:
    """A task of a lost checkout, which had not run, ended in ERROR when the database refused its release once."""
    # Given a checkout whose reply was lost
    registry.register("letters", lambda task: None)
    enqueue_many("letters", [{}] * 3)
    session, held = Session.on("default"), Task.objects.checkout("letters", limit=1, poller_instance="a")
    Task.objects.checkout("letters", limit=2, poller_instance="a")
    queue = QueueState("letters", queue_settings("letters"), held[0].port, ScanCursor("letters"))
    queue.reply_lost = True

    # When the database refuses to release one of its tasks, for more tries than blame an outcome
    with refused(f"NEW.status <> 'PROCESSING' AND NEW.id = {held[0].id + 1}"):
        for _ in range(settle.BLAMED_TRIES + 1):
            release_unknown(session, queue, "a", held)

    # Then it is released later, uncharged, and so was the other one; the task that runs stays
    assert queue.reply_lost
    release_unknown(session, queue, "a", held)
    assert not queue.reply_lost
    assert list(Task.objects.order_by("pk").values_list("status", "attempt")) == [
        ("PROCESSING", 1), ("CREATED", 0), ("CREATED", 0),
    ]  # fmt: skip
