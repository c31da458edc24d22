"""Handlers by payload type on one queue, each with its parallelism, added and removed while a poller runs."""

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_type_hints

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import PayloadError, enqueue_many, processor, registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller import queue_state
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import ConnectionSet, Options
from tests.factories import make_task
from tests.poller.processes import SELDOM
from tests.processing.conftest import QUEUE, Crate, Letter, Site, both, on_real_connections
from tests.support import PATIENCE, actors, at_once, until

pytestmark = on_real_connections
LETTER, CRATE = (f"{cls.__module__}.{cls.__name__}" for cls in (Letter, Crate))  # as rows name them


class Meter:
    """Counts how many calls run at the same time, and holds them until it is opened."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.gate = threading.Event()
        self.started = threading.Semaphore(0)
        self.running = self.most = self.total = 0
        self._lock = threading.Lock()
        if is_open:
            self.gate.set()

    def __call__(self, task: Any) -> None:
        with self._lock:
            self.running += 1
            self.total += 1
            self.most = max(self.most, self.running)
        self.started.release()
        self.gate.wait(PATIENCE)
        with self._lock:
            self.running -= 1


def test_each_type_goes_to_its_handler(site: Site) -> None:
    async def crate(task: Lease) -> str:
        return f"async {task.payload.weight}"

    processor(QUEUE, payload=Letter)(lambda task: f"letter {task.payload.text}")
    processor(QUEUE, payload=Crate)(crate)
    processor(QUEUE)(lambda task: f"plain {task.payload}")
    site.fill(*(Letter("a"), Crate(3), {"x": 1}) * 3)
    site.run(threads=1, coroutines=1)
    assert site.values("result") == ["letter a", "async 3", "plain {'x': 1}"] * 3


@both
@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_type_keeps_nobody_from_his_turn(site: Site, is_async: bool) -> None:
    crates = Meter(is_open=False)
    handler = sync_to_async(crates, thread_sensitive=False) if is_async else crates
    processor(QUEUE, payload=Crate, concurrency=2)(handler)
    processor(QUEUE, payload=Letter)(lambda task: None)
    enqueue_many(QUEUE, [Crate(1)] * 30, using=site.alias)
    enqueue_many(QUEUE, [Letter("a")] * 20, using=site.alias)
    with site.poller(threads=4) as poller:
        assert crates.started.acquire(timeout=PATIENCE) and crates.started.acquire(timeout=PATIENCE)
        until(lambda: site.tasks(payload_type=LETTER, status="COMPLETED").count() == 20)
        until(lambda: len(poller.settler.held) == 2)  # the letters leave it soon after their commit
        assert crates.running == 2
        crates.gate.set()
    assert (crates.most, crates.total) == (2, 30) and site.tasks(status="COMPLETED").count() == 50


@both
def test_several_limits_side_by_side(site: Site) -> None:
    crates, letters, plain = Meter(), Meter(), Meter()
    processor(QUEUE, payload=Crate, concurrency=1)(crates)
    processor(QUEUE, payload=Letter, concurrency=2)(letters)
    processor(QUEUE, concurrency=3)(plain)
    items = [item for index in range(30) for item in (Crate(index), Letter("a"), {"payload": {"n": index}})]
    enqueue_many(QUEUE, items, using=site.alias)
    site.run(threads=8)
    assert (crates.most, crates.total, letters.total, plain.total) == (1, 30, 30, 30)
    assert letters.most <= 2 and plain.most <= 3
    assert site.tasks(status="COMPLETED").count() == 90


def test_the_next_one_starts_as_soon_as_one_ends(site: Site, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: SELDOM}, "NOTIFY": False}
    meter = Meter()
    processor(QUEUE, payload=Crate, concurrency=1)(meter)
    processor(QUEUE, payload=Letter)(lambda task: None)
    enqueue_many(QUEUE, [Crate(1)] * 100, using=site.alias)
    with site.poller():
        until(lambda: meter.total == 100)


def test_a_call_whose_time_is_over_counts_until_it_really_ends(site: Site) -> None:
    crates = Meter(is_open=False)
    processor(QUEUE, payload=Crate, concurrency=1, timeout=timedelta(milliseconds=50), max_attempts=1)(crates)
    processor(QUEUE, payload=Letter)(lambda task: None)
    first = site.enqueue(Crate(1))
    with site.poller():
        site.until(first, "ERROR")
        second = site.enqueue(Crate(2))
        site.until(site.enqueue(Letter("a")))
        assert (site.task(second).status, crates.running) == ("CREATED", 1)
        crates.gate.set()
    assert (crates.most, crates.total) == (1, 2)


def test_what_waits_for_a_limit_is_given_back_at_a_stop(site: Site) -> None:
    meter = Meter(is_open=False)
    processor(QUEUE, concurrency=1)(meter)
    enqueue_many(QUEUE, [{}] * 5, using=site.alias)
    with pytest.raises(KeyboardInterrupt), site.poller() as poller:
        assert meter.started.acquire(timeout=PATIENCE)
        # Two fetch threads at once might check out more than a limit admits
        leases = Task.objects.checkout(QUEUE, poller_instance=poller.instance, limit=2)
        for lease in leases:
            lease.port = poller.queues[QUEUE].port
        poller.settler.held.update(leases)
        poller.executors.submit_special(registry.processors(QUEUE)[0], leases)
        poller.stop()
        until(lambda: site.tasks(status="CREATED").count() == 4)
        meter.gate.set()
        raise KeyboardInterrupt  # leaves the block without draining
    assert sorted(site.values("status", "attempt")) == [("COMPLETED", 1)] + [("CREATED", 0)] * 4


@both
def test_a_task_without_a_handler_waits_and_runs_as_soon_as_there_is_one(site: Site) -> None:
    processor(QUEUE, payload=Letter)(lambda task: None)
    processor(QUEUE, payload=Crate)(lambda task: "the old one")
    with site.poller():
        registry.unregister(QUEUE, Crate)
        crate = site.enqueue(Crate(1))
        until(lambda: site.task(crate).parked_by is not None)
        assert site.values("status", "attempt", "ready_time") == [("CREATED", 0, None)]
        site.until(site.enqueue(Letter("a")))
        processor(QUEUE, payload=Crate)(lambda task: "crate")
        site.until(crate)
    assert (site.task(crate).result, site.task(crate).attempt) == ("crate", 1)


def test_a_draining_poller_does_not_end_while_a_thread_unparks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a heartbeat whose statement is under way, then the poll that finds nothing is not the last one."""
    reason = f"no handler for payload type {CRATE} on queue {QUEUE}"
    crate = make_task(queue=QUEUE, payload={"weight": 1}, payload_type=CRATE, parked_by=reason)
    poller, begun, polled = Poller({QUEUE: 1}, Options(drain=True)), threading.Event(), threading.Event()
    state, unpark = poller.queues[QUEUE], queue_state.move.unpark

    def unpark_late(*args: Any, **options: Any) -> int:
        begun.set()
        assert polled.wait(PATIENCE)
        return unpark(*args, **options)

    monkeypatch.setattr(queue_state.move, "unpark", unpark_late)
    processor(QUEUE, payload=Crate)(lambda task: None)
    with actors(1) as [heartbeat]:
        unparked = heartbeat.do(lambda: queue_state.unpark_queue(Session.on("default"), state))
        assert begun.wait(PATIENCE)
        poller.poll(connection_set := ConnectionSet())
        connection_set.close()
        polled.set()
        assert unparked.result(PATIENCE) == 1
    poller.close()
    assert (state.exhausted, site.task(crate).parked_by) == (False, None)


