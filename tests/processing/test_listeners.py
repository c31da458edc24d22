"""Listeners and signals: told of what is stored, never able to change it."""

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import LeaseLost, PayloadError, processor, signals
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, CompleteDelete, Fail, Poison, Reenqueue
from django_dbtaskqueue.poller.loop import Poller
from tests.operations.site import refused
from tests.processing.conftest import QUEUE, SOON, Crate, Site, both, on_real_connections
from tests.processing.named import LIFE, Diary, Told, listening, two_threads
from tests.support import PATIENCE, sql, until

pytestmark = on_real_connections


@pytest.fixture
def diary() -> Iterator[Diary]:
    with listening(made := Diary()):
        yield made


def on_thread(task: Lease) -> str:
    return "well"


async def on_the_loop(task: Lease) -> str:
    return "well"


@both
@pytest.mark.parametrize(("function", "options"), [(on_thread, {}), (on_the_loop, {}), (on_thread, {"mode": "atomic"})])
def test_the_life_of_a_task_and_what_is_stored_when_told(site: Site, diary: Diary, function: Any, options: Any) -> None:
    processor(QUEUE, **options)(function)
    site.ran(reference="a")
    before = [("checked_out", "PROCESSING"), ("started", "PROCESSING")]
    assert diary.of("a") == [*before, ("executed", "COMPLETED", Complete("well")), ("finished", "COMPLETED")]


OUTCOMES: list[tuple[Any, str, str | None]] = [
    (Complete(1), "executed", "COMPLETED"),
    (CompleteDelete(), "executed", None),
    (Reenqueue(timedelta(hours=1)), "executed", "CREATED"),
    (Poison("bad"), "executed", "POISON"),
    (Fail("no", retry=False), "crashed", "ERROR"),
]


@both
@pytest.mark.parametrize("own", [False, True], ids=["returned", "settled"])
def test_every_outcome_is_told_once_it_is_stored(site: Site, diary: Diary, own: bool) -> None:
    @processor(QUEUE)
    def process(task: Lease) -> Any:
        outcome = OUTCOMES[task.payload][0]
        return task._settle(outcome) if own else outcome

    for number in range(len(OUTCOMES)):
        site.enqueue(number, str(number))
    site.run()
    for number, (outcome, hook, status) in enumerate(OUTCOMES):
        told = outcome.error if isinstance(outcome, Fail) else outcome
        assert diary.of(str(number))[-2:] == [(hook, status, told), ("finished", status)]


def test_each_failed_attempt_is_told_with_what_was_raised(site: Site, diary: Diary) -> None:
    error = ValueError("boom")

    @processor(QUEUE, max_attempts=2, retry=SOON)
    def process(task: Lease) -> None:
        raise error

    site.ran(reference="a")
    assert diary.hooks("a") == ["checked_out", "started", "crashed", "finished"] * 2
    crashes = [told for told in diary.of("a") if told[0] == "crashed"]
    assert crashes == [("crashed", "CREATED", error), ("crashed", "ERROR", error)]


def test_a_lost_lease_is_told_as_a_crash_and_never_as_executed(site: Site, diary: Diary, caplog: Any) -> None:
    taken_over = threading.Event()

    @processor(QUEUE)
    def process(task: Lease) -> None:
        if task.total_attempt == 1:
            site.tasks().release_all()
            assert taken_over.wait(PATIENCE)
        taken_over.set()

    site.ran(reference="a")
    assert sorted(diary.hooks("a")) == sorted([*LIFE, "checked_out", "started", "crashed", "finished"])
    [(_, _, error)] = [told for told in diary.of("a") if told[0] == "crashed"]
    assert isinstance(error, LeaseLost)
    [lost] = [record for record in caplog.records if getattr(record, "task_event", "") == "lease_lost"]
    assert (lost.levelname, lost.__dict__["attempt"]) == ("WARNING", 1)


