"""Middleware that is found by its dotted path, and a processor that another process finds."""

from __future__ import annotations

import os
import threading
from asyncio import iscoroutinefunction
from collections.abc import Callable
from typing import Any

from django.core.exceptions import MiddlewareNotUsed
from django.utils.decorators import sync_and_async_middleware

BOOK: list[tuple[Any, ...]] = []
Call = Callable[[Any], Any]


def _writing(name: str, call: Call) -> Call:
    if iscoroutinefunction(call):

        async def around_async(task: Any) -> Any:
            BOOK.append((name, "before", task, threading.get_ident()))
            value = await call(task)
            BOOK.append((name, "after", value, threading.get_ident()))
            return value

        return around_async

    def around(task: Any) -> Any:
        BOOK.append((name, "before", task, threading.get_ident()))
        value = call(task)
        BOOK.append((name, "after", value, threading.get_ident()))
        return value

    return around


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
