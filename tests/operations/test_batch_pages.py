"""Batches in the admin: the list, the page with its graph, and the two verbs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from django_dbtaskqueue import Workflow, batch, enqueue, queue
from django_dbtaskqueue.core.states import ERROR
from django_dbtaskqueue.flow.dependencies import TaskKey
from django_dbtaskqueue.models import AuditEntry, Batch, Task
from django_dbtaskqueue.operations import task_graph

pytestmark = pytest.mark.django_db(transaction=True)
LIST = "admin:dbtaskqueue_batch_changelist"


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"max_attempts": 1}, "letters": {}}}


def page_of(pk: int | None) -> str:
    return reverse("admin:dbtaskqueue_batch_change", args=[pk])


def act(client: Client, verb: str, pk: int | None) -> Any:
    given = {"action": verb, "_selected_action": pk, "origin": "page"}
    asked = client.post(reverse(LIST), given)
    assert asked.status_code == 200, asked
    return client.post(reverse(LIST), {**given, "confirm": "1", "confirmed": "1", "post": "yes"}, follow=True)


def test_the_list_shows_how_far_each_batch_is(admin_client: Client, django_assert_max_num_queries: Any) -> None:
    for n in range(5):
        with batch(f"import {n}"):
            enqueue("parcels")
    lease = queue("parcels").take()
    assert lease is not None
    lease.complete()
    with django_assert_max_num_queries(10):
        html = admin_client.get(reverse(LIST)).content.decode()
    assert "import 4" in html and "1 of 1" in html and "0 of 1" in html


def test_the_page_draws_the_graph_and_lists_the_same(admin_client: Client) -> None:
    flow = Workflow("nightly", on_complete="letters").add("a", "parcels", "the-first").add("b", "parcels", after="a")
    handle, tasks = flow.add("c", "letters", after=["a", "b"]).enqueue()
    html = admin_client.get(page_of(handle.id)).content.decode()
    assert len(re.findall("<rect ", html)) == 4  # with the callback
    assert len(re.findall(r'<path d="M[\d.,]+ C', html)) == 4  # none from "a" and "b" to the callback: "c" is between
    for task in tasks.values():
        assert html.count(f"/task/{task.pk}/change/") >= 2  # in the graph and in the table
    assert "the-first" in html and "CREATED" in html


def test_a_batch_that_is_too_large_says_so(admin_client: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(task_graph, "MAX_NODES_DRAWN", 2)
    with batch("large") as b:
        for _ in range(3):
            enqueue("parcels")
    html = admin_client.get(page_of(b.id)).content.decode()
    assert "at most 2 tasks" in html and "<svg class" not in html


def test_a_batch_of_one_task_is_told_in_the_singular_and_an_empty_one_without_a_table(admin_client: Client) -> None:
    with batch("small") as b:
        enqueue("parcels")
    asked = admin_client.post(reverse(LIST), {"action": "cancel_batch", "_selected_action": b.id, "origin": "page"})
    assert "1 task is in the batch." in asked.content.decode()
    with batch("empty") as none:
        pass
    html = admin_client.get(page_of(none.id)).content.decode()
    assert "dbtq-table" not in html


def test_retry_and_cancel_all(admin_client: Client) -> None:
    with batch("import") as b:
        parent = enqueue("parcels")
        child = enqueue("letters", after=parent, on_parent_failure="cancel")
    lease = queue("parcels").take()
    assert lease is not None
    lease.fail("broken")
    assert Task.objects.get(pk=parent.pk).status == ERROR
    act(admin_client, "retry_batch", b.id)
    assert {row.status for row in Task.objects.all()} == {"CREATED"}
    assert Task.objects.get(pk=child.pk).parked_by == "parents"
    act(admin_client, "cancel_batch", b.id)
    assert {row.status for row in Task.objects.all()} == {"POISON"}
    assert list(AuditEntry.objects.order_by("pk").values_list("verb", "changed")) == [
        ("retry_batch", 1), ("cancel_batch", 2),
    ]  # fmt: skip


def test_a_batch_of_a_hidden_queue_is_not_shown(admin_client: Client, settings: Any) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "CAN_VIEW": "tests.operations.test_batch_pages.sees_letters"}
    with batch("secret") as b:
        enqueue("parcels")
        enqueue("letters")
    assert "secret" not in admin_client.get(reverse(LIST)).content.decode()
    assert admin_client.get(page_of(b.id)).status_code == 302
    assert Batch.objects.exists()


def sees_letters(user: Any, name: str) -> bool:
    return name == "letters"


def test_500_tasks_are_laid_out_without_an_overlap() -> None:
    keys = [TaskKey("t", n) for n in range(500)]
    waits = [(keys[n // 3], keys[n], True) for n in range(1, 500)]
    graph = task_graph.laid_out([task_graph.Node(key, "", "", "", "CREATED") for key in keys], waits)
    places = {(node.x, node.y) for node in graph.nodes}
    assert len(places) == 500
    by_key = {node.key: node for node in graph.nodes}
    assert all(by_key[parent].y < by_key[child].y for parent, child, _open in waits)
    assert max(node.x for node in graph.nodes) + task_graph.NODE_WIDTH <= graph.width <= 2000
    assert max(node.y for node in graph.nodes) + task_graph.NODE_HEIGHT <= graph.height
