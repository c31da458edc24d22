"""Tasks that kill whoever touches them: they end in ERROR after their budget, and nobody else suffers for long."""

import re
from collections import Counter
from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.processes import Configure, Start, on, until_all, until_over
from tests.poller.processes import lines

KILLERS = {"segfault": "SIGSEGV", "overflow": "SIGSEGV", "exit": "exit code 7", "kill": "SIGKILL"}
RAISERS = {"recursion": "builtins.RecursionError", "leave": "builtins.SystemExit"}
DIED = "django_dbtaskqueue.core.exceptions.ProcessDied"
GOOD = 200


@pytest.mark.slow
@on("postgres_process_database", "sqlite_process_database")
def test_poison_among_good_tasks(audited: None, start: Start, queues: Configure, tmp_path: Path) -> None:
    queues(heartbeat="10s")
    mark, kinds = tmp_path / "mark", [*KILLERS, *RAISERS]
    for kind in kinds:
        enqueue_many("chaos", [{"payload": {"do": "ok"}}] * (GOOD // len(kinds)))
        enqueue("chaos", kind, {"do": kind, "mark": str(mark)})
    poller = start("--processes", "2")
    until_over()
    poison = Task.objects.filter(reference__isnull=False)
    assert {task.reference: (task.status, task.attempt) for task in poison} == dict.fromkeys(kinds, ("ERROR", 3))
    started = Counter(line[1] for line in lines(mark))
    assert started.keys() == set(kinds)
    assert max(started.values()) == 3

    # ... and all the others are done, charged at most once for each process that died with them
    good = Task.objects.filter(reference=None)
    assert set(good.values_list("status", flat=True)) == {"COMPLETED"}
    deaths = len(re.findall(r"Child \d+ ended", poller.log))
    assert max(good.values_list("attempt", flat=True)) <= 1 + deaths
    for task in poison:
        last = Attempt.objects.filter(task_id=task.pk).latest("total_attempt")
        assert (last.attempt, last.error_type) == (3, RAISERS.get(str(task.reference), DIED))
        assert "ended its process" in (task.process_result or "") or task.reference in RAISERS

    # ... and the supervisor has replaced every child that died, and goes on
    for death in KILLERS.values():
        assert death in poller.log
    enqueue("chaos", None, {"do": "ok"})
    until_over()
    poller.end()


def test_a_task_that_kills_takes_nobody_with_it(start: Start, queues: Configure, tmp_path: Path) -> None:
    queues(heartbeat="10s", max_attempts=2)
    gate = tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 11)
    killer = enqueue("chaos", "killer", {"do": "segfault"})
    poller = start("--processes", "1", "--threads", "12")
    until_all("ERROR", pk=killer.pk)
    gate.touch()
    until_all("COMPLETED", reference=None)
    killer.refresh_from_db()
    assert killer.attempt == 2
    assert Attempt.objects.filter(task_id=killer.pk).latest("attempt").error_type == DIED
    assert set(Task.objects.filter(reference=None).values_list("attempt", flat=True)) <= {1, 2}
    assert poller.log.count("Starting another one") == 1
    poller.end()


# -- a thread that a poller cannot work without ends: the process ends with a message, and another one goes on ---------


@pytest.fixture
def leaving(start: Start, queues: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Start pollers, of which the first to take tasks loses its fetch thread then."""
    queues(heartbeat="10s", listeners=("tests.chaos.crashing.LeavesOnce",))
    monkeypatch.setenv("CHAOS_FLAG", str(tmp_path / "left"))
    return start


def test_a_child_without_its_fetch_thread_is_replaced(leaving: Start) -> None:
    parent = leaving("--processes", "1")
    enqueue_many("chaos", [{}] * 3)
    parent.until_logged("Thread dbtaskqueue-fetch-0 ended")
    parent.until_logged("Starting another one")
    enqueue("chaos")
    until_all("COMPLETED")
    parent.end()


def test_a_poller_without_its_fetch_thread_stores_what_runs_and_ends(leaving: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    enqueue("chaos", None, {"do": "hold", "until": str(gate)})
    poller = leaving()
    poller.until_logged("Thread dbtaskqueue-fetch-0 ended")
    gate.touch()
    poller.ended(1)  # once the other thread has stored the outcome
    assert "SystemExit: 4" in poller.log
    assert "its poller ends" in poller.log
    assert Task.objects.get().status == "COMPLETED"
