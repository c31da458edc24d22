"""Middleware that is found by its dotted path, and a processor that another process finds."""

import os
import threading
from asyncio import iscoroutinefunction
from collections.abc import Callable
from typing import Any

from django.core.exceptions import MiddlewareNotUsed
from django.utils.decorators import sync_and_async_middleware

BOOK: list[tuple[Any, ...]] = []
Call = Callable[[Any], Any]


def _note(name: str, when: str, what: Any) -> Any:
    BOOK.append((name, when, what, threading.get_ident()))
    return what


def _writing(name: str, call: Call) -> Call:
    if not iscoroutinefunction(call):
        return lambda task: _note(name, "after", call(_note(name, "before", task)))

    async def around_async(task: Any) -> Any:
        return _note(name, "after", await call(_note(name, "before", task)))

    return around_async


@sync_and_async_middleware
def outer(call: Call) -> Call:
    return _writing("outer", call)


@sync_and_async_middleware
def inner(call: Call) -> Call:
    return _writing("inner", call)


def sync_only(call: Call) -> Call:
    return _writing("sync only", call)


@sync_and_async_middleware
def unused(call: Call) -> Call:
    raise MiddlewareNotUsed


class NotDone:
    """Not what ``factory(call)`` may return."""

    def __new__(cls, call: Call) -> Any:
        return "nothing to call"


def with_process(call: Call) -> Call:
    """Add the process in which it runs."""
    return lambda task: [os.getpid(), call(task)]


with_process.changes_outcome = True  # type: ignore[attr-defined]
