"""The queue as a data source of Spark, ``format("dbtaskqueue")``, and the functions that use it well.

A password is never an option, because plans and logs show options. `register` puts it into the source's pickled class.
"""

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession, datasource, types
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructType, TimestampType

from django_dbtaskqueue.core import lazy_names
from django_dbtaskqueue.core.columns import TASK_COLUMNS
from django_dbtaskqueue.core.exceptions import PipelineError, near_match
from django_dbtaskqueue.core.sql.pipeline import HORIZON_SQL
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.pipeline.database import DEFAULT_LOCATION, SECRET_KEYWORDS, Database, Link, Params
from django_dbtaskqueue.pipeline.jobs import Argument, count, reader

if TYPE_CHECKING:
    from django_dbtaskqueue.pipeline.source.staging import TaskWriter, write_tasks
    from django_dbtaskqueue.pipeline.source.stream_reader import register_stream, unregister_stream

__all__ = [
    "Snapshot", "TaskSource", "open_snapshot", "read_tasks", "register", "register_stream", "stream_tasks",
    "unregister_stream", "write_tasks",
]  # fmt: skip

ROW = "_row"  # the column of a frame that says where a row was, what it is, and why it cannot be a task
PREVIEW_CHARS = 200  # of a value that was rejected
FORMAT_NAME = "dbtaskqueue"
FILTER_SETTING = "spark.sql.python.filterPushdown.enabled"  # without it Spark refuses a source that takes filters
TimeRange = tuple[datetime | None, datetime | None]
Value = bool | int | str | datetime | list[str]
Condition = tuple[str, str, Value]  # column, operator, value
Item = TypeVar("Item")
COMMON_OPTIONS = ("url", "location", "path", "checkpointlocation", "queryname")  # the last three are Spark's own
SOURCE_OPTIONS = {
    "reader": ("table", "where", "snapshot", "slice_ids"),
    "streamReader": ("table", "where", "name"),
    "writer": ("queue", "on_duplicate", "on_invalid", "once", "max_attempts", "priority"),
}
# Imported at their first use: Spark starts two processes to plan a read, with this.
LAZY = {"staging": ("write_tasks",), "stream_reader": ("register_stream", "unregister_stream")}
__getattr__, __dir__ = lazy_names(__name__, LAZY)


class TaskSource(datasource.DataSource):
    """The source as Spark creates it, with its options. `register` makes it known to a session."""

    known: ClassVar[dict[tuple[str, str], Database]] = {}  # by location and address

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.table = str(options.get("table", "task"))

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    @property
    def database(self) -> Database:
        """The database of the option ``url``, with the password that was registered."""
        if (url := self.options.get("url")) is None:
            raise PipelineError("The option url is missing: the address of the database that was given to register().")
        if found := self.known.get((self.options.get("location", DEFAULT_LOCATION), url)):
            return found
        database = Database.from_url(url)
        if not database.conninfo.keys().isdisjoint(SECRET_KEYWORDS):
            raise PipelineError(
                "The option url holds a password, and Spark shows options in its plans. Call "
                "register(spark, Database.from_url(url)) once, and give the option database.url_without_password."
            )
        return database

    def schema(self) -> StructType:
        """Return all columns of the table; a query selects some with ``.schema(...)``."""
        return schema_of(self.table)

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        snapshot = self.options.get("snapshot")
        if snapshot is not None and not SNAPSHOT_NAME.fullmatch(snapshot):
            raise PipelineError(f"snapshot={snapshot!r} is not the name of a snapshot. Use open_snapshot().")
        self._expect("reader")
        ids = Argument("slice_ids", "", count).value(self.options.get("slice_ids", PARTITION_IDS))
        return TaskReader(replace(self._selection(schema), snapshot=snapshot), ids)

    def streamReader(self, schema: StructType) -> datasource.DataSourceStreamReader:
        from django_dbtaskqueue.pipeline.source.stream_reader import TaskStreamReader

        self._expect("streamReader")
        return TaskStreamReader(self._selection(schema), self.options.get("name"))

    def writer(self, schema: StructType, overwrite: object) -> "TaskWriter":
        """Return a writer that enqueues. Raises PipelineError for an overwrite."""
        from django_dbtaskqueue.pipeline.source.staging import TaskWriter, plan_of

        if overwrite:
            raise PipelineError('Tasks are never overwritten: write with mode("append").')
        self._expect("writer")
        return TaskWriter(plan_of(self.database, schema, self.options))

    def streamWriter(self, schema: StructType, overwrite: object) -> "TaskWriter":
        if not self.options.get("once"):
            raise PipelineError(
                "The option once is missing: a name of this stream, under which the ledger counts its micro-batches. "
                "Keep it as long as the checkpoint."
            )
        return self.writer(schema, overwrite=False)

    def _expect(self, use: str) -> None:
        """Raise PipelineError for an option that this use would ignore."""
        known = (*SOURCE_OPTIONS[use], *COMMON_OPTIONS)
        for name in map(str.lower, self.options):
            if name not in known:
                raise PipelineError(f"A {use} takes no {name!r}.{near_match(name, known)} It takes {', '.join(known)}.")

    def _selection(self, schema: StructType) -> "Selection":
        for given, ours in zip(schema, schema_of(self.table, schema.names), strict=True):
            if given.dataType != ours.dataType:
                raise PipelineError(
                    f"The column {ours.name!r} of {self.table} is of type {ours.dataType.simpleString()}, not "
                    f"{given.dataType.simpleString()}: correct .schema(...), or cast it afterwards."
                )
        conditions = reader(partial(_from_text, columns=schema_of(self.table).names), "JSON of columns and operators")
        where = Argument("where", "", conditions).value(self.options.get("where", "[]"))
        return Selection(self.database, self.table, schema, where)


