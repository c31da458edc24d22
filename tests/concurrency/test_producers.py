"""Many producers of the same references: one task each, and every producer learns which."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from django.db import connections, transaction
from django.db.utils import InterfaceError, OperationalError

from django_dbtaskqueue import DuplicateTask, enqueue, enqueue_many
from django_dbtaskqueue.models import Task
from tests.support import PATIENCE, Actor, actors, at_once, backend_pid, until, until_blocked
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
PRODUCERS = 8
REFERENCES = [f"r-{number:04}" for number in range(300)]  # so many that batches are copied


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"])
def place(request: pytest.FixtureRequest, parcels: None) -> str:
    return str(request.param)


FEW = 150


def shuffled(seed: int, number: int = FEW) -> list[str]:
    return random.Random(seed).sample(REFERENCES[:number], number)


def test_eight_producers_of_the_same_references(place: str) -> None:
    def produce(index: int) -> dict[str, int]:
        return {ref: enqueue("parcels", ref, index, on_duplicate="ignore", using=place).pk for ref in shuffled(index)}

    answers = at_once(PRODUCERS, produce)
    stored = dict(Task.objects.using(place).values_list("reference", "pk"))
    assert sorted(stored) == REFERENCES[:FEW]
    assert all(answer == stored for answer in answers)


def test_each_reference_is_refused_to_all_but_one(place: str) -> None:
    def produce(index: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        for reference in shuffled(index):
            try:
                enqueue("parcels", reference, using=place)
                outcomes["enqueued"] += 1
            except DuplicateTask:
                outcomes["refused"] += 1
        return outcomes

    total = sum(at_once(4, produce), Counter())
    assert total["enqueued"] == Task.objects.using(place).count()
    assert total["enqueued"] + total["refused"] == 4 * FEW


@pytest.mark.parametrize("on_duplicate", ["ignore", "replace"])
def test_overlapping_batches_do_not_wait_for_each_other_in_a_circle(place: str, on_duplicate: str) -> None:
    def produce(index: int) -> int:
        written = 0
        for turn in range(3):
            items = [(reference, index) for reference in shuffled(10 * turn + index, len(REFERENCES))]
            report = enqueue_many("parcels", items, on_duplicate=on_duplicate, using=place)
            written += report.enqueued
            assert report.enqueued + report.ignored + report.replaced == len(items)
        return written

    assert sum(at_once(4, produce)) == Task.objects.using(place).count() == len(REFERENCES)


def test_ids_follow_the_items_whatever_order_they_are_locked_in(place: str) -> None:
    items = shuffled(1, len(REFERENCES))
    enqueue_many("parcels", [(reference, None) for reference in items], using=place)
    assert list(Task.objects.using(place).due().values_list("reference", flat=True)) == items


def test_a_producer_that_loses_its_connection_tries_again_and_nothing_is_twice_or_lost(parcels: None) -> None:
    """Given connections that are cut all the time, when each producer repeats what it has no answer to."""
    calm, answered = threading.Event(), list[str]()

    def produce(index: int) -> int:
        cuts = 0
        for reference in shuffled(index):
            while True:
                try:
                    with transaction.atomic():
                        Booking.objects.get_or_create(reference=reference)
                        enqueue("parcels", reference, on_duplicate="ignore")
                    answered.append(reference)
                    break
                except (OperationalError, InterfaceError):
                    cuts += 1
                    connections["default"].close()
        return cuts

    def cut() -> None:
        with connections["default"].cursor() as cursor:
            while not calm.is_set():
                seen = len(answered)
                until(lambda seen=seen: calm.is_set() or len(answered) >= seen + 20)
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid() AND query LIKE '%%dbtaskqueue_task%%'"
                )

    nemesis = Actor("nemesis")
    cutting = nemesis.do(cut)
    cuts = at_once(4, produce)
    calm.set()
    cutting.result(PATIENCE)
    nemesis.close()

    assert sum(cuts) > 0
    tasks = list(Task.objects.values_list("reference", flat=True))
    assert len(tasks) == len(set(tasks))
    assert set(tasks) == set(Booking.objects.values_list("reference", flat=True))
    assert set(tasks) == {reference for index in range(4) for reference in shuffled(index)}


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("on_duplicate", ["ignore", "replace", "error"])
def test_a_reference_being_inserted_is_waited_for(parcels: None, end: str, on_duplicate: str) -> None:
    def second() -> int | str:
        try:
            return enqueue("parcels", "r", "second", on_duplicate=on_duplicate).pk
        except DuplicateTask as error:
            return f"refused for {error.task_id}"

    with actors(1) as (other,):
        pid = other.do(backend_pid).result(PATIENCE)
        with transaction.atomic():
            first = enqueue("parcels", "r", "first")
            answer = other.do(second)
            until_blocked(pid)
            assert not answer.done()
            transaction.set_rollback(end == "rollback")
        got = answer.result(PATIENCE)
    task = Task.objects.get()
    if end == "rollback":
        assert (got, task.payload) == (task.pk, "second")
        assert task.pk != first.pk
    elif on_duplicate == "error":
        assert (got, task.payload) == (f"refused for {first.pk}", "first")
    else:
        assert (got, task.payload) == (first.pk, "second" if on_duplicate == "replace" else "first")
