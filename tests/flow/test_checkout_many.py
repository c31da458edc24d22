"""Several lines in one statement: each gives what it would give alone, in their order, never more than asked for."""

from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import checkout, move
from django_dbtaskqueue.flow.checkout import Checkout, QueueShare, Scan, ScanCursor, take_rows
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.models import Poller, Task
from tests.clock import SteppedClock
from tests.factories import LEASE, make_task
from tests.support import sql

pytestmark = pytest.mark.django_db
PAST, FUTURE = 0.001, float("inf")
QUEUES = ("letters", "other", "parcels")
Lines = dict[str, ScanCursor]


@pytest.fixture
def lines() -> Lines:
    return {queue: ScanCursor(queue) for queue in QUEUES}


def take(lines: Lines, limit: int = 100, shares: dict[str, int] | None = None) -> list[QueueShare]:
    shares = shares or {}
    parts = [QueueShare(line, shares.get(queue, limit), port=SettlePort("default")) for queue, line in lines.items()]
    taken = Checkout(Session.on("default"), "p", LEASE).take(parts, limit)
    assert taken == [lease for part in parts for lease in part.taken]
    return parts


def ids(parts: list[QueueShare]) -> list[list[int]]:
    return [[lease.id for lease in part.taken] for part in parts]


def test_the_lines_are_served_in_their_order_up_to_the_limit(lines: Lines) -> None:
    made = {queue: [make_task(queue=queue).pk for _ in range(4)] for queue in reversed(QUEUES)}
    parts = take(lines, 6)
    assert ids(parts) == [made["letters"], made["other"][:2], []]
    assert [part.reached for part in parts] == [True, True, False]
    assert Task.objects.filter(queue="parcels", status="CREATED", attempt=0).count() == 4
    assert [part.taken[0].port for part in parts if part.taken] == [part.port for part in parts if part.taken]
    assert ids(take(lines, 6)) == [[], made["other"][2:], made["parcels"]]


def test_no_line_gives_more_than_its_share_whatever_its_priorities(lines: Lines) -> None:
    made = [make_task(queue="letters", priority=priority).pk for priority in (2, 1, 1, 2, 0)]
    make_task(queue="parcels")
    parts = take(lines, shares={"letters": 4})
    assert ids(parts)[0] == [made[4], made[1], made[2], made[0]] and len(parts[2].taken) == 1


def test_what_is_there_costs_one_statement_and_nothing_two(lines: Lines, django_assert_num_queries: Any) -> None:
    for queue in QUEUES:
        make_task(queue=queue)
    take(lines)
    made = [[make_task(queue=queue).pk] for queue in QUEUES]
    for line in lines.values():
        line.next_full_scan = PAST
    with django_assert_num_queries(1):
        assert ids(take(lines)) == made
    for line in lines.values():
        line.may_full_scan = line.next_full_scan = FUTURE
    with django_assert_num_queries(1):
        assert ids(take(lines)) == [[], [], []]
    Task.objects.all().delete()
    for line in lines.values():
        line.may_full_scan = PAST
    with django_assert_num_queries(2):
        assert ids(take(lines)) == [[], [], []]


def test_a_full_scan_that_is_due_lets_one_checkout_go_first_and_no_more(lines: Lines) -> None:
    make_task(queue="other", ready_time=timedelta(hours=-1))
    take(lines)
    line = lines["other"]
    behind, ahead = make_task(queue="other", ready_time=timedelta(hours=-2)), make_task(queue="other")
    line.may_full_scan, line.next_full_scan = FUTURE, PAST
    assert ids(take(lines, 1)) == [[], [ahead.pk], []]
    assert ids(take(lines, 1)) == [[], [behind.pk], []]


def test_a_full_scan_that_was_not_reached_is_still_due(lines: Lines) -> None:
    make_task(queue="other", ready_time=timedelta(hours=-1))
    take(lines)
    behind = make_task(queue="other", ready_time=timedelta(hours=-2))
    lines["other"].may_full_scan = lines["other"].next_full_scan = PAST
    lines["other"].full_scan_overdue = True
    make_task(queue="letters")
    lines["letters"].may_full_scan = PAST
    assert [part.reached for part in take(lines, 1)] == [True, False, False]
    assert ids(take(lines, 1)) == [[], [behind.pk], []]


def test_a_full_scan_takes_no_more_than_the_checkout_before_it_has_left(lines: Lines) -> None:
    make_task(queue="other", ready_time=timedelta(hours=-1))
    take(lines)
    behind = [make_task(queue="other", ready_time=timedelta(hours=-2)).pk for _ in range(3)]
    made = [make_task(queue="letters").pk for _ in range(2)]
    for line in lines.values():
        line.may_full_scan, line.next_full_scan = PAST, FUTURE
    assert ids(take(lines, 3)) == [made, behind[:1], []]


def test_each_line_goes_on_from_its_own_watermarks(lines: Lines) -> None:
    for queue, hours in (("letters", 2), ("other", 2), ("parcels", 0)):
        make_task(queue=queue, ready_time=timedelta(hours=-hours))
    take(lines)
    for line in lines.values():
        line.may_full_scan = line.next_full_scan = FUTURE
    make_task(queue="parcels", ready_time=timedelta(hours=-1))  # behind its own, and ahead of those of the others
    assert ids(take(lines)) == [[], [], []]


def test_the_next_due_of_each_queue_that_has_one() -> None:
    make_task(queue="letters", ready_time=timedelta(minutes=5), priority=3)
    make_task(queue="letters", ready_time=timedelta(minutes=2))
    make_task(queue="other")
    found = checkout.next_due(Session.on("default"), {"letters": [0, 3], "other": [0], "parcels": [0]})
    assert list(found) == ["letters"] and 60 < found["letters"] <= 120
    assert checkout.next_due(Session.on("default"), {}) == {}


