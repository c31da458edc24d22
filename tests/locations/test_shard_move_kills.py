"""A move between shards is killed again and again, while a poller runs and a producer enqueues: each task runs once."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from subprocess import PIPE
from typing import Any

import pytest
from django.db import connections

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.flow.shard_move import MOVE_LEDGER
from django_dbtaskqueue.models import Task, UsedReference
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from example_project.database import database_from_url
from tests.conftest import REPOSITORY, ProcessDatabase, _postgres_copy
from tests.patience import PATIENCE
from tests.settings import SERVER_URL
from tests.support import actors

SHARDS = ("default", "second")
KILLED = "-9"


@pytest.fixture
def second(postgres_process_database: ProcessDatabase, _postgres_template: str, settings: Any) -> Iterator[str]:
    """Another migrated database, as the alias ``second``, on which the queue ``spread`` has its second shard."""
    saved = registry.snapshot()
    with _postgres_copy(SERVER_URL, _postgres_template) as database:
        connections.settings["second"] = {**connections.settings["default"], **database_from_url(database.url)}
        settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": SHARDS}}}
        yield database.url
        connections["second"].close()
        del connections["second"], connections.settings["second"]
    registry.restore(saved)


class Mover:
    """The program that moves in children."""

    def __init__(self, database: ProcessDatabase, second: str) -> None:
        env = {**database.env, "SECOND_URL": second, "DJANGO_SETTINGS_MODULE": "tests.locations.shard_settings"}
        self.program = subprocess.Popen(
            [sys.executable, "-m", "tests.locations.killed_shard_move"],
            env=env, cwd=REPOSITORY, stdin=PIPE, stdout=PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: object) -> str:
        """Let one child move; return how it ended."""
        assert self.program.stdin and self.program.stdout
        self.program.stdin.write(" ".join(map(str, words)) + "\n")
        self.program.stdin.flush()
        return self.program.stdout.readline().strip()

    def close(self) -> None:
        self.program.communicate(timeout=PATIENCE)


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

    with ExitStack() as stack:
        mover = Mover(postgres_process_database, second)
        stack.callback(mover.close)
        [producer] = stack.enter_context(actors(1))
        producing = producer.do(produce)
        stack.callback(over.set)
        for step in ("marked", "inserted", "deleted"):
            assert mover.run(step, "default", "second") == KILLED
            assert mover.run(step, "second", "default") in (KILLED, "0")  # it may have nothing to move yet
        poller = Poller({"spread": 1}, Options())
        poller.start()
        stack.callback(poller.close)
        stack.callback(lambda: poller.wait(PATIENCE))  # a task that ran but is not settled would run again
        stack.callback(poller.stop)
        ended = Counter[str]()
        for number in range(random_kills):
            source, target = SHARDS if number % 2 else SHARDS[::-1]
            ended[mover.run(chance.randrange(5, 400), source, target)] += 1
        assert set(ended) <= {KILLED, "0"}
        over.set()
        producing.result(PATIENCE)
        for source, target in (SHARDS, SHARDS[::-1]):
            assert mover.run("end", source, target) == "0"
    drain = Poller({"spread": 1}, Options(drain=True))
    drain.start()
    assert drain.wait(PATIENCE)
    drain.close()
    expected = {*produced, *(f"first {n}" for n in range(tasks)), *(f"group {n}" for n in range(12))}
    assert runs == Counter(expected)
    rows = [
        reference for alias in SHARDS for reference in Task.objects.using(alias).values_list("reference", flat=True)
    ]
    assert sorted(rows) == sorted(expected)
    print(f"{len(expected):,} tasks, of random moves {ended[KILLED]} killed and {ended['0']} ended")
    for alias in SHARDS:
        assert set(Task.objects.using(alias).values_list("status", flat=True)) <= {"COMPLETED"}
        assert not UsedReference.objects.using(alias).filter(queue=MOVE_LEDGER).exists()
