"""The queue as a data source of Spark, ``format("dbtaskqueue")``, and the functions that use it well.

A password is never an option, because plans and logs show options. It travels inside the source's pickled class:
`register` puts it there, and `read_tasks` and `write_tasks` call `register`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceWriter
from pyspark.sql.types import StructType

from django_dbtaskqueue.core.exceptions import PipelineError, near_match
from django_dbtaskqueue.pipeline.database import DEFAULT_LOCATION, Database
from django_dbtaskqueue.pipeline.schema import arrow_schema, schema_of
from django_dbtaskqueue.pipeline.source import task_reader
from django_dbtaskqueue.pipeline.source.task_reader import Condition, Snapshot, Value, open_snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from django_dbtaskqueue.pipeline.source.stream_reader import register_stream, unregister_stream
    from django_dbtaskqueue.pipeline.source.task_writer import StreamWriter, write_tasks

__all__ = [
    "Snapshot", "TaskSource", "open_snapshot", "read_tasks", "register", "register_stream", "stream_tasks",
    "unregister_stream", "write_tasks",
]  # fmt: skip

FORMAT_NAME = "dbtaskqueue"
FILTER_SETTING = "spark.sql.python.filterPushdown.enabled"  # without it Spark refuses a source that takes filters
LAZY = {"write_tasks": "task_writer", "register_stream": "stream_reader", "unregister_stream": "stream_reader"}
TimeRange = tuple[datetime | None, datetime | None]
SOURCE_OPTIONS = (
    "url", "location", "table", "where", "snapshot", "slice_ids", "queue", "on_duplicate", "on_invalid", "once", "name",
    "max_attempts", "priority", "path", "checkpointlocation", "queryname",
)  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the writer and the streams at their first use: Spark starts two processes to plan a read, with this."""
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class TaskSource(DataSource):
    """The source as Spark creates it, with its options. `register` makes it known to a session."""

    known: ClassVar[dict[str, Database]] = {}

    def __init__(self, options: dict[str, str]) -> None:
        for name in options:
            if name.lower() not in SOURCE_OPTIONS:
                raise PipelineError(f"Unknown option {name!r}.{near_match(name.lower(), SOURCE_OPTIONS)}")
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    @property
    def database(self) -> Database:
        """The database of the option ``url``, with the password that was registered."""
        url = self.options.get("url")
        if url is None:
            raise PipelineError("The option url is missing: the address of the database that was given to register().")
        if found := self.known.get(_key(url, self.options.get("location"))):
            return found
        database = Database.from_url(url)
        if database.secrets:
            raise PipelineError(
                "The option url holds a password, and Spark shows options in its plans. Call "
                "register(spark, Database.from_url(url)) once, and give the option database.url_without_password."
            )
        return database

    def schema(self) -> StructType:
        """Return all columns of the table; a query selects some with ``.schema(...)``."""
        return schema_of(self._table)

    def reader(self, schema: StructType) -> DataSourceReader:
        snapshot = task_reader.checked_snapshot(self.options.get("snapshot"))
        ids = int(self.options.get("slice_ids", task_reader.PARTITION_IDS))
        return task_reader.TaskReader(self.database, self._selection(schema), snapshot=snapshot, slice_ids=ids)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from django_dbtaskqueue.pipeline.source.stream_reader import TaskStreamReader

        name = self.options.get("name")
        return TaskStreamReader(self.database, self._selection(schema), self._table, name)

    def writer(self, schema: StructType, overwrite: object) -> DataSourceWriter:
        """Return a writer that enqueues. Raises PipelineError for an overwrite."""
        from django_dbtaskqueue.pipeline.source.task_writer import TaskWriter, plan_of

        if overwrite:
            raise PipelineError('Tasks are never overwritten: write with mode("append").')
        return TaskWriter(plan_of(self.database, schema, self.options))

    def streamWriter(self, schema: StructType, overwrite: object) -> StreamWriter:
        from django_dbtaskqueue.pipeline.source.task_writer import StreamWriter, plan_of

        if not self.options.get("once"):
            raise PipelineError(
                "The option once is missing: a name of this stream, under which the ledger counts its micro-batches. "
                "Keep it as long as the checkpoint."
            )
        return StreamWriter(plan_of(self.database, schema, self.options))

    @property
    def _table(self) -> str:
        return str(self.options.get("table", "task"))

    def _selection(self, schema: StructType) -> task_reader.Selection:
        wanted = schema_of(self._table, schema.names)
        for given, ours in zip(schema, wanted, strict=True):
            if given.dataType != ours.dataType:
                raise PipelineError(
                    f"The column {ours.name!r} of {self._table} is of type {ours.dataType.simpleString()}, not "
                    f"{given.dataType.simpleString()}: correct .schema(...), or cast it afterwards."
                )
        conditions = _from_text(self.options.get("where", "[]"), schema_of(self._table).names)
        return task_reader.Selection(getattr(self.database.tables, self._table), schema, conditions)


