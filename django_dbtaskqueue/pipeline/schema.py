"""The columns of tasks, history and failed attempts as Spark sees them: in the source, the lake and the reports.

Names are the database's. JSON is text, times are in UTC with microseconds, ids are ``bigint`` everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import types

from django_dbtaskqueue.core.columns import TASK_COLUMNS
from django_dbtaskqueue.core.exceptions import PipelineError, near_match
from django_dbtaskqueue.core.states import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT, LONG, INT, TIME = types.StringType(), types.LongType(), types.IntegerType(), types.TimestampType()
FLOAT, BYTES = types.DoubleType(), types.BinaryType()
SPARK_TYPES: dict[str, types.DataType] = {
    "text": TEXT, "jsonb": TEXT, "timestamptz": TIME, "bigint": LONG, "int": INT,
    "smallint": types.ShortType(), "float8": FLOAT,
}  # fmt: skip
ARROW_TYPES: dict[type[types.DataType], pa.DataType] = {
    types.StringType: pa.string(),
    types.LongType: pa.int64(),
    types.IntegerType: pa.int32(),
    types.ShortType: pa.int16(),
    types.DoubleType: pa.float64(),
    types.TimestampType: pa.timestamp("us", tz="UTC"),
    types.DateType: pa.date32(),
    types.BinaryType: pa.binary(),
}
TERMINAL_STATUSES = tuple(str(status) for status in TERMINAL)
ARCHIVED = tuple(column for column in TASK_COLUMNS if column.archived)


def _struct(*columns: tuple[str, types.DataType]) -> types.StructType:
    # All are nullable, as in a schema that is read from Parquet, so that the two are equal.
    return types.StructType([types.StructField(name, kind) for name, kind in columns])


TASKS = _struct(*((column.db, SPARK_TYPES[column.type]) for column in ARCHIVED))
HISTORY = _struct(
    ("id", LONG), ("location", TEXT), ("task_id", LONG), ("moved_time", TIME),
    *((column.db, SPARK_TYPES[column.type]) for column in ARCHIVED if column.history),
)  # fmt: skip
ATTEMPTS = _struct(
    ("id", LONG), ("location", TEXT), ("task_id", LONG), ("queue_name", TEXT), ("attempt", INT),
    ("total_attempt", LONG), ("poller_instance", TEXT), ("start_time", TIME), ("finish_time", TIME),
    ("error_type", TEXT), ("message", TEXT), ("traceback", TEXT),
)  # fmt: skip
# What reports add up, of a day of the lake. A row has the columns of its ``part``, the others are null.
SUMMARIES = _struct(
    ("part", TEXT), ("queue", TEXT), ("hour", LONG),
    *((name, LONG) for name in (
        "arrived", "ended", "completed", "errors", "poisoned", "good", "attempts", "retried", "retries", "run_seconds",
        "useful_seconds", "runs", "tasks_ended", "attempts_failed", "failed_attempts", "wasted",
    )),
    *((name, FLOAT) for name in (
        "run_squares", "wait_p50", "wait_p95", "wait_p99", "run_p50", "run_p95", "run_p99",
    )),
    ("wait", BYTES), ("run", BYTES), ("message", TEXT), ("tag", TEXT), ("reference", TEXT), ("example", TEXT),
    ("first", TIME), ("last", TIME),
)  # fmt: skip
SCHEMAS = {"task": TASKS, "history": HISTORY, "attempt": ATTEMPTS}


def arrow_schema(fields: Iterable[types.StructField]) -> pa.Schema:
    """Return Spark's columns as Arrow's; times are in UTC with microseconds."""
    return pa.schema([(field.name, ARROW_TYPES[type(field.dataType)]) for field in fields])


def schema_of(table: str, columns: Iterable[str] | None = None) -> types.StructType:
    """Return the schema of ``task``, ``history`` or ``attempt``, or of some of its columns in the order given.

    Raises `PipelineError` for another table, an unknown column, or one named twice.
    """
    if table not in SCHEMAS:
        raise PipelineError(f"table={table!r} must be one of {', '.join(map(repr, SCHEMAS))}.")
    whole = SCHEMAS[table]
    if columns is None:
        return whole
    wanted = [columns] if isinstance(columns, str) else list(columns)
    for name in wanted:
        if name not in whole.names:
            raise PipelineError(
                f"{table} has no column {name!r}.{near_match(name, whole.names)} Its columns: {', '.join(whole.names)}."
            )
    if not wanted or len(set(wanted)) < len(wanted):
        raise PipelineError(f"columns={wanted!r} must name at least one column, and none of them twice.")
    return types.StructType([whole[name] for name in wanted])
