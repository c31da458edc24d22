"""OpenTelemetry: what its own SDK receives of a task's life, from a request to a retry."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as conventions
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.trace import SpanKind, StatusCode

from django_dbtaskqueue import DuplicateTask, enqueue, enqueue_many, processor
from django_dbtaskqueue.contrib.otel import instrument, uninstrument
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import drain
from tests.poller.processes import polling
from tests.support import until

QUEUE = "traced"
pytestmark = pytest.mark.django_db


class Site:
    """The SDK of a project, as far as it keeps what it receives."""

    def __init__(self) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = self.traces.get_tracer("project")
        self.meters = MeterProvider([self._reader])

    def spans(self, kind: SpanKind) -> list[ReadableSpan]:
        found = [span for span in self._spans.get_finished_spans() if span.kind == kind]
        return sorted(found, key=lambda span: span.start_time or 0)

    def shown(self) -> str:
        """Return all that was received, as text."""
        return f"{[span.to_json() for span in self._spans.get_finished_spans()]} {self._reader.get_metrics_data()}"

    def metric(self, name: str) -> Any:
        data: Any = self._reader.get_metrics_data()
        found = [one for part in data.resource_metrics for scope in part.scope_metrics for one in scope.metrics]
        (points,) = (one.data.data_points for one in found if one.name == name)
        return points


@pytest.fixture
def site(settings: Any, taskqueue_registry: None) -> Iterator[Site]:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"retry": "fixed:10ms", "max_attempts": 2}}}
    found = Site()
    instrument(found.traces, found.meters)
    yield found
    uninstrument()


def parent(span: ReadableSpan) -> int | None:
    return span.parent and span.parent.span_id


@pytest.mark.django_db(transaction=True)
def test_one_trace_from_a_view_through_a_failing_attempt_to_the_retry(site: Site) -> None:
    @processor(QUEUE)
    def process(task: Lease) -> None:
        with site.tracer.start_as_current_span("work"):
            if task.attempt == 1:
                raise ConnectionError("password=hunter2 was refused")

    with site.tracer.start_as_current_span("view", kind=SpanKind.SERVER), transaction.atomic():
        task = enqueue(QUEUE, "order 7")
    with polling({QUEUE: 1}):
        until(lambda: Task.objects.get().status == "COMPLETED")
        until(lambda: len(site.spans(SpanKind.CONSUMER)) == 2)
    (view,), (producer,) = site.spans(SpanKind.SERVER), site.spans(SpanKind.PRODUCER)
    attempts, works = site.spans(SpanKind.CONSUMER), site.spans(SpanKind.INTERNAL)
    assert {span.context.trace_id for span in (view, producer, *attempts, *works)} == {view.context.trace_id}
    assert parent(producer) == view.context.span_id
    for attempt, work in zip(attempts, works, strict=True):
        assert (parent(attempt), parent(work)) == (producer.context.span_id, attempt.context.span_id)
        (link,) = attempt.links
        assert (link.context.trace_id, link.context.span_id) == (view.context.trace_id, producer.context.span_id)
    first, second = attempts
    assert [one.attributes["dbtaskqueue.task.attempt"] for one in attempts if one.attributes] == [1, 2]
    outcomes = [dict(event.attributes or {}) for one in attempts for event in one.events]
    assert outcomes == [{"dbtaskqueue.outcome": outcome} for outcome in ("failed", "completed")]
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert "was refused" in str(first.status.description) and "hunter2" not in str(first.status.description)
    assert first.attributes is not None and first.attributes["error.type"] == "ConnectionError"
    assert producer.name == f"enqueue {QUEUE}" and first.name == f"process {QUEUE}"
    for span, name, kind in ((producer, "enqueue", "send"), (first, "process", "process")):
        expected = {
            conventions.MESSAGING_SYSTEM: "dbtaskqueue", conventions.MESSAGING_DESTINATION_NAME: QUEUE,
            conventions.MESSAGING_OPERATION_NAME: name, conventions.MESSAGING_OPERATION_TYPE: kind,
            conventions.MESSAGING_MESSAGE_ID: str(task.pk),
        }  # fmt: skip
        assert expected.items() <= dict(span.attributes or {}).items()


def test_metrics_by_the_messaging_conventions(site: Site) -> None:
    processor(QUEUE)(lambda task: None)
    enqueue(QUEUE, "a")
    enqueue_many(QUEUE, [("b", None), ("c", None)])
    with pytest.raises(DuplicateTask):
        enqueue(QUEUE, "a")
    drain(QUEUE)
    assert sum(point.value for point in site.metric(messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES)) == 3
    operations = site.metric(messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION)
    assert {point.attributes.get("error.type"): point.count for point in operations} == {None: 2, "DuplicateTask": 1}
    (consumed,) = site.metric(messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES)
    (processed,) = site.metric(messaging_metrics.MESSAGING_PROCESS_DURATION)
    assert consumed.value == processed.count == 3
    assert processed.attributes["messaging.destination.name"] == QUEUE


def test_many_tasks_are_one_producer_span_and_instrumenting_twice_is_once(site: Site) -> None:
    instrument(site.traces, site.meters)
    enqueue_many(QUEUE, [("a", None), ("b", None)])
    (producer,) = site.spans(SpanKind.PRODUCER)
    assert producer.attributes is not None and producer.attributes["messaging.batch.message_count"] == 2
    assert len({str(row.context) for row in Task.objects.all()}) == 1
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_what_a_processor_enqueues_is_a_child_of_its_attempt(site: Site) -> None:
    @processor(QUEUE)
    def process(task: Lease) -> None:
        if task.reference == "parent":
            enqueue(QUEUE, "child")

    enqueue(QUEUE, "parent", context={"user": "ada"})
    drain(QUEUE)
    first, child = site.spans(SpanKind.PRODUCER)
    assert parent(child) == site.spans(SpanKind.CONSUMER)[0].context.span_id
    assert child.context.trace_id == first.context.trace_id
    assert Task.objects.get(reference="child").context["user"] == "ada"


def test_a_task_that_nobody_traced_begins_a_trace(site: Site) -> None:
    processor(QUEUE)(lambda task: dict(task.context))
    uninstrument()
    enqueue(QUEUE, "plain", context={"traceparent": "nonsense"})
    instrument(site.traces, site.meters)
    drain(QUEUE)
    (attempt,) = site.spans(SpanKind.CONSUMER)
    assert attempt.parent is None and list(attempt.links) == []


def test_nothing_is_imported_while_it_is_off() -> None:
    code = """
        import sys, django
        from django.conf import settings
        settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django_dbtaskqueue"])
        django.setup()
        import django_dbtaskqueue.flow.enqueue_many, django_dbtaskqueue.management.commands.runtaskpoller
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"opentelemetry", "prometheus_client"}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
