"""Bulk enqueue by a staging table: check and stage the rows in Spark's tasks, then move them into TASKS at once.

Each attempt of a Spark task marks its rows with its own number, and the driver moves only the rows of attempts whose
answer it got: a retry, a speculative attempt or a lost executor never adds a row twice. `sweep_staging` drops the rest.
"""

import json
import secrets
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import BOUNDS, BY_NAME, ENQUEUED, TIMING, Bounds
from django_dbtaskqueue.core.exceptions import DuplicateTask, PayloadError, PipelineError, TaskQueueError, near_match
from django_dbtaskqueue.core.masking import Rules as MaskRules, current_rules, masked_text
from django_dbtaskqueue.core.sql.pipeline import StagingStatements
from django_dbtaskqueue.pipeline.database import Database, Link, Params, database_errors
from django_dbtaskqueue.pipeline.jobs import Argument, count, whole
from django_dbtaskqueue.pipeline.source import PREVIEW_CHARS, ROW, task_attempt_id
from django_dbtaskqueue.pipeline.source.files import in_json

CHANNEL = "dbtaskqueue"
MAX_GROUP_LOCKS = 2000  # of more groups the table is locked: PostgreSQL holds some thousand locks in all
ABANDONED_AFTER = timedelta(days=1)
CSV_OPTIONS = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")

# -- the rules of enqueue(): a DataFrame's columns are named like its arguments ----------------------------------------

GIVEN = (BY_NAME["queue"], *ENQUEUED)
COLUMNS = {column.argument: column.db for column in GIVEN} | {name: name for name in TIMING}  # DataFrame's -> staging's
STAGED_TEXTS = tuple(column.argument for column in GIVEN if column.type == "text")
JSONS = tuple(column.argument for column in GIVEN if column.type == "jsonb")
STAGED_DURATIONS = (*(column.argument for column in GIVEN if column.type == "float8"), "delay", "ttl")
WHOLE = ("priority", "max_attempts")
STAGED_BOUNDS = BOUNDS | {"max_attempts": Bounds(1, 2**31 - 1, "a whole number from 1 to 2147483647")}
DURATION_REMEDY = "make_dt_interval(secs=col), or lit(timedelta(minutes=5))"
# Column -> (the types it may have, how to make one)
ACCEPTED: dict[str, tuple[tuple[type[types.DataType], ...], str]] = {
    **dict.fromkeys(STAGED_TEXTS, ((types.StringType,), 'col.cast("string")')),
    **dict.fromkeys(JSONS, ((types.StringType, types.StructType, types.ArrayType, types.MapType), "to_json(col)")),
    **dict.fromkeys(STAGED_DURATIONS, ((types.DayTimeIntervalType,), DURATION_REMEDY)),
    **dict.fromkeys(WHOLE, ((types.ByteType, types.ShortType, types.IntegerType, types.LongType), 'col.cast("int")')),
    "run_at": ((types.TimestampType,), 'col.cast("timestamp")'),
}


class Reject(NamedTuple):
    """A row that was not enqueued, and why: the ``value`` of a ``column``. Values are masked and cut."""

    queue: str | None
    reference: str | None
    reason: str
    payload: str | None
    file: str | None = None
    line: int | None = None
    column: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class Rules:
    """What rows are checked against, and the values for columns that are missing or null."""

    queue: str | None = None
    queues: Collection[str] | None = None  # the known ones; None: any name
    require_reference: bool = False
    max_attempts: int = 5
    priority: int = 0
    ttl: timedelta | None = None
    limits: json_payload.Limits = json_payload.DEFAULT_LIMITS
    secrets: MaskRules = field(default_factory=current_rules)  # of the driver: executors have no settings


