"""Thousands of tasks: nobody starts one that another has, and a poller needs no more after them than before."""

from pathlib import Path

import psutil
import pytest
from django.db import connections

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.processes import Configure, PollerProcess, Start, until_all
from tests.poller.processes import lines

EACH = 3_000
WARM = 3  # rounds
SPREAD = 10 * 2**20  # bytes
SOAKED = [
    pytest.param(f"{kind}_process_database", "optimistic", marks=pytest.mark.soak) for kind in ("postgres", "sqlite")
]
USUAL = [("postgres_process_database", "skip_locked"), ("sqlite_process_database", "auto")]


# In a plain run four pollers of one process race by each strategy, in tests/concurrency/test_drain.py.
@pytest.mark.parametrize(
    "tasks", [pytest.param(4_000, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(("database", "strategy"), USUAL + SOAKED, indirect=["database"])
def test_no_task_is_started_twice(strategy: str, tasks: int, start: Start, queues: Configure, tmp_path: Path) -> None:
    queues(strategy=strategy, poll_interval="20ms", idle_interval="20ms")
    pollers = [start().ready() for _ in range(4)]
    mark = tmp_path / "mark"
    enqueue_many("chaos", [{"payload": {"do": "ok", "mark": str(mark)}}] * tasks)
    until_all("COMPLETED", timeout=100)

    started = lines(mark)
    assert len(started) == len({line[0] for line in started}) == tasks
    assert Task.objects.filter(status="COMPLETED", total_attempt=1, attempt=1).count() == tasks
    assert not Attempt.objects.exists()
    # SQLite gives its lock to whoever asks first: on a busy machine one process may come too late for every batch.
    assert len({line[3] for line in started}) > 1, "they ran at the same time"
    for poller in pollers:
        poller.end()
        assert "WARNING" not in poller.log and "rror" not in poller.log


@pytest.mark.parametrize("rounds", [pytest.param(7, marks=pytest.mark.slow), pytest.param(33, marks=pytest.mark.soak)])
def test_memory_threads_files_and_connections_stay_flat(rounds: int, start: Start) -> None:
    poller, needs = start().ready(), []
    for _ in range(rounds):
        enqueue_many("chaos", [{"payload": {"do": "ok", "text": "x" * 100}}] * EACH)
        until_all("COMPLETED")
        needs.append(of(poller))
    memory, *others = zip(*needs[WARM:], strict=True)
    assert max(memory) - min(memory) <= SPREAD
    for found in others:
        assert max(found) - min(found) <= 2, found
    poller.end()


def of(poller: PollerProcess) -> tuple[int, int, int, int]:
    """Return what a process holds: memory, threads, files, connections."""
    facts = psutil.Process(poller.pid)
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        ((number,),) = cursor.fetchall()
    return facts.memory_info().rss, facts.num_threads(), facts.num_fds(), number
