"""Batches in the admin, and what a task's page and ``explain`` say of its parents and children."""

import re
from html import unescape
from typing import Any

import pytest
from django.core.management.base import CommandError
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue import Workflow, batch, enqueue
from django_dbtaskqueue.core.context import set_inside, standbys
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import row_key
from django_dbtaskqueue.flow import move
from django_dbtaskqueue.flow.batches import counts_of
from django_dbtaskqueue.flow.dependencies import TaskKey
from django_dbtaskqueue.models import AuditEntry, Batch, Task
from django_dbtaskqueue.operations import related_tasks
from django_dbtaskqueue.operations.explain import explain
from tests.operations.site import ADMIN, ONLY_PARCELS, command, refused, text
from tests.operations.test_admin import confirm
from tests.support import with_settings

pytestmark = pytest.mark.django_db(transaction=True)
LIST = f"{ADMIN}batch/"
_settings = with_settings(QUEUES={"parcels": {"max_attempts": 1}, "letters": {}})


def page_of(client: Client, pk: int | str | None, kind: str = "batch") -> str:
    return text(client.get(f"{ADMIN}{kind}/{pk}/change/"))


def take() -> Lease:
    (lease,) = Task.objects.checkout("parcels", poller_instance="p")
    return lease


def act(client: Client, verb: str, pk: int | str | None) -> None:
    given = {"action": verb, "_selected_action": pk, "origin": "page"}
    for answers in ({}, {"confirm": "1"}):
        text(client.post(LIST, {**given, **answers}, follow=True))


