"""The job ``enqueue``: files in, tasks out, and nothing half-written."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import CommandError, call_command

from django_dbtaskqueue.core.exceptions import DuplicateTask, JobOptionError, PipelineError
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.source.enqueue_job import Enqueue, _split, guessed, mapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from django_dbtaskqueue.pipeline.database import Database

FLIGHTS = "flight,delay,place\nUA1,12,JFK\nUA2,3,EWR\nUA3,,LGA\n"


@pytest.fixture
def csv(tmp_path: Path) -> str:
    file = tmp_path / "flights.csv"
    file.write_text(FLIGHTS)
    return str(file)


def enqueue(
    spark: SparkSession, database: Database, file: str, *, dry_run: bool = False, **options: Any
) -> Mapping[str, Any]:
    context = Enqueue.context(
        spark=spark, database=database, dry_run=dry_run, **{"input": file, "queue": "claims", **options}
    )
    return Enqueue().run(context)


def test_rows_become_tasks_as_mapped(spark: SparkSession, sqlite: Database, csv: str) -> None:
    mapping = ("reference=flight", "payload=*", "priority=CASE place WHEN 'JFK' THEN -1 ELSE 0 END", "tag=place")
    done = enqueue(spark, sqlite, csv, map=mapping, max_attempts=2)
    assert (done["enqueued"], done["ignored"], done["rejected"]) == (3, 0, 0)
    first, _, last = Task.objects.order_by("reference")
    assert (first.reference, first.priority, first.tag, first.max_attempts) == ("UA1", -1, "JFK", 2)
    assert last.payload == {"flight": "UA3", "delay": None, "place": "LGA"}


def typed(*words: object) -> str:
    """Run the job as its command does, on the running session; return its output."""
    out = io.StringIO()
    call_command("runtaskpipeline", "enqueue", *map(str, words), "--quiet", stdout=out)
    return out.getvalue()


@pytest.mark.usefixtures("spark", "pg")
def test_a_load_whose_input_has_changed_says_what_changed_and_adds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "flights.csv"
    file.write_text(FLIGHTS)
    words = ["--input", file, "--queue", "claims", "--map", "payload=*", "--resume", "flights"]
    assert "enqueued: 3" in typed(*words)
    assert "enqueued: 0" in typed(*words, "--chunk", 1), "other chunks of the same rows are the same load"
    for rows, change in {
        f"{FLIGHTS}UA4,1,JFK\n": "had 3 rows and has 4 now",
        FLIGHTS.replace("12", "13"): "has 3 rows as before",
    }.items():
        file.write_text(rows)
        with pytest.raises(CommandError, match=f"--resume flights .*{change}.* 1 of 1 finished chunks") as caught:
            typed(*words)
        assert caught.value.returncode == 1
        assert Task.objects.count() == 3
    file.write_text(FLIGHTS)
    with pytest.raises(CommandError, match="1 of 1 finished chunks"):
        typed(*words, "--queue", "other")
    assert "enqueued: 0" in typed(*words)


@pytest.mark.usefixtures("spark", "pg")
def test_a_stopped_load_goes_on_with_new_rows_of_chunks_that_are_not_done(csv: str, spark: SparkSession) -> None:
    load = {"input": csv, "queue": "claims", "map": ("reference=flight",), "chunk": 1, "resume": "flights"}

    def stop_after_one(stage: str, done: int, total: int) -> None:
        if stage == "enqueueing" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Enqueue().run(Enqueue.context(spark=spark, database=database_of_alias(None), progress=stop_after_one, **load))
    before = set(Task.objects.values_list("reference", flat=True))
    late = spark.createDataFrame([(f"UA{number}",) for number in range(4, 9)], "reference string")
    rows = [f"{row.reference},0,LGA" for chunk in [*_split(late, 3)][1:] for row in chunk.collect()]
    with Path(csv).open("a") as more:
        more.write("\n".join(rows))
    out = typed("--input", csv, "--queue", "claims", "--map", "reference=flight", "--resume", "flights")
    assert "chunks: 3" in out and "chunks done before: 1" in out
    found = Counter(Task.objects.values_list("reference", flat=True))
    assert found == Counter({"UA1", "UA2", "UA3"} | {row.split(",")[0] for row in rows})
    assert len(before) < 3 and before <= set(found)
    again = typed("--input", csv, "--queue", "claims", "--map", "reference=flight", "--resume", "flights")
    assert "chunks done before: 3" in again and "enqueued: 0" in again


def test_a_taken_reference_is_an_error_or_ignored(spark: SparkSession, pg: Database, csv: str) -> None:
    enqueue(spark, pg, csv, map=("reference=flight",), where="place <> 'LGA'")
    with pytest.raises(DuplicateTask):
        enqueue(spark, pg, csv, map=("reference=flight",))
    assert Task.objects.count() == 2
    done = enqueue(spark, pg, csv, map=("reference=flight",), on_duplicate="ignore")
    assert (done["enqueued"], done["ignored"]) == (1, 2)


def test_rows_that_cannot_be_tasks_are_set_aside_or_stop_the_job(
    spark: SparkSession, pg: Database, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "A", "body": "{\\"a\\": 1}"}\n{"id": "B", "body": "{"}\n{"id": null, "body": "2"}\n')
    load = {"map": ("reference=id", "payload=body"), "require_reference": True}
    for dry_run in (True, False):
        with pytest.raises(PipelineError, match="payload: not JSON"):
            enqueue(spark, pg, str(file), dry_run=dry_run, **load)
    assert not Task.objects.exists()

    rejects = tmp_path / "rejects.jsonl"
    tried = enqueue(spark, pg, str(file), dry_run=True, rejects=str(rejects), **load)
    assert (tried["would_enqueue"], tried["rejected"]) == (1, 2)
    done = enqueue(spark, pg, str(file), rejects=str(rejects), **load)
    assert (done["enqueued"], done["rejected"]) == (1, 2)
    assert Task.objects.get().payload == {"a": 1}
    lines = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert {line["reference"] for line in lines} == {"B", None}
    assert all(line["reason"] for line in lines)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"map": ("reference=flite",)}, r"--map reference=flite: .*Did you mean 'flight'\? The columns are flight"),
    ({"map": ("referenze=flight",)}, r"a task has no 'referenze'\. Did you mean 'reference'"),
    ({"map": ("priority=flight +",)}, r"--map priority=flight \+: "),
    ({"where": "plaze = 1", "map": ("payload=*",)}, "--where: "),
    ({}, r"what is a task\? Give its reference, its payload"),
    ({"queue": None}, "which queue"),
    ({"queue": "claim", "known_queue": ("claims",)}, r"unknown queue 'claim'\. Did you mean 'claims'"),
    ({"input": None}, "give either files with --input, or a table with --table"),
]


def test_a_wrong_option_is_explained(spark: SparkSession, csv: str) -> None:
    for options, said in WRONG:
        with pytest.raises(JobOptionError, match=said):
            Enqueue().run(Enqueue.context(spark=spark, **{"input": csv, "queue": "claims", **options}))


def test_mapping_begins_and_ends_in_a_select(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("A", "5", "x")], "reference string, priority string, other string")
    assert mapped(frame, {}).dtypes == [("reference", "string"), ("priority", "int")]
    chosen = mapped(frame, {"delay": "priority", "payload": "reference,other", "context": "'{}'"})
    assert dict(chosen.dtypes)["delay"] == "interval day to second"
    assert chosen.collect()[0]["payload"].asDict() == {"reference": "A", "other": "x"}


def test_the_format_is_in_the_name(tmp_path: Path) -> None:
    (tmp_path / "part-0.snappy.parquet").touch()
    assert guessed([str(tmp_path)]) == "parquet"
    assert guessed(["a/*.csv.gz"]) == "csv"
    assert guessed(["a.ndjson"]) == "json"
    with pytest.raises(JobOptionError, match="no name says the format of data: give one of csv, json"):
        guessed(["data"])
