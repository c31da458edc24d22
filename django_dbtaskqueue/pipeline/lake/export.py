"""The Parquet files of the lake: Spark tasks write them, the archive removes rows from them and merges small ones.

A Spark task reads its slice of the database, writes it, reads each file again and compares it with its rows. Rows go as
Arrow from the database to the file, past the JVM: that takes a third of the work.
"""

import fcntl
import hashlib
import io
import json
import os
import sqlite3
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from django_dbtaskqueue.core import __version__
from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.core.sql.pipeline import ARCHIVES, ATTEMPT_KEYS, CREATE_BATCH, OPEN_BATCHES, TASK_KEYS, older
from django_dbtaskqueue.pipeline.database import Database, Link, Params
from django_dbtaskqueue.pipeline.lake import PARTITION, ROW_TABLES, DataFile, Lake, conformed, of_each, writing
from django_dbtaskqueue.pipeline.source import ATTEMPTS, Selection, Slice, arrow_schema, chunked, task_attempt_id
from django_dbtaskqueue.pipeline.source.staging import load
from django_dbtaskqueue.pipeline.spark import Progress, silent

# -- batches: one row of the database for each, and the transaction that deletes its tasks -----------------------------

LOCKED_ERRORS = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
MISSING_TABLE_ERRORS = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, sqlite3.OperationalError)
# Shorter than PostgreSQL's wait before it looks for a deadlock: then the archive gives way, never an operator.
SET_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '500ms'"
COPY_BATCH_ROWS = 100_000
REVOKED = "A run was killed before it deleted these tasks: its files were taken out of the lake."
ARCHIVE_LOCK = "hashtext('dbtaskqueue archive'), hashtext(%(location)s)"


class TaskFilters(NamedTuple):
    """Which finished tasks to archive: those that ended before ``cutoff``. No queues means all of them."""

    statuses: tuple[str, ...]
    queues: tuple[str, ...]
    cutoff: datetime


class ExportedBatch(NamedTuple):
    """Rows of ``task`` or ``history`` by a range of ids and a predicate, frozen under a token."""

    token: str
    source: str
    first_id: int
    last_id: int
    filters: TaskFilters


class Deleted(NamedTuple):
    """How many rows one delete removed, and the exported tasks (location, id) that it left in the database."""

    tasks: int
    attempts: int
    stayed: tuple[tuple[str, int], ...] = ()