# -- the scan cursor of a queue: a task behind the watermarks is taken at once, one before them soon -------------------
def take_one(cursor: ScanCursor, limit: int = 10, session: Session | None = None) -> list[int]:
    session = session or Session.on("default")
    share = QueueShare(cursor, limit, port=SettlePort("default", Task))
    return [lease.id for lease in Checkout(session, "p", timedelta(minutes=1)).take([share], limit)]


def test_on_a_quiet_queue_one_statement_takes_what_came(django_assert_num_queries: Any) -> None:
    cursor = ScanCursor("parcels")
    first = make_task()
    assert take_one(cursor) == [first.pk]
    cursor.next_full_scan = checkout.SCAN_NOW
    assert take_one(cursor) == []
    second = make_task()
    cursor.next_full_scan = PAST
    with django_assert_num_queries(1):
        assert take_one(cursor) == [second.pk]


def test_the_statement_stays_prepared_as_the_ids_grow() -> None:
    cursor, session = ScanCursor("parcels"), Session.open("default")
    cursor.next_full_scan = cursor.may_full_scan = FUTURE
    with closing(session):
        for number in (1, 2**15, 2**31):
            cursor.watermarks = {0: ("-infinity", number)}
            assert take_one(cursor, session=session) == []
        assert session.run("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'UPDATE %%'", {}) == [(1,)]


def test_when_nothing_stands_behind_the_watermarks_it_scans_before_it_is_due() -> None:
    cursor = ScanCursor("parcels")
    make_task(ready_time=timedelta(hours=-1))
    assert len(take_one(cursor)) == 1
    behind = make_task(ready_time=timedelta(hours=-2))
    cursor.next_full_scan, cursor.may_full_scan = FUTURE, FUTURE
    assert take_one(cursor) == []
    cursor.may_full_scan = PAST
    assert take_one(cursor) == [behind.pk]


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
    assert take_one(cursor) == [task.pk]


@pytest.mark.parametrize(("rows", "pause"), [(0, checkout.FULL_SCAN_MAX_INTERVAL_S), (100, 0.0)])
def test_a_full_scan_is_charged_its_cost_beyond_an_equal_checkout(rows: int, pause: float, clock: SteppedClock) -> None:
    clock.stop()
    cursor = ScanCursor("parcels")
    cursor.sample_cost(seconds=1.0, rows=100)
    cursor.schedule_full_scan(clock.monotonic() - 1.0, rows)
    assert cursor.may_full_scan == pytest.approx(clock.monotonic() + pause)


def test_where_nothing_is_parked_one_statement_looks_for_it(django_assert_num_queries: Any) -> None:
    make_task(parked_by="cycle of parents", ready_time=None)
    with django_assert_num_queries(1):
        assert move.unpark(Session.on("default"), "parcels", []) == 0
    make_task(parked_by="no handler for x", ready_time=None)
    assert move.unpark(Session.on("default"), "parcels", []) == 1


@pytest.mark.parametrize("pollers", [1, 4, 12])
def test_a_checkout_begins_where_the_latest_of_all_pollers_ended(pollers: int) -> None:
    batch, turns, before, held = 50, 5, 0, dict[int, list[Lease]]()
    cursors = [ScanCursor("parcels", others=pollers - 1) for _ in range(pollers)]
    Poller.objects.bulk_create([Poller(instance=f"p{number}", queues=["parcels"]) for number in range(pollers)])
    enqueue_many("parcels", [{}] * (pollers * batch * (turns + 1)))
    for turn in range(turns + 1):
        before = before if turn > 1 else entries_read()  # the first turn is full scans
        for number, line in enumerate(cursors):
            for lease in held.get(number, []):
                lease.complete()
            share = QueueShare(line, batch, port=SettlePort("default", Task))
            held[number] = Checkout(Session.on("default"), f"p{number}", LEASE).take([share], batch)
            assert len(held[number]) == batch
            line.may_full_scan = line.next_full_scan = FUTURE
    # A row that found its page full has two entries.
    assert entries_read() - before <= 1.5 * pollers * batch * turns


def test_a_task_behind_what_another_poller_told_is_found_by_the_next_full_scan() -> None:
    told = Poller.objects.create(instance="other", queues=[], taken_queue="parcels", taken_priority=0, taken_id=0)
    line = ScanCursor("parcels", others=1)
    first, second, third = (make_task(ready_time=timedelta(hours=hours)).pk for hours in (-3, -2, -1))
    Poller.objects.update(taken_time=Task.objects.get(pk=third).ready_time)
    line.watermarks = {0: (str(Task.objects.get(pk=first).ready_time), first)}
    line.may_full_scan = line.next_full_scan = FUTURE
    assert ids(take({"parcels": line})) == [[third]], "it begins at the furthest of all pollers"
    line.may_full_scan = PAST
    assert ids(take({"parcels": line})) == [[first, second]]
    later = make_task()
    for time in ("infinity", "2200-01-01"):
        sql("UPDATE dbtaskqueue_poller SET taken_time = %s WHERE instance = %s", [time, told.pk])
        line.may_full_scan = line.next_full_scan = FUTURE
        assert ids(take({"parcels": line})) == [[later.pk]], "no task in the future has been taken"
        later = make_task()


def entries_read() -> int:
    """Return how many entries of the ready order this transaction has read."""
    return int(sql("SELECT pg_stat_get_xact_tuples_returned('dbtaskqueue_task_rdy'::regclass)")[0][0])
