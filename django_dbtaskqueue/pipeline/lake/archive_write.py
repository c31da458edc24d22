"""Rows become Parquet files below a lake's staging folder: what the archive does inside Spark's tasks.

A task reads its slice of the database, writes it, reads each file again and compares it with the rows it came from.
Rows travel as Arrow from the database to the file, past the JVM: that is a third of the work.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.types import DataType, DateType

from django_dbtaskqueue.core.exceptions import LakeError
from django_dbtaskqueue.pipeline.lake.lake import PARTITIONS, SCHEMAS, DataFile
from django_dbtaskqueue.pipeline.lake.lake_files import write_bytes, writing
from django_dbtaskqueue.pipeline.schema import ATTEMPTS, SCHEMA_VERSION
from django_dbtaskqueue.pipeline.source.source_read import ARROW, Selection, Slice, read_slice

if TYPE_CHECKING:
    from django_dbtaskqueue.pipeline.database import Database
    from django_dbtaskqueue.pipeline.lake.archive_batches import Batch

WRITTEN = "table string, path string, rows long, bytes long, sha256 string"  # what a task says of a file
PIECE = 128 * 2**20  # bytes of rows held at once
TYPES: dict[type[DataType], pa.DataType] = {**ARROW, DateType: pa.date32()}
NO_QUEUE = "__HIVE_DEFAULT_PARTITION__"  # Spark's name for it


def stored(table: str) -> pa.Schema:
    """Return the Arrow schema of a table's files: all its columns but the partitions."""
    fields = [one for one in SCHEMAS[table].fields if one.name not in PARTITIONS.names]
    return pa.schema([(one.name, TYPES[type(one.dataType)]) for one in fields])


def lake_tasks(rows: pa.Table, location: str) -> pa.Table:
    """Return rows of the task table or the history as the lake's tasks, each with the day it finished."""
    if "task_id" in rows.column_names:
        rows = rows.drop_columns("id").rename_columns({"task_id": "id"})
    else:
        rows = rows.append_column("location", pa.repeat(pa.scalar(location), rows.num_rows))
    return _with_day(_conformed(rows, "tasks"), pc.coalesce(rows["finish_time"], rows["last_update_time"]))


def _conformed(rows: pa.Table, table: str) -> pa.Table:
    """Return the rows with exactly the columns of a table's files; those that it does not have are null."""
    rows = rows.append_column("schema_version", pa.repeat(pa.scalar(SCHEMA_VERSION, pa.int32()), rows.num_rows))
    schema = stored(table)
    columns = [
        rows[one.name].cast(one.type) if one.name in rows.column_names else pa.nulls(rows.num_rows, one.type)
        for one in schema
    ]
    return pa.table(columns, schema=schema)


def _with_day(rows: pa.Table, ended: Any) -> pa.Table:
    day = pc.floor_temporal(ended, unit="day").cast(pa.timestamp("us")).cast(pa.date32())
    return rows.append_column("finished_date", day)


def lake_attempts(attempts: pa.Table, tasks: pa.Table) -> pa.Table:
    """Return the failed attempts of these tasks, each with the day and the queue of its task."""
    owners = tasks.select(["location", "id", "finished_date", "queue_name"])
    owners = owners.rename_columns(["location", "task_id", "finished_date", "owner_queue"])
    joined = attempts.join(owners, ["location", "task_id"], join_type="inner")
    found = _conformed(joined, "attempts")
    return found.append_column("finished_date", joined["finished_date"]).append_column("queue", joined["owner_queue"])


def pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield rows as tables of bounded size."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.nbytes for one in held) > PIECE:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


