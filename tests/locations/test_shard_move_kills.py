"""A move between shards is killed again and again, while a poller runs and a producer enqueues: each task runs once."""

import random
import threading
from collections import Counter
from contextlib import ExitStack
from queue import Queue
from typing import Any

import pytest
from django.db import OperationalError

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.flow.shard_move import MOVE_LEDGER, ShardMove
from django_dbtaskqueue.models import Task, UsedReference
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_control import move_shards
from django_dbtaskqueue.testing import run_poller
from example_project.database import database_from_url
from tests.conftest import ProcessDatabase, _postgres_copy
from tests.kills import KILLED, killing
from tests.settings import SERVER_URL
from tests.support import PATIENCE, actors, alias_beside, backend_pid, sql, until_blocked

SHARDS = ("default", "second")


@pytest.fixture
def second(postgres_process_database: Any, _postgres_template: str, settings: Any, taskqueue_registry: None) -> Any:
    """Another migrated database, as the alias ``second``, on which the queue ``spread`` has its second shard."""
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": SHARDS}}}
    with _postgres_copy(SERVER_URL, _postgres_template) as copy, alias_beside("second", **database_from_url(copy.url)):
        yield copy.url


@pytest.mark.parametrize(
    ("tasks", "random_kills"), [(60, 0), pytest.param(20_000, 150, marks=pytest.mark.soak)], ids=["small", "soak"]
)
def test_each_task_runs_once_however_often_the_move_is_killed(
    postgres_process_database: ProcessDatabase, second: str, tasks: int, random_kills: int
) -> None:
    runs: Counter[str] = Counter()
    registry.register("spread", lambda task: runs.update([task.reference]))
    enqueue_many("spread", ({"reference": f"first {n}"} for n in range(tasks)), using="default")
    enqueue_many("spread", ({"reference": f"group {n}", "group": f"g{n % 3}"} for n in range(12)), using="default")
    over, produced = threading.Event(), list[str]()
    chance = random.Random(tasks)

    def produce() -> None:
        while not over.is_set() and len(produced) < tasks:
            reference = f"later {len(produced)}"
            enqueue("spread", reference, using=chance.choice(SHARDS))
            produced.append(reference)

    env = {**postgres_process_database.env, "SECOND_URL": second}
    env["DJANGO_SETTINGS_MODULE"] = "tests.locations.shard_settings"
    ended = Counter[int]()
    with killing("tests.locations.killed_shard_move", env=env) as move, actors(1) as [producer], ExitStack() as stack:
        producing = producer.do(produce)
        stack.callback(over.set)
        for step in ("marked", "inserted", "deleted"):
            assert move(step, "default", "second") == KILLED
            if step == "marked":
                assert Task.objects.cancel() == Task.objects.purge() == 0  # what was begun waits for the next move
            assert move(step, "second", "default") in (KILLED, 0)  # it may have nothing to move yet
        with run_poller("spread"):
            for number in range(random_kills):
                source, target = SHARDS if number % 2 else SHARDS[::-1]
                ended[move(chance.randrange(5, 400), source, target)] += 1
            assert set(ended) <= {KILLED, 0}
            over.set()
            producing.result(PATIENCE)
            for source, target in (SHARDS, SHARDS[::-1]):
                assert move("end", source, target) == 0
    expected = {*produced, *(f"first {n}" for n in range(tasks)), *(f"group {n}" for n in range(12))}
    assert runs == Counter(expected)
    print(f"{len(expected):,} tasks, of random moves {ended[KILLED]} killed and {ended[0]} ended")
    rows = [row for one in SHARDS for row in Task.objects.using(one).values_list("reference", "status")]
    assert sorted(rows) == sorted((reference, "COMPLETED") for reference in expected)
    assert not any(UsedReference.objects.using(one).filter(queue=MOVE_LEDGER).exists() for one in SHARDS)


# A commit that waits, as one does for a standby that is away.
SLOW_COMMIT = """
CREATE FUNCTION test_wait() RETURNS trigger LANGUAGE plpgsql
AS 'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER test_wait AFTER INSERT ON dbtaskqueue_task DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION test_wait()
"""


@pytest.mark.parametrize("kind", [{"reference": "r"}, {}, {"group": "g"}], ids=["referenced", "plain", "grouped"])
def test_a_move_that_died_while_its_target_committed_doubles_no_task(second: str, kind: Any) -> None:
    enqueue("spread", using="default", **kind)
    sql(f"{SLOW_COMMIT}; SELECT pg_advisory_lock(42)", alias="second")
    sessions = Queue[int]()

    def move(_: int) -> Any:
        sessions.put(backend_pid("second"))
        return move_shards(ShardMove("spread", "second"), Actor()).moved

    with actors(2) as [first, again]:
        dead = first.do(move, 1)
        until_blocked(sessions.get(timeout=PATIENCE))
        idle = "state = 'idle in transaction' AND datname = current_database()"
        sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {idle}")
        moved = again.do(move, 2)
        until_blocked(sessions.get(timeout=PATIENCE))
        sql("SELECT pg_advisory_unlock(42)", alias="second")
        assert moved.result(PATIENCE) == {("default", "second"): 1}
        with pytest.raises(OperationalError):
            dead.result(PATIENCE)
    assert [Task.objects.using(one).filter(parked_by=None).count() for one in SHARDS] == [0, 1]
