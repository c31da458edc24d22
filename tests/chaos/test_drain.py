"""Thousands of tasks: a poller needs no more after them than before."""

import psutil
import pytest

from django_dbtaskqueue import enqueue_many
from tests.chaos.processes import PollerProcess, Start, until_all
from tests.support import sql

EACH = 3_000
WARM = 3  # rounds
SPREAD = 10 * 2**20  # bytes


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
    poller.stop()


def of(poller: PollerProcess) -> tuple[int, int, int, int]:
    facts = psutil.Process(poller.pid)
    connected = sql("SELECT 1 FROM pg_stat_activity WHERE datname = current_database()")
    return facts.memory_info().rss, facts.num_threads(), facts.num_fds(), len(connected)
