"""Which function processes which queue. A name in a row is looked up here, never imported."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import codecs, conf
from django_dbtaskqueue import retry as policies
from django_dbtaskqueue.flow.process import Processor

F = TypeVar("F", bound=Callable[..., Any])
MODES = ("separate", "atomic")

_processors: dict[str, dict[str | None, Processor]] = {}
_lock = threading.Lock()


def processor(
    queue: str,
    *,
    payload: type | None = None,
    retry: Any = None,
    max_attempts: int | None = None,
    lease: timedelta | None = None,
    timeout: timedelta | None = None,
    mode: str = "separate",
) -> Callable[[F], F]:
    """Register the decorated function (sync or async), or class with a ``process(task)`` method, for a queue.

    ``payload``: a dataclass or pydantic model the JSON payload is decoded to; None hands over plain JSON. One queue
    may have a processor per payload type. ``retry``: a policy, or a mapping of exception classes to policies (None:
    never retried). ``max_attempts`` counts the first one. ``timeout`` bounds one run, ``lease`` is renewed while it
    runs. ``mode="atomic"`` runs the function and stores its outcome in one transaction on the queue's database.

    What is None here is taken from the settings; ``DBTASKQUEUE["QUEUES"]`` has the last word. Raises
    ``ImproperlyConfigured`` for a second processor of the same payload type, and for what cannot work.
    """

    def register_it(function: F) -> F:
        given = {"retry": retry, "max_attempts": max_attempts, "lease": lease, "timeout": timeout}
        register(queue, function, payload=payload, mode=mode, **given)
        return function

    return register_it


def register(
    queue: str, function: Any, *, payload: type | None = None, mode: str = "separate", **settings: Any
) -> Processor:
    """What ``@processor`` does, as a call."""
    call = _callable(function)
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004 -- an instance whose __call__ is async
    if mode not in MODES:
        raise ImproperlyConfigured(f"@processor({queue!r}): mode={mode!r} must be 'separate' or 'atomic'.")
    if mode == "atomic" and is_async:
        raise ImproperlyConfigured(
            f"@processor({queue!r}): {function.__qualname__} is async and Django has no async atomic(). "
            "Make it a plain function, or use mode='separate' and settle inside your own transaction."
        )
    if payload is not None:
        codecs.prepare(payload)
    declared = {key: value for key, value in settings.items() if value is not None}
    with _lock:
        _refuse_second(queue, payload, function)
        conf.declare(queue, **declared)
        policy = declared.get("retry")
        made = Processor(
            queue=queue,
            function=call,
            payload=payload,
            mode=mode,
            policy=None if policy is None else policies.normalise(policy),
            timeout=declared.get("timeout"),
            is_async=is_async,
        )
        _processors.setdefault(queue, {})[_type(payload)] = made
    return made


def unregister(queue: str, payload: type | None = None) -> None:
    """Take a processor away. Its tasks wait: they do not fail or vanish."""
    with _lock:
        of_queue = _processors.get(queue, {})
        of_queue.pop(_type(payload), None)
        if not of_queue:
            _processors.pop(queue, None)
            conf.forget(queue)


def find(queue: str, payload_type: str | None) -> Processor | None:
    """Return who processes this payload type on this queue.

    A row without a type goes to the queue's processor of plain JSON, or to its only processor; a processor of plain
    JSON takes rows of any type that has no processor of its own only when it is the queue's only one.
    """
    of_queue = _processors.get(queue)
    if not of_queue:
        return None
    found = of_queue.get(payload_type)
    if found is not None:
        return found
    if len(of_queue) == 1:
        only = next(iter(of_queue.values()))
        if payload_type is None:
            return only
    return None


def queues() -> list[str]:
    """Return the queues that have a processor here."""
    return sorted(_processors)


def payload_types(queue: str) -> list[str]:
    """Return the payload types this process can handle on ``queue``."""
    return sorted(name for name in _processors.get(queue, {}) if name is not None)


def processors(queue: str) -> Iterable[Processor]:
    """Return the processors of ``queue``."""
    return tuple(_processors.get(queue, {}).values())


class Snapshot(NamedTuple):
    """All registrations at one moment."""

    processors: dict[str, dict[str | None, Processor]]
    declared: dict[str, dict[str, Any]]


def snapshot() -> Snapshot:
    """Return a copy of all registrations, for ``restore``."""
    return Snapshot({queue: dict(of_queue) for queue, of_queue in _processors.items()}, conf.declared())


def restore(saved: Snapshot) -> None:
    """Put registrations back to a ``snapshot``: tests that register processors use it."""
    with _lock:
        _processors.clear()
        _processors.update({queue: dict(of_queue) for queue, of_queue in saved.processors.items()})
        conf.redeclare(saved.declared)


def _type(payload: type | None) -> str | None:
    return None if payload is None else codecs.type_name(payload)


def _callable(function: Any) -> Callable[[Any], Any]:
    if inspect.isclass(function):
        instance = function()
        call = getattr(instance, "process", instance if callable(instance) else None)
        if call is None:
            raise ImproperlyConfigured(f"{function.__qualname__} needs a process(task) method to be a processor.")
        return call
    return function  # type: ignore[no-any-return]


def _refuse_second(queue: str, payload: type | None, function: Any) -> None:
    there = _processors.get(queue, {}).get(_type(payload))
    if there is None:
        return
    code = getattr(function, "__code__", None)
    if there.name == f"{function.__module__}.{function.__qualname__}":
        return  # the same module imported again
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    raise ImproperlyConfigured(
        f"Queue {queue!r} already has the processor {there.name} for payload {_type(payload) or 'plain JSON'}; "
        f"{function.__module__}.{function.__qualname__}{place} would be a second one. Give it another payload type or "
        "another queue."
    )
