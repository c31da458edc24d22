"""``replay``: archived tasks come back as new ones, once. ``stream``: each finish reaches the lake once."""

import shutil
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake import Lake, read_lake
from django_dbtaskqueue.pipeline.lake.archive_jobs import Replay, Stream, checkpoint
from django_dbtaskqueue.pipeline.source import stream_tasks
from tests.factories import make_task
from tests.pipeline.lakes import DAY, MEANWHILE, archive
from tests.pipeline.test_stream_source import commit, finish
from tests.support import in_time

pytestmark = pytest.mark.slow


def replay(spark: SparkSession, database: Database, lake: Path, **options: Any) -> Mapping[str, Any]:
    return Replay().run(Replay.context(spark=spark, database=database, lake=lake, **options))


def fill_archive(database: Database, lake: Path) -> Task:
    """Archive four tasks: two with one reference, one with another, and one without, which is returned."""
    make_task("ERROR", reference="r1", payload={"n": 1}, finish_time=-3 * DAY, **MEANWHILE)
    letter = make_task("COMPLETED", payload={"n": 3}, finish_time=-3 * DAY, queue="letters", **MEANWHILE)
    make_task("ERROR", reference="r2", payload={"n": 2}, priority=4, tag="eu", finish_time=-2 * DAY, **MEANWHILE)
    archive(database, lake, no_compact=True)
    make_task("ERROR", reference="r1", payload={"n": 9}, finish_time=-1 * DAY, **MEANWHILE)
    archive(database, lake, no_compact=True)
    return letter


def test_tasks_come_back_once(spark: SparkSession, database: Database, folder: Path) -> None:
    letter = fill_archive(database, folder)
    make_task("CREATED", reference="r2")
    dry = replay(spark, database, folder, dry_run=True)
    assert (dry["chosen"], dry["would_enqueue"], dry["already_there"]) == (3, 2, 1)
    assert dry["first"] == [f"letters/replay:dbtaskqueue.task:{letter.pk}", "parcels/r1", "parcels/r2"]
    assert Task.objects.count() == 1
    for new in (2, 0):
        done = {"chosen": 3, "enqueued": new, "already_there": 3 - new, "rejected": 0}
        assert replay(spark, database, folder) == done
    found = {task.reference: (task.queue, task.status, task.payload, task.total_attempt) for task in Task.objects.all()}
    assert found["r1"] == ("parcels", "CREATED", {"n": 9}, 0)
    assert found[f"replay:dbtaskqueue.task:{letter.pk}"] == ("letters", "CREATED", {"n": 3}, 0)
    assert read_lake(spark, folder).count() == 4


def test_filters_target_and_rate(spark: SparkSession, pg: Database, tmp_path: Path) -> None:
    fill_archive(pg, tmp_path)
    yesterday = (datetime.now(UTC) - 3 * timedelta(hours=12)).date().isoformat()
    one: list[dict[str, Any]] = [{"queue": "letters"}, {"status": ["COMPLETED"]}, {"limit": 1}]
    for options in (*one, {"until": yesterday, "reference": "r1"}):
        assert replay(spark, pg, tmp_path, **options, dry_run=True)["chosen"] == 1, options
    assert replay(spark, pg, tmp_path, since="2999-01-01", dry_run=True)["chosen"] == 0
    where = "get_json_object(payload, '$.n') >= 2"
    assert replay(spark, pg, tmp_path, where=where, to="again", rate="0.0001")["enqueued"] == 3
    first, second, third = Task.objects.filter(queue="again").order_by("ready_time")
    assert [task.payload for task in (first, second, third)] == [{"n": 3}, {"n": 2}, {"n": 9}]
    assert second.ready_time - first.ready_time > timedelta(hours=1)
    assert third.ready_time - second.ready_time == timedelta(seconds=10_000)
    assert (second.priority, second.tag) == (4, "eu")


def test_a_replayed_task_keeps_its_lease_and_budget(spark: SparkSession, database: Database, folder: Path) -> None:
    own = {"context": {"user": 7}, "group_key": "g", "lease_seconds": 90.5, "max_attempts": 9, "expire_time": -2 * DAY}
    made = make_task("POISON", reference="r1", finish_time=-DAY, **own, **MEANWHILE)
    make_task("ERROR", reference="r2", finish_time=-DAY, **MEANWHILE)
    archive(database, folder)
    assert replay(spark, database, folder)["enqueued"] == 2
    fresh, plain = Task.objects.order_by("reference")
    assert (fresh.lease_seconds, fresh.max_attempts, fresh.group_key, fresh.context) == (90.5, 9, "g", {"user": 7})
    assert abs((fresh.expire_time - fresh.create_time) - (made.expire_time - made.create_time)) < timedelta(seconds=1)
    assert (plain.lease_seconds, plain.max_attempts, plain.expire_time) == (None, 5, None)


