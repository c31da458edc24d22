"""``replay``: archived tasks come back as new ones, once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.lake import read_lake
from django_dbtaskqueue.pipeline.lake.copy_jobs import Replay
from tests.factories import make_task
from tests.pipeline.lakes import DAY, MEANWHILE, archive

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from django_dbtaskqueue.pipeline.database import Database

pytestmark = pytest.mark.slow


def replay(spark: SparkSession, database: Database, lake: Path, **options: Any) -> Mapping[str, Any]:
    return Replay().run(Replay.context(spark=spark, database=database, lake=lake, **options))


def fill_archive(database: Database, lake: Path) -> list[Task]:
    """Archive four tasks: two with one reference, one with another, one without."""
    made = [
        make_task("ERROR", reference="r1", payload={"n": 1}, finish_time=-3 * DAY, **MEANWHILE),
        make_task("COMPLETED", payload={"n": 3}, finish_time=-3 * DAY, queue="letters", **MEANWHILE),
        make_task("ERROR", reference="r2", payload={"n": 2}, priority=4, tag="eu", finish_time=-2 * DAY, **MEANWHILE),
    ]
    archive(database, lake, no_compact=True)
    made.append(make_task("ERROR", reference="r1", payload={"n": 9}, finish_time=-1 * DAY, **MEANWHILE))
    archive(database, lake, no_compact=True)
    return made


def test_tasks_come_back_once(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    _first, letter, _second, _third = fill_archive(database, lake)
    make_task("CREATED", reference="r2")

    dry = replay(spark, database, lake, dry_run=True)
    assert dry["chosen"] == 3
    assert dry["first"] == [f"letters/replay:dbtaskqueue.task:{letter.pk}", "parcels/r1", "parcels/r2"]
    assert Task.objects.count() == 1

    assert replay(spark, database, lake) == {"chosen": 3, "enqueued": 2, "already_there": 1}
    assert replay(spark, database, lake) == {"chosen": 3, "enqueued": 0, "already_there": 3}
    found = {task.reference: (task.queue, task.status, task.payload, task.total_attempt) for task in Task.objects.all()}
    assert found["r1"] == ("parcels", "CREATED", {"n": 9}, 0)
    assert found[f"replay:dbtaskqueue.task:{letter.pk}"] == ("letters", "CREATED", {"n": 3}, 0)
    assert read_lake(spark, lake).count() == 4


def test_filters_target_and_rate(spark: SparkSession, pg: Database, tmp_path: Path) -> None:
    fill_archive(pg, tmp_path)
    assert replay(spark, pg, tmp_path, queue="letters", dry_run=True)["chosen"] == 1
    assert replay(spark, pg, tmp_path, status=["COMPLETED"], dry_run=True)["chosen"] == 1
    assert replay(spark, pg, tmp_path, limit=1, dry_run=True)["chosen"] == 1
    yesterday = (datetime.now(UTC) - 3 * timedelta(hours=12)).date().isoformat()
    assert replay(spark, pg, tmp_path, until=yesterday, reference="r1", dry_run=True)["chosen"] == 1
    assert replay(spark, pg, tmp_path, since="2999-01-01", dry_run=True)["chosen"] == 0

    where = "get_json_object(payload, '$.n') >= 2"
    assert replay(spark, pg, tmp_path, where=where, to="again", rate="0.01")["enqueued"] == 3
    first, second, third = Task.objects.filter(queue="again").order_by("ready_time")
    assert [task.payload for task in (first, second, third)] == [{"n": 3}, {"n": 2}, {"n": 9}]
    assert second.ready_time - first.ready_time > timedelta(seconds=90)
    assert third.ready_time - second.ready_time == timedelta(seconds=100)
    assert (second.priority, second.tag) == (4, "eu")


def test_a_replayed_task_has_the_lease_time_to_live_and_budget_of_the_archived_one(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    made = make_task(
        "POISON", reference="r1", context={"user": 7}, group_key="g", lease_seconds=90.5, max_attempts=9,
        finish_time=-DAY, expire_time=-2 * DAY, **MEANWHILE,
    )  # fmt: skip
    make_task("ERROR", reference="r2", finish_time=-DAY, **MEANWHILE)
    lake = tmp_path / "lake"
    archive(database, lake)
    assert replay(spark, database, lake)["enqueued"] == 2
    fresh, plain = Task.objects.order_by("reference")
    assert (fresh.lease_seconds, fresh.max_attempts, fresh.group_key, fresh.context) == (90.5, 9, "g", {"user": 7})
    assert abs((fresh.expire_time - fresh.create_time) - (made.expire_time - made.create_time)) < timedelta(seconds=1)
    assert (plain.lease_seconds, plain.max_attempts, plain.expire_time) == (None, 5, None)


def test_options_that_cannot_be(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    archive(sqlite, tmp_path / "lake")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"where": "nonsense = 1"}, "--where: Spark cannot use 'nonsense = 1': .*nonsense"),
        ({"where": "id ="}, "--where: Spark cannot use 'id ='"),
        ({"rate": "0"}, "--rate: '0' is not a number of tasks per second above 0"),
        ({"since": "2026-02-01", "until": "2026-01-01"}, "--since: 2026-02-01 comes after --until 2026-01-01"),
    ]
    for options, message in wrong:
        with pytest.raises(JobOptionError, match=message):
            replay(spark, sqlite, tmp_path / "lake", **options)
