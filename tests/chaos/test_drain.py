"""Four poller processes take thousands of tasks, and nobody starts one that another has."""

from __future__ import annotations

from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.conftest import Configure, Start
from tests.chaos.processes import until_all
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines


# In a plain run four pollers of one process race by each strategy, in tests/concurrency/test_drain.py.
@pytest.mark.parametrize(
    "tasks", [pytest.param(4_000, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(
    ("database", "strategy"),
    [
        ("postgres_process_database", "skip_locked"),
        pytest.param("postgres_process_database", "optimistic", marks=pytest.mark.soak),
        pytest.param("sqlite_process_database", "optimistic", marks=pytest.mark.soak),
        ("sqlite_process_database", "auto"),
    ],
)
def test_no_task_is_started_twice(
    database: str, strategy: str, tasks: int, request: pytest.FixtureRequest, start: Start, queues: Configure,
    tmp_path: Path,
) -> None:  # fmt: skip
    # Given four pollers that wait
    found: ProcessDatabase = request.getfixturevalue(database)
    queues(strategy=strategy, poll_interval="20ms", idle_interval="20ms")
    pollers = [start(found).ready() for _ in range(4)]

    # When there are thousands of tasks at once
    mark = tmp_path / "mark"
    enqueue_many("chaos", [{"payload": {"do": "ok", "mark": str(mark)}}] * tasks)
    until_all("COMPLETED", timeout=100)

    # Then each was started once, by the processes' own record and by the rows
    started = lines(mark)
    assert len(started) == tasks
    assert len({line[0] for line in started}) == tasks
    assert Task.objects.filter(status="COMPLETED", total_attempt=1, attempt=1).count() == tasks
    assert not Attempt.objects.exists()
    # SQLite gives its lock to whoever asks first: on a busy machine one process may come too late for every batch.
    assert len({line[3] for line in started}) > 1, "they ran at the same time"
    for poller in pollers:
        poller.end()
        assert "WARNING" not in poller.log and "rror" not in poller.log
