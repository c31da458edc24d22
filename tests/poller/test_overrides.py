"""Settings changed while running, through the queue's row; and workers resized from and to nothing."""

from __future__ import annotations

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
from tests.conftest import ProcessDatabase
from tests.poller.processes import polling
from tests.support import PATIENCE, until


@pytest.fixture
def quick(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"HEARTBEAT": "100ms", "QUEUES": {"sized": {}}}


def override(**values: Any) -> None:
    Queue.objects.update_or_create(name="sized", defaults={"overrides": values})


def test_each_poller_applies_an_override_within_a_heartbeat_and_shows_the_difference(
    process_database: ProcessDatabase, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    registry.register("sized", lambda task: None)
    with polling({"sized": 1}) as poller:
        override(lease="PT15M", batch_size=7)
        until(lambda: poller.queues["sized"].settings.lease == timedelta(minutes=15))
        until(lambda: "sized: lease=15m<1m" in Poller.objects.get(pk=poller.instance).applied_settings)
        assert "Queue sized: lease=15m<1m batch_size=7<500" in caplog.text
        # It serves late priorities first from now on
        override(lease="PT15M", max_wait="PT1M")
        until(lambda: poller.queues["sized"].cursor.max_wait == timedelta(minutes=1))
        # A bad override is said and changes nothing
        override(leese="PT1M")
        until(lambda: "has no setting 'leese'. Did you mean 'lease'?" in caplog.text)
        assert poller.queues["sized"].settings.lease == timedelta(minutes=15)
        # Without the row all is as before
        Queue.objects.all().delete()
        until(lambda: poller.queues["sized"].settings.lease == timedelta(minutes=1))


def test_workers_grow_from_nothing_and_shrink_to_nothing_without_losing_a_running_task(
    process_database: ProcessDatabase, quick: None
) -> None:
    started: list[int] = []
    go = threading.Event()

    def work(task: Lease) -> None:
        started.append(task.id)
        assert go.wait(PATIENCE)

    registry.register("sized", work)
    override(concurrency=0)
    enqueue_many("sized", ({"reference": str(n)} for n in range(6)))
    with polling({"sized": 1}, threads=4) as poller:
        # Given a poller resized to nothing: it takes nothing
        until(lambda: poller.queues["sized"].settings.concurrency == 0)
        assert Task.objects.filter(status="CREATED").count() + len(started) == 6
        before = len(started)
        # When it grows, it runs at once, and no more than that
        override(concurrency=2)
        until(lambda: len(started) == before + 2)
        # When it shrinks to nothing again, what runs is not interrupted, and nothing new starts
        override(concurrency=0)
        until(lambda: poller.queues["sized"].settings.concurrency == 0)
        go.set()
        until(lambda: Task.objects.filter(status="COMPLETED").count() == before + 2)
        assert len(started) == before + 2
        # And all is done in the end
        override()
        until(lambda: Task.objects.filter(status="COMPLETED").count() == 6)
    assert len(started) == len(set(started)) == 6


def test_four_equal_pollers_share_the_work(process_database: ProcessDatabase, quick: None, clock: SteppedClock) -> None:
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
        enqueue_many("sized", ({"reference": str(n)} for n in range(1200)))
        until(lambda: not waiting.exists())
        together.abort()
        until(lambda: clock.advance(0.02) or len(hands) == 1200)
    shares = [hands.count(poller.instance) for poller in pollers]
    assert max(shares) / min(shares) <= 2, shares


def test_a_shutdown_can_be_awaited_and_says_what_is_still_alive(process_database: ProcessDatabase, quick: None) -> None:
    started, go = threading.Event(), threading.Event()

    def work(task: Lease) -> None:
        started.set()
        assert go.wait(PATIENCE)

    registry.register("sized", work)
    enqueue("sized", "slow")
    poller = Loop({"sized": 1}, Options(threads=1))
    poller.start()
    assert started.wait(PATIENCE)
    # When the task outlives the bound, it is named; when it has ended, nothing is left
    alive = asyncio.run(poller.shutdown(timedelta(milliseconds=50)))
    assert [lease.reference for lease in alive] == ["slow"]
    go.set()
    assert asyncio.run(poller.shutdown(timedelta(seconds=PATIENCE))) == []
    assert poller.state == "STOPPED"
    assert Task.objects.get().status == "COMPLETED"


def test_a_queue_can_start_paused_and_is_resumed_once(
    process_database: ProcessDatabase, quick: None, settings: Any
) -> None:
    settings.DBTASKQUEUE = {"HEARTBEAT": "100ms", "QUEUES": {"sized": {"paused": True, "poll_interval": "50ms"}}}
    done: list[int] = []
    registry.register("sized", lambda task: done.append(task.id))
    enqueue("sized", "1")
    with polling({"sized": 1}):
        until(lambda: Queue.objects.filter(pk="sized", paused_by="settings", paused_time__isnull=False).exists())
        assert not done
        Queue.objects.filter(pk="sized").update(paused_time=None, paused_by="")
        until(lambda: done)
    # Given it was resumed, when another poller starts, then it stays so
    enqueue("sized", "2")
    with polling({"sized": 1}):
        until(lambda: len(done) == 2)
