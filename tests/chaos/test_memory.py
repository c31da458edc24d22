"""A poller needs no more of anything after many thousands of tasks than after the first ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import psutil
import pytest
from django.db import connections

from django_dbtaskqueue import enqueue_many
from tests.chaos.conftest import Start
from tests.chaos.processes import PollerProcess, until_all
from tests.conftest import ProcessDatabase

EACH = 3_000
WARM = 3  # rounds
MEBIBYTE = 2**20
SPREAD = 10 * MEBIBYTE


class Needs(NamedTuple):
    """What a process holds at one moment."""

    memory: int
    threads: int
    files: int
    connections: int


@pytest.mark.parametrize("rounds", [pytest.param(7, marks=pytest.mark.slow), pytest.param(33, marks=pytest.mark.soak)])
def test_memory_threads_files_and_connections_stay_flat(
    rounds: int, postgres_process_database: ProcessDatabase, start: Start, record_property: Callable[..., None]
) -> None:
    poller, needs = start(postgres_process_database).ready(), []
    for _ in range(rounds):
        enqueue_many("chaos", [{"payload": {"do": "ok", "text": "x" * 100}}] * EACH)
        until_all("COMPLETED")
        needs.append(of(poller))
    warm = needs[WARM:]
    memory = [each.memory for each in warm]
    record_property("MiB since warm-up", (memory[-1] - memory[0]) / MEBIBYTE)
    assert max(memory) - min(memory) <= SPREAD
    for name in ("threads", "files", "connections"):
        found = [getattr(each, name) for each in warm]
        assert max(found) - min(found) <= 2, f"{name}: {found}"
    poller.end()


def of(poller: PollerProcess) -> Needs:
    facts = psutil.Process(poller.pid)
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        number = int(cursor.fetchone()[0])
    return Needs(facts.memory_info().rss, facts.num_threads(), facts.num_fds(), number)
