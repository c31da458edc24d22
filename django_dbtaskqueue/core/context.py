"""Context that travels with a task: captured by the enqueue, and in force again while the task is processed.

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

import json
import re
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from types import MappingProxyType, coroutine
from typing import Any, TypeVar

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.json import short_repr

__all__ = ["bound", "current"]

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
EMPTY: Mapping[str, object] = MappingProxyType({})
S = TypeVar("S")
T = TypeVar("T")


@contextmanager
def set_inside(variable: ContextVar[S], value: S) -> Iterator[None]:
    """Let a context variable have a value inside a ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class EnqueueHook:
    """What an instrumentation puts around each enqueue of this process."""

    def __init__(self) -> None:
        self.around: Callable[[str, Callable[[], Any]], Any] | None = None  # calls an enqueue; None costs nothing
        self._inside: ContextVar[bool] = ContextVar("dbtaskqueue_enqueue_hook", default=False)

    def applies(self) -> bool:
        """Whether this call is to be surrounded: the call inside is not, again."""
        return self.around is not None and not self._inside.get()

    def surround(self, queue: str, call: Callable[[], T]) -> T:
        with set_inside(self._inside, True):
            result: T = call() if self.around is None else self.around(queue, call)
            return result


enqueue_hook = EnqueueHook()
ambient: ContextVar[Mapping[str, object]] = ContextVar("dbtaskqueue_context", default=EMPTY)
# The aliases of standbys by the alias that each follows, while a page is read from them (``db.standby``).
standbys: ContextVar[Mapping[str, str]] = ContextVar("dbtaskqueue_standbys", default=MappingProxyType({}))
# The database that a page is about, if its address names one: it stands for the common one, and for a queue's shards.
shown_database: ContextVar[str] = ContextVar("dbtaskqueue_shown_database", default="")

wake_listeners: set[Callable[[str], None]] = set()  # what this process tells of a queue that it wakes (``db.notify``)


def current() -> Mapping[str, object]:
    """Return the context in force, read-only: that of the task being processed, and what ``bound`` added."""
    return ambient.get()


@contextmanager
def bound(**values: object) -> Iterator[None]:
    """Add to the context inside a ``with`` block. The values must have a JSON form."""
    with only({**ambient.get(), **values}):
        yield


def only(context: Mapping[str, object]) -> AbstractContextManager[None]:
    """Replace the whole context inside a ``with`` block."""
    return set_inside(ambient, MappingProxyType(dict(context)) if context else EMPTY)


@contextmanager
def restored(context: Mapping[str, object]) -> Iterator[None]:
    """Make a task's context the whole context, and the span it was enqueued in the parent of new spans."""
    with only(context), _span(context.get("traceparent"), context.get("tracestate")):
        yield


@coroutine
def in_copy(function: Callable[[S], Awaitable[T]], given: S) -> Generator[object, object, T]:
    """Await a call in a copy of the context, as in a task of its own: what it sets there is gone afterwards."""

    async def call() -> T:
        return await function(given)

    run, awaited = copy_context().run, call()
    step: Callable[..., object] = awaited.send
    value: object = None
    while True:
        try:
            yielded = run(step, value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            step, value = awaited.send, (yield yielded)
        except BaseException as error:
            step, value = awaited.throw, error


def with_span(inherited: Mapping[str, object]) -> Mapping[str, object]:
    """Return a context with the active span of OpenTelemetry, if there is one."""
    get_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    span = None if get_span is None else get_span().get_span_context()  # none is active if it is not imported
    if span is None or not span.is_valid:
        return inherited
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    state = {"tracestate": span.trace_state.to_header()} if span.trace_state else {}
    return {name: value for name, value in inherited.items() if name != "tracestate"} | {"traceparent": parent, **state}


def mapping(context: object) -> dict[str, object]:
    """Return the context of a row; raise ``TaskQueueError`` for what is no JSON object."""
    if not isinstance(context, dict | None):
        shown = short_repr(context)
        raise TaskQueueError(
            f"The context of a task is a JSON object, and this row has {shown}. Mend the row's context."
        )
    return context or {}


def trace_id(text: str | None) -> str | None:
    """Return the trace id of a context that is still JSON text, or None."""
    if text is None or "traceparent" not in text:
        return None
    try:
        context = json.loads(text)
    except ValueError:
        return None
    traceparent = context.get("traceparent") if isinstance(context, dict) else None
    found = TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    return None if found is None else found[1]


def _span(traceparent: object, state: object) -> AbstractContextManager[object]:
    trace = sys.modules.get("opentelemetry.trace")
    parts = TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if parts is None or trace is None or not hasattr(trace, "use_span"):
        return nullcontext()
    trace_id, span_id, flags = (int(part, 16) for part in parts.groups())
    states = trace.TraceState.from_header([state] if isinstance(state, str) else [])
    span = trace.NonRecordingSpan(trace.SpanContext(trace_id, span_id, True, trace.TraceFlags(flags), states))
    entered: AbstractContextManager[object] = trace.use_span(
        span, record_exception=False, set_status_on_exception=False
    )
    return entered
