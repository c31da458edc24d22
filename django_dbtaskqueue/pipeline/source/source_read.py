"""Reading tasks in Spark tasks: which rows, in which slices, as Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import (
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from django_dbtaskqueue.pipeline.database import Database, Link
from django_dbtaskqueue.pipeline.lake.copying import copied, gone

ARROW: dict[type[DataType], pa.DataType] = {
    StringType: pa.string(),
    LongType: pa.int64(),
    IntegerType: pa.int32(),
    ShortType: pa.int16(),
    DoubleType: pa.float64(),
    TimestampType: pa.timestamp("us", tz="UTC"),
}
OPERATORS: dict[type[Filter], str] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
    In: "in",
}
PUSHED_TEXTS = ("queue_name", "status")
SLICE = 500_000  # ids of one partition
ROWS = 10_000  # rows of a record batch from SQLite
Condition = tuple[str, str, Any]  # column, operator, value


@dataclass
class Slice(InputPartition):
    """The rows with ids from ``low`` to below ``high``."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Selection:
    """Which columns of which rows of ``table`` (a quoted name); conditions hold all together."""

    table: str
    schema: StructType
    conditions: tuple[Condition, ...] = ()

    def where(self, database: Database, part: Slice) -> tuple[str, dict[str, Any]]:
        """Return WHERE (or nothing) and its parameters for one slice."""
        tests: list[str] = []
        params: dict[str, Any] = {}
        bounds = [("id", ">=", part.low), ("id", "<", part.high)]
        for column, operator, value in (*self.conditions, *(one for one in bounds if one[2] is not None)):
            name = f"p{len(tests)}"
            if operator == "known":
                tests.append(f"{column} IS NOT NULL")
            elif operator == "in":
                params[name] = database.dialect.array(value)
                tests.append(database.dialect.one_of(column, name))
            else:
                timed = isinstance(value, datetime)
                params[name] = _time_param(value, database) if timed else value
                tests.append(f"{_comparable(column, database) if timed else column} {operator} %({name})s")
        return f" WHERE {' AND '.join(tests)}" if tests else "", params

    def bounds(self, database: Database, link: Link) -> tuple[int, int] | None:
        """Return the first and last id, None when there is no row."""
        where, params = self.where(database, Slice())
        first, last = link.run(f"SELECT min(id), max(id) FROM {self.table}{where}", params)[0]
        return None if first is None else (first, last)


def _time_param(value: datetime, database: Database) -> Any:
    value = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    return value if database.vendor == "postgresql" else value.strftime("%Y-%m-%d %H:%M:%S.%f")


def _comparable(column: str, database: Database) -> str:
    """Return a time column; on SQLite, which holds times as text with 0, 3 or 6 digits of a second, with 6."""
    if database.vendor == "postgresql":
        return column
    return f"CASE length({column}) WHEN 19 THEN {column} || '.000000' ELSE substr({column} || '000', 1, 26) END"


class TaskReader(DataSourceReader):
    """A batch read. With ``snapshot`` in slices that all see one state of the database, else in one statement."""

    def __init__(self, database: Database, selection: Selection, *, snapshot: str | None, slice_ids: int) -> None:
        self.database = database
        self.selection = selection
        self.snapshot = snapshot
        self.slice_ids = slice_ids

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters on queue, status, id and times; yield those that Spark has to apply itself."""
        for one in filters:
            if condition := self._condition(one):
                chosen = (*self.selection.conditions, condition)
                self.selection = Selection(self.selection.table, self.selection.schema, chosen)
            else:
                yield one

    def _condition(self, one: Filter) -> Condition | None:
        operator, value = OPERATORS.get(type(one)), getattr(one, "value", None)
        column = ".".join(getattr(one, "attribute", ()))
        if isinstance(one, IsNotNull) and column in self.selection.schema.names:
            return column, "known", True
        if operator is None or value is None:
            return None
        kind = next((field.dataType for field in self.selection.schema if field.name == column), None)
        if column in PUSHED_TEXTS:
            return (column, operator, list(value) if operator == "in" else value) if operator in ("=", "in") else None
        if column in ("id", "task_id") and operator != "in":
            return column, operator, value
        if isinstance(kind, TimestampType) and operator != "in":
            return column, operator, value
        return None

    def partitions(self) -> Sequence[InputPartition]:
        """Cut the range of ids into slices; without a snapshot there is one, for all that it sees is one state."""
        if self.snapshot is None:
            return [Slice()]
        with self.database.open() as link, joined(link, self.snapshot):
            found = self.selection.bounds(self.database, link)
        if found is None:
            return [Slice(0, 0)]
        first, last = found
        count = (last - first) // self.slice_ids + 1
        edges = [first + (last + 1 - first) * step // count for step in range(count + 1)]
        return [Slice(low, high) for low, high in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the slice's rows."""
        assert isinstance(partition, Slice)  # noqa: S101 -- what partitions() returns
        return read_slice(self.database, self.selection, partition, self.snapshot)


@contextmanager
def joined(link: Link, snapshot: str | None) -> Iterator[None]:
    """A transaction that only reads, in the state of the database that ``snapshot`` names, if any."""
    with link.transaction():
        if link.postgresql:
            link.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        if snapshot:
            try:
                link.run(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            except psycopg.Error as error:
                raise gone(snapshot, error) from None
        yield


def read_slice(
    database: Database, selection: Selection, part: Slice, snapshot: str | None, *, also: str = ""
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one slice, that pass the test ``also``, as record batches of the selection's schema."""
    if part.low is not None and part.low == part.high:
        return
    where, params = selection.where(database, part)
    if also:
        where = f"{where} AND {also}" if where else f" WHERE {also}"
    if database.vendor == "postgresql":
        # Text of every kind, JSON among it, travels as it is printed.
        texts = {field.name for field in selection.schema if isinstance(field.dataType, StringType)}
        columns = [f"{name}::text" if name in texts else name for name in selection.schema.names]
        query = f"SELECT {', '.join(columns)} FROM {selection.table}{where}"
        yield from copied(database, query, params, _arrow(selection.schema), snapshot)
        return
    query = f"SELECT {', '.join(selection.schema.names)} FROM {selection.table}{where}"
    with database.open() as link, joined(link, None):
        yield from _fetched(link, query, params, selection.schema)


def _arrow(schema: StructType) -> pa.Schema:
    return pa.schema([(field.name, ARROW[type(field.dataType)]) for field in schema])


def _fetched(link: Link, query: str, params: Mapping[str, Any], schema: StructType) -> Iterator[pa.RecordBatch]:
    cursor = link.connection.execute(query % {name: f":{name}" for name in params}, params)
    while rows := cursor.fetchmany(ROWS):
        columns = zip(*rows, strict=True)
        arrays = [_array(values, field.dataType) for values, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema.names)


def _array(values: Sequence[Any], kind: DataType) -> pa.Array:
    if isinstance(kind, TimestampType):
        return pa.array(values, pa.string()).cast(pa.timestamp("us")).cast(ARROW[TimestampType])
    return pa.array(values, ARROW[type(kind)])
