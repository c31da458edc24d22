"""A lake of an earlier version, which had a log of its own, converted into one of today."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from django_dbtaskqueue.core.exceptions import LakeError
from django_dbtaskqueue.models import ArchiveBatch
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.lake.convert import Convert
from tests.pipeline.lakes import Bucket, flip, ids
from tests.pipeline.test_lake import rows

DAY = "finished_date=2026-01-31/queue=claims"


class OldLake:
    """Writes what the program before Delta Lake wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "_dbtaskqueue" / "log").mkdir(parents=True)
        (root / "_dbtaskqueue" / "lake.json").write_text('{"layout": 1, "schema_version": 1}')

    def file(self, token: str, table: str = "tasks", **columns: Any) -> dict[str, Any]:
        content = io.BytesIO()
        number = len(next(iter(columns.values())))
        version = pa.array([1] * number, pa.int32())
        pq.write_table(pa.table({**columns, "schema_version": version}), content)
        path = self.root / table / DAY / f"{token}-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.getvalue())
        sha256 = hashlib.sha256(content.getvalue()).hexdigest()
        where = str(path.relative_to(self.root))
        return {"table": table, "path": where, "rows": number, "bytes": content.tell(), "sha256": sha256}

    def log(self, kind: str, token: str, *files: Mapping[str, Any], removed: tuple[str, ...] = (), **facts: Any) -> str:
        number = len([*(self.root / "_dbtaskqueue" / "log").iterdir()])
        name = f"20260131T0000000000{number:02}-{kind}-{token}.json"
        entry = {"token": token, "kind": kind, "files": files, "removed": removed, "facts": facts, "schema_version": 1,
                 "time": "2026-01-31T00:00:00+00:00"}  # fmt: skip
        (self.root / "_dbtaskqueue" / "log" / name).write_text(json.dumps(entry))
        return name


def batch(token: str, state: str, lake: Path, withdrawn: list[tuple[str, int]] | None = None) -> None:
    ArchiveBatch.objects.create(
        token=token, state=state, lake=str(lake), withdrawn=withdrawn or [], location="dbtaskqueue.task", first_id=1,
        source="task" if state == "open" else "history", last_id=9, cutoff=datetime(2026, 2, 1, tzinfo=UTC),
    )  # fmt: skip


@pytest.fixture
def old(tmp_path: Path) -> OldLake:
    """Tasks 1 to 5 count: 1 and 2 were merged; 6 was withdrawn, 7 did not leave the database."""
    lake = OldLake(tmp_path / "old")
    first, second = lake.file("aa", **rows(1)), lake.file("ab", **rows(2))
    names = [lake.log("archive", "aa", first), lake.log("archive", "ab", second)]
    merged = lake.file("ac", **rows(1, 2))
    names.append(lake.log("compact", "ac", merged, removed=(first["path"], second["path"])))
    lake.log("fold", "ad", merged, folds=names, recent=["aa", "ab", "ac"])
    failed = {"location": pa.array(["dbtaskqueue.task"]), "id": pa.array([31]), "task_id": pa.array([3])}
    lake.log("archive", "ae", lake.file("ae", **rows(3, 4, 5, 6)), lake.file("ae", "attempts", **failed))
    lake.log("archive", "af", lake.file("af", **rows(7)))
    return lake


def convert(database: Database, old: OldLake, lake: object, **options: Any) -> tuple[dict[str, Any], list[str]]:
    context = Convert.context(database=database, lake=str(lake), old=str(old.root), **options)
    return dict(Convert().run(context)), context.damaged


