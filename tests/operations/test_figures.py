"""The overview's numbers: right where they are counted, close where they are estimated, and cheap at any size."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import SearchTooSlow
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.models import MinuteCount, Poller, Queue, Task
from django_dbtaskqueue.operations import bounded_reads, queue_stats as figures
from django_dbtaskqueue.operations.bounded_reads import bounded_count, count_within, statement_timeout
from django_dbtaskqueue.operations.doctor import examine
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.queue_stats import ApproxCount, overview, series, stats_of_groups
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.operations.site import command
from tests.support import minute_counts, sql

HOUR = timedelta(hours=1)


def row_of(alias: str, queue: str) -> figures.QueueStats:
    (found,) = [row for row in overview(alias).queues if row.queue == queue]
    return found


def test_the_grid_counts_every_queue_and_status(alias: str) -> None:
    for number, status in enumerate(Status, 1):
        for _ in range(number):
            make_task(status, using=alias)
    make_task(queue="unheard of", using=alias)
    make_task(parked_by="no handler", using=alias)
    found = overview(alias)
    assert {"letters", "parcels", "unheard of"} <= {row.queue for row in found.queues}
    wanted = {"CREATED": 2, "PROCESSING": 2, "COMPLETED": 3, "ERROR": 4, "POISON": 5}
    assert row_of(alias, "parcels").statuses == {status: ApproxCount(number) for status, number in wanted.items()}
    assert str(row_of(alias, "parcels").total) == "16"
    assert found.statuses["CREATED"] == ApproxCount(3)
    assert row_of(alias, "letters").total == ApproxCount(0) and not row_of(alias, "letters").total


def test_ages_rates_pollers_and_pauses(alias: str) -> None:
    # What earlier tests of this process did, which a thread would store at any moment.
    usage.counter.store(Session.on(alias))
    minute_counts("call", alias).delete()
    make_task(priority=0, using=alias)
    make_task(priority=5, ready_time=-HOUR, using=alias)
    make_task(ready_time=HOUR, queue="letters", using=alias)
    counts = MinuteCount.objects.using(alias)
    counts.create(kind="call", queue="parcels", name="put", minute=Now(), count=300)
    for outcome, count in (("completed", 600), ("failed", 300), ("retried", 7)):
        counts.create(kind="outcome", queue="parcels", minute=Now(), name=outcome, count=count)
    pollers = Poller.objects.using(alias)
    pollers.create(instance="a", state="RUNNING", queues=[{"queue": "parcels", "weight": 1}])
    pollers.create(instance="b", state="STOPPED", queues=["parcels"])
    Queue.objects.using(alias).create(name="letters", paused_time=Now())
    parcels, letters = row_of(alias, "parcels"), row_of(alias, "letters")
    assert parcels.oldest and HOUR <= parcels.oldest < HOUR + timedelta(minutes=1)
    assert (parcels.rate_in, parcels.rate_out, parcels.failed, parcels.pollers) == (1.0, 3.0, 307, 1)
    assert parcels.drain == timedelta(seconds=1)
    assert (letters.oldest, letters.paused, letters.pollers, letters.drain) == (None, True, 0, None)
    assert [row.queue for row in overview(alias).late] == ["parcels"]
    pollers.create(instance="c", state="RUNNING", queues=["elsewhere"])
    assert row_of(alias, "elsewhere").pollers == 1, "only a poller knows it"


def test_one_glance_tells_of_failures_and_of_the_pause(alias: str) -> None:
    Poller.objects.using(alias).create(instance="a", state="RUNNING", queues=["parcels"])
    assert overview(alias).health.sentence == "All queues are on time."
    make_task(Status.ERROR, using=alias)
    make_task(Status.POISON, using=alias)
    taken = {"kind": "outcome", "name": "failed", "runs": {"0": 3, "40": 1}, "waits": {"10": 4}}
    MinuteCount.objects.using(alias).create(queue="parcels", minute=Now(), count=4, **taken)
    pause("letters", alias, by="ada", reason="no stamps", until=timezone.now() + HOUR)
    judged = overview(alias).health
    wanted = "All queues are on time; 1 ERROR, 1 POISON; 4 attempts failed in the last hour; 1 queue paused."
    assert (judged.level, judged.sentence) == ("warned", wanted)
    assert any("letters (by ada: no stamps, until " in note for note in judged.notes)
    parcels = row_of(alias, "parcels")
    assert parcels.run.p50 is not None and parcels.run.p95 is not None and parcels.run.p50 < parcels.run.p95
    assert parcels.wait.p50 is not None and row_of(alias, "letters").run.p50 is None


def test_tasks_of_a_dead_poller_in_a_queue_that_none_serves_alarm(alias: str) -> None:
    for minutes in (-5, -4, 1):
        make_task(Status.PROCESSING, using=alias, next_process_time=timedelta(minutes=minutes))
    parcels = row_of(alias, "parcels")
    assert (parcels.stale, parcels.late, parcels.unserved) == (2, True, True)
    judged = overview(alias).health
    assert (judged.level, judged.unserved) == ("late", ["parcels"])
    assert judged.sentence.startswith("1 queue late, oldest 5m")
    assert any(note.startswith("Leases ran out") and "parcels (2, 5m" in note for note in judged.notes)
    (found,) = [finding.words for finding in examine(alias) if finding.id == "queue.no_poller"]
    assert "oldest task has been due for 5m" in found
    shown = command("status", "--database", alias)
    assert "Leases ran out" in shown and "no poller" in shown


def test_large_numbers_are_estimates_small_ones_are_counted_and_all_is_cheap(
    postgres_process_database: ProcessDatabase, settings: Any, monkeypatch: Any, capsys: Any
) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}
    call_command("generatetasks", "--tasks", "12000", "--queues", "4")
    assert "12,000 tasks in" in capsys.readouterr().out
    counted = sql("SELECT queue_name, status, count(*) FROM dbtaskqueue_task GROUP BY 1, 2")
    truth = {(queue, status): number for queue, status, number in counted}
    assert_the_same_queries()
    # Given a bound of 200 rows a queue, then what is beyond is about right, and what is below is exact.
    monkeypatch.setattr(bounded_reads, "MAX_ROWS_PER_TABLE", 800)
    cells = {(row.queue, status): row.statuses[status] for row in overview().queues for status in row.statuses}
    for cell, number in truth.items():
        shown = cells[cell]
        if shown.more:  # PROCESSING behind the bound: "at least"
            assert shown.number <= number
        else:
            assert shown.exact is (number <= 200) or cell[1] in ("CREATED", "PROCESSING")
            assert shown.number == number if shown.exact else 0.5 * number < shown.number < 2 * number, cell
    assert str(cells[("built-00", "COMPLETED")]).startswith("≈")
    # PROCESSING is not called exact when some may be behind the bound.
    monkeypatch.setattr(bounded_reads, "MAX_ROWS_PER_TABLE", 200)
    for row in overview().queues:
        shown, number = row.statuses["PROCESSING"], truth.get((row.queue, "PROCESSING"), 0)
        assert shown.number == number or not shown.exact, (row.queue, shown, number)
    assert overview().statuses["PROCESSING"].more


def assert_the_same_queries() -> None:
    forbidden = re.compile(r'OFFSET|DISTINCT|COUNT\(\*\) FROM "DBTASKQUEUE_TASK"', re.IGNORECASE)
    wanted = {overview: 24, lambda: series(None, 24 * HOUR): 4, lambda: stats_of_groups(["f" * 40], "default"): 8}
    for read, most in wanted.items():
        with CaptureQueriesContext(connection) as seen:
            read()
        found = [query["sql"] for query in seen]
        assert len(found) <= most and not any(map(forbidden.search, found)), found
    scans = []
    for _before_and_after in range(2):
        sql("SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
        scans += sql("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'dbtaskqueue_task'")
        overview()
        stats_of_groups(["f" * 40], "default")
    assert scans[0] == scans[1]


# -- a question has a time limit, on each kind of database, and leaves the connection as it was ------------------------
SOON = timedelta(seconds=10)
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
    assert conf.Settings().operations_timeout == timedelta(seconds=3)
    settings.DBTASKQUEUE = {"OPERATIONS_TIMEOUT": "7s"}
    before = ask("default", "SHOW statement_timeout")
    with statement_timeout("default"):
        assert ask("default", "SHOW statement_timeout") == "7s"
    assert ask("default", "SHOW statement_timeout") == before
    with pytest.raises(OperationalError, match="somebody else"), statement_timeout("default"):
        raise OperationalError("somebody else")


def test_a_count_is_exact_up_to_its_bound_or_given_up_when_it_takes_too_long() -> None:
    for expected in ("0", "1", "2", "3", "3+"):
        with CaptureQueriesContext(connection) as queries:
            assert str(bounded_count(Task.objects.all(), bound=3)) == expected
        assert [query["sql"].count("LIMIT 4") for query in queries] == [1]
        make_task()
    assert str(ApproxCount(10_000, more=True)) == "10,000+"
    slow = Task.objects.extra(where=["pg_sleep(5) IS NOT NULL"])
    for limit in ("0", "77s"):
        sql(f"SET LOCAL statement_timeout = '{limit}'")
        assert count_within(slow, timedelta(milliseconds=50)) is None
        assert count_within(Task.objects.all(), SOON) == ApproxCount(5), "the transaction is usable"
        assert sql("SHOW statement_timeout") == [(limit,)]


def test_counts_and_estimates(alias: str) -> None:
    make_task(using=alias)
    assert count_within(Task.objects.using(alias), SOON) == ApproxCount(1)
    sql("ANALYZE dbtaskqueue_task", alias=alias)
    assert bounded_reads.estimate(Task.objects.using(alias)) == (1 if alias == "default" else None)
