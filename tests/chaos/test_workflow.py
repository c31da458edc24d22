"""Steps and workflows whose pollers are killed: each step and each task has its effect once."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from django_dbtaskqueue import batch, enqueue, signal
from django_dbtaskqueue.models import Attempt, Hold, Signal, Task
from tests.chaos.processes import Configure, Start, expire_orphans
from tests.support import until
from tests.testapp.models import Booking

POINTS = ("before", "inside reserve", "between", "inside charge", "wait", "inside letter", "after")
USUAL = ("postgres_process_database", ("inside charge", "wait"))
SOAKED = [pytest.param(f"{kind}_process_database", POINTS, marks=pytest.mark.soak) for kind in ("postgres", "sqlite")]
STEPS = ("reserve", "charge", "letter")
LARGE = int(os.environ.get("WORKFLOW_TASKS", "10000"))
SIZES = [(f"{kind}_process_database", 60, 2) for kind in ("postgres", "sqlite")]
SIZES += [pytest.param(SIZES[0][0], LARGE, 30, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
WIDTH = 20  # tasks of a layer, each of which waits for some of the layer before
BOOK = {"do": "book"}  # in a queue whose processor and outcome are one transaction


def build(number: int) -> None:
    with batch("killed", on_complete={"queue": "ledger", "reference": "end", "payload": BOOK}):
        before: list[Task] = []
        for start in range(0, number, WIDTH):
            numbers = range(start, min(start + WIDTH, number))
            behind = [random.sample(before, min(3, len(before))) or None for _ in numbers]
            before = [enqueue("ledger", f"t{n}", BOOK, after=after) for n, after in zip(numbers, behind, strict=True)]


def done(**selection: str) -> int:
    """Return how many tasks are done; the leases of dead pollers run out meanwhile."""
    expire_orphans()
    return Task.objects.filter(status="COMPLETED", **selection).count()


@pytest.mark.parametrize(("database", "number", "kills"), SIZES, indirect=["database"])
def test_a_workflow_survives_kills(audited: None, start: Start, queues: Configure, number: int, kills: int) -> None:
    """Of two pollers one is killed each time that another part of the tasks is done."""
    queues(max_attempts=100)
    build(number)
    pollers = [start(), start()]
    for kill in range(kills):
        until(lambda kill=kill: done() > number * kill // kills, timeout=120)
        pollers[kill % 2].kill()
        pollers[kill % 2] = start()
    until(lambda: done(reference="end"), timeout=600)
    booked = Counter(Booking.objects.values_list("reference", flat=True))
    assert set(booked.values()) == {1}
    assert len(booked) == done() == number + 1
    assert not Hold.objects.exists()


@pytest.mark.parametrize(("database", "points"), [USUAL, *SOAKED], indirect=["database"])
def test_each_step_has_its_effect_once_wherever_the_poller_dies(
    points: tuple[str, ...], audited: None, start: Start, queues: Configure, tmp_path: Path
) -> None:
    queues(max_attempts=20)
    marks = {point: tmp_path / point.replace(" ", "-") for point in points}
    for point in points:
        enqueue("chaos", point, {"do": "steps", "die": point, "mark": str(marks[point])})

    unfinished, waiting = Task.objects.exclude(status="COMPLETED"), Task.objects.filter(parked_by="signal")
    pollers = [start()]
    while unfinished.exists():
        expire_orphans()
        until(lambda: pollers[-1].code is not None or waiting.exists() or not unfinished.exists())
        for task in waiting.all():
            signal(task, "approved", task.reference)
        if pollers[-1].code is not None:
            pollers.append(start())

    assert all(mark.exists() for mark in marks.values())
    wanted = sorted(f"{point} {step}" for point in points for step in STEPS)
    assert sorted(Booking.objects.values_list("reference", flat=True)) == wanted
    assert not Attempt.objects.filter(error_type__contains="IntegrityError").exists()
    assert {(task.reference, task.result) for task in Task.objects.all()} == {(point, point) for point in points}
    assert Signal.objects.filter(position__isnull=True).count() == 0
