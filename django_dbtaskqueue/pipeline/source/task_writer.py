"""Writing tasks from Spark: ``write_tasks``, and the writers behind ``df.write`` and ``df.writeStream``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from django_dbtaskqueue.core.exceptions import PipelineError, near_match
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source.staging_rows import (
    COLUMNS,
    JSONS,
    STAGED_DURATIONS,
    STAGED_TEXTS,
    WHOLE,
    Reject,
    Rules,
)
from django_dbtaskqueue.pipeline.source.staging_tables import (
    Part,
    Plan,
    WriteReport,
    drop_staging,
    fill,
    finish,
    open_staging,
)
from django_dbtaskqueue.pipeline.source.task_reader import task_attempt_id

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NESTED = (StructType, ArrayType, MapType)
WHOLE_NUMBER_TYPES = (ByteType, ShortType, IntegerType, LongType)
PART_DDL = "part string"
ACCEPTED_TYPES: dict[str, tuple[type[DataType], ...]] = {
    **dict.fromkeys(STAGED_TEXTS, (StringType,)),
    **dict.fromkeys(JSONS, (StringType,)),
    **dict.fromkeys(STAGED_DURATIONS, (DayTimeIntervalType,)),
    **dict.fromkeys(WHOLE, WHOLE_NUMBER_TYPES),
    "run_at": (TimestampType,),
}
CURES = {
    **dict.fromkeys(STAGED_TEXTS, 'col.cast("string")'),
    **dict.fromkeys(JSONS, "to_json(col)"),
    **dict.fromkeys(STAGED_DURATIONS, "make_dt_interval(secs=col), or lit(timedelta(minutes=5))"),
    **dict.fromkeys(WHOLE, 'col.cast("int")'),
    "run_at": 'col.cast("timestamp")',
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
    ttl: timedelta | None = None,
    limits: Limits = DEFAULT_LIMITS,
    once: str | None = None,
    batch: int = 0,
) -> WriteReport:
    """Enqueue each row of ``df`` in one transaction: all of them, or none; nobody sees a part of them.

    Columns are named like ``enqueue``'s arguments (see `staging_rows`); a struct, map or array as ``payload`` or
    ``context`` is turned into JSON. ``queue`` serves rows without such a column, ``max_attempts`` and ``ttl`` those
    that say nothing. A taken (queue, reference) raises ``DuplicateTask``, or is passed over with
    ``on_duplicate="ignore"``; rows that stand twice in ``df`` count as taken as well.

    A bad row (payload that is not JSON, reference too long, a queue not in ``queues``, null reference with
    ``require_reference``) raises `PipelineError`; ``on_invalid="reject"`` leaves it out, with the reason in the report.

    ``once`` names this write in the ledger, ``batch`` counts within the name: a second write of the same pair, say
    after a driver that died without an answer, adds nothing and says ``repeated``. Ids follow the references' order.
    """
    _check_choices(on_duplicate, on_invalid)
    df = prepared(df, queue)
    rules = Rules(
        queue=queue,
        queues=None if queues is None else frozenset(queues),
        require_reference=require_reference,
        max_attempts=max_attempts,
        ttl=None if ttl is None else ttl.total_seconds(),
        limits=limits,
    )
    plan = Plan(
        database,
        open_staging(database),
        rules,
        ignore=on_duplicate == "ignore",
        most_rejects=0 if on_invalid == "error" else None,
        timed=ttl is not None or bool({"run_at", "delay", "ttl"}.intersection(df.columns)),
        once=None if once is None else (once, batch),
    )
    try:
        parts = [_part(row.part) for row in df.mapInArrow(partial(_fill_rows, plan), PART_DDL).collect()]
    except BaseException:
        drop_staging(database, plan.table)
        raise
    return finish(plan, parts)


def _check_choices(on_duplicate: str, on_invalid: str) -> None:
    for name, value, choices in (
        ("on_duplicate", on_duplicate, ("error", "ignore")),
        ("on_invalid", on_invalid, ("error", "reject")),
    ):
        if value not in choices:
            raise PipelineError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def prepared(df: DataFrame, queue: str | None) -> DataFrame:
    """Return ``df`` with nested payloads and contexts as JSON text; `PipelineError` for a column that does not fit."""
    from pyspark.sql import functions as F

    kinds = {field.name: field.dataType for field in df.schema}
    for name in JSONS:
        if isinstance(kinds.get(name), NESTED):
            df = df.withColumn(name, F.to_json(name, {"ignoreNullFields": "false"}))
    check_schema(df.schema, queue)
    return df


def check_schema(schema: StructType, queue: str | None) -> None:
    """Refuse columns that are unknown or of a wrong type, and rows without a queue."""
    for field in schema:
        if field.name not in COLUMNS:
            raise PipelineError(
                f"The DataFrame has a column {field.name!r}, which is no argument of enqueue().{_near(field.name)} "
                f"Known: {', '.join(COLUMNS)}. Put other values into the payload, "
                f'as in struct("{field.name}").alias("payload"), or drop them.'
            )
        if not isinstance(field.dataType, ACCEPTED_TYPES[field.name]):
            raise PipelineError(
                f"The column {field.name!r} is of type {field.dataType.simpleString()}, and must be "
                f"{' or '.join(kind.typeName() for kind in ACCEPTED_TYPES[field.name])}: use {CURES[field.name]}."
            )
    if queue is None and "queue" not in schema.names:
        raise PipelineError("Which queue? Give queue=, or a column named queue.")


def _near(name: str) -> str:
    return near_match({value: key for key, value in COLUMNS.items()}.get(name, name), COLUMNS)


def _fill_rows(plan: Plan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    part = fill(plan, batches, task_attempt_id())
    yield pa.RecordBatch.from_pydict({"part": pa.array([json.dumps(part)], pa.string())})


def _part(text: str) -> Part:
    part = Part(*json.loads(text))
    return part._replace(rejects=[Reject(*values) for values in part.rejects])


@dataclass
class Staged(WriterCommitMessage):
    """What a task of a write tells the driver: what it staged, and where."""

    part: Part
    table: str


def plan_of(database: Database, schema: StructType, options: Mapping[str, str]) -> Plan:
    """Return the plan of a write through ``df.write`` or ``writeStream``, by its options; makes the staging table."""
    on_duplicate, on_invalid = options.get("on_duplicate", "error"), options.get("on_invalid", "error")
    _check_choices(on_duplicate, on_invalid)
    queue, once = options.get("queue"), options.get("once")
    check_schema(schema, queue)
    return Plan(
        database,
        open_staging(database),
        Rules(queue=queue, max_attempts=int(options.get("max_attempts", 5))),
        ignore=on_duplicate == "ignore",
        most_rejects=0 if on_invalid == "error" else None,
        timed=bool({"run_at", "delay", "ttl"}.intersection(schema.names)),
        once=None if once is None else (once, 0),
    )


class TaskWriter(DataSourceArrowWriter):
    """One atomic bulk enqueue."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage one task's rows."""
        return Staged(fill(self.plan, iterator, task_attempt_id()), self.plan.table)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Enqueue what the successful tasks have staged."""
        finish(self.plan, _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Forget what was staged."""
        drop_staging(self.plan.database, self.plan.table)


class StreamWriter(DataSourceStreamArrowWriter):
    """Micro-batches, each enqueued once: the ledger knows those that were, whatever is run again."""

    def __init__(self, plan: Plan, query: str) -> None:
        self.plan = plan
        self.query = query

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage one task's rows."""
        return Staged(fill(self.plan, iterator, task_attempt_id()), self.plan.table)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Enqueue the micro-batch, unless the ledger has it."""
        # Spark makes one writer for the tasks and another for the commit, and each has made a table.
        table = next((message.table for message in messages if isinstance(message, Staged)), self.plan.table)
        finish(replace(self.plan, table=table, once=(self.query, batchId)), _parts(messages))
        if self.plan.table != table:
            drop_staging(self.plan.database, self.plan.table)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Forget what was staged; the micro-batch comes again."""
        for table in {self.plan.table, *(message.table for message in messages if isinstance(message, Staged))}:
            drop_staging(self.plan.database, table)


def _parts(messages: list[WriterCommitMessage | None]) -> list[Part]:
    return [message.part for message in messages if isinstance(message, Staged)]
