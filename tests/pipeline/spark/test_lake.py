"""What Spark reads of a lake."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.testing import assertDataFrameEqual

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.pipeline.lake import LAKE_TASKS, Lake, read_lake
from django_dbtaskqueue.pipeline.lake.export import Export
from tests.pipeline.lakes import flip
from tests.pipeline.test_lake import DAY, FINISHED, lake_of, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_it_reads_what_counts_and_columns_younger_than_a_file_are_null(spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_of(tmp_path, rows(1), rows(2) | {"priority": pa.array([7], pa.int16())})
    Export(lake, "ab").write_day("tasks", DAY, pa.table(rows(3)), "0")  # which no commit names
    frame = read_lake(spark, tmp_path)
    assert frame.schema == LAKE_TASKS
    expected = spark.createDataFrame(
        [(1, None, FINISHED, date(2026, 1, 31)), (2, 7, FINISHED, date(2026, 1, 31))],
        "id long, priority short, finish_time timestamp, finished_date date",
    )
    assertDataFrameEqual(frame.select("id", "priority", "finish_time", "finished_date"), expected)
    assert read_lake(spark, tmp_path, since=date(2026, 1, 31)).count() == 2
    assert read_lake(spark, tmp_path, since=date(2026, 2, 1)).count() == 0


def test_an_empty_lake_has_the_columns_too(spark: SparkSession, tmp_path: Path) -> None:
    Lake.at(tmp_path, create=True)
    for table in ("tasks", "attempts", "finished"):
        assert read_lake(spark, tmp_path, table=table).isEmpty()
    assert read_lake(spark, f"file://{tmp_path}").schema == LAKE_TASKS
    with pytest.raises(PipelineError, match="table='task' must be one of 'tasks'"):
        read_lake(spark, tmp_path, table="task")


@pytest.mark.parametrize("what", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_named_or_left_out(spark: SparkSession, tmp_path: Path, what: str) -> None:
    lake = lake_of(tmp_path, rows(1), rows(2))
    path = Path(lake.path(lake.files("tasks")[0]))
    match what:
        case "flipped":
            flip(path, path.stat().st_size // 2)
        case "cut":
            path.write_bytes(path.read_bytes()[:-20])
        case "gone":
            path.unlink()
    with pytest.raises(LakeError, match=rf"{path} (is damaged|cannot be read).*Restore it from a backup"):
        read_lake(spark, tmp_path)
    damaged: list[str] = []
    (row,) = read_lake(spark, tmp_path, damaged=damaged).collect()
    assert row.id in (1, 2) and [str(path) in one for one in damaged] == [True]
