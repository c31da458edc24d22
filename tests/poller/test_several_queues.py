"""Runs that end by themselves, over several queues that feed each other, and with operators' overrides."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from django_dbtaskqueue import Fixed, chain, enqueue, processor, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.support import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])


@pytest.fixture(autouse=True)
def _registrations() -> Iterator[None]:
    saved = registry.snapshot()
    yield
    registry.restore(saved)


@pytest.mark.parametrize("alias", ["default", "sqlite"])
@pytest.mark.parametrize("feeds", ["enqueues", "is the parent"])
def test_a_draining_run_takes_what_one_queue_brings_to_another(alias: str, feeds: str) -> None:
    """Given three queues of which each feeds the next, when those were found empty first, then the run takes all."""
    go = threading.Event()

    def process(task: Lease) -> None:
        go.wait(PATIENCE)
        following = {"first": "second", "second": "third"}.get(task.queue)
        if following and feeds == "enqueues":
            enqueue(following, using=alias)

    for queue in ("first", "second", "third"):
        processor(queue)(process)
    if feeds == "enqueues":
        enqueue("first", using=alias)
    else:
        chain({"queue": "first"}, {"queue": "second"}, {"queue": "third"}, using=alias)
    poller = Poller({"third": 1, "second": 1, "first": 1}, Options(drain=True, threads=1), using=alias)
    poller.start()
    until(lambda: poller.queues["second"].exhausted and poller.queues["third"].exhausted)
    go.set()
    assert poller.wait(PATIENCE)
    poller.close()
    assert [*Task.objects.using(alias).order_by("pk").values_list("queue", "status")] == [
        (queue, "COMPLETED") for queue in ("first", "second", "third")
    ]


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_overrides_are_in_force_from_the_first_task(alias: str) -> None:
    """Given overrides of what processors declare, when a poller takes tasks once, then it obeys them."""

    @processor("first", retry=Fixed(timedelta(0)), reenqueue=Fixed(timedelta(0)))
    def process(task: Lease) -> None:
        if task.reference == "again":
            task.reenqueue()
        else:
            raise RuntimeError

    Queue.objects.using(alias).create(name="first", overrides={"retry": "fixed:1h", "reenqueue": "fixed:1h"})
    for reference in ("fails", "again"):
        task = enqueue("first", reference, using=alias)
        poller = Poller({"first": 1}, Options(once=True, threads=1), using=alias)
        poller.start()
        assert poller.wait(PATIENCE)
        poller.close()
        task.refresh_from_db(using=alias)
        assert task.next_process_time - task.create_time > timedelta(minutes=20), reference