def test_each_task_of_a_batch_is_told(site: Site, diary: Diary) -> None:
    processor(QUEUE, batch=5)(lambda tasks: [Poison() if task.reference == "b" else None for task in tasks])
    for reference in "abc":
        site.enqueue(reference=reference)
    site.run()
    assert [diary.hooks(name) for name in "abc"] == [LIFE] * 3


class Reader(Told):
    def __init__(self) -> None:
        self.read: list[tuple[Any, ...]] = []

    def told(self, hook: str, subject: Any, *facts: Any) -> None:
        if hook in LIFE:
            try:
                self.read.append((hook, subject.payload, subject.context.get("tenant"), *facts))
            except PayloadError:
                self.read.append((hook, "cannot be decoded", None))


@pytest.mark.parametrize(
    ("function", "options"),
    [(on_thread, {}), (on_thread, {"concurrency": 1}), (on_the_loop, {}), (on_thread, {"executor": two_threads})],
    ids=["thread", "limited", "async", "pool"],
)
def test_hooks_before_the_work_see_payload_and_context(site: Site, function: Any, options: dict[str, Any]) -> None:
    processor(QUEUE, payload=Crate, **options)(function)
    with listening(reader := Reader()):
        for run in (site.drain, site.run):
            site.enqueue(Crate(3), context={"tenant": "ada"})
            run()
        assert [signals.unregister(reader), signals.unregister(reader)] == [True, False]
    told = [(hook, Crate(3), "ada") for hook in LIFE]
    assert reader.read == [*told[:2], (*told[2], Complete("well")), told[3]] * 2


def test_hooks_before_the_work_do_not_take_what_cannot_be_decoded_for_no_payload(site: Site) -> None:
    processor(QUEUE, payload=Crate)(on_thread)
    site.enqueue(Crate(3))
    site.tasks().update(payload={"weight": "heavy"})
    with listening(reader := Reader()):
        site.drain()
    assert [payload for _hook, payload, _tenant in reader.read] == ["cannot be decoded"] * 3
    assert site.values("status") == ["ERROR"]


def test_before_goes_forward_and_after_goes_backward(site: Site) -> None:
    book: list[tuple[Any, ...]] = []
    first, second = Diary("first", book), Diary("second", book)
    processor(QUEUE)(on_thread)
    site.enqueue(reference="a")
    with listening(first, second, first):  # twice is once
        site.run()
    told = [(hook, name) for name, hook, about, *_ in book if about == "a"]
    before = [(hook, name) for hook in ("checked_out", "started") for name in ("first", "second")]
    assert told == before + [(hook, name) for hook in ("executed", "finished") for name in ("second", "first")]


class Rude(Told):
    def told(self, hook: str, subject: Any, *facts: Any) -> None:
        raise RuntimeError("how rude")


def test_a_listener_that_raises_is_logged_and_changes_nothing(site: Site, diary: Diary, caplog: Any) -> None:
    processor(QUEUE, max_attempts=1)(lambda task: 1 / task.payload)
    site.enqueue(1, "well")
    site.enqueue(0, "ill")
    with caplog.at_level(logging.ERROR, "django_dbtaskqueue"), listening(Rude()):
        site.run()
    assert site.values("status") == ["COMPLETED", "ERROR"] and diary.hooks("well") == LIFE
    assert all(f"raised in {hook}" in caplog.text for hook in (*LIFE, "crashed"))


def test_the_life_of_a_poller(site: Site, diary: Diary) -> None:
    processor(QUEUE)(on_thread)
    with site.poller() as poller:
        until(lambda: ("poller_idle",) in diary.of(poller))
        site.enqueue()
    assert {about for _, hook, about, *_ in diary.book if hook.startswith("poll")} == {poller}
    hooks = diary.hooks(poller)
    assert (hooks[0], hooks[-1]) == ("poller_started", "poller_finished")
    assert hooks.count("poller_started") == hooks.count("poller_finished") == 1
    assert ("poller_executed", 1) in diary.of(poller)


