"""The archive's side of the lake: export a batch, verify it by reading it again, publish it, withdraw from it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from django_dbtaskqueue.core.exceptions import CheckFailed, LakeError
from django_dbtaskqueue.core.sql.archive import ATTEMPT_KEYS, KEYS
from django_dbtaskqueue.pipeline.lake.archive_write import Writer, encodings
from django_dbtaskqueue.pipeline.lake.lake import DataFile, Entry, Lake
from django_dbtaskqueue.pipeline.lake.lake_files import intact, sync, write_safely, writing
from django_dbtaskqueue.pipeline.reports.quality import rule_breaks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


CHECKED = ["location", "id", "queue_name", "status", "start_time", "finish_time"]


@dataclass
class Export:
    """One change of the lake in the making: files in its staging folder, and the manifest that describes them."""

    lake: Lake
    token: str

    @property
    def folder(self) -> Path:
        """The staging folder."""
        return self.lake.staging(self.token)

    @property
    def manifest(self) -> Path:
        """The file that says that everything is written, and what."""
        return self.folder / "manifest.json"

    def found(self) -> Entry | None:
        """Return the manifest of an export that a killed run finished; remove what an unfinished one left."""
        if self.manifest.exists():
            return Entry.read(self.manifest)
        with writing(self.lake.root):
            if self.folder.exists():
                shutil.rmtree(self.folder)
        return None

    @property
    def writer(self) -> Writer:
        """What writes in Spark's tasks."""
        return Writer(str(self.folder), self.token)

    def describe(self, kind: str, written: DataFrame, facts: Mapping[str, Any]) -> Entry:
        """Run the tasks that write, remove what failed tries left, and write the manifest of the rest."""
        with writing(self.lake.root):
            self.folder.mkdir(parents=True, exist_ok=True)
        files = tuple(sorted((DataFile(**row.asDict()) for row in written.collect()), key=lambda one: one.path))
        with writing(self.lake.root):
            named = {self.folder / one.path for one in files}
            for path in self.folder.glob("*/*/*/*.parquet"):
                if path not in named:
                    path.unlink()
            entry = Entry(self.token, kind, files, facts=facts)
            write_safely(self.manifest, entry.text())
        return entry

    def verify(self, entry: Entry, *, check: bool = True) -> None:
        """Read the files again and compare. Raises LakeError, or CheckFailed for tasks that break a rule."""
        checked = []
        try:
            for one in entry.files:
                content = pa.BufferReader(intact(self._staged(one), one.sha256))
                if one.table == "tasks":
                    checked.append(pq.read_table(content, columns=CHECKED))
        except LakeError:
            self.lake.discard(self.token)
            raise
        if check and checked and (broken := rule_breaks(pa.concat_tables(checked))):
            refuse(broken)

    def _staged(self, file: DataFile) -> Path:
        """Return a file's path in the staging folder: a killed run may have moved it to its place already."""
        staged, place = self.folder / file.path, self.lake.root / file.path
        if place.exists() and not staged.exists():
            with writing(self.lake.root):
                staged.parent.mkdir(parents=True, exist_ok=True)
                place.rename(staged)
        return staged

    def publish(self, entry: Entry) -> None:
        """Move the files to their places and make the change. May be cut off anywhere and done again."""
        folders = set()
        with writing(self.lake.root):
            for one in entry.files:
                place = self.lake.root / one.path
                place.parent.mkdir(parents=True, exist_ok=True)
                if (self.folder / one.path).exists():
                    sync(self.folder / one.path)
                    (self.folder / one.path).rename(place)
                folders |= {place.parent, place.parent.parent, self.lake.root / one.table, self.lake.root}
            for folder in folders:
                sync(folder)
        self.lake.commit(entry)
        self.lake.discard(self.token)


def refuse(broken: Mapping[str, int]) -> None:
    """Raise CheckFailed for the rules that rows break, and how many do."""
    table = "; ".join(f"{name}: {number:,} rows" for name, number in broken.items())
    raise CheckFailed(
        f"The rows to archive break rules ({table}). Nothing was deleted. See them with `check`, mend or delete them, "
        "or archive them as they are with --no-check.",
        {"broken": dict(broken)},
    )


def data_file(root: Path, path: Path) -> DataFile:
    """Return the description of a Parquet file below ``root``."""
    content = path.read_bytes()
    rows = pq.ParquetFile(pa.BufferReader(content)).metadata.num_rows
    place = path.relative_to(root)
    return DataFile(place.parts[0], str(place), rows, len(content), hashlib.sha256(content).hexdigest())


def keys(lake: Lake, entry: Entry) -> tuple[pa.Table, pa.Table]:
    """Return what names the tasks and the attempts of a change, read from its files. Raises LakeError."""
    return _columns(lake, entry, "tasks", KEYS), _columns(lake, entry, "attempts", ATTEMPT_KEYS)


def _columns(lake: Lake, entry: Entry, table: str, names: tuple[str, ...]) -> pa.Table:
    found = [
        pq.read_table(pa.BufferReader(intact(lake.root / one.path, one.sha256)), columns=list(names))
        for one in entry.files
        if one.table == table
    ]
    return pa.concat_tables(found) if found else pa.table({name: pa.array([], pa.int64()) for name in names})


def withdraw(lake: Lake, entry: Entry, withdrawn: tuple[tuple[str, int], ...]) -> None:
    """Take the tasks (location, id) that stayed in the database, and their attempts, out of a published change."""
    token = f"{entry.token}w"
    if withdrawn and lake.entry(token) is None:
        added, removed = [], []
        with writing(lake.root):
            for one in entry.files:
                rows = pq.read_table(pa.BufferReader(intact(lake.root / one.path, one.sha256)))
                kept = _without(rows, withdrawn, "id" if one.table == "tasks" else "task_id")
                if kept.num_rows == rows.num_rows:
                    continue
                removed.append(one.path)
                place = (lake.root / one.path).with_name(f"{token}-{len(removed)}.parquet")
                if kept.num_rows:
                    pq.write_table(kept, place, **encodings(kept.schema))
                    sync(place)
                    sync(place.parent)
                    added.append(replace(data_file(lake.root, place), table=one.table))
        lake.commit(Entry(token, "withdraw", tuple(added), tuple(removed), {"withdrawn": withdrawn}))
    lake.sweep()


def _without(rows: pa.Table, withdrawn: tuple[tuple[str, int], ...], key: str) -> pa.Table:
    kept = pa.array([True] * rows.num_rows)
    for location in {place for place, _task in withdrawn}:
        ids = pa.array([task for place, task in withdrawn if place == location], pa.int64())
        there = pc.and_(pc.equal(rows["location"], location), pc.is_in(rows[key], value_set=ids))
        kept = pc.and_not(kept, there)
    return rows.filter(kept)