@dataclass(frozen=True)
class Writer:
    """Writes files into one staging folder, under names that begin with the token of the change they belong to."""

    folder: str
    token: str

    def write(self, table: str, rows: pa.Table, name: str) -> Iterator[DataFile]:
        """Write the rows of each partition into a file of its own. Raises LakeError when it reads others back."""
        queues = rows["queue"] if "queue" in rows.column_names else rows["queue_name"]
        rows = rows.select(stored(table).names).append_column("_day", rows["finished_date"])
        rows = rows.append_column("_queue", queues).sort_by(
            [("_day", "ascending"), ("_queue", "ascending"), ("id", "ascending")]
        )
        for part in _partitions(rows):
            first = part.slice(0, 1).to_pylist()[0]
            queue = quote(first["_queue"] or "", safe="") or NO_QUEUE
            path = f"{table}/finished_date={first['_day']}/queue={queue}/{self.token}-{name}.parquet"
            yield self._file(table, path, part.drop_columns(["_day", "_queue"]))

    def _file(self, table: str, path: str, rows: pa.Table) -> DataFile:
        content = io.BytesIO()
        pq.write_table(rows, content, **encodings(rows.schema))
        place = Path(self.folder) / path
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, content.getbuffer())
            again = place.read_bytes()
        if not pq.read_table(pa.BufferReader(again)).cast(rows.schema).equals(rows):
            raise LakeError(place, "holds other rows than were written", "Check the disk, then start again")
        return DataFile(table, path, rows.num_rows, len(again), hashlib.sha256(again).hexdigest())


def encodings(schema: pa.Schema) -> dict[str, Any]:
    """Return the options of Parquet files: as differences, ids and times take a tenth of the room."""
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

    writer: Writer
    database: Database
    batch: Batch
    tasks: Selection
    attempts: Selection | None
    snapshot: str | None
    slices: tuple[tuple[int, int], ...]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what was written."""
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield described(self._slice(*self.slices[number]))

    def _slice(self, low: int, high: int) -> Iterator[DataFile]:
        read = read_slice(self.database, self.tasks, Slice(low, high), self.snapshot)
        for index, rows in enumerate(pieces(read)):
            ended = pc.coalesce(rows["finish_time"], rows["last_update_time"])
            old = rows.filter(pc.less(ended, pa.scalar(self.batch.cutoff, pa.timestamp("us", "UTC"))))
            if not old.num_rows:
                continue
            tasks = lake_tasks(old, self.batch.location)
            name = f"{attempt_id()}-{index}"
            yield from self.writer.write("tasks", tasks, name)
            if self.attempts is not None:
                yield from self.writer.write("attempts", self._attempts_of(tasks), name)

    def _attempts_of(self, tasks: pa.Table) -> pa.Table:
        ends = pc.min_max(tasks["id"]).as_py()
        near = (("task_id", ">=", ends["min"]), ("task_id", "<=", ends["max"]))
        assert self.attempts is not None  # noqa: S101 -- asked before
        chosen = Selection(self.attempts.table, self.attempts.schema, near)
        found = list(read_slice(self.database, chosen, Slice(), self.snapshot))
        schema = pa.schema([(one.name, TYPES[type(one.dataType)]) for one in ATTEMPTS])
        return lake_attempts(pa.Table.from_batches(found, schema), tasks)


@dataclass(frozen=True)
class RowWriter:
    """For ``mapInArrow`` over finished tasks: writes them as the lake's ``finished``."""

    writer: Writer
    location: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what was written."""
        for index, rows in enumerate(pieces(batches)):
            if rows.num_rows:
                tasks = lake_tasks(rows, self.location)
                yield described(self.writer.write("finished", tasks, f"{attempt_id()}-{index}"))


def attempt_id() -> int:
    """Return a number that no other try of any task of this session has."""
    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else 0


def described(files: Iterable[DataFile]) -> pa.RecordBatch:
    """Return descriptions of files as WRITTEN."""
    schema = pa.schema([("table", pa.string()), ("path", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()),
                        ("sha256", pa.string())])  # fmt: skip
    return pa.RecordBatch.from_pylist([asdict(one) for one in files], schema=schema)
