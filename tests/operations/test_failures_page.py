"""The page of failures, as an operator reads it: the error, its traceback, and what to do, on the spot."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Attempt, BulkOperation, FailureGroup, Task
from django_dbtaskqueue.operations import bulk
from tests.factories import QUEUE, make_task

pytestmark = pytest.mark.django_db
PRINT = "9f2c" * 10
TRACE = 'Traceback (most recent call last):\n  File "tasks.py", line 41, in assess\nPlaneUnknown: N14228'
LIST = "/admin/dbtaskqueue/failuregroup/"
TASKS = f"/admin/dbtaskqueue/task/?q=fingerprint%3A{PRINT}+status%3AERROR"


@pytest.fixture(autouse=True)
def _failed(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}}
    now = timezone.now()
    facts = {"error_type": "desk.PlaneUnknown", "message": "N14228", "frame": "desk:assess"}
    FailureGroup.objects.create(fingerprint=PRINT, queue=QUEUE, first_seen=now, last_seen=now, **facts)
    task = make_task(Status.ERROR, fingerprint=PRINT)
    for trace in ("an older one", TRACE):
        Attempt.objects.create(
            task_id=task.pk, queue=QUEUE, attempt=1, total_attempt=1, fingerprint=PRINT, traceback=trace
        )


def test_the_list_has_the_newest_traceback_and_the_actions(op: Client) -> None:
    shown = op.get(LIST).content.decode()
    assert "PlaneUnknown: N14228</a>" in shown and "line 41, in assess" in shown and "an older one" not in shown
    assert f'formaction="{TASKS}"' in shown and 'name="action_on_all" value="reprocess"' in shown


def test_a_button_of_the_list_asks_and_then_acts_on_the_group(op: Client) -> None:
    other = make_task(Status.ERROR)
    asked = op.post(TASKS, {"action_on_all": "reprocess"}).content.decode()
    assert "1 task matches." in asked and 'name="select_across" value="1"' in asked
    op.post(TASKS, {"action": "reprocess", "select_across": "1", "confirm": "yes", "reason": "repaired"})
    while bulk.turn("default"):
        pass
    assert BulkOperation.objects.get().changed == 1
    assert Task.objects.get(pk=other.pk).status == Status.ERROR


def test_the_page_of_a_group_has_the_traceback(op: Client) -> None:
    assert "line 41, in assess" in op.get(f"{LIST}{PRINT}/change/").content.decode()


def test_danger_looks_like_danger_on_the_page_of_a_group_too(op: Client) -> None:
    page = op.get(f"{LIST}{PRINT}/change/").content.decode()
    assert re.search(r'value="delete" class="button dbtq-danger"', page)
    assert "runs failed tasks again" in page


def test_who_may_not_see_payloads_sees_no_traceback(django_user_model: Any) -> None:
    from django.contrib.auth.models import Permission

    user = django_user_model.objects.create_user("bo", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="view_failuregroup"))
    client = Client()
    client.force_login(user)
    for page in (LIST, f"{LIST}{PRINT}/change/"):
        shown = client.get(page).content.decode()
        assert "PlaneUnknown: N14228" in shown and "line 41, in assess" not in shown and "action_on_all" not in shown
