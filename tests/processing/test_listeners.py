"""Listeners and signals: told of what is stored, never able to change it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_dbtaskqueue import (
    Complete,
    CompleteDelete,
    Fail,
    Fixed,
    LeaseLost,
    PayloadError,
    Poison,
    Reenqueue,
    processor,
    signals,
)
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.poller.loop import Poller
from tests.processing.conftest import QUEUE, Site, both
from tests.processing.listening import Diary
from tests.processing.pools import two_threads
from tests.support import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
SOON = Fixed(timedelta(milliseconds=20), jitter=0)


@pytest.fixture
def diary() -> Iterator[Diary]:
    made = Diary()
    signals.register(made)
    yield made
    signals.unregister(made)


# -- tasks -------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("mode", "is_async"), [("separate", False), ("separate", True), ("atomic", False)])
def test_the_life_of_a_task_and_what_is_stored_when_it_is_told(
    site: Site, diary: Diary, mode: str, is_async: bool
) -> None:
    async def process(task: Lease) -> str:
        return "done"

    processor(QUEUE, mode=mode)(process if is_async else lambda task: "done")
    site.enqueue(reference="a")
    site.run()
    of_task = [entry[1:] for entry in diary.book if entry[2] == "a"]
    assert of_task == [
        ("checked_out", "a", "PROCESSING"),
        ("started", "a", "PROCESSING"),
        ("executed", "a", "COMPLETED", Complete("done")),
        ("finished", "a", "COMPLETED"),
    ]


OUTCOMES: list[tuple[Any, str, str | None]] = [
    (Complete(1), "executed", "COMPLETED"),
    (CompleteDelete(), "executed", None),
    (Reenqueue(timedelta(hours=1)), "executed", "CREATED"),
    (Poison("bad"), "executed", "POISON"),
    (Fail("no", retry=False), "crashed", "ERROR"),
]


@both
def test_every_outcome_is_told_once_it_is_stored(site: Site, diary: Diary) -> None:
    @processor(QUEUE)
    def process(task: Lease) -> Any:
        number, own = task.payload
        return task._settle(OUTCOMES[number][0]) if own else OUTCOMES[number][0]

    for number in range(len(OUTCOMES)):
        site.enqueue([number, False], f"{number} returned")
        site.enqueue([number, True], f"{number} settled")
    site.run()
    for number, (outcome, hook, status) in enumerate(OUTCOMES):
        for reference in (f"{number} returned", f"{number} settled"):
            *_, ending, finished = [entry for entry in diary.book if entry[2] == reference]
            assert ending[1:] == (hook, reference, status, outcome.error if isinstance(outcome, Fail) else outcome)
            assert finished[1:] == ("finished", reference, status)


def test_each_failed_attempt_is_told_with_what_was_raised(site: Site, diary: Diary) -> None:
    error = ValueError("boom")

    @processor(QUEUE, max_attempts=2, retry=SOON)
    def process(task: Lease) -> None:
        raise error

    site.enqueue(reference="a")
    site.run()
    assert diary.hooks("a") == ["checked_out", "started", "crashed", "finished"] * 2
    assert [entry[3:] for entry in diary.book if entry[1] == "crashed"] == [("CREATED", error), ("ERROR", error)]


def test_a_lost_lease_is_told_as_a_crash_and_never_as_executed(site: Site, diary: Diary) -> None:
    taken_over = threading.Event()

    @processor(QUEUE)
    def process(task: Lease) -> str:
        if task.total_attempt == 1:
            site.tasks().release_all()
            assert taken_over.wait(PATIENCE)
        taken_over.set()
        return "done"

    site.enqueue(reference="a")
    site.run()
    endings = [entry for entry in diary.book if entry[1] in ("executed", "crashed")]
    assert sorted(entry[1] for entry in endings) == ["crashed", "executed"]
    assert isinstance(next(entry[4] for entry in endings if entry[1] == "crashed"), LeaseLost)
    assert diary.hooks("a").count("finished") == 2


def test_each_task_of_a_batch_is_told(site: Site, diary: Diary) -> None:
    processor(QUEUE, batch=5)(lambda tasks: [Poison() if task.reference == "b" else None for task in tasks])
    for reference in "abc":
        site.enqueue(reference=reference)
    site.run()
    assert all(diary.hooks(name) == ["checked_out", "started", "executed", "finished"] for name in "abc")


# -- order and faults --------------------------------------------------------------------------------------------------


def test_before_goes_forward_and_after_goes_backward(site: Site) -> None:
    book: list[tuple[Any, ...]] = []
    first, second = Diary("first", book), Diary("second", book)
    for listener in (first, second, first):  # twice is once
        signals.register(listener)
    try:
        processor(QUEUE)(lambda task: None)
        site.enqueue(reference="a")
        site.run()
    finally:
        for listener in (first, second):
            signals.unregister(listener)
    told = [(name, hook) for name, hook, *facts in book if facts[0] == "a"]
    assert told == [
        ("first", "checked_out"), ("second", "checked_out"), ("first", "started"), ("second", "started"),
        ("second", "executed"), ("first", "executed"), ("second", "finished"), ("first", "finished"),
    ]  # fmt: skip


class Rude(signals.Listener):
    """Raises whatever it is told."""

    def __getattribute__(self, name: str) -> Any:
        if name in dir(signals.Listener) and not name.startswith("_"):
            return self._raise
        return super().__getattribute__(name)

    def _raise(self, *facts: Any) -> None:
        raise RuntimeError("how rude")


def test_a_listener_that_raises_is_logged_and_changes_nothing(
    site: Site, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    rude = Rude()
    signals.register(rude)
    try:
        processor(QUEUE, max_attempts=1)(lambda task: 1 / task.payload)
        well, ill = site.enqueue(1, "well"), site.enqueue(0, "ill")
        with caplog.at_level(logging.ERROR, "django_dbtaskqueue"), site.poller():
            pass
    finally:
        signals.unregister(rude)
    assert (site.task(well).status, site.task(ill).status) == ("COMPLETED", "ERROR")
    assert diary.hooks("well") == ["checked_out", "started", "executed", "finished"]
    assert {f"raised in {hook}" for hook in ("checked_out", "started", "executed", "crashed", "finished")} <= {
        record.getMessage()[record.getMessage().index("raised") :] for record in caplog.records
    }


# -- pollers -----------------------------------------------------------------------------------------------------------


def test_the_life_of_a_poller(site: Site, diary: Diary) -> None:
    processor(QUEUE)(lambda task: None)
    with site.poller() as poller:
        until(lambda: ("diary", "poller_idle", poller) in diary.book)
        site.enqueue()
    told = diary.of_pollers()
    assert {entry[2] for entry in told} == {poller}
    hooks = [entry[1] for entry in told]
    assert hooks[0] == "poller_started" and hooks[-1] == "poller_finished"
    assert hooks.count("poller_started") == hooks.count("poller_finished") == 1
    assert ("diary", "poller_executed", poller, 1) in told


@both
def test_a_turn_that_fails_is_told_and_the_poller_goes_on(site: Site, diary: Diary) -> None:
    processor(QUEUE)(lambda task: None)
    with site.poller() as poller:
        until(lambda: poller.state == "RUNNING")
        with connections[site.alias].cursor() as cursor:  # the table is away for a moment
            cursor.execute("ALTER TABLE dbtaskqueue_task RENAME TO dbtaskqueue_away")
            try:
                poller.wake(QUEUE)
                until(lambda: any(entry[1] == "poll_failed" for entry in diary.book))
            finally:
                cursor.execute("ALTER TABLE dbtaskqueue_away RENAME TO dbtaskqueue_task")
        task = site.enqueue()
        until(lambda: site.task(task).status == "COMPLETED")
    crash = next(entry for entry in diary.book if entry[1] == "poll_failed")
    assert "dbtaskqueue_task" in str(crash[3])


# -- settings ----------------------------------------------------------------------------------------------------------


def test_listeners_of_the_settings(site: Site, settings: Any) -> None:
    settings.DBTASKQUEUE = {"LISTENERS": ["tests.processing.listening.Diary"]}
    processor(QUEUE)(lambda task: None)
    site.enqueue(reference="a")
    with site.poller():
        (diary,) = signals.registered
    assert isinstance(diary, Diary)
    assert diary.hooks("a") == ["checked_out", "started", "executed", "finished"]
    settings.DBTASKQUEUE = {}
    assert signals.registered == []


def test_a_path_that_leads_to_no_listener_is_an_error_of_the_system_check_and_of_a_start(settings: Any) -> None:
    for path in ("tests.processing.listening.Nobody", "tests.processing.listening.Missing", "nowhere"):
        settings.DBTASKQUEUE = {"LISTENERS": [path]}
        (error,) = checks.run_checks(tags=["dbtaskqueue"])
        assert error.id == "dbtaskqueue.E006" and path in error.msg
        poller = Poller({})
        with pytest.raises(ImproperlyConfigured, match="LISTENERS"):
            poller.start()
        poller.close()


def test_listeners_that_are_no_list(settings: Any) -> None:
    settings.DBTASKQUEUE = {"LISTENERS": "tests.processing.listening.Diary"}
    (error,) = checks.run_checks(tags=["dbtaskqueue"])
    assert error.id == "dbtaskqueue.E001" and "is not valid: a list of dotted paths" in error.msg


def test_what_is_no_listener_is_refused() -> None:
    with pytest.raises(TypeError, match="Give an object of a subclass"):
        signals.register(Diary)  # type: ignore[arg-type]


# -- signals -----------------------------------------------------------------------------------------------------------


def test_signals_of_the_same_facts(site: Site) -> None:
    sent: list[tuple[str, Any, dict[str, Any]]] = []
    names = [name for name in dir(signals) if name.startswith(("task_", "poller_"))]
    receivers = {}
    for name in names:
        receivers[name] = lambda sender, signal, name=name, **facts: sent.append((name, sender, facts))
        getattr(signals, name).connect(receivers[name])
    try:
        processor(QUEUE, max_attempts=1)(lambda task: 1 / task.payload)
        site.enqueue(1, "well")
        with site.poller() as poller:
            until(lambda: any(name == "poller_idle" for name, *_ in sent))
            site.enqueue(0, "ill")
    finally:
        for name in names:
            getattr(signals, name).disconnect(receivers[name])

    def of(reference: str) -> list[str]:
        return [name for name, _, facts in sent if "task" in facts and facts["task"].reference == reference]

    assert of("well") == ["task_checked_out", "task_started", "task_executed", "task_finished"]
    assert of("ill") == ["task_checked_out", "task_started", "task_crashed", "task_finished"]
    assert {sender for name, sender, _ in sent if name.startswith("task_")} == {QUEUE}
    assert {sender for name, sender, _ in sent if name.startswith("poller_")} == {poller.instance}
    facts = {name: facts for name, _, facts in sent}
    assert isinstance(facts["task_crashed"]["error"], ZeroDivisionError)
    assert isinstance(facts["task_finished"]["error"], ZeroDivisionError)
    assert facts["poller_executed"]["tasks"] == 1
    assert {"poller_started", "poller_idle", "poller_stopped"} <= facts.keys()


@dataclass(frozen=True)
class Parcel:
    """A payload of a class of its own."""

    weight: int


class Reader(signals.Listener):
    """Writes down what each hook reads of a task."""

    def __init__(self) -> None:
        self.read: list[tuple[str, Any, Any]] = []

    def note(self, hook: str, task: Lease) -> None:
        try:
            self.read.append((hook, task.payload, task.context.get("tenant")))
        except PayloadError:
            self.read.append((hook, "cannot be decoded", None))

    def checked_out(self, task: Lease) -> None:
        self.note("checked_out", task)

    def started(self, task: Lease) -> None:
        self.note("started", task)

    def finished(self, task: Lease) -> None:
        self.note("finished", task)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    signals.register(made)
    yield made
    signals.unregister(made)


def in_a_thread(task: Lease) -> None:
    """Do nothing."""


async def on_the_loop(task: Lease) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("function", "options"),
    [(in_a_thread, {}), (in_a_thread, {"concurrency": 1}), (on_the_loop, {}), (in_a_thread, {"executor": two_threads})],
    ids=["thread", "limited", "async", "pool"],
)
def test_hooks_before_the_work_see_payload_and_context(
    site: Site, reader: Reader, function: Any, options: dict[str, Any]
) -> None:
    processor(QUEUE, payload=Parcel, **options)(function)
    for run in (site.drain, site.run):
        site.enqueue(Parcel(3), context={"tenant": "ada"})
        run()
    assert reader.read == [(hook, Parcel(3), "ada") for hook in ("checked_out", "started", "finished")] * 2


def test_hooks_before_the_work_do_not_take_what_cannot_be_decoded_for_no_payload(site: Site, reader: Reader) -> None:
    processor(QUEUE, payload=Parcel)(in_a_thread)
    task = site.enqueue(Parcel(3))
    site.tasks(pk=task.pk).update(payload={"weight": "heavy"})
    site.drain()
    assert [payload for _hook, payload, _tenant in reader.read] == ["cannot be decoded"] * 3
    assert site.task(task).status == "ERROR"
