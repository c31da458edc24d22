"""Async processors and Django's async ORM, whose one connection nobody closes when a request ends."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from django_dbtaskqueue import Fixed, processor
from django_dbtaskqueue.core.lease import Lease
from tests.processing.conftest import QUEUE, Site
from tests.support import until
from tests.testapp.models import Booking

SOON = Fixed(timedelta(milliseconds=20), jitter=0)


@pytest.mark.django_db(transaction=True)
def test_a_lost_connection_costs_one_attempt_not_every_one(site: Site) -> None:
    """Given an async processor whose connection the server has ended, then its next attempts have a new one."""

    @processor(QUEUE, retry=SOON, max_attempts=3)
    async def count(task: Lease) -> int:
        return await Booking.objects.acount()

    with site.poller():
        first = site.enqueue(reference="first")
        until(lambda: site.task(first).status == "COMPLETED")
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        later = [site.enqueue(reference=str(number)) for number in range(3)]
    assert {site.task(task).status for task in later} == {"COMPLETED"}
