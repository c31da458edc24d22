"""A poller needs no more of anything after 40,000 tasks (in a soak: 100,000) than after the first thousands."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import pytest
from django.db import connections

from django_dbtaskqueue import enqueue_many
from tests.chaos.conftest import Start
from tests.chaos.processes import PollerProcess, until_all
from tests.conftest import ProcessDatabase

EACH = 5_000
WARM = 4  # rounds
MEBIBYTE = 2**20
SPREAD = 10 * MEBIBYTE


class Needs(NamedTuple):
    """What a process holds at one moment."""

    memory: int
    threads: int
    files: int
    connections: int


@pytest.mark.parametrize("rounds", [pytest.param(8, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.soak)])
def test_memory_threads_files_and_connections_stay_flat(
    rounds: int,
    postgres_process_database: ProcessDatabase,
    start: Start,
    queues: Callable[..., None],
    record_property: Callable[..., None],
) -> None:
    queues(lease="60s")
    poller = start(postgres_process_database).ready()
    began, needs = monotonic(), []
    for _ in range(rounds):
        enqueue_many("chaos", [{"payload": {"do": "ok", "text": "x" * 100}}] * EACH)
        until_all("COMPLETED")
        needs.append(of(poller))
    warm = needs[WARM:]
    memory = [each.memory for each in warm]
    growth = (memory[-1] - memory[0]) / MEBIBYTE
    print(
        f"{rounds * EACH:,} tasks in {monotonic() - began:.0f} s: {memory[-1] / MEBIBYTE:.1f} MiB, {growth:+.2f} MiB"
        f" since warm-up, spread {(max(memory) - min(memory)) / MEBIBYTE:.2f} MiB; {warm[-1]}"
    )
    record_property("MiB since warm-up", growth)
    assert max(memory) - min(memory) <= SPREAD
    for name in ("threads", "files", "connections"):
        found = [getattr(each, name) for each in warm]
        assert max(found) - min(found) <= 2, f"{name}: {found}"
    poller.end()


def of(poller: PollerProcess) -> Needs:
    facts = poller.facts()
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        number = int(cursor.fetchone()[0])
    return Needs(facts.memory_info().rss, facts.num_threads(), facts.num_fds(), number)
