"""The archive in the database: one row for each batch, and the transaction that deletes its tasks."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.core.sql.pipeline import ATTEMPT_KEYS, CREATE_BATCH, OPEN_BATCHES, TASK_KEYS, ArchiveStatements
from django_dbtaskqueue.core.sql.retention import RetentionStatements
from django_dbtaskqueue.pipeline.source.staging import load

if TYPE_CHECKING:
    from django_dbtaskqueue.pipeline.database import Database, Link, Params

MISSING_TABLE_ERRORS = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, sqlite3.OperationalError)
# Shorter than PostgreSQL's wait before it looks for a deadlock: then the archive gives way, never an operator.
SET_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '500ms'"
SET_WORK_MEMORY = "SET LOCAL work_mem = '128MB'"
COPY_BATCH_ROWS = 100_000
ANOTHER_ARCHIVE = "Another archive of {!r} is running. Wait for it to end."
ARCHIVE_LOCK = "hashtext('dbtaskqueue archive'), hashtext(%(location)s)"
LOCK_ARCHIVE = f"SELECT pg_try_advisory_lock({ARCHIVE_LOCK})"
UNLOCK_ARCHIVE = f"SELECT pg_advisory_unlock({ARCHIVE_LOCK})"


@dataclass(frozen=True)
class TaskFilters:
    """Which finished tasks to archive: those that ended before ``cutoff``. No queues means all of them."""

    statuses: tuple[str, ...]
    queues: tuple[str, ...]
    cutoff: datetime


@dataclass(frozen=True)
class Batch:
    """Rows of ``task`` or ``history`` by a range of ids and a predicate, frozen under a token."""

    token: str
    location: str
    source: str
    first_id: int
    last_id: int
    filters: TaskFilters


@dataclass(frozen=True)
class Deleted:
    """How many rows one delete removed, and the exported tasks (location, id) that it left in the database."""

    tasks: int
    attempts: int
    stayed: tuple[tuple[str, int], ...] = ()


class RowsChanged(Exception):
    """A row was written to after it was exported."""


CHANGED_OR_LOCKED = (RowsChanged, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


class Batches:
    """The batches of one database."""

    def __init__(self, database: Database, link: Link) -> None:
        self.database = database
        self.link = link
        self.sql = ArchiveStatements(database.tables, database.dialect)

    @classmethod
    @contextmanager
    def locked(cls, database: Database) -> Iterator[Batches]:
        """Hold the database's lock of the archive. Raises PipelineError at once if another archive holds it."""
        alone = (
            nullcontext()
            if database.postgresql
            else _exclusive(Path(f"{os.path.realpath(database.conninfo['dbname'])}-archive"))
        )
        with database.open() as link, alone:
            batches = cls(database, link)
            if link.postgresql and not batches._run(LOCK_ARCHIVE, location=database.location)[0][0]:
                raise PipelineError(ANOTHER_ARCHIVE.format(database))
            try:
                yield batches
            finally:
                if link.postgresql:
                    with suppress(psycopg.Error):  # the connection's end lets go, too, but a moment after its close
                        batches._run(UNLOCK_ARCHIVE, location=database.location)

    def unfinished(self) -> list[tuple[str, str, str]]:
        """Return (token, location, lake) of the batches that were frozen and not ended, the oldest first."""
        return [(token, location, lake) for token, location, lake in self._run(OPEN_BATCHES)]

    def unwatch(self) -> None:
        """Let the archive take failed tasks that others waited for, where an operator let these others go."""
        sql, array = RetentionStatements(self.database.tables, self.database.dialect), self.sql.dialect.array
        with self.link.transaction():
            reported = {row[0] for row in self._run(sql.lock_reported)}
            asked = {"location": self.database.location, "ids": array(sorted(reported))}
            needed = {row[0] for row in self._run(sql.needed, **asked)} if reported else set()
            if left := reported - needed:
                self._run(sql.unwatch, ids=array(sorted(left)))

    def filters(self, age: timedelta, statuses: tuple[str, ...], queues: tuple[str, ...]) -> TaskFilters:
        """Return the filters for tasks that ended that long ago, by the database's clock."""
        return TaskFilters(statuses, queues, _moment(self._run(self.sql.cutoff, age=age.total_seconds())[0][0]))

    def next(self, source: str, after: int, limit: int, filters: TaskFilters) -> tuple[int, int, int]:
        """Return (first id, last id, number) of at most ``limit`` rows that a batch would take next."""
        first, last, number = self._run(self.sql.frozen(source), after=after, limit=limit, **self._params(filters))[0]
        return first or 0, last or 0, number

    def _params(self, filters: TaskFilters) -> Params:
        lists = {name: self.sql.dialect.array(getattr(filters, name)) for name in ("statuses", "queues")}
        return {**lists, "every": not filters.queues, "cutoff": self.database.time(filters.cutoff)}

    def freeze(self, source: str, ids: tuple[int, int], lake: str, filters: TaskFilters) -> Batch:
        """Store which tasks are archived next; the tasks are not touched."""
        batch = Batch(uuid.uuid4().hex, self.database.location, source, *ids, filters)
        lists = {name: json.dumps(getattr(filters, name)) for name in ("statuses", "queues")}
        self._run(
            CREATE_BATCH, token=batch.token, location=batch.location, source=source, lake=lake, first_id=ids[0],
            last_id=ids[1], cutoff=self.database.time(filters.cutoff), **lists,
        )  # fmt: skip
        return batch

    def failed_attempts(self, batch: Batch) -> int:
        """Return how many failed attempts the tasks in the batch's range may have."""
        if batch.source == "history":  # its ids are not those of the tasks
            return 1
        facts = {"location": batch.location, "first_id": batch.first_id, "last_id": batch.last_id}
        return int(self._run(self.sql.attempts_in, **facts)[0][0])

    @contextmanager
    def deleting(
        self, batch: Batch, keys: pa.Table, attempts: pa.Table, *, size: int, horizon: int | None
    ) -> Iterator[Deleted]:
        """Delete the exported rows that are unchanged, and close the batch, in one transaction around the block.

        The block makes the rows count in the lake; if it fails, no row is deleted. A row that another transaction has
        locked, or that was changed after the export, stays. With the ``horizon`` of the export's snapshot an unchanged
        batch is deleted in less than half the time; if a row has changed, this first try is rolled back.
        """
        with self.link.transaction():
            deleted = self._deleted(batch, keys, attempts, horizon)
            yield deleted
            facts = {"tasks": deleted.tasks, "attempts": deleted.attempts, "withdrawn": json.dumps(deleted.stayed)}
            if not self.link.change(self.sql.batch_closed, {"token": batch.token, "size": size, **facts}):
                raise PipelineError(
                    f"Batch {batch.token} was ended by another process: nothing was deleted. Start again."
                )

    def _deleted(self, batch: Batch, keys: pa.Table, attempts: pa.Table, horizon: int | None) -> Deleted:
        if horizon is not None:
            with suppress(*CHANGED_OR_LOCKED), self.link.transaction():
                return self._delete_old(batch, keys, attempts, horizon)
        return self._delete(batch, keys, attempts)

    def _delete_old(self, batch: Batch, keys: pa.Table, attempts: pa.Table, horizon: int) -> Deleted:
        self._run(SET_LOCK_TIMEOUT)
        facts = {"first_id": batch.first_id, "last_id": batch.last_id, **self._params(batch.filters)}
        found = self._run(self.sql.remove_old(batch.source, horizon), **facts)
        if tuple(map(int, found[0])) != _checksums(keys):
            raise RowsChanged
        removed = 0
        if attempts.num_rows:
            self._run(self.sql.temporary[1])
            self._copy("archived_attempt", attempts.select(ATTEMPT_KEYS))
            removed = self.link.change(self.sql.remove_exported_attempts)
        return Deleted(keys.num_rows, removed)

    def _delete(self, batch: Batch, keys: pa.Table, attempts: pa.Table) -> Deleted:
        if self.link.postgresql:
            self._run(SET_WORK_MEMORY)
        else:  # they live as long as the connection
            for name in ("archived_key", "archived_attempt", "archived_gone"):
                self._run(f"DROP TABLE IF EXISTS temp.{name}")
        for statement in self.sql.temporary:
            self._run(statement)
        self._copy("archived_key", keys.select(TASK_KEYS))
        self._copy("archived_attempt", attempts.select(ATTEMPT_KEYS))
        self._run(self.sql.lock(batch.source))
        self._run(self.sql.remove_locked(batch.source))
        removed = self.link.change(self.sql.remove_attempts) if attempts.num_rows else 0
        gone = self._run(self.sql.counted)[0][0]
        stayed = self._run(self.sql.stayed) if gone < keys.num_rows else []
        return Deleted(gone, removed, tuple((location, task) for location, task in stayed))

    def abandon(self, token: str, note: str) -> None:
        """End a batch of which nothing left the database."""
        self._run(self.sql.batch_abandoned, token=token, note=note)

    def _copy(self, table: str, rows: pa.Table) -> None:
        load(self.link, table, rows.to_batches(max_chunksize=COPY_BATCH_ROWS))
        if self.link.postgresql:
            self._run(f"ANALYZE {table}")

    def _run(self, sql: str, **values: object) -> list[tuple[Any, ...]]:
        try:
            return self.link.run(sql, values)
        except MISSING_TABLE_ERRORS as error:
            raise PipelineError(f"{self.database!r} cannot be archived: {error}. Run manage.py migrate.") from error


def _checksums(keys: pa.Table) -> tuple[int, int, int, int]:
    """Return what `ArchiveStatements.remove_old` returns if it deleted exactly these tasks."""
    ids, attempts = (keys[name].to_numpy() for name in ("id", "total_attempt"))
    whole = [int(part.sum(dtype=object)) if len(part) else 0 for part in (ids, attempts)]
    return len(ids), whole[0], int(np.bitwise_xor.reduce(ids)) if len(ids) else 0, whole[1]


def _moment(value: datetime | str) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value).replace(tzinfo=UTC)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of that file; raise PipelineError if another process holds it. A process's end releases it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(ANOTHER_ARCHIVE.format(path)) from None
        yield