def register(spark: SparkSession, *databases: Database) -> None:
    """Make ``format("dbtaskqueue")`` known to a session, with the passwords of these databases and of earlier ones.

    Then a query only needs ``.option("url", database.url_without_password)``.
    """
    TaskSource.known = {**TaskSource.known, **{(one.location, one.url_without_password): one for one in databases}}

    class Registered(TaskSource):
        # A class that is made in a function is pickled by value, with its own attributes.
        known: ClassVar[dict[tuple[str, str], Database]] = dict(TaskSource.known)

    if spark.conf.get(FILTER_SETTING, "false") != "true":  # a declarative pipeline forbids to set it in its code
        spark.conf.set(FILTER_SETTING, "true")
    spark.dataSource.register(Registered)


def read_tasks(
    spark: SparkSession, database: Database, columns: Iterable[str] | None = None, table: str = "task", *,
    snapshot: "Snapshot | None" = None, queue: str | Iterable[str] | None = None,
    status: str | Iterable[str] | None = None, ids: tuple[int | None, int | None] = (None, None),
    created: TimeRange = (None, None), finished: TimeRange = (None, None),
) -> DataFrame:  # fmt: skip
    """Return a DataFrame of ``task``, ``history`` or ``attempt``, of the given columns only (None: all of them).

    Name the columns you need: Spark cannot ask a Python source for fewer, and three are read three times as fast as
    all. ``ids``, ``created`` and ``finished`` are ranges from the first value to below the second; None is open, and a
    time without a zone is UTC. The database applies all these, and comparisons of their columns in a later ``where``.

    Each action reads one state of the database: that of ``snapshot`` (see ``open_snapshot``), in partitions of 500,000
    ids, or else the state when the action starts, in one partition.
    """
    ranges = {"id": ids, "create_time": created, "finish_time": finished}
    options = _options(spark, database, table, _conditions({"queue_name": queue, "status": status}, ranges))
    if snapshot is not None and snapshot.name is not None:
        options["snapshot"] = snapshot.name
    return spark.read.format(FORMAT_NAME).schema(schema_of(table, columns)).options(**options).load()


def few_tasks(
    database: Database, columns: Iterable[str], table: str, snapshot: "Snapshot | None" = None
) -> pa.Table | None:
    """Return these columns of a whole table, read by this process without Spark; None for over `MAX_FEW_BYTES`."""
    selection = Selection(database, table, schema_of(table, columns), snapshot=snapshot.name if snapshot else None)
    batches: list[pa.RecordBatch] = []
    with closing(selection.read(Slice())) as found:
        for batch in found:
            batches.append(batch)
            if sum(one.nbytes for one in batches) > MAX_FEW_BYTES:
                return None
    return pa.Table.from_batches(batches, schema=arrow_schema(selection.schema))


