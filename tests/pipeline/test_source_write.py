"""Writing tasks with Spark: the same tasks as ``enqueue_many`` would make, all or none, each once."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from django.db import connection, transaction
from pyspark.sql.types import DataType, DoubleType, IntegerType, StringType, StructField, StructType

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.core.exceptions import DuplicateTask, PipelineError
from django_dbtaskqueue.models import Task, UsedReference
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import TaskSource, schema_of, staging, write_tasks
from django_dbtaskqueue.pipeline.source.staging import Plan, Rules, fill, finish, open_staging
from tests.pipeline.executors import ThisProcess
from tests.support import PATIENCE, actors, blocked, until

TEXT, TIME, LENGTH = pa.string(), pa.timestamp("us", "UTC"), pa.duration("us")
COLUMNS: dict[str, pa.DataType] = {
    "queue": TEXT, "reference": TEXT, "payload": TEXT, "priority": pa.int32(), "run_at": TIME, "delay": LENGTH,
    "group": TEXT, "tag": TEXT, "ttl": LENGTH, "context": TEXT, "lease": LENGTH,
}  # fmt: skip
FUTURE = datetime(2100, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
ITEMS: list[dict[str, Any]] = [
    {"reference": 'q"\n\\.', "payload": {"text": 'line\nbreak, "quote", \\ é漢😀'}, "priority": -3},
    {"reference": "NULL", "payload": "", "tag": "host", "context": {"trace": "1"}},
    {"reference": None, "payload": None},
    {"reference": "a1", "payload": [1, 2.5, None, True], "group": "a", "priority": 5},
    {"reference": "a2", "payload": {}, "group": "a"},
    {"reference": "b1", "payload": 0, "group": "b", "run_at": FUTURE, "ttl": timedelta(hours=1)},
    {"reference": "b2", "payload": 0, "group": "b", "run_at": FUTURE, "delay": timedelta(seconds=1.5)},
    {"reference": "late", "payload": False, "run_at": FUTURE, "lease": timedelta(seconds=90)},
]
SAME = (
    "reference", "status", "attempt", "total_attempt", "max_attempts", "priority", "payload", "payload_type",
    "context", "group_key", "tag", "lease_seconds", "expire_time", "parked_by", "finish_time",
)  # fmt: skip


def frame(*batches: list[dict[str, Any]]) -> Any:
    names = {name for batch in batches for row in batch for name in row}
    schema = pa.schema([(name, kind) for name, kind in COLUMNS.items() if name in names])
    return ThisProcess([pa.RecordBatch.from_pylist(batch, schema) for batch in batches])


def in_json(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("payload", "context")
    return [item | {name: json.dumps(item[name]) for name in names if item.get(name) is not None} for item in items]


def simple(count: int, prefix: str = "r") -> list[dict[str, Any]]:
    return [{"reference": f"{prefix}{number}", "payload": f'{{"n": {number}}}'} for number in range(count)]


def tasks(queue: str) -> dict[str | None, dict[str, Any]]:
    found = {}
    for task in Task.objects.filter(queue=queue).order_by("id"):
        values = {name: getattr(task, name) for name in SAME}
        due = None if task.next_process_time.year < 2100 else task.next_process_time
        found[task.reference] = {**values, "due": due, "in_line": task.ready_time is not None}
    return found


def staging_tables() -> list[str]:
    with connection.cursor() as cursor:
        return [name for name in connection.introspection.table_names(cursor) if "_stg_" in name]


def test_the_same_tasks_as_enqueue_many(database: Database) -> None:
    enqueue_many("work", ITEMS)
    report = write_tasks(frame(in_json(ITEMS[:3]), in_json(ITEMS[3:])), database, queue="other", max_attempts=3)
    assert (report.enqueued, report.ignored, report.rejects, report.repeated) == (8, 0, (), False)
    assert (tasks("other"), staging_tables()) == (tasks("work"), [])


def test_a_taken_reference_and_nothing_is_written(database: Database) -> None:
    held = enqueue("other", "r3", {"mine": True})
    with pytest.raises(DuplicateTask, match=rf"'r3' is already taken in queue 'other' by task {held.pk} \(CREATED\)"):
        write_tasks(frame(simple(10)), database, queue="other")
    with pytest.raises(DuplicateTask, match="'x0' is already taken"):
        write_tasks(frame(simple(2, "x"), simple(2, "x")), database, queue="other")
    assert (Task.objects.count(), staging_tables()) == (1, [])
    report = write_tasks(frame(simple(10), simple(10)), database, queue="other", on_duplicate="ignore", priority=4)
    assert set(Task.objects.exclude(pk=held.pk).values_list("priority", flat=True)) == {4}
    assert (report.enqueued, report.ignored) == (9, 11)
    held.refresh_from_db()
    assert held.payload == {"mine": True}


SECRET = "c4n4ry"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"payload": "{"}, "payload: not JSON"),
    ({"payload": '"\\u0000"'}, "NUL"),
    ({"payload": "NaN"}, "payload: "),
    ({"payload": f'[{{"k": 1, "password": "{SECRET}"}}'}, "payload: not JSON"),
    ({"context": f'["token", "{SECRET}"]'}, 'context: is ["token", "•••'),
    ({"payload": "[" * 101 + "]" * 101}, "nested deeper than 100"),
    ({"reference": ""}, "reference: '' is not text of 1 to 200"),
    ({"reference": "x" * 201}, "is not text of 1 to 200"),
    ({"tag": "a\0b"}, "tag: "),
    ({"priority": 40000}, "priority: 40000 is not a whole number from -32768 to 32767"),
    ({"context": "[1]"}, "context: is [1], and must be a JSON object"),
    ({"lease": timedelta(0)}, "lease: 0:00:00 is not a timedelta from 100 ms"),
    ({"lease": timedelta(milliseconds=99)}, "lease: 0:00:00.099000 is not a timedelta from 100 ms"),
    ({"delay": timedelta(seconds=-1)}, "is not a timedelta from zero"),
    ({"queue": "nowhere"}, "queue: 'nowhere' is unknown. Known: other, work"),
    ({"queue": None}, "queue: is null"),
    ({"reference": None}, "reference: is null"),
]


def test_bad_rows_are_refused_or_returned_with_the_reason(database: Database) -> None:
    good = {"queue": "other", "payload": "{}"}
    rows = [{**good, "reference": str(number), **bad} for number, (bad, _reason) in enumerate(BAD)]
    rows.append({**good, "reference": "good"})
    options: dict[str, Any] = {"queues": ["other", "work"], "require_reference": True}
    with pytest.raises(PipelineError, match=rf"{len(BAD)} rows cannot be enqueued .*error.*, so nothing was"):
        write_tasks(frame(rows), database, **options)
    assert (Task.objects.count(), staging_tables()) == (0, [])
    report = write_tasks(frame(rows), database, on_invalid="reject", **options)
    assert (report.enqueued, report.rejected) == (1, len(BAD))
    for reject, row, (_bad, reason) in zip(report.rejects, rows, BAD, strict=False):
        assert (reject.queue, reject.reference) == (row["queue"], row["reference"])
        assert reason in reject.reason and SECRET not in str(reject)
    assert Task.objects.get().reference == "good"


UNFIT: dict[str, tuple[str, DataType]] = {
    r"'refrence', which is no argument of enqueue.*Did you mean 'reference'": ("refrence", StringType()),
    r"'payload' is of type int, and must be string or struct or .*: use to_json\(col\)": ("payload", IntegerType()),
    "'delay' is of type double, and must be daytimeinterval: use make_dt_interval": ("delay", DoubleType()),
    "Which queue": ("reference", StringType()),
}


def test_a_frame_that_does_not_fit_is_refused() -> None:
    for answer, column in UNFIT.items():
        with pytest.raises(PipelineError, match=answer):
            staging.check_schema(StructType([StructField(*column)]), None)


def test_heads_of_groups_after_a_write_beside_tasks_that_are_there(database: Database) -> None:
    """A task at work stays the head, and one of lower priority gives way."""
    before = [{"reference": f"{group}0", "payload": None, "group": group, "priority": 0} for group in ("busy", "free")]
    after = [{"reference": f"{group}1", "payload": None, "group": group, "priority": -1} for group in ("busy", "free")]
    for queue in ("work", "other"):
        enqueue_many(queue, before[:1])
        assert Task.objects.checkout(queue, poller_instance="p")
        enqueue_many(queue, before[1:])
    enqueue_many("work", after)
    write_tasks(frame(in_json(after)), database, queue="other", max_attempts=3)
    assert tasks("other") == tasks("work")
    assert [ref for ref, task in tasks("other").items() if task["in_line"]] == ["busy0", "free1"]


def test_a_task_does_not_replace_a_head_that_is_just_being_taken(pg: Database) -> None:
    enqueue("other", group="a")
    urgent = frame([{"payload": "{}", "group": "a", "priority": -1}])
    with actors(1) as (other,):
        with transaction.atomic():
            assert Task.objects.checkout("other", poller_instance="p")
            written = other.do(write_tasks, urgent, pg, queue="other")
            until(blocked)
        assert written.result(PATIENCE).enqueued == 1
    assert Task.objects.checkout("other", poller_instance="p") == []


def test_a_write_with_a_name_is_done_once(database: Database) -> None:
    df = frame([{"payload": "{}"}] * 5)
    assert write_tasks(df, database, queue="other", once="import").enqueued == 5
    again = write_tasks(df, database, queue="other", once="import")
    assert (again.enqueued, again.repeated) == (0, True)
    assert write_tasks(df, database, queue="other", once="import", batch=1).enqueued == 5
    assert sorted(UsedReference.objects.values_list("reference", flat=True)) == ["import 0", "import 1"]
    assert (Task.objects.count(), staging_tables()) == (10, [])


def test_pollers_are_woken_after_the_commit(pg: Database) -> None:
    with pg.connect() as listener:
        listener.execute("LISTEN dbtaskqueue")
        write_tasks(frame(simple(5)), pg, queue="other")
        (note,) = listener.notifies(timeout=PATIENCE, stop_after=1)
        assert note.payload == "other"


def batch_of(*references: str) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pydict({"reference": pa.array(references, pa.string())})]


def test_rows_of_an_attempt_that_does_not_count_are_left_behind(database: Database) -> None:
    """An executor that dies after its work, or a second try beside a slow one: staged twice, moved once."""
    plan = Plan(database, open_staging(database), Rules(queue="other"))
    fill(plan, batch_of("a", "b"), 1)
    assert finish(plan, [fill(plan, batch_of("a", "b"), 2)]).enqueued == 2
    assert (Task.objects.count(), staging_tables()) == (2, [])


@pytest.mark.parametrize("ignore", [False, True])
def test_a_write_whose_staged_rows_were_lost_fails(database: Database, ignore: bool) -> None:
    """PostgreSQL empties a staging table when it recovers from a crash."""
    plan = Plan(database, open_staging(database), Rules(queue="other"), ignore=ignore, once=("import", 0))
    part = fill(plan, batch_of("a", "b"), 1)
    with database.open() as link:
        link.run(f"DELETE FROM {plan.table} WHERE reference_number = 'b'")
    with pytest.raises(PipelineError, match=r"has lost staged rows.*Write them again"):
        finish(plan, [part])
    assert (Task.objects.count(), UsedReference.objects.count(), staging_tables()) == (0, 0, [])


@pytest.fixture
def options(database: Database, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options of the data source, which knows the database's password."""
    url = database.url_without_password
    monkeypatch.setattr(TaskSource, "known", {(database.location, url): database})
    return {"url": url, "queue": "other"}


