"""Operators see what a task waits for, and send it: on its page, by the command line and by the API."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client
from django.urls import include, path

from django_dbtaskqueue import enqueue, processor, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import AuditEntry, Signal, Task
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.testing import advance, drain

urlpatterns = [path("admin/", admin.site.urls), path("api/", include("django_dbtaskqueue.api.urls"))]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__), pytest.mark.usefixtures("taskqueue_registry")]
QUEUE = "claims"
PAGE = "/admin/dbtaskqueue/task/"
DAYS = timedelta(days=3)


@pytest.fixture(autouse=True)
def _known(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}, "API": True}


@pytest.fixture
def task() -> Task:
    """A task that waits for an approval."""

    @processor(QUEUE)
    def refund(task: Lease) -> Any:
        task.step("reserve", lambda: {"seat": "12A", "password": "hunter2"})
        return task.wait_for("approved", timeout=timedelta(days=7))

    found = enqueue(QUEUE, "UA-15")
    drain(QUEUE)
    return found


def fields_of(page: str) -> dict[str, str]:
    """Return what the browser posts if the button of the form is clicked."""
    form = re.search(r'<form[^>]*id="dbtq-signal".*?</form>', page, re.S)
    assert form is not None, "the page has no form for the signal"
    inputs = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form[0])
    return {**dict(inputs), "data": "", "reason": ""}


def test_an_approval_waits_three_days_and_goes_on_after_one_click(op: Client, task: Task) -> None:
    advance(DAYS)
    assert str(drain(QUEUE)) == "nothing was due"

    page = op.get(f"{PAGE}{task.pk}/change/").content.decode()
    assert "This task waits for the signal approved" in page
    assert "has waited for the signal approved for 3d" in page
    assert "12A" in page and "hunter2" not in page
    answer = op.post(PAGE, {**fields_of(page), "data": '{"limit": 500}', "reason": "the report is in"}, follow=True)
    assert "1 task got the signal" in answer.content.decode()

    assert drain(QUEUE).completed == 1
    assert Task.objects.get(pk=task.pk).result == {"limit": 500}
    assert Signal.objects.get().actor == "admin"
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.reason, entry.changed) == ("signal", "the report is in", 1)
    after = op.get(f"{PAGE}{task.pk}/change/").content.decode()
    assert "dbtq-signal" not in after
    assert "Send a signal: approved" in after


def test_who_may_not_send_signals_sees_no_form_and_is_refused(task: Task) -> None:
    user = User.objects.create_user("ana", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_task"))
    client = Client()
    client.force_login(user)
    page = client.get(f"{PAGE}{task.pk}/change/").content.decode()
    assert "has waited for the signal approved" in page
    assert "dbtq-signal" not in page and "12A" not in page
    posted = {"action": "signal", "_selected_action": str(task.pk), "confirm": "yes", "signal": "approved"}
    assert client.post(PAGE, posted).status_code == 403
    assert not Signal.objects.exists()

    user.user_permissions.add(Permission.objects.get(codename="signal_task"))
    client.force_login(User.objects.get(pk=user.pk))
    assert "dbtq-signal" in client.get(f"{PAGE}{task.pk}/change/").content.decode()


def test_data_that_is_not_json_is_asked_for_again(op: Client, task: Task) -> None:
    page = op.get(f"{PAGE}{task.pk}/change/").content.decode()
    answer = op.post(PAGE, {**fields_of(page), "data": "{"})
    assert "not JSON" in answer.content.decode()
    assert not Signal.objects.exists()


def test_the_command_and_the_api_send_signals(op: Client, task: Task, capsys: Any) -> None:
    call_command("taskqueue", "signal", "--id", str(task.pk), "--signal", "other", "--data", "[1]", "--yes")
    assert "1 task got the signal." in capsys.readouterr().out
    body = {"ids": [task.pk], "signal": "approved", "data": {"ok": True}, "reason": "why"}
    answer = op.post("/api/tasks/signal/ids", json.dumps(body), content_type="application/json")
    assert answer.json()["changed"] == 1, answer.content
    assert list(Signal.objects.order_by("pk").values_list("name", "data")) == [
        ("other", [1]),
        ("approved", {"ok": True}),
    ]
    drain(QUEUE)
    assert Task.objects.get(pk=task.pk).result == {"ok": True}
    again = op.post("/api/tasks/signal/ids", json.dumps(body), content_type="application/json").json()
    assert (again["changed"], again["skipped"]) == (0, 1)


def test_explain_says_what_a_task_waits_for_and_until_when(task: Task) -> None:
    advance(timedelta(days=2))
    found = explain(task)
    assert found.code == "signal"
    assert found.sentence.startswith("The task has waited for the signal approved for 2d. Without it, it goes on in 4d")
    assert found.facts["signal"] == "approved"


def test_a_signal_that_was_sent_is_not_asked_for_again(op: Client, task: Task) -> None:
    # Given a task that waits, and its signal, which no poller has handed over yet
    page = f"{PAGE}{task.pk}/change/"
    assert 'id="dbtq-signal"' in op.get(page).content.decode()
    signal(task, "approved")

    # Then the task waits for a poller, and its page has no form
    assert explain(task).code not in ("signal", "sleeping")
    assert 'id="dbtq-signal"' not in op.get(page).content.decode()


def test_explain_says_how_long_a_task_sleeps() -> None:
    @processor(QUEUE)
    def refund(task: Lease) -> None:
        task.sleep(DAYS)

    task = enqueue(QUEUE)
    drain(QUEUE)
    assert explain(task).sentence.startswith("The task sleeps. It goes on in 2d23h")
    assert explain(task).code == "sleeping"
