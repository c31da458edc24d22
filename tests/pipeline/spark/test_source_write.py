"""Writing tasks with Spark: DataFrames, failing tasks, micro-batches, lost workers; see docs/reference/pipeline.md."""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import DuplicateTask
from django_dbtaskqueue.models import StreamLedger, Task
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import register, write_tasks
from tests.pipeline.executors import dying_once
from tests.pipeline.test_source_write import FUTURE, staging_tables, tasks

NAMES = ("reference", "payload", "priority", "run_at", "delay", "group", "tag", "ttl", "context", "lease")
SCHEMA = (
    "reference string, payload struct<text string>, priority int, run_at timestamp, delay interval day to second,"
    " `group` string, tag string, ttl interval day to second, context map<string,string>, lease interval day to second"
)


def simple(spark: SparkSession, count: int) -> DataFrame:
    payload = F.to_json(F.struct("id")).alias("payload")
    return spark.range(count).select(F.concat(F.lit("r"), "id").alias("reference"), payload)


def test_the_same_tasks_as_enqueue_many(spark: SparkSession, pg: Database) -> None:
    """Of columns of each type; nested ones become JSON."""
    items: list[dict[str, Any]] = [
        {"reference": 'q"\n\\.', "payload": {"text": 'line\nbreak, "quote", \\ é漢😀'}, "context": {"trace": "1"}},
        {"reference": None, "payload": {"text": None}, "priority": -3, "tag": "host", "group": "g"},
        {"reference": "late", "payload": None, "run_at": FUTURE, "ttl": timedelta(hours=1)},
        {"reference": "held", "run_at": FUTURE, "delay": timedelta(seconds=1.5), "lease": timedelta(1)},
    ]
    enqueue_many("work", items)
    df = spark.createDataFrame([tuple(item.get(name) for name in NAMES) for item in items], SCHEMA)
    assert write_tasks(df, pg, queue="other", max_attempts=3).enqueued == 4
    assert tasks("other") == tasks("work")
    with pytest.raises(DuplicateTask, match="'held' is already taken in queue 'other'"):
        write_tasks(df.orderBy("reference"), pg, queue="other")
    assert (Task.objects.count(), staging_tables()) == (8, [])


@pytest.mark.slow
def test_a_lost_worker_costs_no_row_and_doubles_none(spark: SparkSession, pg: Database) -> None:
    df = spark.range(1000, numPartitions=2).mapInArrow(dying_once, "id long")
    df = df.select(F.to_json(F.struct("id")).alias("payload"))
    assert write_tasks(df, pg, queue="other").enqueued == 1000
    assert {task["id"] for task in Task.objects.values_list("payload", flat=True)} == set(range(1000))
    assert (Task.objects.count(), staging_tables()) == (1000, [])


@pytest.mark.slow
def test_a_failing_task_of_df_write_leaves_nothing(spark: SparkSession, pg: Database) -> None:
    register(spark, pg)
    failing = F.when(F.col("reference") == "r99", F.raise_error(F.lit("asked to fail"))).otherwise(F.lit(True))
    options = {"url": pg.url_without_password, "queue": "other"}

    def write(count: int) -> None:
        simple(spark, count).where(failing).write.format("dbtaskqueue").options(**options).mode("append").save()

    for count, written, error in ((100, 0, "asked to fail"), (99, 99, ""), (1, 99, "Reference 'r0' is already taken")):
        with pytest.raises(Exception, match=error) if error else nullcontext():
            write(count)
        assert (Task.objects.count(), staging_tables()) == (written, [])


@pytest.mark.slow
def test_a_micro_batch_that_is_run_again_adds_nothing(spark: SparkSession, pg: Database, tmp_path: Path) -> None:
    register(spark, pg)
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()
    for name, count in (("1.json", 20), ("2.json", 10)):
        (source / name).write_text('{"payload": "1"}\n' * count)

    def drain() -> None:
        df = spark.readStream.schema("payload string").option("maxFilesPerTrigger", 1).json(str(source))
        writer = df.writeStream.format("dbtaskqueue").option("url", pg.url_without_password).option("queue", "other")
        writer = writer.option("once", "files").option("checkpointLocation", str(checkpoint))
        query = writer.queryName("files").trigger(availableNow=True).start()  # Spark makes an option of the name
        query.awaitTermination()

    drain()
    noted = [*checkpoint.glob("commits/*1"), *checkpoint.glob("commits/.1.*")]
    assert noted
    for note in noted:
        note.unlink()  # as a driver that died between the commit of the tasks and its own note
    drain()
    assert Task.objects.count() == 30  # the payloads have no reference: nothing but the ledger tells
    batches, rows = zip(*StreamLedger.objects.filter(query="files").values_list("batch", "rows"), strict=True)
    assert (sorted(batches), sorted(rows)) == ([0, 1], [10, 20])
    assert staging_tables() == []
