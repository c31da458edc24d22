"""Operators see what a task waits for, and send it: on its page, by the command line and by the API."""

import json
import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.test import Client

from django_dbtaskqueue import enqueue, processor, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import AuditEntry, Step, Task
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.search.query import select
from django_dbtaskqueue.testing import advance, drain
from tests.factories import QUEUE
from tests.operations.site import OVERVIEW, TASKS, command, logged_in, post, text, user

pytestmark = pytest.mark.usefixtures("taskqueue_registry")
DAYS = timedelta(days=3)


@pytest.fixture
def task() -> Task:

    @processor(QUEUE)
    def refund(task: Lease) -> Any:
        task.step("reserve", lambda: {"seat": "12A", "password": "hunter2"})
        return task.wait_for("approved", timeout=timedelta(days=7))

    found = enqueue(QUEUE, "UA-15")
    drain(QUEUE)
    return found


def fields_of(page: str) -> dict[str, str]:
    form = re.search(r'<form[^>]*id="dbtq-signal".*?</form>', page, re.S)
    assert form is not None, "the page has no form for the signal"
    return {**dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form[0])), "data": "", "reason": ""}


def test_an_approval_waits_three_days_and_goes_on_after_one_click(op: Client, task: Task) -> None:
    advance(DAYS)
    sent = Step.objects.filter(kind="sent")  # which no task has received
    assert str(drain(QUEUE)) == "nothing was due"
    page = text(op.get(f"{TASKS}{task.pk}/change/"))
    assert "This task waits for the signal approved" in page and "has waited for the signal approved for 3d" in page
    assert "12A" in page and "hunter2" not in page
    for data, reason in (("{", "not JSON"), ('{"a": 1, "a": 2}', "occurs twice")):
        assert reason in text(op.post(TASKS, {**fields_of(page), "data": data})) and not sent.exists()
    answer = op.post(TASKS, {**fields_of(page), "data": '{"limit": 500}', "reason": "the report is in"}, follow=True)
    assert "1 task got the signal" in text(answer)
    assert drain(QUEUE).completed == 1
    assert Task.objects.get(pk=task.pk).result == {"limit": 500}
    assert Step.objects.get(kind="signal").actor == "admin"
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.reason, entry.changed) == ("signal", "the report is in", 1)
    after = text(op.get(f"{TASKS}{task.pk}/change/"))
    assert "dbtq-signal" not in after and "Send a signal: approved" in after


def test_who_may_not_send_signals_sees_no_form(task: Task) -> None:
    ana = user("view_task", name="ana", staff=True)
    client, page = logged_in(ana), f"{TASKS}{task.pk}/change/"
    shown = text(client.get(page))
    assert "has waited for the signal approved" in shown and "dbtq-signal" not in shown and "12A" not in shown
    assert "Users who may send signals to tasks of parcels can answer" in shown
    ana.user_permissions.add(Permission.objects.get(codename="signal_task"))
    assert "dbtq-signal" in text(client.get(page))


def test_what_waits_for_an_answer_is_listed_and_answered_in_two_clicks(op: Client) -> None:
    """Whether there is a time limit or not, until it was answered or ended otherwise."""

    @processor(QUEUE)
    def pay(task: Lease) -> Any:
        limit = timedelta(days=7) if task.reference == "limited" else None
        return task.wait_for("approved", limit, choices=["yes", "no <b>", {"part": 5}])

    tasks = {name: enqueue(QUEUE, name) for name in ("limited", "open", "cancelled", "answered")}
    drain(QUEUE)
    later = enqueue(QUEUE, "later", delay=DAYS)
    Task.objects.filter(pk=tasks["cancelled"].pk).cancel()
    signal(tasks["answered"], "approved")
    waiting = [tasks["open"].pk, tasks["limited"].pk]
    for search in ("signal:approved", "signal:app*", "signal:*"):
        assert [*select(search, Task.objects.order_by("-pk")).values_list("pk", flat=True)] == waiting, search
        assert [one["id"] for one in json.loads(command("list", "--filter", search, "--json"))] == waiting
    assert later.pk in [*select("-signal:approved", Task.objects.all()).values_list("pk", flat=True)]
    home = text(op.get(OVERVIEW))
    (link,) = re.findall(r'wait for an answer: <a href="([^"]*)">2<', home)
    assert all(f"/{pk}/change/" in shown for pk in waiting for shown in (home, text(op.get(link))))
    assert "wait for an answer" not in text(logged_in(user("view_queue", staff=True)).get(OVERVIEW))
    page = text(op.get(f"{TASKS}{waiting[0]}/change/"))
    assert page.index('id="dbtq-signal"') < page.index('id="dbtq-live"'), "on top"
    answers = re.findall(r'<button type="submit" name="data" value="([^"]*)"[^>]*>(.*?)</button>', page)
    assert [label for _data, label in answers] == ["yes", "no &lt;b&gt;", "{&#x27;part&#x27;: 5}"]
    op.post(TASKS, {**fields_of(page), "data": unescape(answers[2][0])})
    drain(QUEUE)
    assert Task.objects.get(pk=waiting[0]).result == {"part": 5}


