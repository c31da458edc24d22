"""Bulk enqueue by a staging table: check and stage the rows in Spark's tasks, then move them into TASKS at once.

``open_staging`` and ``finish`` run on the driver, ``fill`` in a Spark task. Each attempt of a Spark task marks its rows
with its own number, and the driver moves only the rows of attempts whose answer it got: a retry, a speculative attempt
or a lost executor never adds a row twice. A driver that dies leaves only a staging table; see `sweep_staging`.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import NamedTuple

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pyspark.sql import DataFrame, types
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from django_dbtaskqueue.core.columns import TIMING
from django_dbtaskqueue.core.exceptions import DuplicateTask, PipelineError, TaskQueueError
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits
from django_dbtaskqueue.core.sql.pipeline import StagingStatements
from django_dbtaskqueue.pipeline.database import Database, Link, Params, database_errors
from django_dbtaskqueue.pipeline.source import task_attempt_id
from django_dbtaskqueue.pipeline.source.rows import Reject, Rules, check_schema, stage

CHANNEL = "dbtaskqueue"
MAX_GROUP_LOCKS = 2000  # of more groups the table is locked: PostgreSQL holds some thousand locks in all
SORT_MEMORY = "128MB"
ABANDONED_AFTER = timedelta(days=1)
CSV_OPTIONS = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")


class Plan(NamedTuple):
    """One write: its database, staging table and rules. It is sent to the executors."""

    database: Database
    table: str
    rules: Rules
    ignore: bool = False  # rows whose reference is taken
    reject: bool = False  # leave bad rows out; else the first one fails the write
    timed: bool = True  # whether any row has a time
    once: tuple[str, int] | None = None  # (query, batch) in the ledger
    content: str | None = None  # what the write is made of; an entry of the ledger beside that of ``once``
    dry_run: bool = False  # stage, and count what a write would do

    @property
    def sql(self) -> StagingStatements:
        return StagingStatements(self.database.tables, self.database.dialect, self.table)

    def params(self, parts: Sequence[Part]) -> Params:
        return {"attempts": self.database.dialect.array([part.attempt for part in parts])}


@dataclass
class Part(WriterCommitMessage):
    """The rows that one attempt of a Spark task staged, and where."""

    table: str
    attempt: int
    rows: int = 0
    rejected: int = 0
    rejects: list[Reject] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    grouped: bool = False  # whether any row names a group

    def __post_init__(self) -> None:
        self.rejects = [Reject(*values) for values in self.rejects]  # JSON has lists


class WriteReport(NamedTuple):
    """The counts of a write, and why rows were left out. ``repeated``: it added nothing, the ledger has it."""

    enqueued: int = 0
    ignored: int = 0
    rejects: tuple[Reject, ...] = ()
    repeated: bool = False

    @property
    def rejected(self) -> int:
        return len(self.rejects)


# -- the staging table -------------------------------------------------------------------------------------------------


def open_staging(database: Database) -> str:
    """Make a staging table and return its quoted name; drop those that were abandoned a day ago."""
    sweep_staging(database)
    with database.open() as link:
        begin = link.run(StagingStatements(database.tables, database.dialect).name, {"age": 0.0})[0][0]
        name = f'"{begin}_{secrets.token_hex(6)}"'
        link.run(StagingStatements(database.tables, database.dialect, name).create)
    return name


def drop_staging(database: Database, table: str) -> None:
    """Drop a staging table; if that fails, a sweep drops it later."""
    with suppress(TaskQueueError, *database_errors()), database.open() as link:
        link.run(f"DROP TABLE IF EXISTS {table}")


def fill(plan: Plan, batches: Iterable[pa.RecordBatch], attempt: int) -> Part:
    """Check and stage the rows of one Spark task under the number of its attempt."""
    part = Part(plan.table, attempt)

    def good() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns, bad = stage(batch, plan.rules)
            number = batch.num_rows - len(bad)
            part.rejected += len(bad)
            part.rows += number
            if plan.reject or not part.rejects:
                part.rejects += bad
            if "run_at" in columns and not plan.database.postgresql:  # SQLite's clock has milliseconds
                columns["run_at"] = columns["run_at"].cast(pa.timestamp("ms", "UTC"), safe=False)
            if number:
                part.queues = sorted({*part.queues, *pc.unique(columns["queue_name"]).to_pylist()})
                group = columns.get("group_key")
                part.grouped |= group is not None and group.null_count < len(group)
                marks = pa.repeat(pa.scalar(attempt, pa.int64()), number)
                yield pa.RecordBatch.from_pydict({"_attempt": marks, **columns})

    rows = good()
    if (first := next(rows, None)) is not None:  # connect when there is something to write
        with plan.database.open() as link:
            every = chain([first], rows)
            for some in (every,) if link.postgresql else ([one] for one in every):  # SQLite has a single writer
                with link.transaction():
                    load(link, plan.table, some)
    return part


def load(link: Link, table: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Append record batches, all of the same columns, to a table. On SQLite times become text in UTC."""
    for first in (rest := iter(batches)):
        columns = ", ".join(first.schema.names)
        if link.postgresql:
            with link.connection.cursor().copy(f"COPY {table} ({columns}) FROM STDIN (FORMAT csv)") as copy:
                for batch in chain([first], rest):
                    # No text here is empty, so nothing between two commas is NULL.
                    sink = pa.BufferOutputStream()
                    pyarrow.csv.write_csv(batch, sink, CSV_OPTIONS)
                    copy.write(memoryview(sink.getvalue()))
        else:
            values = [
                one.cast(pa.timestamp(one.type.unit)).cast(pa.string()) if pa.types.is_timestamp(one.type) else one
                for one in first.columns
            ]
            insert = f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})"
            link.connection.executemany(insert, zip(*(one.to_pylist() for one in values), strict=True))


