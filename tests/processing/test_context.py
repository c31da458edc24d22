"""Context: captured where a task is enqueued, there again where it is processed, separate per task."""

import asyncio
import decimal
import sys
import threading
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.urls import get_urlconf, set_urlconf
from django.utils import timezone, translation
from django.utils.timezone import get_current_timezone_name
from django.utils.translation import get_language

from django_dbtaskqueue import Complete, enqueue_many, processor
from django_dbtaskqueue.core import context
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.core.lease import Lease
from tests.processing.conftest import QUEUE, Site
from tests.support import PATIENCE

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def deep_inside(task: Any = None) -> dict[str, Any]:
    return dict(context.current())


def test_what_is_bound_travels_and_explicit_values_win(site: Site) -> None:
    processor(QUEUE)(lambda task: [deep_inside(), task.context])
    with context.bound(request="4711", user="ann"), context.bound(user="bob"):
        task = site.enqueue(context={"request": "0815"})
    site.drain()
    assert site.task(task).result == [{"request": "0815", "user": "bob"}] * 2 and context.current() == {}
    assert site.task(site.enqueue()).context is None
    with context.bound(run=7):
        enqueue_many(QUEUE, [("a", 1), {"reference": "b", "context": {"x": 1}}], using=site.alias)
    assert site.values("context")[2:] == [{"run": 7}, {"run": 7, "x": 1}]


def test_a_task_sees_its_own_context_and_not_the_one_around_the_poller(site: Site) -> None:
    @processor(QUEUE, max_attempts=1)
    def process(task: Lease) -> dict[str, Any]:
        return deep_inside() if task.payload != "fails" else {1: 1 / 0}

    for given, payload in (({"a": 1}, None), ({"secret": 1}, "fails"), ({}, None)):
        with context.bound(**given):
            site.enqueue(payload)
    with context.bound(of_the_poller=True):
        site.drain()
        assert context.current() == {"of_the_poller": True}
    assert site.values("result") == [{"a": 1}, None, {}]


def test_what_a_processor_enqueues_inherits(site: Site) -> None:
    @processor(QUEUE)
    def process(task: Lease) -> dict[str, Any]:
        if task.payload == "parent":
            with context.bound(step=2):
                site.enqueue("child", "child")
        return deep_inside()

    with context.bound(request="4711"):
        site.enqueue("parent")
    site.drain()
    assert site.tasks().get(reference="child").result == {"request": "4711", "step": 2}


def test_it_is_read_only_and_what_json_cannot_hold_is_refused_where_it_is_enqueued(site: Site) -> None:
    with context.bound(a=1), pytest.raises(TypeError):
        context.current()["b"] = 2  # type: ignore[index]
    with context.bound(handle=object()), pytest.raises(EnqueueError, match=r"context\.handle"):
        site.enqueue()


@committed
def test_threads_side_by_side(site: Site) -> None:
    meeting = threading.Barrier(4)

    @processor(QUEUE)
    def process(task: Lease) -> list[Any]:
        before = deep_inside()
        meeting.wait(PATIENCE)
        return [before, deep_inside()]

    for number in range(4):
        with context.bound(number=number):
            site.enqueue()
    site.run(threads=4)
    assert site.values("result") == [[{"number": n}] * 2 for n in range(4)]


@committed
def test_async_tasks_side_by_side(site: Site) -> None:
    seen: dict[str, list[Any]] = {}
    meeting: list[asyncio.Event] = []

    async def child() -> dict[str, Any]:
        return deep_inside()

    @processor(QUEUE)
    async def process(task: Lease) -> None:
        if not meeting:
            meeting.append(asyncio.Event())
        seen[task.reference or ""] = [deep_inside()]
        if len(seen) == 4:
            meeting[0].set()
        await asyncio.wait_for(meeting[0].wait(), PATIENCE)
        seen[task.reference or ""] += [deep_inside(), await asyncio.create_task(child())]

    for number in range(3):
        with context.bound(number=number):
            site.enqueue(reference=str(number))
    site.enqueue(reference="none")
    site.run(coroutines=4)
    assert seen == {str(n): [{"number": n}] * 3 for n in range(3)} | {"none": [{}] * 3}


@committed
def test_a_batch_call_has_no_context_of_its_own(site: Site) -> None:
    processor(QUEUE, batch=5)(lambda tasks: [[task.context, deep_inside()] for task in tasks])
    with context.bound(a=1):
        site.enqueue()
    site.run()
    assert site.values("result") == [[{"a": 1}, {}]]


def test_the_active_span_is_the_parent_of_spans_in_the_processor(site: Site) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra otel")

    @processor(QUEUE)
    def process(task: Lease) -> list[Any]:
        span = trace.get_current_span().get_span_context()
        site.enqueue("child") if task.payload != "child" else None
        return [f"{span.trace_id:032x}", f"{span.span_id:016x}", span.is_remote, dict(span.trace_state)]

    ids = PARENT[3:35], PARENT[36:52]
    state = trace.TraceState([("vendor", "abc")])
    active = trace.SpanContext(*(int(one, 16) for one in ids), False, trace.TraceFlags(1), state)
    with trace.use_span(trace.NonRecordingSpan(active)):
        site.enqueue()
    assert site.values("context") == [{"traceparent": PARENT, "tracestate": "vendor=abc"}]
    site.drain()
    assert site.values("result") == [[*ids, True, {"vendor": "abc"}]] * 2
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("in_use", [True, False])
def test_a_trace_context_is_handed_on_where_it_is_not_followed(site: Site, in_use: bool, monkeypatch: Any) -> None:
    if not in_use:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    processor(QUEUE)(deep_inside)
    contexts = [{"traceparent": value} for value in (PARENT, "00-zz", "", 5, None, "00-0-0-0")]
    for given in contexts:
        site.enqueue(context=given)
    site.drain()
    assert site.values("result") == contexts


SEEN: ContextVar[str] = ContextVar("seen", default="clean")


def leave_traces(task: Lease | list[Lease]) -> Any:
    seen = [get_language(), get_current_timezone_name(), SEEN.get(), get_urlconf(), decimal.getcontext().prec]
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    SEEN.set("dirty")
    set_urlconf("tests.urls")
    decimal.getcontext().prec = 5
    return Complete(seen)


async def leave_traces_async(task: Lease) -> Any:
    first = leave_traces(task)
    await asyncio.sleep(0)
    assert SEEN.get() == "dirty"  # it is its own context all the time
    assert await sync_to_async(SEEN.get)() == "dirty"
    return first


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "on a thread": (leave_traces, {}),
    "in a batch": (leave_traces, {"batch": 1}),
    "atomic": (leave_traces, {"mode": "atomic"}),
    "on the event loop": (leave_traces_async, {}),
    "on another executor": (leave_traces, {"executor": "tests.processing.named.two_threads"}),
}


@committed
@pytest.mark.parametrize("way", WAYS)
def test_what_a_task_sets_in_its_context_the_next_one_does_not_see(site: Site, way: str) -> None:
    function, options = WAYS[way]
    processor(QUEUE, concurrency=1, **options)(function)
    site.fill(1, 2, 3)
    site.run(threads=1, coroutines=1)
    assert site.values("result") == [["en-us", "UTC", "clean", None, 28]] * 3
