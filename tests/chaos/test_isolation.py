"""Tasks whose poller was killed run in a process of their own: soon, and without holding up the others."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.conftest import Start
from tests.chaos.processes import statuses, until_all, until_dead
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines
from tests.support import eventually, until

ORPHANS = 40


@pytest.mark.slow
def test_what_a_killed_poller_held_runs_at_the_same_time_and_holds_nobody_up(
    postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    # Given a poller that is killed while it runs many tasks
    queues(lease="3s")
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    payload = {"do": "hold", "until": str(gate), "each": True, "mark": str(mark)}
    enqueue_many("chaos", [{"payload": payload}] * ORPHANS)
    victim = start(postgres_process_database, "--threads", str(ORPHANS))
    until(lambda: len(lines(mark)) == ORPHANS)
    victim.signal(signal.SIGKILL)
    until_dead(victim)

    # When another one takes them, then all of them run at the same time, though it has four threads
    heir = start(postgres_process_database, "--threads", "4").ready()
    until(lambda: len(lines(mark)) == 2 * ORPHANS, timeout=60)

    # ... and other tasks do not wait for them
    enqueue_many("ledger", [{}] * 50)
    until_all("COMPLETED", queue="ledger")
    assert statuses(queue="chaos") == {"PROCESSING": ORPHANS}

    # ... and they are done without another charge
    Path(f"{gate}.2").touch()
    until_all("COMPLETED")
    assert set(Task.objects.filter(queue="chaos").values_list("attempt", flat=True)) == {2}
    heir.end()


def test_a_task_that_kills_takes_nobody_with_it(
    postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None]
) -> None:
    # Given tasks, one of which kills each process it runs in
    queues(lease="2s", max_attempts=3)
    enqueue_many("chaos", [{"payload": {"do": "sleep", "seconds": 0.5}}] * 11)
    enqueue("chaos", "killer", {"do": "segfault"})
    poller = start(postgres_process_database, "--processes", "1", "--threads", "12")

    # Then only that one fails, and the poller's own process dies once
    eventually(over, timeout=60)
    killer = Task.objects.get(reference="killer")
    assert (killer.status, killer.attempt) == ("ERROR", 3)
    assert Attempt.objects.filter(task_id=killer.pk).order_by("attempt").last().error_type.endswith("ProcessDied")  # type: ignore[union-attr]
    good = Task.objects.filter(reference=None)
    assert set(good.values_list("status", flat=True)) == {"COMPLETED"}
    assert set(good.values_list("attempt", flat=True)) <= {1, 2}
    assert poller.log.count("Starting another one") == 1
    poller.end()


def over() -> None:
    assert not statuses().keys() & {"CREATED", "PROCESSING"}, statuses()