class Batches:
    """The batches of one database."""

    def __init__(self, database: Database, link: Link) -> None:
        self.database = database
        self.link = link
        self.of = {source: made(database.tables, database.dialect) for source, made in ARCHIVES.items()}
        self.sql = self.of["task"]  # where both are the same

    @classmethod
    @contextmanager
    def locked(cls, database: Database) -> "Iterator[Batches]":
        """Hold the database's lock of the archive. Raises PipelineError at once if another archive holds it."""
        with database.open() as link, ExitStack() as ends:
            batches, taken = cls(database, link), False
            if link.postgresql:
                taken = batches._run(f"SELECT pg_try_advisory_lock({ARCHIVE_LOCK})", location=database.location)[0][0]
            else:
                file = ends.enter_context(open(f"{os.path.realpath(database.conninfo['dbname'])}-archive", "a"))
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    taken = True
            if not taken:
                raise PipelineError(f"Another archive of {database!r} is running. Wait for it to end.")
            try:
                yield batches
            finally:
                if link.postgresql:
                    with suppress(psycopg.Error):  # the connection's end lets go, too, but a moment after its close
                        batches._run(f"SELECT pg_advisory_unlock({ARCHIVE_LOCK})", location=database.location)

    def unfinished(self) -> list[tuple[Any, ...]]:
        """Return (token, location, lake) of the batches that were frozen and not ended, the oldest first."""
        return self._run(OPEN_BATCHES)

    def unwatch(self) -> None:
        """Let the archive take failed tasks that others waited for, where an operator let these others go."""
        sql, array = self.database.sql, self.sql.dialect.array
        with self.link.transaction():
            reported = {row[0] for row in self._run(sql.lock_reported)}
            asked = {"location": self.database.location, "ids": array(sorted(reported))}
            needed = {row[0] for row in self._run(sql.needed, **asked)} if reported else set()
            if left := reported - needed:
                self._run(sql.unwatch, ids=array(sorted(left)))

    def filters(self, age: timedelta, statuses: tuple[str, ...], queues: tuple[str, ...]) -> TaskFilters:
        """Return the filters for tasks that ended that long ago, by the database's clock."""
        found = self._run(self.sql.cutoff, age=age.total_seconds())[0][0]
        cutoff = found if isinstance(found, datetime) else datetime.fromisoformat(found).replace(tzinfo=UTC)
        return TaskFilters(statuses, queues, cutoff)

    def next(self, source: str, after: int, limit: int, filters: TaskFilters) -> tuple[int, int, int]:
        """Return (first id, last id, number) of at most ``limit`` rows that a batch would take next."""
        first, last, number = self._run(self.of[source].frozen, after=after, limit=limit, **self._params(filters))[0]
        return first or 0, last or 0, number

    def _params(self, filters: TaskFilters) -> Params:
        lists = {name: self.sql.dialect.array(getattr(filters, name)) for name in ("statuses", "queues")}
        return {**lists, "every": not filters.queues, "cutoff": self.database.time(filters.cutoff)}

    def freeze(self, source: str, after: int, limit: int, lake: str, filters: TaskFilters) -> ExportedBatch | None:
        """Store which tasks are archived next; the tasks are not touched. Return None if there are none."""
        first, last, number = self.next(source, after, limit, filters)
        if not number:
            return None
        batch = ExportedBatch(uuid.uuid4().hex, source, first, last, filters)
        lists = {name: json.dumps(getattr(filters, name)) for name in ("statuses", "queues")}
        place = {"location": self.database.location, "lake": lake, "cutoff": self.database.time(filters.cutoff)}
        self._run(CREATE_BATCH, **{**batch._asdict(), **place, **lists})
        return batch

    @contextmanager
    def deleting(
        self, batch: ExportedBatch, keys: pa.Table, attempts: pa.Table, *, size: int, horizon: int | None
    ) -> Iterator[Deleted]:
        """Delete the exported rows that are unchanged, and close the batch, in one transaction around the block.

        The block makes the rows count in the lake; if it fails, no row is deleted. A row that is locked, or was changed
        after the export, stays. With the ``horizon`` of the export's snapshot an unchanged batch is deleted in half
        the time; if a row has changed, this first try is rolled back.
        """
        with self.link.transaction():
            deleted = None
            if horizon is not None:
                with suppress(*LOCKED_ERRORS), self.link.transaction():
                    deleted = self._delete_old(batch, keys, attempts, horizon)
            deleted = deleted or self._delete(batch, keys, attempts)
            yield deleted
            facts = {"tasks": deleted.tasks, "attempts": deleted.attempts, "withdrawn": json.dumps(deleted.stayed)}
            if not self.link.change(self.sql.batch_closed, {"token": batch.token, "size": size, **facts}):
                reason = f"Batch {batch.token} was ended by another process"
                raise PipelineError(f"{reason}: nothing was deleted. Start again.")

    def _delete_old(self, batch: ExportedBatch, keys: pa.Table, attempts: pa.Table, horizon: int) -> Deleted:
        self._run(SET_LOCK_TIMEOUT)
        facts = {"first_id": batch.first_id, "last_id": batch.last_id, **self._params(batch.filters)}
        found = self._run(self.of[batch.source].remove_old.format(older=older(horizon)), **facts)
        ids, totals = (keys[name].to_numpy() for name in ("id", "total_attempt"))
        sums = len(ids), int(ids.sum(dtype=object)), int(np.bitwise_xor.reduce(ids)), int(totals.sum(dtype=object))
        if tuple(map(int, found[0])) != sums:
            raise psycopg.Rollback  # a row was written to after it was exported
        removed = 0
        if attempts.num_rows:
            self._run(self.sql.temporary["archived_attempt"])
            self._copy("archived_attempt", attempts.select(ATTEMPT_KEYS))
            removed = self.link.change(self.sql.remove_exported_attempts)
        return Deleted(keys.num_rows, removed)

    def _delete(self, batch: ExportedBatch, keys: pa.Table, attempts: pa.Table) -> Deleted:
        if self.link.postgresql:
            self._run("SET LOCAL work_mem = '128MB'")
        for name, statement in (sql := self.of[batch.source]).temporary.items():
            if not self.link.postgresql:  # they live as long as the connection
                self._run(f"DROP TABLE IF EXISTS temp.{name}")
            self._run(statement)
        self._copy("archived_key", keys.select(TASK_KEYS))
        self._copy("archived_attempt", attempts.select(ATTEMPT_KEYS))
        self._run(sql.lock)
        self._run(sql.note_locked)
        gone = self.link.change(sql.remove_locked)
        removed = self.link.change(sql.remove_attempts) if attempts.num_rows else 0
        return Deleted(gone, removed, tuple(self._run(sql.stayed) if gone < keys.num_rows else []))

    def resume(self, lake: Lake) -> int:
        """Take back the batches of a killed run; return how many. Raises PipelineError for one of another lake."""
        own = [(token, root) for token, location, root in self.unfinished() if location == self.database.location]
        for token, root in own:
            if Lake(root).root != lake.root:
                reason = f"An archive of {self.database.location} into the lake {root} is not finished"
                raise PipelineError(f"{reason}. Finish it first: archive --lake {root}")
            lake.revoke(token)
            self._run(self.sql.batch_abandoned, token=token, note=REVOKED)
        return len(own)

    def _copy(self, table: str, rows: pa.Table) -> None:
        load(self.link, table, rows.to_batches(max_chunksize=COPY_BATCH_ROWS))
        if self.link.postgresql:
            self._run(f"ANALYZE {table}")

    def _run(self, sql: str, **values: object) -> list[tuple[Any, ...]]:
        try:
            return self.link.run(sql, values)
        except MISSING_TABLE_ERRORS as error:
            raise PipelineError(f"{self.database!r} cannot be archived: {error}. Run manage.py migrate.") from error


