"""Reading tasks with Spark: which rows, which columns, which state of the database."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection
from pyspark.sql import functions as F

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.models import Attempt, Task, TaskHistory
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.schema import ATTEMPTS, HISTORY, TASKS
from django_dbtaskqueue.pipeline.source.source import open_snapshot, read_tasks, register
from django_dbtaskqueue.pipeline.source.source_read import Selection, TaskReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIRST = 'a"quoted",\n\\.text'
ODD = [
    {"reference": FIRST, "payload": {"text": 'line\nbreak, "quote", \\ and é漢😀'}, "priority": -3},
    {"reference": " ", "payload": "", "group": "g"},
    {"reference": None, "payload": None, "tag": "host", "context": {"trace": "1"}},
    {"reference": "NULL", "payload": [1, 2.5, None, True], "ttl": timedelta(hours=1), "lease": timedelta(seconds=90)},
    {"reference": "later", "payload": {}, "delay": timedelta(days=1)},
]


@pytest.fixture
def tasks(database: Database) -> list[dict[str, Any]]:
    """Five odd tasks, one of them finished; as Django sees them."""
    enqueue_many("other", ODD)
    (lease,) = Task.objects.checkout("other", poller_instance="p", tags=["host"], limit=1)
    lease.complete("done")
    finished = datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)
    Task.objects.filter(pk=lease.id).update(finish_time=finished, process_result="two\nlines")
    return list(Task.objects.order_by("id").values())


def rows_of(df: DataFrame) -> list[dict[str, Any]]:
    """All rows, by id. Through Arrow, for ``collect`` gives times without a zone."""
    return sorted(df.toArrow().to_pylist(), key=lambda row: row["id"])


def test_every_column_of_every_task_is_read_as_it_stands(
    spark: SparkSession, database: Database, tasks: list[dict[str, Any]]
) -> None:
    df = read_tasks(spark, database)
    assert df.schema == TASKS
    found = rows_of(df)
    with connection.cursor() as cursor:
        json_text = {"postgresql": "::text", "sqlite": ""}[database.vendor]
        cursor.execute(f"SELECT payload{json_text}, context{json_text} FROM dbtaskqueue_task ORDER BY id")
        texts = cursor.fetchall()
    assert len(found) == len(tasks) == 5
    for row, task, (payload, context) in zip(found, tasks, texts, strict=True):
        expected = {**task, "queue_name": task["queue"], "reference_number": task["reference"]}
        expected |= {"payload": payload, "context": context, "result": '"done"' if task["result"] else None}
        assert row == {name: expected[name] for name in TASKS.names}


def test_columns_are_read_in_the_order_asked_for(
    spark: SparkSession, database: Database, tasks: list[dict[str, Any]]
) -> None:
    df = read_tasks(spark, database, ["status", "id"])
    assert df.columns == ["status", "id"]
    assert {(row.status, row.id) for row in df.collect()} == {(task["status"], task["id"]) for task in tasks}


def test_a_column_of_nulls_has_all_its_rows(
    spark: SparkSession, database: Database, tasks: list[dict[str, Any]]
) -> None:
    assert read_tasks(spark, database, ["parked_by"]).count() == 5


def test_an_empty_table_is_an_empty_frame(spark: SparkSession, database: Database) -> None:
    assert read_tasks(spark, database).collect() == []
    with open_snapshot(database) as snapshot:
        assert read_tasks(spark, database, ["id"], snapshot=snapshot).count() == 0


def test_history_and_attempts_have_schemas_of_their_own(spark: SparkSession, pg: Database) -> None:
    TaskHistory.objects.create(queue="default", task_id=7, status="COMPLETED", payload={"a": 1})
    Attempt.objects.create(queue="default", task_id=7, attempt=1, total_attempt=1, traceback="a\nb")
    history, attempts = read_tasks(spark, pg, table="history"), read_tasks(spark, pg, table="attempt")
    assert (history.schema, attempts.schema) == (HISTORY, ATTEMPTS)
    assert [(row.task_id, row.payload) for row in history.collect()] == [(7, '{"a": 1}')]
    assert [(row.task_id, row.traceback) for row in attempts.collect()] == [(7, "a\nb")]


CHOICES: list[tuple[dict[str, Any], set[str | None]]] = [
    ({"queue": "other"}, {task["reference"] for task in ODD}),
    ({"queue": ["none", "such"]}, set()),
    ({"status": "COMPLETED"}, {FIRST}),
    ({"status": ["CREATED", "ERROR"]}, {task["reference"] for task in ODD} - {FIRST}),
    ({"finished": (datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC), None)}, {FIRST}),
    ({"finished": (None, datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC))}, set()),
    ({"finished": (datetime(2026, 3, 1, 12, 0, 0, 6), None)}, set()),  # without a zone it is UTC
    ({"created": (datetime(2000, 1, 1, tzinfo=UTC), None), "status": "COMPLETED"}, {FIRST}),
]


def test_rows_are_chosen_by_the_database(spark: SparkSession, database: Database, tasks: list[dict[str, Any]]) -> None:
    for options, references in CHOICES:
        df = read_tasks(spark, database, ["reference_number"], **options)
        assert {row.reference_number for row in df.collect()} == references, options


def test_filters_of_a_query_are_handed_to_the_database(
    spark: SparkSession, database: Database, tasks: list[dict[str, Any]]
) -> None:
    third = tasks[2]["id"]
    df = read_tasks(spark, database, ["id", "status", "create_time", "finish_time", "reference_number"])
    chosen = df.where(
        (F.col("id") >= third)
        & F.col("status").isin("CREATED", "ERROR")
        & (F.col("create_time") > F.lit(datetime(2020, 1, 1, tzinfo=UTC)))
        & F.col("reference_number").startswith("l")
    )
    assert [row.reference_number for row in chosen.collect()] == ["later"]
    (condition,) = re.findall(r"Filter \(?(.*)", chosen._jdf.queryExecution().executedPlan().toString())
    assert "StartsWith" in condition and not re.search(r"\bid#|create_time#|status#", condition)
    exact = F.col("finish_time") == F.lit(datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC))
    assert [row.reference_number for row in df.where(exact).collect()] == [FIRST]


def test_partitions_of_a_snapshot_see_one_state(spark: SparkSession, pg: Database) -> None:
    enqueue_many("other", [(str(number), number) for number in range(100)])
    before = dict(Task.objects.values_list("id", "reference"))
    with open_snapshot(pg) as snapshot:
        selection = Selection(pg.tables.task, read_tasks(spark, pg, ["id"]).schema)
        reader = TaskReader(pg, selection, snapshot=snapshot.name, slice_ids=30)
        slices = reader.partitions()
        first = [value for batch in reader.read(slices[0]) for value in batch.column("id").to_pylist()]
        Task.objects.filter(reference__in=["1", "99"]).delete()
        enqueue_many("other", [("new", 1)])
        rest = [value for part in slices[1:] for batch in reader.read(part) for value in batch.column("id").to_pylist()]
        assert len(slices) == 4
        assert sorted(first + rest) == sorted(before)
        df = read_tasks(spark, pg, ["id", "reference_number"], snapshot=snapshot).repartition(2)
        assert {row.id: row.reference_number for row in df.collect()} == before
        assert read_tasks(spark, pg, ["id"]).count() == 99
    with pytest.raises(Exception, match="is gone"):
        df.select("id").collect()


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        ({"columns": ["statsu"]}, "Did you mean 'status'"),
        ({"columns": []}, "at least one column"),
        ({"columns": ["id", "id"]}, "none of them twice"),
        ({"table": "tasks"}, "must be one of 'task', 'history', 'attempt'"),
    ],
)
def test_a_wrong_question_is_answered_with_the_right_one(
    spark: SparkSession, pg: Database, ask: dict[str, Any], answer: str
) -> None:
    with pytest.raises(PipelineError, match=answer):
        read_tasks(spark, pg, **ask)


def test_wrong_options_are_named(spark: SparkSession, pg: Database) -> None:
    register(spark, pg)
    reader = spark.read.format("dbtaskqueue")
    with pytest.raises(Exception, match="The option url is missing"):
        reader.load().count()
    with pytest.raises(Exception, match="Unknown option 'tabel'"):
        reader.option("url", pg.url_without_password).option("tabel", "task").load()
    with pytest.raises(Exception, match="of type bigint, not int"):
        spark.read.format("dbtaskqueue").option("url", pg.url_without_password).schema("id int").load().count()


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
        url = f"postgresql://canary:{CANARY}@{secret.conninfo['host']}:{secret.conninfo['port']}/{secret.conninfo['dbname']}"
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
    """The event log, the settings, and the arguments of every process."""
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
