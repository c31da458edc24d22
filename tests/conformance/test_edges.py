"""The status graph: each edge of ``status.EDGES`` can be walked, and the audit sees whoever takes another way."""

from collections.abc import Callable
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from django.db import connections

from django_dbtaskqueue import Fail, signal
from django_dbtaskqueue.core.outcomes import Park, Suspend
from django_dbtaskqueue.core.states import BY_VERB, CREATED, EDGES, ERROR, POISON, PROCESSING, TERMINAL, Status
from django_dbtaskqueue.flow import move, rescue, settle
from django_dbtaskqueue.poller.renew import renew
from tests.conformance.conftest import World
from tests.factories import LEASE
from tests.support import Audit, taken_back

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


def test_every_edge_can_be_walked(world: World, audit: Audit) -> None:
    wrong: list[Any] = []
    for edge in EDGES:
        for source in edge.sources or ("",):
            with taken_back(world.alias):
                EDGE_CALLS[edge.verb](world, source)
                walked = {seen for seen in audit.edges() if seen[0] != seen[1]}
                if source and source != edge.target and (source, edge.target and str(edge.target)) not in walked:
                    wrong.append((edge.verb, source, walked))
                if edge.target is not None and not world.tasks.filter(status=edge.target).exists():
                    wrong.append((edge.verb, source, f"no task is {edge.target}"))
                wrong += [(edge.verb, source, problem) for problem in audit.problems()]
    assert wrong == []


def test_the_audit_sees_each_forbidden_edge(world: World, audit: Audit) -> None:
    """A checker that cannot fail proves nothing: here the rule is broken by hand."""
    legal = {(source, edge.target) for edge in EDGES for source in edge.sources}
    forbidden = [pair for pair in permutations(BY_VERB["delete"].sources, 2) if pair not in legal]
    assert forbidden
    for source, target in forbidden:
        with taken_back(world.alias):
            task = world.make(source)
            over = target in TERMINAL
            shape = {"ready_time": None if over else task.create_time, "final_status": target if over else None}
            world.tasks.filter(pk=task.pk).update(status=target, poller_instance=None, finish_time=None, **shape)
            assert audit.problems() == [f"illegal edge {source} -> {target}"]


def test_the_audit_sees_a_forged_counter(world: World, audit: Audit) -> None:
    for change, problem in (
        ("total_attempt = total_attempt + 2", "the fencing token changed by other than one checkout"),
        ("total_attempt = total_attempt + 1", "a checkout charged other than one attempt"),
        ("attempt = attempt - 1", "an attempt was given back to a task that is not in line"),
        ("attempt = attempt + 1, total_attempt = total_attempt + 1", "a checkout came before the task was due"),
    ):
        with taken_back(world.alias), connections[world.alias].cursor() as cursor:
            lease = world.take(attempt=2)
            cursor.execute(f"UPDATE dbtaskqueue_task SET {change} WHERE id = %s", [lease.id])
            assert any(found.startswith(problem) for found in audit.problems()), change
