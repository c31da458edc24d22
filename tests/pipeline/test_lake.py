"""The lake: which files count, and what is said of one that cannot be read."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.testing import assertDataFrameEqual

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.pipeline.lake import LAKE_TASKS, Entry, Lake, exclusive, read_lake
from django_dbtaskqueue.pipeline.lake.archive_job import compact
from django_dbtaskqueue.pipeline.lake.export import data_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

FINISHED = datetime(2026, 1, 31, 8, tzinfo=UTC)
PLACE = "tasks/finished_date=2026-01-31/queue=claims"


def lake_of(folder: Path, *batches: Mapping[str, Any]) -> Lake:
    """Return a lake in which each of the given columns stands in a file and a change of its own."""
    lake = Lake.at(folder, create=True)
    for number, columns in enumerate(batches, 1):
        path = folder / PLACE / f"{number:032x}-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(dict(columns)), path)
        lake.commit(Entry(f"{number:032x}", "archive", (data_file(folder, path),)))
    return lake


def rows(*ids: int) -> dict[str, Any]:
    """Return some columns of archived tasks, as a version that knew no others wrote them."""
    return {
        "location": pa.array(["dbtaskqueue.task"] * len(ids), pa.string()),
        "id": pa.array(ids, pa.int64()),
        "queue_name": pa.array(["claims"] * len(ids), pa.string()),
        "status": pa.array(["COMPLETED"] * len(ids), pa.string()),
        "finish_time": pa.array([FINISHED] * len(ids), pa.timestamp("us", "UTC")),
    }


def test_columns_younger_than_a_file_are_null(spark: SparkSession, tmp_path: Path) -> None:
    lake_of(tmp_path, rows(1), rows(2) | {"priority": pa.array([7], pa.int16())})
    frame = read_lake(spark, tmp_path)
    assert frame.schema == LAKE_TASKS
    expected = spark.createDataFrame(
        [(1, None, FINISHED, date(2026, 1, 31), "claims"), (2, 7, FINISHED, date(2026, 1, 31), "claims")],
        "id long, priority short, finish_time timestamp, finished_date date, queue string",
    )
    assertDataFrameEqual(frame.select("id", "priority", "finish_time", "finished_date", "queue"), expected)


def test_an_empty_lake_has_the_columns_too(spark: SparkSession, tmp_path: Path) -> None:
    Lake.at(tmp_path, create=True)
    for table in ("tasks", "attempts", "finished"):
        assert read_lake(spark, tmp_path, table=table).count() == 0
    assert read_lake(spark, f"file://{tmp_path}").schema == LAKE_TASKS
    with pytest.raises(PipelineError, match="table='task' must be one of 'tasks'"):
        read_lake(spark, tmp_path, table="task")


def test_only_files_of_the_log_count(spark: SparkSession, tmp_path: Path) -> None:
    lake_of(tmp_path, rows(1))
    pq.write_table(pa.table(rows(2)), tmp_path / PLACE / "half-0.parquet")
    assert [row.id for row in read_lake(spark, tmp_path).collect()] == [1]


def test_compaction_keeps_every_row_and_column(spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_of(tmp_path, rows(1), rows(2, 3), rows(4) | {"priority": pa.array([7], pa.int16())}, rows(5))
    before = read_lake(spark, tmp_path).select("id", "priority", "finish_time", "queue").orderBy("id").collect()
    assert compact(lake, without=[f"{4:032x}"], fewest=4) == 0
    assert compact(lake) == 0
    assert compact(lake, fewest=4) == 4
    assert len(list(tmp_path.glob("tasks/*/*/*"))) == 1
    after = read_lake(spark, tmp_path).select("id", "priority", "finish_time", "queue").orderBy("id").collect()
    assert after == before
    assert compact(lake, fewest=1) == 1


@pytest.mark.parametrize("what", ["lake.json", "log"])
def test_what_a_newer_version_wrote_is_refused(tmp_path: Path, what: str) -> None:
    lake = lake_of(tmp_path, rows(1))
    path = lake.own / what if what == "lake.json" else next(lake.log.iterdir())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(LakeError, match=rf"{path} was written by a newer .*version 99.* pip install --upgrade"):
        Lake.at(tmp_path).files("tasks")


@pytest.mark.parametrize("what", ["cut", "gone"])
def test_a_file_cut_short_or_gone_is_named(spark: SparkSession, tmp_path: Path, what: str) -> None:
    lake_of(tmp_path, rows(1), rows(2))
    path = next(tmp_path.rglob("*.parquet"))
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.unlink()
    with pytest.raises(LakeError, match=rf"{path} (is damaged|cannot be read).*Restore it from a backup"):
        read_lake(spark, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "is not a JSON object"), ('{"token": "1"}', "is not an entry of a lake's log")],
)
def test_a_damaged_log_is_named(tmp_path: Path, text: str, message: str) -> None:
    lake = lake_of(tmp_path, rows(1))
    path = next(lake.log.iterdir())
    path.write_text(text)
    with pytest.raises(LakeError, match=f"{path} {message}"):
        lake.files("tasks")


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "lake"
    with pytest.raises(LakeError, match=rf"{tmp_path}/file.* cannot be written: .*give another folder with --lake"):
        Lake.at(place, create=True)


def test_paths_that_are_no_lake_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=r"is not a lake\. Check the path"):
        Lake.at(tmp_path)
    (tmp_path / "other.csv").touch()
    with pytest.raises(LakeError, match=r"holds other data\. Give the lake a folder of its own"):
        Lake.at(tmp_path, create=True)
    with pytest.raises(LakeError, match=re.escape("s3a://bucket/lake is not on a local or mounted file system")):
        Lake.at("s3a://bucket/lake")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(LakeError, match="another archive or compaction")
    with exclusive(tmp_path / "lock"), refused, exclusive(tmp_path / "lock"):
        pass
    with exclusive(tmp_path / "lock"):
        pass
