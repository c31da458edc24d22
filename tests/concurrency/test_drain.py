"""Four pollers empty one queue: every task is started, and none of them twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.models import Max, Sum

from django_dbtaskqueue import enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.patience import patience

TASKS, POLLERS = 20_000, 4


@pytest.fixture
def started() -> Iterator[list[int]]:
    """The tasks whose processor was called, in the order of the calls."""
    ids: list[int] = []
    before = registry.snapshot()

    def note(task: Lease) -> None:
        ids.append(task.id)

    registry.register("parcels", note)
    yield ids
    registry.restore(before)


def drain(number: int, alias: str | None) -> list[Poller]:
    """Run pollers in threads until the queue is empty."""
    pollers = [Poller({"parcels": 1}, Options(threads=2, drain=True), using=alias) for _ in range(number)]
    for poller in pollers:
        poller.start()
    ended = [poller.wait(patience(100)) for poller in pollers]
    for poller in pollers:
        poller.close()
    assert ended == [True] * number
    return pollers


def check_all_done_once(alias: str, started: Counter[int]) -> None:
    """Each task has one start on record, one lease ever granted, and the outcome."""
    tasks = Task.objects.using(alias)
    assert set(started) == set(tasks.values_list("pk", flat=True))
    assert started.most_common(1)[0][1] == 1
    assert tasks.filter(status="COMPLETED").count() == TASKS
    assert tasks.aggregate(most=Max("total_attempt"), all=Sum("total_attempt")) == {"most": 1, "all": TASKS}
    assert not Attempt.objects.using(alias).exists()


@pytest.mark.slow
@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_four_pollers_in_threads(place: str, started: list[int], caplog: pytest.LogCaptureFixture) -> None:
    enqueue_many("parcels", ((f"r-{number}", {"number": number}) for number in range(TASKS)), using=place)

    pollers = drain(POLLERS, place)

    check_all_done_once(place, Counter(started))
    assert sum(poller.counts.finished for poller in pollers) == TASKS
    assert sum(poller.counts.lost for poller in pollers) == 0
    assert sum(poller.counts.finished > 0 for poller in pollers) > 1
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("strategy", ["skip_locked", "optimistic"])
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_isolation_costs_tries_and_no_task(
    postgres_process_database: ProcessDatabase, settings: Any, started: list[int], level: str, strategy: str
) -> None:
    """Given transactions that fail rather than see others' changes, then all is done once all the same."""
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": strategy}}}
    with connection.cursor() as cursor:
        cursor.execute(
            f"ALTER DATABASE \"{connection.settings_dict['NAME']}\" SET default_transaction_isolation = '{level}'"
        )
    connection.close()
    enqueue_many("parcels", ((f"r-{number}", None) for number in range(1_000)))

    pollers = drain(3, None)

    assert Counter(started) == Counter(Task.objects.values_list("pk", flat=True))
    assert Task.objects.filter(status="COMPLETED", total_attempt=1).count() == 1_000
    assert sum(poller.counts.lost for poller in pollers) == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["skip_locked", "optimistic"])
def test_four_poller_processes_on_postgresql(
    postgres_process_database: ProcessDatabase, tmp_path: Path, strategy: str
) -> None:
    drain_with_processes(postgres_process_database, tmp_path, strategy)


@pytest.mark.slow
def test_four_poller_processes_on_sqlite(sqlite_process_database: ProcessDatabase, tmp_path: Path) -> None:
    drain_with_processes(sqlite_process_database, tmp_path, "auto")


def drain_with_processes(database: ProcessDatabase, folder: Path, strategy: str) -> None:
    mark = folder / "mark"
    enqueue_many("work", ((f"r-{number}", {"mark": str(mark)}) for number in range(TASKS)))
    environment = {
        **database.env, "DJANGO_SETTINGS_MODULE": "tests.concurrency.settings", "TEST_STRATEGY": strategy,
    }  # fmt: skip
    command = [sys.executable, str(REPOSITORY / "manage.py"), "runtaskpoller", "--drain", "--queue", "work"]

    logs = [folder / f"log-{number}" for number in range(POLLERS)]
    with ExitStack() as stack:
        running = []
        for log in logs:
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append(process)
        codes = [process.wait(patience(100)) for process in running]

    assert codes == [os.EX_OK] * POLLERS, "\n".join(log.read_text() for log in logs)
    lines = [line.split() for line in mark.read_text().splitlines()]
    check_all_done_once("default", Counter(int(task_id) for task_id, *_ in lines))
    assert len({pid for *_, pid in lines}) > 1
    assert not [line for log in logs for line in log.read_text().splitlines() if "rror" in line]
