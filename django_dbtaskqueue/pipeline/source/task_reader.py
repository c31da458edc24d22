"""Readers behind ``spark.read`` and ``spark.readStream``: which rows, in which slices, as Arrow record batches."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource, types
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StringType, StructType, TimestampType

from django_dbtaskqueue.core.columns import TIMING
from django_dbtaskqueue.core.exceptions import PipelineError, near_match
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits
from django_dbtaskqueue.core.sql.pipeline import HORIZON_SQL
from django_dbtaskqueue.pipeline.database import Database, Params, arrow_schema
from django_dbtaskqueue.pipeline.source import staging
from django_dbtaskqueue.pipeline.source.files import ROW

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Connection
    from pyspark.sql import DataFrame

    from django_dbtaskqueue.pipeline.database import Link

FILTER_OPERATORS: dict[type[datasource.Filter], str] = {
    datasource.EqualTo: "=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.In: "in",
}
OPERATORS = (*FILTER_OPERATORS.values(), "known")
SNAPSHOT_NAME = re.compile(r"[0-9A-Fa-f-]+")
PUSHED_TEXT_COLUMNS = ("queue_name", "status")
PARTITION_IDS = 500_000
SQLITE_BATCH_ROWS = 10_000
ADBC_BATCH_BYTES = 4 * 2**20
MAX_FEW_BYTES = 32 * 2**20  # of Arrow: the driver reads so much itself before Spark would have started a Python worker
READ_ONE_STATE = "ISOLATION LEVEL REPEATABLE READ, READ ONLY"
BOUNDS_SCHEMA = pa.schema([("first", pa.int64()), ("last", pa.int64())])
Value = bool | int | str | datetime | list[str]
Condition = tuple[str, str, Value]  # column, operator, value


@dataclass
class Slice(datasource.InputPartition):
    """The rows with ids from ``low`` to below ``high``."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Selection:
    """Columns of the rows of ``table`` (a quoted name) that meet all conditions."""

    table: str
    schema: StructType
    conditions: tuple[Condition, ...] = ()

    def where(self, database: Database, part: Slice) -> tuple[str, dict[str, object]]:
        """Return the WHERE clause of one slice, which may be empty, and its parameters."""
        tests: list[str] = []
        params: dict[str, object] = {}
        bounds = [("id", sign, edge) for sign, edge in ((">=", part.low), ("<", part.high)) if edge is not None]
        for column, operator, value in (*self.conditions, *bounds):
            name, column = f"p{len(tests)}", self.named(column, database)
            if operator == "known":
                tests.append(f"{column} IS {'NOT ' if value else ''}NULL")
            elif isinstance(value, list):
                params[name] = database.dialect.array(value)
                tests.append(database.dialect.one_of(column, name))
            else:
                if isinstance(value, datetime):
                    column, value = _comparable(column, database), database.time(value)
                params[name] = value
                tests.append(f"{column} {operator} %({name})s")
        return f" WHERE {' AND '.join(tests)}" if tests else "", params

    def named(self, column: str, database: Database) -> str:
        """Return the name that a column has in the table; a model may give its columns other names."""
        return database.tables.rename(column) if self.table == database.tables.task else column

    def bounds(self, database: Database, snapshot: str | None = None) -> tuple[int, int] | None:
        """Return the first and last id, or None if there is no row. PostgreSQL only."""
        where, params = self.where(database, Slice())
        key = self.named("id", database)
        query = f"SELECT min({key}) AS first, max({key}) AS last FROM {self.table}{where}"
        (batch,) = copied(database, query, params, BOUNDS_SCHEMA, snapshot)
        first, last = (column[0].as_py() for column in batch.columns)
        return None if first is None else (first, last)


def checked_snapshot(name: str | None) -> str | None:
    """Return the name of a snapshot; ``PipelineError`` for what PostgreSQL does not call one."""
    if name is not None and not SNAPSHOT_NAME.fullmatch(name):
        raise PipelineError(f"snapshot={name!r} is not the name of a snapshot. Use open_snapshot().")
    return name


def _comparable(column: str, database: Database) -> str:
    """Return a time column; SQLite stores text with 0, 3 or 6 digits of a second, which becomes 6."""
    if database.postgresql:
        return column
    return f"CASE length({column}) WHEN 19 THEN {column} || '.000000' ELSE substr({column} || '000', 1, 26) END"


