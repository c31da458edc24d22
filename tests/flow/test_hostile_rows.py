"""A row that was written past the API must not stop its queue: the database refuses what no poller could read."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction

from django_dbtaskqueue import enqueue, registry, testing
from django_dbtaskqueue.models import Task

pytestmark = [pytest.mark.django_db(databases=["default", "sqlite"]), pytest.mark.usefixtures("taskqueue_registry")]
FAR = "9999-12-31 23:59:59"
HOSTILE: list[tuple[str, Any]] = [
    *(("lease_seconds", value) for value in (1e300, -1.0, 0.0)),
    *((column, FAR) for column in ("create_time", "ready_time", "next_process_time", "expire_time")),
    *(("total_attempt", 2**63 - 1), ("reenqueue_attempt", 2**31 - 1)),
]
ONLY_POSTGRESQL = [
    *(("lease_seconds", value) for value in ("NaN", "infinity")),
    *(("ready_time", value) for value in ("-infinity", "0044-03-15 12:00:00+00 BC")),
    *(("next_process_time", "infinity"), ("expire_time", "infinity"), ("expire_time", "10000-01-01 00:00:00+00")),
]


def is_refused(alias: str, column: str, value: Any) -> bool:
    try:
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute(f"INSERT INTO dbtaskqueue_task (queue_name, {column}) VALUES ('letters', %s)", [value])
    except DatabaseError:
        return True
    return False


def test_the_database_refuses_what_would_stop_a_queue(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"letters": {}}}
    registry.register("letters", lambda task: None)
    rows = HOSTILE + (ONLY_POSTGRESQL if alias == "default" else [])  # SQLite has no such values
    assert [row for row in rows if not is_refused(alias, *row)] == []
    honest = enqueue("letters", using=alias)
    assert testing.drain("letters", using=alias).completed == 1
    assert Task.objects.using(alias).get().pk == honest.pk
