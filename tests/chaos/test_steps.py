"""SIGKILL of the poller at every step of a task: each step has its effect in the database once."""

from __future__ import annotations

from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue, signal
from django_dbtaskqueue.models import Attempt, Signal, Task
from tests.chaos.conftest import Configure, Start
from tests.chaos.processes import audit, expire_orphans
from tests.conftest import ProcessDatabase
from tests.support import until
from tests.testapp.models import Booking

POINTS = ("before", "inside reserve", "between", "inside charge", "wait", "inside letter", "after")
STEPS = ("reserve", "charge", "letter")


@pytest.mark.soak
def test_each_step_has_its_effect_once_wherever_the_poller_dies(
    process_database: ProcessDatabase, start: Start, queues: Configure, tmp_path: Path
) -> None:
    kill_at(POINTS, process_database, start, queues, tmp_path)


def test_a_step_and_a_wait_that_are_cut_off_are_taken_up_again(
    postgres_process_database: ProcessDatabase, start: Start, queues: Configure, tmp_path: Path
) -> None:
    kill_at(("inside charge", "wait"), postgres_process_database, start, queues, tmp_path)


def kill_at(
    points: tuple[str, ...],
    database: ProcessDatabase,
    start: Start,
    queues: Configure,
    folder: Path,
) -> None:
    # Given a task for each point, which ends its poller there
    queues(max_attempts=20)
    watched = audit()
    for point in points:
        enqueue("chaos", point, {"do": "steps", "die": point, "mark": str(folder / point.replace(" ", "-"))})

    # When pollers come again and again, and each wait is answered
    unfinished, waiting = Task.objects.exclude(status="COMPLETED"), Task.objects.filter(parked_by="signal")
    pollers = [start(database)]
    while unfinished.exists():
        expire_orphans()
        until(lambda: pollers[-1].code is not None or waiting.exists() or not unfinished.exists())
        for task in waiting.all():
            signal(task, "approved", task.reference)
        if pollers[-1].code is not None:
            pollers.append(start(database))

    # Then each has died once, each step has its effect once, and each signal was received once
    assert all((folder / point.replace(" ", "-")).exists() for point in points)
    wanted = sorted(f"{point} {step}" for point in points for step in STEPS)
    assert sorted(Booking.objects.values_list("reference", flat=True)) == wanted
    assert not Attempt.objects.filter(error_type__contains="IntegrityError").exists()
    assert {(task.reference, task.result) for task in Task.objects.all()} == {(point, point) for point in points}
    assert Signal.objects.filter(position__isnull=True).count() == 0
    assert watched.problems() == []
