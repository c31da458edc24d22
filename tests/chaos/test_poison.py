"""Tasks that kill whoever touches them: they end in ERROR after their budget, and nobody else suffers for long."""

from pathlib import Path

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.executors.process import MAX_ISOLATED_TASKS
from tests.chaos.processes import Configure, Start, until_all


def test_a_task_that_kills_takes_nobody_with_it(start: Start, queues: Configure, tmp_path: Path) -> None:
    queues(heartbeat="10s", max_attempts=2)
    gate = tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * (MAX_ISOLATED_TASKS - 1))
    killer = enqueue("chaos", "killer", {"do": "segfault"})
    poller = start("--processes", "1", "--threads", str(MAX_ISOLATED_TASKS))
    until_all("ERROR", pk=killer.pk)
    gate.touch()
    until_all("COMPLETED", reference=None)
    killer.refresh_from_db()
    assert killer.attempt == 2
    assert Attempt.objects.filter(task_id=killer.pk).latest("attempt").error_type.endswith(".ProcessDied")
    assert set(Task.objects.filter(reference=None).values_list("attempt", flat=True)) <= {1, 2}
    assert poller.log.count("Starting another one") == 1
    poller.stop()


def test_a_poller_without_its_fetch_thread_stores_what_runs(start: Start, queues: Configure, tmp_path: Path) -> None:
    queues(heartbeat="10s", listeners=("tests.chaos.crashing.Leaves",))
    gate = tmp_path / "gate"
    enqueue("chaos", None, {"do": "hold", "until": str(gate)})
    poller = start()
    poller.until_logged("Thread dbtaskqueue-fetch-0 ended")
    gate.touch()
    poller.ended(1)  # once the other thread has stored the outcome
    assert "SystemExit: 4" in poller.log and "its poller ends" in poller.log
    assert Task.objects.get().status == "COMPLETED"