def test_a_data_source_s_writer_leaves_out_what_is_taken_or_all(options: dict[str, str]) -> None:
    for count in (2, 3):
        rows = frame(simple(count))
        writer = TaskSource({**options, "on_duplicate": "ignore"}).writer(rows.schema, overwrite=False)
        writer.commit([writer.write(iter(rows.batches))])
        assert (Task.objects.count(), staging_tables()) == (count, [])
    failed, taken = (TaskSource(options).writer(rows.schema, overwrite=False) for _ in range(2))
    failed.abort([failed.write(iter(rows.batches))])
    with pytest.raises(DuplicateTask):
        taken.commit([taken.write(iter(rows.batches))])
    assert (Task.objects.count(), staging_tables()) == (3, [])


WHERE = ("id > 1", "7", '[["id", ">"]]', '[["id", "=", null]]', '[["status", "=", [""]]]', '[["id", "in", 1]]')


def test_wrong_options_of_a_data_source_are_named(options: dict[str, str]) -> None:
    schema, place = StructType([StructField("id", IntegerType())]), {"url": options["url"]}
    for given, ask, answer in (
        ({}, lambda source: source.database, "The option url is missing"),
        (options, lambda source: source.reader(schema), r"A reader takes no 'queue'\. It takes table, where"),
        ({**options, "qeue": ""}, lambda source: source.writer(schema, overwrite=False), "Did you mean 'queue'"),
        (place, lambda source: source.reader(schema), "of type bigint, not int"),
        (options, lambda source: source.writer(schema, overwrite=True), "Tasks are never overwritten"),
        (options, lambda source: source.streamWriter(schema, overwrite=False), "The option once is missing"),
    ):
        with pytest.raises(PipelineError, match=answer):
            ask(TaskSource(given))
    for name, value in (("slice_ids", "0"), ("slice_ids", "x"), *(("where", text) for text in WHERE)):
        with pytest.raises(PipelineError, match=r"--(slice-ids: '.' is not a whole number|where: '.*' is not JSON of)"):
            TaskSource({**place, name: value}).reader(schema_of("task", ["id"]))


