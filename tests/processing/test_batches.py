"""Batch processors: one call gets up to n tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest

from django_dbtaskqueue import Complete, Fail, Fixed, Poison, enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from tests.processing.conftest import QUEUE, Site, both
from tests.support import PATIENCE, actors, until
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
SOON = Fixed(timedelta(milliseconds=20), jitter=0)


@dataclass
class Parcel:
    weight: int


def fill(site: Site, number: int) -> None:
    enqueue_many(QUEUE, [(f"r{index:03}", {"weight": index}) for index in range(number)], using=site.alias)


def by_status(site: Site) -> dict[str, int]:
    found = list(site.tasks().values_list("status", flat=True))
    return {status: found.count(status) for status in set(found)}


def both_ways(function: Callable[[list[Lease]], Any], *, is_async: bool, **options: Any) -> None:
    """Register a function as it is, or as a coroutine function."""

    async def process(tasks: list[Lease]) -> Any:
        return function(tasks)

    processor(QUEUE, **options)(process if is_async else function)


@pytest.mark.parametrize("is_async", [False, True])
def test_whole_batches_are_handed_over_and_each_task_has_its_own_outcome(site: Site, is_async: bool) -> None:
    sizes: list[int] = []

    def process(tasks: list[Lease]) -> list[Any]:
        sizes.append(len(tasks))
        return [Complete(task.reference) for task in tasks]

    both_ways(process, is_async=is_async, batch=10)
    fill(site, 45)
    site.run(threads=1, coroutines=1)
    assert all(row.result == row.reference for row in site.tasks())
    assert sum(sizes) == 45 and max(sizes) == 10
    assert len(sizes) <= 9  # a queue that is full makes full batches


@pytest.mark.parametrize(
    ("value", "status", "result"),
    [
        (None, "COMPLETED", None),
        (Complete("same"), "COMPLETED", "same"),
        (Poison("bad"), "POISON", None),
        ({"a": 1}, "COMPLETED", {"a": 1}),
    ],
)
def test_one_value_is_the_outcome_of_all(site: Site, value: Any, status: str, result: Any) -> None:
    processor(QUEUE, batch=10)(lambda tasks: value)
    fill(site, 4)
    site.run()
    assert list(site.tasks().values_list("status", "result")) == [(status, result)] * 4


def test_outcomes_of_every_kind_side_by_side(site: Site) -> None:
    @processor(QUEUE, batch=10)
    def process(tasks: list[Lease]) -> list[Any]:
        kinds = [Complete(1), Fail("no", retry=False), Poison("bad"), "plain"]
        return [kinds[task.payload["weight"]] for task in tasks]

    fill(site, 4)
    site.run()
    rows = site.tasks().order_by("reference")
    assert [row.status for row in rows] == ["COMPLETED", "ERROR", "POISON", "COMPLETED"]


def test_a_batch_never_waits_for_more(site: Site) -> None:
    processor(QUEUE, batch=100)(lambda tasks: len(tasks))
    task = site.enqueue()
    site.run()
    assert site.task(task).result == 1


@pytest.mark.parametrize(("number", "is_async"), [(0, False), (1, True), (4, False)])
def test_a_wrong_number_of_outcomes_fails_each_task_and_teaches(site: Site, number: int, is_async: bool) -> None:
    both_ways(lambda tasks: [1] * number, is_async=is_async, batch=3, max_attempts=1)
    fill(site, 3)
    site.run(threads=1, coroutines=1)
    assert by_status(site) == {"ERROR": 3}
    (attempt,) = site.attempts(site.tasks().first())
    assert f"got 3 tasks and returned {number} outcomes" in attempt.message
    assert "Complete([...])" in attempt.message


@pytest.mark.parametrize("is_async", [False, True])
def test_separate_an_exception_fails_each_task_by_its_own_budget(site: Site, is_async: bool) -> None:
    def process(tasks: list[Lease]) -> None:
        raise RuntimeError("all of you")

    both_ways(process, is_async=is_async, batch=10, max_attempts=3, retry=SOON)
    fill(site, 2)
    site.tasks(reference="r000").update(max_attempts=1)
    site.run()
    rows = site.tasks().order_by("reference")
    assert [(row.status, row.total_attempt) for row in rows] == [("ERROR", 1), ("ERROR", 3)]


@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_what_cannot_be_decoded_is_taken_out_before_the_call(site: Site, mode: str) -> None:
    seen: list[list[Any]] = []

    @processor(QUEUE, payload=Parcel, batch=10, mode=mode)
    def process(tasks: list[Lease]) -> list[Any]:
        seen.append([task.payload for task in tasks])
        return [task.payload.weight for task in tasks]

    enqueue_many(QUEUE, [Parcel(1), Parcel(2), Parcel(3)], using=site.alias)
    site.tasks(id=site.tasks().order_by("id")[1].pk).update(payload={"weight": "heavy"})
    site.run()
    rows = site.tasks().order_by("id")
    assert [(row.status, row.result) for row in rows] == [("COMPLETED", 1), ("ERROR", None), ("COMPLETED", 3)]
    assert [parcel.weight for parcels in seen for parcel in parcels] == [1, 3]


# -- atomic -----------------------------------------------------------------------------------------------------------


def booked(site: Site) -> list[str]:
    return list(Booking.objects.using(site.alias).order_by("reference").values_list("reference", flat=True))


@both
def test_atomic_one_transaction_for_the_batch(site: Site) -> None:
    written, go_on = threading.Event(), threading.Event()

    @processor(QUEUE, batch=10, mode="atomic")
    def process(tasks: list[Lease]) -> list[str]:
        for task in tasks:
            Booking.objects.using(site.alias).create(reference=task.reference or "")
        written.set()
        go_on.wait(PATIENCE)
        return [f"{task.reference}!" for task in tasks]

    fill(site, 3)
    with site.poller():
        assert written.wait(PATIENCE)
        assert booked(site) == []
        go_on.set()
    assert booked(site) == ["r000", "r001", "r002"]
    assert [row.result for row in site.tasks().order_by("reference")] == ["r000!", "r001!", "r002!"]


@both
def test_atomic_when_the_batch_fails_each_runs_alone_and_only_the_bad_one_fails(site: Site) -> None:
    calls: list[list[str | None]] = []

    @processor(QUEUE, batch=10, mode="atomic", max_attempts=1)
    def process(tasks: list[Lease]) -> None:
        calls.append([task.reference for task in tasks])
        for task in tasks:
            Booking.objects.using(site.alias).create(reference=task.reference or "")
            if task.reference == "r001":
                raise RuntimeError("bad apple")

    fill(site, 3)
    site.run()
    assert calls == [["r000", "r001", "r002"], ["r000"], ["r001"], ["r002"]]
    assert booked(site) == ["r000", "r002"]
    rows = site.tasks().order_by("reference")
    assert [row.status for row in rows] == ["COMPLETED", "ERROR", "COMPLETED"]
    assert [row.total_attempt for row in rows] == [1, 1, 1]  # one attempt, however often it was called


@both
def test_atomic_a_task_that_settled_itself_in_a_batch_that_failed_is_settled_again(site: Site) -> None:
    @processor(QUEUE, batch=10, mode="atomic", max_attempts=1)
    def process(tasks: list[Lease]) -> Any:
        tasks[0].complete("own")
        if len(tasks) > 1:
            raise RuntimeError("together we fail")

    fill(site, 2)
    site.run()
    assert [row.result for row in site.tasks().order_by("reference")] == ["own", "own"]


def test_atomic_one_lost_lease_does_not_take_the_others_with_it(site: Site) -> None:
    calls: list[int] = []

    @processor(QUEUE, batch=10, mode="atomic")
    def process(tasks: list[Lease]) -> None:
        calls.append(len(tasks))
        if len(calls) == 1:  # an operator revokes one lease of the batch; SQLite lets nobody else write meanwhile
            with actors(1) as (operator,):
                operator.do(lambda: site.tasks(reference="r001").release_all()).result(PATIENCE)

    fill(site, 3)
    poller = site.run()
    assert calls[:4] == [3, 1, 1, 1] and calls[4:] == [1]
    assert by_status(site) == {"COMPLETED": 3}
    assert poller.counts.lost == 1


def test_a_batch_size_that_is_none_is_refused() -> None:
    for value in (0, -1, True, "5"):
        with pytest.raises(Exception, match="whole number of at least 1"):
            processor(QUEUE, batch=value)(lambda tasks: None)  # type: ignore[arg-type]


@both
def test_if_one_of_an_async_batch_is_cancelled_the_others_are_released(site: Site) -> None:
    begun, calls = threading.Event(), list[list[str | None]]()

    @processor(QUEUE, batch=3)
    async def process(tasks: list[Lease]) -> None:
        calls.append(sorted(str(task.reference) for task in tasks))
        if len(tasks) == 3:
            begun.set()
            await asyncio.sleep(PATIENCE)

    fill(site, 3)
    with site.poller():
        assert begun.wait(PATIENCE)
        assert site.tasks(reference="r001").cancel() == 1
        until(lambda: site.tasks(status="COMPLETED").count() == 2)
    assert calls[0] == ["r000", "r001", "r002"] and sorted(chain.from_iterable(calls[1:])) == ["r000", "r002"]
    assert list(site.tasks(status="COMPLETED").values_list("attempt", flat=True)) == [1, 1]
    assert site.tasks(status="POISON").get().reference == "r001"
