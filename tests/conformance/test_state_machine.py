"""Everything at once: a machine that does whatever may be done to a queue, in any order, and compares the database with
the model after every step.

``DBTASKQUEUE_MACHINE_RUNS`` sets how many runs of 30 steps there are on each database (15 by default; 300 on demand).
A strategy that is not its database's own differs in the checkout alone: it gets a third of them.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from django_dbtaskqueue import Complete, CompleteDelete, DuplicateTask, Fail, Fixed, Poison, QueueFull, Reenqueue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release, Settlement
from django_dbtaskqueue.models import Queue
from tests.conformance import model
from tests.conformance.conftest import World, any_strategy
from tests.support import Audit

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
RUNS = int(os.environ.get("DBTASKQUEUE_MACHINE_RUNS", "15"))
CALM = settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
CAPACITY = 12
MOMENT = timedelta(milliseconds=2)  # what is done later is later, also to SQLite's clock of milliseconds
DELETED = "SELECT coalesce(sum(count), 0) FROM dbtaskqueue_minutecount WHERE kind = 'deletion'"
LEFT = f"SELECT (SELECT count(*) FROM dbtaskqueue_taskhistory), ({DELETED})"
OUTCOMES: dict[str, Callable[[int], Settlement]] = {
    "complete": lambda _: Complete(),
    "complete_delete": lambda _: CompleteDelete(),
    "poison": lambda _: Poison("bad"),
    "error": lambda _: Fail("final", retry=False),
    "retry": lambda _: Fail("again"),
    "reenqueue": lambda delay: Reenqueue(timedelta(seconds=delay)),
    "release": lambda _: Release(),
}
# In seconds: so many that those of a loaded machine between two steps do not count.
delays = st.sampled_from([0, 0, 1000, 2000])


class Machine(RuleBasedStateMachine):
    """One run. The test's world is handed over by a subclass."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.model = model.Queue(CAPACITY)
        self.leases: list[Lease] = []
        self.block = transaction.atomic(using=self.world.alias)
        self.block.__enter__()

    def teardown(self) -> None:
        problems = Audit(self.world.alias).problems()
        transaction.set_rollback(True, using=self.world.alias)
        self.block.__exit__(None, None, None)
        assert problems == []

    @rule(
        number=st.none() | st.integers(0, 5),
        priority=st.integers(0, 2),
        delay=delays,
        group=st.sampled_from([None, None, "a", "b"]),
        ttl=st.sampled_from([None, None, 1500]),
        on_duplicate=st.sampled_from(["error", "ignore", "replace", "replace_running"]),
        keep_due=st.booleans(),
    )
    def enqueue(self, number: int | None, priority: int, delay: int, ttl: int | None, **options: Any) -> None:
        reference = None if number is None else f"r{number}"
        answer, task_id = self._enqueue(reference, priority=priority, delay=delay, ttl=ttl, **options)
        due = self.model.now + delay
        expires = None if ttl is None else due + ttl
        row = model.Row(task_id, reference, priority, due, options["group"], expires, max_attempts=2)
        assert answer == self.model.enqueue(row, options["on_duplicate"], keep_due=options["keep_due"])

    def _enqueue(self, reference: str | None, *, delay: int, ttl: int | None, **options: Any) -> tuple[str, int]:
        before = self.world.tasks.filter(reference=reference).exists() if reference else False
        times = {"delay": timedelta(seconds=delay), "ttl": ttl and timedelta(seconds=ttl)}
        try:
            task = self.world.enqueue(reference, **times, **options)
        except QueueFull:
            return "full", 0
        except DuplicateTask:
            return "duplicate", 0
        if not before:
            return "new", task.pk
        return ("ignored" if options["on_duplicate"] == "ignore" else "replaced"), task.pk

    @rule(limit=st.integers(1, 4))
    def checkout(self, limit: int) -> None:
        taken = self.world.checkout(limit, lease=timedelta(seconds=model.LEASE))
        expected = [(row.id, row.total, row.attempt) for row in self.model.checkout(limit)]
        assert [(lease.id, lease.total_attempt, lease.attempt) for lease in taken] == expected
        self.leases += taken

    @rule(choice=st.integers(0, 1000), verb=st.sampled_from(list(OUTCOMES)), delay=delays)
    def settle(self, choice: int, verb: str, delay: int) -> None:
        if self.leases:
            lease = self.leases[-1 - choice % min(6, len(self.leases))]
            lease.port.retry = Fixed(timedelta(seconds=delay), jitter=0)
            written = self.world.settle(lease, OUTCOMES[verb](delay))
            assert written == self.model.settle(lease.id, lease.total_attempt, verb, delay, lease.group)

    @rule(seconds=st.sampled_from([1000, 1000, 3000, 7000]))
    def wait(self, seconds: int) -> None:
        self.world.age(timedelta(seconds=seconds))
        self.model.now += seconds

    @rule(verb=st.sampled_from(["reprocess", "mark_poison", "unpoison", "cancel", "release_all"]))
    def move(self, verb: str, *number: int) -> None:
        expected = self.model.move(verb, *number)
        with pytest.raises(QueueFull) if expected == "full" else nullcontext():
            assert getattr(self.world.tasks.all(), verb)(*number) == expected

    @rule(number=st.integers(0, 2))
    def kick(self, number: int) -> None:
        self.move("kick", number)

    @rule(number=st.integers(0, 5))
    def purge(self, number: int) -> None:
        reference = f"r{number}"
        expected = self.model.purge(lambda row: row.reference == reference)
        assert self.world.tasks.filter(reference=reference).purge() == expected

    @rule(to=st.sampled_from(["history", "delete"]), age=st.sampled_from([500, 2500]))
    def housekeep(self, to: str, age: int) -> None:
        moved = self.world.tasks.all().housekeep(older_than=timedelta(seconds=age), to=to)
        assert moved == self.model.housekeep(age, to)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        queues = Queue.objects.using(self.world.alias)
        queues.update_or_create(pk="parcels", defaults={"paused_time": "2026-01-01T00:00:00Z" if paused else None})
        self.model.paused = paused

    @invariant()
    def the_database_is_as_the_model(self) -> None:
        if self.world.alias == "sqlite":
            self.world.age(MOMENT)
        columns = ("status", "attempt", "total_attempt", "reenqueue_attempt", "ready_time", "priority")
        found = self.world.tasks.values_list("id", *columns)
        rows = {pk: (*facts, ready is not None, priority) for pk, *facts, ready, priority in found}
        assert rows == {row.id: row.seen() for row in self.model.rows.values()}
        ((history, deleted),) = self.world.session.run(LEFT, {})
        assert (history, deleted) == (self.model.history, self.model.deleted)
        assert len(rows) + history + deleted == self.model.enqueued


@any_strategy
def test_the_queue_behaves_as_the_model(world: World) -> None:
    world.configure(max_attempts=2, capacity=CAPACITY)
    # Shrinking a run on a database takes minutes: ask for it when there is something to shrink.
    phases = [phase for phase in Phase if phase != Phase.shrink or "DBTASKQUEUE_MACHINE_SHRINK" in os.environ]
    runs = RUNS if world.strategy in ("skip_locked", "auto") else RUNS // 3
    machine = type("OnThisWorld", (Machine,), {"world": world})
    run_state_machine_as_test(machine, settings=settings(CALM, max_examples=runs, phases=phases))
