"""What an outcome may hold, what may be returned, and when a task is due again: no value may stop a poller."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from functools import partial, reduce, wraps
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import Arithmetic, Fixed, Staged, enqueue, enqueue_many, processor, registry, signal, testing
from django_dbtaskqueue.core.exceptions import PayloadError, ReenqueueDelayMissing
from django_dbtaskqueue.core.failure_signature import describe
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Fail, Poison, Reenqueue
from django_dbtaskqueue.models import Task
from tests.processing.conftest import QUEUE, Site, both, on_real_connections
from tests.support import Unprintable
from tests.testapp.models import Booking

pytestmark = on_real_connections
WRONG: list[tuple[Any, Any, dict[str, Any]]] = [
    *((Fail, error, {}) for error in (5, None, b"\xff", ValueError)),
    *((Fail, "no", options) for options in ({"delay": 5}, {"delay": timedelta(-1)}, {"retry": 2})),
    (Poison, 5, {}),
    *((Reenqueue, delay, {}) for delay in (5, timedelta(-1), timedelta.max)),
    (Reenqueue, timedelta(0), {"keep_attempts": "no"}),
]
MINUTE = timedelta(minutes=1)


def test_an_outcome_checks_its_arguments_when_it_is_made() -> None:
    for outcome, argument, options in WRONG:
        with pytest.raises((TypeError, ValueError), match=outcome.__name__):
            outcome(argument, **options)


def altered(outcome: Any, **values: Any) -> Any:
    for name, value in values.items():
        object.__setattr__(outcome, name, value)
    return outcome


LARGE = "x" * 2_000_000
CIRCLE, DEEP = list[Any](), reduce(lambda inner, _: [inner], range(100_000), list[Any]())
CIRCLE.append(CIRCLE)
NO_JSON = [
    Decimal("1.10"), {1: 2}, "a\0b", "\ud800", {"\0": 1}, {1, 2}, float("nan"), float("inf"), b"x", [object()],
    10**5000, LARGE, CIRCLE, DEEP,
]  # fmt: skip
CANNOT_BE_WRITTEN: list[Callable[[], Any]] = [
    lambda: altered(Fail("no"), error=5),
    lambda: altered(Fail("no"), error=Unprintable()),
    lambda: altered(Fail("no"), delay=Unprintable()),
    lambda: altered(Poison("no"), reason=Unprintable()),
    lambda: altered(Reenqueue(timedelta(0)), delay=Unprintable()),
    *(lambda kind=kind: object.__new__(kind) for kind in (Fail, Complete, Reenqueue)),  # without their fields
    lambda: Reenqueue(timedelta(0), {"a": float("nan")}),
    *(lambda result=result: Complete(result) for result in NO_JSON),
]


def plain(task: Any) -> Any:
    return CANNOT_BE_WRITTEN[task.payload]() if isinstance(task.payload, int) else Complete(task.payload)


def with_a_write(task: Any) -> Any:
    Booking.objects.using(task.port.alias).create(reference=str(task.id))
    return plain(task)


async def asynchronous(task: Any) -> Any:
    return plain(task)


WAYS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "plain": (plain, {}),
    "atomic": (with_a_write, {"mode": "atomic"}),
    "asynchronous": (asynchronous, {}),
    "batch": (lambda tasks: [plain(task) for task in tasks], {"batch": 7}),
    "by hand": (lambda task: task.port.settle(task, plain(task)), {}),
}


@both
@pytest.mark.parametrize("way", WAYS)
def test_an_outcome_that_cannot_be_written_fails_its_task_alone(site: Site, settings: Any, way: str) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"max_attempts": 1}}, "NOTIFY": False}
    function, options = WAYS[way]
    registry.register(QUEUE, function, **options)
    _, *tasks = site.fill("fine", *range(len(CANNOT_BE_WRITTEN)), "too")
    site.run()
    assert site.values("result", "status")[:: len(tasks)] == [("fine", "COMPLETED"), ("too", "COMPLETED")]
    assert set(site.values("status", "result")[1:-1]) == {("ERROR", None)}
    for task in tasks[-len(NO_JSON) - 1 : -1]:
        [attempt] = site.attempts(task)
        assert attempt.error_type == "django_dbtaskqueue.core.exceptions.PayloadError"
        assert attempt.message.startswith("The result cannot be stored: ") and str(task.pk) not in site.booked()


def wait_of(task: Task) -> int:
    """Return the seconds from the last write until the task is due."""
    return round((task.ready_time - task.last_update_time).total_seconds())


def again(_: Any) -> Reenqueue:
    return Reenqueue()


def test_the_policy_is_asked_with_the_number_of_the_reenqueue(site: Site) -> None:
    asked, waits = list[Any](), list[int]()

    def policy(number: int, error: BaseException | None) -> timedelta:
        asked.append((number, error))
        return number * MINUTE

    processor(QUEUE, reenqueue=policy)(again)
    task = site.enqueue()
    for _ in range(3):
        site.drain()
        row = site.task(task)
        waits.append(wait_of(row))
        site.tasks().update(ready_time=row.create_time, next_process_time=row.create_time)
    assert (asked, waits) == ([(1, None), (2, None), (3, None)], [60, 120, 180])
    assert (row.status, row.attempt, row.reenqueue_attempt, row.total_attempt) == ("CREATED", 0, 3, 3)


def test_a_processor_that_reenqueues_by_itself_gets_the_same_delay(site: Site) -> None:
    @processor(QUEUE, reenqueue=Arithmetic(MINUTE, jitter=0))
    def settle_it(task: Lease) -> None:
        task.reenqueue(result="half", keep_attempts=True)

    row = site.drained()
    assert (wait_of(row), row.result, row.attempt) == (60, "half", 1)


@pytest.mark.parametrize("declared", [None, "manual"])
def test_without_a_policy_the_attempt_fails_and_says_what_to_do(site: Site, declared: Any) -> None:
    processor(QUEUE, reenqueue=declared, retry=Fixed(MINUTE, jitter=0), max_attempts=2)(again)
    task = site.enqueue()
    assert site.drain().retried == 1
    row = site.task(task)
    assert (row.status, row.attempt, row.reenqueue_attempt, wait_of(row)) == ("CREATED", 1, 0, 60)
    for text in (site.attempts(task)[0].message, row.process_result or ""):
        assert "Reenqueue(timedelta(minutes=5))" in text


def test_settling_by_oneself_without_a_policy_raises_and_writes_nothing(site: Site) -> None:
    @processor(QUEUE)
    def settle_it(task: Lease) -> str:
        try:
            with transaction.atomic(using=site.alias):
                task.reenqueue()
        except ReenqueueDelayMissing as error:
            return str(error)
        return "not raised"

    site.drained()
    [(status, said)] = site.values("status", "result")
    assert status == "COMPLETED" and QUEUE in said and "Give the delay" in said


def test_a_policy_that_gives_up_ends_in_error(site: Site) -> None:
    processor(QUEUE, reenqueue=Staged((1, timedelta(0)), jitter=0))(again)
    row = site.drained()
    assert (row.status, row.reenqueue_attempt) == ("ERROR", 1)
    assert "gives up at reenqueue 2" in (row.process_result or "")


HOURLY, TWO_MINUTES = Fixed(timedelta(hours=1)), "fixed:2m,jitter=0"


@pytest.mark.parametrize(
    ("given", "options", "function", "seconds"),
    [
        ({}, {"reenqueue": HOURLY}, lambda task: Reenqueue(MINUTE), 60),
        ({"QUEUES": {QUEUE: {"reenqueue": TWO_MINUTES}}}, {"reenqueue": HOURLY}, again, 120),
        ({"DEFAULTS": {"reenqueue": Fixed(MINUTE, jitter=0)}}, {}, again, 60),
        ({}, {"batch": 5, "reenqueue": lambda number, error: number * MINUTE}, again, 60),
    ],
    ids=["the delay that is given", "the queue's settings before the processor", "the defaults", "a batch"],
)
def test_which_delay_counts(site: Site, settings: Any, given: Any, options: Any, function: Any, seconds: int) -> None:
    settings.DBTASKQUEUE = given
    processor(QUEUE, **options)(function)
    assert wait_of(site.drained()) == seconds


# -- what a processor returns is stored as it is, or the attempt fails with the reason ---------------------------------
async def work(task: Lease) -> int:
    await asyncio.sleep(0)
    return 7


async def of_number(number: int, task: Lease) -> int:
    return number + await work(task)


class Asynchronous:
    async def __call__(self, task: Lease) -> int:
        return await work(task)


@pytest.mark.parametrize("function", [work, partial(of_number, 0), Asynchronous()])
def test_an_async_callable_is_awaited(site: Site, function: Callable[..., object]) -> None:
    processor(QUEUE)(function)
    assert site.ran().result == 7


@pytest.mark.parametrize(
    "returned", [wraps(work)(lambda task: work(task)), lambda task: work(task), lambda task: (one for one in ())]
)
def test_what_was_never_run_is_a_failure(site: Site, returned: Callable[..., object]) -> None:
    registry.register(QUEUE, returned, max_attempts=1)
    task = site.ran()
    assert (task.status, task.result) == ("ERROR", None)
    assert "whose code has not run. Await it" in site.attempts(task)[0].message


@both
@pytest.mark.parametrize("outcome", [Complete(LARGE), Reenqueue(result=LARGE), LARGE], ids=["complete", "again", "it"])
def test_a_large_result_is_kept_whole_by_the_projects_limit(site: Site, settings: Any, outcome: object) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "PAYLOAD_MAX_BYTES": 5_000_000}
    registry.register(QUEUE, lambda task: outcome if task.total_attempt == 1 else None, reenqueue="fixed:1h")
    assert site.drained().result == LARGE


@both
def test_a_step_and_a_signal_follow_the_projects_limit(site: Site, settings: Any) -> None:
    @processor(QUEUE, max_attempts=1)
    def process(task: Lease) -> bool:
        return [task.step("large", lambda: LARGE), task.wait_for("more")] == [LARGE, LARGE]

    task = site.drained()
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
    assert [*found] == [("mail", "COMPLETED", "mail", 9)] * 2 and type(one.queue) is str


@pytest.mark.parametrize("characters", range(3970, 4001, 5))
def test_a_secret_beside_the_cut_of_a_long_text_is_hidden(characters: int) -> None:
    described = describe(ValueError(f"{'x' * characters} password=hunter2 {'y' * 3_000_000}"), QUEUE)
    assert len(described["message"]) == 4000
    assert "hunt" not in described["message"] and "hunt" not in described["traceback"]
