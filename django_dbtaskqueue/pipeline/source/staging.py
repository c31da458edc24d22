"""Bulk enqueue by a staging table: check and stage the rows in Spark's tasks, then move them into TASKS at once.

``open_staging`` and ``finish`` run on the driver, ``fill`` in a Spark task. Each attempt of a Spark task marks its rows
with its own number, and the driver moves only the rows of attempts whose answer it got: a retry, a speculative attempt
or a lost executor never adds a row twice. A driver that dies leaves only a staging table; see `sweep_staging`.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import NamedTuple

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import BY_NAME, ENQUEUED, TIMING
from django_dbtaskqueue.core.durations import MIN_LEASE
from django_dbtaskqueue.core.exceptions import DuplicateTask, PayloadError, PipelineError, TaskQueueError
from django_dbtaskqueue.core.masking import Rules as MaskRules
from django_dbtaskqueue.core.masking import current_rules, masked_text
from django_dbtaskqueue.core.outcomes import MAX_DELAY
from django_dbtaskqueue.core.sql.pipeline import STAGING_PREFIX, STAMP_DIGITS, StagingStatements
from django_dbtaskqueue.pipeline.database import Database, Link, Params, database_errors
from django_dbtaskqueue.pipeline.source.files import PREVIEW_CHARS, ROW, as_json

# -- the rules of rows -------------------------------------------------------------------------------------------------

# Rows of a DataFrame as tasks: what `stage` checks, and what it makes of them. These are the rules of ``enqueue()``.
#
# A DataFrame's columns are named like the arguments of ``enqueue``: ``queue`` and ``reference`` (text), ``payload`` and
# ``context`` (JSON text, or a struct, map or array), ``priority`` and ``max_attempts`` (whole numbers), ``run_at``
# (timestamp), ``delay``, ``ttl`` and ``lease`` (day-time intervals), ``group``, ``tag`` and ``payload_type`` (text).

GIVEN = (BY_NAME["queue"], *ENQUEUED)
COLUMNS = {column.argument: column.db for column in GIVEN} | {name: name for name in TIMING}  # DataFrame's -> staging's
STAGED_TEXTS = tuple(column.argument for column in GIVEN if column.type == "text")
JSONS = tuple(column.argument for column in GIVEN if column.type == "jsonb")
STAGED_DURATIONS = (*(column.argument for column in GIVEN if column.type == "float8"), "delay", "ttl")
WHOLE = ("priority", "max_attempts")
# Of each column with an order: its least and its greatest value, and what they are
BOUNDS: dict[str, tuple[object, object, str]] = {
    **dict.fromkeys(STAGED_DURATIONS, (timedelta(0), MAX_DELAY, "between zero and a hundred years")),
    "lease": (MIN_LEASE, MAX_DELAY, "between 100 ms and a hundred years"),
    "priority": (-32768, 32767, "a whole number from -32768 to 32767"),
    "max_attempts": (1, 2**31 - 1, "a whole number from 1 to 2147483647"),
    "run_at": (datetime(2, 1, 1, tzinfo=UTC), datetime(9000, 12, 31, tzinfo=UTC), "a time of the years 2 to 9000"),
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
    queues: frozenset[str] | None = None  # the known ones; None: any name
    require_reference: bool = False
    max_attempts: int = 5
    priority: int = 0
    ttl: float | None = None  # seconds
    limits: json_payload.Limits = json_payload.DEFAULT_LIMITS
    secrets: MaskRules = field(default_factory=current_rules)  # of the driver: executors have no settings


def stage(batch: pa.RecordBatch, rules: Rules) -> tuple[dict[str, pa.Array], list[Reject]]:
    """Return the good rows as the staging table's columns, and the bad ones."""
    count, names = batch.num_rows, batch.schema.names
    given = _filled({name: batch.column(name) for name in names if name in COLUMNS}, rules, count)
    places = batch.column(ROW) if ROW in names else pa.nulls(count, pa.struct([("fault", pa.null())]))
    unread = pc.indices_nonzero(places.field("fault").is_valid()).to_pylist()
    faults = {row: places[row]["fault"].as_py() for row in unread}
    for name, column in [*given.items()]:
        if pa.types.is_nested(column.type):
            given[name], found = _in_json(name, column, rules.limits)
        else:
            found = [*_faults(name, column, rules)]
        for row, reason in found:
            faults.setdefault(row, {"column": name, "value": _preview(given[name], row), "reason": f"{name}: {reason}"})
    where = [name for name in ("file", "line") if places.type.get_field_index(name) >= 0]  # tables have none
    rejects = [
        _reject(given, row, faults[row], rules.secrets)._replace(**{name: places[row][name].as_py() for name in where})
        for row in sorted(faults)
    ]
    if faults:
        good = pa.array([row for row in range(count) if row not in faults], pa.int64())
        given = {name: column.take(good) for name, column in given.items()}
    seconds = {name: _seconds(column) for name, column in given.items() if name in STAGED_DURATIONS}
    return {COLUMNS[name]: column for name, column in {**given, **seconds}.items()}, rejects


