"""Context that travels with a task: captured where it is enqueued, there again where it is processed.

::

    with context.bound(request_id="4711"):
        enqueue("mail", payload=letter)

    @processor("mail")
    def send(task):
        context.current()["request_id"]      # "4711"; the same as task.context, in any function called from here

A task's context is separate from every other's, also between async tasks of one event loop. A task enqueued by a
processor inherits the processor's context. Where OpenTelemetry is in use, the W3C ``traceparent`` of the active span
travels along, and spans of the processor become children of that span.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
EMPTY: Mapping[str, Any] = MappingProxyType({})
_ambient: ContextVar[Mapping[str, Any]] = ContextVar("dbtaskqueue_context", default=EMPTY)


def current() -> Mapping[str, Any]:
    """Return the context in force here, read-only: of the task being processed, with what ``bound`` added."""
    return _ambient.get()


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Add to the context for the time of a ``with`` block. Values are what JSON can hold."""
    with only({**_ambient.get(), **values}):
        yield


@contextmanager
def only(context: Mapping[str, Any]) -> Iterator[None]:
    """Make ``context`` the whole context for the time of a ``with`` block."""
    token = _ambient.set(MappingProxyType(dict(context)) if context else EMPTY)
    try:
        yield
    finally:
        _ambient.reset(token)


@contextmanager
def restored(context: Mapping[str, Any]) -> Iterator[None]:
    """Make a task's context the whole context, and the span it was enqueued in the parent of new spans."""
    with only(context), _span(context.get("traceparent")):
        yield


def captured(explicit: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what a task enqueued here takes along: ambient context, active span, and ``explicit`` over both."""
    ambient, trace = _ambient.get(), _traceparent()
    if not ambient and trace is None:
        return explicit
    return {**ambient, **({} if trace is None else {"traceparent": trace}), **(explicit or {})}


def _traceparent() -> str | None:
    """Return the active span as W3C text. A span can only be active where OpenTelemetry was imported already."""
    get_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    span = None if get_span is None else get_span().get_span_context()
    if span is None or not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"


def _span(traceparent: Any) -> AbstractContextManager[Any]:
    trace: Any = sys.modules.get("opentelemetry.trace")
    parts = TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if parts is None or not hasattr(trace, "use_span"):
        return nullcontext()
    trace_id, span_id, flags = (int(part, 16) for part in parts.groups())
    remote = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    span = trace.NonRecordingSpan(remote)
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)  # type: ignore[no-any-return]
