"""The job ``enqueue``: rows of files or tables become tasks, each chunk of them in one transaction."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, functions as F
from pyspark.sql.types import DataType, DayTimeIntervalType, FractionalType, StringType, StructField, StructType

from django_dbtaskqueue.core.durations import clock, parse_length
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits
from django_dbtaskqueue.core.sql.pipeline import StagingStatements
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Options, Result, count, pair, write_whole
from django_dbtaskqueue.pipeline.source import rows, write_tasks
from django_dbtaskqueue.pipeline.source.rows import FORMATS, PREVIEW_CHARS, ROW, Files

__all__ = ["Enqueue"]

GUARDS = (
    Argument("known_queue", "a queue that exists; others are refused. Default: any, or the project's", many=True),
    Argument("payload_max_bytes", "of a payload. Default: 1 MiB, or the project's", count, DEFAULT_LIMITS.size),
    Argument("rejects", "file for rows that cannot be tasks: JSON lines with line, column, value and reason"),
)
ROW_KEYS = "_keys"
WRITE_OPTIONS = ("queue", "on_duplicate", "require_reference", "max_attempts", "priority", "ttl")  # of ``write_tasks``
DEFAULT_CHUNK_ROWS = 50_000  # of a load with a rate or a name
MAX_BURST_S = 10  # of the rate, in one chunk
# Chunks; rows of one, their sum, rows of the input; which chunk.
LEDGER_ENTRY = re.compile(r"(\d+)(?: (\d+) (-?\d+) of (\d+))? (\d+)")
MAX_LOAD_NAME_CHARS = 80  # the ledger's name holds content, too


def load_name(text: str) -> str:
    """Return the name of a load. Raises ValueError for a long one."""
    if len(text) > MAX_LOAD_NAME_CHARS:
        raise ValueError(f"{text!r} is longer than {MAX_LOAD_NAME_CHARS} characters")
    return text


class Enqueue(Job):
    """Reads rows with Spark, maps columns to the arguments of ``enqueue``, and enqueues the rows.

    --map NAME=VALUE: NAME is reference, payload, priority, run_at, delay, group, tag, ttl, lease, max_attempts,
    context, payload_type or queue. VALUE is a column or an SQL expression; for a payload ``*`` is the whole row as an
    object, and ``a,b`` is an object of these columns.

    Each chunk of rows is written in one transaction. A job that was stopped continues when it runs again with the same
    input and the same --resume NAME: it skips the chunks of that name that are done. If the rows of a chunk that is
    done have changed, the job says what changed and adds nothing. With references and --on-duplicate ignore a repeated
    row never adds a task. A row that cannot be a task stops the job; with --rejects FILE such rows are written there,
    with file, line, column, value and reason, and the others are enqueued. --dry-run returns the counts of the run.

    CSV has a header and doubled quotes, and its values are text; an empty one is null. A line of JSON Lines is an
    object, and with payload=* it is the payload as it is. Text is UTF-8 unless --option encoding=NAME says otherwise.
    """

    name = "enqueue"
    summary = "rows of CSV, JSON, Parquet or a table become tasks"
    arguments = (
        Argument("input", "file, folder or pattern to read", many=True, metavar="PATH"),
        Argument("format", "of the input. Default: by the files' name", choices=tuple(FORMATS)),
        Argument("option", "of CSV: sep, quote, escape, header; of all text: encoding; as sep=;", pair, many=True),
        Argument("table", "table or view of Spark's catalog to read, instead of --input"),
        Argument("where", "SQL condition: only these rows"),
        Argument("queue", "queue of the tasks; required without --map queue=COLUMN"),
        Argument("map", "what a task is made of, as reference=flight_id or payload=*", pair, many=True),
        Argument("on_duplicate", "of a taken reference", default="error", choices=("error", "ignore")),
        Argument("require_reference", "refuse rows without a reference", bool, False),
        Argument("rate", "at most N tasks per second", count),
        Argument("chunk", "rows of one transaction. Default: all; with --rate or --resume 50,000", count),
        Argument("resume", "name of this load; run again with the same name to continue after a stop", load_name),
        Argument("max_attempts", "attempts of a row without max_attempts. Default: the queue's", count, 5),
        Argument("priority", "priority of a row without one, lower first. Default: the queue's", int, 0),
        Argument("ttl", "how long after it is due a task may still be started", parse_length),
        *GUARDS,
    )

    def run(self, context: Context) -> Result:
        """Enqueue, and return the counts. On PipelineError and DuplicateTask the chunk added nothing."""
        options = context.options
        if options["queue"] is None and "queue" not in dict(options["map"]):
            raise JobOptionError("--queue", "which queue? Give --queue NAME, or --map queue=COLUMN")
        refuse_unknown_queue("--queue", options)
        return written(context, mapped(read(context), dict(options["map"])))


def refuse_unknown_queue(flag: str, options: Options) -> None:
    """Raise JobOptionError if the queue of an option is not a known one."""
    known, queue = options["known_queue"], options[flag.removeprefix("--")]
    if known and queue is not None and queue not in known:
        near = near_match(queue, known)
        raise JobOptionError(flag, f"unknown queue {queue!r}.{near} Known: {', '.join(sorted(known))}")


def guarded(context: Context) -> Options:
    """Return the arguments of ``write_tasks`` with which a job asks the guards of ``enqueue()``."""
    options = context.options
    return {
        "queues": options["known_queue"] or None,
        "limits": Limits(size=options["payload_max_bytes"]),
        "on_invalid": "reject" if options["rejects"] else "error",
        "dry_run": context.dry_run,
    }


def read(context: Context) -> DataFrame:
    """Return the input. Raises JobOptionError if it does not exist."""
    options, spark = context.options, context.spark
    if bool(options["input"]) == bool(options["table"]):
        raise JobOptionError("--input", "give either files with --input, or a table with --table")
    if options["table"]:
        return only(spark.table(options["table"]), options["where"])
    files = Files.of(options["input"], options["format"], dict(options["option"]))
    frame = files.frame(spark)
    if options["where"] or {value for _, value in options["map"]} != {"*"}:
        frame = with_keys(frame, files.columns)
    return only(frame, options["where"])


def with_keys(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Return the rows with a column for each key, of the types that Spark finds; ``columns`` are text."""
    schema = StructType([StructField(name, StringType()) for name in columns])
    if not columns:
        schema = frame.sparkSession.read.json(frame.select(f"{ROW}.text").na.drop()).schema
    return frame.select(F.from_json(f"{ROW}.text", schema).alias(ROW_KEYS), ROW).select(f"{ROW_KEYS}.*", ROW)


