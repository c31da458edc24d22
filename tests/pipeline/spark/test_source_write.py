"""Writing tasks with Spark: its DataFrames, its data source, its micro-batches, its lost workers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import DuplicateTask
from django_dbtaskqueue.models import StreamLedger, Task
from django_dbtaskqueue.pipeline.source import register, write_tasks
from tests.pipeline.executors import dying_once
from tests.pipeline.test_source_write import FUTURE, staging_tables, tasks

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from django_dbtaskqueue.pipeline.database import Database

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
        {
            "reference": "held",
            "payload": None,
            "run_at": FUTURE,
            "delay": timedelta(seconds=1.5),
            "lease": timedelta(1),
        },
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


def test_df_write(spark: SparkSession, sqlite: Database) -> None:
    register(spark, sqlite)
    df = simple(spark, 10)
    writer = df.write.format("dbtaskqueue").option("url", sqlite.url_without_password).option("queue", "other")
    writer.mode("append").save()
    assert Task.objects.filter(queue="other").count() == 10
    with pytest.raises(Exception, match="Reference 'r0' is already taken"):
        writer.mode("append").save()
    with pytest.raises(Exception, match="Tasks are never overwritten"):
        writer.mode("overwrite").save()
    assert (Task.objects.count(), staging_tables()) == (10, [])


@pytest.mark.slow
def test_a_failing_task_of_df_write_leaves_nothing(spark: SparkSession, pg: Database) -> None:
    register(spark, pg)
    failing = F.when(F.col("reference") == "r99", F.raise_error(F.lit("asked to fail"))).otherwise(F.lit(True))
    options = {"url": pg.url_without_password, "queue": "other"}
    with pytest.raises(Exception, match="asked to fail"):
        simple(spark, 100).where(failing).write.format("dbtaskqueue").options(**options).mode("append").save()
    assert (Task.objects.count(), staging_tables()) == (0, [])
    simple(spark, 99).where(failing).write.format("dbtaskqueue").options(**options).mode("append").save()
    assert (Task.objects.count(), staging_tables()) == (99, [])


@pytest.mark.slow
def test_a_micro_batch_that_is_run_again_adds_nothing(spark: SparkSession, pg: Database, tmp_path: Path) -> None:
    register(spark, pg)
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"

    def put(name: str, count: int) -> None:
        source.mkdir(exist_ok=True)
        (source / name).write_text("".join(f'{{"payload": "{number}"}}\n' for number in range(count)))

    def drain() -> None:
        df = spark.readStream.schema("payload string").option("maxFilesPerTrigger", 1).json(str(source))
        writer = df.writeStream.format("dbtaskqueue").option("url", pg.url_without_password).option("queue", "other")
        writer = writer.option("once", "files").option("checkpointLocation", str(checkpoint))
        query = writer.queryName("files").trigger(availableNow=True).start()  # Spark makes an option of the name
        query.awaitTermination()

    put("1.json", 20)
    put("2.json", 10)
    drain()
    noted = [*checkpoint.glob("commits/*1"), *checkpoint.glob("commits/.1.*")]
    assert noted
    for note in noted:
        note.unlink()  # as a driver that died between the commit of the tasks and its own note
    drain()
    assert Task.objects.count() == 30  # the payloads have no reference: nothing but the ledger tells
    ledger = StreamLedger.objects.filter(query="files")
    assert sorted(ledger.values_list("batch", flat=True)) == [0, 1]
    assert sorted(ledger.values_list("rows", flat=True)) == [10, 20]
    assert staging_tables() == []
