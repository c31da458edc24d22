"""The registry: a name in a row is looked up here, and nothing is ever imported because a row names it."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import PayloadError, processor, registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from tests.factories import make_task
from tests.processing.conftest import Crate, Letter

pytestmark = pytest.mark.usefixtures("taskqueue_registry")


def write(task: Lease) -> str:
    return f"wrote {task.id}"


async def write_later(task: Lease) -> str:
    return f"wrote {task.id}"


async def drafts(task: Lease) -> Any:
    yield task


class Writer:
    made = 0

    def drafts(self, task: Lease) -> Any:
        yield task

    def __init__(self) -> None:
        Writer.made += 1

    def process(self, task: Lease) -> str:
        return "processed"


class CallableWriter:
    def __call__(self, task: Lease) -> str:
        return "called"


class AsyncWriter:
    async def process(self, task: Lease) -> str:
        return "processed"


@pytest.mark.parametrize(
    ("function", "is_async"),
    [(write, False), (write_later, True), (Writer, False), (CallableWriter, False), (AsyncWriter, True)],
)
def test_what_can_be_a_processor(function: Any, is_async: bool) -> None:
    before = Writer.made
    made = registry.register("letters", function)
    assert made.is_async is is_async and made.name.startswith("tests.test_registry.")
    assert Writer.made == before + (function is Writer)


HOME = Letter.__module__
TAKEN = [([], []), ([None], [None]), ([Letter, Crate], ["Crate", "Letter"])]
TAKEN += [(registered, [None, "Letter"]) for registered in ([Letter], [None, Letter])]


@pytest.mark.parametrize(("registered", "taken"), TAKEN)
def test_who_takes_a_row(registered: list[type | None], taken: list[str | None]) -> None:
    for payload in registered:
        registry.register("letters", write, payload=payload)
    found = {kind: registry.find("letters", kind and f"{HOME}.{kind}") for kind in (None, "Crate", "Letter")}
    assert [kind for kind, made in found.items() if made] == taken
    assert all(found[kind].payload_type == f"{HOME}.{kind}" for kind in taken if kind)
    assert registry.find("letters", "Letter") is None
    assert registry.payload_types("letters") == [f"{HOME}.{kind}" for kind in taken if kind]
    assert len(registry.processors("letters")) == len(registered)


def test_a_second_processor_is_refused_and_both_are_named() -> None:
    for _ in range(2):  # the same module imported again is no second processor
        registry.register("letters", write)
    assert len(registry.processors("letters")) == 1
    with pytest.raises(ImproperlyConfigured) as refused:
        registry.register("letters", write_later)
    for words in ("'letters'", "tests.test_registry.write", "tests.test_registry.write_later", "plain JSON"):
        assert words in str(refused.value)


def test_a_refused_registration_names_the_fault_and_leaves_nothing_behind() -> None:
    odd = make_dataclass("Odd", [("to", str), ("thing", threading.Thread)])
    with pytest.raises(PayloadError, match=r"Odd\.thing"):
        registry.register("letters", write, payload=odd)
    before = registry.snapshot()
    for options in ({"mode": "nuclear"}, {"max_attempts": 0}, {"batch": 0}, {"lease": "soon"}, {"leese": "1m"}):
        with pytest.raises(ImproperlyConfigured, match=r"@processor\('ghosts'\)"):
            registry.register("ghosts", write, **options)
    assert registry.snapshot() == before and not conf.is_known("ghosts")


def test_snapshot_and_restore() -> None:
    registry.register("letters", write, max_attempts=2, priority=7)
    before = registry.snapshot()
    registry.unregister("letters")
    registry.register("ghosts", write, max_attempts=2)
    registry.restore(before)
    assert "ghosts" not in registry.queues() and not conf.is_known("ghosts")
    assert (conf.default_settings("letters").max_attempts, conf.default_settings("letters").priority) == (2, 7)
    assert registry.snapshot() == before


NAMES = (
    *("os.system", "builtins.eval", "antigravity", "this", "__import__('antigravity')", "tests.test_registry.write"),
    *("django_dbtaskqueue.registry.processor", "__class__.__mro__", "../../etc/passwd", "{0.__class__}", "", "\u202e"),
)


@pytest.mark.django_db
def test_a_row_names_nothing_into_being() -> None:
    registry.register("letters", write, payload=Letter)
    before = set(sys.modules)
    for name in NAMES:
        make_task(queue="letters", payload_type=name, payload={"text": "you"})
        assert registry.find("letters", name) is None
        (lease,) = Task.objects.checkout("letters", poller_instance="p")
        assert lease.payload == {"text": "you"}
    assert not {"antigravity", "this"} & (set(sys.modules) - before)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((nothing, {}, "is not a function") for nothing in (None, 5, "a.path")),
    (object, {}, r"object needs a process\(task\) method"),
    *((one, {}, "is a generator.* none of its code") for one in (drafts, Writer().drafts, partial(Writer().drafts))),
    (write_later, {"mode": "atomic"}, "no async atomic"),
    (write, {"mode": "external"}, "'separate' or 'atomic'"),
    (write_later, {"executor": ThreadPoolExecutor(1)}, "coroutine that is not awaited"),
    (write, {"executor": 5}, r"must be an object with submit\(\)"),
    *((write, {"concurrency": value}, "concurrency=.* whole number of at least 1") for value in (0, -1, 1.5, True)),
    *((write, {"batch": value}, "batch=.* whole number of at least 1") for value in (0, -1, True, "5")),
]


@pytest.mark.parametrize(("function", "options", "words"), REFUSED)
def test_what_cannot_process_is_refused_when_it_is_registered(function: Any, options: Any, words: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=words):
        processor("letters", **options)(function)
    assert registry.find("letters", None) is None