def stream_tasks(
    spark: SparkSession, database: Database, columns: Iterable[str] | None = None, table: str = "task", *,
    queue: str | Iterable[str] | None = None, name: str | None = None,
) -> DataFrame:  # fmt: skip
    """Return a streaming DataFrame of finished tasks (``task``), the history or failed attempts. PostgreSQL only.

    It starts with all rows, and returns a row once for each change that left it finished. A transaction that commits
    late delays the stream and is never skipped. See `TaskStreamReader`.

    Give a stream of tasks a ``name``, and keep it as long as the checkpoint: then a micro-batch reads only what
    finished, and not the whole table. The stream is registered; `register_stream` says what that needs.
    """
    from django_dbtaskqueue.pipeline.source.stream_reader import register_stream

    options = _options(spark, database, table, _conditions({"queue_name": queue}, {}))
    if name is not None:
        if table != "task":
            raise PipelineError(f"name={name!r}: only a stream of tasks has a name, not one of table={table!r}.")
        register_stream(database, name)
        options["name"] = name
    return spark.readStream.format(FORMAT_NAME).schema(schema_of(table, columns)).options(**options).load()


def _options(spark: SparkSession, database: Database, table: str, conditions: list[Condition]) -> dict[str, str]:
    register(spark, database)
    options = {"url": database.url_without_password, "location": database.location, "table": table}
    # Times are the only values that JSON does not know.
    where = json.dumps(conditions, default=lambda time: {"time": time.isoformat()})
    return {**options, "where": where} if conditions else options


def _conditions(
    among: Mapping[str, str | Iterable[str] | None], ranges: Mapping[str, tuple[Value | None, Value | None]]
) -> list[Condition]:
    wanted = {name: [one] if isinstance(one, str) else list(one) for name, one in among.items() if one is not None}
    found: list[Condition] = [(column, "in", values) for column, values in wanted.items()]
    for column, edges in ranges.items():
        found += [(column, sign, edge) for sign, edge in zip((">=", "<"), edges, strict=True) if edge is not None]
    return found


def _from_text(text: str, columns: Iterable[str]) -> tuple[Condition, ...]:
    found: list[Condition] = []
    for name, op, value in json.loads(text):  # whoever may write Spark SQL may write this text, and must not write ours
        if name not in columns or op not in OPERATORS or value is None or isinstance(value, list) != (op == "in"):
            raise ValueError(name, op, value)
        found.append((name, op, datetime.fromisoformat(value["time"]) if isinstance(value, dict) else value))
    return tuple(found)


# -- reading: which rows, in which slices, as Arrow record batches -----------------------------------------------------

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