# -- export ------------------------------------------------------------------------------------------------------------

FileWriter = Callable[[Iterable[pa.RecordBatch]], Iterable[DataFile]]
WRITTEN_FILES = "table string, path string, rows long, bytes long"  # a Spark task's answer
MAX_TABLE_BYTES = 128 * 2**20  # of rows that a task holds at once
MIN_SMALL_FILES = 8  # of one day, before they are merged
SMALL_FILE_BYTES = 16 * 2**20  # larger files stay as they are
MERGED_FILE_BYTES = 32 * 2**20  # about the largest size of a merged file
SUMMARY_TABLE = "summaries"
VERSION = f"{__version__} 2"  # of what a summary holds: with each release every summary is made again
KEY_CHARACTERS = 32
SORTED = [(name, "ascending") for name in ("part", "queue", "hour", "message", "tag", "reference")]


class Export(NamedTuple):
    """Writes files whose names begin with ``token``. They do not count before a commit."""

    lake: Lake
    token: str

    def write(self, table: str, rows: pa.Table, name: str) -> Iterator[DataFile]:
        """Write the rows of each day into one file. Raises LakeError for a file that does not read the same back."""
        for day, part in by_day(rows):
            yield self.write_day(table, day, part.sort_by([("queue_name", "ascending"), ("id", "ascending")]), name)

    def write_day(self, table: str, day: str, rows: pa.Table, name: str) -> DataFile:
        """Write rows of one day into one file, as ``write`` does."""
        content = io.BytesIO()
        numbers = [one.name for one in rows.schema if pa.types.is_integer(one.type) or pa.types.is_timestamp(one.type)]
        pq.write_table(
            rows, content, compression="zstd", compression_level=3, store_schema=False, write_page_checksum=True,
            use_dictionary=[one.name for one in rows.schema if pa.types.is_string(one.type)],
            column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),  # differences, in a tenth of the bytes
        )  # fmt: skip
        sha256 = hashlib.sha256(content.getbuffer()).hexdigest()
        file = DataFile(table, f"{PARTITION}={day}/{self.token}-{name}-{sha256}.parquet", rows.num_rows, content.tell())
        place = self.lake.path(file)
        with writing(place):
            self.lake.store.write(file.name, content.getbuffer())
        if not self.lake.read(file).cast(rows.schema).equals(rows):
            remedy = "Check the disk or the store, then start again"
            raise LakeError(place, "holds other rows than were written", remedy)
        return file

    def without(self, files: Iterable[tuple[DataFile, pa.Table]]) -> Iterator[DataFile]:
        """Yield of each file what is left without the rows of these tasks (location, id): it, a new one, or nothing."""
        for file, tasks in files:
            key = "task_id" if file.table == "attempts" else "id"
            rows = self.lake.read(file)
            kept = rows.join(tasks.rename_columns(["location", key]), ["location", key], join_type="left anti")
            if kept.num_rows == rows.num_rows:
                yield file
            elif kept.num_rows:
                yield self.write_day(file.table, file.day, kept.sort_by("id"), "kept")


