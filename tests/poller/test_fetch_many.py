"""A poller of many queues fetches and settles tasks of several queues together; each queue keeps its own rules."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from django.db.models import Max

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations import queue_control
from django_dbtaskqueue.poller.loop import Poller
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.poller.processes import counted_queries, let_others_start, polling
from tests.support import PATIENCE, until

QUEUES = [f"part-{number:02}" for number in range(40)]
EACH = 5


@pytest.fixture
def queues(settings: Any, taskqueue_registry: None) -> list[str]:
    """Forty queues, without processors yet."""
    settings.DBTASKQUEUE = {"QUEUES": {queue: {} for queue in QUEUES}}
    return QUEUES


def polled(*pollers: Poller) -> None:
    """Wait until pollers have polled all their queues once."""
    until(lambda: all(queue.idle_pause > 0 for poller in pollers for queue in poller.queues.values()))


def fill(queues: list[str], each: int = EACH) -> None:
    """Put tasks into paused queues, then resume all queues at once."""
    queue_control.pause(queues, by="test")
    for queue in queues:
        enqueue_many(queue, ({"payload": number} for number in range(each)))
    queue_control.resume(queues)


def completed() -> int:
    return int(Task.objects.filter(status="COMPLETED").count())


def test_tasks_of_many_queues_share_checkouts_and_settles(
    postgres_process_database: ProcessDatabase, queues: list[str]
) -> None:
    """Given three pollers and many queues, then each task runs once, and queues share checkouts and settles."""
    ran: list[int] = []
    for queue in queues:
        registry.register(queue, lambda task: ran.append(task.id))
    with ExitStack() as stack:
        pollers = [stack.enter_context(polling(dict.fromkeys(queues, 1))) for _ in range(3)]
        polled(*pollers)
        fill(queues)
        until(lambda: completed() == len(queues) * EACH)
    assert Counter(ran) == Counter(Task.objects.values_list("pk", flat=True))
    assert Task.objects.aggregate(most=Max("total_attempt")) == {"most": 1}
    batches = Task.objects.values_list("poller_instance", "start_time", "queue").distinct()
    assert len({row[:2] for row in batches}) < len(batches), "each queue had a checkout of its own"
    settles = Task.objects.values_list("poller_instance", "finish_time", "queue").distinct()
    assert len({row[:2] for row in settles}) < len(settles), "each queue had a settle of its own"


def test_each_queue_settles_by_its_own_rules(
    postgres_process_database: ProcessDatabase, settings: Any, taskqueue_registry: None
) -> None:
    """Given queues that delete, settle one by one, have groups, or fail, then no outcome affects another."""
    own: dict[str, dict[str, Any]] = {queue: {} for queue in ("grouped", "odd", "plain")}
    own |= {"gone": {"keep": "delete"}, "each": {"settle": "each"}, "failing": {"max_attempts": 1}}
    settings.DBTASKQUEUE = {"QUEUES": own}
    for queue in ("gone", "each", "grouped", "plain"):
        registry.register(queue, lambda task: None)
    registry.register("odd", lambda task: "a\0b" if task.payload else object())
    registry.register("failing", lambda task: 1 / 0)
    with polling(dict.fromkeys(own, 1)) as poller:
        polled(poller)
        queue_control.pause(list(own), by="test")
        for queue in own:
            group = "one" if queue == "grouped" else None
            enqueue_many(queue, ({"payload": number, "group": group} for number in range(3)))
        queue_control.resume(list(own))
        until(lambda: not Task.objects.filter(final_status=None).exists())
    ends = Counter(Task.objects.values_list("queue", "status"))
    fine = {(queue, "COMPLETED"): 3 for queue in ("each", "grouped", "odd", "plain")}
    assert ends == {**fine, ("failing", "ERROR"): 3}


def test_isolated_tasks_of_several_queues_run_alone_and_all_get_done(
    postgres_process_database: ProcessDatabase, queues: list[str]
) -> None:
    """Given tasks of dead processes in queues that share fetches, then each runs, and none is released for ever."""
    some = queues[:6]
    for queue in some:
        registry.register(queue, lambda task: None)
    with polling(dict.fromkeys(some, 1)) as poller:
        polled(poller)
        queue_control.pause(some, by="test")
        for queue in some:
            make_task(queue=queue, attempt=1, total_attempt=1, group_key="g" if queue == some[0] else None)
            enqueue(queue)
        queue_control.resume(some)
        until(lambda: completed() == 12)
    assert Task.objects.filter(attempt=2).count() == 6


def test_of_a_queue_without_timing_data_few_are_taken(
    postgres_process_database: ProcessDatabase, queues: list[str]
) -> None:
    """Given many fast tasks, and others that turn out to be slow, then at most two of the slow ones wait per queue."""
    go, slow = threading.Event(), queues[:3]
    registry.register("part-39", lambda task: None)
    for queue in slow:
        registry.register(queue, lambda task: go.wait(PATIENCE))
    with polling(dict.fromkeys([*slow, "part-39"], 1), threads=2) as poller:
        polled(poller)
        enqueue_many("part-39", ({"payload": number} for number in range(200)))
        until(lambda: completed() == 200)
        fill(slow, each=50)
        try:
            until(lambda: len(poller.running()) == 2)
            for _ in range(20):  # a poller that takes more does so at once
                held = Counter(lease.queue for lease in poller.settler.held.copy())
                assert max(held.values()) <= 4
                let_others_start()
        finally:
            go.set()
        until(lambda: completed() == 350)


def test_a_poller_that_begins_with_many_queues_shares_its_first_statements(
    postgres_process_database: ProcessDatabase, queues: list[str]
) -> None:
    """Given tasks in many queues, of which one has a group and one a parked task, then only these two are prepared."""
    for queue in queues:
        registry.register(queue, lambda task: None)
        enqueue(queue)
    grouped, parked = queues[:2]
    enqueue(grouped, group="a")
    make_task(queue=parked, parked_by="no handler", ready_time=None)
    with counted_queries() as said, polling(dict.fromkeys(queues, 1)):
        until(lambda: completed() == len(queues) + 2)
    prepared = [sql for sql in said if "group_key IS NOT NULL AND ready_time IS NOT NULL GROUP BY" in sql]
    assert 1 <= len(prepared) <= 2, "by the first fetch, and for the group"
    checkouts = [sql for sql in said if "attempt = attempt + 1" in sql]
    assert len(checkouts) < len(queues) / 2
