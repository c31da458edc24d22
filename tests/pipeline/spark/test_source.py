"""The session, and reading and writing tasks with it: rows, columns, failing tasks, micro-batches, lost workers."""

import os
import re
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, functions as F

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import DuplicateTask, PipelineError
from django_dbtaskqueue.models import Task, UsedReference
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import TASKS, few_tasks, read_tasks, register, write_tasks
from django_dbtaskqueue.pipeline.spark import spark_session
from tests.factories import make_task
from tests.pipeline.executors import dying_once
from tests.pipeline.test_source_write import FUTURE, staging_tables, tasks
from tests.support import sql


def test_the_running_session_is_used_and_its_workers_are_this_python_with_this_package(spark: SparkSession) -> None:
    def where(_row: object) -> tuple[str, ...]:
        import pyspark

        import django_dbtaskqueue

        return sys.executable, django_dbtaskqueue.__file__, pyspark.__file__  # compiled, not in an archive of source

    assert spark_session(master="local[7]") is spark and spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.parallelize([1]).map(where).collect() == [where(None)]


def test_rows_are_the_database_s_and_it_takes_the_filters_of_a_query(spark: SparkSession, database: Database) -> None:
    enqueue_many("other", [("a", {"text": 'line\nbreak, "quote", \\ é漢😀'}), ("later", None)])
    (first,) = Task.objects.checkout("other", poller_instance="p", limit=1)
    first.complete("done")
    df = read_tasks(spark, database, status=["COMPLETED", "CREATED"])
    assert df.schema == TASKS
    assert df.orderBy("id").toArrow().to_pylist() == few_tasks(database, TASKS.names, "task").sort_by("id").to_pylist()
    times = F.col("create_time") > F.lit(datetime(2020, 1, 1, tzinfo=UTC))
    chosen = df.where((F.col("id") > first.id) & F.col("status").isin("CREATED", "ERROR") & times)
    chosen = chosen.where(F.col("reference_number").startswith("l"))
    assert [row.reference_number for row in chosen.collect()] == ["later"]
    (condition,) = re.findall(r"Filter \(?(.*)", chosen._jdf.queryExecution().executedPlan().toString())
    assert "StartsWith" in condition and not re.search(r"\bid#|create_time#|status#", condition)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"columns": ["statsu"]}, "Did you mean 'status'"),
    ({"columns": []}, "at least one column"),
    ({"columns": ["id", "id"]}, "none of them twice"),
    ({"table": "tasks"}, "must be one of 'task', 'history', 'attempt'"),
]


def test_a_wrong_question_is_answered_with_the_right_one(spark: SparkSession, pg: Database) -> None:
    for ask, answer in WRONG:
        with pytest.raises(PipelineError, match=answer):
            read_tasks(spark, pg, **ask)


CANARY = "canary-5f0c7d"


def test_a_password_is_seen_nowhere(spark: SparkSession, pg: Database, capfd: pytest.CaptureFixture[str]) -> None:
    """Not in plans, logs, the event log or the list of processes; the option that would show it is refused."""
    user = f"canary_{os.getpid()}"
    sql(f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD '{CANARY}'")
    try:
        secret = Database(pg.vendor, {**pg.conninfo, "user": user, "password": CANARY})
        df = read_tasks(spark, secret, ["id"])
        df.explain(mode="extended")
        assert df.count() == 0
        url = secret.url_without_password.replace(f"{user}@", f"{user}:{CANARY}@")
        with pytest.raises(Exception, match="holds a password") as refused:
            spark.read.format("dbtaskqueue").option("url", url).load().count()
    finally:
        sql(f"DROP ROLE {user}")
    assert f"{user}@" in repr(secret)
    seen = capfd.readouterr()
    assert CANARY not in f"{secret!r} {df.schema} {seen.out} {seen.err} {refused.value}"
    assert CANARY not in everything_written(spark)


def everything_written(spark: SparkSession) -> str:
    events = Path(spark.conf.get("spark.eventLog.dir").removeprefix("file:"))
    logs = [file.read_text(errors="replace") for file in events.rglob("*") if file.is_file()]
    assert logs
    commands = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(process.read_text(errors="replace"))
        except OSError:
            continue  # it has ended
    return " ".join([*logs, *commands, str(spark.sparkContext.getConf().getAll())])


NAMES = ("reference", "payload", "priority", "run_at", "delay", "group", "tag", "ttl", "context", "lease")
SCHEMA = (
    "reference string, payload struct<text string>, priority int, run_at timestamp, delay interval day to second,"
    " `group` string, tag string, ttl interval day to second, context map<string,string>, lease interval day to second"
)


def simple(spark: SparkSession, count: int) -> DataFrame:
    payload = F.to_json(F.struct("id")).alias("payload")
    return spark.range(count).select(F.concat(F.lit("r"), "id").alias("reference"), payload)


def test_the_same_tasks_as_enqueue_many(spark: SparkSession, pg: Database) -> None:
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
        writer.queryName("files").trigger(availableNow=True).start().awaitTermination()  # Spark makes an option of it

    drain()
    noted = [*checkpoint.glob("commits/*1"), *checkpoint.glob("commits/.1.*")]
    assert noted
    for note in noted:
        note.unlink()  # as a driver that died between the commit of the tasks and its own note
    drain()
    assert Task.objects.count() == 30  # the payloads have no reference: nothing but the ledger tells
    assert sorted(UsedReference.objects.values_list("reference", flat=True)) == ["files 0", "files 1"]
    assert staging_tables() == []


ATTACKS = (
    {"where": '[["(SELECT count(*) FROM pg_authid) > 0 AND id", ">", 0]]'},
    {"where": '[["id < 0 UNION ALL SELECT rolname FROM pg_authid WHERE 1", "=", 1]]'},
    {"where": '[["id", "> 0 OR id >", 0]]'},
    {"where": '[[["id"], {}, 0]]'},
    {"snapshot": "00000003-1'; DROP TABLE dbtaskqueue_task; --"},
    {"table": 'task" WHERE id = (SELECT 1) --'},
    {"location": "dbtaskqueue.task'; --"},
    {"slice_ids": "1; DROP TABLE dbtaskqueue_task"},
    {"query": "SELECT rolname FROM pg_authid"},  # an unknown option
)


def test_an_option_is_never_sql(spark: SparkSession, pg: Database) -> None:
    make_task("COMPLETED", queue="a'b")
    register(spark, pg)
    url = {"url": pg.url_without_password}
    for attack in ATTACKS:
        texts = {name: value.replace("\\", "\\\\").replace("'", "\\'") for name, value in (url | attack).items()}
        told = ", ".join(f"{name} '{value}'" for name, value in texts.items())
        with pytest.raises(Exception, match=r"PipelineError|JobOptionError"):
            spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW attack USING dbtaskqueue OPTIONS ({told})")
            spark.sql("SELECT count(*) FROM attack").collect()
    assert spark.read.format("dbtaskqueue").options(**url).load().where('queue_name = "a\'b"').count() == 1
