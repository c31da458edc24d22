"""Four pollers empty one queue: every task is started, and none of them twice."""

from typing import Any

import pytest
from django.db import connection

from django_dbtaskqueue import enqueue_many, registry
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.conftest import ProcessDatabase
from tests.patience import PATIENCE


@pytest.fixture
def started(taskqueue_registry: None) -> list[int]:
    ids: list[int] = []
    registry.register("parcels", lambda task: ids.append(task.id))
    return ids


def drain(number: int, alias: str) -> list[Poller]:
    pollers = [Poller({"parcels": 1}, Options(threads=2, drain=True), using=alias) for _ in range(number)]
    for poller in pollers:
        poller.start()
    ended = [poller.wait(PATIENCE) for poller in pollers]
    for poller in pollers:
        poller.close()
    assert ended == [True] * number
    return pollers


def check_all_done_once(alias: str, pollers: list[Poller], started: list[int], number: int) -> None:
    tasks = Task.objects.using(alias)
    assert sorted(started) == list(tasks.order_by("pk").values_list("pk", flat=True))
    assert tasks.filter(status="COMPLETED", total_attempt=1).count() == tasks.count() == number
    assert not Attempt.objects.using(alias).exists()
    assert sum(poller.counts.finished for poller in pollers) == number
    assert sum(poller.counts.lost for poller in pollers) == 0


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_four_pollers_in_threads(place: str, started: list[int], caplog: pytest.LogCaptureFixture) -> None:
    enqueue_many("parcels", [{}] * 8_000, using=place)
    pollers = drain(4, place)
    check_all_done_once(place, pollers, started, 8_000)
    assert sum(poller.counts.finished > 0 for poller in pollers) > 1
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("strategy", ["skip_locked", "optimistic"])
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_isolation_costs_tries_and_no_task(
    postgres_process_database: ProcessDatabase, settings: Any, started: list[int], level: str, strategy: str
) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": strategy}}}
    name = connection.settings_dict["NAME"]
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{level}'")
    connection.close()
    enqueue_many("parcels", [{}] * 1_000)
    check_all_done_once("default", drain(3, "default"), started, 1_000)
