"""Times are the database's, whatever the site's settings make of them: all of it holds in every time zone."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import connections
from django.test import override_settings
from django.utils import timezone

from django_dbtaskqueue import LeaseLost, enqueue, enqueue_many
from django_dbtaskqueue.conf.cron import ticks
from django_dbtaskqueue.core.states import COMPLETED, PROCESSING
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.checkout import Checkout, QueueShare, ScanCursor
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.flow.schedule import Definition, declare, enqueue_due
from django_dbtaskqueue.models import Attempt, Schedule, Task, TaskHistory
from django_dbtaskqueue.operations.schedules import next_times
from tests.factories import age

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
MINUTE = timedelta(minutes=1)
ZONES = [  # beside UTC, in which all other tests run
    {"USE_TZ": True, "TIME_ZONE": "Asia/Kolkata"},
    {"USE_TZ": False, "TIME_ZONE": "Pacific/Auckland"},
    {"USE_TZ": False, "TIME_ZONE": "America/Anchorage"},
]


@pytest.fixture(params=ZONES, ids=lambda zone: f"{zone['TIME_ZONE']}, USE_TZ={zone['USE_TZ']}")
def site(request: pytest.FixtureRequest, alias: str) -> Iterator[Any]:
    connections[alias].close()
    with override_settings(**request.param):
        yield request.param
        connections[alias].close()


def instant(value: datetime, alias: str) -> datetime:
    """Return a time read from a row as the moment it means."""
    if value.tzinfo is not None:
        return value
    # Django writes the database's clock into SQLite as UTC, and reads it back as it stands there.
    return value.replace(tzinfo=UTC) if alias == "sqlite" else timezone.make_aware(value)


def test_the_road_of_a_task(alias: str, site: Any) -> None:
    before = datetime.now(UTC)
    task = enqueue("parcels", "now", using=alias)
    row = Task.objects.using(alias).get()
    assert row.ready_time == task.ready_time
    assert timedelta(0) <= instant(row.ready_time, alias) - before + MINUTE / 60 < MINUTE
    assert Task.objects.using(alias).due().count() == 1
    (lease,) = Task.objects.db_manager(alias).checkout("parcels", poller_instance="p", lease=MINUTE)
    row = Task.objects.using(alias).get()
    assert (lease.start_time, lease.lease_until) == (row.start_time, row.next_process_time)
    assert row.next_process_time - row.start_time == MINUTE
    assert abs(instant(row.start_time, alias) - datetime.now(UTC)) < MINUTE
    assert Task.objects.db_manager(alias).checkout("parcels", poller_instance="q") == []
    assert Task.objects.using(alias).stale().count() == 0
    lease.touch(MINUTE)
    assert lease.lease_until - lease.start_time == 2 * MINUTE
    age(2 * MINUTE, using=alias)
    assert Task.objects.using(alias).stale().count() == 1
    (other,) = Task.objects.db_manager(alias).checkout("parcels", poller_instance="q", lease=MINUTE)
    with pytest.raises(LeaseLost):
        lease.complete()
    other.fail("no", delay=MINUTE)
    assert Task.objects.db_manager(alias).checkout("parcels", poller_instance="q") == []
    assert abs(instant(Attempt.objects.using(alias).get().finish_time, alias) - datetime.now(UTC)) < MINUTE
    age(MINUTE, using=alias)
    (last,) = Task.objects.db_manager(alias).checkout("parcels", poller_instance="q")
    last.complete()
    assert Task.objects.using(alias).housekeep(older_than=MINUTE) == 0
    age(MINUTE, using=alias)
    assert Task.objects.using(alias).housekeep(older_than=MINUTE) == 1
    assert TaskHistory.objects.using(alias).get().status == COMPLETED


def test_run_at_in_every_form(alias: str, site: Any) -> None:
    moment = datetime.now(UTC).replace(microsecond=0) + timedelta(days=30)
    forms = [moment, moment.astimezone(ZoneInfo("Asia/Kathmandu")), timezone.make_naive(moment)]
    for form in forms:
        enqueue("parcels", run_at=form, using=alias)
    enqueue_many("parcels", [{"run_at": form} for form in forms], using=alias)
    assert {instant(row.ready_time, alias) for row in Task.objects.using(alias).all()} == {moment}


def test_the_poller_s_own_connection_reads_the_same_times(alias: str, site: Any) -> None:
    enqueue("parcels", delay=timedelta(0), ttl=MINUTE, using=alias)
    with closing(Session.open(alias)) as session:
        share = QueueShare(ScanCursor("parcels"), 1, port=SettlePort(alias))
        (lease,) = Checkout(session, "p", MINUTE).take([share], 1)
    row = Task.objects.using(alias).get()
    assert row.status == PROCESSING
    shown = [lease.create_time, lease.start_time, lease.lease_until, lease.ready_time, lease.expire_time]
    stored = [row.create_time, row.start_time, row.next_process_time, row.ready_time, row.expire_time]
    assert [instant(value, alias) for value in shown if value] == [instant(value, alias) for value in stored if value]


def test_a_schedule_comes_at_its_time(alias: str, site: Any) -> None:
    before = datetime.now(UTC)
    declare(alias, {"s": Definition("parcels", "0 7 * * *", "Europe/Madrid", missed="all")})
    row = Schedule.objects.using(alias).get()
    assert instant(row.next_time, alias) == next(ticks("0 7 * * *", "Europe/Madrid", before))
    assert {f"{one:%H:%M}" for one in next_times(row)} == {"07:00"}
    due = [instant(row.next_time, alias) - timedelta(days=days) for days in (2, 1)]
    first = next(ticks("0 7 * * *", "Europe/Madrid", due[0] - MINUTE))
    Schedule.objects.using(alias).update(next_time=Session.on(alias).stored_time(first))
    assert enqueue_due(alias, {"s"}) == (0.0, ["parcels"])
    found = Task.objects.using(alias).order_by("pk").values_list("reference", flat=True)
    assert found[0] == f"s@{first:%Y-%m-%dT%H:%M:%SZ}" and len(found) == 2
    row = Schedule.objects.using(alias).get()
    assert instant(row.next_time, alias) == next(ticks("0 7 * * *", "Europe/Madrid", datetime.now(UTC)))
    seconds, queues = enqueue_due(alias, {"s"})
    assert (seconds > 0, queues) == (True, [])
