"""Middleware around a task: in order, on the thread or loop of the task, and without a word in its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import transaction

from django_dbtaskqueue import Fixed, Poison, Reenqueue, processor, registry, testing
from django_dbtaskqueue.core.exceptions import MiddlewareError
from django_dbtaskqueue.core.lease import Lease
from tests.processing import around
from tests.processing.conftest import QUEUE, Site
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db
real = pytest.mark.django_db(transaction=True)  # for pollers, which have threads of their own
AROUND = "tests.processing.around"
SOON = Fixed(timedelta(milliseconds=20), jitter=0)
Call = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _book() -> None:
    around.BOOK.clear()


def use(settings: Any, *names: str) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "MIDDLEWARE": [f"{AROUND}.{name}" for name in names]}


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Middleware ")]


# -- where it runs -----------------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize(("is_async", "how"), [(False, "poller"), (False, "drain"), (True, "poller"), (True, "drain")])
def test_the_first_is_outermost_and_sees_the_lease(site: Site, settings: Any, is_async: bool, how: str) -> None:
    use(settings, "outer", "unused", "inner")
    places: list[int] = []

    async def process(task: Lease) -> dict[str, int]:
        places.append(threading.get_ident())
        return {"said": task.payload}

    def process_sync(task: Lease) -> dict[str, int]:
        places.append(threading.get_ident())
        return {"said": task.payload}

    processor(QUEUE)(process if is_async else process_sync)
    task = site.enqueue(7, "a")
    if how == "drain":
        site.drain()
    else:
        site.run()
    assert site.task(task).result == {"said": 7}
    assert [entry[:2] for entry in around.BOOK] == [
        ("outer", "before"), ("inner", "before"), ("inner", "after"), ("outer", "after"),
    ]  # fmt: skip
    (lease, *_), values = {entry[2] for entry in around.BOOK[:2]}, [entry[2] for entry in around.BOOK[2:]]
    assert (lease.reference, lease.payload, values) == ("a", 7, [{"said": 7}] * 2)
    assert {entry[3] for entry in around.BOOK} == {*places}


def test_a_processor_s_own_is_inside_that_of_the_settings(site: Site, settings: Any) -> None:
    use(settings, "outer")
    processor(QUEUE, middleware=[around.inner])(lambda task: None)
    site.enqueue()
    site.drain()
    assert [entry[0] for entry in around.BOOK] == ["outer", "inner", "inner", "outer"]


@real
def test_a_batch_is_one_call_with_the_list(site: Site, settings: Any) -> None:
    use(settings, "outer")
    processor(QUEUE, batch=5)(lambda tasks: [task.payload for task in tasks])
    made = [site.enqueue(number) for number in range(3)]
    site.run()
    assert [site.task(task).result for task in made] == [0, 1, 2]
    assert [[lease.payload for lease in entry[2]] for entry in around.BOOK[:1]] == [[0, 1, 2]]
    assert len(around.BOOK) == 2


def test_in_atomic_mode_its_writes_are_the_task_s(site: Site) -> None:
    def booking(call: Call) -> Call:
        def run(task: Lease) -> Any:
            Booking.objects.using(site.alias).create(reference="middleware")
            assert transaction.get_connection(site.alias).in_atomic_block
            return call(task)

        return run

    @processor(QUEUE, mode="atomic", max_attempts=1, middleware=[booking])
    def process(task: Lease) -> None:
        if task.payload == "fails":
            raise ValueError("no")

    site.enqueue("fails")
    site.drain()
    assert not Booking.objects.using(site.alias).exists()
    site.enqueue("works")
    site.drain()
    assert Booking.objects.using(site.alias).count() == 1


def test_without_middleware_the_function_itself_is_called(site: Site) -> None:
    made = registry.register(QUEUE, lambda task: None)
    site.enqueue()
    site.drain()
    assert made.call is made.function


# -- it may not change the outcome -------------------------------------------------------------------------------------


def returns_another(call: Call) -> Call:
    return lambda task: [call(task)]


def forgets_to_return(call: Call) -> Call:
    def run(task: Lease) -> None:
        call(task)

    return run


def hides(call: Call) -> Call:
    def run(task: Lease) -> Any:
        try:
            return call(task)
        except ValueError:
            return None

    return run


def raises_another(call: Call) -> Call:
    def run(task: Lease) -> Any:
        try:
            return call(task)
        except ValueError as error:
            raise KeyError("other") from error

    return run


def tries_again(call: Call) -> Call:
    def run(task: Lease) -> Any:
        try:
            return call(task)
        except ValueError:
            return call(task)

    return run


@pytest.mark.parametrize("factory", [returns_another, forgets_to_return])
def test_another_value_is_refused(site: Site, factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    processor(QUEUE, middleware=[factory])(lambda task: "mine")
    task = site.enqueue()
    site.drain()
    assert site.task(task).result == "mine"
    (line,) = messages(caplog)
    assert f"Middleware {factory.__module__}.{factory.__name__} returned another" in line
    assert ("does it lack a return?" in line) is (factory is forgets_to_return)


@pytest.mark.parametrize("factory", [hides, raises_another, tries_again])
def test_the_failure_of_the_processor_stands(site: Site, factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    @processor(QUEUE, max_attempts=1, middleware=[factory])
    def process(task: Lease) -> None:
        calls.append(task.id)
        raise ValueError("mine")

    task = site.enqueue()
    site.drain()
    assert (site.task(task).status, len(calls)) == ("ERROR", 1)
    (attempt,) = site.attempts(task)
    assert (attempt.error_type, attempt.message) == ("builtins.ValueError", "mine")
    (line,) = messages(caplog)
    assert f"Middleware {factory.__module__}.{factory.__name__} " in line and "the failure ValueError stands" in line


def fails_before(call: Call) -> Call:
    def run(task: Lease) -> Any:
        raise KeyError("its own")

    return run


def fails_after(call: Call) -> Call:
    def run(task: Lease) -> Any:
        call(task)
        raise KeyError("its own")

    return run


def does_not_call(call: Call) -> Call:
    return lambda task: None


def calls_twice(call: Call) -> Call:
    return lambda task: [call(task), call(task)]


def settles(call: Call) -> Call:
    def run(task: Lease) -> Any:
        task.poison("no")
        return call(task)

    return run


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (fails_before, "KeyError: 'its own'"),
        (fails_after, "KeyError: 'its own'"),
        (does_not_call, "it did not call the processor, which changes the outcome. Set its changes_outcome = True"),
        (calls_twice, "TaskQueueError: It used call twice, which may change the outcome. "),
        (settles, "TaskQueueError: It settled the task, which changes the outcome. "),
    ],
)
def test_its_own_error_is_a_failure_that_names_it(site: Site, factory: Any, reason: str) -> None:
    processor(QUEUE, max_attempts=2, retry=SOON, middleware=[factory])(lambda task: "mine")
    task = site.enqueue()
    site.drain(with_scheduled=True)
    assert site.task(task).status == "ERROR"
    first, second = site.attempts(task)
    assert first.message == second.message
    assert first.message.startswith(f"Middleware {factory.__module__}.{factory.__name__} failed: {reason}")


@real
def test_one_that_says_so_changes_the_outcome(site: Site) -> None:
    def changing(call: Call) -> Call:
        def run(task: Lease) -> Any:
            if task.payload == "not now":
                return Reenqueue(timedelta(hours=1))
            if task.payload == "own error":
                raise KeyError("its own")
            if task.payload == "settled":
                task.poison("by it")
                return None
            try:
                return f"more than {call(task)}"
            except ValueError:
                return Poison("hidden")

        return run

    changing.changes_outcome = True  # type: ignore[attr-defined]

    @processor(QUEUE, max_attempts=1, middleware=[changing])
    def process(task: Lease) -> str:
        if task.payload == "fails":
            raise ValueError("mine")
        return "mine"

    made = [site.enqueue(payload) for payload in ("works", "fails", "not now", "own error", "settled")]
    site.run()
    rows = [site.task(task) for task in made]
    assert [row.status for row in rows] == ["COMPLETED", "POISON", "CREATED", "ERROR", "POISON"]
    assert (rows[0].result, rows[2].attempt) == ("more than mine", 0)
    (attempt,) = site.attempts(made[3])
    assert attempt.error_type == "builtins.KeyError"
    assert "Raised by the middleware tests.processing.test_middleware." in attempt.traceback


def test_the_test_kit_raises_its_error(site: Site) -> None:
    processor(QUEUE, middleware=[fails_before])(lambda task: None)
    with pytest.raises(MiddlewareError, match="fails_before failed: KeyError") as raised:
        testing.perform(QUEUE, using=site.alias)
    assert isinstance(raised.value.__cause__, KeyError)


# -- what is refused at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_async", "reason"),
    [
        ("nowhere", False, "cannot be imported: "),
        ("BOOK", False, r"is \[\], and not a factory that takes call"),
        ("NotDone", False, "returned 'nothing to call', and not a function of the task"),
        ("sync_only", True, "is not for async processors, and there is one. Decorate it with "),
    ],
)
def test_a_wrong_one_is_refused_before_a_task_is_taken(
    site: Site, settings: Any, name: str, is_async: bool, reason: str
) -> None:
    async def process(task: Lease) -> None: ...

    processor(QUEUE)(process if is_async else lambda task: None)
    use(settings, name)
    task = site.enqueue()
    found = [error.msg for error in checks.run_checks(tags=["dbtaskqueue"]) if error.id == "dbtaskqueue.E011"]
    with pytest.raises(CommandError, match=reason) as refused:
        call_command("runtaskpoller", "--once", "--queue", QUEUE, "--database", site.alias, skip_checks=True)
    assert refused.value.returncode == 3 and str(refused.value) in found
    assert site.task(task).total_attempt == 0
