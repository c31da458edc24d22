"""The status graph: each edge of ``status.EDGES`` can be walked, and whatever happens, no other ever is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from django.db import connections, transaction

from django_dbtaskqueue import Complete, CompleteDelete, DuplicateTask, Fail, Poison, Reenqueue, signal
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Park, Release, Suspend
from django_dbtaskqueue.core.states import BY_VERB, CREATED, EDGES, ERROR, POISON, PROCESSING, TERMINAL, Status
from django_dbtaskqueue.flow import move, rescue, settle
from django_dbtaskqueue.flow.decide import decide
from django_dbtaskqueue.flow.settle import settle_surely
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.renew import renew
from tests.conformance.conftest import FIRST, SECOND, World
from tests.factories import LEASE
from tests.support import Audit, counted

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
NO_TIME = timedelta(0)


def rescued(world: World) -> None:
    world.make(PROCESSING, attempt=5, next_process_time=-LEASE)
    dead = {row[0]: row[5] for row in rescue.exhausted(world.session, "parcels")}
    assert len(dead) == 1
    lease = world.take()
    lease.id, lease.total_attempt = next(iter(dead.items()))
    assert world.settle(lease, Fail("its process died", retry=False))


def select(world: World, status: str, **columns: Any) -> Any:
    return world.tasks.filter(pk=world.make(status, **columns).pk)


def locked(world: World, status: str, verb: str, **given: Any) -> int:
    return move.change_locked(list(select(world, status)), verb, given)


def put_back(world: World, status: str) -> list[int]:
    """A failed task is sent on to ``status`` by an operator's verb, and then put back."""
    tasks = select(world, ERROR)
    names = ("queue", "status", "final_status", "attempt", "ready_time", "next_process_time", "finish_time")
    before = {row.pop("pk"): row for row in tasks.values("pk", *names)}
    move.change(tasks, {CREATED: "reprocess", POISON: "mark_poison"}[Status(status)])
    return move.put_back(world.tasks.filter(pk__in=before), before, lambda _task: True)


EDGE_CALLS: dict[str, Callable[[World, str], Any]] = {
    "enqueue": lambda world, _: world.enqueue(),
    "replace": lambda world, _: [world.enqueue("r", 1), world.enqueue("r", 2, on_duplicate="replace")],
    "replace_running": lambda world, source: [
        world.enqueue("r", 1),
        source == PROCESSING and world.checkout(1),
        world.enqueue("r", 2, on_duplicate="replace_running"),
    ],
    "checkout": lambda world, source: world.take() if source == CREATED else world.take_over(world.take()),
    "renew": lambda world, _: renew(world.session, [world.take()], 60.0),
    "touch": lambda world, _: world.take().touch(LEASE),
    "complete": lambda world, _: world.take().complete(),
    "complete_delete": lambda world, _: world.take().complete_delete(),
    "reenqueue": lambda world, _: world.take().reenqueue(NO_TIME),
    "retry": lambda world, _: world.take().fail("no"),
    "fail": lambda world, _: world.take().fail("no", retry=False),
    "poison": lambda world, _: world.take().poison("no"),
    "release": lambda world, _: settle.release(world.session, [world.take()]),
    "suspend": lambda world, _: world.settle(world.take(), Suspend(timedelta(minutes=1))),
    "signal": lambda world, _: signal(world.make(), "approved"),
    "park": lambda world, _: world.settle(world.take(), Park("no handler")),
    "unpark": lambda world, _: [world.make(parked_by="no handler"), move.unpark(world.session, "parcels", [])],
    "rescue": lambda world, _: rescued(world),
    "release_all": lambda world, source: select(world, source).release_all(),
    "cancel": lambda world, source: select(world, source).cancel(),
    "reprocess": lambda world, source: select(world, source).reprocess(),
    "kick": lambda world, source: select(world, source).kick(1),
    "mark_poison": lambda world, source: select(world, source).mark_poison(),
    "unpoison": lambda world, source: select(world, source).unpoison(),
    "run_now": lambda world, source: select(world, source).run_now(),
    "snooze": lambda world, source: locked(world, source, "snooze", delay=LEASE),
    "change_priority": lambda world, source: locked(world, source, "change_priority", priority=3),
    "move": lambda world, source: locked(world, source, "move", queue="letters"),
    "edit": lambda world, source: locked(world, source, "edit", payload={}),
    "put_back": lambda world, source: put_back(world, source),
    "delete": lambda world, source: select(world, source).purge(),
    "housekeep": lambda world, source: select(world, source).housekeep(older_than=NO_TIME, statuses=[source]),
}
EACH_DATABASE = pytest.mark.parametrize("world", ["postgresql-skip_locked", "sqlite-single_writer"], indirect=True)


@contextmanager
def taken_back(world: World) -> Iterator[None]:
    with transaction.atomic(using=world.alias):
        yield
        transaction.set_rollback(True, using=world.alias)


def test_every_edge_can_be_walked(world: World, audit: Audit) -> None:
    wrong: list[Any] = []
    for edge in EDGES:
        for source in edge.sources or ("",):
            with taken_back(world):
                EDGE_CALLS[edge.verb](world, source)
                walked = {seen for seen in audit.edges() if seen[0] != seen[1]}
                if source and source != edge.target and (source, edge.target and str(edge.target)) not in walked:
                    wrong.append((edge.verb, source, walked))
                if edge.target is not None and not world.tasks.filter(status=edge.target).exists():
                    wrong.append((edge.verb, source, f"no task is {edge.target}"))
                wrong += [(edge.verb, source, problem) for problem in audit.problems()]
    assert wrong == []


