"""Readers behind ``spark.read`` and ``spark.readStream``: which rows, in which slices, as Arrow record batches."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.types import StringType, StructType, TimestampType

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.core.sql.pipeline import HORIZON_SQL
from django_dbtaskqueue.pipeline.database import Database, Params
from django_dbtaskqueue.pipeline.schema import arrow_schema

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Connection

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
