"""All features at once: random acts on tasks of every kind. Then the acts stop, and each task must come to its end.

``DBTASKQUEUE_TOGETHER_RUNS`` sets how many runs there are on each database. A run is its number: it repeats itself.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import Fail, Poison, Reenqueue, Workflow, batch, chain, enqueue, enqueue_many, processor, signal
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.flow.batches import BatchHandle
from django_dbtaskqueue.flow.shard_move import ShardMove
from django_dbtaskqueue.models import AbstractTask, Batch, BulkOperation, Dependency, Schedule, Task
from django_dbtaskqueue.operations import bulk, queue_control, schedules
from django_dbtaskqueue.operations.actions import ActionRequest, act_on_ids
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.verbs import ID_VERBS, TASK_VERBS, VerbOptions
from django_dbtaskqueue.testing import advance, drain
from tests.testapp.models import Parcel

ALIASES = ("default", "sqlite")
pytestmark = pytest.mark.django_db(databases=ALIASES)
RUNS = int(os.environ.get("DBTASKQUEUE_TOGETHER_RUNS", "2"))
ACTS = 90
SECOND = timedelta(seconds=1)
OWN = {"model": "testapp.Parcel"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "history": {"keep": "history"}, "deleted": {"keep": "delete"}, "one": {"max_running": 1},
    "grouped": {"max_running_per_group": 1}, "unique": {"unique": "unique"}, "throttled": {"unique": "throttle:1h"},
    "rate": {"rate": "30/m"}, "full": {"capacity": 5}, "spent": {"unique_over": "history", "keep": "history"},
    "debounced": {"unique": "debounce:10s,max_wait=20s"}, "skipping": {"group_retry": "skip"},
    "aged": {"max_wait": "5s"}, "own": OWN, "own_history": {**OWN, "keep": "history", "max_running_per_group": 2},
    "shards": {"shards": ALIASES}, "shards_once": {"shards": ALIASES, "unique": "unique", "keep": "history"},
}  # fmt: skip
SHARDED = [name for name, kind in KINDS.items() if "shards" in kind]
DOES = ["complete", "complete", "raise", "fail", "poison", "again", "spawn", "steps", "signal"]
VERBS = sorted(TASK_VERBS.keys() - {"delete", "housekeep", "signal"} | {"edit"})
STEPS_OF_A_MOVE = ("marked", "inserted", "deleted")


def work(task: Lease) -> Any:
    """Do what the payload says, from its attempt number ``well`` on complete."""
    does = "complete" if task.total_attempt >= task.payload["well"] else task.payload["does"]
    if does == "raise":
        raise RuntimeError("as asked")
    if does == "spawn":  # in a queue with another table, where that is possible
        queue = task.queue if task.queue in SHARDED else "plain" if task.queue == "own" else "own"
        after = model_for(task.queue).objects.using(task.port.alias).get(pk=task.id)
        enqueue(queue, payload={"does": "complete", "well": 1}, after=after, using=task.port.alias)
    if does == "steps":
        task.step("first", lambda: 1)
        task.sleep(5 * SECOND)
    if does == "signal":
        return task.wait_for("go")
    ends = {"fail": Fail("final", retry=False), "poison": Poison("bad"), "again": Reenqueue(SECOND)}
    return ends.get(does, {"did": does})


class Killed(Exception):
    """Raised where a move between shards is killed."""


class Mixture:
    """Tasks of one database, those of the shards on both, and what is done to them."""

    def __init__(self, alias: str, run: int) -> None:
        self.alias, self.random = alias, Random(run)
        self.places: list[tuple[type[AbstractTask], str]] = [(Task, alias), (Parcel, alias)]
        self.places += [(Task, other) for other in ALIASES if other != alias]
        self.leases: list[Lease] = []
        self.operations: list[BulkOperation] = []

    @staticmethod
    def rows(model: type[AbstractTask], alias: str) -> Any:
        return model.objects.db_manager(alias).order_by("pk")

    @property
    def tasks(self) -> list[Any]:
        return [task for place in self.places for task in self.rows(*place)]

    def some(self, number: int, *places: tuple[type[AbstractTask], str]) -> list[Any]:
        rows = [task for place in places or self.places for task in self.rows(*place)]
        return self.random.sample(rows, min(number, len(rows)))

    def queue(self) -> str:
        return self.random.choice([*KINDS])

    def payload(self) -> dict[str, Any]:
        return {"does": self.random.choice(DOES), "well": self.random.choice([2, 3, 9])}

    def policy(self) -> str:
        return self.random.choice(["hold", "cancel", "run"])

    def maybe(self, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if self.random.random() < 0.3}

    def enqueue(self) -> None:
        pick = self.random.choice
        options = self.maybe(
            reference=f"r{self.random.randrange(8)}", group=pick("ab"), delay=pick([0, 5, 60]) * SECOND,
            ttl=pick([1, 30]) * SECOND, priority=pick([0, 1, 2]), on_parent_failure=self.policy(),
            after=self.some(2, *(place for place in self.places if place[1] == pick([self.alias, *ALIASES]))),
            on_duplicate=pick(["ignore", "replace", "replace_running"]),
        )  # fmt: skip
        enqueue(self.queue(), payload=self.payload(), **options)

    def enqueue_many(self) -> None:
        items = [{"payload": self.payload(), **self.maybe(group="a", reference=f"r{n}")} for n in range(4)]
        enqueue_many(self.queue(), items, on_duplicate="ignore")

    def batch(self) -> None:
        last = {"queue": self.queue(), "payload": self.payload()}
        with batch("mixed", using=self.random.choice([self.alias, *ALIASES]), **self.maybe(on_complete=last)):
            self.enqueue()
            self.enqueue()

    def chain(self) -> None:
        steps = [{"queue": self.queue(), "payload": self.payload()} for _ in range(3)]
        chain(*steps, on_parent_failure=self.policy(), using=self.alias)

    def workflow(self) -> None:
        made = Workflow("mixed", using=self.alias, **self.maybe(on_complete={"queue": "own", "payload": None}))
        for number in range(4):
            after = [name for name in "0123"[:number] if self.random.random() < 0.5]
            made.add(str(number), self.queue(), payload=self.payload(), after=after, on_parent_failure=self.policy())
        made.enqueue()

    def schedule(self) -> None:
        """Make a schedule, change it, or do a verb to it."""
        pick, name, who = self.random.choice, f"s{self.random.randrange(3)}", Actor()
        values = {
            "queue": self.queue(), "payload": self.payload(), "cron": pick(["* * * * *", "0 * * * *"]),
            "timezone": "UTC", "missed": pick(["skip", "one", "all"]), "overlap": pick(["allow", "skip"]),
        }  # fmt: skip
        if not Schedule.objects.using(self.alias).filter(pk=name).exists():
            schedules.add_schedule(name, values, who, reason="why")
        elif (verb := pick(["edit", *schedules.SCHEDULE_VERBS])) == "edit":
            schedules.edit_schedule(name, self.maybe(**values), who, reason="why")
        else:
            schedules.act_on_schedule(schedules.SCHEDULE_VERBS[verb], name, who, reason="why")

    def drain(self) -> None:
        drain(self.random.choice([None, *KINDS]))

    def advance(self) -> None:
        advance(self.random.choice([1, 10, 100, 4000]) * SECOND)

    def change(self) -> None:
        """Do as an operator does. Deletion is left out: who waits for a deleted task waits for an operator."""
        model, alias = self.random.choice(self.places)
        verb = ID_VERBS[self.random.choice(VERBS)]
        options = VerbOptions(delay=60 * SECOND, queue=self.queue(), priority=3, payload=self.payload())
        ids = [task.pk for task in self.some(1 if verb.name == "edit" else 5, (model, alias))]
        report = act_on_ids(model.objects.db_manager(alias).all(), ids, ActionRequest(verb, "why", options), Actor())
        self.operations += [report.operation] if report.operation else []

    def put_back(self) -> None:
        if self.operations:
            operation = self.operations.pop(self.random.randrange(len(self.operations)))
            bulk.put_back(operation, Actor())
            while bulk.turn(str(operation._state.db)):
                pass

    def change_batch(self) -> None:
        if rows := [(row, alias) for alias in ALIASES for row in Batch.objects.using(alias).order_by("pk")]:
            getattr(BatchHandle(*self.random.choice(rows)), self.random.choice(["retry", "cancel", "progress"]))()

    def pause(self) -> None:
        """Pause or resume a queue."""
        queue, alias = self.queue(), self.random.choice([self.alias, *ALIASES])
        if self.random.random() < 0.5:
            queue_control.pause(queue, alias, by="hand")
        else:
            queue_control.resume(queue, alias)

    def move_shards(self) -> None:
        """Move tasks of a queue between its shards; some moves are killed in between."""
        pick, queue, place = self.random.choice, self.random.choice(SHARDED), self.random.choice(STEPS_OF_A_MOVE)
        killed = self.random.random() < 0.4

        def at_step(step: str) -> None:
            if killed and step == place:
                raise Killed

        move = ShardMove(queue, pick([None, *ALIASES]), behind=pick([True, False]), at_step=at_step)
        with suppress(Killed):
            queue_control.move_shards(move, Actor(), sources=pick([(), *((one,) for one in ALIASES)]), reason="why")

    def checkout(self) -> None:
        queue = self.queue()
        alias = self.random.choice(ALIASES) if queue in SHARDED else self.alias
        self.leases += model_for(queue).objects.db_manager(alias).checkout(queue, poller_instance="by hand", limit=3)

    def settle(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.random.choice((lease.complete, lease.fail, lease.poison, lambda: lease.reenqueue(SECOND)))()

    def signal(self) -> None:
        for task in self.some(4):
            signal(task, "go", {"by": "hand"})

    def calm(self) -> None:
        """Take back what would let tasks come, or wait, for ever."""
        for alias in ALIASES:
            Schedule.objects.using(alias).all().delete()
            for queue in KINDS:
                queue_control.resume(queue, alias)
        for queue in SHARDED:  # finish what killed moves have left
            queue_control.move_shards(ShardMove(queue), Actor(), limit=0, reason="why")

    def end(self) -> None:
        """Let all end that can: what is due runs, signals come, time passes."""
        drain()
        for task in self.tasks:
            if task.status == "CREATED":
                signal(task, "go", None)
        for alias in ALIASES:
            Housekeeper().turn(RetentionPolicy(), using=alias)
        advance(3600 * SECOND)

    def left(self) -> list[str]:
        """Return why tasks have not ended, but for those that wait for one that has failed, or waits itself."""
        rows = self.tasks
        not_completed = {(row._state.db, row._meta.label_lower, row.pk) for row in rows if row.status != "COMPLETED"}
        live = [(row, explain(row)) for row in rows if row.status in ("CREATED", "PROCESSING")]
        return [f"{row!r}: {why}" for row, why in live if why.code != "parents" or not not_completed & parents(row)]


def parents(row: AbstractTask) -> set[tuple[str | None, str, int]]:
    """Return the keys of the tasks that a task waits, or waited, for."""
    alias = row._state.db
    edges = Dependency.objects.using(alias).filter(child_location=row._meta.label_lower, child_id=row.pk)
    return {(alias, location, pk) for location, pk in edges.values_list("parent_location", "parent_id")}


@pytest.mark.parametrize("alias", ALIASES, ids=["postgresql", "sqlite"])
@pytest.mark.parametrize("run", range(RUNS))
def test_each_task_comes_to_its_end(alias: str, run: int, settings: Any, taskqueue_registry: None) -> None:
    options = {"retry": "fixed:1s", "max_attempts": 3}
    places = {name: {} if name in SHARDED else {"database": alias} for name in KINDS}
    settings.DBTASKQUEUE = {"QUEUES": {name: {**options, **places[name], **kind} for name, kind in KINDS.items()}}
    for name in KINDS:
        processor(name)(work)
    mixture = Mixture(alias, run)
    often: list[Callable[[], None]] = [mixture.enqueue, mixture.drain, mixture.change, mixture.put_back] * 3
    rare = "enqueue_many batch chain workflow schedule schedule advance change_batch pause move_shards checkout"
    acts = often + [getattr(mixture, name) for name in rare.split()]
    for _ in range(ACTS):
        act = mixture.random.choice([*acts, mixture.settle, mixture.signal])
        try:
            with transaction.atomic(using=ALIASES[0]), transaction.atomic(using=ALIASES[1]):
                act()
        except TaskQueueError:  # refused in words
            continue
    mixture.calm()
    seen: list[Any] = [None, None]
    while seen[-1] != seen[-2] or len(seen) < 4:  # the first round lets become due what is not yet
        mixture.end()
        seen.append([(task.pk, task.status, task.total_attempt) for task in mixture.tasks])
    assert mixture.left() == []
