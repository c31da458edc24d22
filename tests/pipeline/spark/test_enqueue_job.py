"""The job ``enqueue``: files in, tasks out, and nothing half-written."""

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError
from pyspark.sql import SparkSession

from django_dbtaskqueue import enqueue as enqueue_task
from django_dbtaskqueue.core.exceptions import CheckFailed, DuplicateTask, JobOptionError, PipelineError
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.models import Task, UsedReference
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source.enqueue_job import Enqueue, _split, mapped, read_input
from django_dbtaskqueue.pipeline.source.files import guessed
from tests.factories import make_task
from tests.pipeline.lakes import DAY, MEANWHILE, archive
from tests.pipeline.spark.test_copy_jobs import replay
from tests.pipeline.test_source_write import FUTURE
from tests.support import output_of


@pytest.fixture
def csv(tmp_path: Path) -> str:
    file = tmp_path / "flights.csv"
    file.write_text("flight,delay,place\nUA1,12,JFK\nUA2,3,EWR\nUA3,,LGA\n")
    return str(file)


def enqueue(spark: SparkSession, database: Database, file: str, **options: Any) -> Mapping[str, Any]:
    given = {"spark": spark, "database": database, "input": file, "queue": "claims", **options}
    return Enqueue().run(Enqueue.context(**given))


def test_rows_become_tasks_as_mapped_each_reference_once(spark: SparkSession, sqlite: Database, csv: str) -> None:
    mapping = ("reference=flight", "payload=*", "priority=CASE place WHEN 'JFK' THEN -1 ELSE 0 END", "tag=place")
    done = enqueue(spark, sqlite, csv, map=mapping, max_attempts=2, where="place <> 'EWR'")
    assert (done["enqueued"], done["ignored"], done["rejected"]) == (2, 0, 0)
    first, last = Task.objects.order_by("reference")
    assert (first.reference, first.priority, first.tag, first.max_attempts) == ("UA1", -1, "JFK", 2)
    assert last.payload == {"flight": "UA3", "delay": None, "place": "LGA"}
    with pytest.raises(DuplicateTask):
        enqueue(spark, sqlite, csv, map=mapping)
    assert Task.objects.count() == 2
    done = enqueue(spark, sqlite, csv, map=mapping, on_duplicate="ignore")
    assert (done["enqueued"], done["ignored"]) == (1, 2)


def references() -> set[str | None]:
    return set(Task.objects.values_list("reference", flat=True))


def stop(stage: str, done: int, total: int) -> None:
    if stage == "enqueueing" and done == 1:
        raise KeyboardInterrupt


@pytest.mark.usefixtures("pg")
def test_a_stopped_load_goes_on_unless_rows_of_finished_chunks_changed(spark: SparkSession, tmp_path: Path) -> None:
    mapping = ("reference=flight", "run_at=now() + interval 1 hour")  # another time for each chunk
    load = {"input": str(tmp_path / "flights.csv"), "queue": "claims", "resume": "flights", "chunk": "1"}

    def write(*flights: str) -> None:
        Path(load["input"]).write_text("\n".join(["flight", *flights]))

    def resumed(**options: str) -> str:  # by the command, on the running session
        words = [word for name, value in {**load, **options}.items() for word in (f"--{name}", value)]
        return output_of("runtaskpipeline", "enqueue", *words, "--map", mapping[0], "--map", mapping[1], "--quiet")

    context = Enqueue.context(database=database_of_alias(None), spark=spark, progress=stop, map=mapping, **load)
    write(*(f"UA{number}" for number in range(20)))
    first, second, third = ([row.flight for row in chunk.collect()] for chunk in _split(read_input(context), 3))
    write(first[0], second[0], third[0])
    with pytest.raises(KeyboardInterrupt):
        Enqueue().run(context)
    for flights, queue, change in (
        ((*first[:2], second[0], third[0]), "claims", "had 3 rows and has 4 now"),
        ((first[1], second[0], third[0]), "claims", "has 3 rows as before"),
        ((first[0], second[0], third[0]), "other", "has 3 rows as before"),
    ):
        write(*flights)
        with pytest.raises(CommandError, match=f"--resume flights .*{change}.* 1 of 1 finished chunks") as caught:
            resumed(queue=queue)
        assert (caught.value.returncode, references()) == (1, {first[0]})
    write(first[0], *second, *third)
    out = resumed(chunk="2")  # other chunks of the same rows are the same load
    assert "chunks: 3" in out and "chunks done before: 1" in out
    assert references() == {first[0], *second, *third} and Task.objects.count() == 1 + len(second) + len(third)
    assert {"chunks done before: 3", "enqueued: 0"} <= {*resumed().splitlines()}