def test_an_old_lake_is_converted_once(database: Database, old: OldLake, folder: Path) -> None:
    batch("ae", "deleted", old.root, [("dbtaskqueue.task", 6)])
    batch("af", "open", old.root)
    done, damaged = convert(database, old, folder)
    assert done == {"files": 3, "rows": 6, "converted_before": 0, "left_out": 1, "withdrawn": 1} and not damaged
    assert sorted(ids(folder, "tasks")) == [1, 2, 3, 4, 5] and ids(folder, "attempts") == [31]
    (row,) = DeltaTable(str(folder / "tasks")).to_pyarrow_table(filters=[("id", "=", 4)]).to_pylist()
    assert (row["payload"], row["finished_date"]) == ('{"flight": 4}', date(2026, 1, 31))
    assert dict(ArchiveBatch.objects.values_list("token", "state")) == {"ae": "closed", "af": "abandoned"}
    again, _ = convert(database, old, folder)
    assert (again["files"], again["converted_before"], again["left_out"]) == (0, 3, 1)
    assert sorted(ids(folder, "tasks")) == [1, 2, 3, 4, 5]
    assert json.loads((old.root / "_dbtaskqueue" / "lake.json").read_text())["layout"] == 2, "the old program stops"
    assert len([*old.root.rglob("*.parquet")]) == 6, "old files are kept"


def test_a_conversion_killed_between_two_files_goes_on(sqlite: Database, old: OldLake, folder: Path) -> None:
    def step(_name: str, done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(sqlite, old, folder, progress=step)
    done, _ = convert(sqlite, old, folder)
    assert done["converted_before"] == 2
    assert sorted(ids(folder, "tasks")) == [1, 2, 3, 4, 5, 6, 7]


def test_a_damaged_old_file_is_named_and_keeps_all_old_files(sqlite: Database, old: OldLake, folder: Path) -> None:
    path = old.root / "tasks" / DAY / "ac-0.parquet"
    flip(path, 40)
    done, (error,) = convert(sqlite, old, folder, delete_old=True)
    assert f"{path} is damaged" in error
    assert sorted(ids(folder, "tasks")) == [3, 4, 5, 6, 7]
    assert path.exists() and done["files"] == 3
    flip(path, 40)
    done, damaged = convert(sqlite, old, folder, delete_old=True)
    assert (done["files"], done["converted_before"], damaged) == (1, 3, [])
    assert sorted(ids(folder, "tasks")) == [1, 2, 3, 4, 5, 6, 7]
    assert not [*old.root.rglob("*.parquet")]
    assert convert(sqlite, old, folder, delete_old=True)[0]["files"] == 0


def test_a_stream_goes_on_after_its_last_micro_batch(sqlite: Database, old: OldLake, folder: Path) -> None:
    place = old.root / "_dbtaskqueue" / "streams" / "dbtaskqueue.task"
    (place / "offsets").mkdir(parents=True)
    (place / "dbtaskqueue-stream").write_text("a stream")
    for number in (0, 1, 2):
        (place / "offsets" / str(number)).touch()
    token = hashlib.sha256(b"a stream 1").hexdigest()[:32]
    old.log("stream", token, old.file(token, "finished", **rows(8)))
    convert(sqlite, old, folder, delete_old=True)
    lake = Lake.at(folder)
    assert lake.has("finished", "a stream", 1) and not lake.has("finished", "a stream", 2)
    assert ids(folder, "finished") == [8]
    assert (place / "offsets" / "2").exists(), "the checkpoint stays"


def test_an_old_lake_is_converted_into_an_object_store(sqlite: Database, old: OldLake, bucket: Bucket) -> None:
    convert(sqlite, old, bucket.lake, delete_old=True)
    assert sorted(ids(bucket.lake, "tasks")) == [1, 2, 3, 4, 5, 6, 7]


def test_a_folder_that_is_no_old_lake_is_refused(sqlite: Database, old: OldLake, folder: Path) -> None:
    with pytest.raises(LakeError, match="is the old lake itself"):
        convert(sqlite, old, old.root)
    Lake.at(folder, create=True)
    with pytest.raises(LakeError, match="is not a lake of an earlier version"):
        Convert().run(Convert.context(database=sqlite, lake=str(folder), old=str(folder)))