def _filled(given: dict[str, pa.Array], rules: Rules, count: int) -> dict[str, pa.Array]:
    """Return the columns with the values of the rules where there is none; the queue only if it is no column."""
    values = {
        "priority": pa.scalar(rules.priority, pa.int64()),
        "max_attempts": pa.scalar(rules.max_attempts, pa.int64()),
    }
    if rules.ttl is not None:
        values["ttl"] = pa.scalar(timedelta(seconds=rules.ttl), pa.duration("us"))
    columns = {name: given.get(name, pa.nulls(count, value.type)).cast(value.type) for name, value in values.items()}
    queue = {"queue": pa.array([rules.queue] * count, pa.string())}
    return {**queue, **given, **{name: pc.fill_null(column, values[name]) for name, column in columns.items()}}


def _faults(name: str, column: pa.Array, rules: Rules) -> Iterable[tuple[int, str]]:
    if name in JSONS:
        return _json_faults(name, column, rules.limits)
    if name in STAGED_TEXTS:
        return _text_faults(name, column, rules)
    least, most, kind = BOUNDS[name]
    bad = pc.or_(pc.less(column, pa.scalar(least, column.type)), pc.greater(column, pa.scalar(most, column.type)))
    return _said(bad, lambda row: f"{_preview(column, row)} is not {kind}")


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


def _json_faults(name: str, column: pa.Array, limits: json_payload.Limits) -> list[tuple[int, str]]:
    texts = ((row, text) for row, text in enumerate(column.to_pylist()) if text is not None)
    reasons = ((row, json_fault(text, limits, mapping=name == "context")) for row, text in texts)
    return [(row, reason) for row, reason in reasons if reason]


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


