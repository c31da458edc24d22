"""The transforms against examples worked out by hand, and the service levels against an oracle without Spark."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertDataFrameEqual

from django_dbtaskqueue.pipeline.jobs import Objective
from django_dbtaskqueue.pipeline.reports import transforms, transforms as T
from django_dbtaskqueue.pipeline.source import schema_of
from tests.pipeline import histories
from tests.pipeline.histories import MONDAY, Row, frame, row


def attempts(spark: SparkSession, *rows: tuple[str, float, str, str]) -> DataFrame:
    """Return failed attempts of (queue, seconds, error type, message)."""
    same = ("dbtaskqueue.task", 1)
    values = [(*same, queue, MONDAY, MONDAY + timedelta(0, ran), kind, message) for queue, ran, kind, message in rows]
    return spark.createDataFrame(values, schema_of("attempt", transforms.ATTEMPT_COLUMNS))


OBJECTIVES = [Objective("*", 0.5), Objective("late", 0.9, timedelta(minutes=8)), Objective("spent", 1.0)]
QUEUES = {
    "once": [row(waited=1), row(waited=3600, total_attempt=2)],
    "slow": [row(created=0), row(created=10), row(created=5 * 3600)],
    "late": [row(waited=60.0 * minutes) for minutes in range(10)],  # each runs a second
    "half": [row(status="ERROR"), row()],
    "idle": [row(status="CREATED", ran=None)],
    "spent": [row(status="ERROR")],
    "good": [row() for _ in range(8)],
    "bad": [row(total_attempt=5), row(status="ERROR", total_attempt=5)],
    "waste": [row(ran=6), row(ran=50, status="ERROR")],
}


@pytest.fixture(scope="module")
def levels(spark: SparkSession) -> Iterator[DataFrame]:
    """The service levels of QUEUES, computed once: a test is about some of the queues."""
    tasks = frame(spark, [replace(one, queue_name=queue) for queue, rows in QUEUES.items() for one in rows])
    found = levels_of(T.hour_parts(tasks, OBJECTIVES), "queue").coalesce(1).persist()
    yield found
    found.unpersist()


def levels_of(parts: DataFrame, *by: str) -> DataFrame:
    return T.service_levels(T.hours(parts), T.percentiles(parts), *by)


def of(levels: DataFrame, *queues: str) -> DataFrame:
    return levels.where(levels["queue"].isin(*queues))


seconds = st.floats(0, 9_000).map(lambda value: round(value, 3))
tasks = st.builds(
    row,
    queue_name=st.sampled_from(["claims", "mails"]), status=st.sampled_from(["COMPLETED"] * 3 + ["ERROR", "POISON"]),
    created=seconds, waited=st.none() | seconds, ran=seconds,
    total_attempt=st.integers(1, 4), reenqueue_attempt=st.integers(0, 1),
)  # fmt: skip
live = st.sampled_from(["CREATED", "PROCESSING"])
waiting = st.builds(row, status=live, created=seconds, waited=st.none(), ran=st.none())


# A run takes a second of Spark: few of them, and what fails is small enough as it is.
@settings(max_examples=6, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(rows=st.lists(tasks | waiting, min_size=1, max_size=40))
@pytest.mark.slow
def test_levels_and_backlog_are_those_of_the_oracle(spark: SparkSession, rows: list[Row]) -> None:
    parts = T.hour_parts(frame(spark, rows).coalesce(1)).persist()
    found = {(one["queue"], one["hour"]): one for one in levels_of(parts, "queue", "hour").toArrow().to_pylist()}
    lines = {(one["queue"], one["hour"]): one["backlog"] for one in T.backlog(T.hours(parts)).toArrow().to_pylist()}
    parts.unpersist()
    expected = histories.levels(rows)
    assert found.keys() == expected.keys()
    for key, level in expected.items():
        for name, right in level.items():
            wanted = right if right is None else pytest.approx(right, rel=1e-6, abs=1e-5)
            assert found[key][name] == wanted, (key, name)
    assert lines == histories.backlog(rows)


def test_levels_over_all_queues_add_up(spark: SparkSession) -> None:
    waits = (("a", 1), ("a", 3), ("b", 100))
    tasks = frame(spark, [row(queue_name=queue, waited=wait, ran=2) for queue, wait in waits])
    (everything,) = levels_of(T.hour_parts(tasks)).collect()
    assert (everything["ended"], everything["run_seconds"]) == (3, 6.0)
    assert [everything["wait_p50"], everything["wait_p95"]] == pytest.approx([3, 100], rel=0.01)


def test_throughput_counts_hours_in_which_something_was_and_waits_are_of_tasks_taken_once(levels: DataFrame) -> None:
    """A retried task's last start is no sign of how long it waited for its first."""
    found = {one["queue"]: one for one in of(levels, "slow", "once").collect()}
    assert found["slow"]["throughput"] == pytest.approx(3 / 7200)
    assert found["once"]["wait_p99"] == pytest.approx(1, rel=0.01)


