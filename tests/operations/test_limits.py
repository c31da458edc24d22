"""A question of a face has a time limit, on each kind of database, and leaves the connection as it was."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import SearchTooSlow
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations import bounded_reads
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, bounded_count, count_within, statement_timeout
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.verbs import REPROCESS
from tests.factories import make_task
from tests.operations.site import refused, sql

FOR_EVER = {
    "default": "SELECT pg_sleep(600)",
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
}


def ask(alias: str, statement: str) -> Any:
    return sql(statement, alias=alias)[0][0]


def test_what_takes_too_long_is_given_up_and_the_connection_goes_on(alias: str) -> None:
    words = r"within 50ms.*Narrow the search: name a queue"
    with pytest.raises(SearchTooSlow, match=words), statement_timeout(alias, timedelta(milliseconds=50)):
        ask(alias, FOR_EVER[alias])
    assert ask(alias, "SELECT 1") == 1
    with statement_timeout(alias):
        assert ask(alias, "SELECT 2") == 2


def test_the_limit_is_a_setting_ends_with_the_block_and_hides_no_other_error(settings: Any) -> None:
    assert conf.settings().operations_timeout == timedelta(seconds=3)
    settings.DBTASKQUEUE = {"OPERATIONS_TIMEOUT": "7s"}
    before = ask("default", "SHOW statement_timeout")
    with statement_timeout("default"):
        assert ask("default", "SHOW statement_timeout") == "7s"
    assert ask("default", "SHOW statement_timeout") == before
    with pytest.raises(OperationalError, match="somebody else"), statement_timeout("default"):
        raise OperationalError("somebody else")


NO_RULE = "not callable"


def test_a_rule_that_is_none_is_named(settings: Any, admin_user: Any) -> None:
    for path in ["nowhere.rule", f"{__name__}.NO_RULE"]:
        settings.DBTASKQUEUE = {"CAN_OPERATE": path}
        assert can_operate(admin_user, REPROCESS), "no queue, nothing to ask"
        refused("CAN_OPERATE", can_operate, admin_user, REPROCESS, "claims", error=ImproperlyConfigured)


SOON = timedelta(seconds=10)


def test_a_count_is_exact_up_to_its_bound_and_reads_no_more_rows() -> None:
    for expected in ("0", "1", "2", "3", "3+"):
        with CaptureQueriesContext(connection) as queries:
            assert str(bounded_count(Task.objects.all(), bound=3)) == expected
        assert [query["sql"].count("LIMIT 4") for query in queries] == [1]
        make_task()
    assert str(ApproxCount(10_000, more=True)) == "10,000+"


def test_a_count_that_takes_too_long_is_given_up_and_nothing_else_is() -> None:
    make_task()
    slow = Task.objects.extra(where=["pg_sleep(5) IS NOT NULL"])
    for limit in ("0", "77s"):
        sql(f"SET LOCAL statement_timeout = '{limit}'")
        assert count_within(slow, timedelta(milliseconds=50)) is None
        assert count_within(Task.objects.all(), SOON) == ApproxCount(1), "the transaction is usable"
        assert sql("SHOW statement_timeout") == [(limit,)]


def test_counts_and_estimates(alias: str) -> None:
    make_task(using=alias)
    assert count_within(Task.objects.using(alias), SOON) == ApproxCount(1)
    sql("ANALYZE dbtaskqueue_task", alias=alias)
    assert bounded_reads.estimate(Task.objects.using(alias)) == (1 if alias == "default" else None)
