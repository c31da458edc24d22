"""``take(group=…)``: from one group of a queue, in its order, under the same fence, by an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import LeaseLost, TaskQueueError, enqueue_many, queue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.pull.handle import QueueHandle
from tests.conftest import ProcessDatabase
from tests.factories import age
from tests.pull.conftest import Told
from tests.support import at_once

HOUR = timedelta(hours=1)


def of_group(handle: QueueHandle, group: str) -> Lease:
    """Take from a group that has a ready task."""
    task = handle.take(group=group)
    assert task is not None and task.group == group
    return task


def test_only_its_tasks_are_taken_in_order_and_one_at_a_time(mail: QueueHandle) -> None:
    mail.put(reference="free")
    for reference in ("a1", "b1", "a2", "b2"):
        mail.put(reference=reference, group=reference[0])
    head = of_group(mail, "b")
    assert head.reference == "b1" and mail.take(group="b") is None, "its next task waits behind it"
    assert of_group(mail, "a").reference == "a1"
    mail.ack(head)
    assert of_group(mail, "b").reference == "b2"
    assert mail.take(group="c") is None
    rest = mail.take()
    assert rest is not None and rest.reference == "free" and mail.take() is None
    # Priority goes before age
    mail.put(reference="late", group="d", priority=5)
    mail.put(reference="soon", group="d", priority=1)
    assert of_group(mail, "d").reference == "soon"


def test_a_lease_that_ran_out_is_taken_over_and_its_holder_fenced_off(mail: QueueHandle, told: Told) -> None:
    task = mail.put(group="a")
    late = of_group(mail, "a")
    age(HOUR)
    newer = of_group(mail, "a")
    assert newer.total_attempt == late.total_attempt + 1
    with pytest.raises(LeaseLost):
        mail.ack(late)
    mail.ack(newer)
    calls = [call for _, call, _ in told]
    assert calls == ["put", "take", "lease_expired", "take", "ack"]
    assert Task.objects.get(pk=task.pk).status == "COMPLETED"


def test_tags_pauses_and_due_times_hold(mail: QueueHandle) -> None:
    mail.put(group="tagged", tag="eu")
    mail.put(group="later", delay=HOUR)
    mail.put(group="a")
    assert mail.take(group="tagged") is None and mail.take(group="later") is None
    assert queue("mail", tags=["eu"]).take(group="tagged") is not None
    Queue.objects.create(name="mail", paused_time="2000-01-01T00:00:00Z")
    assert mail.take(group="a") is None


def test_one_of_many_consumers_gets_the_task(mail: QueueHandle) -> None:
    task = mail.put(group="a")
    taken = [lease.id for lease in at_once(4, lambda _: mail.take(group="a")) if lease is not None]
    assert taken == [task.pk]


def test_what_cannot_be_a_group_is_refused(mail: QueueHandle) -> None:
    mail.put()
    for wrong in (7, "", "a\0b", "x" * 201):
        with pytest.raises(TaskQueueError, match="group="):
            mail.take(group=wrong)  # type: ignore[arg-type]


def test_it_is_found_by_the_index_of_groups(mail: QueueHandle, process_database: ProcessDatabase) -> None:
    """Given 3,000 ready tasks of other groups, then one index with the group in it is read, and no other task."""
    enqueue_many("mail", ({"group": f"g{number}"} for number in range(3000)))
    session = Session.on("default")
    params = {"queue_name": "mail", "group": "g2999", "tags": session.sql.dialect.array([]), "limit": 1}
    assert len(session.run(session.sql.first_ready_of_group, params)) == 1
    if session.postgresql:
        for statistics in ("", "ANALYZE dbtaskqueue_task"):  # those of an empty table at first
            if statistics:
                session.run(statistics, {})
            (plan,) = session.run(f"EXPLAIN (ANALYZE, FORMAT JSON) {session.sql.first_ready_of_group}", params)[0]
            nodes = list(nodes_of((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))
            names = [node.get("Index Name", "") for node in nodes]
            assert [name for name in names if name.startswith("dbtaskqueue_task")] == ["dbtaskqueue_task_lead"]
            read = [node for node in nodes if node.get("Relation Name") == "dbtaskqueue_task"]
            assert [(node["Actual Rows"], node.get("Rows Removed by Filter", 0)) for node in read] == [(1, 0)]
    else:
        steps = [row[3] for row in session.run(f"EXPLAIN QUERY PLAN {session.sql.first_ready_of_group}", params)]
        (step,) = [step for step in steps if "dbtaskqueue_task" in step]
        assert "queue_name=? AND group_key=?" in step


def nodes_of(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a plan."""
    yield node
    for child in node.get("Plans", []):
        yield from nodes_of(child)
