"""Settings changed while running, through the queue's row; and workers resized from and to nothing."""

import asyncio
import threading
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Poller, Queue, Task
from django_dbtaskqueue.poller.loop import Poller as Loop
from django_dbtaskqueue.poller.queue_state import Options
from tests.clock import SteppedClock
from tests.poller.processes import Held, completed, let_others_start, polling
from tests.support import PATIENCE, until, with_settings

pytestmark = pytest.mark.usefixtures("process_database")
_settings = with_settings("taskqueue_registry", HEARTBEAT="100ms", QUEUES={"sized": {}})


def override(**values: Any) -> None:
    Queue.objects.update_or_create(name="sized", defaults={"overrides": values})


def test_each_poller_applies_an_override_within_a_heartbeat_and_shows_the_difference(caplog: Any) -> None:
    caplog.set_level("INFO")
    registry.register("sized", lambda task: None)
    with polling({"sized": 1}) as poller:
        queue = poller.queues["sized"]
        override(lease="PT15M", batch_size=7)
        until(lambda: queue.settings.lease == timedelta(minutes=15))
        until(lambda: "sized: lease=15m<1m" in Poller.objects.get(pk=poller.instance).applied_settings)
        assert "Queue sized: lease=15m<1m batch_size=7<500" in caplog.text
        # It serves late priorities first from now on
        override(lease="PT15M", max_wait="PT1M")
        until(lambda: queue.cursor.max_wait == timedelta(minutes=1))
        override(leese="PT1M")
        until(lambda: "has no setting 'leese'. Did you mean 'lease'?" in caplog.text)
        assert queue.settings.lease == timedelta(minutes=15)
        Queue.objects.all().delete()
        until(lambda: queue.settings.lease == timedelta(minutes=1))


def test_an_override_of_the_retry_policy_is_in_force_from_the_first_task() -> None:
    registry.register("sized", lambda task: 1 / 0, retry="fixed:0s")
    override(retry="fixed:1h")
    enqueue("sized")
    with polling({"sized": 1}):
        until(Task.objects.filter(status="CREATED", attempt__gt=0).exists)
    task = Task.objects.get()
    assert task.total_attempt == 1 and task.next_process_time - task.create_time > timedelta(minutes=20)


def test_workers_grow_from_nothing_and_shrink_to_nothing_without_losing_a_running_task() -> None:
    registry.register("sized", held := Held())
    override(concurrency=0)
    enqueue_many("sized", [{}] * 6)
    with polling({"sized": 1}, threads=4) as poller:
        queue = poller.queues["sized"]
        assert queue.settings.concurrency == 0
        override(concurrency=2)
        held.until_started(2)
        for _ in range(20):  # a poller that takes more does so at once
            let_others_start()
        # What runs is not interrupted, and nothing new starts
        override(concurrency=0)
        until(lambda: queue.settings.concurrency == 0)
        held.go_on.set()
        assert not held.started.acquire(blocking=False), "more than two have started"
        until(lambda: completed() == 2)
        assert not held.started.acquire(blocking=False)
        override()
        until(lambda: completed() == 6)
    assert set(Task.objects.values_list("total_attempt", flat=True)) == {1}


def test_four_equal_pollers_share_the_work(clock: SteppedClock) -> None:
    hands: list[str] = []
    clock.stop()
    together = threading.Barrier(8, action=lambda: clock.advance(0.02))  # so each task takes as long as any other

    def work(task: Lease) -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait()
        hands.append(task.poller_instance)

    registry.register("sized", work)
    waiting = Task.objects.filter(status="CREATED")
    with ExitStack() as stack:
        pollers = [stack.enter_context(polling({"sized": 1}, threads=2)) for _ in range(4)]
        enqueue_many("sized", [{}] * 1200)
        until(lambda: not waiting.exists())
        together.abort()
        until(lambda: clock.advance(0.02) or len(hands) == 1200)
    shares = [hands.count(poller.instance) for poller in pollers]
    assert max(shares) / min(shares) <= 2, shares


def test_a_shutdown_can_be_awaited_and_says_what_is_still_alive() -> None:
    registry.register("sized", held := Held())
    enqueue("sized", "slow")
    poller = Loop({"sized": 1}, Options(threads=1))
    poller.start()
    held.until_started()
    assert [lease.reference for lease in asyncio.run(poller.shutdown(timedelta(milliseconds=50)))] == ["slow"]
    held.go_on.set()
    assert asyncio.run(poller.shutdown(timedelta(seconds=PATIENCE))) == []
    assert (poller.state, Task.objects.get().status) == ("STOPPED", "COMPLETED")


def test_a_queue_can_start_paused_and_is_resumed_once(settings: Any) -> None:
    settings.DBTASKQUEUE = {"HEARTBEAT": "100ms", "QUEUES": {"sized": {"paused": True, "poll_interval": "50ms"}}}
    registry.register("sized", lambda task: None)
    enqueue("sized")
    with polling({"sized": 1}):
        until(Queue.objects.filter(pk="sized", paused_by="settings", paused_time__isnull=False).exists)
        assert Task.objects.get().attempt == 0
        Queue.objects.filter(pk="sized").update(paused_time=None, paused_by="")
        until(lambda: completed() == 1)
    # It stays so when another poller starts
    enqueue("sized")
    with polling({"sized": 1}):
        until(lambda: completed() == 2)
