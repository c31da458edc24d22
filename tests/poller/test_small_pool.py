"""Django's pool of connections may be smaller than a poller would like: what nobody uses goes back to it."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.core import checks
from django.db import connections

from django_dbtaskqueue import enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Metric, Task
from django_dbtaskqueue.poller.periodic import STORE_METRICS_SECONDS
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.patience import until
from tests.poller.processes import completed, polling


@pytest.mark.parametrize(
    ("pool", "warned"),
    [({"max_size": 6}, True), (True, True), ({"min_size": 9}, False), ({"max_size": 7}, False), (False, False)],
)
def test_a_pool_that_is_too_small_is_warned_of(
    settings: Any, monkeypatch: pytest.MonkeyPatch, pool: object, warned: bool
) -> None:
    settings.DBTASKQUEUE = {"THREADS": 4}
    monkeypatch.setitem(settings.DATABASES["default"]["OPTIONS"], "pool", pool)
    found = [one.msg for one in checks.run_checks(tags=["dbtaskqueue"]) if one.id == "dbtaskqueue.W006"]
    assert len(found) == warned and all("up to 7 connections of the pool of 'default'" in one for one in found)


@pytest.fixture
def pooled(postgres_process_database: ProcessDatabase) -> Iterator[None]:
    """The default database gives out two connections at a time."""
    before = connections.settings["default"]
    options = {**before["OPTIONS"], "pool": {"min_size": 1, "max_size": 2, "timeout": 30}}
    _use({**before, "CONN_MAX_AGE": 0, "OPTIONS": options})
    yield
    connections["default"].close_pool()
    _use(before)


def _use(database: dict[str, Any]) -> None:
    connections["default"].close()
    del connections["default"]
    connections.settings["default"] = database


def free() -> bool:
    """Give this thread's connection back."""
    connections["default"].close()
    return True


def test_a_pool_of_two_serves_a_poller(pooled: None, taskqueue_registry: None, clock: SteppedClock) -> None:
    async def count_async(task: Lease) -> int:
        return await Task.objects.acount()

    registry.register("letters", lambda task: Task.objects.count())
    registry.register("parcels", count_async)
    enqueue_many("parcels", [{}] * 9)
    with polling({"letters": 1, "parcels": 1}, threads=3):
        until(lambda: free() and completed() == 9)
        clock.advance(STORE_METRICS_SECONDS)
        until(lambda: free() and Metric.objects.exists())
        # Those who used a connection for a moment, and are idle, leave both to the others
        enqueue_many("letters", [{}] * 20)
        until(lambda: free() and completed() == 29)
