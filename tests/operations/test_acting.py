"""What an operator does to tasks that wait or failed, as typed on the command line and as sent to the API."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib import admin
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client
from django.urls import include, path

from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AuditEntry, Task
from tests.factories import QUEUE, make_task

urlpatterns = [path("admin/", admin.site.urls), path("api/", include("django_dbtaskqueue.api.urls"))]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _known(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}}, "API": True}


def command(*words: object) -> str:
    out = StringIO()
    call_command("taskqueue", *map(str, words), "--yes", stdout=out)
    return out.getvalue()


# -- where a task runs -------------------------------------------------------------------------------------------------


def test_an_answer_says_what_became_of_the_task() -> None:
    task = make_task(ready_time=HOUR)
    assert "1 task due now" in command("run-now", "--id", task.pk)
    assert list(Task.objects.due()) == [task]
    assert "1 task snoozed" in command("snooze", "--id", task.pk, "--for", "2h")
    first, second = make_task(), make_task()
    command("change-priority", "--id", second.pk, "--priority", "-5")
    assert list(Task.objects.due()) == [second, first]


def test_waiting_tasks_move_to_another_queue_unless_their_reference_is_taken_there() -> None:
    free, taken = make_task(reference="A"), make_task(reference="B")
    make_task(reference="B", queue="letters")
    said = command("move", "--id", free.pk, "--id", taken.pk, "--to-queue", "letters")
    assert "1 task moved" in said and "its reference is taken" in said
    assert Task.objects.get(pk=free.pk).queue == "letters"
    assert Task.objects.get(pk=taken.pk).queue == QUEUE


def test_two_tasks_of_one_reference_cannot_both_move(settings: Any) -> None:
    one, other = make_task(reference="A"), make_task(reference="A", queue="letters")
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}, "third": {}}}
    command("move", "--id", one.pk, "--id", other.pk, "--to-queue", "third")
    assert sorted(Task.objects.values_list("queue", flat=True)) == ["letters", "third"]


def test_what_a_verb_needs_is_asked_for() -> None:
    task = make_task()
    for words, said in (
        (["snooze"], "--for"),
        (["snooze", "--for", "soon"], "soon"),
        (["change-priority", "--priority", "99999"], "32767"),
        (["move", "--to-queue", "nosuch"], "nosuch"),
    ):
        with pytest.raises(CommandError, match=said):
            command(words[0], "--id", task.pk, *words[1:])
    assert not AuditEntry.objects.exists()


def test_groups_stay_in_order_when_their_tasks_are_snoozed_and_moved() -> None:
    # Given two tasks of a group, of which the first is ready and the second waits behind it
    first = make_task(group_key="g")
    second = make_task(group_key="g", parked_by="group")
    # When the head is snoozed, then the second takes its place
    command("snooze", "--id", first.pk, "--for", "1h")
    assert list(Task.objects.due()) == [second]
    # When the second moves away, then the first is the head again, and the second one of its own
    command("move", "--id", second.pk, "--to-queue", "letters")
    assert list(Task.objects.due()) == [second]
    command("run-now", "--id", first.pk)
    assert set(Task.objects.due()) == {first, second}


def test_a_task_without_a_processor_is_not_said_to_run_now() -> None:
    task = make_task(parked_by="no handler for payload type Refund")
    assert "parked" in command("run-now", "--id", task.pk)


# -- the payload -------------------------------------------------------------------------------------------------------

PAYLOAD = {"email": "zoe@exmaple.org", "card_token": "tok_4242", "tries": [1, {"password": "x"}]}


def test_a_payload_is_edited_and_the_task_retried_and_its_secrets_stay(admin_user: Any) -> None:
    # Given a task that failed for its payload, and an operator who sees it masked
    task = make_task(Status.ERROR, payload=PAYLOAD)
    client = Client()
    client.force_login(admin_user)
    shown = client.get(f"/api/tasks/{task.pk}").json()["payload"]
    assert shown["card_token"] == "•••"
    # When the mistake is repaired in what was shown
    shown["email"] = "zoe@example.org"
    body = {"ids": [task.pk], "payload": shown, "reason": "typed wrongly"}
    answer = client.post("/api/tasks/edit/ids", json.dumps(body), content_type="application/json").json()
    assert answer["changed"] == 1, answer
    # Then the task waits with the repaired payload and the secrets it had
    row = Task.objects.get(pk=task.pk)
    assert (row.status, row.attempt) == ("CREATED", 0)
    assert row.payload == {**PAYLOAD, "email": "zoe@example.org"}


@pytest.mark.parametrize(
    ("payload", "said"), [({**PAYLOAD, "card_token": "tok_1"}, "card_token"), ("{", "JSON"), ({"email": "•••"}, "•••")]
)
def test_an_edit_that_would_change_a_secret_or_is_no_json_is_refused(payload: Any, said: str) -> None:
    task = make_task(Status.ERROR, payload=PAYLOAD)
    text = payload if isinstance(payload, str) else json.dumps(payload)
    with pytest.raises(CommandError, match=said):
        command("edit", "--id", task.pk, "--payload", text)
    assert Task.objects.get(pk=task.pk).payload == PAYLOAD


def test_one_task_is_edited_at_a_time() -> None:
    tasks = [make_task(Status.ERROR) for _ in range(2)]
    with pytest.raises(CommandError, match="one task"):
        command("edit", "--id", tasks[0].pk, "--id", tasks[1].pk, "--payload", "{}")
