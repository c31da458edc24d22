"""Middleware: the project's code around the call of a processor. It does not change the outcome, unless it says so.

A middleware is a factory, as Django's is: it gets ``call`` and returns what is called with the task (or, for a
processor with ``batch=``, with the list of tasks). A factory is called once in a process, and once more if both sync
and async processors use it. So ``call`` is the same for every task: a context variable has the call that runs now.
"""

from __future__ import annotations

from asyncio import iscoroutinefunction
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

from django.core.exceptions import ImproperlyConfigured, MiddlewareNotUsed

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.exceptions import LeaseLost, MiddlewareError, TaskCancelled, TaskQueueError, dotted
from django_dbtaskqueue.core.lease import Lease

Call = Callable[..., Any]  # a processor, or what a factory returns
Factory = Callable[[Call], Call]
Middleware = str | Factory  # a dotted path, or the factory itself


class Layer(NamedTuple):
    """One middleware, made for sync or for async processors."""

    name: str
    around: Call | None  # None: it raised ``MiddlewareNotUsed``
    changes_outcome: bool


@dataclass(slots=True)
class _Running:
    """What one middleware does with one call, and what became of the call inside it."""

    layers: Sequence[Layer]  # this one, and those inside it
    function: Call
    called: bool = False
    value: object = None
    error: BaseException | None = None


_current: ContextVar[_Running] = ContextVar("dbtaskqueue_middleware")


def surrounded(function: Call, middleware: Iterable[Middleware], *, is_async: bool) -> Call:
    """Return the function with the middleware around it, the first one outermost; itself if there is none.

    Raises ``ImproperlyConfigured`` for what is no middleware, or not one for this kind of function.
    """
    layers = [layer for one in middleware if (layer := layer_of(one, is_async=is_async)).around is not None]
    return partial(_run_async if is_async else _run, layers, function) if layers else function


@cache
def layer_of(middleware: Middleware, *, is_async: bool) -> Layer:
    """Return a middleware as it is made in this process. Raise ``ImproperlyConfigured`` for what cannot be one."""
    name = middleware if isinstance(middleware, str) else dotted(middleware)
    factory = conf.imported(f"Middleware {name!r}", middleware) if isinstance(middleware, str) else middleware
    if not callable(factory):
        raise ImproperlyConfigured(f"Middleware {name!r} is {factory!r:.80}, and not a factory that takes call.")
    kind, default = ("async_capable", False) if is_async else ("sync_capable", True)
    if not getattr(factory, kind, default):
        raise ImproperlyConfigured(_cannot(name, is_async=is_async))
    changes_outcome = bool(getattr(factory, "changes_outcome", False))
    try:
        around = factory(_next_async if is_async else _next)
    except MiddlewareNotUsed as reason:
        logger.debug("Middleware %s is not used: %s", name, reason)
        return Layer(name, None, changes_outcome)
    except Exception as error:
        raise ImproperlyConfigured(f"Middleware {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not callable(around):
        raise ImproperlyConfigured(f"Middleware {name!r} returned {around!r:.80}, and not a function of the task.")
    if is_async is not (iscoroutinefunction(around) or iscoroutinefunction(getattr(around, "__call__", None))):  # noqa: B004 -- an instance whose __call__ is async
        raise ImproperlyConfigured(_cannot(name, is_async=is_async))
    return Layer(name, around, changes_outcome)


def _cannot(name: str, *, is_async: bool) -> str:
    kind = "async" if is_async else "sync"
    return (
        f"Middleware {name!r} is not for {kind} processors, and there is one. Decorate it with "
        "django.utils.decorators.sync_and_async_middleware, and return an async function if call is one."
    )


# -- a call ------------------------------------------------------------------------------------------------------------


def _run(layers: Sequence[Layer], function: Call, task: object) -> object:
    if not layers:
        return function(task)
    with _entered(layers, function, task) as (call, around):
        value = around(task)
    return _returned(call, value)


async def _run_async(layers: Sequence[Layer], function: Call, task: object) -> object:
    if not layers:
        return await function(task)
    with _entered(layers, function, task) as (call, around):
        value = await around(task)
    return _returned(call, value)


def _next(task: object) -> object:
    """Call the next middleware, or the processor: the ``call`` of every sync middleware."""
    with _inside(task) as call:
        call.value = _run(call.layers[1:], call.function, task)
    return call.value


async def _next_async(task: object) -> object:
    """Call the next middleware, or the processor: the ``call`` of every async middleware."""
    with _inside(task) as call:
        call.value = await _run_async(call.layers[1:], call.function, task)
    return call.value


@contextmanager
def _entered(layers: Sequence[Layer], function: Call, task: object) -> Iterator[tuple[_Running, Call]]:
    """Make the call of the first layer the current one; what that raises becomes what the call ends with."""
    layer, call = layers[0], _Running(layers, function)
    assert layer.around is not None  # noqa: S101 -- for the type checker: ``surrounded`` left out the others
    token = _current.set(call)
    before = _guard(task, "" if layer.changes_outcome else layer.name)
    try:
        yield call, layer.around
    except Exception as error:
        _raised(call, error)
    finally:
        _guard(task, before)
        _current.reset(token)


@contextmanager
def _inside(task: object) -> Iterator[_Running]:
    """Let the code inside the middleware that runs settle, and note what it raises."""
    if (call := _current.get(None)) is None:
        raise TaskQueueError(
            "A middleware used call on another thread than its own. Use it on the thread that called the middleware."
        )
    if call.called and not call.layers[0].changes_outcome:
        raise TaskQueueError("It used call twice, which may change the outcome. Set its changes_outcome = True")
    call.called, call.value, call.error = True, None, None
    before = _guard(task, "")
    try:
        yield call
    except BaseException as error:
        call.error = error
        raise
    finally:
        _guard(task, before)


def _guard(task: object, name: str) -> str:
    """Say which middleware runs and may not settle these tasks, or none; return what was said before."""
    before = ""
    for lease in task if isinstance(task, list) else [task]:
        if isinstance(lease, Lease):
            before, lease.guard = lease.guard, name
    return before


def _raised(call: _Running, error: Exception) -> NoReturn:
    """Raise what a call ends with whose middleware raised: the error from inside, if it is not allowed to change it."""
    layer = call.layers[0]
    if error is call.error or isinstance(error, LeaseLost | TaskCancelled):
        raise error
    if layer.changes_outcome:
        error.add_note(f"Raised by the middleware {layer.name}.")
        raise error
    if call.error is not None:
        _refuse(layer, f"raised {type(error).__name__}: {error}", f"the failure {type(call.error).__name__}")
        raise call.error
    raise MiddlewareError(layer.name, f"{type(error).__name__}: {error}") from error


def _returned(call: _Running, value: object) -> object:
    """Return what a call ends with whose middleware returned: what was inside, if it is not allowed to change it."""
    layer = call.layers[0]
    if layer.changes_outcome:
        return value
    if not call.called:
        raise MiddlewareError(
            layer.name, "it did not call the processor, which changes the outcome. Set its changes_outcome = True"
        )
    if call.error is not None:
        _refuse(layer, "hid an exception", f"the failure {type(call.error).__name__}")
        raise call.error
    if value is not call.value:
        hint = " (does it lack a return?)" if value is None else ""
        _refuse(layer, f"returned another {type(value).__name__}{hint}", "what the processor returned")
    return call.value


def _refuse(layer: Layer, did: str, stands: str) -> None:
    text = "Middleware %s %s, and may not change the outcome: %s stands. Set its changes_outcome = True if it is to"
    logger.warning(text, layer.name, did, stands)


conf.on_change(layer_of.cache_clear)
