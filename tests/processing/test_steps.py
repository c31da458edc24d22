"""Steps that last: a processor that is called again passes what it has done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue import LeaseLost, StepChanged, enqueue_many, processor, queue, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.retry import Fixed
from django_dbtaskqueue.models import Signal, Step
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from tests.processing.conftest import QUEUE, Site, both
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
NOW = Fixed(timedelta(0))


class Bookings:
    """Writes bookings to one database, and remembers each call."""

    def __init__(self, alias: str) -> None:
        self.alias, self.calls = alias, list[str]()

    def book(self, reference: str) -> dict[str, Any]:
        self.calls.append(reference)
        return {"booking": Booking.objects.using(self.alias).create(reference=reference).pk}

    def stored(self) -> list[str]:
        return list(Booking.objects.using(self.alias).order_by("pk").values_list("reference", flat=True))


@pytest.fixture
def bookings(alias: str) -> Bookings:
    return Bookings(alias)


def steps_of(site: Site) -> list[tuple[int, str, str, Any]]:
    rows = Step.objects.using(site.alias).order_by("position")
    return list(rows.values_list("position", "name", "kind", "result"))


@both
@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_a_step_runs_once_and_returns_its_result_in_later_attempts(site: Site, bookings: Bookings, mode: str) -> None:
    returned: list[Any] = []

    @processor(QUEUE, mode=mode, retry=NOW)
    def ship(task: Lease) -> Any:
        returned.append(task.step("reserve", bookings.book, "seat"))
        task.step("label", lambda: None)
        if task.attempt == 1:
            raise ValueError("the printer is off")
        return "shipped"

    task = site.enqueue()
    report = site.drain()

    assert report.completed == 1
    assert report.retried == 1
    assert site.task(task).result == "shipped"
    assert bookings.stored() == ["seat"]
    # In one transaction the first attempt leaves nothing, so that its step runs again.
    assert len(bookings.calls) == {"separate": 1, "atomic": 2}[mode]
    assert returned[-1] == {"booking": Booking.objects.using(site.alias).get().pk}
    assert [step[:3] for step in steps_of(site)] == [(1, "reserve", "step"), (2, "label", "step")]


def test_async_processors_take_steps_too(site: Site, bookings: Bookings) -> None:
    fetched: list[int] = []

    async def fetch() -> int:
        fetched.append(1)
        await asyncio.sleep(0)
        return 7

    @processor(QUEUE, retry=NOW)
    async def ship(task: Lease) -> Any:
        number = await task.astep("fetch", fetch)
        await task.astep("reserve", bookings.book, f"seat {number}")
        if task.attempt == 1:
            raise ValueError("the printer is off")
        return number

    task = site.enqueue()
    site.drain()

    assert site.task(task).result == 7
    assert (fetched, bookings.calls, bookings.stored()) == ([1], ["seat 7"], ["seat 7"])


@both
def test_a_step_that_fails_leaves_nothing_and_is_tried_again(site: Site, bookings: Bookings) -> None:
    def book_and_fail(attempt: int) -> None:
        bookings.book(f"seat {attempt}")
        if attempt == 1:
            raise ConnectionError("no answer")

    @processor(QUEUE, retry=NOW)
    def ship(task: Lease) -> None:
        task.step("reserve", book_and_fail, task.attempt)

    site.enqueue()
    site.drain()

    assert bookings.stored() == ["seat 2"]


@both
def test_a_holder_whose_lease_is_gone_writes_nothing(site: Site, bookings: Bookings) -> None:
    seen: list[type] = []

    @processor(QUEUE)
    def ship(task: Lease) -> None:
        if task.total_attempt == 1:
            site.tasks(pk=task.id).release_all()
        try:
            task.step("reserve", bookings.book, f"seat {task.total_attempt}")
        except LeaseLost as error:
            seen.append(type(error))
            raise

    site.enqueue()
    report = site.drain()

    assert seen == [LeaseLost]
    assert (report.lost, report.completed) == (1, 1)
    assert bookings.stored() == ["seat 2"]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (("reserve", "refund"), "Step 2 of task {} was 'charge' in an earlier attempt and is 'refund' now"),
        (("charge", "reserve"), "Step 1 of task {} was 'reserve' in an earlier attempt and is 'charge' now"),
        (("sleep",), "Step 1 of task {} was 'reserve' in an earlier attempt and is a sleep now"),
        (("wait",), "Step 1 of task {} was 'reserve' in an earlier attempt and is a wait for the signal 'paid' now"),
    ],
)
def test_a_changed_step_fails_at_once_and_says_which(site: Site, later: tuple[str, ...], message: str) -> None:
    @processor(QUEUE, retry=NOW)
    def ship(task: Lease) -> None:
        for name in ("reserve", "charge") if task.attempt == 1 else later:
            if name == "sleep":
                task.sleep(timedelta(days=1))
            elif name == "wait":
                task.wait_for("paid")
            else:
                task.step(name, lambda: 1)
        raise ValueError("again")

    task = site.enqueue()
    site.drain()

    assert site.task(task).status == "ERROR"
    assert site.task(task).attempt == 2
    [_, failure] = site.attempts(task)
    assert failure.error_type.endswith(StepChanged.__name__)
    assert message.format(task.pk) in failure.message


def test_a_result_that_is_not_json_is_refused_with_its_step(site: Site, bookings: Bookings) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        bookings.book("before")
        task.step("reserve", lambda: {"rows": [bookings]})

    task = site.enqueue()
    [error] = site.drain().errors

    assert isinstance(error, TypeError)
    assert "The result of step 'reserve' must be JSON" in str(error)
    assert "rows[0]" in str(error)
    assert steps_of(site) == []
    assert site.task(task).attempt == 1


def test_what_cannot_be_a_step_is_refused(site: Site) -> None:
    wrong: list[Callable[[Lease], Any]] = [
        lambda task: task.step("charge", 5),  # type: ignore[arg-type]
        lambda task: task.step("", print),
        lambda task: task.step("charge", asyncio.sleep, 0),
        lambda task: task.step("outer", task.step, "inner", print),
        lambda task: task.step("outer", task.sleep, timedelta(days=1)),
        lambda task: task.sleep(5),  # type: ignore[arg-type]
        lambda task: task.wait_for("paid", timedelta(days=-1)),
    ]

    @processor(QUEUE, payload=None)
    def ship(task: Lease) -> None:
        wrong[task.payload](task)

    for number in range(len(wrong)):
        site.enqueue(number)
    texts = [str(error) for error in site.drain().errors]
    parts = [
        "needs a function", "1 to 200 characters", "task.astep('charge', …)", "inside step 'outer'",
        "transaction.atomic", "needs a timedelta", "from zero",
    ]  # fmt: skip
    for text, part in zip(texts, parts, strict=True):
        assert part in text
    assert steps_of(site) == []


def test_a_batch_processor_has_no_steps(site: Site) -> None:
    @processor(QUEUE, batch=5)
    def ship(tasks: list[Lease]) -> None:
        tasks[0].step("reserve", print)

    site.enqueue()
    [error] = site.drain().errors
    assert "steps belong to one task" in str(error)


@both
def test_a_reprocessed_task_goes_on_after_its_last_step(site: Site, bookings: Bookings) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        task.step("reserve", bookings.book, "seat")
        if len(bookings.calls) == 1 and task.total_attempt == 1:
            raise ValueError("the printer is off")

    task = site.enqueue()
    site.tasks().update(max_attempts=1)
    site.drain()
    assert site.task(task).status == "ERROR"

    site.tasks(pk=task.pk).reprocess()
    site.drain()

    assert site.task(task).status == "COMPLETED"
    assert bookings.calls == ["seat"]


@both
def test_steps_leave_with_their_task(site: Site, bookings: Bookings) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        task.step("reserve", bookings.book, f"seat {task.id}")

    kept, moved, deleted = [site.enqueue() for _ in range(3)]
    site.drain()
    assert Step.objects.using(site.alias).count() == 3

    site.tasks(pk=moved.pk).housekeep(older_than=timedelta(0))
    site.tasks(pk=deleted.pk).purge()

    assert [row.task_id for row in Step.objects.using(site.alias)] == [kept.pk]


@both
@pytest.mark.parametrize("keep_due", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_a_replaced_task_begins_anew(site: Site, bookings: Bookings, many: bool, keep_due: bool) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        task.step("reserve", bookings.book, task.payload)
        return task.wait_for("approved")

    task = site.enqueue("12A", "UA-15")
    site.drain()
    if many:
        items = [{"reference": "UA-15", "payload": "12B"}, {"reference": "UA-16", "payload": "12C"}]
        enqueue_many(QUEUE, items, on_duplicate="replace", keep_due=keep_due, using=site.alias)
    else:
        site.enqueue("12B", "UA-15", on_duplicate="replace", keep_due=keep_due)
    site.drain()

    assert bookings.stored()[:2] == ["12A", "12B"]
    assert site.task(task).parked_by == "signal"


@both
@pytest.mark.parametrize("keep", ["history", "delete"])
def test_steps_of_tasks_that_a_settle_removed_leave_with_housekeeping(site: Site, settings: Any, keep: str) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"keep": keep, "database": site.alias}}}

    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        task.step("reserve", lambda: 1)
        return task.wait_for("approved") if task.reference == "waits" else None

    waits, done = site.enqueue(reference="waits"), site.enqueue()
    signal(done, "unheard")
    signal(waits, "another")
    site.drain()
    Housekeeper().turn(RetentionPolicy(), using=site.alias)

    assert set(Step.objects.using(site.alias).values_list("task_id", flat=True)) == {waits.pk}
    assert set(Signal.objects.using(site.alias).values_list("task_id", flat=True)) == {waits.pk}


@both
def test_the_pull_api_takes_steps_and_cannot_sleep(site: Site, bookings: Bookings) -> None:
    site.enqueue()
    handle = queue(QUEUE, using=site.alias)
    task = handle.take()
    assert task is not None
    assert task.step("reserve", bookings.book, "seat") == {"booking": Booking.objects.using(site.alias).get().pk}
    with pytest.raises(Exception, match="no processor is called with this task here"):
        task.sleep(timedelta(days=1))
    with pytest.raises(Exception, match="no processor is called with this task here"):
        task.wait_for("paid")
    task.reenqueue(timedelta(0))

    again = handle.take()
    assert again is not None
    again.step("reserve", bookings.book, "another")
    assert bookings.stored() == ["seat"]


def test_a_processor_without_steps_asks_nothing_more(site: Site) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        return None

    site.enqueue()
    with CaptureQueriesContext(connections[site.alias]) as queries:
        site.drain()
    assert len(queries) > 0
    assert not [query["sql"] for query in queries if "dbtaskqueue_step" in query["sql"]]
