"""Steps that last: a processor that is called again passes what it has done."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue import Fixed, LeaseLost, StepChanged, enqueue_many, processor, queue, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Step
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from tests.operations.site import refused
from tests.processing.conftest import QUEUE, Site, both

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
NOW = Fixed(timedelta(0))


def steps_of(site: Site, *columns: str) -> list[Any]:
    return list(Step.objects.using(site.alias).order_by("position").values_list(*columns))


@both
@pytest.mark.parametrize("mode", ["separate", "atomic"])
def test_a_step_runs_once_and_returns_its_result_in_later_attempts(site: Site, mode: str) -> None:
    returned, calls = list[Any](), list[str]()

    def book(reference: str) -> int:
        calls.append(reference)
        return site.book(reference)

    @processor(QUEUE, mode=mode, retry=NOW)
    def ship(task: Lease) -> Any:
        returned.append(task.step("reserve", book, "seat"))
        task.step("label", lambda: None)
        if task.attempt == 1:
            raise ValueError("the printer is off")
        return "shipped"

    site.enqueue()
    report = site.drain()
    assert (report.completed, report.retried) == (1, 1) and site.values("result") == ["shipped"]
    assert site.booked() == ["seat"]
    # In one transaction the first attempt leaves nothing, so that its step runs again.
    assert len(calls) == {"separate": 1, "atomic": 2}[mode]
    assert steps_of(site, "position", "name", "kind") == [(1, "reserve", "step"), (2, "label", "step")]
    assert steps_of(site, "result")[0] == (returned[-1],)


def test_async_processors_take_steps_too(site: Site) -> None:
    fetched: list[int] = []

    async def fetch() -> int:
        fetched.append(1)
        await asyncio.sleep(0)
        return 7

    @processor(QUEUE, retry=NOW)
    async def ship(task: Lease) -> Any:
        number = await task.astep("fetch", fetch)
        await task.astep("reserve", site.book, f"seat {number}")
        if task.attempt == 1:
            raise ValueError("the printer is off")
        return number

    site.drained()
    assert (site.values("result"), fetched, site.booked()) == ([7], [1], ["seat 7"])


@both
def test_a_step_that_fails_leaves_nothing_and_is_tried_again(site: Site) -> None:
    def book_and_fail(attempt: int) -> None:
        site.book(f"seat {attempt}")
        if attempt == 1:
            raise ConnectionError("no answer")

    processor(QUEUE, retry=NOW)(lambda task: task.step("reserve", book_and_fail, task.attempt))
    site.drained()
    assert site.booked() == ["seat 2"]


@both
def test_a_holder_whose_lease_is_gone_writes_nothing(site: Site) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> None:
        if task.total_attempt == 2:
            task.step("reserve", site.book, "seat 2")
            return
        site.tasks(pk=task.id).release_all()
        refused(None, task.step, "reserve", site.book, "seat 1", error=LeaseLost)

    site.enqueue()
    report = site.drain()
    assert (report.lost, report.completed) == (1, 1) and site.booked() == ["seat 2"]


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
            match name:
                case "sleep":
                    task.sleep(timedelta(days=1))
                case "wait":
                    task.wait_for("paid")
                case _:
                    task.step(name, lambda: 1)
        raise ValueError("again")

    task = site.drained()
    assert site.values("status", "attempt") == [("ERROR", 2)]
    [_, failure] = site.attempts(task)
    assert failure.error_type.endswith(StepChanged.__name__) and message.format(task.pk) in failure.message


WRONG: list[tuple[Callable[[Lease], Any], str]] = [
    (lambda task: task.step("charge", 5), "needs a function"),  # type: ignore[arg-type]
    (lambda task: task.step("", print), "1 to 200 characters"),
    (lambda task: task.step("charge", asyncio.sleep, 0), "task.astep('charge', …)"),
    (lambda task: task.step("outer", task.step, "inner", print), "inside step 'outer'"),
    (lambda task: task.step("outer", task.sleep, timedelta(days=1)), "transaction.atomic"),
    (lambda task: transaction.atomic(task.sleep)(timedelta(days=1)), "inside transaction.atomic()"),
    (lambda task: task.sleep(5), "needs a timedelta"),  # type: ignore[arg-type]
    (lambda task: task.wait_for("paid", timedelta(days=-1)), "from zero"),
    (lambda task: task.step("charge", lambda: {"rows": [5, task]}), "rows[1]"),
]


def test_what_cannot_be_a_step_is_refused_and_a_batch_processor_has_none(site: Site) -> None:
    processor(QUEUE)(lambda task: WRONG[task.payload][0](task))
    site.fill(*range(len(WRONG)))
    for error, (_, part) in zip(site.drain().errors, WRONG, strict=True):
        assert part in str(error)
    assert steps_of(site) == []
    processor(QUEUE, batch=5)(lambda tasks: tasks[0].step("reserve", print))
    site.enqueue()
    [error] = site.drain().errors
    assert "steps belong to one task" in str(error)


@both
def test_a_reprocessed_task_goes_on_after_its_last_step(site: Site) -> None:
    @processor(QUEUE, max_attempts=1)
    def ship(task: Lease) -> None:
        task.step("reserve", site.book, "seat")
        if task.total_attempt == 1:
            raise ValueError("the printer is off")

    site.drained()
    assert site.values("status") == ["ERROR"]
    site.tasks().reprocess()
    site.drain()
    assert (site.values("status"), site.booked()) == (["COMPLETED"], ["seat"])


@both
def test_steps_leave_with_their_task(site: Site) -> None:
    processor(QUEUE)(lambda task: task.step("reserve", site.book, f"seat {task.id}"))
    kept, moved, deleted = site.fill(*[None] * 3)
    site.drain()
    assert len(steps_of(site)) == 3
    site.tasks(pk=moved.pk).housekeep(older_than=timedelta(0))
    site.tasks(pk=deleted.pk).purge()
    assert steps_of(site, "task_id") == [(kept.pk,)]


@both
@pytest.mark.parametrize("keep_due", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_a_replaced_task_begins_anew(site: Site, many: bool, keep_due: bool) -> None:
    @processor(QUEUE)
    def ship(task: Lease) -> Any:
        task.step("reserve", site.book, task.payload)
        return task.wait_for("approved")

    task = site.drained("12A", "UA-15")
    if many:
        items = [{"reference": "UA-15", "payload": "12B"}, {"reference": "UA-16", "payload": "12C"}]
        enqueue_many(QUEUE, items, on_duplicate="replace", keep_due=keep_due, using=site.alias)
    else:
        site.enqueue("12B", "UA-15", on_duplicate="replace", keep_due=keep_due)
    site.drain()
    assert site.booked()[:2] == ["12A", "12B"] and site.task(task).parked_by == "signal"
    early = site.enqueue("13A", "UA-17")
    signal(early, "approved")
    site.enqueue("13B", "UA-17", on_duplicate="replace", keep_due=keep_due)
    site.drain()
    assert site.task(early).parked_by == "signal"


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
    left = Step.objects.using(site.alias).order_by("id").values_list("task_id", "kind")
    assert sorted(left) == [(waits.pk, kind) for kind in ("sent", "step", "wait")]


@both
def test_the_pull_api_takes_steps_and_cannot_sleep(site: Site) -> None:
    site.enqueue()
    handle = queue(QUEUE, using=site.alias)
    task = handle.take()
    booking = task.step("reserve", site.book, "seat")
    for suspend in (lambda: task.sleep(timedelta(days=1)), lambda: task.wait_for("paid")):
        refused("no processor is called with this task here", suspend, error=Exception)
    task.reenqueue(timedelta(0))
    again = handle.take()
    assert again is not None and again.step("reserve", site.book, "another") == booking
    assert site.booked() == ["seat"]


def test_a_processor_without_steps_asks_nothing_more(site: Site) -> None:
    processor(QUEUE)(lambda task: None)
    site.enqueue()
    with CaptureQueriesContext(connections[site.alias]) as queries:
        site.drain()
    assert len(queries) > 0 and not [query["sql"] for query in queries if "dbtaskqueue_step" in query["sql"]]
