"""Counts are exact up to their bound, and cheap above it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.paginators import BoundedPaginator, Count, bounded_count, bounded_counts
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
    assert str(Count(10_000, more=True)) == "10,000+"


def test_a_count_reads_no_more_rows_than_its_bound() -> None:
    selection = tasks(3)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        bounded_count(selection, bound=2)
    assert [query["sql"].count("LIMIT 3") for query in queries] == [1]


def test_many_counts_are_one_statement_and_agree_with_single_ones() -> None:
    # Given selections of different size, one ordered, one with a value that needs quoting
    selections: list[Any] = [tasks(2, "a"), tasks(4, "b").order_by("-id"), Task.objects.filter(queue="it's; --")]
    # When all are counted at once
    with CaptureQueriesContext(connection) as queries:
        counts = bounded_counts(selections, within=SOON, bound=3)
    # Then each count is what a count of its own would say
    assert counts == [bounded_count(selection, bound=3) for selection in selections] == [
        Count(2), Count(3, more=True), Count(0)
    ]  # fmt: skip
    assert sum("COUNT(*)" in query["sql"] for query in queries) == 1


def test_more_counts_than_one_statement_takes() -> None:
    tasks(1)
    selections = [Task.objects.filter(pk__gt=-number) for number in range(450)]
    assert bounded_counts(selections, within=SOON) == [Count(1)] * 450


def test_no_selections_no_statement(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert bounded_counts([], within=SOON) == []


def test_a_count_that_takes_too_long_is_given_up_and_nothing_else_is() -> None:
    slow = Task.objects.extra(where=["pg_sleep(5) IS NOT NULL"])
    tasks(1)
    # When counting overruns its time inside a transaction
    assert bounded_counts([slow], within=timedelta(milliseconds=50)) == [None]
    # Then the transaction is usable, and its statements have no time limit
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('statement_timeout')")
        assert cursor.fetchone() == ("0",)


def test_the_time_limit_ends_with_the_counting() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL statement_timeout = '77s'")
        bounded_counts([tasks(1)], within=SOON)
        cursor.execute("SELECT current_setting('statement_timeout')")
        assert cursor.fetchone() == ("77s",)


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_counts_on_sqlite() -> None:
    make_task(using="sqlite")
    assert bounded_counts([Task.objects.using("sqlite").all()], within=SOON) == [Count(1)]


def test_pages_reach_what_was_counted() -> None:
    paginator = BoundedPaginator(tasks(5).order_by("id"), per_page=2)
    assert (paginator.count, paginator.num_pages, str(paginator.found)) == (5, 3, "5")
    assert len(paginator.page(3).object_list) == 1
    assert BoundedPaginator(["a", "b"], per_page=1).count == 2