def test_a_micro_batch_that_is_run_again_adds_nothing(options: dict[str, str]) -> None:
    rows = frame([{"payload": "{}"}] * 5)

    def writer() -> staging.TaskWriter:
        return TaskSource({**options, "once": "a"}).streamWriter(rows.schema, overwrite=False)

    for number, count in ((0, 5), (0, 5), (1, 10)):
        staged = writer().write(iter(rows.batches))  # Spark makes one for its tasks, and another one for the commit
        writer().commit([staged], number)
        assert Task.objects.count() == count
    writer().abort([writer().write(iter(rows.batches))], 2)
    writer().commit([], 3)
    assert (Task.objects.count(), staging_tables()) == (10, [])


def test_what_a_killed_driver_leaves_is_swept(postgres_process_database: Any, pg: Database) -> None:
    program = (
        "import os, signal, pyarrow as pa\n"
        "from django_dbtaskqueue.pipeline.database import Database\n"
        "from django_dbtaskqueue.pipeline.source.staging import Plan, Rules, fill, open_staging\n"
        "database = Database.from_url(os.environ['DATABASE_URL'])\n"
        "plan = Plan(database, open_staging(database), Rules(queue='other'))\n"
        "fill(plan, [pa.RecordBatch.from_pydict({'reference': pa.array(['a'])})], 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=postgres_process_database.env, timeout=PATIENCE)
    assert done.returncode == -9
    (left,) = staging_tables()
    assert staging.sweep_staging(pg) == []
    with psycopg.connect(**pg.conninfo) as writer:
        writer.execute(f'LOCK TABLE "{left}" IN ROW EXCLUSIVE MODE')
        assert staging.sweep_staging(pg, older_than=timedelta(0)) == []
    assert staging.sweep_staging(pg, older_than=timedelta(0)) == [left]
    assert (Task.objects.count(), staging_tables()) == (0, [])
