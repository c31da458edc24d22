"""A full queue: who waits for room gets it as soon as there is some, and not for ever."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.utils import timezone

from django_dbtaskqueue import QueueFull, enqueue
from django_dbtaskqueue.models import Task
from tests.clock import SteppedClock
from tests.support import PATIENCE, actors, until

BOTH = pytest.mark.parametrize("alias", ["default", "sqlite"])
LONG = timedelta(seconds=2 * PATIENCE)
pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)


@pytest.fixture(autouse=True)
def full(settings: Any, request: pytest.FixtureRequest) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"narrow": {"capacity": 1}}}
    enqueue("narrow", "first", using=request.getfixturevalue("alias"))


@BOTH
def test_who_waits_gets_the_room_that_comes_free(alias: str) -> None:
    with actors(1) as (producer,):
        second = producer.do(enqueue, "narrow", "second", timeout=LONG, using=alias)
        Task.objects.db_manager(alias).checkout("narrow", poller_instance="p")[0].complete()
        assert second.result(PATIENCE).reference == "second"


@BOTH
@pytest.mark.parametrize("parked", [None, "no handler for payload type Alien"])
def test_a_task_past_its_time_to_live_takes_no_room(alias: str, parked: str | None) -> None:
    past = timezone.now() - timedelta(minutes=1)
    first = Task.objects.using(alias).filter(reference="first")
    first.update(expire_time=past, parked_by=parked, **({"ready_time": None} if parked else {}))
    enqueue("narrow", "second", using=alias)
    with pytest.raises(QueueFull):
        enqueue("narrow", "third", using=alias)


@BOTH
def test_who_waits_in_vain_is_told(alias: str, clock: SteppedClock) -> None:
    looks: list[str] = []

    def wait() -> Task:
        with connections[alias].execute_wrapper(lambda run, sql, *rest: looks.append(sql) or run(sql, *rest)):
            return enqueue("narrow", "second", timeout=LONG, using=alias)

    with actors(1) as (producer,):
        second = producer.do(wait)
        until(lambda: len(looks) > 10)
        assert not second.done()
        clock.advance(LONG.total_seconds())
        with pytest.raises(QueueFull, match="capacity of 1"):
            second.result(PATIENCE)


@BOTH
def test_room_appears_inside_a_transaction_on_postgresql_only(alias: str) -> None:
    """A producer inside a transaction waits on PostgreSQL; on SQLite nobody else could make room."""

    def in_transaction() -> Task:
        with transaction.atomic(using=alias):
            return enqueue("narrow", "second", timeout=LONG, using=alias)

    with actors(1) as (producer,):
        second = producer.do(in_transaction)
        if alias == "default":
            Task.objects.checkout("narrow", poller_instance="p")[0].complete()
        with pytest.raises(QueueFull) if alias == "sqlite" else nullcontext():
            assert second.result(PATIENCE).reference == "second"
