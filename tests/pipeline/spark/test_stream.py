"""``stream``: each finish reaches the lake once, whatever is stopped, killed or run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.lake import Lake, read_lake
from django_dbtaskqueue.pipeline.lake.copy_jobs import Stream, checkpoint
from django_dbtaskqueue.pipeline.source import stream_tasks
from tests.factories import make_task
from tests.pipeline.test_stream_source import commit, finish

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from django_dbtaskqueue.pipeline.database import Database

pytestmark = pytest.mark.slow


def stream(spark: SparkSession, database: Database, lake: Path, **options: Any) -> Mapping[str, Any]:
    return Stream().run(Stream.context(spark=spark, database=database, lake=lake, once=True, **options))


def copied(spark: SparkSession, lake: Path) -> list[tuple[int, int, str]]:
    rows = read_lake(spark, lake, table="finished").collect()
    return sorted((row.id, row.total_attempt, row.status) for row in rows)


@pytest.fixture
def pg(quiet_pg: Database) -> Database:
    return quiet_pg


def test_a_query_restarted_goes_on_where_it_was(spark: SparkSession, pg: Database, tmp_path: Path) -> None:
    """Also when the stream is registered between two starts, and over a transaction that commits late."""
    enqueue_many("other", [(name, None) for name in "abcdef"])
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def drain(name: str | None = None) -> list[str]:
        df = stream_tasks(spark, pg, ["reference_number", "status", "finish_time"], queue="other", name=name)
        writer = df.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start(out).awaitTermination()
        return sorted(row[0] for row in spark.read.schema("reference_number string").parquet(out).collect())

    commit(finish(pg, "a", "b"))
    late = finish(pg, "c")
    commit(finish(pg, "d"))
    assert drain() == ["a", "b"]
    commit(late)
    assert drain("a stream") == ["a", "b", "c", "d"]
    commit(finish(pg, "e"))
    assert drain("a stream") == ["a", "b", "c", "d", "e"]


def test_each_finish_is_copied_once(spark: SparkSession, pg: Database, tmp_path: Path) -> None:
    done, failed = make_task("COMPLETED"), make_task("ERROR", queue="черга", max_attempts=2)
    make_task("CREATED")
    expected = [(done.pk, 1, "COMPLETED"), (failed.pk, 2, "ERROR")]

    assert stream(spark, pg, tmp_path, dry_run=False)["rows"] == 2
    assert copied(spark, tmp_path) == expected
    assert {row.queue_name for row in read_lake(spark, tmp_path, table="finished").collect()} == {"parcels", "черга"}
    assert Task.objects.count() == 3

    Task.objects.filter(pk=failed.pk).mark_poison()
    late = make_task("POISON")
    assert stream(spark, pg, tmp_path)["rows"] == 2
    assert copied(spark, tmp_path) == sorted([*expected, (failed.pk, 2, "POISON"), (late.pk, 1, "POISON")])
    assert read_lake(spark, tmp_path).count() == 0, "what is streamed is not archived"


def test_a_micro_batch_whose_commit_was_lost_adds_nothing(spark: SparkSession, pg: Database, tmp_path: Path) -> None:
    task = make_task("COMPLETED")
    assert stream(spark, pg, tmp_path)["rows"] == 1
    folder, _name = checkpoint(Lake.at(tmp_path), pg.location)
    for path in folder.glob("commits/*"):
        path.unlink()  # the driver died after the lake's log and before Spark's own
    assert stream(spark, pg, tmp_path)["rows"] == 0
    assert copied(spark, tmp_path) == [(task.pk, 1, "COMPLETED")]


def test_sqlite_cannot_be_streamed(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="from PostgreSQL only"):
        stream(spark, sqlite, tmp_path / "lake")