def finish(plan: Plan, parts: Sequence[Part]) -> WriteReport:
    """Move the staged rows of these parts into TASKS in one transaction, drop the staging table, wake the pollers.

    Raises `DuplicateTask` for a taken reference and `PipelineError` for bad rows; then nothing is written.
    """
    try:
        if (rejected := sum(part.rejected for part in parts)) and not plan.reject:
            first = next(reject for part in parts for reject in part.rejects)
            raise PipelineError(
                f'{rejected:,} rows cannot be enqueued (on_invalid="error"), so nothing was written. The first, '
                f"{f'in line {first.line} of {first.file}' if first.file else f'with reference {first.reference!r}'}: "
                f'{first.reason}. Correct them, or set them aside with on_invalid="reject" or --rejects FILE.'
            )
        with plan.database.open() as link:
            report = (_foreseen if plan.dry_run else _move)(plan, link, parts, sum(part.rows for part in parts))
            if link.postgresql and report.enqueued and not plan.dry_run:
                queues = sorted({queue for part in parts for queue in part.queues})
                link.run(f"SELECT pg_notify('{CHANNEL}', q) FROM unnest(%(queues)s::text[]) AS q", {"queues": queues})
    finally:
        drop_staging(plan.database, plan.table)
    return report._replace(rejects=tuple(reject for part in parts for reject in part.rejects))


def _foreseen(plan: Plan, link: Link, parts: Sequence[Part], staged: int) -> WriteReport:
    """Return what `_move` would, or raise the same for a taken reference."""
    sql, params = plan.sql, plan.params(parts)
    if plan.once and (" ".join(map(str, plan.once)),) in link.run(sql.entries, {"prefix": plan.once[0]}):
        return WriteReport(repeated=True)
    new = int(link.run(sql.new, params)[0][0]) if staged else 0
    if new < staged and not plan.ignore:
        raise _duplicate(plan, link, params)
    return WriteReport(new, staged - new)