def by_day(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of each day, without the day itself."""
    for day in pc.unique(rows[PARTITION]):
        yield day.as_py().isoformat(), rows.filter(pc.equal(rows[PARTITION], day)).drop_columns(PARTITION)


def compact(
    lake: Lake, damaged: list[str], *,
    without: Collection[str] = (), fewest: int = MIN_SMALL_FILES, progress: Progress = silent,
) -> int:  # fmt: skip
    """Merge the small files of each day with at least ``fewest`` of them; return how many were replaced.

    Files of the changes ``without`` stay, because they may be revoked; so does a damaged one, whose error goes to
    ``damaged``. Readers of an older version can still read the old files for a week.
    """
    groups = [group for table in ROW_TABLES for group in _groups(lake.files(table), without, fewest)]
    replaced = 0
    for done, group in enumerate(groups):
        progress("compact", done, len(groups))
        sound = of_each(lambda one: (one, lake.read(one)), group, damaged)
        if len(sound) > 1:
            merged, tables = zip(*sound, strict=True)
            rows = pa.concat_tables(tables, promote_options="default").sort_by("id")  # a missing column is null
            file = Export(lake, uuid.uuid4().hex).write_day(group[0].table, group[0].day, rows, "merged")
            lake.commit(file.table, [file], merged)
            replaced += len(merged)
    for table in lake.tables():
        lake.vacuum(table)
    return replaced


def _groups(files: Sequence[DataFile], without: Collection[str], fewest: int) -> Iterator[list[DataFile]]:
    small = [one for one in files if one.bytes < SMALL_FILE_BYTES and one.token not in without]
    for _day, near in groupby(small, lambda one: one.day):
        for group in chunked(near, attrgetter("bytes"), MERGED_FILE_BYTES):
            if len(group) >= fewest or sum(one.bytes for one in group) > MERGED_FILE_BYTES:
                yield group


# -- in Spark's tasks --------------------------------------------------------------------------------------------------


def files_of(rows: DataFrame, writer: FileWriter) -> list[DataFile]:
    """Return the files that ``writer`` makes of each partition, without those of failed tries of a Spark task."""

    def described(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if files := [one._asdict() for one in writer(batches)]:
            yield pa.RecordBatch.from_pylist(files)

    return [DataFile(**row.asDict()) for row in rows.mapInArrow(described, WRITTEN_FILES).collect()]


def lake_tasks(rows: pa.Table, location: str) -> pa.Table:
    """Return rows of the task table or the history as tasks of the lake, each with the day it finished."""
    if "task_id" in rows.column_names:
        rows = rows.drop_columns("id").rename_columns({"task_id": "id"})
    else:
        rows = rows.append_column("location", pa.repeat(location, rows.num_rows))
    ended = pc.coalesce(rows["finish_time"], rows["last_update_time"])
    day = pc.floor_temporal(ended, unit="day").cast(pa.timestamp("us")).cast(pa.date32())
    return conformed(rows.append_column(PARTITION, day), "tasks")


def bounded_tables(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield rows as tables of bounded size."""
    return map(pa.Table.from_batches, chunked(batches, attrgetter("nbytes"), MAX_TABLE_BYTES))


def write_slices(
    export: Export, tasks: Selection, cutoff: datetime, slices: Sequence[tuple[int, int]],
    numbers: Iterable[pa.RecordBatch],
) -> Iterator[DataFile]:  # fmt: skip
    """Write the tasks of the slices of these numbers, and their attempts, slice by slice."""
    for number in (one for batch in numbers for one in batch.column(0).to_pylist()):
        for index, rows in enumerate(bounded_tables(tasks.read(Slice(*slices[number])))):
            ended = pc.coalesce(rows["finish_time"], rows["last_update_time"])
            old = rows.filter(pc.less(ended, pa.scalar(cutoff, pa.timestamp("us", "UTC"))))
            if old.num_rows:
                found, name = lake_tasks(old, tasks.database.location), f"{task_attempt_id()}-{index}"
                yield from export.write("tasks", found, name)
                yield from export.write("attempts", _attempts_of(found, tasks), name)


def _attempts_of(found: pa.Table, tasks: Selection) -> pa.Table:
    """Return the failed attempts of the tasks that were found, each with the day of its task."""
    ends = pc.min_max(found["id"]).as_py()
    near = (("task_id", ">=", ends["min"]), ("task_id", "<=", ends["max"]))
    chosen = replace(tasks, table="attempt", schema=ATTEMPTS, conditions=near)
    attempts = pa.Table.from_batches(chosen.read(Slice()), arrow_schema(ATTEMPTS))
    owners = found.select(["location", "id", PARTITION]).rename_columns(["location", "task_id", PARTITION])
    return conformed(attempts.join(owners, ["location", "task_id"], join_type="inner"), "attempts")


def write_finished(export: Export, location: str, batches: Iterable[pa.RecordBatch]) -> Iterator[DataFile]:
    """Write finished tasks as the lake's ``finished``."""
    for index, rows in enumerate(bounded_tables(batches)):
        yield from export.write("finished", lake_tasks(rows, location), f"{task_attempt_id()}-{index}")


# -- summaries ---------------------------------------------------------------------------------------------------------

# Of each day what reports add up. The name of its file begins with a key of the contents of the day's files, and of the
# options that change the figures. If a file of the day changes, nobody reads the summary: the next writer removes it.


def key_of(files: Iterable[DataFile], options: str) -> str:
    """Return the key of the summary of a day: `KEY_CHARACTERS` are of its files, as many of the report's options."""
    contents = "\n".join([VERSION, *sorted(f"{one.table}/{one.sha256}" for one in files)])
    return "".join(hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS] for text in (contents, options))