def test_rejects_of_a_stopped_load_are_there_once(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("\n".join(["p", *"abcdefghij"]))
    rejects, kept = tmp_path / "rejects", tmp_path / "kept"
    load = {"map": "priority=p", "rejects": str(rejects), "resume": "x", "chunk": 5}

    def block(stage: str, done: int, total: int) -> None:
        if stage == "enqueueing" and done == 1:
            rejects.rename(kept)
            rejects.mkdir()

    for error, progress in ((KeyboardInterrupt, stop), (IsADirectoryError, block)):
        with pytest.raises(error):
            enqueue(spark, database, str(tmp_path / "x.csv"), progress=progress, **load)
    rejects.rmdir()
    kept.rename(rejects)
    for _ in range(2):
        assert enqueue(spark, database, str(tmp_path / "x.csv"), **load)["rejected"] < 10
        assert sorted(json.loads(line)["value"] for line in rejects.read_text().splitlines()) == [*"abcdefghij"]
        UsedReference.objects.filter(reference__endswith=" 1").delete()  # as a kill before the commit leaves it
        with rejects.open("a") as cut_off:
            cut_off.write('{"queue": ')


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"map": ("reference=flite",)}, r"--map reference=flite: .*Did you mean 'flight'\? The columns are flight"),
    ({"map": ("referenze=flight",)}, r"a task has no 'referenze'\. Did you mean 'reference'"),
    ({"map": ("priority=flight +",)}, r"--map priority=flight \+: "),
    ({"where": "plaze = 1", "map": ("payload=*",)}, "--where: "),
    ({}, r"what is a task\? Give its reference, its payload"),
    ({"queue": None}, "which queue"),
    ({"queue": "claim", "known_queue": ("claims",)}, r"unknown queue 'claim'\. Did you mean 'claims'"),
    ({"map": ("payload=*",), "rejects": f"{__file__}/x"}, "--rejects: .*is not a file that can be written"),
    ({"map": ("payload=*",), "input": __file__, "format": "text", "rejects": __file__}, "--rejects: .* is an input"),
    ({"input": None}, "give either files with --input, or a table with --table"),
]


def test_a_wrong_option_is_explained(spark: SparkSession, csv: str) -> None:
    for options, said in WRONG:
        with pytest.raises(JobOptionError, match=said):
            Enqueue().run(Enqueue.context(spark=spark, **{"input": csv, "queue": "claims", **options}))


def test_mapping_begins_and_ends_in_a_select(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("A", "5", "x")], "reference string, priority string, other string")
    assert mapped(frame, {}).dtypes[:2] == [("reference", "string"), ("priority", "bigint")]
    chosen = mapped(frame, {"delay": "priority", "payload": "reference,other", "context": "'{}'"})
    assert dict(chosen.dtypes)["delay"] == "interval day to second"
    assert chosen.collect()[0]["payload"].asDict() == {"reference": "A", "other": "x"}


def test_the_format_is_in_the_name() -> None:
    assert [guessed([name]) for name in ("a/x.snappy.parquet", "*.csv.gz", "a.ndjson")] == ["parquet", "csv", "json"]
    with pytest.raises(JobOptionError, match="no name says the format of data: give one of csv, json"):
        guessed(["data"])


# -- files: payloads as they were written, rejects with line, column and value, and an honest dry run ------------------
LINES = ['{"a": 1, "n": {"z": 1.50}}', '{"a": "x"}', '{"a": 2.5, "n": [1]}', '{"a": %s}' % ("1" * 43), '{"b": null}']
PAYLOADS = {
    "payload=*": LINES,
    "payload=a,n": [json.dumps({key: json.loads(line).get(key) for key in "an"}) for line in LINES],
    "payload=n": ['{"z": 1.5}', None, "[1]", None, None],
}


@pytest.mark.parametrize(("mapping", "wanted"), PAYLOADS.items(), ids=PAYLOADS)
def test_payloads_of_lines(spark: SparkSession, sqlite: Database, tmp_path: Path, mapping: str, wanted: Any) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(LINES))
    enqueue(spark, sqlite, str(tmp_path / "x.jsonl"), map=(mapping,))
    payloads = [*Task.objects.order_by("pk").values_list("payload", flat=True)]
    assert payloads == [text and json.loads(text) for text in wanted]