def test_a_budget_counts_failures_and_late_ones_and_may_be_of_nothing(spark: SparkSession, levels: DataFrame) -> None:
    found = T.error_budgets(of(levels, "late", "half", "idle", "spent"), OBJECTIVES)
    expected = [
        ("late", "90% within 8m", 0.9, 0.8, 10, 2, 1.0, 2.0),
        ("half", "50%", 0.5, 0.5, 2, 1, 1.0, 1.0),
        ("spent", "100%", 1.0, 0.0, 1, 1, 0.0, None),
    ]
    assertDataFrameEqual(found, spark.createDataFrame(expected, found.schema), rtol=1e-9)


def test_the_noisy_queue_and_the_time_of_failed_attempts(spark: SparkSession, levels: DataFrame) -> None:
    found = {one["queue"]: one for one in T.noisy_queues(of(levels, "good", "bad")).collect()}
    assert [found[queue]["noisy"] for queue in ("good", "bad")] == [False, True]
    assert (found["bad"]["share_of_unsuccessful"], found["bad"]["unsuccessful_attempts"]) == (1.0, 9)
    failed = attempts(spark, ("waste", 1, "", ""), ("waste", 1, "", ""))
    found = T.retry_waste(T.waste_parts(failed), of(levels, "waste"))
    assertDataFrameEqual(found, spark.createDataFrame([("waste", 2, 2.0, 0.25)], found.schema))


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 7\nshop.errors.Bad: no order 4711 of "Ada"\n'


def test_failures_of_one_kind_are_one_cluster(spark: SparkSession) -> None:
    rows = [row(status="ERROR", process_result=TRACEBACK), row(status="POISON", process_result="not ours")]
    rows += [row(process_result="done 17")]
    failed = attempts(
        spark,
        ("claims", 1, "shop.errors.Bad", 'no order 12 of "Bob"'),
        ("claims", 1, "builtins.ValueError", "0x7f31ab is bad at 10.0.0.1"),
        ("mails", 1, "", ""),
    )
    found = T.failure_clusters(frame(spark, rows), failed)
    assert {(one["queue"], one["message"], one["tasks_ended"], one["attempts_failed"]) for one in found.collect()} == {
        ("claims", "shop.errors.Bad: no order # of '…'", 1, 1),
        ("claims", "ValueError: # is bad at #", 0, 1),
        ("claims", "not ours", 1, 0),
        ("mails", "(no message)", 0, 1),
    }


SAME_KIND = [
    ("task 6f9619ff-8b86-d011-b42d-00c04fc964ff is gone", "task 7f9619ff-8b86-d011-b42d-00c04fc964aa is gone"),
    ("key 'a b' of 12,5 at 2026-01-31", "key 'c' of 3 at 2025-12-24"),
    ("object at 0xdeadbeef  lost", "object at 0x7f000001 lost"),
    ("digest 9e107d9d372bb6826bd81d3542a419d6", "digest e4d909c290d0fb1ca068ffaddf22cbd0"),
]


def test_a_kind_is_what_two_of_it_share_and_one_that_only_fails_is_found(spark: SparkSession) -> None:
    said = spark.createDataFrame(SAME_KIND, "one string, other string")
    kinds = said.select(*(transforms.normalised_column(said[name]).alias(name) for name in said.columns)).collect()
    assert [row for row in kinds if row.one != row.other] == []
    assert len({row.one for row in kinds}) == len(SAME_KIND)
    rows = [row(reference_number=f"nightly-{day}", status="ERROR", tag="a") for day in range(3)]
    rows += [row(reference_number=f"hourly-{hour}", status="ERROR") for hour in range(3)]
    rows += [row(reference_number="hourly-99"), row(reference_number="rare-1", status="ERROR")]
    found = T.never_succeeding(T.kind_parts(frame(spark, rows)))
    last = MONDAY + timedelta(seconds=2)
    expected = spark.createDataFrame([("claims", "a", "nightly-", 3, last, "nightly-2")], found.schema)
    assertDataFrameEqual(found, expected)


def test_hours_are_utc_whatever_the_session_says(spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")  # half an hour off every other zone
    try:
        tasks = frame(spark, [row(created=3599, waited=0, ran=0)])
        (level,) = levels_of(T.hour_parts(tasks), "queue", "hour").collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert level["hour"].timestamp() == MONDAY.timestamp() and level["arrived"] == level["ended"] == 1