def _move(plan: Plan, link: Link, parts: Sequence[Part], staged: int) -> WriteReport:
    sql, params, grouped = plan.sql, plan.params(parts), any(part.grouped for part in parts)
    query, batch = plan.once or ("", 0)
    try:
        with link.transaction():
            if link.postgresql:
                link.run(f"SET LOCAL work_mem = '{SORT_MEMORY}'")
            if plan.once and not link.change(sql.enter, {"entry": f"{query} {batch}"}):
                return WriteReport(repeated=True)
            if grouped and link.postgresql:  # SQLite has a single writer
                many = link.run(sql.groups, params)[0][0] > MAX_GROUP_LOCKS
                link.run(sql.lock_table if many else sql.lock_groups_of, params)
            insert = sql.insert(ignore=plan.ignore, timed=plan.timed, grouped=grouped)
            enqueued = link.change(insert, params) if staged else 0
            if enqueued < staged and link.run(sql.staged, params)[0][0] < staged:
                raise PipelineError("The database has lost staged rows, as after a crash. Write them again.")
            if grouped:
                _regroup(plan, link, params)
            if plan.once and plan.content:
                link.change(sql.enter, {"entry": f"{query} {plan.content} {batch}"})
    except (psycopg.errors.UniqueViolation, sqlite3.IntegrityError) as error:
        raise _duplicate(plan, link, params) from error
    return WriteReport(enqueued, staged - enqueued)


def _regroup(plan: Plan, link: Link, params: Params) -> None:
    moves = link.run(plan.sql.misplaced, params)
    for ready, statement in ((True, plan.database.sql.park), (False, plan.database.sql.make_ready)):
        if ids := [task_id for task_id, was_ready in moves if bool(was_ready) is ready]:
            link.run(statement, {"ids": plan.database.dialect.array(ids)})
            # A checkout may have taken a head.
            moves = link.run(plan.sql.misplaced, params) if ready else []


def _duplicate(plan: Plan, link: Link, params: Params) -> TaskQueueError:
    if held := link.run(plan.sql.conflicts, params):
        queue, reference, task_id, status = held[0]
        return DuplicateTask(queue, reference, task_id=task_id, status=status)
    if twice := link.run(plan.sql.twice, params):
        return DuplicateTask(*twice[0])
    return PipelineError("A reference was taken while the rows were written, and is free again. Write them again.")


def sweep_staging(database: Database, *, older_than: timedelta = ABANDONED_AFTER) -> list[str]:
    """Drop the staging tables that killed drivers left; return their names. Each write drops those older than a day.

    A table that is being written to stays. A write that takes longer than ``older_than`` can fail as a whole.
    """
    sql = StagingStatements(database.tables, database.dialect)
    dropped = []
    with database.open() as link:
        for (name,) in link.run(sql.abandoned, {"age": older_than.total_seconds()}):
            try:
                with link.transaction():
                    if link.postgresql:
                        link.run("SET LOCAL lock_timeout = '100ms'")
                    link.run(f'DROP TABLE IF EXISTS "{name}"')
                dropped.append(name)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege, sqlite3.OperationalError):
                continue  # in use, or another user's
    return dropped


# -- writers -----------------------------------------------------------------------------------------------------------

PART_DDL = "part string"


