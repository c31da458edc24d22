"""The archive in the lake: export a batch, verify it by reading it again, publish it, withdraw rows from it.

A Spark task reads its slice of the database, writes it, reads each file again and compares it with its rows. Rows go as
Arrow from the database to the file, past the JVM: that takes a third of the work.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from django_dbtaskqueue.core.exceptions import CheckFailed, LakeError
from django_dbtaskqueue.core.sql.pipeline import ATTEMPT_KEYS, TASK_KEYS
from django_dbtaskqueue.pipeline.lake import (
    LAKE_SCHEMAS,
    PARTITION_SCHEMA,
    DataFile,
    Entry,
    Lake,
    intact,
    sync,
    write_bytes,
    write_safely,
    writing,
)
from django_dbtaskqueue.pipeline.reports.quality import rule_breaks
from django_dbtaskqueue.pipeline.schema import ATTEMPTS, SCHEMA_VERSION, arrow_schema
from django_dbtaskqueue.pipeline.source.task_reader import Selection, Slice, read_slice, task_attempt_id

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from django_dbtaskqueue.pipeline.database import Database
    from django_dbtaskqueue.pipeline.lake.archive_batches import Batch

BatchWriter = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
CHECKED_COLUMNS = ["location", "id", "queue_name", "status", "start_time", "finish_time"]
WRITTEN_FILES = "table string, path string, rows long, bytes long, sha256 string"  # a Spark task's answer
MAX_TABLE_BYTES = 128 * 2**20  # of rows that a task holds at once
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # as Spark names it


@dataclass
class Export:
    """A change of the lake before it is published: files in its staging folder, and their manifest."""

    lake: Lake
    token: str

    @property
    def folder(self) -> Path:
        return self.lake.staging(self.token)

    @property
    def manifest(self) -> Path:
        """The file that lists all written files. It is written last."""
        return self.folder / "manifest.json"

    def found(self) -> Entry | None:
        """Return the manifest of an export that a killed run finished; remove the files of an unfinished one."""
        if self.manifest.exists():
            return Entry.read(self.manifest)
        with writing(self.lake.root), suppress(FileNotFoundError):
            shutil.rmtree(self.folder)
        return None

    def write(self, table: str, rows: pa.Table, name: str) -> Iterator[DataFile]:
        """Write the rows of each partition into one file, in a Spark task; the files' names begin with the token.

        Raises LakeError for a file that does not read the same rows back.
        """
        queues = rows["queue"] if "queue" in rows.column_names else rows["queue_name"]
        rows = rows.select(stored(table).names).append_column("_day", rows["finished_date"])
        rows = rows.append_column("_queue", queues).sort_by(
            [("_day", "ascending"), ("_queue", "ascending"), ("id", "ascending")]
        )
        for part in _partitions(rows):
            first = part.slice(0, 1).to_pylist()[0]
            queue = quote(first["_queue"] or "", safe="") or NULL_PARTITION
            path = f"{table}/finished_date={first['_day']}/queue={queue}/{self.token}-{name}.parquet"
            yield self._file(table, path, part.drop_columns(["_day", "_queue"]))

    def _file(self, table: str, path: str, rows: pa.Table) -> DataFile:
        content = io.BytesIO()
        pq.write_table(rows, content, **encodings(rows.schema))
        place = self.folder / path
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, content.getbuffer())
            again = place.read_bytes()
        if not pq.read_table(pa.BufferReader(again)).cast(rows.schema).equals(rows):
            raise LakeError(place, "holds other rows than were written", "Check the disk, then start again")
        return DataFile(table, path, rows.num_rows, len(again), hashlib.sha256(again).hexdigest())

    def describe(self, kind: str, rows: DataFrame, writer: BatchWriter, facts: Mapping[str, object]) -> Entry:
        """Write the rows in Spark's tasks, remove the files of failed attempts, write the manifest of the others."""
        with writing(self.lake.root):
            self.folder.mkdir(parents=True, exist_ok=True)
        written = rows.mapInArrow(writer, WRITTEN_FILES).collect()
        files = tuple(sorted((DataFile(**row.asDict()) for row in written), key=lambda one: one.path))
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
                    checked.append(pq.read_table(content, columns=CHECKED_COLUMNS))
        except LakeError:
            self.lake.discard(self.token)
            raise
        if check and checked and (broken := rule_breaks(pa.concat_tables(checked))):
            rules = "; ".join(f"{name}: {number:,} rows" for name, number in broken.items())
            raise CheckFailed(
                f"The rows to archive break rules ({rules}). Nothing was deleted. See them with `check`, correct or "
                "delete them, or archive them as they are with --no-check.",
                {"broken": broken},
            )

    def _staged(self, file: DataFile) -> Path:
        """Return a file's path in the staging folder; move it back if a killed run has moved it to its place."""
        staged, place = self.folder / file.path, self.lake.root / file.path
        if place.exists() and not staged.exists():
            with writing(self.lake.root):
                staged.parent.mkdir(parents=True, exist_ok=True)
                place.rename(staged)
        return staged

    def publish(self, entry: Entry) -> None:
        """Move the files to their places and write the log entry. It can be repeated after a kill at any point."""
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