def check_schema(schema: types.StructType, queue: str | None) -> None:
    """Refuse columns that are unknown or of a wrong type, and rows without a queue."""
    for column in (one for one in schema if one.name != ROW):
        if column.name not in COLUMNS:
            near = near_match({stored: name for name, stored in COLUMNS.items()}.get(column.name, column.name), COLUMNS)
            raise PipelineError(
                f"The DataFrame has a column {column.name!r}, which is no argument of enqueue().{near} "
                f"Known: {', '.join(COLUMNS)}. Put other values into the payload, "
                f'as in struct("{column.name}").alias("payload"), or drop them.'
            )
        types, remedy = ACCEPTED[column.name]
        if not isinstance(column.dataType, types):
            raise PipelineError(
                f"The column {column.name!r} is of type {column.dataType.simpleString()}, and must be "
                f"{' or '.join(kind.typeName() for kind in types)}: use {remedy}."
            )
    if queue is None and "queue" not in schema.names:
        raise PipelineError("Which queue? Give queue=, or a column named queue.")


def stage(batch: pa.RecordBatch, rules: Rules) -> tuple[dict[str, pa.Array], list[Reject]]:
    """Return the good rows as the staging table's columns, and the bad ones."""
    count, names = batch.num_rows, batch.schema.names
    given = _filled({name: batch.column(name) for name in names if name in COLUMNS}, rules, count)
    places = batch.column(ROW) if ROW in names else pa.nulls(count, pa.struct([("fault", pa.null())]))
    unread = pc.indices_nonzero(places.field("fault").is_valid()).to_pylist()
    faults = {row: places[row]["fault"].as_py() for row in unread}
    for name, column in [*given.items()]:
        reasons: Sequence[str] = ()
        if pa.types.is_nested(column.type):
            texts, reasons = zip(*map(in_json, column), strict=True) if count else ((), ())
            given[name] = pa.array(texts, pa.string())
        unmade = ((row, reason) for row, reason in enumerate(reasons) if reason)
        for row, reason in (*unmade, *_faults(name, given[name], rules)):
            faults.setdefault(row, {"column": name, "value": _preview(given[name], row), "reason": f"{name}: {reason}"})
    where = [name for name in ("file", "line") if places.type.get_field_index(name) >= 0]  # tables have none
    rejects = [
        _reject(given, row, faults[row], rules.secrets)._replace(**{name: places[row][name].as_py() for name in where})
        for row in sorted(faults)
    ]
    if faults:
        good = pa.array([row for row in range(count) if row not in faults], pa.int64())
        given = {name: column.take(good) for name, column in given.items()}
    for name in given.keys() & {*STAGED_DURATIONS}:
        given[name] = pc.divide(given[name].cast(pa.duration("us")).cast(pa.int64()).cast(pa.float64()), 1e6)
    return {COLUMNS[name]: column for name, column in given.items()}, rejects


def _filled(given: dict[str, pa.Array], rules: Rules, count: int) -> dict[str, pa.Array]:
    """Return the columns with the values of the rules where there is none; the queue only if it is no column."""
    values = {name: pa.scalar(getattr(rules, name), pa.int64()) for name in WHOLE}
    if rules.ttl is not None:
        values["ttl"] = pa.scalar(rules.ttl, pa.duration("us"))
    columns = {name: given.get(name, pa.nulls(count, value.type)).cast(value.type) for name, value in values.items()}
    queue = {"queue": pa.array([rules.queue] * count, pa.string())}
    return {**queue, **given, **{name: pc.fill_null(column, values[name]) for name, column in columns.items()}}


def _faults(name: str, column: pa.Array, rules: Rules) -> Iterable[tuple[int, str]]:
    if name in JSONS:
        texts = ((row, text) for row, text in enumerate(column.to_pylist()) if text is not None)
        reasons = ((row, json_fault(text, rules.limits, mapping=name == "context")) for row, text in texts)
        return [(row, reason) for row, reason in reasons if reason]
    if name in STAGED_TEXTS:
        return _text_faults(name, column, rules)
    least, most, words = STAGED_BOUNDS[name]
    bad = pc.or_(pc.less(column, pa.scalar(least, column.type)), pc.greater(column, pa.scalar(most, column.type)))
    return _said(bad, lambda row: f"{_preview(column, row)} is not {words}")


