"""A holder that was stopped beyond its lease goes on: what it writes late changes nothing, and it says so."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.conftest import Start
from tests.chaos.processes import audit, until_all
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines
from tests.support import row_of, until
from tests.testapp.models import Booking


@pytest.mark.parametrize("queue", ["chaos", "ledger"])
@pytest.mark.parametrize("successor", ["runs", "has finished"])
def test_a_late_outcome_changes_nothing(
    queue: str,
    successor: str,
    postgres_process_database: ProcessDatabase,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    queues(lease="1s")
    watched = audit()
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    first_gate, second_gate = Path(f"{gate}.1"), Path(f"{gate}.2")

    # Given a holder that is stopped while its processor runs
    Booking.objects.create(reference="A")
    payload = {"do": "hold", "until": str(gate), "each": True, "bump": True, "mark": str(mark)}
    task = enqueue(queue, "A", payload)
    holder = start(postgres_process_database)
    until(lambda: len(lines(mark)) == 1)
    holder.signal(signal.SIGSTOP)

    # ... and a second poller that took the task over when the lease had run out
    second = start(postgres_process_database)
    until(lambda: len(lines(mark)) == 2)
    if successor == "has finished":
        second_gate.touch()
        until_all("COMPLETED")

    # When the holder goes on and ends its processor
    before = row_of(task)
    first_gate.touch()
    holder.signal(signal.SIGCONT)
    holder.until_logged(f"Lease 1 of task {task.pk} of {queue} is gone")

    # Then the row is as the second one left it, which goes on undisturbed
    after = row_of(task)
    assert before is not None
    assert after is not None
    assert after["total_attempt"] == 2
    assert {name for name in after if after[name] != before[name]} <= {"next_process_time"}, "but for its own renewals"
    second_gate.touch()
    until_all("COMPLETED")
    final = Task.objects.get()
    assert (final.result, final.attempt) == (2, 2)
    assert f":{second.pid}:" in str(final.poller_instance)
    assert Booking.objects.get().amount == (1 if queue == "ledger" else 2), "in atomic mode the effect is exactly once"
    assert not Attempt.objects.exists()
    assert watched.problems() == []
    holder.end()
    second.end()


def test_a_late_renewal_does_not_take_the_lease_back(
    postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    queues(lease="1s")
    mark, gate = tmp_path / "mark", tmp_path / "gate"

    # Given a stopped holder, and a successor whose renewals are stopped, too
    task = enqueue("chaos", None, {"do": "hold", "until": str(gate), "mark": str(mark)})
    holder = start(postgres_process_database).ready()
    until(lambda: len(lines(mark)) == 1)
    holder.signal(signal.SIGSTOP)
    second = start(postgres_process_database)
    until(lambda: len(lines(mark)) == 2)
    second.signal(signal.SIGSTOP)
    lease_until = Task.objects.get().next_process_time

    # When the holder goes on, and looks after its leases
    holder.signal(signal.SIGCONT)
    until(lambda: len(lines(mark)) == 3)

    # Then it got a new lease after the successor's had run out, and did not extend that one
    assert [int(line[2]) for line in lines(mark)] == [1, 2, 3]
    assert Task.objects.get().start_time >= lease_until
    gate.touch()
    second.signal(signal.SIGCONT)
    until_all("COMPLETED")
    assert Task.objects.get().total_attempt == 3
    assert task.pk == Task.objects.get().pk


def test_a_healthy_holder_keeps_its_task_far_beyond_its_lease(
    process_database: ProcessDatabase, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    queues(lease="500ms")
    mark = tmp_path / "mark"
    enqueue("chaos", None, {"do": "sleep", "seconds": 3.0, "mark": str(mark)})
    start(process_database)
    start(process_database)
    until_all("COMPLETED")
    assert len(lines(mark)) == 1
    assert Task.objects.get().total_attempt == 1


def test_waiting_tasks_do_not_outlive_their_leases_in_memory(
    postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    # Given one slot, and tasks of a quarter of the lease each behind quick ones that made the poller take many
    queues(lease="1s")
    mark = tmp_path / "mark"
    for number in range(200):
        seconds = 0.25 if number >= 180 else 0.0
        enqueue("chaos", None, {"do": "sleep", "seconds": seconds, "mark": str(mark)})
    start(postgres_process_database, "--threads", "1")
    start(postgres_process_database, "--threads", "1")
    until_all("COMPLETED")
    assert len(lines(mark)) == 200
    assert set(Task.objects.values_list("total_attempt", flat=True)) == {1}
