"""The queue as a data source of Spark, ``format("dbtaskqueue")``, and the functions that use it well.

A password never stands in an option, for options are printed in plans and logs: it travels inside the source's pickled
class. `register` puts it there; `read_tasks` and `write_tasks` call it by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceWriter
from pyspark.sql.types import StructType

from django_dbtaskqueue.core.exceptions import PipelineError, near_match
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake.snapshot import Snapshot, open_snapshot
from django_dbtaskqueue.pipeline.schema import schema_of
from django_dbtaskqueue.pipeline.source.source_read import SLICE, Condition, Selection, TaskReader
from django_dbtaskqueue.pipeline.source.source_stream import TaskStreamReader
from django_dbtaskqueue.pipeline.source.source_write import StreamWriter, TaskWriter, plan_of, write_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["TaskSource", "open_snapshot", "read_tasks", "register", "stream_tasks", "write_tasks"]

NAME = "dbtaskqueue"
DEFAULT_LOCATION = "dbtaskqueue.task"
Span = tuple[datetime | None, datetime | None]
OPTIONS = (
    "url", "location", "table", "where", "snapshot", "slice_ids", "queue", "on_duplicate", "on_invalid", "once",
    "max_attempts", "path", "checkpointlocation",
)  # fmt: skip


class TaskSource(DataSource):
    """The source as Spark makes it: options in, readers and writers out. `register` makes it known to a session."""

    known: ClassVar[dict[str, Database]] = {}

    @classmethod
    def name(cls) -> str:
        """Return what stands in ``format(...)``."""
        return NAME

    @property
    def database(self) -> Database:
        """The database of the option ``url``, with the password it was registered with."""
        url = self.options.get("url")
        if url is None:
            raise PipelineError("The option url is missing: the address of the database that was given to register().")
        if found := self.known.get(_key(url, self.options.get("location"))):
            return found
        database = Database.from_url(url)
        if database.secrets:
            raise PipelineError(
                "The option url holds a password, which everybody who sees the plan could read. Call "
                "register(spark, Database.from_url(url)) once, and give the option database.url_without_password."
            )
        return database

    def schema(self) -> StructType:
        """Return all columns of the table; ``.schema(...)`` in the query chooses some."""
        self._check_options()
        return schema_of(self._table)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a batch reader of these columns."""
        self._check_options()
        snapshot, slice_ids = self.options.get("snapshot"), int(self.options.get("slice_ids", SLICE))
        return TaskReader(self.database, self._selection(schema), snapshot=snapshot, slice_ids=slice_ids)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader of what finishes."""
        self._check_options()
        return TaskStreamReader(self.database, self._selection(schema), self._table)

    def writer(self, schema: StructType, overwrite: object) -> DataSourceWriter:
        """Return a writer that enqueues; an overwrite is refused."""
        self._check_options()
        if overwrite:
            raise PipelineError('Tasks are never overwritten: write with mode("append").')
        return TaskWriter(plan_of(self.database, schema, self.options))

    def streamWriter(self, schema: StructType, overwrite: object) -> StreamWriter:
        """Return a writer that enqueues each micro-batch once."""
        self._check_options()
        query = self.options.get("once")
        if not query:
            raise PipelineError(
                "The option once is missing: a name of this stream, under which the ledger counts its micro-batches. "
                "Keep it as long as the checkpoint."
            )
        return StreamWriter(plan_of(self.database, schema, self.options), query)

    @property
    def _table(self) -> str:
        return str(self.options.get("table", "task"))

    def _selection(self, schema: StructType) -> Selection:
        wanted = schema_of(self._table, schema.names)
        for given, ours in zip(schema, wanted, strict=True):
            if given.dataType != ours.dataType:
                raise PipelineError(
                    f"The column {ours.name!r} of {self._table} is of type {ours.dataType.simpleString()}, not "
                    f"{given.dataType.simpleString()}: correct .schema(...), or cast it afterwards."
                )
        conditions = _from_text(self.options.get("where", "[]"))
        return Selection(getattr(self.database.tables, self._table), schema, conditions)

    def _check_options(self) -> None:
        for name in self.options:
            if name.lower() not in OPTIONS:
                raise PipelineError(f"Unknown option {name!r}.{near_match(name.lower(), OPTIONS)}")


def register(spark: SparkSession, *databases: Database) -> None:
    """Make ``format("dbtaskqueue")`` known to a session, with the passwords of these databases and of earlier ones.

    Afterwards ``.option("url", database.url_without_password)`` is all that a query needs.
    """
    TaskSource.known = {**TaskSource.known, **{_key(one.url_without_password, one.location): one for one in databases}}

    class Registered(TaskSource):
        # A class made in a function is pickled by value, with all that it does not share with its base.
        known: ClassVar[dict[str, Database]] = dict(TaskSource.known)

    # Spark refuses a source that takes filters, unless this is set.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
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
    created: Span = (None, None),
    finished: Span = (None, None),
) -> DataFrame:
    """Return a DataFrame of ``task``, ``history`` or ``attempt``, of the given columns only (None: all of them).

    Spark cannot ask a Python source for fewer columns, so naming the three that are needed reads three times as fast.
    ``ids``, ``created`` and ``finished`` are ranges from the first to below the second, None is open; a time without
    a zone is UTC. They and ``queue`` and ``status`` are applied by the database, needed among the columns or not;
    so are comparisons of these columns in a later ``where``.

    Each action reads one state of the database. With ``snapshot`` (see ``open_snapshot``) that is the snapshot's, and
    the rows come in partitions of 500,000 ids; without one it is the state when the action starts, in one partition.
    """
    register(spark, database)
    reader = spark.read.format(NAME).schema(schema_of(table, columns))
    for name, value in _reading(database, table, _conditions(queue, status, ids, created, finished)).items():
        reader = reader.option(name, value)
    if snapshot is not None and snapshot.name is not None:
        reader = reader.option("snapshot", snapshot.name)
    return reader.load()


def stream_tasks(
    spark: SparkSession,
    database: Database,
    columns: Iterable[str] | None = None,
    table: str = "task",
    *,
    queue: str | Iterable[str] | None = None,
) -> DataFrame:
    """Return a streaming DataFrame of finished tasks (``task``), the history or failed attempts. PostgreSQL only.

    It begins with all that is there, and brings every row once for each change that left it finished. A transaction
    that commits late delays the stream and is never skipped. See `source_stream`.
    """
    register(spark, database)
    reader = spark.readStream.format(NAME).schema(schema_of(table, columns))
    for name, value in _reading(database, table, _conditions(queue)).items():
        reader = reader.option(name, value)
    return reader.load()


def _reading(database: Database, table: str, conditions: list[Condition]) -> dict[str, str]:
    options = {"url": database.url_without_password, "location": database.location, "table": table}
    return {**options, "where": _to_text(conditions)} if conditions else options


def _conditions(
    queue: str | Iterable[str] | None = None,
    status: str | Iterable[str] | None = None,
    ids: tuple[int | None, int | None] = (None, None),
    created: Span = (None, None),
    finished: Span = (None, None),
) -> list[Condition]:
    found: list[Condition] = []
    for column, wanted in (("queue_name", queue), ("status", status)):
        if wanted is not None:
            found.append((column, "in", [wanted] if isinstance(wanted, str) else list(wanted)))
    ranges: list[tuple[str, tuple[Any, Any]]] = [("id", ids), ("create_time", created), ("finish_time", finished)]
    for column, (first, below) in ranges:
        found += [(column, ">=", first)] if first is not None else []
        found += [(column, "<", below)] if below is not None else []
    return found


def _to_text(conditions: list[Condition]) -> str:
    times = [(name, op, {"time": value.isoformat()}) for name, op, value in conditions if isinstance(value, datetime)]
    others = [one for one in conditions if not isinstance(one[2], datetime)]
    return json.dumps([*others, *times])


def _from_text(text: str) -> tuple[Condition, ...]:
    return tuple(
        (name, op, datetime.fromisoformat(value["time"]) if isinstance(value, dict) else value)
        for name, op, value in json.loads(text)
    )