def _said(bad: pa.Array, reason: Callable[[int], str]) -> list[tuple[int, str]]:
    return [(row, reason(row)) for row in pc.indices_nonzero(bad.fill_null(False)).to_pylist()]


def _text_faults(name: str, column: pa.Array, rules: Rules) -> list[tuple[int, str]]:
    length = pc.utf8_length(column)
    bad = pc.or_(pc.or_(pc.less(length, 1), pc.greater(length, 200)), pc.match_substring(column, "\0"))
    faults = _said(bad, lambda row: f"{column[row].as_py()!r:.80} is not text of 1 to 200 characters")
    if name == "queue" or (name == "reference" and rules.require_reference):
        faults += _said(column.is_null(), lambda row: "is null, and each row must have one")
    if name == "queue" and rules.queues is not None:
        known = pc.or_kleene(pc.is_in(column, pa.array(sorted(rules.queues), pa.string())), column.is_null())
        names = ", ".join(sorted(rules.queues))
        faults += _said(pc.invert(known), lambda row: f"{column[row].as_py()!r} is unknown. Known: {names}")
    return faults


def json_fault(text: str, limits: json_payload.Limits, *, mapping: bool = False) -> str | None:
    """Return why a database cannot hold this JSON text, or None."""
    try:
        value = json_payload.loads(text)
        plain = len(text) <= min(json_payload.INT_DIGITS, limits.size // 4) and "\\u" not in text
        if not plain or text.count("[") + text.count("{") > limits.depth:
            json_payload.dumps(value, limits=limits)
    except PayloadError as error:
        return f"{error.path}: {error.reason}" if error.path else error.reason
    return f"is {text:.40}, and must be a JSON object" if mapping and not isinstance(value, dict) else None


def _preview(column: pa.Array, row: int) -> str | None:
    try:
        value = column[row].as_py()
    except (OverflowError, ValueError):  # a time beyond Python's
        value = column.slice(row, 1).cast(pa.string())[0].as_py()
    return None if value is None else str(value)[: 2 * PREVIEW_CHARS]  # the name of a value may come after it


def _reject(given: dict[str, pa.Array], row: int, fault: Mapping[str, str], secrets: MaskRules) -> Reject:
    queue, reference = (given[name][row].as_py() if name in given else None for name in ("queue", "reference"))
    payload = _preview(given["payload"], row) if "payload" in given else None
    payload, value = (text and masked_text(text, secrets)[:PREVIEW_CHARS] for text in (payload, fault["value"]))
    return Reject(queue, reference, masked_text(fault["reason"], secrets), payload, column=fault["column"], value=value)


# -- the staging table -------------------------------------------------------------------------------------------------


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
    keep_rejects: Callable[["Sequence[Reject]"], object] = len  # before the commit; of the driver, not sent

    @property
    def sql(self) -> StagingStatements:
        return StagingStatements(self.database.tables, self.database.dialect, self.table)

    def params(self, parts: "Sequence[Part]") -> Params:
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
                link.run("SET LOCAL work_mem = '128MB'")  # for sorts
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
            plan.keep_rejects([reject for part in parts for reject in part.rejects])
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
    """Drop the staging tables that killed drivers left; return their names.

    One that is being written to stays. A write that takes longer than ``older_than`` can fail as a whole.
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


def write_tasks(
    df: DataFrame, database: Database, *,
    queue: str | None = None, on_duplicate: str = "error", on_invalid: str = "error",
    queues: Collection[str] | None = None, require_reference: bool = False,
    max_attempts: int = 5, priority: int = 0, ttl: timedelta | None = None,
    limits: json_payload.Limits = json_payload.DEFAULT_LIMITS,
    once: str | None = None, batch: int = 0, content: str | None = None, dry_run: bool = False,
    keep_rejects: Callable[[Sequence[Reject]], object] = len,
) -> WriteReport:  # fmt: skip
    """Enqueue each row of ``df`` in one transaction: all of them, or none; no reader sees a part of them.

    Columns are named like ``enqueue``'s arguments. ``payload`` and ``context`` are JSON text, or a struct, map, array;
    times are timestamps, durations day-time intervals. ``queue`` is for frames without such a column, ``max_attempts``,
    ``priority`` and ``ttl`` for rows without these values. A taken (queue, reference) raises ``DuplicateTask``; with
    ``on_duplicate="ignore"`` the row is left out. A second row of ``df`` with the same reference counts as taken too.

    A bad row (payload that is not JSON, reference too long, a queue not in ``queues``, null reference with
    ``require_reference``) raises `PipelineError`; ``on_invalid="reject"`` leaves it out, with the reason in the report.

    ``once`` names this write in the ledger, ``batch`` counts within the name: a second write of the same pair adds
    nothing and reports ``repeated``. ``content`` is a text that the ledger keeps beside the name. Ids follow the
    references' order. ``dry_run`` stages the rows, and returns what the write would do. ``keep_rejects`` is called with
    the rejects before the commit, so that no kill loses them; if it raises, nothing is written.
    """
    rules = Rules(queue, queues, require_reference, max_attempts, priority, ttl, limits)
    named = None if once is None else (once, batch)
    plan = _plan(database, df.schema, rules, on_duplicate=on_duplicate, on_invalid=on_invalid, once=named)
    plan = plan._replace(content=content, dry_run=dry_run)
    try:
        rows = df.mapInArrow(partial(_fill_rows, plan), "part string").collect()
        parts = [Part(**json.loads(row.part)) for row in rows]
    except BaseException:
        drop_staging(database, plan.table)
        raise
    return finish(plan._replace(keep_rejects=keep_rejects), parts)


def _plan(
    database: Database, schema: types.StructType, rules: Rules, *,
    on_duplicate: str, on_invalid: str, once: tuple[str, int] | None,
) -> Plan:  # fmt: skip
    check_schema(schema, rules.queue)
    for name, value, other in (("on_duplicate", on_duplicate, "ignore"), ("on_invalid", on_invalid, "reject")):
        if value not in ("error", other):
            raise PipelineError(f"{name}={value!r} must be one of 'error', {other!r}.")
    ignore, reject = on_duplicate == "ignore", on_invalid == "reject"
    timed = rules.ttl is not None or not TIMING.keys().isdisjoint(schema.names)
    return Plan(database, open_staging(database), rules, ignore=ignore, reject=reject, timed=timed, once=once)


def _fill_rows(plan: Plan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"part": [json.dumps(vars(fill(plan, batches, task_attempt_id())))]})


def plan_of(database: Database, schema: types.StructType, options: Mapping[str, str]) -> Plan:
    """Return the plan of a write through ``df.write`` or ``writeStream``, by its options; makes the staging table."""
    attempts = Argument("max_attempts", "", count).value(options.get("max_attempts", 5))
    priority = Argument("priority", "", whole).value(options.get("priority", 0))
    rules = Rules(options.get("queue"), max_attempts=attempts, priority=priority)
    choices = {name: options.get(name, "error") for name in ("on_duplicate", "on_invalid")}
    return _plan(database, schema, rules, **choices, once=(options["once"], 0) if "once" in options else None)


@dataclass
class TaskWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """A bulk enqueue. Of a stream Spark makes a writer for the tasks and one for the commit, each with its table."""

    plan: Plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Part:
        return fill(self.plan, iterator, task_attempt_id())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        staged = [message for message in messages if isinstance(message, Part)]
        table = staged[0].table if staged else self.plan.table
        finish(self.plan._replace(table=table, once=(self.plan.once[0], batchId) if self.plan.once else None), staged)
        if table != self.plan.table:
            drop_staging(self.plan.database, self.plan.table)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        for table in {self.plan.table, *(message.table for message in messages if isinstance(message, Part))}:
            drop_staging(self.plan.database, table)