def test_the_list_shows_how_far_each_batch_is(op: Client, django_assert_max_num_queries: Any) -> None:
    for n in range(5):
        with batch(f"import {n}"):
            enqueue("parcels")
    take().complete()
    with django_assert_max_num_queries(10):
        html = text(op.get(LIST))
    assert "import 4" in html and "1 of 1" in html and "0 of 1" in html


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_batches_of_two_databases_with_one_id_are_told_apart(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {"near": {}, "far": {"database": "sqlite"}}}
    ends = {name: Batch.objects.db_manager(alias) for name, alias in (("near", "default"), ("far", "sqlite"))}
    for name, rows in ends.items():
        row, one = rows.create(pk=7, name=name, queues=[name], total=1), enqueue(name)
        type(one).objects.using(rows.db).filter(pk=one.pk).update(batch=row.pk)
    move.change_statuses(Task.objects.all(), "cancel")
    assert counts_of([rows.get() for rows in ends.values()]) == [{"POISON": 1}, {"CREATED": 1}]
    assert all(f"/batch/{key}/change/" in text(op.get(LIST)) for key in ("7", "sqlite_3A7"))
    for row, row._state.db in zip([rows.get() for rows in ends.values()], ("a standby", "another"), strict=True):
        with set_inside(standbys, {"default": "a standby", "sqlite": "another"}):
            assert row_key(row) == {"near": "7", "far": "sqlite:7"}[row.name]
    assert "near" in page_of(op, 7) and "far" in text(op.get(f"{LIST}sqlite_3A7/change/", follow=True))
    refused("several batches: default:7, sqlite:7", command, "batches", "cancel", "7", error=CommandError)
    act(op, "cancel_batch", "sqlite:7")
    assert Task.objects.using("sqlite").get().status == "POISON"


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_pages_acts_and_batches_are_on_the_common_database_of_the_settings(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE |= {"DATABASE": "sqlite", "QUEUES": {"parcels": {}}}
    for alias in ("default", "sqlite"):
        Task.objects.using(alias).create(pk=7, queue="parcels", reference=f"on {alias}")
    assert "on sqlite" in text(op.get(f"{ADMIN}task/")) and "on sqlite" in page_of(op, 7, "task")
    confirm(op, "cancel", [Task.objects.using("sqlite").get()])
    statuses = [Task.objects.using(alias).get().status for alias in ("default", "sqlite")]
    with batch("import") as b:
        enqueue("parcels")
    assert (statuses, b.alias) == (["CREATED", "POISON"], "sqlite")


def test_the_page_draws_the_graph_and_lists_the_same(op: Client) -> None:
    flow = Workflow("nightly", on_complete="letters").add("a", "parcels", "the-first").add("b", "parcels", after="a")
    handle, tasks = flow.add("c", "letters", after=["a", "b"]).enqueue()
    html = page_of(op, handle.id)
    assert len(re.findall("<rect ", html)) == 4  # with the callback
    assert len(re.findall(r'<path d="M[\d.,]+ C', html)) == 4  # none from "a" and "b" to the callback: "c" is between
    for task in tasks.values():
        assert html.count(f"/task/{task.pk}/change/") >= 2  # in the graph and in the table
    assert "the-first" in html and "CREATED" in html


def test_a_batch_that_is_too_large_says_so(op: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(related_tasks, "MAX_TASKS_DRAWN", 2)
    with batch("large") as b:
        for _ in range(3):
            enqueue("parcels")
    html = page_of(op, b.id)
    assert "at most 2 tasks" in html and "<svg class" not in html


def test_a_large_workflow_has_names_shares_boxes_and_begins_with_what_failed(op: Client) -> None:
    flow = Workflow("import", on_complete="letters").add("fetch", "letters")
    shards = [f"shard {n:03}" for n in range(40)]
    for name in shards:
        flow.add(name, "parcels", f"r-{name}", after="fetch")
    handle, tasks = flow.add("merge", "letters", after=shards).enqueue()
    (fetch,) = Task.objects.checkout("letters", poller_instance="p")
    fetch.complete()
    for name in shards:
        take().fail("broken") if name in shards[7:9] else take().complete()
    with CaptureQueriesContext(connection) as asked:
        html = page_of(op, handle.id)
    assert max(one["sql"].count(",") for one in asked) < 40, "no statement names each task: 5,000 would take long"
    found = [unescape(name) for name in re.findall(r'<th scope="row"><a href="[^"]*">(.*?)</a>', html)]
    assert found[:3] == ["shard 007", "shard 008", "fetch"] and len(found) == 6
    assert found[3].startswith("38 ") and found[3].endswith(" shard …")
    assert found[4] == "merge", "the task at the end knows what else nobody waits for"
    assert html.count("<rect ") == 6 and len(re.findall(r"<path d=.M[\d.,]+ C", html)) == 7
    assert f"?q=batch%3A{handle.id}+queue%3Aparcels+status%3ACOMPLETED" in html
    assert f"/task/{tasks['shard 007'].pk}/change/" in html


def test_retry_and_cancel_all(op: Client) -> None:
    with batch("import") as b:
        enqueue("letters", after=enqueue("parcels"), on_parent_failure="cancel")
    take().fail("broken")
    for verb, status in (("retry_batch", "CREATED"), ("cancel_batch", "POISON")):
        act(op, verb, b.id)
        assert {row.status for row in Task.objects.all()} == {status}
    entries = AuditEntry.objects.order_by("pk").values_list("verb", "changed")
    assert list(entries) == [("retry_batch", 1), ("cancel_batch", 2)]


def test_a_hidden_queue_is_neither_shown_nor_touched(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE |= {"CAN_VIEW": ONLY_PARCELS}
    with batch("secret") as b:
        enqueue("parcels")
        enqueue("letters")
    assert "secret" not in text(op.get(LIST))
    assert op.get(f"{LIST}{b.id}/change/").status_code == 302 and Batch.objects.exists()
    Task.objects.all().delete()
    with batch("import") as b:
        stayed, moved = enqueue("parcels"), enqueue("parcels")
    Task.objects.filter(pk=moved.pk).update(queue="letters")  # it was moved
    act(op, "cancel_batch", b.id)
    assert dict(Task.objects.values_list("pk", "status")) == {stayed.pk: "POISON", moved.pk: "CREATED"}


STAR = [(0, n) for n in range(1, 4999)] + [(n, 4999) for n in range(1, 4999)]
CHAIN = {**dict.fromkeys(range(300), "COMPLETED"), 300: "ERROR"}
RANDOM = [(max(n - 1 - n * n % 37, 0), n) for n in range(1, 500)] + [(n // 2, n) for n in range(2, 500)]


@pytest.mark.parametrize(
    ("waits", "kinds", "statuses", "boxes"),
    [
        (STAR, {0: "fetch", 4999: "merge"}, dict.fromkeys(range(1, 3000), "ERROR"), 14),
        (STAR, {n: str(n) for n in range(5000)}, {}, 3),  # no two are of a kind
        ([(n // 3, n) for n in range(1, 5000)], {n: str(n % 3) for n in range(5000)}, {}, 9),
        ([(n, n + 1) for n in range(499)], {}, CHAIN, 3),
        ([(n, n + 1) for n in range(20)], {}, {}, 21),  # few
        (RANDOM, {n: str(n % 5) for n in range(500)}, dict.fromkeys(range(0, 500, 3), "COMPLETED"), 91),
    ],
)
def test_many_tasks_are_few_boxes_without_an_overlap(waits: Any, kinds: Any, statuses: Any, boxes: int) -> None:
    nodes = [
        related_tasks.Node(TaskKey("t", n), "q", statuses.get(n, "CREATED"), None, str(n), kinds.get(n, "shard"))
        for n in sorted({number for wait in waits for number in wait})
    ]
    graph = related_tasks.laid_out(nodes, [(TaskKey("t", above), TaskKey("t", below), True) for above, below in waits])
    assert len({(node.x, node.y) for node in graph.nodes}) == boxes == len(graph.nodes)
    assert all(above.y < node.y for node in graph.nodes for above in node.parents)
    assert max(node.x for node in graph.nodes) + related_tasks.NODE_WIDTH <= graph.width <= 1440
    assert max(node.y for node in graph.nodes) + related_tasks.NODE_HEIGHT <= graph.height
    assert sum(node.number for node in graph.nodes) == len(nodes)


def test_explain_names_the_parents_and_their_statuses() -> None:
    parent = enqueue("parcels")
    child = enqueue("letters", after=parent)
    assert explain(child).sentence == f"The task waits for task {parent.pk} (CREATED)."
    late = explain(enqueue("letters", after=[parent, *(enqueue("parcels") for _ in range(4))]))
    assert late.sentence.endswith("and 2 more.") and late.facts["number"] == 5
    take().poison("no")
    found = explain(child)
    assert found.code == "parents" and f"task {parent.pk} (POISON). A parent that failed" in found.sentence
    Task.objects.filter(pk=parent.pk).purge()
    assert "was deleted" in explain(child).sentence


def test_the_page_of_a_task_links_to_parents_and_children_but_not_of_hidden_queues(op: Client, settings: Any) -> None:
    parent = enqueue("letters", "the-parent")
    child = enqueue("parcels", "the-child", after={"source": parent})
    html = page_of(op, child.pk, "task")
    assert "Waits for" in html and "“source”" in html and f"/{parent.pk}/change/" in html
    html = page_of(op, parent.pk, "task")
    assert "Then runs" in html and "the-child" in html and f"/{child.pk}/change/" in html
    settings.DBTASKQUEUE |= {"CAN_VIEW": ONLY_PARCELS}
    html = page_of(op, child.pk, "task")
    assert str(parent.pk) in html and "the-parent" not in html and "source" not in html
