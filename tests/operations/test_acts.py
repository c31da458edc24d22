"""One act and its record: both or neither, a reason for all that is left as it was, and settings that can be."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import DatabaseError, IntegrityError, transaction
from django.utils import timezone

from django_dbtaskqueue.conf import overrides
from django_dbtaskqueue.core.exceptions import OperationRefused, TaskQueueError, UnknownQueue
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AuditEntry, DeletedTasks, Queue, Task
from django_dbtaskqueue.operations import actions, queue_control
from django_dbtaskqueue.operations.actions import ActionRequest, act, act_on_ids
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.verbs import DELETE, REPROCESS
from tests.factories import QUEUE, make_task

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _known(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}}}


@pytest.fixture
def ada() -> User:
    return User.objects.create_superuser("ada")


def test_an_act_is_recorded_with_who_what_how_many_and_why(ada: User) -> None:
    failed, done = make_task(Status.ERROR, reference="A"), make_task(Status.COMPLETED)
    report = act(Task.objects.all(), ActionRequest(REPROCESS, "fixed", query="status:ERROR"), Actor(ada, "admin"))
    assert (report.changed, report.skips) == (1, {"in COMPLETED, not in ERROR": [done.pk]})
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.source, entry.verb, entry.queue) == ("ada", "admin", "reprocess", QUEUE)
    assert (entry.query, entry.reason, entry.changed, entry.skipped) == ("status:ERROR", "fixed", 1, 1)
    assert entry.details == {
        "task_ids": [failed.pk],
        "tasks": [{"id": failed.pk, "reference": "A"}],
        "skips": {"in COMPLETED, not in ERROR": 1},
        "skipped_ids": {"in COMPLETED, not in ERROR": [done.pk]},
    }
    logged = LogEntry.objects.get()
    assert (logged.user, logged.object_id, logged.action_flag) == (ada, str(failed.pk), CHANGE)
    assert (logged.object_repr, logged.change_message) == (f"{QUEUE}/A", "Reprocess (fixed)")


def test_deletions_are_logged_as_such_and_counted(ada: User) -> None:
    tasks = [make_task(), make_task(queue="letters")]
    act_on_ids(Task, "default", [task.pk for task in tasks], ActionRequest(DELETE, "test data"), Actor(ada))
    assert {entry.action_flag for entry in LogEntry.objects.all()} == {DELETION}
    assert AuditEntry.objects.get().queue == "", "it was of two queues"
    assert sum(DeletedTasks.objects.values_list("count", flat=True)) == 2


@pytest.mark.django_db(transaction=True)
def test_without_the_record_there_is_no_act() -> None:
    task = make_task(Status.ERROR)
    nobody = User(pk=987654, username="nobody", is_superuser=True)  # Django's log knows no such user
    with pytest.raises(IntegrityError):
        act(Task.objects.all(), ActionRequest(REPROCESS), Actor(nobody))
    assert Task.objects.get(pk=task.pk).status == Status.ERROR
    assert not AuditEntry.objects.exists() and not LogEntry.objects.exists()


def test_too_many_tasks_are_a_bulk_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MAX_TASKS_PER_ACTION", 1)
    tasks = [make_task(Status.ERROR) for _ in range(2)]
    with pytest.raises(OperationRefused, match="is a bulk operation"):
        act(Task.objects.all(), ActionRequest(REPROCESS), Actor())
    with pytest.raises(OperationRefused, match="up to 1 ids at once, not 2"):
        act_on_ids(Task, "default", [task.pk for task in tasks], ActionRequest(REPROCESS), Actor())
    assert not AuditEntry.objects.exists()


def test_the_command_line_is_named_by_the_system_s_user_and_not_in_django_s_log() -> None:
    make_task(Status.ERROR)
    assert act(Task.objects.all(), ActionRequest(REPROCESS), Actor()).changed == 1
    assert AuditEntry.objects.get().actor and AuditEntry.objects.get().actor_id == ""
    assert not LogEntry.objects.exists()


def test_settings_are_changed_one_by_one_and_the_difference_is_recorded(ada: User) -> None:
    actor = Actor(ada, "admin")
    assert queue_control.change_settings(QUEUE, {"batch_size": 7, "lease": "2m"}, actor, reason="slow") == {
        "batch_size": 7, "lease": "PT2M",
    }  # fmt: skip
    assert overrides.queue_settings(QUEUE, "default").batch_size == 7
    assert queue_control.change_settings(QUEUE, {}, actor, reset=["batch_size"]) == {"lease": "PT2M"}
    assert overrides.queue_settings(QUEUE, "default").batch_size == 500
    first, second = AuditEntry.objects.order_by("pk")
    assert (first.reason, first.details["before"], second.details["after"]) == ("slow", {}, {"lease": "PT2M"})
    assert LogEntry.objects.count() == 2
    queue_control.change_settings(QUEUE, {"concurrency": None}, actor)
    assert Queue.objects.get().overrides == {"lease": "PT2M", "concurrency": None}, "none is a value, too"


@pytest.mark.parametrize(
    ("queue", "values", "error", "words"),
    [
        (QUEUE, {"batch_sise": 7}, ImproperlyConfigured, "batch_size"),
        (QUEUE, {"batch_size": 0}, ImproperlyConfigured, "batch_size"),
        ("parcles", {"batch_size": 7}, UnknownQueue, "Did you mean 'parcels'"),
    ],
)
def test_settings_that_cannot_be_change_nothing(
    queue: str, values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        queue_control.change_settings(queue, values, Actor())
    assert not Queue.objects.exists() and not AuditEntry.objects.exists()


def test_a_pause_of_several_queues_is_asked_for_each_before_any(settings: Any, ada: User) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "CAN_OPERATE": f"{__name__}.not_letters"}
    with pytest.raises(PermissionDenied, match="ada may not use pause on queue letters"):
        queue_control.pause_queues([QUEUE, "letters"], Actor(ada))
    assert not Queue.objects.exists()
    with pytest.raises(TaskQueueError, match="would end before it begins"):
        queue_control.pause_queues([QUEUE], Actor(ada), until=timezone.now() - timedelta(minutes=1))
    assert not AuditEntry.objects.exists()
    assert queue_control.resume_queues([QUEUE], Actor(ada)) == 0
    assert not AuditEntry.objects.exists(), "it was not paused"


def not_letters(user: Any, verb: str, queue: str) -> bool:
    return queue != "letters"


@pytest.mark.parametrize("end", ["9999-12-31T23:59:59-12:00", "9999-12-31T23:59:59+00:00", "2201-01-01T00:00:00+00:00"])
def test_a_pause_has_an_end_that_can_be_read_again(end: str) -> None:
    with pytest.raises(TaskQueueError, match="too long: it ends in the year 2200 at the latest"):
        queue_control.pause([QUEUE], by="ada", until=datetime.fromisoformat(end))
    with pytest.raises(DatabaseError), transaction.atomic():
        Queue.objects.create(name="by-hand", paused_until=datetime(9999, 12, 31, tzinfo=UTC))
