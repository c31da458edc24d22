"""The lake: which files count, and what is said of one that cannot be read."""

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema

from django_dbtaskqueue.core.exceptions import LakeError
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.lake.archive_jobs import sink
from django_dbtaskqueue.pipeline.lake.export import Export
from django_dbtaskqueue.pipeline.source import TASKS, arrow_schema
from tests.pipeline.executors import ThisProcess
from tests.pipeline.lakes import flip, ids

FINISHED, DAY = datetime(2026, 1, 31, 8, tzinfo=UTC), "2026-01-31"


def lake_of(folder: Path | str, *batches: Mapping[str, Any]) -> Lake:
    """Return a lake in which each of the given columns stands in a file and a change of its own."""
    lake = Lake.at(folder, create=True)
    for number, columns in enumerate(batches, 1):
        token = f"{number:032x}"
        file = Export(lake, token).write_day("tasks", DAY, pa.table(dict(columns)), "0")
        assert lake.commit("tasks", [file], once=(token, 1))
    return lake


def rows(*ids: int) -> dict[str, Any]:
    """Return some columns of archived tasks, as a version that knew no others wrote them."""
    return {
        "location": pa.array(["dbtaskqueue.task"] * len(ids), pa.string()),
        "id": pa.array(ids, pa.int64()),
        "queue_name": pa.array(["claims"] * len(ids), pa.string()),
        "status": pa.array(["COMPLETED"] * len(ids), pa.string()),
        "payload": pa.array([f'{{"flight": {one}}}' for one in ids], pa.string()),
        "finish_time": pa.array([FINISHED] * len(ids), pa.timestamp("us", "UTC")),
    }


def test_a_micro_batch_written_again_adds_nothing(tmp_path: Path) -> None:
    lake = Lake.at(tmp_path, create=True)
    schema = arrow_schema(TASKS)
    last = datetime(2026, 1, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    row = {"id": 7, "queue_name": "q", "status": "COMPLETED", "finish_time": last}
    no_rows: Any = ThisProcess()
    one_row: Any = ThisProcess([pa.RecordBatch.from_pylist([row], schema)])
    sink(lake, "a stream", "dbtaskqueue.task", no_rows, 0)
    assert lake.files("finished") == []
    for number in (1, 1, 0):
        sink(lake, "a stream", "dbtaskqueue.task", one_row, number)
    (file,) = lake.files("finished")
    assert (file.rows, file.day, ids(tmp_path, "finished")) == (1, DAY, [7])


def test_a_lake_of_an_older_version_gets_the_new_columns(tmp_path: Path) -> None:
    old = Schema.from_arrow(pa.schema([("id", pa.int64()), ("finished_date", pa.date32())]))
    for table in ("tasks", "attempts", "finished"):
        (tmp_path / table).mkdir()
        DeltaTable.create(str(tmp_path / table), old, partition_by=["finished_date"])
    lake_of(tmp_path, rows(1))
    (row,) = DeltaTable(str(tmp_path / "tasks")).to_pyarrow_table().to_pylist()
    assert (row["id"], row["finish_time"], row["priority"]) == (1, FINISHED, None)


def read(where: str, *columns: str) -> list[dict[str, Any]]:
    return DeltaTable(f"{where}/tasks").to_pyarrow_table(columns=["id", *columns]).sort_by("id").to_pylist()


def test_a_flipped_bit_is_never_returned_as_truth(tmp_path: Path) -> None:
    chance = random.Random(1)
    lake = lake_of(tmp_path, *[rows(*range(number * 50, number * 50 + 50)) for number in range(3)])
    sound = read(str(tmp_path), "payload")
    first, *others = lake.files("tasks")
    path = Path(lake.path(first))
    size, whole = path.stat().st_size, path.read_bytes()
    for place in (0, 4, size - 1, size - 5, size - 9, *(chance.randrange(size) for _ in range(60))):
        flip(path, place, chance.randrange(8))
        with pytest.raises(LakeError, match=f"{path.name} is damaged"):
            lake.sound(lake.files("tasks"))
        damaged: list[str] = []
        assert lake.sound(lake.files("tasks"), damaged) == others
        assert len(damaged) == 1
        with pytest.raises(LakeError, match=f"{path.name} is damaged"):
            lake.read(first, ["payload"])
        path.write_bytes(whole)
    assert read(str(tmp_path), "payload") == sound


def test_other_readers_find_checksums_in_the_pages(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, rows(*range(100)))
    path = Path(lake.path(lake.files("tasks")[0]))
    place = pq.ParquetFile(path).metadata.row_group(0).column(4)
    flip(path, place.data_page_offset + place.total_compressed_size // 2)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.read_table(path, columns=["payload"], page_checksum_verification=True)


def test_a_log_that_cannot_be_read_and_a_path_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, rows(1))
    max((tmp_path / "tasks" / "_delta_log").iterdir()).write_text("{")
    with pytest.raises(LakeError, match=f"{tmp_path}/tasks/_delta_log cannot be read: .*Restore it from a backup"):
        lake.files("tasks")
    (tmp_path / "file").touch()
    with pytest.raises(LakeError, match=rf"{tmp_path}/file.* cannot be written: .*give another folder with --lake"):
        Lake.at(tmp_path / "file" / "lake", create=True)


def test_a_url_with_a_key_is_refused_and_not_repeated_and_one_lake_has_one_name() -> None:
    key = "hunter2hunter2"
    for url in (
        f"s3://KEY:{key}@bucket/lake", f"s3://{key}@bucket/lake", f"abfss://a@b.net/lake?sig={key}",
        f"ftp://KEY:{key}@host/lake", "/srv/a%20b",
    ):  # fmt: skip
        with pytest.raises(LakeError, match=r"Write it as s3://BUCKET/FOLDER") as found:
            Lake.at(url)
        assert "hunter2" not in str(found.value) + found.value.path, url
    assert Lake("s3a://bucket/lake/").root == Lake("s3://bucket/lake").root == "s3://bucket/lake"
