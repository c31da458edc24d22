"""Middleware around a task: in order, on the thread or loop of the task, and without a word in its outcome."""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import transaction

from django_dbtaskqueue import Poison, Reenqueue, processor, testing
from django_dbtaskqueue.core.exceptions import MiddlewareError
from django_dbtaskqueue.core.lease import Lease
from tests.processing import named
from tests.processing.conftest import QUEUE, SOON, Site

pytestmark = pytest.mark.django_db
real = pytest.mark.django_db(transaction=True)  # for pollers, which have threads of their own
Call = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _book() -> None:
    named.BOOK.clear()


def use(settings: Any, *names: str) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "MIDDLEWARE": [f"tests.processing.named.{name}" for name in names]}


def middleware(run: Callable[[Call, Any], Any]) -> Callable[[Call], Call]:
    @wraps(run)
    def factory(call: Call) -> Call:
        return lambda task: run(call, task)

    return factory


def name_of(factory: Any) -> str:
    return f"Middleware {factory.__module__}.{factory.__qualname__} "


@real
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", ["run", "drain"])
def test_the_first_is_outermost_and_sees_the_lease(site: Site, settings: Any, is_async: bool, how: str) -> None:
    use(settings, "outer", "unused", "inner")
    places: list[int] = []

    def process(task: Lease) -> dict[str, int]:
        places.append(threading.get_ident())
        return {"said": task.payload}

    async def process_async(task: Lease) -> dict[str, int]:
        return process(task)

    processor(QUEUE)(process_async if is_async else process)
    site.enqueue(7, "a")
    getattr(site, how)()
    assert site.values("result") == [{"said": 7}]
    names, moments, facts, threads = zip(*named.BOOK, strict=True)
    assert names == ("outer", "inner", "inner", "outer") and moments == ("before", "before", "after", "after")
    assert facts[0] is facts[1] and (facts[0].reference, facts[0].payload) == ("a", 7)
    assert facts[2:] == ({"said": 7}, {"said": 7}) and {*threads} == {*places}


def test_a_processor_s_own_is_inside_that_of_the_settings(site: Site, settings: Any) -> None:
    use(settings, "outer")
    processor(QUEUE, middleware=[named.inner])(lambda task: None)
    site.drained()
    assert [entry[0] for entry in named.BOOK] == ["outer", "inner", "inner", "outer"]


@real
def test_a_batch_is_one_call_with_the_list(site: Site, settings: Any) -> None:
    use(settings, "outer")
    processor(QUEUE, batch=5)(lambda tasks: [task.payload for task in tasks])
    site.fill(0, 1, 2)
    site.run()
    assert site.values("result") == [0, 1, 2]
    before, _ = named.BOOK
    assert [lease.payload for lease in before[2]] == [0, 1, 2]


def test_in_atomic_mode_its_writes_are_the_task_s(site: Site) -> None:
    @middleware
    def booking(call: Call, task: Lease) -> Any:
        site.book("middleware")
        assert transaction.get_connection(site.alias).in_atomic_block
        return call(task)

    processor(QUEUE, mode="atomic", max_attempts=1, middleware=[booking])(lambda task: 1 / task.payload)
    for payload in (0, 1):
        site.drained(payload)
        assert len(site.booked()) == payload


