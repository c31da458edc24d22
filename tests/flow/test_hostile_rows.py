"""A row that was written past the API must not stop its queue: the database refuses what no poller could read."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction

from django_dbtaskqueue import enqueue, registry, testing
from django_dbtaskqueue.models import Task

pytestmark = [pytest.mark.django_db(databases=["default", "sqlite"]), pytest.mark.usefixtures("taskqueue_registry")]
FAR = "9999-12-31 23:59:59"
HOSTILE = {
    "lease without end": ("lease_seconds", 1e300),
    "negative lease": ("lease_seconds", -1.0),
    "no lease": ("lease_seconds", 0.0),
    "fence at its end": ("total_attempt", 2**63 - 1),
    "reenqueues at their end": ("reenqueue_attempt", 2**31 - 1),
    "created at the end of time": ("create_time", FAR),
    "due at the end of time": ("next_process_time", FAR),
    "ready at the end of time": ("ready_time", FAR),
    "expires at the end of time": ("expire_time", FAR),
}
ONLY_POSTGRESQL = {
    "lease that is no number": ("lease_seconds", "NaN"),
    "infinite lease": ("lease_seconds", "infinity"),
    "ready before time": ("ready_time", "-infinity"),
    "ready in the year -44": ("ready_time", "0044-03-15 12:00:00+00 BC"),
    "due after time": ("next_process_time", "infinity"),
    "expires after time": ("expire_time", "infinity"),
    "expires in the year 10000": ("expire_time", "10000-01-01 00:00:00+00"),
}


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
    cases = HOSTILE | (ONLY_POSTGRESQL if alias == "default" else {})  # SQLite has no such values
    assert [case for case, given in cases.items() if not is_refused(alias, *given)] == []
    honest = enqueue("letters", using=alias)
    assert testing.drain("letters", using=alias).completed == 1
    assert Task.objects.using(alias).get().pk == honest.pk
