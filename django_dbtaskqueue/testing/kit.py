"""The assertions of the test kit, on what waits in a queue."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypedDict, Unpack

from django.db.models import Count

from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core import codecs, json as json_payload
from django_dbtaskqueue.core.columns import ENQUEUED
from django_dbtaskqueue.core.exceptions import PayloadError, near_match
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import aliases_of, model_for
from django_dbtaskqueue.models import AbstractTask

MAX_LISTED_TASKS = 10
ASSERTABLE = (*(column.option for column in ENQUEUED if column.option), "delay")
DURATION_ARGUMENTS = tuple(column.argument for column in ENQUEUED if column.type == "float8")
DELAY_TOLERANCE = timedelta(seconds=1)  # two delays that differ by less are the same


class Wanted(TypedDict, total=False):
    """What a task can be asserted to be."""

    reference: Any
    payload: Any  # plain JSON, or a dataclass or pydantic model
    priority: Any
    group: Any
    tag: Any
    context: Any
    lease: Any  # timedelta
    delay: Any  # timedelta from when the task became ready until it is due, compared to the second


def assert_enqueued(
    queue: str, *, count: int | None = None, using: str | None = None, **wanted: Unpack[Wanted]
) -> AbstractTask:
    """Return the oldest task that waits in ``queue`` (status CREATED) and is as ``wanted``. Nothing is run.

    ``count``: exactly this many are. Values are compared by ``==``, so ``unittest.mock.ANY`` and the like may stand in.
    Raises ``AssertionError`` that lists what is in the queue instead, nearest first.
    """
    expected = _expected(wanted)
    tasks = _tasks(queue, using)
    found = [task for task in tasks if not _differences(task, expected)]
    if not found or count not in (None, len(found)):
        number = "a task" if count is None else f"exactly {count}"
        raise AssertionError(_message(queue, number, len(found), tasks, expected, using))
    return found[0]


def refute_enqueued(queue: str, *, using: str | None = None, **wanted: Unpack[Wanted]) -> None:
    """Raise ``AssertionError`` if any task that is as ``wanted`` waits in ``queue`` (status CREATED)."""
    expected = _expected(wanted)
    found = [task for task in _tasks(queue, using) if not _differences(task, expected)]
    if found:
        raise AssertionError(_message(queue, "no task", len(found), found, expected, using))


def _tasks(queue: str, using: str | None) -> list[AbstractTask]:
    found: list[AbstractTask] = []
    for alias in aliases_of(queue, using):
        queue_settings(queue, alias)  # UnknownQueue: a misspelt name must not pass
        found += model_for(queue)._base_manager.using(alias).filter(queue=queue)
    return sorted(found, key=lambda task: (task.create_time, task.pk))


def _expected(wanted: Mapping[str, Any]) -> dict[str, Any]:
    for name in wanted:
        if name not in ASSERTABLE:
            raise TypeError(f"A task has no {name!r} to assert.{near_match(name, ASSERTABLE)}")
    expected = {"status": "CREATED", **wanted}
    if "payload" in wanted:
        with suppress(PayloadError):  # what holds ``ANY`` or the like is compared as it is
            payload_type, plain = codecs.encode(wanted["payload"])
            expected["payload"] = json_payload.loads(json_payload.dumps(plain))  # as the row shows it
            expected |= {} if payload_type is None else {"payload_type": payload_type}
    return expected


def _shown(task: AbstractTask) -> dict[str, Any]:
    shown = {column.argument: getattr(task, column.name) for column in ENQUEUED}
    shown |= {name: timedelta(seconds=shown[name]) for name in DURATION_ARGUMENTS if shown[name] is not None}
    delay = None if task.ready_time is None else task.ready_time - task.last_update_time
    return {"status": str(task.status), **shown, "delay": delay}


def _differences(task: AbstractTask, expected: dict[str, Any]) -> list[str]:
    def equal(value: Any, wanted: Any) -> bool:
        if isinstance(value, timedelta) and isinstance(wanted, timedelta):
            return abs(value - wanted) < DELAY_TOLERANCE
        return bool(wanted == value)

    shown = _shown(task)
    return [name for name, value in expected.items() if not equal(shown[name], value)]


def _message(
    queue: str, number: str, found: int, tasks: list[AbstractTask], expected: dict[str, Any], using: str | None
) -> str:
    given = [f"{name}={_short(value)}" for name, value in expected.items() if name not in ("status", "payload_type")]
    wanted = f" with {', '.join(given)}" if given else ""
    headline = f"Expected {number} waiting in queue {queue!r}{wanted}, found {found or 'none'}."
    if not tasks:
        others = model_for(queue)._base_manager.using(aliases_of(queue, using)[0]).filter(status=Status.CREATED)
        counts = others.values_list("queue").annotate(number=Count("id")).order_by("queue")
        named = ", ".join(f"{name!r} ({count})" for name, count in counts) or "no other queue"
        return f"{headline}\nQueue {queue!r} is empty. Tasks wait in {named}."
    nearest = sorted(tasks, key=lambda task: len(_differences(task, expected)))[:MAX_LISTED_TASKS]
    more = [f"  and {len(tasks) - MAX_LISTED_TASKS} more"] if len(tasks) > MAX_LISTED_TASKS else []
    return "\n".join([headline, f"Queue {queue!r} has:", *(_line(task, expected) for task in nearest), *more])


def _line(task: AbstractTask, expected: dict[str, Any]) -> str:
    shown = _shown(task)
    always = ("reference", "payload")
    asked = [name for name in shown if name in expected and name not in ("status", *always)]
    facts = [f"{name}={_short(shown[name])}" for name in (*always, *asked)]
    unlike = _differences(task, expected)
    return f"  {shown['status']} {' '.join(facts)}" + (f"  <- differs in {', '.join(unlike)}" if unlike else "")


def _short(value: Any) -> str:
    return str(value) if isinstance(value, timedelta) else json_payload.short_repr(value, 200)
