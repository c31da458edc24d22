"""The cursor kept for a connection lives no longer than the connection it belongs to."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from django.db import connection

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Task

pytestmark = pytest.mark.django_db(transaction=True)


def test_connections_that_come_and_go_are_not_kept() -> None:
    connection.close()  # an earlier test may hold the connection that stands here
    gone: list[Any] = []
    for _ in range(3):
        enqueue("parcels")
        gone.append(weakref.ref(connection.connection))
        connection.close()
    enqueue("parcels")
    gc.collect()
    assert [one() for one in gone] == [None, None, None]
    assert Task.objects.count() == 4
