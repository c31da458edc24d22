"""Writing tasks from Spark: ``write_tasks``, and the writers behind ``df.write`` and ``df.writeStream``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from django_dbtaskqueue.core.columns import TIMING
from django_dbtaskqueue.core.exceptions import PipelineError, near_match
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import staging, task_attempt_id
from django_dbtaskqueue.pipeline.source.files import ROW

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    plan = _plan(database, df.schema, rules, on_duplicate=on_duplicate, on_invalid=on_invalid, once=named)
    plan = replace(plan, content=content, dry_run=dry_run)
    try:
        parts = [_part(row.part) for row in df.mapInArrow(partial(_fill_rows, plan), PART_DDL).collect()]
    except BaseException:
        staging.drop_staging(database, plan.table)
        raise
    return staging.finish(plan, parts)


def _plan(
    database: Database, schema: types.StructType, rules: staging.Rules, *,
    on_duplicate: str, on_invalid: str, once: tuple[str, int] | None,
) -> staging.Plan:  # fmt: skip
    """Return the plan of a write, and make its staging table."""
    check_schema(schema, rules.queue)
    for name, value, other in (("on_duplicate", on_duplicate, "ignore"), ("on_invalid", on_invalid, "reject")):
        if value not in ("error", other):
            raise PipelineError(f"{name}={value!r} must be one of 'error', {other!r}.")
    return staging.Plan(
        database,
        staging.open_staging(database),
        rules,
        ignore=on_duplicate == "ignore",
        reject=on_invalid == "reject",
        timed=rules.ttl is not None or not TIMING.keys().isdisjoint(schema.names),
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
    attempts, priority = int(options.get("max_attempts", 5)), int(options.get("priority", 0))
    rules = staging.Rules(queue=options.get("queue"), max_attempts=attempts, priority=priority)
    choices = {name: options.get(name, "error") for name in ("on_duplicate", "on_invalid")}
    return _plan(database, schema, rules, **choices, once=(options["once"], 0) if "once" in options else None)


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