@both
def test_a_turn_that_fails_is_told_and_the_poller_goes_on(site: Site, diary: Diary) -> None:
    processor(QUEUE)(on_thread)
    with site.poller() as poller:
        until(lambda: poller.state == "RUNNING")
        sql("ALTER TABLE dbtaskqueue_task RENAME TO dbtaskqueue_away", alias=site.alias)  # for a moment
        try:
            poller.wake(QUEUE)
            until(lambda: "poll_failed" in diary.hooks(poller))
        finally:
            sql("ALTER TABLE dbtaskqueue_away RENAME TO dbtaskqueue_task", alias=site.alias)
        site.until(site.enqueue())
    assert "dbtaskqueue_task" in str(next(told[1] for told in diary.of(poller) if told[0] == "poll_failed"))


def test_listeners_of_the_settings(site: Site, settings: Any) -> None:
    settings.DBTASKQUEUE = {"LISTENERS": ["tests.processing.named.Diary"]}
    processor(QUEUE)(on_thread)
    site.enqueue(reference="a")
    with site.poller():
        (diary,) = (one for one in signals.registered if isinstance(one, Diary))
    assert diary.hooks("a") == LIFE
    settings.DBTASKQUEUE = {}
    assert diary not in signals.registered


def test_what_is_no_listener_is_an_error_of_the_system_check_and_of_a_start(settings: Any) -> None:
    for path in ("collections.Counter", "tests.processing.named.Missing", "nowhere"):
        settings.DBTASKQUEUE = {"LISTENERS": [path]}
        (error,) = checks.run_checks(tags=["dbtaskqueue"])
        assert error.id == "dbtaskqueue.E006" and path in error.msg
        poller = Poller({})
        refused("LISTENERS", poller.start, error=ImproperlyConfigured)
        poller.close()
    settings.DBTASKQUEUE = {"LISTENERS": "tests.processing.named.Diary"}
    (error,) = checks.run_checks(tags=["dbtaskqueue"])
    assert error.id == "dbtaskqueue.E001" and "is not valid: a list of dotted paths" in error.msg
    refused("Give an object of a subclass", signals.register, Diary, error=TypeError)


def test_signals_of_the_same_facts(site: Site) -> None:
    sent: list[tuple[str, Any, dict[str, Any]]] = []

    def note(name: str, sender: Any, signal: Any, **facts: Any) -> None:
        sent.append((name, sender, facts))

    names = [name for name in dir(signals) if name.startswith(("task_", "poller_"))]
    receivers = {name: partial(note, name) for name in names}
    for name in names:
        getattr(signals, name).connect(receivers[name])
    processor(QUEUE, max_attempts=1)(lambda task: 1 / task.payload)
    site.enqueue(1, "well")
    with site.poller() as poller:
        until(lambda: any(name == "poller_idle" for name, *_ in sent))
        site.enqueue(0, "ill")
    for name in names:
        getattr(signals, name).disconnect(receivers[name])

    def of(reference: str) -> list[str]:
        return [name for name, _, facts in sent if "task" in facts and facts["task"].reference == reference]

    assert of("well") == ["task_checked_out", "task_started", "task_executed", "task_finished"]
    assert of("ill") == ["task_checked_out", "task_started", "task_crashed", "task_finished"]
    senders = {(name.partition("_")[0], sender) for name, sender, _ in sent}
    assert senders == {("task", QUEUE), ("poller", poller.instance)}
    facts = {name: facts for name, _, facts in sent}
    assert isinstance(facts["task_crashed"]["error"], ZeroDivisionError)
    assert isinstance(facts["task_finished"]["error"], ZeroDivisionError)
    assert facts["poller_executed"]["tasks"] == 1
    assert {"poller_started", "poller_idle", "poller_stopped"} <= facts.keys()
