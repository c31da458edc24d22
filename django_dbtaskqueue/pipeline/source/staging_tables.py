"""Bulk enqueue in three steps: make a staging table, fill it from the executors, move it into TASKS at once.

``open_staging`` and ``finish`` run on the driver, ``fill`` in a Spark task. Each attempt of a Spark task marks its rows
with its own number. The driver moves only the rows of attempts whose answer it got: so a retry, a speculative attempt
or an executor that is lost after its work does not add a row twice. A driver that dies leaves only a staging table; see
`sweep_staging`.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from django_dbtaskqueue.core.exceptions import DuplicateTask, PipelineError, TaskQueueError
from django_dbtaskqueue.core.sql.pipeline import STAGING_PREFIX, STAMP_DIGITS, StagingStatements
from django_dbtaskqueue.pipeline.database import Database, Link
from django_dbtaskqueue.pipeline.source.staging_rows import Reject, Rules, stage

CHANNEL = "dbtaskqueue"
MAX_GROUP_LOCKS = 2000  # of more groups the table is locked: PostgreSQL holds some thousand locks in all
SORT_MEMORY = "128MB"
ABANDONED_AFTER = timedelta(days=1)
STAMP_FORMAT = "%Y%m%d%H%M%S"
CSV_OPTIONS = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")


@dataclass(frozen=True)
class Plan:
    """One write: its database, staging table and rules. It is sent to the executors."""

    database: Database
    table: str
    rules: Rules = field(default_factory=Rules)
    ignore: bool = False
    most_rejects: int | None = 0  # None: any number
    timed: bool = True
    once: tuple[str, int] | None = None  # the ledger's row


class Part(NamedTuple):
    """The rows that one attempt of a Spark task staged."""

    attempt: int
    rows: int
    rejected: int
    rejects: list[Reject]
    queues: list[str]
    grouped: bool  # whether any row names a group


@dataclass(frozen=True)
class WriteReport:
    """The counts of a write; ``rejects`` says why rows were left out.

    ``repeated``: the ledger has this write already, so it added nothing.
    """

    enqueued: int = 0
    ignored: int = 0
    rejects: tuple[Reject, ...] = ()
    repeated: bool = False

    @property
    def rejected(self) -> int:
        """The number of rows left out."""
        return len(self.rejects)


def open_staging(database: Database) -> str:
    """Make a staging table and return its quoted name; drop those that were abandoned a day ago."""
    sql = StagingStatements(database.tables, database.dialect)
    sweep_staging(database)
    with database.open() as link:
        name = f'"{STAGING_PREFIX}{link.run(sql.stamp)[0][0]}_{secrets.token_hex(6)}"'
        link.run(sql.create(name))
    return name


def drop_staging(database: Database, table: str) -> None:
    """Drop a staging table; if that fails, a sweep drops it later."""
    with suppress(TaskQueueError, psycopg.Error, sqlite3.Error), database.open() as link:
        link.run(f"DROP TABLE IF EXISTS {table}")


def fill(plan: Plan, batches: Iterable[pa.RecordBatch], attempt: int) -> Part:
    """Check and stage the rows of one Spark task under the number of its attempt."""
    rejects: list[Reject] = []
    queues: set[str] = set()
    counts = {"rows": 0, "rejected": 0, "grouped": 0}

    def good() -> Iterator[dict[str, pa.Array]]:
        for batch in batches:
            columns, bad = stage(batch, plan.rules)
            counts["rejected"] += len(bad)
            counts["rows"] += batch.num_rows - len(bad)
            if plan.most_rejects is None or len(rejects) <= plan.most_rejects:
                rejects.extend(bad)
            if batch.num_rows > len(bad):
                queues.update(pc.unique(columns["queue_name"]).to_pylist())
                group = columns.get("group_key")
                counts["grouped"] += 0 if group is None else len(group) - group.null_count
                yield {"_attempt": pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows - len(bad)), **columns}

    (_copy if plan.database.vendor == "postgresql" else _insert)(plan, good())
    return Part(attempt, counts["rows"], counts["rejected"], rejects, sorted(queues), counts["grouped"] > 0)


def _copy(plan: Plan, batches: Iterator[dict[str, pa.Array]]) -> None:
    first = next(batches, None)
    if first is None:
        return
    with plan.database.open() as link, link.connection.cursor() as cursor:
        statement = f"COPY {plan.table} ({', '.join(first)}) FROM STDIN (FORMAT csv)"
        with cursor.copy(statement) as copy:
            copy.write(_csv(first))
            for columns in batches:
                copy.write(_csv(columns))


def _csv(columns: dict[str, pa.Array]) -> pa.Buffer:
    # No text here is empty, so nothing between two commas is NULL.
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(pa.RecordBatch.from_pydict(columns), sink, CSV_OPTIONS)
    return memoryview(sink.getvalue())


def _insert(plan: Plan, batches: Iterator[dict[str, pa.Array]]) -> None:
    """Insert with one short transaction per batch, because SQLite has a single writer."""
    with plan.database.open() as link:
        for columns in batches:
            if "run_at" in columns:
                # SQLite's clock has milliseconds.
                columns["run_at"] = columns["run_at"].cast(pa.timestamp("ms"), safe=False).cast(pa.string())
            rows = zip(*(column.to_pylist() for column in columns.values()), strict=True)
            marks = ", ".join("?" * len(columns))
            with link.transaction():
                link.connection.executemany(f"INSERT INTO {plan.table} ({', '.join(columns)}) VALUES ({marks})", rows)


def finish(plan: Plan, parts: Sequence[Part]) -> WriteReport:
    """Move the staged rows of these parts into TASKS in one transaction, drop the staging table, wake the pollers.

    Raises `DuplicateTask` for a taken reference and `PipelineError` for too many bad rows; then nothing is written.
    """
    try:
        _check(plan, parts)
        with plan.database.open() as link:
            report = _move(plan, link, parts)
            if link.postgresql and report.enqueued:
                queues = sorted({queue for part in parts for queue in part.queues})
                link.run(
                    f"SELECT pg_notify('{CHANNEL}', q) FROM unnest(%(queues)s::text[]) AS q",
                    {"queues": queues},
                )
    except BaseException:
        drop_staging(plan.database, plan.table)
        raise
    return report


def _check(plan: Plan, parts: Sequence[Part]) -> None:
    rejected = sum(part.rejected for part in parts)
    if plan.most_rejects is not None and rejected > plan.most_rejects:
        first = next(reject for part in parts for reject in part.rejects)
        allowed = f"more than the {plan.most_rejects} allowed" if plan.most_rejects else 'on_invalid="error"'
        raise PipelineError(
            f"{rejected:,} rows cannot be enqueued ({allowed}), so nothing was written. The first, with reference "
            f"{first.reference!r} and payload {first.payload!r:.100}: {first.reason}. Correct them, or leave them out "
            'with on_invalid="reject".'
        )


def _move(plan: Plan, link: Link, parts: Sequence[Part]) -> WriteReport:
    sql = StagingStatements(plan.database.tables, plan.database.dialect)
    params = {"attempts": plan.database.dialect.array([part.attempt for part in parts])}
    staged = sum(part.rows for part in parts)
    rejects = tuple(reject for part in parts for reject in part.rejects)
    grouped = any(part.grouped for part in parts)
    ledger = {"query": plan.once[0], "batch": plan.once[1]} if plan.once else None
    try:
        with link.transaction():
            if link.postgresql:
                link.run(f"SET LOCAL work_mem = '{SORT_MEMORY}'")
            if ledger and not link.change(sql.enter, ledger):
                link.run(f"DROP TABLE {plan.table}")
                return WriteReport(rejects=rejects, repeated=True)
            if grouped:
                _lock_groups(plan, link, sql, params)
            insert = sql.insert(plan.table, ignore=plan.ignore, timed=plan.timed, grouped=grouped)
            enqueued = link.change(insert, params) if staged else 0
            if grouped:
                _regroup(plan, link, sql, params)
            if ledger:
                link.change(sql.entered, {**ledger, "rows": enqueued})
            link.run(f"DROP TABLE {plan.table}")
    except (psycopg.errors.UniqueViolation, sqlite3.IntegrityError) as error:
        raise _duplicate(plan, link, sql, params) from error
    return WriteReport(enqueued, staged - enqueued, rejects)


def _lock_groups(plan: Plan, link: Link, sql: StagingStatements, params: dict[str, Any]) -> None:
    if not link.postgresql:
        return  # SQLite has a single writer
    if link.run(sql.groups(plan.table), params)[0][0] > MAX_GROUP_LOCKS:
        link.run(sql.lock_table)
    else:
        link.run(sql.lock_groups_of(plan.table), params)


def _regroup(plan: Plan, link: Link, sql: StagingStatements, params: dict[str, Any]) -> None:
    """Make the first task of each group ready, and park the others."""
    moves = link.run(sql.misplaced(plan.table), params)
    for ready, statement in ((True, plan.database.sql.park), (False, plan.database.sql.make_ready)):
        ids = [task_id for task_id, was_ready in moves if bool(was_ready) is ready]
        if ids:
            link.run(statement, {"ids": plan.database.dialect.array(ids)})


def _duplicate(plan: Plan, link: Link, sql: StagingStatements, params: dict[str, Any]) -> TaskQueueError:
    if held := link.run(sql.conflicts(plan.table), params):
        queue, reference, task_id, status = held[0]
        return DuplicateTask(queue, reference, task_id=task_id, status=status)
    if twice := link.run(sql.twice(plan.table), params):
        return DuplicateTask(*twice[0])
    return PipelineError("A reference was taken while the rows were written, and is free again. Write them again.")


# -- tables that a killed driver left ----------------------------------------------------------------------------------


def sweep_staging(database: Database, *, older_than: timedelta = ABANDONED_AFTER) -> list[str]:
    """Drop the staging tables that are older; return their names. Each write drops those that are older than a day.

    A table that is being written to is left alone. A write that takes longer than ``older_than`` can fail as a whole.
    """
    sql = StagingStatements(database.tables, database.dialect)
    dropped = []
    with database.open() as link:
        now = _time(link.run(sql.stamp)[0][0])
        for (name,) in link.run(sql.existing):
            if now - _time(name.removeprefix(STAGING_PREFIX)) < older_than:
                continue
            try:
                with link.transaction():
                    if link.postgresql:
                        link.run("SET LOCAL lock_timeout = '100ms'")
                    link.run(f'DROP TABLE IF EXISTS "{name}"')
                dropped.append(name)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege, sqlite3.OperationalError):
                continue  # in use, or another user's
    return dropped


def _time(stamp: str) -> datetime:
    return datetime.strptime(stamp[:STAMP_DIGITS], STAMP_FORMAT)