def test_a_key_of_two_types_is_not_taken_for_one(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    rows = ((9007199254740993, 1), (9007199254740992, "2"), (0.5, "b"), (1, 1.5))
    (file := tmp_path / "x.jsonl").write_text("".join(f"{json.dumps({'n': n, 'k': k})}\n" for n, k in rows))
    load = {"map": ("reference=k", "priority=k"), "rejects": str(tmp_path / "rejects")}
    with pytest.raises(JobOptionError, match=r'--where: .*"\(k = 1\)".*\("VARIANT" and "INT"\).* cast it'):
        enqueue(spark, sqlite, str(file), where="k = 1", **load)
    for where, enqueued, rejected in (("n = 9007199254740993", {"1"}, 0), ("try_cast(k AS int) IS NULL", {"1"}, 1)):
        assert enqueue(spark, sqlite, str(file), where=where, **load)["rejected"] == rejected
        assert references() == enqueued
    assert enqueue(spark, sqlite, str(file), where="n < 1e16", **load | {"on_duplicate": "ignore"})["rejected"] == 2
    assert references() == {"1", "2"}


def test_keys_that_differ_in_case_are_kept(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert enqueue(spark, sqlite, str(tmp_path / "empty.jsonl"), map=("reference=id",))["enqueued"] == 0
    (tmp_path / "x.jsonl").write_text(f'{{"id": 1, "ID": 2}}\n{{"ID": {"1" * 1100}}}\n{{"{"k" * 50_001}": 4}}')
    rejects = tmp_path / "rejects"
    enqueue(spark, sqlite, str(tmp_path / "x.jsonl"), map=("payload=*", "reference=ID"), rejects=str(rejects))
    assert rejects.read_text().count("longer than Spark reads") == 2
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
,1,,
"""
REASONS = [
    (3, "priority", "high", "priority: 'high' is not a whole number"),
    (4, "run_at", "31.12.2030", "run_at: '31.12.2030' is not a time"),
    (5, "run_at", "12000-01-01", "is not a datetime of the years 2 to 9000"),
    (6, "run_at", "-0044-03-15", "is not a datetime of the years 2 to 9000"),
    (7, "delay", "soon", "delay: 'soon' is not a number of seconds"),
    (8, "priority", "99999", "is not a whole number from -32768 to 32767"),
    (9, "priority", "1.5", "priority: '1.5' is not a whole number"),
    (10, None, "bad,1,2,3,4", "has 5 columns, and the header 4"),
    (11, "reference", "None", "reference: is null"),
]


def test_rejects_have_line_column_value_and_reason(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    file, rejects = tmp_path / "x.csv", tmp_path / "rejects"
    file.write_text(ROWS)
    mapping = ("reference=ref", "priority=p", "run_at=t", "delay=d")
    load: dict[str, Any] = {"map": mapping, "where": "ref IS NULL OR ref <> 'other'", "require_reference": True}
    for dry_run in (True, False):
        with pytest.raises(PipelineError, match=rf"{len(REASONS)} rows cannot .*line 3 of {file}.*--rejects"):
            enqueue(spark, database, str(file), dry_run=dry_run, **load)
    load |= {"rejects": str(rejects), "on_duplicate": "ignore"}
    tried = enqueue(spark, database, str(file), dry_run=True, **load)
    assert not rejects.exists() and not Task.objects.exists()
    assert [*tried.values()][:3] == [*enqueue(spark, database, str(file), **load).values()][:3] == [1, 0, len(REASONS)]
    assert [*Task.objects.values_list("reference", flat=True)] == ["good"]
    found = [json.loads(line) for line in rejects.read_text().splitlines()]
    for one, (line, column, value, reason) in zip(found, REASONS, strict=True):
        assert (one["file"], one["line"], one["column"]) == (str(file), line, column)
        assert str(one["value"]).startswith(value) and reason in one["reason"]
    assert enqueue(spark, database, str(file), dry_run=True, **load)["ignored"] == 1


def test_the_project_s_limit_of_a_payload_holds(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": "%s"}' % ("x" * 100))
    with pytest.raises(PipelineError, match="it takes 108 bytes as JSON and 50 are allowed"):
        enqueue(spark, sqlite, str(tmp_path / "x.jsonl"), map=("payload=*",), payload_max_bytes=50)


TTL = timedelta(minutes=5)


def test_a_task_that_is_refused_now_holds_none_back(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    for reference, payload in (("fine", {}), ("large", {"text": "x" * 100})):
        make_task("ERROR", queue="claims", finish_time=-DAY, reference=reference, payload=payload, **MEANWHILE)
    enqueue_task("claims", "far", run_at=FUTURE, ttl=TTL)
    Task.objects.filter(reference="far").cancel()
    lake, rejects = tmp_path / "lake", tmp_path / "rejects"
    archive(database, lake)
    with pytest.raises(CheckFailed, match=r"1 of these tasks .*claims/large: payload: it takes .*--rejects FILE"):
        replay(spark, database, lake, payload_max_bytes=50)
    far, fine = Task.objects.order_by("reference")
    assert (far.reference, fine.reference, far.expire_time) == ("far", "fine", far.next_process_time + TTL)
    found = replay(spark, database, lake, payload_max_bytes=50, rejects=str(rejects))
    assert (found["already_there"], found["rejected"]) == (2, 1)
    assert json.loads(rejects.read_text())["reference"] == "large"
    with pytest.raises(JobOptionError, match=r"--to: unknown queue 'claim'\. Did you mean 'claims'"):
        replay(spark, database, lake, to="claim", known_queue=["claims"])