def test_options_that_cannot_be(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    archive(sqlite, tmp_path / "lake")
    for options, message in (
        ({"where": "nonsense = 1"}, "--where: Spark cannot use 'nonsense = 1': .*nonsense"),
        ({"where": "id ="}, "--where: Spark cannot use 'id ='"),
        ({"rate": "0"}, "--rate: '0' is not a number above 0"),
        ({"since": "2026-02-01", "until": "2026-01-01"}, "--since: 2026-02-01 comes after --until 2026-01-01"),
    ):
        with pytest.raises(JobOptionError, match=message):
            replay(spark, sqlite, tmp_path / "lake", **options)


def stream(spark: SparkSession, database: Database, lake: Path, **options: Any) -> Mapping[str, Any]:
    return Stream().run(Stream.context(spark=spark, database=database, lake=lake, once=True, **options))


def copied(spark: SparkSession, lake: Path) -> list[tuple[int, int, str]]:
    return sorted(map(tuple, read_lake(spark, lake, table="finished")["id", "total_attempt", "status"].collect()))


def test_a_query_restarted_goes_on_where_it_was(spark: SparkSession, quiet_pg: Database, tmp_path: Path) -> None:
    """Also when the stream is registered between two starts, and over a transaction that commits late."""
    enqueue_many("other", [(name, None) for name in "abcdef"])
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def drain(name: str | None = None) -> list[str]:
        df = stream_tasks(spark, quiet_pg, ["reference_number", "status", "finish_time"], queue="other", name=name)
        writer = df.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        in_time(lambda: writer.trigger(availableNow=True).start(out).awaitTermination())
        return sorted(row[0] for row in spark.read.schema("reference_number string").parquet(out).collect())

    commit(finish(quiet_pg, "a", "b"))
    late = finish(quiet_pg, "c")
    commit(finish(quiet_pg, "d"))
    assert drain() == ["a", "b"]
    commit(late)
    assert drain("a stream") == ["a", "b", "c", "d"]
    commit(finish(quiet_pg, "e"))
    assert drain("a stream") == ["a", "b", "c", "d", "e"]


def test_each_finish_is_copied_once(spark: SparkSession, quiet_pg: Database, tmp_path: Path) -> None:
    done, failed = make_task("COMPLETED"), make_task("ERROR", queue="черга", max_attempts=2)
    make_task("CREATED")
    expected = [(done.pk, 1, "COMPLETED"), (failed.pk, 2, "ERROR")]
    assert stream(spark, quiet_pg, tmp_path, dry_run=False)["rows"] == 2
    assert copied(spark, tmp_path) == expected
    assert {row.queue_name for row in read_lake(spark, tmp_path, table="finished").collect()} == {"parcels", "черга"}
    assert Task.objects.count() == 3
    Task.objects.filter(pk=failed.pk).mark_poison()
    late = make_task("POISON")
    assert stream(spark, quiet_pg, tmp_path)["rows"] == 2
    assert copied(spark, tmp_path) == sorted([*expected, (failed.pk, 2, "POISON"), (late.pk, 1, "POISON")])
    assert read_lake(spark, tmp_path).count() == 0, "what is streamed is not archived"


def test_a_micro_batch_is_copied_once_not_another_one(spark: SparkSession, quiet_pg: Database, folder: Path) -> None:
    """An older checkpoint has other rows under a number that the lake has."""
    made = [make_task("COMPLETED")]
    assert stream(spark, quiet_pg, folder)["rows"] == 1
    place, _name = checkpoint(Lake.at(folder), quiet_pg.location)
    shutil.copytree(place, backup := folder / "backup")
    for path in place.glob("commits/*"):
        path.unlink()  # the driver died after the lake's log and before Spark's own
    assert stream(spark, quiet_pg, folder)["rows"] == 0
    for _ in range(2):
        made.append(make_task("COMPLETED"))
        assert stream(spark, quiet_pg, folder)["rows"] == 1
    assert copied(spark, folder) == sorted((task.pk, 1, "COMPLETED") for task in made)
    shutil.rmtree(place)
    backup.rename(place)
    with pytest.raises(PipelineError, match=r"set back.* stream --unregister"):
        stream(spark, quiet_pg, folder)