@pytest.mark.parametrize("returned", [["mine"], None])
def test_another_value_is_refused(site: Site, returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    factory = middleware(lambda call, task: call(task) and returned)
    processor(QUEUE, middleware=[factory])(lambda task: "mine")
    site.drained()
    assert site.values("result") == ["mine"]
    (line,) = [message for message in caplog.messages if message.startswith("Middleware ")]
    assert f"{name_of(factory)}returned another" in line
    assert ("does it lack a return?" in line) is (returned is None)


@pytest.mark.parametrize("then", [lambda *_: None, lambda *_: {}["other"], lambda call, task: call(task)])
def test_the_failure_of_the_processor_stands(site: Site, then: Any, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    @middleware
    def catching(call: Call, task: Lease) -> Any:
        try:
            return call(task)
        except ValueError:
            return then(call, task)

    @processor(QUEUE, max_attempts=1, middleware=[catching])
    def process(task: Lease) -> None:
        calls.append(task.id)
        raise ValueError("mine")

    task = site.drained()
    assert (site.task(task).status, len(calls)) == ("ERROR", 1)
    (attempt,) = site.attempts(task)
    assert (attempt.error_type, attempt.message) == ("builtins.ValueError", "mine")
    (line,) = [message for message in caplog.messages if message.startswith("Middleware ")]
    assert name_of(catching) in line and "the failure ValueError stands" in line


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda call, task: {}["its own"], "KeyError: 'its own'"),
        (lambda call, task: call(task) and {}["its own"], "KeyError: 'its own'"),
        (lambda call, task: None, "it did not call the processor, which changes the outcome. Set its changes_outcome"),
        (lambda call, task: call(task) and call(task), "TaskQueueError: It used call twice, which may change the"),
        (lambda call, task: task.poison("no") or call(task), "TaskQueueError: It settled the task, which changes the"),
    ],
    ids=["before the call", "after it", "without it", "twice", "settling"],
)
def test_its_own_error_is_a_failure_that_names_it(site: Site, run: Any, reason: str) -> None:
    factory = middleware(run)
    processor(QUEUE, max_attempts=2, retry=SOON, middleware=[factory])(lambda task: "mine")
    task = site.enqueue()
    site.drain(with_scheduled=True)
    assert site.task(task).status == "ERROR"
    first, second = site.attempts(task)
    assert first.message == second.message and first.message.startswith(f"{name_of(factory)}failed: {reason}")
    with pytest.raises(MiddlewareError, match="failed: ") as raised:
        testing.perform(QUEUE, using=site.alias)
    assert isinstance(raised.value.__cause__, KeyError) == reason.startswith("KeyError")


@real
def test_one_that_says_so_changes_the_outcome(site: Site) -> None:
    @middleware
    def changing(call: Call, task: Lease) -> Any:
        match task.payload:
            case "not now":
                return Reenqueue(timedelta(hours=1))
            case "own error":
                raise KeyError("its own")
            case "settled":
                return task.poison("by it")
        try:
            return f"more than {call(task)}"
        except ValueError:
            return Poison("hidden")

    changing.changes_outcome = True  # type: ignore[attr-defined]

    @processor(QUEUE, max_attempts=1, middleware=[changing])
    def process(task: Lease) -> str:
        if task.payload == "fails":
            raise ValueError("mine")
        return "mine"

    *_, own_error = site.fill("works", "fails", "not now", "settled", "own error")
    site.run()
    assert site.values("status") == ["COMPLETED", "POISON", "CREATED", "POISON", "ERROR"]
    assert site.values("result")[0] == "more than mine" and site.values("attempt")[2] == 0
    (attempt,) = site.attempts(own_error)
    assert attempt.error_type == "builtins.KeyError"
    assert "Raised by the middleware tests.processing.test_middleware." in attempt.traceback


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "cannot be imported: "),
        ("BOOK", r"is \[\], which cannot be called"),
        ("no_call", "returned 'nothing to call', and not a function of the task"),
        ("sync_only", "is not for async processors, and there is one. Decorate it with "),
    ],
)
def test_a_wrong_one_is_refused_before_a_task_is_taken(site: Site, settings: Any, name: str, reason: str) -> None:
    async def process(task: Lease) -> None: ...

    processor(QUEUE)(process if name == "sync_only" else lambda task: None)
    use(settings, name)
    task = site.enqueue()
    found = [error.msg for error in checks.run_checks(tags=["dbtaskqueue"]) if error.id == "dbtaskqueue.E011"]
    with pytest.raises(CommandError, match=reason) as refused:
        call_command("runtaskpoller", "--once", "--queue", QUEUE, "--database", site.alias, skip_checks=True)
    assert refused.value.returncode == 3 and str(refused.value) in found
    assert site.task(task).total_attempt == 0