def _in_json(name: str, column: pa.Array, limits: json_payload.Limits) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return structs, maps or arrays as JSON, and why the database cannot hold some."""
    texts: list[str | None] = []
    faults = []
    for row, value in enumerate(column):
        try:
            texts.append(as_json(value.as_py(maps_as_pydicts="strict")) if value.is_valid else None)
        except (ValueError, OverflowError, KeyError, TypeError) as error:  # a date beyond Python's, a key twice
            texts.append(None)
            faults.append((row, str(error)))
    found = pa.array(texts, pa.string())
    return found, [*faults, *_json_faults(name, found, limits)]


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


def _seconds(column: pa.Array) -> pa.Array:
    return pc.divide(column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.float64()), 1e6)


# -- staging -----------------------------------------------------------------------------------------------------------

CHANNEL = "dbtaskqueue"
MAX_GROUP_LOCKS = 2000  # of more groups the table is locked: PostgreSQL holds some thousand locks in all
SORT_MEMORY = "128MB"
ABANDONED_AFTER = timedelta(days=1)
STAMP_FORMAT = "%Y%m%d%H%M%S"
CSV_OPTIONS = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")


@dataclass(frozen=True)
class Plan:
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


class Part(NamedTuple):
    """The rows that one attempt of a Spark task staged."""

    attempt: int
    rows: int
    rejected: int
    rejects: list[Reject]
    queues: list[str]
    grouped: bool  # whether any row names a group


@dataclass(frozen=True)
class WriteReport:
    """The counts of a write; ``rejects`` says why rows were left out.

    ``repeated``: the ledger has this write already, so it added nothing.
    """

    enqueued: int = 0
    ignored: int = 0
    rejects: tuple[Reject, ...] = ()
    repeated: bool = False

    @property
    def rejected(self) -> int:
        return len(self.rejects)


# -- the staging table -------------------------------------------------------------------------------------------------


def open_staging(database: Database) -> str:
    """Make a staging table and return its quoted name; drop those that were abandoned a day ago."""
    sql = StagingStatements(database.tables, database.dialect)
    sweep_staging(database)
    with database.open() as link:
        name = f'"{STAGING_PREFIX}{link.run(sql.stamp)[0][0]}_{secrets.token_hex(6)}"'
        link.run(sql.create(name))
    return name


def drop_staging(database: Database, table: str) -> None:
    """Drop a staging table; if that fails, a sweep drops it later."""
    with suppress(TaskQueueError, *database_errors()), database.open() as link:
        link.run(f"DROP TABLE IF EXISTS {table}")


def fill(plan: Plan, batches: Iterable[pa.RecordBatch], attempt: int) -> Part:
    """Check and stage the rows of one Spark task under the number of its attempt."""
    rejects: list[Reject] = []
    queues: set[str] = set()
    counts = {"rows": 0, "rejected": 0, "grouped": 0}

    def good() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns, bad = stage(batch, plan.rules)
            number = batch.num_rows - len(bad)
            counts["rejected"] += len(bad)
            counts["rows"] += number
            if plan.reject or not rejects:
                rejects.extend(bad)
            if "run_at" in columns and not plan.database.postgresql:  # SQLite's clock has milliseconds
                columns["run_at"] = columns["run_at"].cast(pa.timestamp("ms", "UTC"), safe=False)
            if number:
                queues.update(pc.unique(columns["queue_name"]).to_pylist())
                group = columns.get("group_key")
                counts["grouped"] += 0 if group is None else len(group) - group.null_count
                marks = pa.repeat(pa.scalar(attempt, pa.int64()), number)
                yield pa.RecordBatch.from_pydict({"_attempt": marks, **columns})

    rows = good()
    if (first := next(rows, None)) is not None:  # connect when there is something to write
        with plan.database.open() as link:
            if link.postgresql:
                load(link, plan.table, chain([first], rows))
            else:
                for one in chain([first], rows):
                    with link.transaction():  # one each: SQLite has a single writer
                        load(link, plan.table, [one])
    return Part(attempt, counts["rows"], counts["rejected"], rejects, sorted(queues), counts["grouped"] > 0)


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
            insert = f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * first.num_columns)})"
            link.connection.executemany(insert, zip(*map(_sqlite_values, first.columns), strict=True))


def _sqlite_values(column: pa.Array) -> list[str | int | float | None]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp(column.type.unit)).cast(pa.string())
    values: list[str | int | float | None] = column.to_pylist()
    return values


def finish(plan: Plan, parts: Sequence[Part]) -> WriteReport:
    """Move the staged rows of these parts into TASKS in one transaction, drop the staging table, wake the pollers.

    Raises `DuplicateTask` for a taken reference and `PipelineError` for bad rows; then nothing is written.
    """
    try:
        _check(plan, parts)
        with plan.database.open() as link:
            if plan.dry_run:
                return _foreseen(plan, link, parts)
            report = _move(plan, link, parts)
            if link.postgresql and report.enqueued:
                queues = sorted({queue for part in parts for queue in part.queues})
                link.run(f"SELECT pg_notify('{CHANNEL}', q) FROM unnest(%(queues)s::text[]) AS q", {"queues": queues})
    finally:
        drop_staging(plan.database, plan.table)
    return report


def _foreseen(plan: Plan, link: Link, parts: Sequence[Part]) -> WriteReport:
    """Return what `_move` would, or raise the same for a taken reference."""
    sql = StagingStatements(plan.database.tables, plan.database.dialect)
    params = {"attempts": plan.database.dialect.array([part.attempt for part in parts])}
    staged, rejects = sum(part.rows for part in parts), tuple(reject for part in parts for reject in part.rejects)
    if plan.once and (" ".join(map(str, plan.once)),) in link.run(sql.entries, {"prefix": plan.once[0]}):
        return WriteReport(rejects=rejects, repeated=True)
    new = int(link.run(sql.new(plan.table), params)[0][0]) if staged else 0
    if new < staged and not plan.ignore:
        raise _duplicate(plan, link, sql, params)
    return WriteReport(new, staged - new, rejects)


def _check(plan: Plan, parts: Sequence[Part]) -> None:
    if (rejected := sum(part.rejected for part in parts)) and not plan.reject:
        first = next(reject for part in parts for reject in part.rejects)
        raise PipelineError(
            f'{rejected:,} rows cannot be enqueued (on_invalid="error"), so nothing was written. The first, '
            f"{f'in line {first.line} of {first.file}' if first.file else f'with reference {first.reference!r}'}: "
            f'{first.reason}. Correct them, or set them aside with on_invalid="reject" or --rejects FILE.'
        )


def _move(plan: Plan, link: Link, parts: Sequence[Part]) -> WriteReport:
    sql = StagingStatements(plan.database.tables, plan.database.dialect)
    params = {"attempts": plan.database.dialect.array([part.attempt for part in parts])}
    staged = sum(part.rows for part in parts)
    rejects = tuple(reject for part in parts for reject in part.rejects)
    grouped = any(part.grouped for part in parts)
    query, batch = plan.once or ("", 0)
    try:
        with link.transaction():
            if link.postgresql:
                link.run(f"SET LOCAL work_mem = '{SORT_MEMORY}'")
            if plan.once and not link.change(sql.enter, {"entry": f"{query} {batch}"}):
                return WriteReport(rejects=rejects, repeated=True)
            if grouped and link.postgresql:  # SQLite has a single writer
                many = link.run(sql.groups(plan.table), params)[0][0] > MAX_GROUP_LOCKS
                link.run(sql.lock_table if many else sql.lock_groups_of(plan.table), params)
            insert = sql.insert(plan.table, ignore=plan.ignore, timed=plan.timed, grouped=grouped)
            enqueued = link.change(insert, params) if staged else 0
            if enqueued < staged and link.run(sql.staged(plan.table), params)[0][0] < staged:
                raise PipelineError("The database has lost staged rows, as after a crash. Write them again.")
            if grouped:
                _regroup(plan, link, sql, params)
            if plan.once and plan.content:
                link.change(sql.enter, {"entry": f"{query} {plan.content} {batch}"})
    except (psycopg.errors.UniqueViolation, sqlite3.IntegrityError) as error:
        raise _duplicate(plan, link, sql, params) from error
    return WriteReport(enqueued, staged - enqueued, rejects)


def _regroup(plan: Plan, link: Link, sql: StagingStatements, params: Params) -> None:
    moves = link.run(sql.misplaced(plan.table), params)
    for ready, statement in ((True, plan.database.sql.park), (False, plan.database.sql.make_ready)):
        if ids := [task_id for task_id, was_ready in moves if bool(was_ready) is ready]:
            link.run(statement, {"ids": plan.database.dialect.array(ids)})
            moves = link.run(sql.misplaced(plan.table), params) if ready else []  # a checkout may have taken a head


def _duplicate(plan: Plan, link: Link, sql: StagingStatements, params: Params) -> TaskQueueError:
    if held := link.run(sql.conflicts(plan.table), params):
        queue, reference, task_id, status = held[0]
        return DuplicateTask(queue, reference, task_id=task_id, status=status)
    if twice := link.run(sql.twice(plan.table), params):
        return DuplicateTask(*twice[0])
    return PipelineError("A reference was taken while the rows were written, and is free again. Write them again.")


def sweep_staging(database: Database, *, older_than: timedelta = ABANDONED_AFTER) -> list[str]:
    """Drop the staging tables that killed drivers left; return their names. Each write drops those older than a day.

    A table that is being written to stays. A write that takes longer than ``older_than`` can fail as a whole.
    """
    sql = StagingStatements(database.tables, database.dialect)
    dropped = []
    with database.open() as link:
        now = _time(link.run(sql.stamp)[0][0])
        for (name,) in link.run(sql.existing):
            if now - _time(name.removeprefix(STAGING_PREFIX)) < older_than:
                continue
            try:
                with link.transaction():
                    if link.postgresql:
                        link.run("SET LOCAL lock_timeout = '100ms'")
                    link.run(f'DROP TABLE IF EXISTS "{name}"')
                dropped.append(name)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege, sqlite3.OperationalError):
                continue  # in use, or another user's
    return dropped


def _time(stamp: str) -> datetime:
    return datetime.strptime(stamp[:STAMP_DIGITS], STAMP_FORMAT)
