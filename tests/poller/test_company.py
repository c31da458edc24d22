"""A poller of many queues: what several have waiting is taken and settled together, and each keeps its own rules."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
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
from tests.poller.processes import polling
from tests.support import until

QUEUES = [f"part-{number:02}" for number in range(40)]
EACH = 5


@pytest.fixture
def queues(settings: Any) -> Iterator[list[str]]:
    """Forty queues, without processors yet."""
    settings.DBTASKQUEUE = {"QUEUES": {queue: {} for queue in QUEUES}}
    before = registry.snapshot()
    yield QUEUES
    registry.restore(before)


def looked(*pollers: Poller) -> None:
    """Wait until pollers have looked into all their queues once."""
    until(lambda: all(lane.idle > 0 for poller in pollers for lane in poller.lanes.values()), timeout=60)


def fill(queues: list[str], each: int = EACH) -> None:
    """Put tasks into queues, and let them be taken all at once."""
    queue_control.pause(queues, by="test")
    for queue in queues:
        enqueue_many(queue, ({"payload": number} for number in range(each)))
    queue_control.resume(queues)


def completed() -> int:
    return int(Task.objects.filter(status="COMPLETED").count())


def test_tasks_of_many_queues_share_checkouts_and_settles(
    postgres_process_database: ProcessDatabase, queues: list[str]
) -> None:
    """Three pollers, many queues: each task runs once, and a batch is no longer than a queue needs one of its own."""
    ran: list[int] = []
    for queue in queues:
        registry.register(queue, lambda task: ran.append(task.id))
    with ExitStack() as stack:
        pollers = [stack.enter_context(polling(dict.fromkeys(queues, 1))) for _ in range(3)]
        looked(*pollers)
        fill(queues)
        until(lambda: completed() == len(queues) * EACH, timeout=60)
    assert Counter(ran) == Counter(Task.objects.values_list("pk", flat=True))
    assert Task.objects.aggregate(most=Max("total_attempt")) == {"most": 1}
    batches = Task.objects.values_list("poller_instance", "start_time", "queue").distinct()
    assert len({row[:2] for row in batches}) < len(batches), "each queue had a checkout of its own"
    settles = Task.objects.values_list("poller_instance", "finish_time", "queue").distinct()
    assert len({row[:2] for row in settles}) < len(settles), "each queue had a settle of its own"


def test_each_queue_keeps_its_own_way_out(postgres_process_database: ProcessDatabase, settings: Any) -> None:
    """Deleted, kept one by one, in a group, unable to be stored, lost: nobody's outcome is another's."""
    own = {
        "gone": {"keep": "delete"},
        "each": {"settle": "each"},
        "grouped": {},
        "odd": {},
        "plain": {},
        "failing": {"max_attempts": 1},
    }
    settings.DBTASKQUEUE = {"QUEUES": own}
    before = registry.snapshot()
    for queue in ("gone", "each", "grouped", "plain"):
        registry.register(queue, lambda task: None)
    registry.register("odd", lambda task: "a\0b" if task.payload else object())
    registry.register("failing", lambda task: 1 / 0)
    try:
        with polling(dict.fromkeys(own, 1)) as poller:
            looked(poller)
            queue_control.pause(list(own), by="test")
            for queue in own:
                group = "one" if queue == "grouped" else None
                enqueue_many(queue, ({"payload": number, "group": group} for number in range(3)))
            queue_control.resume(list(own))
            until(lambda: not Task.objects.filter(final_status=None).exists(), timeout=60)
    finally:
        registry.restore(before)
    ends = Counter(Task.objects.values_list("queue", "status"))
    fine = {(queue, "COMPLETED"): 3 for queue in ("each", "grouped", "odd", "plain")}
    assert ends == {**fine, ("failing", "ERROR"): 3}


def test_suspects_of_several_queues_run_alone_and_all_get_done(
    postgres_process_database: ProcessDatabase, queues: list[str]
) -> None:
    """Given tasks whose process died, in queues that are taken together, then none is passed to and fro for ever."""
    some = queues[:6]
    for queue in some:
        registry.register(queue, lambda task: None)
    with polling(dict.fromkeys(some, 1)) as poller:
        looked(poller)
        queue_control.pause(some, by="test")
        for queue in some:
            make_task(queue=queue, attempt=1, total_attempt=1, group_key="g" if queue == some[0] else None)
            enqueue(queue)
        queue_control.resume(some)
        until(lambda: completed() == 12, timeout=60)
    assert Task.objects.filter(attempt=2).count() == 6


def test_of_a_queue_nobody_knows_yet_few_are_taken(
    postgres_process_database: ProcessDatabase, queues: list[str]
) -> None:
    """Given many quick tasks, and others that turn out to be slow, then hardly any of those wait in memory."""
    go, slow = threading.Event(), queues[:3]
    registry.register("part-39", lambda task: None)
    for queue in slow:
        registry.register(queue, lambda task: go.wait(60))
    with polling(dict.fromkeys([*slow, "part-39"], 1), threads=2) as poller:
        looked(poller)
        enqueue_many("part-39", ({"payload": number} for number in range(200)))
        until(lambda: completed() == 200, timeout=60)
        fill(slow, each=50)
        try:
            until(lambda: len(poller.running()) == 2)
            for _ in range(20):  # whoever took more would do so at once
                held = Counter(lease.queue for lease in poller.settler.held.copy())
                assert max(held.values()) <= 4
                threading.Event().wait(0.02)
        finally:
            go.set()
        until(lambda: completed() == 350, timeout=60)