@dataclass
class Slice(datasource.InputPartition):
    """The rows with ids from ``low`` to below ``high``."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Selection:
    """Columns of the rows of ``table`` that meet all conditions, in the state of a ``snapshot``, or else of now."""

    database: Database
    table: str
    schema: StructType
    conditions: tuple[Condition, ...] = ()
    snapshot: str | None = None

    def slices(self, ids: int) -> tuple[tuple[int, int], ...]:
        """Cut the rows into ranges of about so many ids, as (first, below); none without a row. PostgreSQL only."""
        key, schema = self._named("id"), pa.schema([("first", pa.int64()), ("last", pa.int64())])
        query, params = self._query([f"min({key}) AS first", f"max({key}) AS last"], Slice())
        (batch,) = copied(self.database, query, params, schema, self.snapshot)
        first, last = (column[0].as_py() for column in batch.columns)
        return () if first is None else even_slices(first, last, (last - first) // ids + 1)

    def read(self, part: Slice, *, also: str = "") -> Generator[pa.RecordBatch]:
        """Yield the rows of one slice that meet the SQL ``also``, as record batches of the schema."""
        schema, is_postgresql = arrow_schema(self.schema), self.database.postgresql
        # Text and JSON are read as PostgreSQL prints them.
        as_text = {one.name for one in self.schema if is_postgresql and isinstance(one.dataType, StringType)}
        columns = [f"{self._named(name)}{'::text' * (name in as_text)}" for name in schema.names]
        query, params = self._query(columns, part, also)
        if is_postgresql:
            yield from copied(self.database, query, params, schema, self.snapshot)
            return
        with closing(self.database.connect()) as connection:
            cursor = connection.execute(query % {name: f":{name}" for name in params}, params)
            while rows := cursor.fetchmany(SQLITE_BATCH_ROWS):
                arrays = [_array(values, one.type) for values, one in zip(zip(*rows, strict=True), schema, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _query(self, columns: Iterable[str], part: Slice, also: str = "") -> tuple[str, Params]:
        tests: list[str] = []
        params: dict[str, object] = {}
        bounds = [("id", sign, edge) for sign, edge in ((">=", part.low), ("<", part.high)) if edge is not None]
        for column, operator, value in (*self.conditions, *bounds):
            name, column = f"p{len(tests)}", self._named(column)
            if operator == "known":
                tests.append(f"{column} IS {'NOT ' if value else ''}NULL")
            elif isinstance(value, list):
                params[name] = self.database.dialect.array(value)
                tests.append(self.database.dialect.one_of(column, name))
            else:
                if isinstance(value, datetime):
                    value = self.database.time(value)
                    if not self.database.postgresql:  # its text has 0, 3 or 6 digits of a second, which become 6
                        digits = f"WHEN 19 THEN {column} || '.000000' ELSE substr({column} || '000', 1, 26)"
                        column = f"CASE length({column}) {digits} END"
                params[name] = value
                tests.append(f"{column} {operator} %({name})s")
        where = f" WHERE {' AND '.join(filter(None, (*tests, also)))}" if tests or also else ""
        return f"SELECT {', '.join(columns)} FROM {getattr(self.database.tables, self.table)}{where}", params

    def _named(self, column: str) -> str:
        """Return the name that a column has in the table; a model may give its columns other names."""
        return self.database.tables.rename(column) if self.table == "task" else column


@dataclass
class TaskReader(datasource.DataSourceReader):
    """A batch read: with a snapshot in slices that all see its state, else in one statement."""

    selection: Selection
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
        slices = self.selection.slices(self.slice_ids) if self.selection.snapshot is not None else ()
        return [Slice(*ids) for ids in slices] or [Slice()]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)  # noqa: S101 -- what partitions() returns
        return self.selection.read(partition)


def even_slices(first: int, last: int, number: int) -> tuple[tuple[int, int], ...]:
    """Cut a range of ids into pairs (first, below) of about the same length."""
    return tuple(pairwise(first + (last + 1 - first) * step // number for step in range(number + 1)))


def _array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.string()).cast(pa.timestamp("us")).cast(kind)
    return pa.array(values, kind)


def chunked(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield the items in lists: one ends with the item whose size takes it over ``most``."""
    chunk, total = list[Item](), 0
    for one in items:
        chunk.append(one)
        total += size(one)
        if total > most:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def task_attempt_id() -> int:
    """Return a number that no other attempt of a Spark task of this session has."""
    context = TaskContext.get()
    return 0 if context is None else int(context.taskAttemptId())


# -- PostgreSQL's binary COPY as Arrow, by ADBC ------------------------------------------------------------------------