def only(frame: DataFrame, where: str | None) -> DataFrame:
    """Return the rows for which this SQL is true (None: all), and those that were not read. Raises JobOptionError."""
    unread = F.col(f"{ROW}.fault").isNotNull() if ROW in frame.columns else F.lit(False)
    try:
        return frame.where(F.expr(where) | unread) if where else frame
    except (AnalysisException, ParseException) as error:
        raise JobOptionError("--where", f"Spark cannot use {where!r}: {_short(error)}") from None


def mapped(frame: DataFrame, mapping: Mapping[str, str]) -> DataFrame:
    """Return a column for each mapped argument of ``enqueue``; without a mapping, the columns of these names.

    A value of the wrong type is null, and the fault of its row. Raises JobOptionError for an argument or a column that
    does not exist.
    """
    columns = [name for name in frame.columns if name != ROW]
    if not mapping and not {"reference", "payload"} & set(columns):
        wanted = "what is a task? Give its reference, its payload or both, as in --map payload=*"
        raise JobOptionError("--map", f"{wanted}. The columns are {', '.join(columns)}")
    chosen, faults = [], [F.col(f"{ROW}.fault")] if ROW in frame.columns else []
    for name, value in (mapping or {name: name for name in columns if name in rows.COLUMNS}).items():
        if name not in rows.COLUMNS:
            near = near_match(name, rows.COLUMNS)
            raise JobOptionError("--map", f"a task has no {name!r}.{near} It has {', '.join(rows.COLUMNS)}")
        try:
            column = _value(frame, name, value)
            kind = frame.select(column).schema[0].dataType
        except (AnalysisException, ParseException) as error:
            reason = f"{_short(error)}.{near_match(value, columns)} The columns are {', '.join(columns)}"
            raise JobOptionError(f"--map {name}={value}", reason) from None
        typed, lost, reason = _typed(name, column, kind)
        chosen.append(typed.alias(name))
        if reason:
            text = F.left(column.cast("string"), F.lit(PREVIEW_CHARS))
            said = F.concat(F.lit(f"{name}: '"), text, F.lit(f"' {reason}"))
            fault = F.struct(F.lit(name).alias("column"), text.alias("value"), said.alias("reason"))
            faults.append(F.when(column.isNotNull() & lost, fault))
    if faults:
        place = [F.col(f"{ROW}.{one}").alias(one) for one in ("file", "line") if ROW in frame.columns]
        chosen.append(F.struct(*place, F.coalesce(*faults).alias("fault")).alias(ROW))
    return frame.select(*chosen)