@EACH_DATABASE
def test_the_audit_sees_each_forbidden_edge(world: World, audit: Audit) -> None:
    """A checker that cannot fail proves nothing: here the rule is broken by hand."""
    legal = {(source, edge.target) for edge in EDGES for source in edge.sources}
    forbidden = [pair for pair in permutations(BY_VERB["delete"].sources, 2) if pair not in legal]
    assert forbidden
    for source, target in forbidden:
        with taken_back(world):
            task = world.make(source)
            over = target in TERMINAL
            shape = {"ready_time": None if over else task.create_time, "final_status": target if over else None}
            world.tasks.filter(pk=task.pk).update(status=target, poller_instance=None, finish_time=None, **shape)
            assert audit.problems() == [f"illegal edge {source} -> {target}"]


@EACH_DATABASE
def test_the_audit_sees_a_forged_counter(world: World, audit: Audit) -> None:
    for change, problem in (
        ("total_attempt = total_attempt + 2", "the fencing token changed by other than one checkout"),
        ("total_attempt = total_attempt + 1", "a checkout charged other than one attempt"),
        ("attempt = attempt - 1", "an attempt was given back to a task that is not in line"),
        ("attempt = attempt + 1, total_attempt = total_attempt + 1", "a checkout came before the task was due"),
    ):
        with taken_back(world), connections[world.alias].cursor() as cursor:
            lease = world.take(attempt=2)
            cursor.execute(f"UPDATE dbtaskqueue_task SET {change} WHERE id = %s", [lease.id])
            assert any(found.startswith(problem) for found in audit.problems()), change


class RandomRun:
    """Anything a producer, two pollers and an operator may do, in any order."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.enqueued = 0
        self.leases: list[Lease] = []  # stale ones too: their holders do not know

    def step(self) -> None:
        steps = (
            self.enqueue, self.enqueue, self.checkout, self.checkout, self.settle, self.settle, self.settle_batch,
            self.renew, self.time_passes, self.operate, self.unpark, self.housekeep,
        )  # fmt: skip
        self.random.choice(steps)()

    def enqueue(self) -> None:
        before = self.world.tasks.count()
        reference = self.random.choice([None, "a", "b", "c"])
        delay = self.random.choice([None, None, timedelta(seconds=30)])
        duplicate = self.random.choice(["ignore", "replace", "replace_running"])
        try:
            self.world.enqueue(reference, self.random.random(), delay=delay, on_duplicate=duplicate)
        except DuplicateTask:
            assert duplicate != "ignore"
        self.enqueued += self.world.tasks.count() - before

    def checkout(self) -> None:
        poller = self.random.choice([FIRST, SECOND])
        self.leases += self.world.checkout(self.random.randint(1, 4), poller=poller, lease=timedelta(seconds=20))

    def settle(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.world.settle(lease, self.outcome(), keep=self.random.choice(["keep", "history", "delete"]))

    def settle_batch(self) -> None:
        batch, self.leases = self.leases[:6], self.leases[6:]
        pairs: list[settle.Decided] = [
            (lease, decide(lease, self.outcome())) for lease in {lease.id: lease for lease in batch}.values()
        ]
        if pairs:
            settle_surely(self.world.session, pairs)

    def outcome(self) -> settle.Settlement:
        return self.random.choice(
            [
                Complete(), Complete("x"), CompleteDelete(), Reenqueue(NO_TIME), Reenqueue(NO_TIME, keep_attempts=True),
                Poison("p"),
                Fail("f"), Fail("f", delay=NO_TIME), Fail("f", retry=False), Release(), Park("no handler"),
            ]
        )  # fmt: skip

    def renew(self) -> None:
        if self.leases:
            renew(self.world.session, self.leases[:5], 20.0)

    def time_passes(self) -> None:
        self.world.age(timedelta(seconds=self.random.choice([1, 15, 40])))

    def operate(self) -> None:
        chosen = self.world.tasks.filter(pk__in=self.random.sample(self.ids(), min(3, len(self.ids()))))
        verb = self.random.choice(["reprocess", "mark_poison", "unpoison", "cancel", "release_all", "purge", "kick"])
        chosen.kick(2) if verb == "kick" else getattr(chosen, verb)()

    def unpark(self) -> None:
        move.unpark(self.world.session, "parcels", [])

    def housekeep(self) -> None:
        self.world.tasks.housekeep(older_than=timedelta(minutes=1), to=self.random.choice(["history", "delete"]))

    def ids(self) -> list[int]:
        return list(Task.objects.using(self.world.alias).values_list("pk", flat=True))


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_nothing_is_lost_and_no_rule_is_broken(world: World, audit: Audit, seed: int) -> None:
    random_run = RandomRun(world, seed)
    steps = 0
    while steps < 150 or len(audit.edges()) <= 8:  # which ways a seed takes depends on the clock, too
        random_run.step()
        assert counted(world.alias) == random_run.enqueued
        steps += 1
    assert audit.problems() == []
    # When everybody comes to rest, then every task that is left can still be brought to an end.
    world.age(timedelta(hours=2))
    random_run.unpark()
    for lease in world.checkout(500, poller=SECOND):
        assert world.settle(lease, Complete())
    for row in rescue.exhausted(world.session, "parcels", limit=500):
        assert row[3] >= row[6]
        world.tasks.filter(pk=row[0]).release_all()
    for lease in world.checkout(500):
        assert world.settle(lease, Complete())
    assert not world.tasks.filter(status__in=[CREATED, PROCESSING]).exists()
