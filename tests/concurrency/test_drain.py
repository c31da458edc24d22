"""Four pollers empty one queue: every task is started, and none of them twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from django.db import connection
from django.db.models import Max, Sum

from django_dbtaskqueue import enqueue_many, registry
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.conftest import ProcessDatabase
from tests.patience import PATIENCE

TASKS, POLLERS = 8_000, 4


@pytest.fixture
def started(taskqueue_registry: None) -> list[int]:
    ids: list[int] = []
    registry.register("parcels", lambda task: ids.append(task.id))
    return ids


def drain(number: int, alias: str | None) -> list[Poller]:
    pollers = [Poller({"parcels": 1}, Options(threads=2, drain=True), using=alias) for _ in range(number)]
    for poller in pollers:
        poller.start()
    ended = [poller.wait(PATIENCE) for poller in pollers]
    for poller in pollers:
        poller.close()
    assert ended == [True] * number
    return pollers


def check_all_done_once(alias: str, started: Counter[int]) -> None:
    tasks = Task.objects.using(alias)
    assert set(started) == set(tasks.values_list("pk", flat=True))
    assert started.most_common(1)[0][1] == 1
    assert tasks.filter(status="COMPLETED").count() == TASKS
    assert tasks.aggregate(most=Max("total_attempt"), all=Sum("total_attempt")) == {"most": 1, "all": TASKS}
    assert not Attempt.objects.using(alias).exists()


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