def summaries(lake: Lake, keys: Mapping[str, str]) -> dict[str, DataFile]:
    """Return those summaries that have the key of their day. A damaged one is left out: it is made again."""
    if not lake.has_table(SUMMARY_TABLE):
        return {}
    own = [one for one in lake.files(SUMMARY_TABLE) if keys.get(one.day) == one.token]
    return {one.day: one for one in lake.sound(own, [])}


def remove_out_of_date(lake: Lake, added: Iterable[DataFile] = ()) -> None:
    """Remove the summaries of days whose files have changed, and add these in the same commit. Raises LakeError."""
    added, old = [*added], _out_of_date(lake)
    if added or old:
        lake.commit(SUMMARY_TABLE, added, old)
    if added and (late := _out_of_date(lake)):  # a day changed meanwhile, as `erase` does: nothing of it may stay
        lake.commit(SUMMARY_TABLE, (), late)
        lake.vacuum(SUMMARY_TABLE, 0, full=False)


def _out_of_date(lake: Lake) -> list[DataFile]:
    if not lake.has_table(SUMMARY_TABLE):
        return []
    days = defaultdict(list)
    for file in (*lake.files("tasks"), *lake.files("attempts")):
        days[file.day].append(file)
    keys = {day: key_of(files, "")[:KEY_CHARACTERS] for day, files in days.items()}
    return [one for one in lake.files(SUMMARY_TABLE) if one.token[:KEY_CHARACTERS] != keys.get(one.day)]


def write_summaries(lake: Lake, keys: Mapping[str, str], batches: Iterable[pa.RecordBatch]) -> Iterator[DataFile]:
    """Write rows of summaries, all of a day in one partition; ``keys`` are by day."""
    if held := [one for one in batches if one.num_rows]:
        for day, part in by_day(pa.Table.from_batches(held)):
            yield Export(lake, keys[day]).write_day(SUMMARY_TABLE, day, part.sort_by(SORTED), "0")
