"""``archive``: finished tasks move to the lake, and nothing is lost or doubled, whatever happens on the way."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from deltalake import DeltaTable
from django.db import transaction
from django.db.models.functions import Now
from pyspark import TaskContext
from pyspark.sql import functions as F

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.core.exceptions import CheckFailed, LakeError, PipelineError
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies
from django_dbtaskqueue.models import ArchiveBatch, Attempt, Hold, Task, TaskHistory
from django_dbtaskqueue.pipeline.lake import Lake, read_lake
from django_dbtaskqueue.pipeline.lake.archive_job import Archive
from django_dbtaskqueue.pipeline.lake.export import Export, RowWriter
from django_dbtaskqueue.pipeline.schema import TASKS
from tests.factories import make_task
from tests.pipeline.lakes import DAY, MEANWHILE, Census, archive, fill, flip, ids
from tests.support import PATIENCE, actors, blocked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from django_dbtaskqueue.pipeline.database import Database


def test_finished_tasks_and_their_attempts_move_to_the_lake(
    spark: SparkSession, database: Database, folder: Path
) -> None:
    fill()
    waiting = make_task("CREATED")
    before = Census.of(folder)

    done = archive(spark, database, folder)

    assert Census.of(folder) == before
    assert [task.pk for task in Task.objects.all()] == [waiting.pk]
    assert not TaskHistory.objects.exists()
    assert not Attempt.objects.exists()
    assert done["tasks"] == 12
    assert done["attempts"] == 3
    assert set(ArchiveBatch.objects.values_list("state", flat=True)) == {"closed"}
    rows = read_lake(spark, folder, database=database).orderBy("id").collect()
    errors = [row for row in rows if row.status == "ERROR"]
    assert {(row.location, row.queue_name) for row in rows} == {
        ("dbtaskqueue.task", "parcels"),
        ("dbtaskqueue.task", "a/b=c %d"),
    }
    assert all(row.finished_date == row.finish_time.date() for row in rows)
    assert {row.payload for row in errors} == {'{"city": "Kyiv"}'}
    attempts = read_lake(spark, folder, table="attempts").collect()
    assert {row.task_id for row in attempts} == {row.id for row in errors}


def test_a_failed_task_stays_while_another_waits_for_it(spark: SparkSession, database: Database, folder: Path) -> None:
    """If it left, its child would start as though it had completed."""
    bad = make_task("ERROR", queue="work", finish_time=-2 * DAY, **MEANWHILE)
    child = enqueue("work", after=bad)
    assert archive(spark, database, folder)["tasks"] == 0
    assert Hold.objects.filter(task_id=child.pk).exists()

    Task.objects.filter(pk=child.pk).delete()
    dependencies.sweep_missing(Session.on("default"), 0)
    assert archive(spark, database, folder)["tasks"] == 1


def test_delta_readers_read_the_same(spark: SparkSession, pg: Database, folder: Path) -> None:
    fill()
    expected = {(task.pk, task.queue, task.status, task.finish_time, task.total_attempt) for task in Task.objects.all()}
    archive(spark, pg, folder, source="task")

    with duckdb.connect() as reader:
        reader.register("tasks", DeltaTable(str(folder / "tasks")).to_pyarrow_dataset())
        reader.execute("SET TimeZone = 'UTC'")
        rows = reader.execute("SELECT id, queue_name, status, epoch_us(finish_time), total_attempt FROM tasks")
        found = {(row[0], row[1], row[2], row[3], row[4]) for row in rows.fetchall()}
        days = reader.execute("SELECT bool_and(finished_date = finish_time::date) FROM tasks").fetchone()
    assert found == {(a, b, c, round(d.timestamp() * 1_000_000), e) for a, b, c, d, e in expected}
    assert days == (True,)
    frame = DeltaTable(str(folder / "attempts")).to_pandas()
    assert set(frame["task_id"]) == {one for one, _queue, status, *_ in expected if status == "ERROR"}


@pytest.mark.slow
def test_a_task_changed_meanwhile_stays_and_does_not_count_in_the_lake(
    spark: SparkSession, pg: Database, folder: Path
) -> None:
    fill()
    again, flipped, held = Task.objects.filter(status="ERROR").order_by("pk")[:3]
    before = Census.of(folder)

    def hold(locked: Any, free: Any) -> None:
        with transaction.atomic():
            Task.objects.select_for_update().get(pk=held.pk)
            locked.set()
            assert free.wait(PATIENCE)

    locked, free = threading.Event(), threading.Event()
    with actors(1) as (operator,):

        def meddle(step: str, _done: int, _total: int) -> None:
            if step == "delete" and not locked.is_set():
                assert Task.objects.filter(pk=again.pk).reprocess() == 1
                assert Task.objects.filter(pk=flipped.pk).mark_poison() == 1
                assert Task.objects.filter(pk=flipped.pk).unpoison() == 1
                meddle.holding = operator.do(hold, locked, free)  # type: ignore[attr-defined]
                assert locked.wait(PATIENCE)

        done = archive(spark, pg, folder, source="task", progress=meddle)
        free.set()
        meddle.holding.result(PATIENCE)  # type: ignore[attr-defined]

    stayed = {again.pk, flipped.pk, held.pk}
    assert set(Task.objects.values_list("pk", flat=True)) == stayed
    assert done["withdrawn"] == 3
    assert Census.of(folder) == before
    assert set(Attempt.objects.values_list("task_id", flat=True)) == stayed
    assert not {row.id for row in read_lake(spark, folder).collect()} & stayed
    assert read_lake(spark, folder, table="attempts").count() == 0


def test_a_task_reprocessed_while_the_delete_waits_for_it_stays(
    spark: SparkSession, pg: Database, folder: Path
) -> None:
    fill()
    again = Task.objects.filter(status="ERROR").first()
    assert again is not None
    before = Census.of(folder)
    changed, ended = threading.Event(), threading.Event()

    def change() -> None:
        with transaction.atomic():
            assert Task.objects.filter(pk=again.pk).reprocess() == 1
            changed.set()
            while not blocked() and not ended.wait(0.01):
                pass

    with actors(1) as (operator,):
        held: list[Any] = []

        def meddle(step: str, _done: int, _total: int) -> None:
            if step == "delete" and not held:
                held.append(operator.do(change))
                assert changed.wait(PATIENCE)

        done = archive(spark, pg, folder, source="task", progress=meddle)
        ended.set()
        held[0].result(PATIENCE)

    assert done["withdrawn"] == 1
    assert [(task.pk, task.status) for task in Task.objects.all()] == [(again.pk, "CREATED")]
    assert set(Attempt.objects.values_list("task_id", flat=True)) == {again.pk}
    assert Census.of(folder) == before


@pytest.mark.slow
def test_with_its_database_the_lake_shows_each_task_once_at_every_step(
    spark: SparkSession, pg: Database, folder: Path
) -> None:
    fill()
    error = Task.objects.filter(status="ERROR").earliest("pk")
    everything = Counter(Task.objects.values_list("pk", flat=True))
    seen: dict[str, Counter[int]] = {}

    def look(step: str, _done: int, _total: int) -> None:
        if step == "delete":
            Task.objects.filter(pk=error.pk).reprocess()
        if step in ("delete", "publish", "close", "compact"):
            archived = [row.id for row in read_lake(spark, folder, database=pg).select("id").collect()]
            seen[step] = Counter([*archived, *Task.objects.values_list("pk", flat=True)])

    archive(spark, pg, folder, source="task", progress=look, compact=1)
    assert seen == dict.fromkeys(("delete", "publish", "close", "compact"), everything)


@pytest.mark.slow
def test_a_task_that_breaks_a_rule_is_quarantined_and_the_others_are_archived(
    spark: SparkSession, database: Database, folder: Path
) -> None:
    good = make_task("ERROR")
    bad = make_task("ERROR", start_time=timedelta(hours=2))
    for task in (good, bad):
        Attempt.objects.create(task_id=task.pk, queue=task.queue, attempt=1, total_attempt=1)
    before = Census.of(folder)
    for number in (1, 0):
        with pytest.raises(
            CheckFailed, match=rf"finished before it started: 1 rows \(task {bad.pk}\).*--no-check"
        ) as caught:
            archive(spark, database, folder)
        assert caught.value.result["broken"] == {"finished before it started": 1}
        assert (caught.value.result["tasks"], caught.value.result["quarantined"]) == (number, 1)
        assert [task.pk for task in Task.objects.all()] == [bad.pk]
        assert Census.of(folder) == before

    assert archive(spark, database, folder, no_check=True)["tasks"] == 1
    assert not Task.objects.exists()
    assert Census.of(folder) == before


@pytest.mark.slow
def test_only_what_is_asked_for_is_archived(spark: SparkSession, database: Database, folder: Path) -> None:
    fill()
    young = make_task("ERROR", queue="parcels")
    Task.objects.filter(pk=young.pk).update(finish_time=Now())
    wanted = {"queue": ["parcels"], "status": ["ERROR"], "older_than": "1h"}
    errors = set(Task.objects.filter(status="ERROR").exclude(pk=young.pk).values_list("pk", flat=True))
    others = set(Task.objects.values_list("pk", flat=True)) - errors

    assert archive(spark, database, folder, dry_run=True, **wanted)["tasks"] == len(errors)
    assert not (folder).exists()
    assert archive(spark, database, folder, limit=2, batch_size=1, **wanted)["tasks"] == 2
    assert archive(spark, database, folder, **wanted)["tasks"] == len(errors) - 2
    assert set(Task.objects.values_list("pk", flat=True)) == others


@pytest.mark.slow
def test_a_batch_under_way_into_another_lake_is_finished_there(spark: SparkSession, pg: Database, folder: Path) -> None:
    fill()

    class Cut(Exception):
        pass

    def cut(step: str, _done: int, _total: int) -> None:
        if step == "close":
            raise Cut

    with pytest.raises(Cut):
        archive(spark, pg, folder, source="task", progress=cut)
    with pytest.raises(PipelineError, match=f"archive --lake {folder}"):
        archive(spark, pg, folder.with_name("two"))
    assert archive(spark, pg, folder)["resumed"] == 1


def test_two_archives_at_once_are_refused(spark: SparkSession, database: Database, folder: Path) -> None:
    fill()
    refused = []

    def another(step: str, _done: int, _total: int) -> None:
        if step == "export" and not refused:
            for name in ("lake", "other"):
                with pytest.raises(PipelineError, match=r"Another archive of .* is running"):
                    archive(spark, database, folder.with_name(name))
                refused.append(name)

    archive(spark, database, folder, progress=another)
    assert refused == ["lake", "other"]


def test_files_that_changed_before_the_delete_stop_it(spark: SparkSession, pg: Database, folder: Path) -> None:
    fill()
    number = Task.objects.count()

    def damage(step: str, _done: int, _total: int) -> None:
        if step == "verify":
            for path in folder.glob("tasks/*/*.parquet"):
                flip(path, path.stat().st_size // 2)

    with pytest.raises(LakeError, match=r"parquet is damaged: its checksum"):
        archive(spark, pg, folder, source="task", progress=damage)
    assert Task.objects.count() == number
    assert archive(spark, pg, folder, source="task")["tasks"] == number


def test_a_batch_that_another_process_has_taken_back_deletes_nothing(
    spark: SparkSession, database: Database, folder: Path
) -> None:
    """A run whose connection broke without its notice: the next one has revoked its batch."""
    fill()
    before = Census.of(folder)

    def revoke(step: str, _done: int, _total: int) -> None:
        if step == "publish":
            Lake.at(folder).revoke(ArchiveBatch.objects.get(state="open").token)

    with pytest.raises(PipelineError, match="was revoked by another process"):
        archive(spark, database, folder, progress=revoke)
    assert Census.of(folder) == before
    assert not ids(folder, "tasks")
    assert archive(spark, database, folder)["tasks"] == before.tasks.total()
    assert Census.of(folder) == before


@pytest.mark.slow
def test_files_of_a_failed_try_do_not_count(spark: SparkSession, folder: Path) -> None:
    """The session gives each task a second try; both write, and only what the second one wrote is named."""
    export = Export(Lake.at(folder, create=True), "ab")
    writer = RowWriter(export, "dbtaskqueue.task")
    tried = folder / "finished" / "tried"

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from writer(batches)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            tried.touch()
            raise RuntimeError("the first try fails after it has written")

    row = [None] * len(TASKS)
    rows = spark.createDataFrame([[7, "q", "r", "ERROR", *row[4:]]], TASKS)
    rows = rows.withColumn("finish_time", F.lit(datetime(2026, 1, 31, tzinfo=UTC)))
    (file,) = export.files_of(rows, fail_once)
    assert tried.exists()
    assert len(list(folder.glob("finished/*/*.parquet"))) == 2
    export.lake.commit("finished", [file])
    assert read_lake(spark, folder, table="finished").count() == file.rows == 1


@pytest.mark.slow
def test_small_files_are_merged(spark: SparkSession, pg: Database, folder: Path) -> None:
    expected = {make_task("COMPLETED").pk for _ in range(4)}
    done = archive(spark, pg, folder, source="task", batch_size=1, compact=4)
    assert done["batches"] == done["files_compacted"] == 4
    (file,) = Lake.at(folder).files("tasks")
    assert file.rows == 4
    assert sorted(row.id for row in read_lake(spark, folder).collect()) == sorted(expected)


def test_it_says_what_it_will_do() -> None:
    text = Archive().explain(Archive.context().options)
    assert "After a kill nothing is" in text
    assert "--older-than 1d" in text
