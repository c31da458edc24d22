"""``log_level``: log lines of each task's life, from its checkout to the outcome that is stored."""

import json
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Fixed, LeaseLost, Poison, Reenqueue, processor, queue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.poller.logs import JsonFormatter
from tests.processing.conftest import QUEUE, Site, on_real_connections
from tests.support import taken_back

pytestmark = on_real_connections
HOUR, TRACE = timedelta(hours=1), "0af7651916cd43dd8448eb211c80319c"
CONTEXT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
FIELDS = {"task_id", "queue", "reference", "attempt", "task_event", "trace_id"}
FIELDS |= {"wait_seconds", "run_seconds", "due_time"}
Lines = Callable[[], list[Any]]


@pytest.fixture(autouse=True)
def logged(settings: Any, caplog: pytest.LogCaptureFixture) -> Lines:
    """Log lives at level INFO; return the lines that have an event."""
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "DEFAULTS": {"log_level": "INFO", "retry": Fixed(HOUR, jitter=0)}}
    caplog.set_level(logging.DEBUG, "django_dbtaskqueue")
    return lambda: [record for record in caplog.records if hasattr(record, "task_event")]


def events(records: list[Any]) -> list[str]:
    return [record.task_event for record in records]


def test_each_line_carries_all_fields(site: Site, logged: Lines) -> None:
    processor(QUEUE)(lambda task: None)
    task = site.ran(reference="r-1", context=CONTEXT)
    records = logged()
    assert events(records) == ["taken", "started", "completed"]
    for record in records:
        assert json.loads(JsonFormatter().format(record)).keys() >= FIELDS
        assert (record.task_id, record.queue, record.reference, record.attempt) == (task.pk, QUEUE, "r-1", 1)
        assert record.levelno == logging.INFO and record.trace_id == TRACE and record.wait_seconds >= 0
    taken, _, completed = records
    assert taken.run_seconds is None and completed.run_seconds >= 0 and completed.due_time is None
    assert completed.getMessage().startswith(f"Task {task.pk} of {QUEUE} completed after ")


ENDS: list[tuple[Outcome, str, str, str]] = [
    (Complete(1), "completed", "INFO", "completed after"),
    (CompleteDelete(), "deleted", "INFO", "completed and deleted after"),
    (Reenqueue(HOUR), "reenqueued", "INFO", "due again at 20"),
    (Poison("no such parcel"), "poisoned", "INFO", "no such parcel"),
    (Fail("down"), "retried", "WARNING", "failed, attempt 1 of 5: down; due again at 20"),
    (Fail("down", retry=False), "failed", "WARNING", "failed, attempt 1 of 5: down; it is in ERROR"),
]


@pytest.mark.parametrize("itself", [False, True])
def test_how_an_attempt_ends(site: Site, logged: Lines, itself: bool) -> None:

    @processor(QUEUE)
    def process(task: Lease) -> Any:
        outcome = ENDS[task.payload][0]
        return task.port.settle(task, outcome) if itself else outcome

    tasks = site.fill(*range(len(ENDS)))
    site.run()
    for task, (_, event, level, text) in zip(tasks, ENDS, strict=True):
        [end] = [one for one in logged() if one.task_id == task.pk and one.task_event not in ("taken", "started")]
        assert (end.task_event, end.levelname) == (event, level) and text in end.getMessage()
        due = end.due_time and datetime.fromisoformat(end.due_time) - task.create_time
        assert (due is not None and due > timedelta(minutes=50)) == (event in ("retried", "reenqueued"))


def test_code_without_a_poller(site: Site, logged: Lines) -> None:
    parcels = queue(QUEUE, using=site.alias)
    site.fill(None, None)
    parcels.release(parcels.take())
    parcels.ack(parcels.take())
    late = parcels.take()
    parcels.release_all()
    with pytest.raises(LeaseLost):
        parcels.ack(late)
    assert events(logged()) == ["taken", "released", "taken", "completed", "taken", "lease_lost"]
    (lease,) = Task.objects.db_manager(site.alias).checkout(QUEUE, poller_instance="by hand")
    lease.fail("down")
    assert events(logged())[6:] == ["taken", "retried"]
    assert "failed after" in logged()[-1].getMessage() and logged()[-1].getMessage().endswith(": down")


def test_what_is_rolled_back_is_not_logged(site: Site, logged: Lines) -> None:
    parcels = queue(QUEUE, using=site.alias)
    site.enqueue()
    with taken_back(site.alias):
        parcels.ack(parcels.take())
    with transaction.atomic(using=site.alias):
        parcels.ack(parcels.take())
        assert logged() == []
    assert events(logged()) == ["taken", "completed"]


def test_it_is_off_by_default_and_an_operator_switches_it_on(site: Site, settings: Any, logged: Lines) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}, "NOTIFY": False}
    processor(QUEUE)(lambda task: Fail("down", retry=False))
    site.ran(context=CONTEXT)
    [failed] = logged()  # a failure has every field though nothing else of its queue is logged
    shown = json.loads(JsonFormatter().format(failed))
    assert shown.keys() >= FIELDS and (shown["task_event"], shown["trace_id"]) == ("failed", TRACE)
    assert "failed, attempt 1 of 5: down" in failed.getMessage()
    Queue.objects.using(site.alias).create(name=QUEUE, overrides={"log_level": "DEBUG"})
    site.ran()
    told = [(record.task_event, record.levelname) for record in logged()[1:]]
    assert told == [("taken", "DEBUG"), ("started", "DEBUG"), ("failed", "WARNING")]
