"""OpenTelemetry: spans and metrics of tasks by the messaging conventions. Off until ``instrument()`` is called.

An enqueue is a producer span. An attempt is a consumer span from the start of the processor until its outcome is
stored: a child of the producer span with a link to it, so each retry is a new span of the same trace. What the
processor does is a child of its attempt. Payloads are in no span; error texts are masked.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import context as otel_context, metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from django_dbtaskqueue import signals
from django_dbtaskqueue.core import __version__
from django_dbtaskqueue.core.context import enqueue_hook, trace_id
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import LeaseLost
from django_dbtaskqueue.core.failure_signature import masked_line
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome

__all__ = ["instrument", "uninstrument"]

SCOPE, SYSTEM = "django_dbtaskqueue", "dbtaskqueue"
PROPAGATOR = TraceContextTextMapPropagator()
Attributes = dict[str, str | int]
T = TypeVar("T")


class Instrumentation(signals.Listener):
    """Makes spans and metrics of what producers and pollers of this process do."""

    def __init__(self, tracers: TracerProvider | None, meters: MeterProvider | None) -> None:
        self._tracer = trace.get_tracer(SCOPE, __version__, tracers)
        meter = metrics.get_meter(SCOPE, __version__, meters)
        duration, of_process = "messaging.client.operation.duration", "messaging.process.duration"
        self._operation = meter.create_histogram(duration, "s", "Duration of enqueueing, by operation")
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Tasks enqueued")
        self._process = meter.create_histogram(of_process, "s", "Duration of attempts until their outcome is stored")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Attempts started")
        # Of each attempt that runs, until its lease goes: its span, and when that began by the clock of this process.
        self._open = WeakKeyDictionary[Lease, tuple[Span, float]]()

    # -- producers -----------------------------------------------------------------------------------------------------

    def around_enqueue(self, queue: str, call: Callable[[], T]) -> T:
        """Call inside a producer span; the tasks that are enqueued take its context along."""
        common = _attributes(queue, "enqueue", "send")
        began = clock.monotonic()
        failed: Attributes = {}
        with self._tracer.start_as_current_span(
            f"enqueue {queue}", kind=SpanKind.PRODUCER, attributes=common, record_exception=False,
            set_status_on_exception=False,
        ) as span:  # fmt: skip
            try:
                made = call()
            except Exception as error:
                failed = _fail(span, error)
                raise
            finally:
                self._operation.record(clock.monotonic() - began, common | failed)
            number = getattr(made, "enqueued", None)  # of a report
            if number is None:
                span.set_attribute("messaging.message.id", str(getattr(made, "pk", None)))
            else:
                span.set_attribute("messaging.batch.message_count", number)
        self._sent.add(1 if number is None else number, common)
        return made

    # -- pollers -------------------------------------------------------------------------------------------------------

    def started(self, task: Lease) -> None:
        """Begin the span of an attempt, and make it the parent of what the processor does."""
        common = _attributes(task.queue, "process", "process")
        headers = json.loads(task.context_text or "{}") if trace_id(task.context_text) is not None else {}
        producer = PROPAGATOR.extract(headers, otel_context.Context())
        link = trace.get_current_span(producer).get_span_context()
        own: Attributes = {
            "messaging.message.id": str(task.id),
            "dbtaskqueue.task.attempt": task.attempt,
            "dbtaskqueue.task.total_attempt": task.total_attempt,
        }
        if task.reference is not None:
            own["messaging.message.conversation_id"] = task.reference
        span = self._tracer.start_span(
            f"process {task.queue}", producer, SpanKind.CONSUMER, {**common, **own},
            [Link(link)] if link.is_valid else [],
        )  # fmt: skip
        _continue(task, span)
        self._open[task] = span, clock.monotonic()
        self._consumed.add(1, common)

    def executed(self, task: Lease, outcome: Outcome | None) -> None:
        self._settled(task, "completed" if outcome is None else outcome.facts.counts_as or outcome.facts.verb)

    def crashed(self, task: Lease, error: BaseException | str) -> None:
        self._settled(task, "lost" if isinstance(error, LeaseLost) else "failed", error)

    def _settled(self, task: Lease, outcome: str, error: BaseException | str | None = None) -> None:
        span, began = self._open.pop(task, (None, 0.0))
        if span is None:
            return
        span.add_event("dbtaskqueue.settled", {"dbtaskqueue.outcome": outcome})
        failed = {} if error is None else _fail(span, error)
        span.end()
        self._process.record(clock.monotonic() - began, _attributes(task.queue, "process", "process") | failed)


_instrumentation: Instrumentation | None = None


def instrument(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make spans and metrics in this process from now on; by default with OpenTelemetry's global providers.

    Call it once in each process, as in ``AppConfig.ready``; a second call changes nothing.
    """
    global _instrumentation
    if _instrumentation is None:
        _instrumentation = Instrumentation(tracer_provider, meter_provider)
        signals.register(_instrumentation)
        enqueue_hook.around = _instrumentation.around_enqueue


def uninstrument() -> None:
    """Take ``instrument`` back."""
    global _instrumentation
    if _instrumentation is not None:
        enqueue_hook.around = None
        signals.unregister(_instrumentation)
        _instrumentation = None


def _attributes(queue: str, name: str, kind: str) -> Attributes:
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": queue,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }


def _continue(task: Lease, span: Span) -> None:
    """Have the processor run in the span, here and in a child process: both read the task's context."""
    with suppress(ValueError):  # a task that cannot be decoded fails
        stored = json.loads(task.context_text or "{}")
        if isinstance(stored, dict) and span.get_span_context().is_valid:
            PROPAGATOR.inject(stored, trace.set_span_in_context(span))
            task.context_text, task.decoded_context = json.dumps(stored), None


def _fail(span: Span, error: BaseException | str) -> Attributes:
    """Let the span fail, and return the attributes that say with what."""
    kind = "failed" if isinstance(error, str) else type(error).__qualname__
    span.set_status(Status(StatusCode.ERROR, masked_line(error)))
    span.set_attribute("error.type", kind)
    return {"error.type": kind}