@dataclass
class TaskReader(datasource.DataSourceReader):
    """A batch read: with ``snapshot`` in slices that all see its state, else in one statement."""

    database: Database
    selection: Selection
    _: KW_ONLY
    snapshot: str | None
    slice_ids: int

    def pushFilters(self, filters: list[datasource.Filter]) -> Iterable[datasource.Filter]:
        """Take the filters on queue, status, id and times; yield those that Spark must apply."""
        for one in filters:
            if condition := self._condition(one):
                self.selection = replace(self.selection, conditions=(*self.selection.conditions, condition))
            else:
                yield one

    def _condition(self, one: datasource.Filter) -> Condition | None:
        operator, value = FILTER_OPERATORS.get(type(one)), getattr(one, "value", None)
        column = ".".join(getattr(one, "attribute", ()))
        kinds = {field.name: field.dataType for field in self.selection.schema}
        if isinstance(one, datasource.IsNotNull) and column in kinds:
            return column, "known", True
        if operator is None or value is None:
            return None
        if column in PUSHED_TEXT_COLUMNS:
            return (column, operator, list(value) if operator == "in" else value) if operator in ("=", "in") else None
        ordered = column in ("id", "task_id") or isinstance(kinds.get(column), TimestampType)
        return (column, operator, value) if ordered and operator != "in" else None

    def partitions(self) -> Sequence[datasource.InputPartition]:
        """Cut the range of ids into slices; without a snapshot one slice, because it must see one state."""
        if self.snapshot is None:
            return [Slice()]
        first, last = self.selection.bounds(self.database, self.snapshot) or (0, -1)
        if last < first:
            return [Slice(0, 0)]
        return [Slice(*ids) for ids in even_slices(first, last, (last - first) // self.slice_ids + 1)]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)  # noqa: S101 -- what partitions() returns
        return read_slice(self.database, self.selection, partition, self.snapshot)


def even_slices(first: int, last: int, number: int) -> tuple[tuple[int, int], ...]:
    """Cut a range of ids into pairs (first, below) of about the same length."""
    return tuple(pairwise(first + (last + 1 - first) * step // number for step in range(number + 1)))


def read_slice(
    database: Database, selection: Selection, part: Slice, snapshot: str | None, *, also: str = ""
) -> Generator[pa.RecordBatch]:
    """Yield the rows of one slice that meet the SQL ``also``, as record batches of the selection's schema."""
    if part.low is not None and part.low == part.high:
        return
    where, params = selection.where(database, part)
    if also:
        where = f"{where} AND {also}" if where else f" WHERE {also}"
    # Text and JSON are read as PostgreSQL prints them.
    as_text = {
        field.name for field in selection.schema if database.postgresql and isinstance(field.dataType, StringType)
    }
    columns = [f"{selection.named(name, database)}{'::text' * (name in as_text)}" for name in selection.schema.names]
    query, schema = f"SELECT {', '.join(columns)} FROM {selection.table}{where}", arrow_schema(selection.schema)
    if database.postgresql:
        yield from copied(database, query, params, schema, snapshot)
        return
    with closing(database.connect()) as connection:
        cursor = connection.execute(query % {name: f":{name}" for name in params}, params)
        while rows := cursor.fetchmany(SQLITE_BATCH_ROWS):
            arrays = [_array(values, one.type) for values, one in zip(zip(*rows, strict=True), schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.string()).cast(pa.timestamp("us")).cast(kind)
    return pa.array(values, kind)


def task_attempt_id() -> int:
    """Return a number that no other attempt of a Spark task of this session has."""
    context = TaskContext.get()
    return 0 if context is None else int(context.taskAttemptId())


# -- PostgreSQL's binary COPY as Arrow, by ADBC ------------------------------------------------------------------------


def copied(
    database: Database, query: str, params: Params, schema: pa.Schema, snapshot: str | None
) -> Iterator[pa.RecordBatch]:
    """Yield what a query returns in the state of ``snapshot``, with the columns of ``schema`` in that order.

    ADBC's driver in C builds columns; psycopg would build Python rows. Raises PipelineError for a database that cannot
    be reached and a snapshot that is gone. Other errors of the server are ADBC's.
    """
    text = _with_values(query, params) if params else query
    with closing(database.connect_arrow()) as connection:
        if snapshot is not None:
            _join(connection, snapshot)
        with connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(ADBC_BATCH_BYTES)})
            cursor.execute(text)
            for batch in cursor.fetch_record_batch():
                columns = [column.cast(one.type) for column, one in zip(batch.columns, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _with_values(query: str, params: Params) -> str:
    from psycopg import sql  # the processes that plan a read do without

    return query % {name: sql.Literal(value).as_string(None) for name, value in params.items()}


def _join(connection: Connection, snapshot: str) -> None:
    from adbc_driver_manager import Error

    with connection.cursor() as cursor:
        cursor.execute(f"BEGIN {READ_ONE_STATE}")
        try:
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
        except Error as error:
            raise PipelineError(
                f"The snapshot {snapshot!r} is gone ({str(error).strip()}). Use the DataFrame inside its `with "
                "open_snapshot(database) as snapshot:` block, on the same server and database."
            ) from None


@dataclass(frozen=True)
class Snapshot:
    """The name of one state of a database; None on SQLite, which reads in one statement.

    All transactions below ``horizon`` had ended. ``link`` reads that state.
    """

    name: str | None
    horizon: int | None = None
    link: Link | None = None


@contextmanager
def open_snapshot(database: Database) -> Iterator[Snapshot]:
    """Hold the present state of a PostgreSQL database, for reads of any table in any number of partitions.

    It lives as long as the ``with`` block, on one connection of the driver. Meanwhile the server cannot vacuum rows
    that were deleted since: keep the block as short as the scan. A Spark task that runs again reads the same state.
    """
    if not database.postgresql:
        yield Snapshot(None)
        return
    with database.open() as link, link.transaction():
        link.run(f"SET TRANSACTION {READ_ONE_STATE}")
        link.run("SET LOCAL idle_in_transaction_session_timeout = 0")
        yield Snapshot(link.run("SELECT pg_export_snapshot()")[0][0], link.run(HORIZON_SQL)[0][0], link)


# -- writing -----------------------------------------------------------------------------------------------------------

# Writing tasks from Spark: ``write_tasks``, and the writers behind ``df.write`` and ``df.writeStream``.

NESTED = (types.StructType, types.ArrayType, types.MapType)
PART_DDL = "part string"
# Column -> (the types it may have, how to make one)
ACCEPTED: dict[str, tuple[tuple[type[types.DataType], ...], str]] = {
    **dict.fromkeys(staging.STAGED_TEXTS, ((types.StringType,), 'col.cast("string")')),
    **dict.fromkeys(staging.JSONS, ((types.StringType, *NESTED), "to_json(col)")),
    **dict.fromkeys(
        staging.STAGED_DURATIONS,
        ((types.DayTimeIntervalType,), "make_dt_interval(secs=col), or lit(timedelta(minutes=5))"),
    ),
    **dict.fromkeys(
        staging.WHOLE, ((types.ByteType, types.ShortType, types.IntegerType, types.LongType), 'col.cast("int")')
    ),
    "run_at": ((types.TimestampType,), 'col.cast("timestamp")'),
}


def write_tasks(
    df: DataFrame,
    database: Database,
    *,
    queue: str | None = None,
    on_duplicate: str = "error",
    on_invalid: str = "error",
    queues: Collection[str] | None = None,
    require_reference: bool = False,
    max_attempts: int = 5,
    priority: int = 0,
    ttl: timedelta | None = None,
    limits: Limits = DEFAULT_LIMITS,
    once: str | None = None,
    batch: int = 0,
    content: str | None = None,
    dry_run: bool = False,
) -> staging.WriteReport:
    """Enqueue each row of ``df`` in one transaction: all of them, or none; no reader sees a part of them.

    Columns are named like ``enqueue``'s arguments (see `staging`); a struct, map or array as ``payload`` or
    ``context`` is turned into JSON. ``queue`` is for frames without such a column, ``max_attempts``, ``priority`` and
    ``ttl`` for rows without these values. A taken (queue, reference) raises ``DuplicateTask``; with
    ``on_duplicate="ignore"`` the row is left out. A second row of ``df`` with the same reference counts as taken too.

    A bad row (payload that is not JSON, reference too long, a queue not in ``queues``, null reference with
    ``require_reference``) raises `PipelineError`; ``on_invalid="reject"`` leaves it out, with the reason in the report.

    ``once`` names this write in the ledger, ``batch`` counts within the name: a second write of the same pair, for
    example after the driver died, adds nothing and reports ``repeated``. ``content`` is a text about the rows that the
    ledger keeps beside the name. Ids follow the references' order. ``dry_run`` stages the rows, and returns what the
    write would do.
    """
    check_schema(df.schema, queue)
    rules = staging.Rules(
        queue=queue,
        queues=None if queues is None else frozenset(queues),
        require_reference=require_reference,
        max_attempts=max_attempts,
        priority=priority,
        ttl=None if ttl is None else ttl.total_seconds(),
        limits=limits,
    )
    named = None if once is None else (once, batch)
    plan = _plan(database, df.columns, rules, on_duplicate=on_duplicate, on_invalid=on_invalid, once=named)
    plan = replace(plan, content=content, dry_run=dry_run)
    try:
        parts = [_part(row.part) for row in df.mapInArrow(partial(_fill_rows, plan), PART_DDL).collect()]
    except BaseException:
        staging.drop_staging(database, plan.table)
        raise
    return staging.finish(plan, parts)


def _plan(
    database: Database, columns: Iterable[str], rules: staging.Rules, *,
    on_duplicate: str, on_invalid: str, once: tuple[str, int] | None,
) -> staging.Plan:  # fmt: skip
    """Return the plan of a write, and make its staging table."""
    for name, value, choices in (
        ("on_duplicate", on_duplicate, ("error", "ignore")),
        ("on_invalid", on_invalid, ("error", "reject")),
    ):
        if value not in choices:
            raise PipelineError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
    return staging.Plan(
        database,
        staging.open_staging(database),
        rules,
        ignore=on_duplicate == "ignore",
        reject=on_invalid == "reject",
        timed=rules.ttl is not None or not TIMING.keys().isdisjoint(columns),
        once=once,
    )


def check_schema(schema: types.StructType, queue: str | None) -> None:
    """Refuse columns that are unknown or of a wrong type, and rows without a queue."""
    for field in (one for one in schema if one.name != ROW):
        if field.name not in staging.COLUMNS:
            arguments = {column: name for name, column in staging.COLUMNS.items()}
            near = near_match(arguments.get(field.name, field.name), staging.COLUMNS)
            raise PipelineError(
                f"The DataFrame has a column {field.name!r}, which is no argument of enqueue().{near} "
                f"Known: {', '.join(staging.COLUMNS)}. Put other values into the payload, "
                f'as in struct("{field.name}").alias("payload"), or drop them.'
            )
        types, remedy = ACCEPTED[field.name]
        if not isinstance(field.dataType, types):
            raise PipelineError(
                f"The column {field.name!r} is of type {field.dataType.simpleString()}, and must be "
                f"{' or '.join(kind.typeName() for kind in types)}: use {remedy}."
            )
    if queue is None and "queue" not in schema.names:
        raise PipelineError("Which queue? Give queue=, or a column named queue.")


def _fill_rows(plan: staging.Plan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    part = staging.fill(plan, batches, task_attempt_id())
    yield pa.RecordBatch.from_pydict({"part": pa.array([json.dumps(part)], pa.string())})


def _part(text: str) -> staging.Part:
    part = staging.Part(*json.loads(text))
    return part._replace(rejects=[staging.Reject(*values) for values in part.rejects])


def plan_of(database: Database, schema: types.StructType, options: Mapping[str, str]) -> staging.Plan:
    """Return the plan of a write through ``df.write`` or ``writeStream``, by its options; makes the staging table."""
    queue, once = options.get("queue"), options.get("once")
    check_schema(schema, queue)
    attempts, priority = int(options.get("max_attempts", 5)), int(options.get("priority", 0))
    rules = staging.Rules(queue=queue, max_attempts=attempts, priority=priority)
    choices = {name: options.get(name, "error") for name in ("on_duplicate", "on_invalid")}
    return _plan(database, schema.names, rules, **choices, once=None if once is None else (once, 0))


@dataclass
class Staged(WriterCommitMessage):
    """What a task of a write staged, and where."""

    part: staging.Part
    table: str


@dataclass
class StagingWriter:
    """The half of a writer that runs in Spark's tasks."""

    plan: staging.Plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return Staged(staging.fill(self.plan, iterator, task_attempt_id()), self.plan.table)


class TaskWriter(StagingWriter, DataSourceArrowWriter):
    """One atomic bulk enqueue."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Enqueue what the successful tasks have staged."""
        staging.finish(self.plan, [message.part for message in messages if isinstance(message, Staged)])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        staging.drop_staging(self.plan.database, self.plan.table)


class StreamWriter(StagingWriter, DataSourceStreamArrowWriter):
    """Micro-batches, each enqueued once, also if Spark repeats it: the ledger knows those that were.

    Spark makes one writer for the tasks and another for the commit, and each has made a staging table.
    """

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Enqueue the micro-batch, unless the ledger has it."""
        assert self.plan.once is not None  # noqa: S101 -- TaskSource asks for the option
        staged = [message for message in messages if isinstance(message, Staged)]
        table = staged[0].table if staged else self.plan.table
        plan = replace(self.plan, table=table, once=(self.plan.once[0], batchId))
        staging.finish(plan, [message.part for message in staged])
        if self.plan.table != table:
            staging.drop_staging(self.plan.database, self.plan.table)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Drop the staging tables; Spark repeats the micro-batch."""
        for table in {self.plan.table, *(message.table for message in messages if isinstance(message, Staged))}:
            staging.drop_staging(self.plan.database, table)
