"""``archive`` on Spark's workers, and what Spark reads of a lake."""

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession, functions as F
from pyspark.testing import assertDataFrameEqual

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.models import ArchiveBatch, Attempt, Task, TaskHistory
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake import LAKE_TASKS, DataFile, Lake, read_lake
from django_dbtaskqueue.pipeline.lake.export import Export, files_of, write_finished
from django_dbtaskqueue.pipeline.source import TASKS
from tests.factories import make_task
from tests.pipeline.lakes import Census, archive, fill, flip
from tests.pipeline.test_lake import DAY, FINISHED, lake_of, rows


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


@pytest.mark.parametrize("database", ["postgresql", pytest.param("sqlite", marks=pytest.mark.slow)], indirect=True)
def test_finished_tasks_and_attempts_move_to_the_lake(spark: SparkSession, database: Database, folder: Path) -> None:
    fill()
    waiting = make_task("CREATED")
    before = Census.of(folder)
    done = archive(database, folder, spark=spark)
    assert Census.of(folder) == before and [task.pk for task in Task.objects.all()] == [waiting.pk]
    assert not TaskHistory.objects.exists() and not Attempt.objects.exists()
    assert (done["tasks"], done["attempts"]) == (12, 3)
    assert set(ArchiveBatch.objects.values_list("state", flat=True)) == {"closed"}
    rows = read_lake(spark, folder, database=database).orderBy("id").collect()
    errors = [row for row in rows if row.status == "ERROR"]
    assert {row.location for row in rows} == {"dbtaskqueue.task"}
    assert {row.queue_name for row in rows} == {"parcels", "a/b=c %d"}
    assert all(row.finished_date == row.finish_time.date() for row in rows)
    assert {row.payload for row in errors} == {'{"city": "Kyiv"}'}
    assert {row.task_id for row in read_lake(spark, folder, table="attempts").collect()} == {row.id for row in errors}


@pytest.mark.slow
def test_files_of_a_failed_try_do_not_count(spark: SparkSession, folder: Path) -> None:
    """The session gives each task a second try; both write, and only what the second one wrote is named."""
    export = Export(Lake.at(folder, create=True), "ab")
    tried = folder / "finished" / "tried"

    def fail_once(batches: Iterable[pa.RecordBatch]) -> Iterator[DataFile]:
        yield from write_finished(export, "dbtaskqueue.task", batches)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            tried.touch()
            raise RuntimeError("the first try fails after it has written")

    rows = spark.createDataFrame([[7, "q", "r", "ERROR", *[None] * (len(TASKS) - 4)]], TASKS)
    rows = rows.withColumn("finish_time", F.lit(datetime(2026, 1, 31, tzinfo=UTC)))
    (file,) = files_of(rows, fail_once)
    assert tried.exists() and len(list(folder.glob("finished/*/*.parquet"))) == 2
    export.lake.commit("finished", [file])
    assert read_lake(spark, folder, table="finished").count() == file.rows == 1
