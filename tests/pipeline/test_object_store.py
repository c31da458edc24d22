"""A lake in S3, that is on a server in a process of its own, and the promises that it shares with one in a folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from django_dbtaskqueue.core.exceptions import LakeError
from django_dbtaskqueue.pipeline.lake import LAKE_TASKS, DataFile, Lake, numbered
from django_dbtaskqueue.pipeline.lake.export import Export, compact
from tests.pipeline.lakes import ON_AZURE, Bucket, ids, place_of
from tests.pipeline.test_lake import DAY, lake_of, read, rows
from tests.support import PATIENCE

TOKEN = "a" * 32


def written(lake: Lake, token: str, *numbers: int) -> DataFile:
    return Export(lake, token).write_day("tasks", DAY, pa.table(rows(*numbers)), "0")


@pytest.fixture(params=["tmp_path", "bucket", *ON_AZURE])
def where(request: pytest.FixtureRequest) -> str:
    """A folder, and a place in an object store: they keep the same promises."""
    return place_of(request.getfixturevalue(request.param))


def test_a_change_is_made_once_and_never_after_it_was_revoked(where: str) -> None:
    lake = lake_of(where, rows(1))
    token = f"{1:032x}"
    again = Export(lake, token).write_day("tasks", DAY, pa.table(rows(1)), "1")
    assert not lake.commit("tasks", [again], once=(token, 1))
    lake.revoke(token)
    lake.revoke(token)
    assert lake.files("tasks") == []
    assert not lake.commit("tasks", [again], once=(token, 1))


def test_compaction_keeps_every_row_and_column(where: str) -> None:
    lake = lake_of(where, rows(1), rows(2, 3), rows(4) | {"priority": pa.array([7], pa.int16())}, rows(5))
    before = read(where, "priority", "finish_time", "queue_name", "payload")
    assert (compact(lake, [], without=[f"{4:032x}"], fewest=4), compact(lake, [])) == (0, 0)
    earlier = DeltaTable(f"{where}/tasks")
    assert compact(lake, [], fewest=4) == 4
    assert len(lake.files("tasks")) == 1
    assert read(where, "priority", "finish_time", "queue_name", "payload") == before
    assert earlier.to_pyarrow_table().num_rows == 5, "a reader of the version before is not disturbed"
    assert compact(lake, [], fewest=2) == 0


def test_other_programs_read_it_and_spark_all_columns_of_each_row(bucket: Bucket) -> None:
    lake = lake_of(bucket.lake, rows(1), rows(2, 3))
    table = f"{bucket.lake}/tasks"
    tasks = DeltaTable(table).to_pyarrow_dataset()  # DuckDB finds it by its name
    assert duckdb.sql("SELECT count(*), max(id) FROM tasks").fetchall() == [(3, 3)]
    assert tasks.count_rows() == len(DeltaTable(table).to_pandas()) == 3
    import polars  # which takes long, and no other test needs it

    assert sorted(polars.scan_delta(table).select("id").collect()["id"].to_list()) == [1, 2, 3]
    first, second = numbered(Lake.at(bucket.lake), lake.files("tasks"), [pa.record_batch({"id": [0, 1]})])
    assert first.schema.names == second.schema.names == LAKE_TASKS.names
    payloads = sorted(row["payload"] for found in (first, second) for row in found.to_pylist())
    assert payloads == ['{"flight": 1}', '{"flight": 2}', '{"flight": 3}']


def test_a_flipped_bit_of_an_object_is_named_and_its_file_left_out(bucket: Bucket) -> None:
    lake = lake_of(bucket.lake, rows(1), rows(2), rows(3))
    first, *others = lake.files("tasks")
    bucket.flip(lake.path(first))
    damaged: list[str] = []
    assert lake.sound(lake.files("tasks"), damaged) == others
    assert compact(lake, damaged, fewest=3) == 2
    assert first in lake.files("tasks"), "a damaged file is kept"
    assert len(damaged) == 2 and all(lake.path(first) in one for one in damaged)
    with pytest.raises(LakeError, match=r"s3://b-.*\.parquet is damaged.*Restore it from a backup"):
        list(numbered(lake, (first,), [pa.record_batch({"id": [0]})]))


def test_writers_at_once_lose_no_commit_and_make_none_twice(where: str) -> None:
    lake_of(where)
    shared = written(Lake(where), TOKEN, 100)
    start = Barrier(4)

    def commit(number: int) -> bool:
        lake = Lake(where)
        own = written(lake, f"{number:032x}", number)
        if not where.startswith("abfss"):  # Azure refuses one of two that write the same file at once
            assert written(lake, TOKEN, 100) == shared
        start.wait(PATIENCE)
        assert lake.commit("tasks", [own])
        try:
            return lake.commit("tasks", [shared], once=(TOKEN, 1))
        except LakeError as error:  # another writer made it between the look and the put
            assert "concurrent" in str(error).lower(), error
            return False

    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(commit, range(4))]
    assert (made.count(True), sorted(ids(where, "tasks"))) == (1, [0, 1, 2, 3, 100])


def test_a_log_that_another_writer_extended_is_not_overwritten(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    test_writers_at_once_lose_no_commit_and_make_none_twice(bucket.lake)


def test_a_store_that_refuses_is_named_and_no_key_is_shown(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LakeError, match=r"s3://no-bucket/lake cannot be .*NoSuchBucket.*Check the") as found:
        Lake.at("s3://no-bucket/lake", create=True)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "NoSuchBucket")  # stands for a key in an error of the store
    with pytest.raises(LakeError) as shown:
        Lake.at("s3://no-bucket/lake", create=True)
    assert "NoSuchBucket" not in str(shown.value) and "\x1b" not in str(found.value) + str(shown.value)
    assert shown.value.__cause__ is None


def test_a_folder_with_other_data_and_one_without_a_lake_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    for place in (bucket.lake, tmp_path):
        with pytest.raises(LakeError, match=r"is not a lake\. Check the path"):
            Lake.at(place)
    bucket.put("archive/lake/other.csv", b"1")
    (tmp_path / "other.csv").touch()
    for place in (bucket.lake, tmp_path):
        with pytest.raises(LakeError, match=r"holds other data\. Give the lake a folder of its own"):
            Lake.at(place, create=True)
