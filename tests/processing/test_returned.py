"""What a processor returns is stored as it is, or the attempt fails with the reason. No value changes in silence."""

import asyncio
import functools
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import (
    Complete,
    PayloadError,
    Reenqueue,
    enqueue,
    enqueue_many,
    processor,
    registry,
    signal,
    testing,
)
from django_dbtaskqueue.core.failure_signature import describe
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from tests.processing.conftest import QUEUE, Site, both
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
LARGE = "x" * 2_000_000


async def work(task: Lease) -> int:
    await asyncio.sleep(0)
    return 7


async def of_number(number: int, task: Lease) -> int:
    return number + await work(task)


@functools.wraps(work)
def behind_a_wrapper(task: Lease) -> object:
    return work(task)


class Asynchronous:
    async def __call__(self, task: Lease) -> int:
        return await work(task)

    def generate(self, task: Lease) -> Any:
        yield task


async def generate(task: Lease) -> Any:
    yield task


@pytest.mark.parametrize("function", [generate, Asynchronous().generate, functools.partial(Asynchronous().generate)])
def test_a_generator_function_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ImproperlyConfigured, match="is a generator function: a call runs none of its code"):
        processor(QUEUE)(function)
    assert registry.find(QUEUE, None) is None


@pytest.mark.parametrize("function", [work, functools.partial(of_number, 0), Asynchronous()])
def test_an_async_callable_is_awaited(site: Site, function: Callable[..., object]) -> None:
    processor(QUEUE)(function)
    task = site.enqueue()
    site.run()
    assert site.task(task).result == 7


@pytest.mark.parametrize("returned", [behind_a_wrapper, lambda task: work(task), lambda task: (one for one in ())])
def test_what_was_never_run_is_a_failure(site: Site, returned: Callable[..., object]) -> None:
    registry.register(QUEUE, returned, max_attempts=1)
    task = site.enqueue()
    site.run()
    assert (site.task(task).status, site.task(task).result) == ("ERROR", None)
    assert "whose code has not run. Await it" in site.attempts(task)[0].message


@both
@pytest.mark.parametrize("mode", ["separate", "atomic"])
@pytest.mark.parametrize(
    "value",
    [Decimal("1.10"), {1: 2}, "a\0b", "\ud800", {1, 2}, float("nan"), b"x", [object()], 10**5000, LARGE],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_json_lacks_fails_the_attempt(site: Site, mode: str, value: object) -> None:
    @processor(QUEUE, mode=mode, max_attempts=1)
    def process(task: Lease) -> object:
        Booking.objects.using(site.alias).create(reference="r1")
        return value

    task = site.enqueue()
    site.drain()
    assert (site.task(task).status, site.task(task).result) == ("ERROR", None)
    [attempt] = site.attempts(task)
    assert attempt.error_type == "django_dbtaskqueue.core.exceptions.PayloadError"
    assert attempt.message.startswith("The result cannot be stored: ")
    assert Booking.objects.using(site.alias).count() == (mode == "separate")


@both
@pytest.mark.parametrize(
    "outcome", [Complete(LARGE), Reenqueue(result=LARGE), LARGE], ids=["complete", "again", "value"]
)
def test_a_large_result_is_kept_whole_by_the_projects_limit(site: Site, settings: Any, outcome: object) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "PAYLOAD_MAX_BYTES": 5_000_000}
    registry.register(QUEUE, lambda task: outcome if task.total_attempt == 1 else None, reenqueue="fixed:1h")
    task = site.enqueue()
    site.drain()
    assert site.task(task).result == LARGE


@both
def test_a_step_and_a_signal_follow_the_projects_limit(site: Site, settings: Any) -> None:
    @processor(QUEUE, max_attempts=1)
    def process(task: Lease) -> bool:
        return [task.step("large", lambda: LARGE), task.wait_for("more")] == [LARGE, LARGE]

    task = site.enqueue()
    site.drain()
    assert site.attempts(task)[0].message.startswith("The result of step 'large' cannot be stored: ")
    with pytest.raises(PayloadError, match="The data of signal 'more' cannot be stored"):
        signal(site.enqueue(), "more", LARGE)
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "PAYLOAD_MAX_BYTES": 5_000_000}
    task = site.enqueue()
    signal(task, "more", LARGE)
    site.drain()
    assert site.task(task).result is True


@both
def test_a_queue_may_be_a_member_of_an_enum_of_texts(site: Site, settings: Any) -> None:
    class Queue(str, Enum):  # noqa: UP042 -- as projects wrote it before StrEnum
        MAIL = "mail"

    settings.DBTASKQUEUE = {"QUEUES": {Queue.MAIL: {"max_attempts": 9}}}
    processor(Queue.MAIL)(lambda task: task.queue)
    one = enqueue(Queue.MAIL, using=site.alias)
    enqueue_many(Queue.MAIL, [{}], using=site.alias)
    testing.drain("mail", using=site.alias)
    found = Task.objects.using(site.alias).values_list("queue", "status", "result", "max_attempts")
    assert [*found] == [("mail", "COMPLETED", "mail", 9)] * 2
    assert type(one.queue) is str


@pytest.mark.parametrize("characters", range(3970, 4001, 5))
def test_a_secret_beside_the_cut_of_a_long_text_is_hidden(characters: int) -> None:
    described = describe(ValueError(f"{'x' * characters} password=hunter2 {'y' * 3_000_000}"), QUEUE)
    assert len(described["message"]) == 4000
    assert "hunt" not in described["message"] and "hunt" not in described["traceback"]
