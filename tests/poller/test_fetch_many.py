"""A poller of many queues fetches and settles tasks of several queues together; each queue keeps its own rules."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Max

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.models import Poller as PollerRow, Task
from django_dbtaskqueue.operations import queue_control
from django_dbtaskqueue.poller.loop import BUSY_POLL_SECONDS, Poller
from django_dbtaskqueue.poller.queue_state import ConnectionSet, Options
from tests.factories import make_task
from tests.poller.processes import completed, counted_queries, let_others_start, polling
from tests.support import PATIENCE, held, sql, until

QUEUES = [f"part-{number:02}" for number in range(40)]
pytestmark = pytest.mark.usefixtures("postgres_process_database")


@pytest.fixture(autouse=True)
def _queues(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {queue: {} for queue in QUEUES}}
    for queue in QUEUES:
        registry.register(queue, lambda task: None)


def polled(*pollers: Poller) -> None:
    """Wait until pollers have polled all their queues once."""
    until(lambda: all(queue.idle_pause > 0 for poller in pollers for queue in poller.queues.values()))


@contextmanager
def at_once(queues: list[str]) -> Iterator[None]:
    """What is enqueued meanwhile can be taken at its end."""
    for queue in queues:
        queue_control.pause(queue, "default", by="test")
    yield
    with transaction.atomic():  # one after the other, each could be polled alone
        for queue in queues:
            queue_control.resume(queue, "default")


def test_tasks_of_many_queues_share_checkouts_and_settles() -> None:
    with ExitStack() as stack:
        polled(*[stack.enter_context(polling(dict.fromkeys(QUEUES, 1))) for _ in range(3)])
        with at_once(QUEUES):
            for queue in QUEUES:
                enqueue_many(queue, [{}] * 5)
        until(lambda: completed() == len(QUEUES) * 5)
    assert Task.objects.aggregate(most=Max("total_attempt")) == {"most": 1}
    for time in ("start_time", "finish_time"):
        batches = Task.objects.values_list("poller_instance", time, "queue").distinct()
        assert len({row[:2] for row in batches}) < len(batches), f"each queue had a {time} of its own"


def test_each_queue_settles_by_its_own_rules(settings: Any, taskqueue_registry: None) -> None:
    own: dict[str, dict[str, Any]] = {queue: {} for queue in ("grouped", "odd", "plain")}
    own |= {"gone": {"keep": "delete"}, "each": {"settle": "each"}}
    own |= {queue: {"max_attempts": 1} for queue in ("odd", "failing")}
    settings.DBTASKQUEUE = {"QUEUES": own}
    for queue in ("gone", "each", "grouped", "plain"):
        registry.register(queue, lambda task: None)
    registry.register("odd", lambda task: "a\0b" if task.payload else object())
    registry.register("failing", lambda task: 1 / 0)
    with polling(dict.fromkeys(own, 1)) as poller:
        polled(poller)
        for _ in range(8):  # not in each round are all of them settled together
            with at_once(list(own)):
                for queue in own:
                    group = "one" if queue == "grouped" else None
                    enqueue_many(queue, ({"payload": number, "group": group} for number in range(3)))
            until(lambda: not Task.objects.filter(final_status=None).exists())
    ends = {**dict.fromkeys(("each", "grouped", "plain"), "COMPLETED"), "odd": "ERROR", "failing": "ERROR"}
    assert Counter(Task.objects.values_list("queue", "status")) == dict.fromkeys(ends.items(), 24)


def test_a_shared_checkout_leaves_other_tags_to_others() -> None:
    with polling(dict.fromkeys(QUEUES, 1), tags=("large",)) as poller:
        polled(poller)
        with at_once(QUEUES):
            for queue in QUEUES:
                enqueue_many(queue, ({"tag": tag} for tag in ("large", "small", None)))
        until(lambda: completed() >= 80)
    counts = Counter(Task.objects.values_list("tag", "status"))
    assert counts == {("large", "COMPLETED"): 40, (None, "COMPLETED"): 40, ("small", "CREATED"): 40}
    assert Task.objects.filter(tag="large").values("start_time").distinct().count() < 40, "each queue was asked alone"


def test_isolated_tasks_of_several_queues_run_alone_and_all_get_done() -> None:
    some = QUEUES[:6]
    with polling(dict.fromkeys(some, 1)) as poller:
        polled(poller)
        with at_once(some):
            for queue in some:
                make_task(queue=queue, attempt=1, total_attempt=1, group_key="g" if queue == some[0] else None)
                enqueue(queue)
        until(lambda: completed() == 12)
    assert Task.objects.filter(attempt=2).count() == 6


def test_of_a_queue_without_timing_data_few_are_taken() -> None:
    """Given many fast tasks, and others that turn out to be slow, then at most two of the slow ones wait per queue."""
    go, slow, fast = threading.Event(), QUEUES[:3], QUEUES[-1]
    for queue in slow:
        registry.unregister(queue)
        registry.register(queue, lambda task: go.wait(PATIENCE))
    with polling(dict.fromkeys([*slow, fast], 1), threads=2) as poller:
        polled(poller)
        enqueue_many(fast, [{}] * 200)
        until(lambda: completed() == 200)
        with at_once(slow):
            for queue in slow:
                enqueue_many(queue, [{}] * 50)
        try:
            until(lambda: len(poller.running()) == 2)
            for _ in range(20):  # a poller that takes more does so at once
                assert max(Counter(lease.queue for lease in poller.settler.held.copy()).values()) <= 4
                let_others_start()
        finally:
            go.set()
        until(lambda: completed() == 350)


def test_a_poller_that_begins_with_many_queues_shares_its_first_statements() -> None:
    """Of its queues one has a group and one a parked task: only these two are prepared."""
    for queue in QUEUES:
        enqueue(queue)
    enqueue(QUEUES[0], group="a")
    make_task(queue=QUEUES[1], parked_by="no handler", ready_time=None)
    with counted_queries() as said, polling(dict.fromkeys(QUEUES, 1)):
        until(lambda: completed() == len(QUEUES) + 2)
    prepared = [sql for sql in said if "group_key IS NOT NULL" in sql and "GROUP BY group_key" in sql]
    assert 1 <= len(prepared) <= 2, "by the first fetch, and for the group"
    assert len([sql for sql in said if "attempt = attempt + 1" in sql]) < len(QUEUES) / 2


def chosen_by_a_second_thread(poller: Poller) -> list[str]:
    """Return the queues that are chosen, if a slot is free: the poller's own threads choose, too."""
    with poller.fetcher._lock:
        for queue in poller.queues.values():
            queue.next_poll = 0.0
        queues, number = poller.fetcher.choose(alone=True) or ([], 0)
        poller.fetcher.reserve(queues, -number)
    return [queue.name for queue in queues]


