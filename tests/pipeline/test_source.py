"""Reading tasks as Spark's tasks do: which rows, which columns, which state of the database."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import models
from pyspark.sql import datasource

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.models import Attempt, Task, TaskHistory
from django_dbtaskqueue.pipeline import source
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import ATTEMPTS, HISTORY, TASKS, TaskReader, arrow_schema, few_tasks, schema_of
from tests.pipeline.executors import read
from tests.support import sql

FIRST = 'a"quoted",\n\\.text'
ODD = [
    {"reference": FIRST, "payload": {"text": 'line\nbreak, "quote", \\ and é漢😀'}, "priority": -3},
    {"reference": " ", "payload": "", "group": "g"},
    {"reference": None, "payload": None, "tag": "host", "context": {"trace": "1"}},
    {"reference": "NULL", "payload": [1, 2.5, None, True], "ttl": timedelta(hours=1), "lease": timedelta(seconds=90)},
    {"reference": "later", "payload": {}, "delay": timedelta(days=1)},
]
FINISHED = datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)
OTHERS = {task["reference"] for task in ODD} - {FIRST}


@pytest.fixture
def tasks(database: Database) -> list[dict[str, Any]]:
    """Five odd tasks, one of them finished; as Django sees them."""
    enqueue_many("other", ODD)
    (lease,) = Task.objects.checkout("other", poller_instance="p", tags=["host"], limit=1)
    lease.complete("done")
    Task.objects.filter(pk=lease.id).update(finish_time=FINISHED, process_result="two\nlines")
    return list(Task.objects.order_by("id").values())


def reader(database: Database, *columns: str, slice_ids: int = 2, snapshot: str | None = None) -> TaskReader:
    return TaskReader(source.Selection(database, "task", schema_of("task", columns), snapshot=snapshot), slice_ids)


def test_every_column_of_every_task_is_read_as_it_stands(database: Database, tasks: list[dict[str, Any]]) -> None:
    found = few_tasks(database, TASKS.names, "task")
    assert found is not None and found.schema == arrow_schema(TASKS)
    json_text = {"postgresql": "::text", "sqlite": ""}[database.vendor]
    texts = sql(f"SELECT payload{json_text}, context{json_text} FROM dbtaskqueue_task ORDER BY id")
    rows = found.sort_by("id").to_pylist()
    assert len(rows) == len(tasks) == 5
    for row, task, (payload, context) in zip(rows, tasks, texts, strict=True):
        expected = {**task, "queue_name": task["queue"], "reference_number": task["reference"]}
        expected |= {"payload": payload, "context": context, "result": '"done"' if task["result"] else None}
        assert row == {name: expected[name] for name in TASKS.names}


def test_columns_have_the_order_asked_for_and_nulls_are_rows(database: Database, tasks: list[dict[str, Any]]) -> None:
    assert schema_of("task", iter(["status", "id"])).simpleString() == "struct<status:string,id:bigint>"
    found = read(reader(database, "status", "id", "parked_by"))
    assert found.column_names == ["status", "id", "parked_by"]
    rows = {(status, number) for status, number, _ in zip(*(one.to_pylist() for one in found.columns), strict=True)}
    assert rows == {(task["status"], task["id"]) for task in tasks}
    assert read(reader(database, "parked_by")).to_pylist() == [{"parked_by": None}] * 5


def test_history_and_attempts_have_schemas_of_their_own(database: Database) -> None:
    TaskHistory.objects.create(queue="default", task_id=7, status="COMPLETED", payload={"a": 1})
    Attempt.objects.create(queue="default", task_id=7, attempt=1, total_attempt=1, traceback="a\nb")
    history, attempts = few_tasks(database, HISTORY.names, "history"), few_tasks(database, ATTEMPTS.names, "attempt")
    assert (history.schema, attempts.schema) == (arrow_schema(HISTORY), arrow_schema(ATTEMPTS))
    assert history.select(["task_id", "payload"]).to_pylist()[0]["task_id"] == 7
    assert attempts.select(["task_id", "traceback"]).to_pylist() == [{"task_id": 7, "traceback": "a\nb"}]


CHOICES: list[tuple[dict[str, Any], dict[str, Any], set[str | None]]] = [
    ({"queue_name": "other"}, {}, {FIRST, *OTHERS}),
    ({"queue_name": ["none", "such"]}, {}, set()),
    ({"status": "COMPLETED"}, {}, {FIRST}),
    ({"status": ["CREATED", "ERROR"]}, {}, OTHERS),
    ({}, {"finish_time": (FINISHED, None)}, {FIRST}),
    ({}, {"finish_time": (None, FINISHED)}, set()),
    ({}, {"finish_time": (datetime(2026, 3, 1, 12, 0, 0, 6), None)}, set()),  # without a zone it is UTC
    ({"status": "COMPLETED"}, {"create_time": (datetime(2000, 1, 1, tzinfo=UTC), None)}, {FIRST}),
]


def test_rows_are_chosen_by_the_database(database: Database, tasks: list[dict[str, Any]]) -> None:
    for among, ranges, references in CHOICES:
        found = reader(database, "reference_number")
        found.selection = replace(found.selection, conditions=tuple(source._conditions(among, ranges)))
        assert {*read(found)["reference_number"].to_pylist()} == references, (among, ranges)


def test_filters_of_a_query_are_handed_to_the_database(database: Database, tasks: list[dict[str, Any]]) -> None:
    third, old = tasks[2]["id"], datetime(2020, 1, 1, tzinfo=UTC)
    taken: list[datasource.Filter] = [
        datasource.GreaterThanOrEqual(("id",), third),
        datasource.In(("status",), ("CREATED", "ERROR")),
        datasource.GreaterThan(("create_time",), old),
        datasource.IsNotNull(("reference_number",)),
    ]
    left: list[datasource.Filter] = [datasource.StringStartsWith(("reference_number",), "l")]
    found = reader(database, "id", "status", "create_time", "finish_time", "reference_number")
    assert [*found.pushFilters([*taken, *left])] == left
    assert read(found)["reference_number"].to_pylist() == ["NULL", "later"]
    exact = reader(database, "finish_time", "reference_number")
    assert [*exact.pushFilters([datasource.EqualTo(("finish_time",), FINISHED)])] == []
    assert read(exact)["reference_number"].to_pylist() == [FIRST]


def test_partitions_of_a_snapshot_see_one_state(pg: Database) -> None:
    with source.open_snapshot(pg) as snapshot:
        assert read(reader(pg, "id", snapshot=snapshot.name)).num_rows == 0
    enqueue_many("other", [(str(number), number) for number in range(100)])
    before = set(Task.objects.values_list("id", flat=True))
    with source.open_snapshot(pg) as snapshot:
        found = reader(pg, "id", snapshot=snapshot.name, slice_ids=30)
        slices = found.partitions()
        first = read(found, slices[0])
        Task.objects.filter(reference__in=["1", "99"]).delete()
        enqueue_many("other", [("new", 1)])
        rest = read(found, *slices[1:])
        assert len(slices) == 4
        assert sorted([*first["id"].to_pylist(), *rest["id"].to_pylist()]) == sorted(before)
        assert read(reader(pg, "id")).num_rows == 99
    with pytest.raises(PipelineError, match="is gone"):
        read(found, slices[0])


KINDS = dict.fromkeys(("CharField", "TextField", "JSONField"), "string")
KINDS |= {"BigAutoField": "bigint", "BigIntegerField": "bigint", "IntegerField": "int", "SmallIntegerField": "smallint"}
KINDS |= {"DateTimeField": "timestamp", "FloatField": "double", "BooleanField": "boolean"}


@pytest.mark.parametrize(("table", "model"), [("task", Task), ("history", TaskHistory), ("attempt", Attempt)])
def test_every_column_is_one_of_the_model_s_and_of_its_type(table: str, model: type[models.Model]) -> None:
    columns = {field.column: KINDS[field.get_internal_type()] for field in model._meta.concrete_fields}
    for field in source.SCHEMAS[table]:
        assert field.dataType.simpleString() == columns[field.name], field.name