def test_the_last_handler_taken_away_leaves_a_queue_that_takes_tasks(site: Site) -> None:
    processor(QUEUE)(lambda task: None)
    assert [registry.unregister(QUEUE, *kind) for kind in ([Crate], [], [])] == [False, True, False]
    site.enqueue()
    processor(QUEUE)(lambda task: "late")
    site.run()
    assert site.values("result") == ["late"]


def test_handlers_come_and_go_from_many_threads_and_no_task_is_lost(site: Site) -> None:
    kinds, ran = [(Letter, Letter("a")), (Crate, Crate(1))], Meter()

    def keep_changing(thread: int) -> None:
        kind, payload = kinds[thread]
        for _ in range(15):
            registry.unregister(QUEUE, kind)
            site.enqueue(payload)
            processor(QUEUE, payload=kind)(ran)

    for kind, _ in kinds:
        processor(QUEUE, payload=kind)(ran)
    with site.poller():
        at_once(2, keep_changing)
        until(lambda: site.tasks(status="COMPLETED").count() == 30)
    assert ran.total == 30 and set(site.values("attempt")) == {1}


def test_two_handlers_declare_different_things_of_their_queue_together_and_may_not_contradict_each_other() -> None:
    processor(QUEUE, payload=Crate, max_attempts=7)(lambda task: None)
    with pytest.raises(ImproperlyConfigured, match="max_attempts=8, but another processor of the queue says 7"):
        processor(QUEUE, payload=Letter, max_attempts=8)(lambda task: None)
    assert registry.find(QUEUE, LETTER) is None
    processor(QUEUE, payload=Letter, lease=timedelta(minutes=3))(lambda task: None)
    known = conf.default_settings(QUEUE)
    assert (known.max_attempts, known.lease) == (7, timedelta(minutes=3))


def of_another_module(cls: Any, **members: Any) -> Any:
    """Return a class with the name and the fields of ``cls``, as another module of the project may have one."""
    return dataclass(type(cls.__name__, (), {"__annotations__": get_type_hints(cls), "__module__": "mail", **members}))


def test_two_classes_of_one_name_share_a_queue(site: Site) -> None:
    other = of_another_module(Letter)
    processor(QUEUE, payload=Letter)(lambda task: f"ours: {type(task.payload) is Letter}")
    processor(QUEUE, payload=other)(lambda task: f"theirs: {type(task.payload) is other}")
    site.fill(Letter("a"), other("b"))
    site.run()
    assert site.values("result", "payload_type") == [("ours: True", LETTER), ("theirs: True", "mail.Letter")]


@pytest.mark.parametrize("named", [{}, {"payload_type": "letter"}], ids=["by path", "by payload_type"])
def test_a_class_that_is_not_the_registered_one_is_refused(site: Site, named: dict[str, Any]) -> None:
    registered, other = (of_another_module(Letter, __module__=name, **named) for name in ("post", "mail"))
    processor(QUEUE, payload=registered)(lambda task: None)
    for many in (False, True):
        with pytest.raises(PayloadError) as refused:
            enqueue_many(QUEUE, [other("a")] * 2, using=site.alias) if many else site.enqueue(other("a"))
        for words in ("it is a mail.Letter", "takes a post.Letter", "Enqueue a post.Letter", repr(QUEUE)):
            assert words in str(refused.value)
    assert not site.tasks().exists()
    report = enqueue_many(QUEUE, [other("a"), registered("b")], on_invalid="reject", using=site.alias)
    assert (report.enqueued, report.rejected) == (1, 1)


def test_a_name_that_no_column_holds_is_refused() -> None:
    long = of_another_module(Letter, __module__="m" * 200)
    with pytest.raises(PayloadError, match="Give the class a shorter one: payload_type"):
        processor(QUEUE, payload=long)(lambda task: None)
