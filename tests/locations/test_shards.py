"""A queue spread over two databases: PostgreSQL and SQLite, for the flow does not care."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.utils import DatabaseError

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.patience import PATIENCE

SHARDS = ("default", "sqlite")


@pytest.fixture
def sharded(settings: Any) -> Iterator[None]:
    """Spread the queue ``spread`` over both databases."""
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": SHARDS}}}
    saved = registry.snapshot()
    yield
    registry.restore(saved)


def by_shard() -> dict[str, set[str | None]]:
    return {alias: set(Task.objects.using(alias).values_list("reference", flat=True)) for alias in SHARDS}


@pytest.mark.django_db(databases=SHARDS)
def test_a_reference_always_goes_to_the_same_shard(sharded: None) -> None:
    for _ in range(2):
        for number in range(20):
            enqueue("spread", f"r{number}", on_duplicate="ignore")
    found = by_shard()
    assert found["default"] | found["sqlite"] == {f"r{number}" for number in range(20)}
    assert not found["default"] & found["sqlite"]
    assert all(len(references) >= 4 for references in found.values())


@pytest.mark.django_db(databases=SHARDS)
def test_enqueue_many_spreads_the_same_way(sharded: None) -> None:
    enqueue_many("spread", ({"reference": f"r{number}"} for number in range(20)))
    before = by_shard()
    for number in range(20):
        enqueue("spread", f"r{number}", on_duplicate="ignore")
    assert by_shard() == before


@pytest.mark.django_db(databases=SHARDS)
def test_a_router_decides_by_payload(sharded: None, settings: Any) -> None:
    def router(reference: str | None, payload: Any, shards: tuple[str, ...]) -> str:
        return shards[payload["shard"]]

    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": SHARDS, "router": router}}}
    enqueue("spread", "a", {"shard": 0})
    enqueue_many("spread", [("b", {"shard": 1})])
    assert by_shard() == {"default": {"a"}, "sqlite": {"b"}}


@pytest.mark.django_db(databases=SHARDS)
def test_a_router_that_names_no_shard_is_told(sharded: None, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": SHARDS, "router": lambda *_: "moon"}}}
    with pytest.raises(EnqueueError, match=r"'moon'.*default, sqlite"):
        enqueue("spread", "a")


@pytest.fixture
def down(settings: Any) -> Iterator[str]:
    """A shard nobody answers on: a PostgreSQL address with no server."""
    alias = "down"
    connections.settings[alias] = {**connections.settings["default"], "PORT": "1", "HOST": "127.0.0.1"}
    yield alias
    del connections[alias]
    del connections.settings[alias]


@pytest.mark.django_db(databases=SHARDS)
def test_a_producer_fails_over_to_the_next_shard(settings: Any, down: str, caplog: pytest.LogCaptureFixture) -> None:
    def router(*_: Any) -> str:
        return down

    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": (down, "sqlite"), "router": router}}}
    task = enqueue("spread", "a")
    assert task._state.db == "sqlite"
    assert "Shard down is down" in caplog.text


@pytest.mark.django_db(databases=SHARDS, transaction=True)
def test_inside_a_transaction_on_the_shard_there_is_no_fail_over(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": SHARDS, "router": lambda *_: "default"}}}
    with pytest.raises(DatabaseError), transaction.atomic():
        connections["default"].connection.close()  # as when the server goes away in the middle of a transaction
        enqueue("spread", "a")
    assert not Task.objects.using("sqlite").exists()


@pytest.mark.django_db(databases=SHARDS, transaction=True)
def test_one_poller_drains_all_shards(sharded: None) -> None:
    seen = []
    registry.register("spread", lambda task: seen.append(task.reference))
    enqueue_many("spread", ({"reference": f"r{number}"} for number in range(50)))
    poller = Poller({"spread": 1}, Options(drain=True))
    poller.start()
    assert poller.wait(PATIENCE)
    poller.close()
    assert sorted(poller.queues) == ["spread@default", "spread@sqlite"]
    assert sorted(seen) == sorted(f"r{number}" for number in range(50))
    assert {t.status for alias in SHARDS for t in Task.objects.using(alias)} == {"COMPLETED"}
