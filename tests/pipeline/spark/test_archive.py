"""``archive`` on Spark's workers, and what ``read_lake`` finds afterwards."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from pyspark import TaskContext
from pyspark.sql import functions as F

from django_dbtaskqueue.models import ArchiveBatch, Attempt, Task, TaskHistory
from django_dbtaskqueue.pipeline.lake import Lake, read_lake
from django_dbtaskqueue.pipeline.lake.export import Export, RowWriter
from django_dbtaskqueue.pipeline.schema import TASKS
from tests.factories import make_task
from tests.pipeline.lakes import Census, archive, fill

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from django_dbtaskqueue.pipeline.database import Database


@pytest.mark.parametrize("database", ["postgresql", pytest.param("sqlite", marks=pytest.mark.slow)], indirect=True)
def test_finished_tasks_and_their_attempts_move_to_the_lake(
    spark: SparkSession, database: Database, folder: Path
) -> None:
    fill()
    waiting = make_task("CREATED")
    before = Census.of(folder)

    done = archive(database, folder, spark=spark)

    assert Census.of(folder) == before
    assert [task.pk for task in Task.objects.all()] == [waiting.pk]
    assert not TaskHistory.objects.exists()
    assert not Attempt.objects.exists()
    assert done["tasks"] == 12
    assert done["attempts"] == 3
    assert set(ArchiveBatch.objects.values_list("state", flat=True)) == {"closed"}
    rows = read_lake(spark, folder, database=database).orderBy("id").collect()
    errors = [row for row in rows if row.status == "ERROR"]
    assert {(row.location, row.queue_name) for row in rows} == {
        ("dbtaskqueue.task", "parcels"),
        ("dbtaskqueue.task", "a/b=c %d"),
    }
    assert all(row.finished_date == row.finish_time.date() for row in rows)
    assert {row.payload for row in errors} == {'{"city": "Kyiv"}'}
    attempts = read_lake(spark, folder, table="attempts").collect()
    assert {row.task_id for row in attempts} == {row.id for row in errors}


@pytest.mark.slow
def test_files_of_a_failed_try_do_not_count(spark: SparkSession, folder: Path) -> None:
    """The session gives each task a second try; both write, and only what the second one wrote is named."""
    export = Export(Lake.at(folder, create=True), "ab")
    writer = RowWriter(export, "dbtaskqueue.task")
    tried = folder / "finished" / "tried"

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from writer(batches)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            tried.touch()
            raise RuntimeError("the first try fails after it has written")

    row = [None] * len(TASKS)
    rows = spark.createDataFrame([[7, "q", "r", "ERROR", *row[4:]]], TASKS)
    rows = rows.withColumn("finish_time", F.lit(datetime(2026, 1, 31, tzinfo=UTC)))
    (file,) = export.files_of(rows, fail_once)
    assert tried.exists()
    assert len(list(folder.glob("finished/*/*.parquet"))) == 2
    export.lake.commit("finished", [file])
    assert read_lake(spark, folder, table="finished").count() == file.rows == 1
