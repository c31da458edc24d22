"""``check``: what it takes for a fault, what it only reports, and how it says so."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue.core.exceptions import CheckFailed
from django_dbtaskqueue.models import Task, TaskHistory
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.reports import quality
from django_dbtaskqueue.pipeline.reports.quality import Check
from tests.factories import make_task
from tests.pipeline.lakes import DAY, archive, fill, flip

T = datetime(2026, 1, 31, 8, tzinfo=UTC)
PLACED = "place string, location string, id long, queue_name string, status string, start_time timestamp"
PLACED += ", finish_time timestamp, last_update_time timestamp"


def check(spark: SparkSession, database: Database, lake: Path | None = None, **options: Any) -> Mapping[str, Any]:
    return Check().run(Check.context(spark=spark, database=database, lake=lake, **options))


def test_broken_rules_doubles_and_the_tasks_of_a_day_are_counted(spark: SparkSession) -> None:
    rows = [
        ("task", 1, "q", "COMPLETED", T, T),
        ("task", 2, "q", "COMPLETED", T, T - timedelta(seconds=1)),
        ("lake", 3, "q", "DONE", T, T),
        ("lake", 4, "q", None, None, None),
        ("lake", 5, "", "ERROR", None, T),
        ("lake", None, "q", "ERROR", None, T),
        ("task", 6, "q", "CREATED", None, None),
        ("task", 7, "q", "POISON", T, None),
        ("lake", 7, "q", "POISON", T, T),
    ]
    tasks = spark.createDataFrame([(place, "l", *rest, T) for place, *rest in rows], PLACED)
    found = {(row.check, row.place, row.queue_name): row.rows for row in quality.violations(tasks).collect()}
    assert found == {
        ("finished before it started", "task", "q"): 1,
        ("unknown status", "lake", "q"): 2,
        ("no queue", "lake", ""): 1,
        ("no id", "lake", "q"): 1,
    }
    expected = Counter({quality.DUPLICATE_ID: 2})
    for (name, _place, _queue), number in found.items():
        expected[name] += number
    assert {name: pc.sum(broken).as_py() for name, broken in quality.rule_breaks(tasks.toArrow()).items()} == expected
    assert [tuple(row) for row in quality.twice(tasks).collect()] == [("l", 7, 2, ["lake", "task"])]
    assert {tuple(row) for row in quality.daily(tasks).collect()} == {("q", T.date(), 5), ("", T.date(), 1)}


def test_gaps_and_days_far_from_the_usual_are_found(spark: SparkSession) -> None:
    january = {
        "gap": [5, 5, 0, 0, 0, 0, 5, 0, 0, 0, 5],
        "more": [100] * 8 + [1000],
        "fewer": [100, 120, 80, 110, 90, 100, 105, 95, 4],
        "usual": [100, 120, 80, 110, 90, 100, 105, 95, 112],
        "short": [100] * 6 + [1000],  # six days say too little
    }
    rows = [(queue, date(2026, 1, day), n) for queue, counts in january.items() for day, n in enumerate(counts, 1) if n]
    days = spark.createDataFrame(rows, "queue_name string, day date, tasks long").coalesce(1)
    found = quality.gaps(days, longest=3).collect()
    assert [tuple(row) for row in found] == [("gap", date(2026, 1, 2), date(2026, 1, 7), 4)]
    unusual = quality.drift(days, threshold=6.0).collect()
    assert sorted((row.queue_name, row.day.day) for row in unusual) == [("fewer", 9), ("more", 9)]


@pytest.mark.slow
def test_sound_data_pass(spark: SparkSession, database: Database, folder: Path) -> None:
    fill()
    number = Task.objects.count() + TaskHistory.objects.count()
    archive(database, folder, source="task")
    found = check(spark, database, folder)
    assert found == {"rows": number, "faults": 0, "findings": []}
    assert Check().as_text(found) == f"{number} tasks checked\nno findings"


def test_gaps_fail_only_when_asked_and_faults_and_damaged_files_always(spark: Any, pg: Any, folder: Path) -> None:
    for day in (9, 1):
        make_task("COMPLETED", start_time=-10 * DAY, finish_time=-day * DAY)
    found = check(spark, pg)
    assert (found["faults"], [one["check"] for one in found["findings"]]) == (0, ["days without a task"])
    fill()
    archive(pg, folder, source="task", status="ERROR")
    damaged = [*folder.glob("*/*/*.parquet")]
    for path in damaged:
        flip(path, path.stat().st_size // 3)
    make_task("COMPLETED", start_time=timedelta(hours=2))
    with pytest.raises(CheckFailed, match=r"finished before it started +task +parcels +1[^$]*5 days between") as caught:
        check(spark, pg, folder, strict=True)
    checks = Counter(one["check"] for one in caught.value.result["findings"])
    assert checks == {"damaged file": 2, "finished before it started": 1, "days without a task": 1}
    assert (caught.value.result["faults"], caught.value.result["rows"]) == (4, 12)
    assert all(str(path) in str(caught.value.result) for path in damaged)