def data_file(root: Path, path: Path) -> DataFile:
    """Return the description of a Parquet file below ``root``."""
    content = path.read_bytes()
    rows = pq.ParquetFile(pa.BufferReader(content)).metadata.num_rows
    place = path.relative_to(root)
    return DataFile(place.parts[0], str(place), rows, len(content), hashlib.sha256(content).hexdigest())


def keys(lake: Lake, entry: Entry) -> tuple[pa.Table, pa.Table]:
    """Return the keys of the tasks and the attempts of a change, read from its files. Raises LakeError."""
    return _columns(lake, entry, "tasks", TASK_KEYS), _columns(lake, entry, "attempts", ATTEMPT_KEYS)


def _columns(lake: Lake, entry: Entry, table: str, names: tuple[str, ...]) -> pa.Table:
    found = [
        pq.read_table(pa.BufferReader(intact(lake.root / one.path, one.sha256)), columns=list(names))
        for one in entry.files
        if one.table == table
    ]
    return pa.concat_tables(found) if found else pa.table({name: pa.array([], pa.int64()) for name in names})


def withdraw(lake: Lake, entry: Entry, withdrawn: tuple[tuple[str, int], ...]) -> None:
    """Remove the tasks (location, id) that stayed in the database, and their attempts, from a published change."""
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
                    added.append(data_file(lake.root, place))
        lake.commit(Entry(token, "withdraw", tuple(added), tuple(removed), {"withdrawn": withdrawn}))
    lake.sweep()


def _without(rows: pa.Table, withdrawn: tuple[tuple[str, int], ...], key: str) -> pa.Table:
    places, tasks = zip(*withdrawn, strict=True)
    stayed = pa.table({"location": pa.array(places, pa.string()), key: pa.array(tasks, pa.int64())})
    return rows.join(stayed, ["location", key], join_type="left anti").sort_by("id")


# -- in Spark's tasks: rows become Parquet files below the staging folder ----------------------------------------------


def stored(table: str) -> pa.Schema:
    """Return the Arrow schema of a table's files: all its columns but the partitions."""
    return arrow_schema(one for one in LAKE_SCHEMAS[table] if one.name not in PARTITION_SCHEMA.names)


def lake_tasks(rows: pa.Table, location: str) -> pa.Table:
    """Return rows of the task table or the history as tasks of the lake, each with the day it finished."""
    if "task_id" in rows.column_names:
        rows = rows.drop_columns("id").rename_columns({"task_id": "id"})
    else:
        rows = rows.append_column("location", pa.repeat(pa.scalar(location), rows.num_rows))
    ended = pc.coalesce(rows["finish_time"], rows["last_update_time"])
    day = pc.floor_temporal(ended, unit="day").cast(pa.timestamp("us")).cast(pa.date32())
    return _conformed(rows, "tasks").append_column("finished_date", day)


def _conformed(rows: pa.Table, table: str) -> pa.Table:
    """Return the rows with exactly the columns of a table's files; a missing column is null."""
    rows = rows.append_column("schema_version", pa.repeat(pa.scalar(SCHEMA_VERSION, pa.int32()), rows.num_rows))
    schema = stored(table)
    columns = [
        rows[one.name].cast(one.type) if one.name in rows.column_names else pa.nulls(rows.num_rows, one.type)
        for one in schema
    ]
    return pa.table(columns, schema=schema)


def pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield rows as tables of bounded size."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.nbytes for one in held) > MAX_TABLE_BYTES:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def encodings(schema: pa.Schema) -> dict[str, object]:
    """Return the options of Parquet files. Ids and times are stored as differences, in a tenth of the bytes."""
    numbers = [one.name for one in schema if pa.types.is_integer(one.type) or pa.types.is_timestamp(one.type)]
    return {
        "compression": "zstd",
        "compression_level": 3,
        "store_schema": False,
        "use_dictionary": [one.name for one in schema if pa.types.is_string(one.type)],
        "column_encoding": dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
    }


def _partitions(rows: pa.Table) -> Iterator[pa.Table]:
    """Cut sorted rows where day or queue change."""
    if not rows.num_rows:
        return
    rows = rows.combine_chunks()
    days, queues = rows["_day"].chunk(0), pc.fill_null(rows["_queue"].chunk(0), "")
    changes = pc.or_(pc.not_equal(days[1:], days[:-1]), pc.not_equal(queues[1:], queues[:-1]))
    edges = [0, *(place + 1 for place in pc.indices_nonzero(changes).to_pylist()), rows.num_rows]
    for start, end in pairwise(edges):
        yield rows.slice(start, end - start)


@dataclass(frozen=True)
class SliceWriter:
    """For ``mapInArrow`` over numbers of slices: writes the tasks of a batch, and their attempts, slice by slice."""

    export: Export
    database: Database
    batch: Batch
    tasks: Selection
    attempts: Selection | None
    snapshot: str | None
    slices: tuple[tuple[int, int], ...]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from described(self._slice(*self.slices[number]))

    def _slice(self, low: int, high: int) -> Iterator[DataFile]:
        read = read_slice(self.database, self.tasks, Slice(low, high), self.snapshot)
        for index, rows in enumerate(pieces(read)):
            ended = pc.coalesce(rows["finish_time"], rows["last_update_time"])
            old = rows.filter(pc.less(ended, pa.scalar(self.batch.cutoff, pa.timestamp("us", "UTC"))))
            if not old.num_rows:
                continue
            tasks = lake_tasks(old, self.batch.location)
            name = f"{task_attempt_id()}-{index}"
            yield from self.export.write("tasks", tasks, name)
            if self.attempts is not None:
                yield from self.export.write("attempts", self._attempts_of(tasks), name)

    def _attempts_of(self, tasks: pa.Table) -> pa.Table:
        """Return the failed attempts of these tasks, each with the day and the queue of its task."""
        ends = pc.min_max(tasks["id"]).as_py()
        near = (("task_id", ">=", ends["min"]), ("task_id", "<=", ends["max"]))
        assert self.attempts is not None  # noqa: S101 -- asked before
        chosen = Selection(self.attempts.table, self.attempts.schema, near)
        found = pa.Table.from_batches(read_slice(self.database, chosen, Slice(), self.snapshot), arrow_schema(ATTEMPTS))
        owners = tasks.select(["location", "id", "finished_date", "queue_name"])
        owners = owners.rename_columns(["location", "task_id", "finished_date", "queue"])
        joined = found.join(owners, ["location", "task_id"], join_type="inner")
        rows = _conformed(joined, "attempts")
        return rows.append_column("finished_date", joined["finished_date"]).append_column("queue", joined["queue"])


@dataclass(frozen=True)
class RowWriter:
    """For ``mapInArrow`` over finished tasks: writes them as the lake's ``finished``."""

    export: Export
    location: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index, rows in enumerate(pieces(batches)):
            if rows.num_rows:
                tasks = lake_tasks(rows, self.location)
                yield from described(self.export.write("finished", tasks, f"{task_attempt_id()}-{index}"))


def described(files: Iterable[DataFile]) -> Iterator[pa.RecordBatch]:
    """Yield descriptions of files as WRITTEN_FILES; nothing without files."""
    if rows := [asdict(one) for one in files]:
        yield pa.RecordBatch.from_pylist(rows)
