"""SIGKILL at seven labelled points: nothing is lost, and every orphan starts again within 1.2 of its lease."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.db.models import QuerySet

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Attempt, Poller, Task
from tests import factories
from tests.chaos.conftest import LEASE, Start
from tests.chaos.crashing import POINTS
from tests.chaos.processes import PollerProcess, audit, clock, starts, until_all, until_dead
from tests.conftest import ProcessDatabase
from tests.patience import slack
from tests.poller.processes import lines
from tests.support import until

SLOTS = 4  # of each poller
ROUNDS = 100  # after which it is no bad luck any more that the victim was not at its point


CASES = [("postgres_process_database", point) for point in POINTS] + [
    ("sqlite_process_database", point)
    for point in ("after checkout's commit", "before the outcome's commit", "in rescue")
]


@pytest.mark.parametrize(("database", "point"), CASES)
def test_nothing_is_lost_and_orphans_start_again_in_time(
    database: str,
    point: str,
    request: pytest.FixtureRequest,
    start: Start,
    tmp_path: Path,
    record_property: Callable[..., None],
) -> None:
    # Given two pollers, one of which will die at the point
    found: ProcessDatabase = request.getfixturevalue(database)
    watched = audit()
    victim, other = start(found, die=point), start(found)
    victim.ready()
    other.ready()

    # When it does
    gate = tmp_path / "gate"
    feed_until_dead(victim, point, gate)
    killed = clock()
    mine = Task.objects.filter(poller_instance__contains=f":{victim.pid}:")
    orphans = set(mine.filter(status="PROCESSING", max_attempts=3).values_list("pk", flat=True))
    settled = mine.filter(status="COMPLETED").exists()
    gate.touch()

    # Then every task comes to its end, by legal steps
    until_all("COMPLETED", max_attempts=3)
    assert watched.problems() == []
    # ... what the dead one held was charged and started again in time, and nothing else was
    begun = starts()
    slowest = max([begun[task_id][-1] - killed for task_id in orphans], default=0.0) / LEASE
    print(f"{point}: {len(orphans)} orphans, the slowest restart after {slowest:.2f} leases")
    record_property("slowest restart in leases", slowest)
    assert slowest <= 1.2 + slack(0.2)
    assert set(Task.objects.filter(total_attempt__gt=1, attempt=2).values_list("pk", flat=True)) == orphans
    # ... and it did die where it was meant to
    assert (len(orphans) > 0) == (point != "before checkout's commit") or point == "after the outcome's commit"
    assert settled == (point == "after the outcome's commit") or point == "in rescue"


def feed_until_dead(victim: PollerProcess, point: str, gate: Path) -> None:
    """Give both pollers work until the victim came to its point."""
    if point in ("in renewal", "in rescue"):  # slow tasks: it must hold some
        enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 3 * SLOTS)
        until(lambda: Task.objects.filter(status="PROCESSING").count() == 2 * SLOTS)
    for _ in range(0 if point == "in renewal" else ROUNDS):
        if victim.code is not None:
            break
        if point == "in rescue":  # a task whose process died on its last attempt
            gone = timedelta(seconds=-1)
            factories.make_task("PROCESSING", queue="chaos", max_attempts=1, next_process_time=gone)
        else:
            enqueue_many("chaos", [{"payload": {"do": "ok"}}] * 2 * SLOTS)
        until(lambda: victim.code is not None or not waiting(point).exists())
    until_dead(victim)


def waiting(point: str) -> QuerySet[Task]:
    """Return what one of the two should take soon."""
    if point == "in rescue":
        return Task.objects.filter(status="PROCESSING", max_attempts=1)
    return Task.objects.exclude(status="COMPLETED")


def test_a_rescue_that_died_is_done_by_another(process_database: ProcessDatabase, start: Start, tmp_path: Path) -> None:
    # Given a poller that dies while it rescues a task that spent its last attempt
    watched = audit()
    spent = factories.make_task(
        "PROCESSING", queue="chaos", attempt=3, max_attempts=3, next_process_time=timedelta(seconds=-1)
    )
    until_dead(start(process_database, die="in rescue"))
    assert not Attempt.objects.exists()

    # When another one comes
    start(process_database)

    # Then the task ends in ERROR, with one attempt recorded
    until_all("ERROR")
    assert [row.task_id for row in Attempt.objects.all()] == [spent.pk]
    assert watched.problems() == []


def test_orphans_are_found_when_nobody_remembers_their_poller(
    postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    # Given tasks whose poller died, and long ones at that
    queues(lease="1s")
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate), "mark": str(mark)}}] * SLOTS)
    victim = start(postgres_process_database, "--name", "same")
    until(lambda: len(lines(mark)) == SLOTS)
    victim.signal(signal.SIGKILL)
    until_dead(victim)

    # When its row is gone, and another one comes under the same name
    Poller.objects.all().delete()
    other = start(postgres_process_database, "--name", "same")

    # Then all of them are started again, and do not wait for each other's end
    until(lambda: len(lines(mark)) == 2 * SLOTS)
    gate.touch()
    until_all("COMPLETED")
    assert set(Task.objects.values_list("attempt", flat=True)) == {2}
    other.end()
