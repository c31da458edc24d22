"""Whatever the arguments of ``enqueue`` and ``enqueue_many`` are: the task can be run, or words refuse it."""

import inspect
import random
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import drain

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
WORDS = (TaskQueueError, TypeError, ValueError)
MAX_WORDS = 2000  # characters
FAR = timezone(timedelta(hours=14)), timezone(-timedelta(hours=14))


class Raises:
    """It has no text, as a model whose related row is gone."""

    def __repr__(self) -> str:
        raise RuntimeError("asked")


class Liar(str):
    """A text that shows another one."""

    def __str__(self) -> str:
        return "fuzz"


def deep(number: int) -> Any:
    value: Any = []
    for _ in range(number):
        value = [value]
    return value


def itself() -> Any:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def hostile() -> list[Any]:
    return [
        None, True, 0, -1, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, float("nan"), float("inf"), Decimal("1e400"), 1j,
        "", " ", "a", "\0", "\ud800", "x" * 100_000, "'; DROP TABLE x", "%s %(queue)s {0}", "\u202e", Liar("other"),
        b"", b"\xff", [], [None], ["a", "a"], (), {}, {"a": 1}, {1: 2}, {None: None}, {"\0": "\0"}, {1, 2}, iter([1]),
        (number for number in range(2)), deep(3000), itself(), Raises(), [Raises()], {"a": Raises()}, object(), int,
        len, lambda: None, Ellipsis, UUID(int=0), date.max, datetime.min, datetime.max, datetime(2026, 1, 1),
        *(moment.replace(tzinfo=zone) for moment in (datetime.min, datetime.max) for zone in FAR),
        datetime(2026, 1, 1, tzinfo=UTC), timedelta.min, timedelta.max, timedelta(0), timedelta(microseconds=1),
        timedelta(days=40_000), -timedelta(seconds=1), "throttle:1h", "unique:fields=a", "parcels",
    ]  # fmt: skip


ARGUMENTS = [name for name in inspect.signature(enqueue).parameters if name not in ("queue", "using")]


@pytest.mark.parametrize("size", [0, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("taskqueue_registry")
def test_any_value_is_stored_or_refused_in_words(alias: str, size: int) -> None:
    registry.register("fuzz", lambda task: None)
    faults: dict[str, str] = {}
    for label, call, options in (*one_by_one(), *mixed(size)):
        try:
            with transaction.atomic(using=alias):
                call("fuzz", **options, using=alias)
        except Exception as error:
            if not isinstance(error, WORDS) or len(str(error)) > MAX_WORDS:
                faults[label] = f"{type(error).__name__}: {str(error)[:200]}"
    assert not faults, "\n".join(f"{label}: {text}" for label, text in faults.items())
    with transaction.atomic(using=alias):
        drain("fuzz", using=alias, with_scheduled=True)
    assert set(Task.objects.using(alias).values_list("status", flat=True)) <= {"COMPLETED", "CREATED", "POISON"}


def one_by_one() -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    for place, value in enumerate(hostile()):
        yield f"items={place}", many, {"items": value}
        yield f"item {place}", many, {"items": [value]}
        yield f"second payload {place}", many, {"items": [{"reference": "a"}, {"payload": value}]}
        for name in ARGUMENTS:
            yield f"{name}={place}", enqueue, {name: value}
            yield f"item {name}={place}", many, {"items": [{name: value}]}


def mixed(number: int) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    chance = random.Random(number)
    for turn in range(number):
        values = hostile()
        places = {name: chance.randrange(len(values)) for name in chance.sample(ARGUMENTS, 3)}
        yield f"{turn}: {places}", enqueue, {name: values[place] for name, place in places.items()}


def many(queue: str, *, items: Any, using: str) -> None:
    enqueue_many(queue, items, using=using)
