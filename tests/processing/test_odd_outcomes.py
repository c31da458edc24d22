"""No outcome, whatever it holds, may stop a poller: one that cannot be written is a failure of its task alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import Complete, Fail, Poison, Reenqueue, enqueue, registry, testing
from django_dbtaskqueue.models import Task
from tests.processing.conftest import QUEUE, Site

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
OTHER_QUEUE = "letters"


class Hostile:
    """An object that fails whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


def altered(outcome: Any, **values: Any) -> Any:
    """Return an outcome that was changed after its arguments were checked."""
    for name, value in values.items():
        object.__setattr__(outcome, name, value)
    return outcome


MADE: dict[str, Callable[[], Any]] = {
    "a number as error": lambda: Fail(5),  # type: ignore[arg-type]
    "None as error": lambda: Fail(None),  # type: ignore[arg-type]
    "bytes as error": lambda: Fail(b"\xff"),  # type: ignore[arg-type]
    "a class as error": lambda: Fail(ValueError),  # type: ignore[arg-type]
    "a number as delay": lambda: Fail("no", delay=5),  # type: ignore[arg-type]
    "a negative delay": lambda: Fail("no", delay=timedelta(-1)),
    "a number as retry": lambda: Fail("no", retry=2),  # type: ignore[arg-type]
    "a number as reason": lambda: Poison(5),  # type: ignore[arg-type]
    "a number as delay of a reenqueue": lambda: Reenqueue(5),  # type: ignore[arg-type]
    "text as keep_attempts": lambda: Reenqueue(timedelta(0), keep_attempts="no"),  # type: ignore[arg-type]
}
ALTERED: dict[str, Callable[[], Any]] = {
    "a number as error": lambda: altered(Fail("no"), error=5),
    "a hostile error": lambda: altered(Fail("no"), error=Hostile()),
    "a hostile delay": lambda: altered(Fail("no"), delay=Hostile()),
    "a hostile reason": lambda: altered(Poison("no"), reason=Hostile()),
    "a hostile delay of a reenqueue": lambda: altered(Reenqueue(timedelta(0)), delay=Hostile()),
    "an outcome without its fields": lambda: object.__new__(Fail),
    "a completion without its result": lambda: object.__new__(Complete),
    "a reenqueue without its fields": lambda: object.__new__(Reenqueue),
}


@pytest.mark.parametrize("case", MADE)
def test_an_outcome_checks_its_arguments_when_it_is_made(case: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Fail|Poison|Reenqueue"):
        MADE[case]()


def plain(make: Callable[[], Any]) -> None:
    registry.register(QUEUE, lambda task: make())


def atomic(make: Callable[[], Any]) -> None:
    registry.register(QUEUE, lambda task: make(), mode="atomic")


def asynchronous(make: Callable[[], Any]) -> None:
    async def run(task: Any) -> Any:
        return make()

    registry.register(QUEUE, run)


def batch(make: Callable[[], Any]) -> None:
    registry.register(QUEUE, lambda tasks: [make() for _ in tasks], batch=10)


def by_hand(make: Callable[[], Any]) -> None:
    registry.register(QUEUE, lambda task: task.port.settle(task, make()))


@pytest.mark.parametrize("register", [plain, atomic, asynchronous, batch, by_hand])
@pytest.mark.parametrize("case", ALTERED)
def test_an_outcome_that_cannot_be_written_fails_its_task_alone(
    site: Site, settings: Any, case: str, register: Callable[[Callable[[], Any]], None]
) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"max_attempts": 1}, OTHER_QUEUE: {}}, "NOTIFY": False}
    registry.register(OTHER_QUEUE, lambda task: None)
    register(ALTERED[case])
    odd = [site.enqueue() for _ in range(2)]
    other = enqueue(OTHER_QUEUE, using=site.alias)

    with testing.run_poller(QUEUE, OTHER_QUEUE, using=site.alias):
        pass

    statuses = {site.task(task).status for task in odd}
    assert statuses <= {"ERROR", "POISON", "COMPLETED", "CREATED"} and "PROCESSING" not in statuses
    assert Task.objects.using(site.alias).get(pk=other.pk).status == "COMPLETED"
