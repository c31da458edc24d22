"""Counts are exact up to their bound, and cheap above it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, bounded_count, count_within, estimate
from django_dbtaskqueue.operations.paging import whole_page
from tests.factories import make_task

SOON = timedelta(seconds=10)
pytestmark = pytest.mark.django_db


def tasks(number: int, queue: str = "claims") -> QuerySet[Task]:
    for _ in range(number):
        make_task(queue=queue)
    return Task.objects.filter(queue=queue)


@pytest.mark.parametrize(("rows", "expected"), [(0, "0"), (2, "2"), (3, "3"), (4, "3+")])
def test_a_count_is_exact_up_to_its_bound(rows: int, expected: str) -> None:
    assert str(bounded_count(tasks(rows), bound=3)) == expected


def test_large_counts_are_readable() -> None:
    assert str(ApproxCount(10_000, more=True)) == "10,000+"


def test_a_count_reads_no_more_rows_than_its_bound() -> None:
    selection = tasks(3)
    with CaptureQueriesContext(connection) as queries:
        bounded_count(selection, bound=2)
    assert [query["sql"].count("LIMIT 3") for query in queries] == [1]


def test_a_count_that_takes_too_long_is_given_up_and_nothing_else_is() -> None:
    slow = Task.objects.extra(where=["pg_sleep(5) IS NOT NULL"])
    tasks(1)
    # When counting overruns its time inside a transaction
    assert count_within(slow, timedelta(milliseconds=50)) is None
    # Then the transaction is usable, and its statements have no time limit
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('statement_timeout')")
        assert cursor.fetchone() == ("0",)


def test_the_time_limit_ends_with_the_counting() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL statement_timeout = '77s'")
        assert count_within(tasks(1), SOON) == ApproxCount(1)
        cursor.execute("SELECT current_setting('statement_timeout')")
        assert cursor.fetchone() == ("77s",)


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_counts_on_sqlite() -> None:
    make_task(using="sqlite")
    assert count_within(Task.objects.using("sqlite").all(), SOON) == ApproxCount(1)


def test_slices_lead_to_each_other_and_read_no_row_of_another() -> None:
    # Given five tasks, in slices of two
    rows = tasks(5)
    ids = list(rows.order_by("-pk").values_list("pk", flat=True))
    # When one goes to the oldest and back
    first = whole_page(rows, 2)
    second = whole_page(rows, 2, before=first.older)
    with CaptureQueriesContext(connection) as queries:
        last = whole_page(rows, 2, before=second.older)
    back = whole_page(rows, 2, after=last.newer)
    # Then each row is in one slice, and the ends say that they are
    assert [[row.pk for row in one.rows] for one in (first, second, last)] == [ids[:2], ids[2:4], ids[4:]]
    assert [row.pk for row in back.rows] == ids[2:4]
    assert (first.newer, last.older) == (None, None)
    assert [query["sql"].count("OFFSET") for query in queries] == [0]
    assert whole_page(rows.none(), 2).rows == []


def test_an_estimate_is_the_planner_s() -> None:
    tasks(3)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE dbtaskqueue_task")
    assert estimate(Task.objects.all()) == 3