def copied(
    database: Database, query: str, params: Params, schema: pa.Schema, snapshot: str | None
) -> Iterator[pa.RecordBatch]:
    """Yield what a query returns in the state of ``snapshot``, with the columns of ``schema``. Raises PipelineError."""
    if params:
        from psycopg import sql  # the processes that plan a read do without

        query = query % {name: sql.Literal(value).as_string(None) for name, value in params.items()}
    with closing(database.connect_arrow()) as connection, connection.cursor() as cursor:
        if snapshot is not None:
            cursor.execute(f"BEGIN {READ_ONE_STATE}")
            try:
                cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            except connection.Error as error:
                raise PipelineError(
                    f"The snapshot {snapshot!r} is gone ({str(error).strip()}). Use the DataFrame inside its `with "
                    "open_snapshot(database) as snapshot:` block, on the same server and database."
                ) from None
        cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(ADBC_BATCH_BYTES)})
        cursor.execute(query)
        for batch in cursor.fetch_record_batch():
            columns = [column.cast(one.type) for column, one in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


class Snapshot(NamedTuple):
    """One state of a database (SQLite's has no name), which ``link`` reads. All below ``horizon`` had ended."""

    name: str | None
    horizon: int | None = None
    link: Link | None = None


@contextmanager
def open_snapshot(database: Database) -> Iterator[Snapshot]:
    """Hold the present state of a PostgreSQL database in the block, for reads of any table in any number of partitions.

    Meanwhile the server cannot vacuum rows that were deleted since: keep the block as short as the scan.
    """
    if not database.postgresql:
        yield Snapshot(None)
        return
    with database.open() as link, link.transaction():
        link.run(f"SET TRANSACTION {READ_ONE_STATE}")
        link.run("SET LOCAL idle_in_transaction_session_timeout = 0")
        yield Snapshot(link.run("SELECT pg_export_snapshot()")[0][0], link.run(HORIZON_SQL)[0][0], link)


# -- the columns -------------------------------------------------------------------------------------------------------

# The columns of tasks, history and failed attempts as Spark sees them: in the source, the lake and the reports. Names
# are the database's. JSON is text, times are in UTC with microseconds, ids are ``bigint`` everywhere.

SPARK_TYPES: dict[str, types.DataType] = {
    "text": StringType(), "jsonb": StringType(), "timestamptz": TimestampType(), "bigint": types.LongType(),
    "int": types.IntegerType(), "smallint": types.ShortType(), "float8": types.DoubleType(),
    "bytea": types.BinaryType(),
}  # fmt: skip
TERMINAL_STATUSES = tuple(str(status) for status in TERMINAL)
ARCHIVED = tuple(column for column in TASK_COLUMNS if column.archived)


def _struct(**columns: str) -> StructType:
    # All are nullable, as in a schema that is read from Parquet, so that the two are equal.
    return StructType([types.StructField(name, SPARK_TYPES[kind]) for name, kind in columns.items()])


TASKS = _struct(**{column.db: column.type for column in ARCHIVED})
HISTORY = _struct(
    id="bigint", location="text", task_id="bigint", moved_time="timestamptz",
    **{column.db: column.type for column in ARCHIVED if column.history},
)  # fmt: skip
ATTEMPTS = _struct(
    id="bigint", location="text", task_id="bigint", queue_name="text", attempt="int", total_attempt="bigint",
    poller_instance="text", start_time="timestamptz", finish_time="timestamptz", error_type="text", message="text",
    traceback="text",
)  # fmt: skip
# What reports add up, of a day of the lake. A row has the columns of its ``part``, the others are null.
SUMMARIES = _struct(
    part="text", queue="text", hour="bigint",
    **dict.fromkeys((
        "arrived", "ended", "completed", "errors", "poisoned", "good", "attempts", "retried", "retries", "run_seconds",
        "useful_seconds", "runs", "tasks_ended", "attempts_failed", "failed_attempts", "wasted",
    ), "bigint"),
    **dict.fromkeys(("run_squares", "wait_p50", "wait_p95", "wait_p99", "run_p50", "run_p95", "run_p99"), "float8"),
    wait="bytea", run="bytea", message="text", tag="text", reference="text", example="text", first="timestamptz",
    last="timestamptz",
)  # fmt: skip
SCHEMAS = {"task": TASKS, "history": HISTORY, "attempt": ATTEMPTS}


def arrow_schema(fields: Iterable[types.StructField]) -> pa.Schema:
    """Return Spark's columns as Arrow's; times are in UTC with microseconds."""
    return to_arrow_schema(StructType([*fields]), timezone="UTC")


def kept_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of which Python keeps each value: a time in nanoseconds is text."""
    if not pa.types.is_nested(kind):
        return pa.string() if kind == pa.time64("ns") else kind
    inner = [one.with_type(kept_type(one.type)) for one in map(kind.field, range(kind.num_fields))]
    if pa.types.is_struct(kind):
        return pa.struct(inner)
    return pa.map_(*inner[0].type) if pa.types.is_map(kind) else pa.list_(inner[0])


def schema_of(table: str, columns: Iterable[str] | None = None) -> StructType:
    """Return the schema of ``task``, ``history`` or ``attempt``, or of these columns of it. Raises `PipelineError`."""
    if table not in SCHEMAS:
        raise PipelineError(f"table={table!r} must be one of {', '.join(map(repr, SCHEMAS))}.")
    whole = SCHEMAS[table]
    if columns is None:
        return whole
    wanted = [columns] if isinstance(columns, str) else list(columns)
    for name in wanted:
        if name not in whole.names:
            near, names = near_match(name, whole.names), ", ".join(whole.names)
            raise PipelineError(f"{table} has no column {name!r}.{near} Its columns: {names}.")
    if not wanted or len(set(wanted)) < len(wanted):
        raise PipelineError(f"columns={wanted!r} must name at least one column, and none of them twice.")
    return StructType([whole[name] for name in wanted])