def test_the_second_thread_leaves_a_queue_alone_while_many_pollers_serve_it(settings: Any) -> None:
    """And each of them scans the whole queue less often than one alone, and tells where it ended if that is cheap."""
    settings.DBTASKQUEUE |= {"HEARTBEAT": "1s"}
    own, shared = QUEUES[:2]
    with polling({own: 1, shared: 1}) as poller:
        with polling({shared: 2}, siblings=3) as many, polling({shared: 1}):
            until(lambda: poller.queues[shared].cursor.others == 2)
            assert poller.queues[own].cursor.others == 0
            until(lambda: many.queues[shared].cursor.others == 3)  # its supervisor may still start them
            assert many.poll(ConnectionSet(), second=True) == BUSY_POLL_SECONDS, "it rests"
            chosen: list[str] = []
            until(lambda: chosen.extend(chosen_by_a_second_thread(poller)) or chosen)
            assert set(chosen) == {own} and poller.queues[shared].cursor.shares
            with held(lambda: sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1")):
                for _ in range(400):  # three rows of pollers, whose old versions the snapshot pins
                    PollerRow.objects.update(version="1")
                until(lambda: PollerRow.objects.update(version="1") and not poller.queues[shared].cursor.shares)
        until(lambda: poller.queues[shared].cursor.others == 0)


def test_with_once_two_threads_take_one_turn_of_a_queue(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUES[0]: {"batch_size": 1}}}  # slots stay free
    poller = Poller({QUEUES[0]: 1}, Options(once=True))
    first, second = poller.fetcher.choose(), poller.fetcher.choose(alone=True)
    poller.close()
    assert first is not None and [queue.name for queue in first[0]] == QUEUES[:1]
    assert second is None
