"""A workflow whose pollers are killed: each task has its effect once, and the callback of the batch runs once."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from django_dbtaskqueue import batch, enqueue
from django_dbtaskqueue.models import Hold, Task
from tests.chaos.conftest import Configure, Start
from tests.chaos.processes import audit, expire_orphans
from tests.conftest import ProcessDatabase
from tests.support import until
from tests.testapp.models import Booking

TASKS = int(os.environ.get("WORKFLOW_TASKS", "10000"))
WIDTH = 20  # tasks of a layer, each of which waits for some of the layer before
BOOK = {"do": "book"}  # in a queue whose processor and outcome are one transaction


def build(number: int) -> None:
    """Enqueue layers of tasks that each book once, and a callback that books, too."""
    with batch("killed", on_complete={"queue": "ledger", "reference": "end", "payload": BOOK}):
        before: list[Task] = []
        for start in range(0, number, WIDTH):
            before = [
                enqueue("ledger", f"t{n}", BOOK, after=random.sample(before, min(3, len(before))) or None)
                for n in range(start, min(start + WIDTH, number))
            ]


def done(**selection: str) -> int:
    """Return how many tasks are done; the leases of dead pollers run out meanwhile."""
    expire_orphans()
    return Task.objects.filter(status="COMPLETED", **selection).count()


def run_under_kills(database: ProcessDatabase, start: Start, number: int, kills: int) -> None:
    """Run a workflow with two pollers; kill one each time that another part of the tasks is done."""
    watched = audit()
    build(number)
    pollers = [start(database), start(database)]
    for kill in range(kills):
        until(lambda kill=kill: done() > number * kill // kills, timeout=120)
        pollers[kill % 2].kill()
        pollers[kill % 2] = start(database)
    until(lambda: done(reference="end"), timeout=600)
    assert watched.problems() == []
    booked = Counter(Booking.objects.values_list("reference", flat=True))
    assert set(booked.values()) == {1}
    assert len(booked) == done() == number + 1
    assert not Hold.objects.exists()


def test_a_small_workflow_survives_kills(process_database: ProcessDatabase, start: Start, queues: Configure) -> None:
    queues(max_attempts=20)
    run_under_kills(process_database, start, 60, kills=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_large_workflow_survives_kills(
    postgres_process_database: ProcessDatabase, start: Start, queues: Configure
) -> None:
    """WORKFLOW_TASKS says how many tasks."""
    queues(max_attempts=100)
    run_under_kills(postgres_process_database, start, TASKS, kills=30)