def _value(frame: DataFrame, name: str, value: str) -> Column:
    columns, words = [one for one in frame.columns if one != ROW], [word.strip() for word in value.split(",")]
    if name in rows.JSONS and (value == "*" or (len(words) > 1 and set(words) <= set(columns))):
        if ROW in frame.columns:  # JSON as it is
            return F.col(f"{ROW}.text") if value == "*" else picked(words)
        return F.struct(*(_column(word) for word in (columns if value == "*" else words)))
    if value not in columns:
        return F.expr(value)
    as_text = name in (*rows.JSONS, *rows.STAGED_TEXTS) and frame.schema[value].dataType != StringType()
    return picked([value], alone=True) if ROW in frame.columns and as_text else _column(value)


def _column(name: str) -> Column:
    return F.col(f"`{name.replace('`', '``')}`")


def picked(keys: Sequence[str], *, alone: bool = False) -> Column:
    """Return these keys of the rows of files as JSON, as they are; ``alone``: the value of the only one."""

    def pick(line: str | None) -> str | None:
        found = {key: line and json.loads(line).get(key) for key in keys}
        value = found[keys[0]] if alone else found
        return None if line is None or value is None else json.dumps(value, ensure_ascii=False)

    return F.udf(pick, StringType(), useArrow=False)(f"{ROW}.text")


def _typed(name: str, column: Column, kind: DataType) -> tuple[Column, Column, str]:
    """Return the column as ``write_tasks`` takes it, whether its value was lost, and the reason; "" if none can be."""
    if name in rows.WHOLE:
        whole = column.try_cast("long")
        cut = whole != column if isinstance(kind, FractionalType) else F.lit(False)
        return whole, whole.isNull() | cut, "is not a whole number"
    if name in rows.STAGED_DURATIONS and not isinstance(kind, DayTimeIntervalType):
        seconds = column.try_cast("decimal(18,6)")
        return F.make_dt_interval(secs=seconds), seconds.isNull(), "is not a number of seconds"
    if name == "run_at":
        time = column.try_cast("timestamp")
        return time, time.isNull(), "is not a time, such as 2030-01-31T08:00:00+01:00"
    return column.cast("string") if name in rows.STAGED_TEXTS else column, F.lit(False), ""


def _short(error: Exception) -> str:
    return str(error).split(" SQLSTATE")[0].splitlines()[0].rstrip(".")


def written(context: Context, tasks: DataFrame) -> Result:
    """Enqueue all chunks, at most at the rate, and return the counts."""
    options, database = context.options, context.need_database()
    load = Load.of(context, tasks) if options["resume"] else None
    chunks, size = (load.chunks, load.size) if load else _chunks(context, tasks)
    totals = {"enqueued": 0, "ignored": 0, "rejected": 0, "chunks": chunks, "chunks_done_before": 0}
    rejects: list[rows.Reject] = []
    given = {**{name: options[name] for name in WRITE_OPTIONS}, **guarded(context)}
    for number, chunk in enumerate(_split(tasks, chunks)):
        context.progress("enqueueing", number, chunks)
        if load and number in load.done:
            totals["chunks_done_before"] += 1
            continue
        began = clock.monotonic()
        once: Options = {"once": f"{load.prefix}{chunks}", "content": load.content(number)} if load else {}
        done = write_tasks(chunk, database, batch=number, **once, **given)
        rejects += done.rejects
        totals["enqueued"] += done.enqueued
        totals["ignored"] += done.ignored
        totals["chunks_done_before"] += done.repeated
        if options["rate"] and number < chunks - 1 and not (done.repeated or context.dry_run):
            threading.Event().wait(max(0.0, size / options["rate"] - (clock.monotonic() - began)))
    if context.dry_run:
        totals = {"would_enqueue": totals.pop("enqueued"), **totals}
    return {**totals, **rejected(context, rejects)}


