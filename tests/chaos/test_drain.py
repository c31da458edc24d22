"""Four poller processes take 20,000 tasks, and nobody starts one that another has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.conftest import Start
from tests.chaos.processes import until_all
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines

TASKS = 20_000


# In a plain run four pollers of one process race by each strategy, in tests/concurrency/test_drain.py.
@pytest.mark.parametrize(
    ("database", "strategy"),
    [
        pytest.param("postgres_process_database", "skip_locked", marks=pytest.mark.slow),
        pytest.param("postgres_process_database", "optimistic", marks=pytest.mark.soak),
        pytest.param("sqlite_process_database", "optimistic", marks=pytest.mark.soak),
        pytest.param("sqlite_process_database", "auto", marks=pytest.mark.slow),
    ],
)
def test_no_task_is_started_twice(
    database: str,
    strategy: str,
    request: pytest.FixtureRequest,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    # Given four pollers that wait
    found: ProcessDatabase = request.getfixturevalue(database)
    queues(strategy=strategy, lease="60s", poll_interval="20ms", idle_interval="20ms")
    pollers = [start(found).ready() for _ in range(4)]

    # When there are 20,000 tasks at once
    mark = tmp_path / "mark"
    enqueue_many("chaos", [{"payload": {"do": "ok", "mark": str(mark)}}] * TASKS)
    began = monotonic()
    until_all("COMPLETED", timeout=100)
    took = monotonic() - began

    # Then each was started once, by the processes' own record and by the rows
    started = lines(mark)
    assert len(started) == TASKS
    assert len({line[0] for line in started}) == TASKS
    assert Task.objects.filter(status="COMPLETED", total_attempt=1, attempt=1).count() == TASKS
    assert not Attempt.objects.exists()
    shares = Counter(line[3] for line in started)
    print(f"{TASKS / took:,.0f} tasks/s on {found.vendor} by {strategy}; shares {sorted(shares.values())}")
    # SQLite gives its lock to whoever asks first: on a busy machine one process may come too late for every batch.
    assert len(shares) > 1, "they ran at the same time"
    for poller in pollers:
        poller.end()
        assert "WARNING" not in poller.log and "rror" not in poller.log
