"""No outcome, whatever it holds, may stop a poller: one that cannot be written is a failure of its task alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import Complete, Fail, Poison, Reenqueue, enqueue, registry, testing
from django_dbtaskqueue.models import Task
from tests.processing.conftest import QUEUE, Site, both

OTHER_QUEUE = "letters"


class Hostile:
    """An object that fails whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


MADE: list[Callable[[], Any]] = [
    lambda: Fail(5),  # type: ignore[arg-type]
    lambda: Fail(None),  # type: ignore[arg-type]
    lambda: Fail(b"\xff"),  # type: ignore[arg-type]
    lambda: Fail(ValueError),  # type: ignore[arg-type]
    lambda: Fail("no", delay=5),  # type: ignore[arg-type]
    lambda: Fail("no", delay=timedelta(-1)),
    lambda: Fail("no", retry=2),  # type: ignore[arg-type]
    lambda: Poison(5),  # type: ignore[arg-type]
    lambda: Reenqueue(5),  # type: ignore[arg-type]
    lambda: Reenqueue(timedelta(0), keep_attempts="no"),  # type: ignore[arg-type]
]


def test_an_outcome_checks_its_arguments_when_it_is_made() -> None:
    for make in MADE:
        with pytest.raises((TypeError, ValueError), match=r"Fail|Poison|Reenqueue"):
            make()


def altered(outcome: Any, **values: Any) -> Any:
    """Return an outcome that was changed after its arguments were checked."""
    for name, value in values.items():
        object.__setattr__(outcome, name, value)
    return outcome


ALTERED: list[Callable[[], Any]] = [
    lambda: altered(Fail("no"), error=5),
    lambda: altered(Fail("no"), error=Hostile()),
    lambda: altered(Fail("no"), delay=Hostile()),
    lambda: altered(Poison("no"), reason=Hostile()),
    lambda: altered(Reenqueue(timedelta(0)), delay=Hostile()),
    *(lambda kind=kind: object.__new__(kind) for kind in (Fail, Complete, Reenqueue)),  # without their fields
]


async def asynchronous(task: Any) -> Any:
    return ALTERED[task.payload]()


WAYS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "plain": (lambda task: ALTERED[task.payload](), {}),
    "atomic": (lambda task: ALTERED[task.payload](), {"mode": "atomic"}),
    "asynchronous": (asynchronous, {}),
    "batch": (lambda tasks: [ALTERED[task.payload]() for task in tasks], {"batch": 10}),
    "by hand": (lambda task: task.port.settle(task, ALTERED[task.payload]()), {}),
}


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
@both
@pytest.mark.parametrize("way", WAYS)
def test_an_outcome_that_cannot_be_written_fails_its_task_alone(site: Site, settings: Any, way: str) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"max_attempts": 1}, OTHER_QUEUE: {}}, "NOTIFY": False}
    registry.register(OTHER_QUEUE, lambda task: None)
    function, options = WAYS[way]
    registry.register(QUEUE, function, **options)
    odd = [site.enqueue(number) for number in range(len(ALTERED)) for _ in range(2)]
    other = enqueue(OTHER_QUEUE, using=site.alias)

    with testing.run_poller(QUEUE, OTHER_QUEUE, using=site.alias):
        pass

    statuses = {task.payload: site.task(task).status for task in odd}
    assert set(statuses.values()) <= {"ERROR", "POISON", "COMPLETED", "CREATED"}, statuses
    assert Task.objects.using(site.alias).get(pk=other.pk).status == "COMPLETED"
