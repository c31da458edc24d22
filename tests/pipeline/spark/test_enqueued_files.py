"""``enqueue`` of files: payloads as they were written, rejects with line, column and value, and an honest dry run."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.database import Database
from tests.pipeline.spark.test_enqueue_job import enqueue

LINES = ['{"a": 1, "n": {"z": 1.50}}', '{"a": "x"}', '{"a": 2.5, "n": [1]}', '{"a": %s}' % ("1" * 43), '{"b": null}']


@pytest.mark.parametrize(
    ("mapping", "wanted"),
    [
        ("payload=*", LINES),
        (
            "payload=a,n",
            [json.dumps({"a": json.loads(line).get("a"), "n": json.loads(line).get("n")}) for line in LINES],
        ),
        ("payload=n", ['{"z": 1.5}', None, "[1]", None, None]),
    ],
)
def test_payloads_of_json_lines_are_the_lines_own(
    spark: SparkSession, sqlite: Database, tmp_path: Path, mapping: str, wanted: list[str | None]
) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(LINES))
    enqueue(spark, sqlite, str(tmp_path / "x.jsonl"), map=(mapping,))
    payloads = [*Task.objects.order_by("pk").values_list("payload", flat=True)]
    assert payloads == [text and json.loads(text) for text in wanted]


def test_keys_that_differ_in_case_are_kept(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 1, "ID": 2}')
    enqueue(spark, sqlite, str(tmp_path / "x.jsonl"), map=("payload=*", "reference=ID"))
    assert (Task.objects.get().payload, Task.objects.get().reference) == ({"id": 1, "ID": 2}, "2")


ROWS = """ref,p,t,d
good,1,2030-01-01,5
bad,high,,
bad,,31.12.2030,
bad,,12000-01-01,
bad,,-0044-03-15,
bad,,,soon
bad,99999,,
bad,1.5,,
bad,1,2,3,4
"""
REASONS = [
    (3, "priority", "high", "priority: 'high' is not a whole number"),
    (4, "run_at", "31.12.2030", "run_at: '31.12.2030' is not a time"),
    (5, "run_at", "12000-01-01", "is not a time of the years 2 to 9000"),
    (6, "run_at", "-0044-03-15", "is not a time of the years 2 to 9000"),
    (7, "delay", "soon", "delay: 'soon' is not a number of seconds"),
    (8, "priority", "99999", "is not a whole number from -32768 to 32767"),
    (9, "priority", "1.5", "priority: '1.5' is not a whole number"),
    (10, None, "bad,1,2,3,4", "has 5 columns, and the header 4"),
]


def test_rejects_have_line_column_value_and_reason(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    file, rejects = tmp_path / "x.csv", tmp_path / "rejects"
    file.write_text(ROWS)
    load: dict[str, Any] = {"map": ("reference=ref", "priority=p", "run_at=t", "delay=d"), "where": "ref <> 'other'"}
    with pytest.raises(PipelineError, match=rf"{len(REASONS)} rows cannot be enqueued.*line 3 of {file}.*--rejects"):
        enqueue(spark, database, str(file), **load)
    load |= {"rejects": str(rejects), "on_duplicate": "ignore"}
    tried = enqueue(spark, database, str(file), dry_run=True, **load)
    assert not rejects.exists() and not Task.objects.exists()
    done = enqueue(spark, database, str(file), **load)
    assert [*tried.values()][:3] == [*done.values()][:3] == [1, 0, len(REASONS)]
    assert [*Task.objects.values_list("reference", flat=True)] == ["good"]
    found = [json.loads(line) for line in rejects.read_text().splitlines()]
    for one, (line, column, value, reason) in zip(found, REASONS, strict=True):
        assert (one["file"], one["line"], one["column"]) == (str(file), line, column)
        assert str(one["value"]).startswith(value) and reason in one["reason"]
    assert enqueue(spark, database, str(file), dry_run=True, **load)["ignored"] == 1


def test_the_project_s_limit_of_a_payload_holds(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": "%s"}' % ("x" * 100))
    load: dict[str, Any] = {"map": ("payload=*",), "payload_max_bytes": 50}
    with pytest.raises(PipelineError, match="it takes 108 bytes as JSON and 50 are allowed"):
        enqueue(spark, sqlite, str(tmp_path / "x.jsonl"), **load)