def test_the_command_and_the_api_send_signals_and_none_is_asked_for_again(op: Client, task: Task) -> None:
    assert 'id="dbtq-signal"' in text(op.get(page := f"{TASKS}{task.pk}/change/"))
    assert "1 task got the signal." in command("signal", "--id", task.pk, "--signal=other", "--data=[1]", "--yes")
    body = {"ids": [task.pk], "signal": "approved", "data": {"ok": True}, "reason": "why"}
    assert post(op, "tasks/signal/ids", **body).json()["changed"] == 1
    sent = Step.objects.filter(kind="sent").order_by("pk").values_list("name", "result")
    assert list(sent) == [("other", [1]), ("approved", {"ok": True})]
    assert explain(task).code not in ("signal", "sleeping") and 'id="dbtq-signal"' not in text(op.get(page))
    drain(QUEUE)
    assert Task.objects.get(pk=task.pk).result == {"ok": True}


def test_explain_says_what_a_task_waits_for_or_how_long_it_sleeps(task: Task) -> None:
    advance(timedelta(days=2))
    found = explain(task)
    assert (found.code, found.facts["signal"]) == ("signal", "approved")
    assert found.sentence.startswith("The task has waited for the signal approved for 2d. Without it, it goes on in 4d")
    processor("letters")(lambda lease: lease.sleep(DAYS))
    task = enqueue("letters")
    drain("letters")
    found = explain(task)
    assert found.code == "sleeping" and found.sentence.startswith("The task sleeps. It goes on in 2d23h")


def test_the_processor_learns_who_sent_it_and_an_edit_takes_it_back(op: Client) -> None:
    seen: list[tuple[Any, str | None]] = []

    @processor(QUEUE, max_attempts=1)
    def pay(task: Lease) -> None:
        assert task.signal is None
        seen.append((task.wait_for("approved")["by"], task.signal and task.signal.actor))
        assert task.payload["amount"] == 90

    task = enqueue(QUEUE, payload={"amount": 70})
    for sent in range(2):  # the task fails, its payload is edited, and it waits again
        drain(QUEUE)
        assert Task.objects.get(pk=task.pk).parked_by == "signal", sent
        post(op, "tasks/signal/ids", ids=[task.pk], signal="approved", data={"by": "boss"})
        drain(QUEUE)
        post(op, "tasks/edit/ids", ids=[task.pk], payload={"amount": 90})
    assert (seen, Task.objects.get(pk=task.pk).status) == ([("boss", "admin")] * 2, "COMPLETED")


def test_an_edit_takes_a_signal_back_that_no_wait_has_received_and_begins_a_wait_again(op: Client) -> None:
    processor(QUEUE, max_attempts=1)(lambda task: task.wait_for("approved", DAYS) if task.payload else 1 / 0)
    task = enqueue(QUEUE, payload=0)
    signal(task, "approved")
    assert drain(QUEUE).failed == 1
    for payload in (80, 90):
        post(op, "tasks/edit/ids", ids=[task.pk], payload=payload)
        assert drain(QUEUE).suspended == 1
        advance(DAYS)
        assert drain(QUEUE).failed == 1
