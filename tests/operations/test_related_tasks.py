"""What the page of a task and ``explain`` say of the tasks that it waits for, and of those that wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from django_dbtaskqueue import enqueue, queue
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.explain import explain

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}, "letters": {}}}


def fail_first() -> None:
    lease = queue("parcels").take()
    assert lease is not None
    lease.poison("no")


def test_explain_names_the_parents_and_their_statuses() -> None:
    parent = enqueue("parcels")
    child = enqueue("letters", after=parent)
    assert explain(child).sentence == f"The task waits for task {parent.pk} (CREATED)."
    others = [enqueue("parcels") for _ in range(4)]
    late = explain(enqueue("letters", after=[parent, *others]))
    assert late.sentence.endswith("and 2 more.")
    assert late.facts["number"] == 5
    fail_first()
    found = explain(child)
    assert found.code == "parents"
    assert found.sentence.startswith(f"The task waits for task {parent.pk} (POISON). A parent that failed")


def test_explain_says_what_to_do_when_the_parent_was_deleted() -> None:
    parent = enqueue("parcels")
    child = enqueue("letters", after=parent)
    Task.objects.filter(pk=parent.pk).purge()
    assert "was deleted" in explain(child).sentence


def test_the_page_of_a_task_links_to_parents_and_children(admin_client: Client) -> None:
    parent = enqueue("parcels", "the-parent")
    child = enqueue("letters", "the-child", after={"source": parent})
    page = reverse("admin:dbtaskqueue_task_change", args=[child.pk])
    html = admin_client.get(page).content.decode()
    assert "Waits for" in html and "“source”" in html and f"/{parent.pk}/change/" in html
    html = admin_client.get(reverse("admin:dbtaskqueue_task_change", args=[parent.pk])).content.decode()
    assert "Then runs" in html and "the-child" in html and f"/{child.pk}/change/" in html


def test_a_parent_of_a_hidden_queue_shows_no_more_than_its_id(admin_client: Client, settings: Any) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "CAN_VIEW": "tests.operations.test_related_tasks.sees_letters"}
    parent = enqueue("parcels", "a-secret")
    child = enqueue("letters", after={"hidden-name": parent})
    html = admin_client.get(reverse("admin:dbtaskqueue_task_change", args=[child.pk])).content.decode()
    assert str(parent.pk) in html and "a-secret" not in html and "hidden-name" not in html


def sees_letters(user: Any, name: str) -> bool:
    return name == "letters"
