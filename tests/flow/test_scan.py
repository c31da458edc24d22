"""The scan cursor of a queue: a task behind the watermarks is taken at once, one before them soon."""

from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import checkout, move
from django_dbtaskqueue.flow.scan import FULL_SCAN_MAX_INTERVAL_S, SCAN_NOW, Scan, ScanCursor, take_rows
from django_dbtaskqueue.flow.settle_port import SettlePort
from django_dbtaskqueue.models import Task
from tests.clock import SteppedClock
from tests.factories import make_task

pytestmark = pytest.mark.django_db
PAST, FUTURE = 0.001, float("inf")


def take(cursor: ScanCursor, limit: int = 10, session: Session | None = None) -> list[int]:
    session = session or Session.on("default")
    options = {"strategy": checkout.strategy_for(session), "poller_instance": "p", "port": SettlePort("default", Task)}
    return [lease.id for lease in checkout.take(session, cursor, limit=limit, lease=timedelta(minutes=1), **options)]


def test_on_a_quiet_queue_one_statement_takes_what_came(django_assert_num_queries: Any) -> None:
    cursor = ScanCursor("parcels")
    first = make_task()
    assert take(cursor) == [first.pk]
    cursor.next_full_scan = SCAN_NOW
    assert take(cursor) == []
    second = make_task()
    cursor.next_full_scan = PAST
    with django_assert_num_queries(1):
        assert take(cursor) == [second.pk]


def test_the_statement_stays_prepared_as_the_ids_grow() -> None:
    cursor, session = ScanCursor("parcels"), Session.open("default")
    cursor.next_full_scan = cursor.may_full_scan = FUTURE
    with closing(session):
        for number in (1, 2**15, 2**31):
            cursor.watermarks = {0: ("-infinity", number)}
            assert take(cursor, session=session) == []
        checkouts = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'UPDATE %%'"
        assert session.run(checkouts, {}) == [(1,)]


def test_when_nothing_stands_behind_the_watermarks_it_scans_before_it_is_due() -> None:
    cursor = ScanCursor("parcels")
    make_task(ready_time=timedelta(hours=-1))
    assert len(take(cursor)) == 1
    behind = make_task(ready_time=timedelta(hours=-2))
    cursor.next_full_scan, cursor.may_full_scan = FUTURE, FUTURE
    assert take(cursor) == []
    cursor.may_full_scan = PAST
    assert take(cursor) == [behind.pk]


def test_one_of_those_who_share_a_cursor_scans_and_the_others_do_not_wait_for_it() -> None:
    cursor, session, scans = ScanCursor("parcels"), Session.on("default"), []
    make_task()

    def take_behind(asked: list[Scan]) -> list[Any]:
        scans.extend(asked)
        if len(scans) == 1:
            assert take_rows(session, [Scan(cursor, 10)], 10, take_behind) == 0
        return []

    take_rows(session, [Scan(cursor, 10)], 10, take_behind)
    assert len(scans) == 1


def test_a_full_scan_that_fails_is_still_due() -> None:
    cursor, session = ScanCursor("parcels"), Session.on("default")
    task = make_task()

    def fail(asked: list[Scan]) -> list[Any]:
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="gone"):
        take_rows(session, [Scan(cursor, 10)], 10, fail)
    assert take(cursor) == [task.pk]


@pytest.mark.parametrize(("rows", "pause"), [(0, FULL_SCAN_MAX_INTERVAL_S), (100, 0.0)])
def test_a_full_scan_is_charged_what_it_costs_beyond_a_checkout_of_as_many(
    rows: int, pause: float, clock: SteppedClock
) -> None:
    clock.stop()
    cursor = ScanCursor("parcels")
    cursor.sample_cost(seconds=1.0, rows=100)
    cursor.schedule_full_scan(clock.monotonic() - 1.0, rows)
    assert cursor.may_full_scan == pytest.approx(clock.monotonic() + pause)


def test_where_nothing_is_parked_one_statement_looks_for_it(django_assert_num_queries: Any) -> None:
    """Each poller looks every few seconds, and mostly in vain."""
    make_task(parked_by="cycle of parents", ready_time=None)
    with django_assert_num_queries(1):
        assert move.unpark(Session.on("default"), "parcels", []) == 0
    make_task(parked_by="no handler for x", ready_time=None)
    assert move.unpark(Session.on("default"), "parcels", []) == 1