def register(spark: SparkSession, *databases: Database) -> None:
    """Make ``format("dbtaskqueue")`` known to a session, with the passwords of these databases and of earlier ones.

    Then a query only needs ``.option("url", database.url_without_password)``.
    """
    TaskSource.known = {**TaskSource.known, **{_key(one.url_without_password, one.location): one for one in databases}}

    class Registered(TaskSource):
        # A class that is made in a function is pickled by value, with its own attributes.
        known: ClassVar[dict[str, Database]] = dict(TaskSource.known)

    if spark.conf.get(FILTER_SETTING, "false") != "true":  # a declarative pipeline forbids to set it in its code
        spark.conf.set(FILTER_SETTING, "true")
    spark.dataSource.register(Registered)


def _key(url: str, location: str | None) -> str:
    return f"{location or DEFAULT_LOCATION} {url}"


def read_tasks(
    spark: SparkSession,
    database: Database,
    columns: Iterable[str] | None = None,
    table: str = "task",
    *,
    snapshot: Snapshot | None = None,
    queue: str | Iterable[str] | None = None,
    status: str | Iterable[str] | None = None,
    ids: tuple[int | None, int | None] = (None, None),
    created: TimeRange = (None, None),
    finished: TimeRange = (None, None),
) -> DataFrame:
    """Return a DataFrame of ``task``, ``history`` or ``attempt``, of the given columns only (None: all of them).

    Name the columns you need: Spark cannot ask a Python source for fewer, and three columns are read three times as
    fast as all. ``ids``, ``created`` and ``finished`` are ranges from the first value to below the second; None is
    open, and a time without a zone is UTC. The database applies them, ``queue`` and ``status``, also if they are not
    among the columns, and comparisons of these columns in a later ``where``.

    Each action reads one state of the database: that of ``snapshot`` (see ``open_snapshot``), in partitions of 500,000
    ids, or else the state when the action starts, in one partition.
    """
    ranges = {"id": ids, "create_time": created, "finish_time": finished}
    options = _options(spark, database, table, _conditions({"queue_name": queue, "status": status}, ranges))
    if snapshot is not None and snapshot.name is not None:
        options["snapshot"] = snapshot.name
    return spark.read.format(FORMAT_NAME).schema(schema_of(table, columns)).options(**options).load()


def few_tasks(
    database: Database, columns: Iterable[str], table: str, snapshot: Snapshot | None = None
) -> pa.Table | None:
    """Return these columns of a whole table, read by this process without Spark; None for over `MAX_FEW_BYTES`."""
    selection = task_reader.Selection(getattr(database.tables, table), schema_of(table, columns))
    name, batches = snapshot.name if snapshot else None, []
    with closing(task_reader.read_slice(database, selection, task_reader.Slice(), name)) as found:
        for batch in found:
            batches.append(batch)
            if sum(one.nbytes for one in batches) > task_reader.MAX_FEW_BYTES:
                return None
    return pa.Table.from_batches(batches, schema=arrow_schema(selection.schema))


def stream_tasks(
    spark: SparkSession,
    database: Database,
    columns: Iterable[str] | None = None,
    table: str = "task",
    *,
    queue: str | Iterable[str] | None = None,
    name: str | None = None,
) -> DataFrame:
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
    found: list[Condition] = []
    for column, wanted in among.items():
        if wanted is not None:
            found.append((column, "in", [wanted] if isinstance(wanted, str) else list(wanted)))
    for column, edges in ranges.items():
        found += [(column, sign, edge) for sign, edge in zip((">=", "<"), edges, strict=True) if edge is not None]
    return found


def _from_text(text: str, columns: Iterable[str]) -> tuple[Condition, ...]:
    found = tuple(
        (name, op, datetime.fromisoformat(value["time"]) if isinstance(value, dict) else value)
        for name, op, value in json.loads(text)
    )
    for name, op, _ in found:  # whoever may write Spark SQL may write this text, and must not write ours
        if name not in columns or op not in task_reader.OPERATORS:
            raise PipelineError(
                f"where: {name!r} {op!r} is not a column and an operator. Use read_tasks() or .where()."
            )
    return found
