"""Bulk enqueue in three steps: make a staging table, fill it from the executors, move it into TASKS at once.

``open_staging`` and ``finish`` run on the driver, ``fill`` in a Spark task. Each attempt of a task marks its rows with
its own number, and only those of the attempts whose answer reached the driver are moved: neither a retry, nor a second
try beside a slow one, nor an executor lost after its work adds a row twice. A driver that dies leaves a staging table
and nothing else; see `sweep`.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from django_dbtaskqueue.core.exceptions import DuplicateTask, PipelineError, TaskQueueError
from django_dbtaskqueue.core.sql.staging import PREFIX, Staging
from django_dbtaskqueue.pipeline.database import Database, Link
from django_dbtaskqueue.pipeline.lake.sweep import sweep_staging
from django_dbtaskqueue.pipeline.source.staging_rows import Reject, Rules, stage

CHANNEL = "dbtaskqueue"
MOST_LOCKS = 2000  # groups locked one by one; PostgreSQL's lock table holds some thousands for all
WORK_MEMORY = "128MB"  # for sorting the staged rows
CSV = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")


@dataclass(frozen=True)
class Plan:
    """One write: where to, through which staging table, by which rules. Travels to the executors."""

    database: Database
    table: str
    rules: Rules = field(default_factory=Rules)
    ignore: bool = False
    most_rejects: int | None = 0  # None: any number
    timed: bool = True
    once: tuple[str, int] | None = None  # the ledger's row


class Part(NamedTuple):
    """What one attempt of a Spark task staged."""

    attempt: int
    rows: int
    rejected: int
    rejects: list[Reject]
    queues: list[str]
    grouped: bool  # whether any row names a group


@dataclass(frozen=True)
class WriteReport:
    """What a write did, in numbers; ``rejects`` says why rows were left out.

    ``repeated``: the ledger says that this write was done before; it added nothing.
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
    """Make a staging table and return its quoted name; abandoned ones of more than a day ago are dropped."""
    sql = Staging(database.tables, database.dialect)
    sweep_staging(database)
    with database.open() as link:
        name = f'"{PREFIX}{link.run(sql.stamp)[0][0]}_{secrets.token_hex(6)}"'
        link.run(sql.create(name))
    return name


def drop_staging(database: Database, table: str) -> None:
    """Drop a staging table; when that cannot be, a sweep will."""
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
    # No text here is empty, so what stands unquoted between two commas can only be NULL.
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(pa.RecordBatch.from_pydict(columns), sink, CSV)
    return memoryview(sink.getvalue())


def _insert(plan: Plan, batches: Iterator[dict[str, pa.Array]]) -> None:
    """One short transaction per batch: SQLite has one writer, and pollers want it too."""
    with plan.database.open() as link:
        for columns in batches:
            if "run_at" in columns:
                # Milliseconds are what SQLite's own clock knows.
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
                link.run(f"SELECT pg_notify('{CHANNEL}', q) FROM unnest(%(queues)s::text[]) AS q", {"queues": queues})
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
    sql = Staging(plan.database.tables, plan.database.dialect)
    params = {"attempts": plan.database.dialect.array([part.attempt for part in parts])}
    staged = sum(part.rows for part in parts)
    rejects = tuple(reject for part in parts for reject in part.rejects)
    grouped = any(part.grouped for part in parts)
    try:
        with link.transaction():
            _tune(link)
            if plan.once and not link.change(sql.enter, _ledger(plan.once)):
                link.run(f"DROP TABLE {plan.table}")
                return WriteReport(rejects=rejects, repeated=True)
            if grouped:
                _lock_groups(plan, link, sql, params)
            insert = sql.insert(plan.table, ignore=plan.ignore, timed=plan.timed, grouped=grouped)
            enqueued = link.change(insert, params) if staged else 0
            if grouped:
                _regroup(plan, link, sql, params)
            if plan.once:
                link.change(sql.entered, {**_ledger(plan.once), "rows": enqueued})
            link.run(f"DROP TABLE {plan.table}")
    except (psycopg.errors.UniqueViolation, sqlite3.IntegrityError) as error:
        raise _duplicate(plan, link, sql, params) from error
    return WriteReport(enqueued, staged - enqueued, rejects)


def _tune(link: Link) -> None:
    if link.postgresql:
        link.run(f"SET LOCAL work_mem = '{WORK_MEMORY}'")


def _ledger(once: tuple[str, int]) -> dict[str, Any]:
    return {"query": once[0], "batch": once[1]}


def _lock_groups(plan: Plan, link: Link, sql: Staging, params: dict[str, Any]) -> None:
    if not link.postgresql:
        return  # SQLite has a single writer
    if link.run(sql.groups(plan.table), params)[0][0] > MOST_LOCKS:
        link.run(sql.lock_table)
    else:
        link.run(sql.lock_groups_of(plan.table), params)


def _regroup(plan: Plan, link: Link, sql: Staging, params: dict[str, Any]) -> None:
    """Put the right head of each group in line, and park the others."""
    moves = link.run(sql.misplaced(plan.table), params)
    for in_line, statement in ((True, plan.database.sql.leave_line), (False, plan.database.sql.enter_line)):
        ids = [task_id for task_id, was_in_line in moves if bool(was_in_line) is in_line]
        if ids:
            link.run(statement, {"ids": plan.database.dialect.array(ids)})


def _duplicate(plan: Plan, link: Link, sql: Staging, params: dict[str, Any]) -> TaskQueueError:
    if held := link.run(sql.taken(plan.table), params):
        queue, reference, task_id, status = held[0]
        return DuplicateTask(queue, reference, task_id=task_id, status=status)
    if twice := link.run(sql.twice(plan.table), params):
        return DuplicateTask(*twice[0])
    return PipelineError("A reference was taken while the rows were written, and is free again. Write them again.")
