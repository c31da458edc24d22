"""Assertions on what waits in a queue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypedDict, Unpack

from django.db.models import Count

from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.exceptions import PayloadError, near_match
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import aliases_of, model_for
from django_dbtaskqueue.flow.enqueue import queue_settings
from django_dbtaskqueue.models import AbstractTask

MOST_SHOWN = 10
EXACT = timedelta(seconds=1)  # two delays that differ by less are the same


class Wanted(TypedDict, total=False):
    """What a task can be asserted to be."""

    reference: Any
    payload: Any  # plain JSON, or a dataclass or pydantic model
    priority: Any
    group: Any
    tag: Any
    context: Any
    delay: Any  # timedelta from when the task was put in line until it is due, compared to the second


def assert_enqueued(
    queue: str, *, count: int | None = None, using: str | None = None, **wanted: Unpack[Wanted]
) -> AbstractTask:
    """Return the oldest task that waits in ``queue`` (status CREATED) and is as ``wanted``. Nothing is run.

    ``count``: exactly so many are. Values are compared with ``==``, so ``unittest.mock.ANY`` and the like may stand in.
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
        if name not in Wanted.__annotations__:
            raise TypeError(f"A task has no {name!r} to assert.{near_match(name, Wanted.__annotations__)}")
    expected = {"status": "CREATED", **wanted}
    if "payload" in wanted:
        payload_type, expected["payload"] = _plain(wanted["payload"])
        if payload_type is not None:
            expected["payload_type"] = payload_type
    return expected


def _plain(payload: Any) -> tuple[str | None, Any]:
    """Return the payload as the row shows it; what holds ``ANY`` or the like is compared as it is."""
    try:
        payload_type, plain = codecs.encode(payload)
        return payload_type, json_payload.loads(json_payload.dumps(plain))
    except PayloadError:
        return None, payload


def _shown(task: AbstractTask) -> dict[str, Any]:
    return {
        "status": str(task.status),
        "reference": task.reference,
        "payload": task.payload,
        "payload_type": task.payload_type,
        "priority": task.priority,
        "group": task.group_key,
        "tag": task.tag,
        "context": task.context,
        "delay": None if task.ready_time is None else task.ready_time - task.last_update_time,
    }


def _differences(task: AbstractTask, expected: dict[str, Any]) -> list[str]:
    shown = _shown(task)
    return [name for name, value in expected.items() if not _equal(shown[name], value)]


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, timedelta) and isinstance(expected, timedelta):
        return abs(value - expected) < EXACT
    return bool(expected == value)


def _message(
    queue: str, number: str, found: int, tasks: list[AbstractTask], expected: dict[str, Any], using: str | None
) -> str:
    headline = f"Expected {number} waiting in queue {queue!r}{_with(expected)}, found {found or 'none'}."
    return f"{headline}\n{_listing(queue, tasks, expected, using)}"


def _with(expected: dict[str, Any]) -> str:
    given = [f"{name}={_short(value)}" for name, value in expected.items() if name not in ("status", "payload_type")]
    return f" with {', '.join(given)}" if given else ""


def _listing(queue: str, tasks: list[AbstractTask], expected: dict[str, Any], using: str | None) -> str:
    if not tasks:
        return f"Queue {queue!r} is empty.{_elsewhere(queue, using)}"
    nearest = sorted(tasks, key=lambda task: len(_differences(task, expected)))
    more = [f"  and {len(tasks) - MOST_SHOWN} more"] if len(tasks) > MOST_SHOWN else []
    return "\n".join([f"Queue {queue!r} has:", *(_line(task, expected) for task in nearest[:MOST_SHOWN]), *more])


def _line(task: AbstractTask, expected: dict[str, Any]) -> str:
    shown = _shown(task)
    always = ("reference", "payload")
    facts = [
        f"{name}={_short(shown[name])}" for name in shown if name in always or (name in expected and name != "status")
    ]
    unlike = _differences(task, expected)
    return f"  {shown['status']} {' '.join(facts)}" + (f"  <- differs in {', '.join(unlike)}" if unlike else "")


def _elsewhere(queue: str, using: str | None) -> str:
    tasks = model_for(queue)._base_manager.using(aliases_of(queue, using)[0]).filter(status=Status.CREATED)
    counts = tasks.values_list("queue").annotate(number=Count("id")).order_by("queue")
    named = ", ".join(f"{name!r} ({number})" for name, number in counts)
    return f" Tasks wait in {named}." if named else " No task waits in any other queue."


def _short(value: Any) -> str:
    return str(value) if isinstance(value, timedelta) else json_payload.short_repr(value, 200)
