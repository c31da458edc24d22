"""A queue spread over two databases: PostgreSQL and SQLite, for the flow does not care."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.utils import DatabaseError

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.models import Task
from tests.support import alias_beside

SHARDS = ("default", "sqlite")
pytestmark = pytest.mark.django_db(databases=SHARDS)


def spread(settings: Any, *shards: str, **options: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": shards or SHARDS, **options}}}


def by_shard() -> dict[str, set[str | None]]:
    return {alias: set(Task.objects.using(alias).values_list("reference", flat=True)) for alias in SHARDS}


def test_a_reference_always_goes_to_the_same_shard(settings: Any) -> None:
    spread(settings)
    names = [f"r{number}" for number in range(20)]
    enqueue_many("spread", ({"reference": name} for name in names))
    found = by_shard()
    for name in names:
        enqueue("spread", name, on_duplicate="ignore")
    assert by_shard() == found
    assert found["default"] | found["sqlite"] == set(names) and not found["default"] & found["sqlite"]
    assert all(len(references) >= 4 for references in found.values())


def test_a_router_decides_by_payload(settings: Any) -> None:
    spread(settings, router=lambda _reference, payload, shards: shards[payload["shard"]])
    enqueue("spread", "a", {"shard": 0})
    enqueue_many("spread", [("b", {"shard": 1})])
    assert by_shard() == {"default": {"a"}, "sqlite": {"b"}}
    spread(settings, router=lambda *_: "moon")
    with pytest.raises(EnqueueError, match=r"'moon'.*default, sqlite"):
        enqueue("spread", "c")


@pytest.fixture
def down(settings: Any) -> Iterator[str]:
    """A shard nobody answers on: a PostgreSQL address with no server."""
    with alias_beside("down", PORT="1", HOST="127.0.0.1") as alias:
        yield alias


def test_a_producer_fails_over_to_the_next_shard(settings: Any, down: str, caplog: pytest.LogCaptureFixture) -> None:
    spread(settings, down, "sqlite", router=lambda *_: down)
    assert enqueue("spread", "a")._state.db == "sqlite"
    assert "Shard down is down" in caplog.text


@pytest.mark.django_db(databases=SHARDS, transaction=True)
def test_inside_a_transaction_on_the_shard_there_is_no_fail_over(settings: Any) -> None:
    spread(settings, router=lambda *_: "default")
    with pytest.raises(DatabaseError), transaction.atomic():
        connections["default"].connection.close()  # as when the server goes away in the middle of a transaction
        enqueue("spread", "a")
    assert not Task.objects.using("sqlite").exists()
