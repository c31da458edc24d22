"""``check``: what it takes for a fault, what it only reports, and how it says so."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pytest

from django_dbtaskqueue.core.exceptions import CheckFailed
from django_dbtaskqueue.models import Task, TaskHistory
from django_dbtaskqueue.pipeline.reports.quality import (
    DUPLICATE_ID,
    Check,
    daily,
    drift,
    gaps,
    rule_breaks,
    twice,
    violations,
)
from tests.factories import make_task
from tests.pipeline.lakes import archive, fill, flip

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from django_dbtaskqueue.pipeline.database import Database


T = datetime(2026, 1, 31, 8, tzinfo=UTC)
PLACED = (
    "place string, location string, id long, queue_name string, status string, start_time timestamp,"
    " finish_time timestamp, last_update_time timestamp"
)


def placed(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame([(place, "l", *rest, T) for place, *rest in rows], PLACED)


def days(spark: SparkSession, **numbers: list[int]) -> DataFrame:
    """Return the numbers of the days of January, by queue."""
    rows = [
        (queue, date(2026, 1, 1) + timedelta(days=index), number)
        for queue, counts in numbers.items()
        for index, number in enumerate(counts)
        if number
    ]
    return spark.createDataFrame(rows, "queue_name string, day date, tasks long").coalesce(1)


def test_rows_that_break_rules_are_counted(spark: SparkSession) -> None:
    tasks = placed(
        spark,
        ("task", 1, "q", "COMPLETED", T, T),
        ("task", 2, "q", "COMPLETED", T, T - timedelta(seconds=1)),
        ("lake", 3, "q", "DONE", T, T),
        ("lake", 4, "q", None, None, None),
        ("lake", 5, "", "ERROR", None, T),
        ("lake", None, "q", "ERROR", None, T),
    )
    found = {(row.check, row.place, row.queue_name): row.rows for row in violations(tasks).collect()}
    assert found == {
        ("finished before it started", "task", "q"): 1,
        ("unknown status", "lake", "q"): 2,
        ("no queue", "lake", ""): 1,
        ("no id", "lake", "q"): 1,
    }
    expected: Counter[str] = Counter()
    for (name, _place, _queue), number in found.items():
        expected[name] += number
    assert {name: pc.sum(rows).as_py() for name, rows in rule_breaks(tasks.toArrow()).items()} == expected


def test_an_id_in_two_places_is_found(spark: SparkSession) -> None:
    tasks = placed(spark, *[(place, 7, "q", "ERROR", T, T) for place in ("lake", "task")], ("task", 8, "q", "X", T, T))
    assert [tuple(row) for row in twice(tasks).collect()] == [("l", 7, 2, ["lake", "task"])]
    assert rule_breaks(tasks.toArrow())[DUPLICATE_ID].to_pylist() == [True, True, False]


def test_days_without_a_task_are_gaps(spark: SparkSession) -> None:
    found = gaps(days(spark, q=[5, 5, 0, 0, 0, 0, 5, 0, 0, 0, 5]), longest=3).collect()
    assert [tuple(row) for row in found] == [("q", date(2026, 1, 2), date(2026, 1, 7), 4)]


def test_days_far_from_the_usual_are_found(spark: SparkSession) -> None:
    numbers = days(
        spark,
        more=[100] * 8 + [1000],
        fewer=[100, 120, 80, 110, 90, 100, 105, 95, 4],
        usual=[100, 120, 80, 110, 90, 100, 105, 95, 112],
        short=[100] * 6 + [1000],  # six days say too little
    )
    found = drift(numbers, threshold=6.0).collect()
    assert sorted((row.queue_name, row.day.day) for row in found) == [("fewer", 9), ("more", 9)]


def test_only_finished_tasks_make_a_day(spark: SparkSession) -> None:
    tasks = placed(
        spark,
        ("task", 1, "q", "ERROR", T, T),
        ("task", 2, "q", "CREATED", None, None),
        ("task", 3, "q", "POISON", T, None),
    )
    assert [tuple(row) for row in daily(tasks).collect()] == [("q", T.date(), 2)]


def check(spark: SparkSession, database: Database, lake: Path | None = None, **options: Any) -> Mapping[str, Any]:
    return Check().run(Check.context(spark=spark, database=database, lake=lake, **options))


@pytest.mark.slow
def test_sound_data_pass(spark: SparkSession, database: Database, folder: Path) -> None:
    fill()
    number = Task.objects.count() + TaskHistory.objects.count()
    archive(database, folder, source="task")
    found = check(spark, database, folder)
    assert found == {"rows": number, "faults": 0, "findings": []}
    assert Check().as_text(found) == f"{number} tasks checked\nno findings"


def test_gaps_are_reported_and_fail_only_when_asked_and_faults_fail(spark: SparkSession, pg: Database) -> None:
    for day in (9, 1):
        make_task("COMPLETED", start_time=-timedelta(days=10), finish_time=-timedelta(days=day))
    found = check(spark, pg)
    assert found["faults"] == 0
    assert [one["check"] for one in found["findings"]] == ["days without a task"]
    make_task("COMPLETED", start_time=timedelta(hours=2))
    with pytest.raises(CheckFailed, match=r"finished before it started +task +parcels +1[^$]*7 days between") as caught:
        check(spark, pg, strict=True)
    assert caught.value.result["faults"] == 2


def test_damaged_files_are_named_and_the_others_are_checked(spark: SparkSession, pg: Database, folder: Path) -> None:
    fill()
    archive(pg, folder, source="task")
    damaged = [next(folder.glob(f"{table}/*/*.parquet")) for table in ("tasks", "attempts")]
    for path in damaged:
        flip(path, path.stat().st_size // 3)
    with pytest.raises(CheckFailed) as caught:
        check(spark, pg, folder)
    found = caught.value.result
    assert found["rows"] > 0
    assert [one["check"] for one in found["findings"]] == ["damaged file"] * 2
    assert all(str(path) in str(found) for path in damaged)
