"""The session, and reading tasks with it: which rows, which columns, which state of the database."""

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.schema import TASKS
from django_dbtaskqueue.pipeline.source import few_tasks, read_tasks
from django_dbtaskqueue.pipeline.spark import spark_session


def test_the_running_session_is_used_and_its_workers_are_this_python_with_this_package(
    spark: SparkSession,
) -> None:
    def where(_row: object) -> tuple[str, str]:
        import django_dbtaskqueue

        return sys.executable, django_dbtaskqueue.__file__

    assert spark_session(master="local[7]") is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
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
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE canary LOGIN SUPERUSER PASSWORD '{CANARY}'")
    try:
        secret = Database(pg.vendor, {**pg.conninfo, "user": "canary", "password": CANARY})
        df = read_tasks(spark, secret, ["id"])
        df.explain(mode="extended")
        assert df.count() == 0
        url = secret.url_without_password.replace("canary@", f"canary:{CANARY}@")
        with pytest.raises(Exception, match="holds a password") as refused:
            spark.read.format("dbtaskqueue").option("url", url).load().count()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP ROLE canary")
    assert "canary@" in repr(secret)
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