def rejected(context: Context, rejects: Sequence[rows.Reject]) -> Result:
    """Write the rejects of a job into their file; return their number and the file."""
    found, file = {"rejected": len(rejects)}, context.options["rejects"]
    if not file or context.dry_run:
        return found
    write_whole(Path(file), "".join(f"{json.dumps(one._asdict(), ensure_ascii=False)}\n" for one in rejects))
    return {**found, "rejects": file}


class Load(NamedTuple):
    """The chunks of a load with a name. The first run decides their number; the ledger has the content of each."""

    prefix: str
    chunks: int
    size: int
    contents: Mapping[int, tuple[int, int]]  # of each chunk that has rows: their number, and a sum over them
    done: Collection[int]

    @classmethod
    def of(cls, context: Context, tasks: DataFrame) -> Load:
        """Return the load, with what earlier runs have done. Raises PipelineError if rows of that have changed."""
        prefix, database = f"enqueue {context.options['resume']} /", context.need_database()
        with database.open() as link:
            entries = link.run(StagingStatements(database.tables, database.dialect).entries, {"prefix": prefix})
        found = [match for (entry,) in entries if (match := LEDGER_ENTRY.fullmatch(entry[len(prefix) :]))]
        chunks, size = (int(found[-1][1]), _chunk_rows(context)) if found else _chunks(context, tasks)
        context.progress("comparing rows", 0, 0)
        row = _row_hash(tasks)
        content = F.sum(F.xxhash64(row, F.lit(context.options["queue"])).cast("decimal(38,0)"))
        sums = tasks.groupBy(F.pmod(row, F.lit(chunks))).agg(F.count("*"), content).collect()
        contents = {number: (rows, int(total)) for number, rows, total in sums}
        stored = {int(match[5]): match for match in found if int(match[1]) == chunks}
        load = cls(prefix, chunks, size, contents, stored)
        load._compare(context.options["resume"], {batch: match for batch, match in stored.items() if match[2]})
        return load

    def content(self, number: int) -> str:
        rows, content = self.contents.get(number, (0, 0))
        return f"{rows} {content} of {sum(one for one, _ in self.contents.values())}"

    def _compare(self, name: str, stored: Mapping[int, re.Match[str]]) -> None:
        same = ((int(match[2]), int(match[3])) == self.contents.get(number, (0, 0)) for number, match in stored.items())
        if not (changed := [*same].count(False)):
            return
        before = max(int(match[4]) for match in stored.values())
        now = sum(rows for rows, _ in self.contents.values())
        size = f"has {now:,} rows as before" if now == before else f"had {before:,} rows and has {now:,} now"
        raise PipelineError(
            f"The input of --resume {name} is not the one that was enqueued: it {size}, and {changed:,} of "
            f"{len(self.done):,} finished chunks have other rows (or --map or --queue is another). Nothing was "
            "enqueued, because some of these rows are tasks already. Load only the new rows, in a file of their own or "
            "with --where, under another name."
        )


def _chunk_rows(context: Context) -> int:
    """Return the rows of one chunk; 0 if all rows are one."""
    options = context.options
    size: int = options["chunk"] or (DEFAULT_CHUNK_ROWS if options["rate"] or options["resume"] else 0)
    return min(size, options["rate"] * MAX_BURST_S) if options["rate"] else size


def _chunks(context: Context, tasks: DataFrame) -> tuple[int, int]:
    size = _chunk_rows(context)
    if not size:
        return 1, 0
    context.progress("counting rows", 0, 0)
    return max(1, math.ceil(tasks.count() / size)), size


def _split(tasks: DataFrame, chunks: int) -> Iterable[DataFrame]:
    """Return the rows in chunks. A row's content decides its chunk, so that it is the same in every run."""
    chunk = F.pmod(_row_hash(tasks), F.lit(chunks))
    return (tasks.where(chunk == number) for number in range(chunks)) if chunks > 1 else [tasks]


def _row_hash(tasks: DataFrame) -> Column:
    return F.xxhash64(*(F.to_json(F.struct(name)) for name in tasks.columns if name != ROW))