def write_tasks(
    df: DataFrame, database: Database, *,
    queue: str | None = None, on_duplicate: str = "error", on_invalid: str = "error",
    queues: Collection[str] | None = None, require_reference: bool = False,
    max_attempts: int = 5, priority: int = 0, ttl: timedelta | None = None, limits: Limits = DEFAULT_LIMITS,
    once: str | None = None, batch: int = 0, content: str | None = None, dry_run: bool = False,
) -> WriteReport:  # fmt: skip
    """Enqueue each row of ``df`` in one transaction: all of them, or none; no reader sees a part of them.

    Columns are named like ``enqueue``'s arguments. ``payload`` and ``context`` are JSON text, or a struct, map, array;
    times are timestamps, durations day-time intervals. ``queue`` is for frames without such a column, ``max_attempts``,
    ``priority`` and ``ttl`` for rows without these values. A taken (queue, reference) raises ``DuplicateTask``; with
    ``on_duplicate="ignore"`` the row is left out. A second row of ``df`` with the same reference counts as taken too.

    A bad row (payload that is not JSON, reference too long, a queue not in ``queues``, null reference with
    ``require_reference``) raises `PipelineError`; ``on_invalid="reject"`` leaves it out, with the reason in the report.

    ``once`` names this write in the ledger, ``batch`` counts within the name: a second write of the same pair, for
    example after the driver died, adds nothing and reports ``repeated``. ``content`` is a text about the rows that the
    ledger keeps beside the name. Ids follow the references' order. ``dry_run`` stages the rows, and returns what the
    write would do.
    """
    rules = Rules(
        queue=queue,
        queues=None if queues is None else frozenset(queues),
        require_reference=require_reference,
        max_attempts=max_attempts,
        priority=priority,
        ttl=None if ttl is None else ttl.total_seconds(),
        limits=limits,
    )
    named = None if once is None else (once, batch)
    plan = _plan(database, df.schema, rules, on_duplicate=on_duplicate, on_invalid=on_invalid, once=named)
    plan = plan._replace(content=content, dry_run=dry_run)
    try:
        parts = [Part(**json.loads(row.part)) for row in df.mapInArrow(partial(_fill_rows, plan), PART_DDL).collect()]
    except BaseException:
        drop_staging(database, plan.table)
        raise
    return finish(plan, parts)


def _plan(
    database: Database, schema: types.StructType, rules: Rules, *,
    on_duplicate: str, on_invalid: str, once: tuple[str, int] | None,
) -> Plan:  # fmt: skip
    check_schema(schema, rules.queue)
    for name, value, other in (("on_duplicate", on_duplicate, "ignore"), ("on_invalid", on_invalid, "reject")):
        if value not in ("error", other):
            raise PipelineError(f"{name}={value!r} must be one of 'error', {other!r}.")
    return Plan(
        database,
        open_staging(database),
        rules,
        ignore=on_duplicate == "ignore",
        reject=on_invalid == "reject",
        timed=rules.ttl is not None or not TIMING.keys().isdisjoint(schema.names),
        once=once,
    )


def _fill_rows(plan: Plan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    part = fill(plan, batches, task_attempt_id())
    yield pa.RecordBatch.from_pydict({"part": pa.array([json.dumps(vars(part))], pa.string())})


def plan_of(database: Database, schema: types.StructType, options: Mapping[str, str]) -> Plan:
    """Return the plan of a write through ``df.write`` or ``writeStream``, by its options; makes the staging table."""
    attempts, priority = int(options.get("max_attempts", 5)), int(options.get("priority", 0))
    rules = Rules(queue=options.get("queue"), max_attempts=attempts, priority=priority)
    choices = {name: options.get(name, "error") for name in ("on_duplicate", "on_invalid")}
    return _plan(database, schema, rules, **choices, once=(options["once"], 0) if "once" in options else None)


@dataclass
class TaskWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """A bulk enqueue: one write, or the micro-batch ``batchId``, unless the ledger has it: Spark may repeat it.

    Of a stream Spark makes one writer for the tasks and another for the commit, and each has made a staging table.
    """

    plan: Plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Part:
        return fill(self.plan, iterator, task_attempt_id())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        staged = [message for message in messages if isinstance(message, Part)]
        table = staged[0].table if staged else self.plan.table
        once = (self.plan.once[0], batchId) if self.plan.once else None
        finish(self.plan._replace(table=table, once=once), staged)
        if table != self.plan.table:
            drop_staging(self.plan.database, self.plan.table)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        for table in {self.plan.table, *(message.table for message in messages if isinstance(message, Part))}:
            drop_staging(self.plan.database, table)
