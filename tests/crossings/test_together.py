"""All features at once: random acts on tasks of every kind. Then the acts stop, and each task must come to its end.

``DBTASKQUEUE_TOGETHER_RUNS`` sets how many runs there are on each database. A run is its number: it repeats itself.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import Fail, Poison, Reenqueue, batch, chain, enqueue, enqueue_many, processor, signal
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.flow.batches import BatchHandle
from django_dbtaskqueue.models import Batch, Dependency, Task
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.actions import ActionRequest, act_on_ids
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.verbs import ID_VERBS, TASK_VERBS, VerbOptions
from django_dbtaskqueue.testing import advance, drain

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
RUNS = int(os.environ.get("DBTASKQUEUE_TOGETHER_RUNS", "2"))
ACTS = 70
SECOND = timedelta(seconds=1)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "history": {"keep": "history"}, "deleted": {"keep": "delete"}, "one": {"max_running": 1},
    "grouped": {"max_running_per_group": 1}, "unique": {"unique": "unique"}, "throttled": {"unique": "throttle:1h"},
    "rate": {"rate": "30/m"}, "full": {"capacity": 5}, "spent": {"unique_over": "history", "keep": "history"},
    "debounced": {"unique": "debounce:10s,max_wait=20s"}, "skipping": {"group_retry": "skip"},
    "aged": {"max_wait": "5s"},
}  # fmt: skip
DOES = ["complete", "complete", "raise", "fail", "poison", "again", "spawn", "steps", "signal"]
VERBS = sorted(TASK_VERBS.keys() - {"delete", "housekeep", "signal"} | {"edit"})


def work(task: Lease) -> Any:
    """Do what the payload says, from its attempt number ``well`` on complete."""
    does = "complete" if task.total_attempt >= task.payload["well"] else task.payload["does"]
    if does == "raise":
        raise RuntimeError("as asked")
    if does == "spawn":
        enqueue("plain", payload={"does": "complete", "well": 1}, after=task.id, using=task.port.alias)
    if does == "steps":
        task.step("first", lambda: 1)
        task.sleep(5 * SECOND)
    if does == "signal":
        return task.wait_for("go")
    ends = {"fail": Fail("final", retry=False), "poison": Poison("bad"), "again": Reenqueue(SECOND)}
    return ends.get(does, {"did": does})


class Mixture:
    """Tasks of one database, and what is done to them."""

    def __init__(self, alias: str, run: int) -> None:
        self.alias, self.random = alias, Random(run)
        self.leases: list[Lease] = []
        self.operations: list[int] = []

    @property
    def tasks(self) -> Any:
        return Task.objects.db_manager(self.alias)

    def some(self, number: int) -> list[Task]:
        rows = list(self.tasks.order_by("pk"))
        return self.random.sample(rows, min(number, len(rows)))

    def payload(self) -> dict[str, Any]:
        return {"does": self.random.choice(DOES), "well": self.random.choice([2, 3, 9])}

    def maybe(self, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if self.random.random() < 0.3}

    def enqueue(self) -> None:
        pick, unless = self.random.choice, self.random.choice(["hold", "cancel", "run"])
        options = self.maybe(
            reference=f"r{self.random.randrange(8)}", group=pick("ab"), delay=pick([0, 5, 60]) * SECOND,
            ttl=pick([1, 30]) * SECOND, priority=pick([0, 1, 2]), after=self.some(2), on_parent_failure=unless,
            on_duplicate=pick(["ignore", "replace", "replace_running"]),
        )  # fmt: skip
        enqueue(pick([*KINDS]), payload=self.payload(), using=self.alias, **options)

    def enqueue_many(self) -> None:
        items = [{"payload": self.payload(), **self.maybe(group="a", reference=f"r{n}")} for n in range(4)]
        enqueue_many(self.random.choice([*KINDS]), items, using=self.alias, on_duplicate="ignore")

    def batch(self) -> None:
        with batch("mixed", using=self.alias, **self.maybe(on_complete={"queue": "plain", "payload": self.payload()})):
            self.enqueue()
            self.enqueue()

    def chain(self) -> None:
        steps = [{"queue": self.random.choice([*KINDS]), "payload": self.payload()} for _ in range(3)]
        chain(*steps, on_parent_failure=self.random.choice(["hold", "cancel", "run"]), using=self.alias)

    def drain(self) -> None:
        drain(self.random.choice([None, *KINDS]), using=self.alias)

    def advance(self) -> None:
        advance(self.random.choice([1, 10, 100, 4000]) * SECOND, using=self.alias)

    def change(self) -> None:
        """Do as an operator does. Deletion is left out: who waits for a deleted task waits for an operator."""
        verb = ID_VERBS[self.random.choice(VERBS)]
        options = VerbOptions(delay=60 * SECOND, queue=self.random.choice([*KINDS]), priority=3, payload=self.payload())
        ids = [task.pk for task in self.some(1 if verb.name == "edit" else 5)]
        report = act_on_ids(self.tasks.all(), ids, ActionRequest(verb, "why", options), Actor())
        self.operations += [report.operation.pk] if report.operation else []

    def put_back(self) -> None:
        if self.operations:
            bulk.put_back(self.operations.pop(self.random.randrange(len(self.operations))), None, using=self.alias)
            while bulk.turn(self.alias):
                pass

    def change_batch(self) -> None:
        if rows := list(Batch.objects.using(self.alias).order_by("pk")):
            handle = BatchHandle(self.random.choice(rows), self.alias)
            getattr(handle, self.random.choice(["retry", "cancel", "progress"]))()

    def checkout(self) -> None:
        self.leases += self.tasks.checkout(self.random.choice([*KINDS]), poller_instance="by hand", limit=3)

    def settle(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            ends = (lease.complete, lease.fail, lease.poison, lambda: lease.reenqueue(SECOND))
            self.random.choice(ends)()

    def signal(self) -> None:
        for task in self.some(4):
            signal(task, "go", {"by": "hand"})

    def end(self) -> None:
        """Let all end that can: what is due runs, signals come, time passes."""
        drain(using=self.alias)
        for task in self.tasks.filter(status="CREATED"):
            signal(task, "go", None)
        Housekeeper().turn(RetentionPolicy(), using=self.alias)
        advance(3600 * SECOND, using=self.alias)

    def left(self) -> list[str]:
        """Return why tasks have not ended, but for those that wait for one that has failed, or waits itself."""
        parents = Dependency.objects.using(self.alias)
        ids = {task.pk for task in self.tasks.exclude(status="COMPLETED")}
        rows = self.tasks.filter(status__in=["CREATED", "PROCESSING"])
        waits = {row.pk for row in rows if ids & {*parents.filter(child_id=row.pk).values_list("parent_id", flat=True)}}
        found = [(row, explain(row)) for row in rows]
        return [f"{row!r}: {why}" for row, why in found if why.code != "parents" or row.pk not in waits]


@pytest.mark.parametrize("alias", ["default", "sqlite"], ids=["postgresql", "sqlite"])
@pytest.mark.parametrize("run", range(RUNS))
def test_each_task_comes_to_its_end(alias: str, run: int, settings: Any, taskqueue_registry: None) -> None:
    options = {"retry": "fixed:1s", "max_attempts": 3, "database": alias}
    settings.DBTASKQUEUE = {"QUEUES": {name: {**options, **kind} for name, kind in KINDS.items()}}
    for name in KINDS:
        processor(name)(work)
    mixture = Mixture(alias, run)
    often: list[Callable[[], None]] = [mixture.enqueue, mixture.drain, mixture.change, mixture.put_back] * 3
    acts = [
        *often,
        mixture.enqueue_many,
        mixture.batch,
        mixture.chain,
        mixture.advance,
        mixture.change_batch,
        mixture.checkout,
    ]
    for _ in range(ACTS):
        act = mixture.random.choice([*acts, mixture.settle, mixture.signal])
        try:
            with transaction.atomic(using=alias):
                act()
        except TaskQueueError:  # refused in words
            continue
    seen: list[Any] = [None, None]
    while seen[-1] != seen[-2] or len(seen) < 4:  # the first round lets become due what is not yet
        mixture.end()
        seen.append(list(mixture.tasks.order_by("pk").values_list("pk", "status", "total_attempt")))
    assert mixture.left() == []
