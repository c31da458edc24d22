"""The job ``enqueue``: rows of files or tables become tasks, each chunk of them in one transaction."""

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, functions as F, types

from django_dbtaskqueue.core.durations import clock, parse_length
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits
from django_dbtaskqueue.core.sql.pipeline import StagingStatements
from django_dbtaskqueue.pipeline import jobs
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Options, Result, count, pair, reader, whole
from django_dbtaskqueue.pipeline.source import PREVIEW_CHARS, ROW, staging, write_tasks
from django_dbtaskqueue.pipeline.source.files import FORMATS, Files
from django_dbtaskqueue.pipeline.source.staging import Reject

__all__ = ["Enqueue"]

GUARDS = (
    Argument("known_queue", "a queue that exists; others are refused. Default: any, or the project's", many=True),
    Argument("payload_max_bytes", "of a payload. Default: 1 MiB, or the project's", count, DEFAULT_LIMITS.size),
    Argument("rejects", "file for rows that cannot be tasks: JSON with line, column, value, reason", jobs.writable),
)
ROW_KEYS, UNREAD = "_keys", "_unread"
VARIANT_TYPES = re.compile(r"(?<![\w`])(?:OBJECT(?=<)|VOID(?=[,>]))")
DDL_TYPES = {"OBJECT": "STRUCT", "VOID": "STRING"}
WRITE_OPTIONS = ("queue", "on_duplicate", "require_reference", "max_attempts", "priority", "ttl")  # of ``write_tasks``
DEFAULT_CHUNK_ROWS = 50_000  # of a load with a rate or a name
MAX_BURST_S = 10  # of the rate, in one chunk
LEDGER_ENTRY = re.compile(r"(?P<chunks>\d+)(?: (?P<content>\d+ -?\d+) of (?P<rows>\d+))? (?P<chunk>\d+)")
MAX_LOAD_NAME = 80  # characters: the ledger's name holds content, too

load_name = reader(str, f"a name of at most {MAX_LOAD_NAME} characters", lambda name: len(name) <= MAX_LOAD_NAME)


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
        Argument("priority", "priority of a row without one, lower first. Default: the queue's", whole, 0),
        Argument("ttl", "how long after it is due a task may still be started", parse_length),
        *GUARDS,
    )

    def run(self, context: Context) -> Result:
        """Enqueue, and return the counts. On PipelineError and DuplicateTask the chunk added nothing."""
        options = context.options
        if options["queue"] is None and "queue" not in dict(options["map"]):
            raise JobOptionError("--queue", "which queue? Give --queue NAME, or --map queue=COLUMN")
        refuse_unknown_queue("--queue", options)
        return enqueue_chunks(context, read_input(context))


def refuse_unknown_queue(flag: str, options: Options) -> None:
    """Raise JobOptionError if the queue of an option is not a known one."""
    known, queue = options["known_queue"], options[flag.removeprefix("--")]
    if known and queue is not None and queue not in known:
        raise JobOptionError(
            flag, f"unknown queue {queue!r}.{near_match(queue, known)} Known: {', '.join(sorted(known))}"
        )


def guarded(context: Context) -> Options:
    """Return the arguments of ``write_tasks`` with which a job asks the guards of ``enqueue()``."""
    return {
        "queues": context.options["known_queue"] or None,
        "limits": Limits(size=context.options["payload_max_bytes"]),
        "on_invalid": "reject" if context.options["rejects"] else "error",
        "dry_run": context.dry_run,
    }


def rejected(context: Context, rejects: Sequence[Reject], mode: str = "a", chunk: str | None = None) -> Result:
    """Append rejects of a chunk to their file, or begin it with the mode ``w``; return their number and the file."""
    found, file = {"rejected": len(rejects)}, context.options["rejects"]
    if not file or context.dry_run:
        return found
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    named = {"chunk": chunk} if chunk else {}
    with Path(file).open(mode, encoding="utf-8") as out:
        out.writelines(f"{json.dumps(one._asdict() | named, ensure_ascii=False)}\n" for one in rejects)
    return {**found, "rejects": file}


def remove_rejects(file: Path, chunks: Iterable[str]) -> None:
    """Remove the rejects of these chunks from their file, and a line that was cut off."""
    ends = tuple(f'"chunk": {json.dumps(name, ensure_ascii=False)}}}' for name in chunks)
    text = file.read_text("utf-8") if file.is_file() else ""
    kept = "".join(f"{line}\n" for line in text.split("\n")[:-1] if not line.endswith(ends))
    if kept != text:
        jobs.write_whole(file.resolve(), kept)


def read_input(context: Context) -> DataFrame:
    """Return the input. Raises JobOptionError if it does not exist."""
    options, spark = context.options, context.spark
    if bool(options["input"]) == bool(options["table"]):
        raise JobOptionError("--input", "give either files with --input, or a table with --table")
    if options["table"]:
        return rows_where(spark.table(options["table"]), options["where"])
    files = Files.of(options["input"], options["format"], dict(options["option"]))
    for name in ("rejects", "json"):
        if os.path.realpath(options.get(name) or "") in map(os.path.realpath, files.names):
            raise JobOptionError(f"--{name}", f"{options[name]} is an input. Give another place")
    frame = files.frame(spark)
    if options["where"] or {value for _, value in options["map"]} != {"*"}:  # a column for each key
        words = [*staging.COLUMNS, *re.findall(r"\w+", f"{options['where']} {options['map']}")]
        frame = with_columns(frame, files.columns and (*files.columns, *files.folders[files.names[0]]), words)
    return rows_where(frame, options["where"])


def with_columns(frame: DataFrame, names: Sequence[str], words: Iterable[str]) -> DataFrame:
    """Return the rows with a column for each key: ``names``, or those found, or ``words`` if there is none.

    A key whose values are of several types, as 1 and "a", is a VARIANT.
    """
    schema = types.StructType([types.StructField(name, types.StringType()) for name in dict.fromkeys(names or words)])
    text = F.col(f"{ROW}.text")
    if not names:
        kinds = frame.select(F.schema_of_variant_agg(F.try_parse_json(text))).collect()[0][0]
        keys = types.DataType.fromDDL(VARIANT_TYPES.sub(lambda kind: DDL_TYPES[kind[0]], kinds))
        schema = keys if isinstance(keys, types.StructType) and keys.names else schema
    parsed = F.from_json(text, schema.add(UNREAD, types.StringType()), {"columnNameOfCorruptRecord": UNREAD})
    unread = _fault_when(F.col(UNREAD).isNotNull(), "*", F.col(UNREAD), "has a number or a key longer than Spark reads")
    rows = frame.select(parsed.alias(ROW_KEYS), ROW).select(f"{ROW_KEYS}.*", ROW)
    return rows.withColumn(ROW, F.col(ROW).withField("fault", F.coalesce(f"{ROW}.fault", unread))).drop(UNREAD)


def _fault_when(bad: Column, name: str, column: Column, reason: str) -> Column:
    text = F.left(column.cast("string"), F.lit(PREVIEW_CHARS))
    said = F.concat(F.lit(f"{name}: '"), text, F.lit(f"' {reason}"))
    return F.when(bad, F.struct(F.lit(name).alias("column"), text.alias("value"), said.alias("reason")))


def rows_where(frame: DataFrame, where: str | None) -> DataFrame:
    """Return the rows for which this SQL is true (None: all), and those that were not read. Raises JobOptionError."""
    unread = F.col(f"{ROW}.fault").isNotNull() if ROW in frame.columns else F.lit(False)
    try:
        return frame.where(F.expr(where) | unread) if where else frame
    except (AnalysisException, ParseException) as error:
        raise JobOptionError("--where", f"Spark cannot use {where!r}: {_short(error)}") from None


def mapped(frame: DataFrame, mapping: Mapping[str, str]) -> DataFrame:
    """Return a column for each argument of ``enqueue``: the mapped ones, or else those with its name.

    A value of the wrong type is null, and its row's fault. Raises JobOptionError for an unknown argument or column.
    """
    columns = [name for name in frame.columns if name != ROW]
    if not mapping and not {"reference", "payload"} & set(columns):
        wanted = "what is a task? Give its reference, its payload or both, as in --map payload=*"
        raise JobOptionError("--map", f"{wanted}. The columns are {', '.join(columns)}")
    chosen, faults = [], [F.col(f"{ROW}.fault")] if ROW in frame.columns else []
    for name, value in (mapping or {name: name for name in columns if name in staging.COLUMNS}).items():
        if name not in staging.COLUMNS:
            near = near_match(name, staging.COLUMNS)
            raise JobOptionError("--map", f"a task has no {name!r}.{near} It has {', '.join(staging.COLUMNS)}")
        try:
            column = _value(frame, name, value)
            kind = frame.select(column).schema[0].dataType
        except (AnalysisException, ParseException) as error:
            reason = f"{_short(error)}.{near_match(value, columns)} The columns are {', '.join(columns)}"
            raise JobOptionError(f"--map {name}={value}", reason) from None
        typed, lost, reason = _typed(name, column, kind)
        chosen.append(typed.alias(name))
        if reason:
            faults.append(_fault_when(column.isNotNull() & lost, name, column, reason))
    if faults:
        place = [F.col(f"{ROW}.{one}").alias(one) for one in ("file", "line") if ROW in frame.columns]
        chosen.append(F.struct(*place, F.coalesce(*faults).alias("fault")).alias(ROW))
    return frame.select(*chosen)


def _value(frame: DataFrame, name: str, value: str) -> Column:
    columns, words = [one for one in frame.columns if one != ROW], [word.strip() for word in value.split(",")]
    if name in staging.JSONS and (value == "*" or (len(words) > 1 and set(words) <= set(columns))):
        if ROW in frame.columns:  # JSON as it is
            return F.col(f"{ROW}.text") if value == "*" else picked(words)
        return F.struct(*(_column(word) for word in (columns if value == "*" else words)))
    if value not in columns:
        return F.expr(value)
    kind, any_text = frame.schema[value].dataType, name in (*staging.JSONS, *staging.STAGED_TEXTS)
    as_text = kind == types.VariantType() or (any_text and kind != types.StringType())
    return picked([value], alone=True) if ROW in frame.columns and as_text else _column(value)


def _column(name: str) -> Column:
    return F.col(f"`{name.replace('`', '``')}`")


def picked(keys: Sequence[str], *, alone: bool = False) -> Column:
    """Return these keys of the rows of files as they are: an object, or ``alone`` the only value, or its text."""

    def pick(line: str | None) -> str | None:
        row = json.loads(line or "{}")
        value = row.get(keys[0]) if alone else {key: row.get(key) for key in keys}
        return value if isinstance(value, str | None) else line and json.dumps(value, ensure_ascii=False)

    return F.udf(pick, types.StringType(), useArrow=False)(f"{ROW}.text")


def _typed(name: str, column: Column, kind: types.DataType) -> tuple[Column, Column, str]:
    """Return the column as ``write_tasks`` takes it, whether its value was lost, and the reason; "" if none can be."""
    if name in staging.WHOLE:
        whole = column.try_cast("long")
        cut = whole != column if isinstance(kind, types.FractionalType) else F.lit(False)
        return whole, whole.isNull() | cut, "is not a whole number"
    if name in staging.STAGED_DURATIONS and not isinstance(kind, types.DayTimeIntervalType):
        seconds = column.try_cast("decimal(18,6)")
        return F.make_dt_interval(secs=seconds), seconds.isNull(), "is not a number of seconds"
    if name == "run_at":
        time = column.try_cast("timestamp")
        return time, time.isNull(), "is not a time, such as 2030-01-31T08:00:00+01:00"
    return column.cast("string") if name in staging.STAGED_TEXTS else column, F.lit(False), ""


def _short(error: Exception) -> str:
    said = str(error).split(" SQLSTATE")[0].splitlines()[0].rstrip(".")
    cast = ". A VARIANT has values of several types: cast it, as in try_cast(amount AS DOUBLE)"
    return said + cast if "VARIANT" in said else said


def enqueue_chunks(context: Context, rows: DataFrame) -> Result:
    """Enqueue all chunks of the input, at most at the rate, and return the counts."""
    options, mapping = context.options, dict(context.options["map"])
    mapped(rows, mapping)  # what is wrong with it is said first
    load = Load.of(context, rows) if options["resume"] else None
    chunks, size = (load.chunks, load.size) if load else _chunks(context, rows)
    once, before = (load.once, len(load.done)) if load else (None, 0)
    totals = {"enqueued": 0, "ignored": 0, "rejected": 0, "chunks": chunks, "chunks_done_before": before}
    place = rejected(context, (), "a" if before else "w")
    if load and "rejects" in place:  # a kill leaves those of a chunk that was not committed
        remove_rejects(Path(place["rejects"]), (f"{once} {one}" for one in {*range(chunks)} - load.done.keys()))
    given = {"database": context.need_database(), **{name: options[name] for name in WRITE_OPTIONS}, **guarded(context)}
    for number, chunk in enumerate(_split(rows, chunks)):
        context.progress("enqueueing", number, chunks)
        if load and number in load.done:
            continue
        began = clock.monotonic()
        content = f"{load.contents[number]} of {load.rows}" if load else None
        keep = partial(rejected, context, chunk=once and f"{once} {number}")
        done = write_tasks(mapped(chunk, mapping), once=once, batch=number, content=content, keep_rejects=keep, **given)
        totals["rejected"] += done.rejected
        totals["enqueued"] += done.enqueued
        totals["ignored"] += done.ignored
        totals["chunks_done_before"] += done.repeated
        if options["rate"] and number < chunks - 1 and not (done.repeated or context.dry_run):
            threading.Event().wait(max(0.0, size / options["rate"] - (clock.monotonic() - began)))
    if context.dry_run:
        totals = {"would_enqueue": totals.pop("enqueued"), **totals}
    return {**totals, **place, "rejected": totals["rejected"]}


class Load(NamedTuple):
    """The chunks of a load with a name. The first run decides their number; the ledger has the content of each."""

    once: str  # its name in the ledger
    chunks: int
    size: int
    contents: Mapping[int, str]  # of each chunk: the number of its rows, and a sum over them
    rows: int
    done: Mapping[int, re.Match[str]]  # the ledger's entry of each finished chunk

    @classmethod
    def of(cls, context: Context, rows: DataFrame) -> "Load":
        """Return the load, with what earlier runs have done. Raises PipelineError if rows of that have changed."""
        prefix, database = f"enqueue {context.options['resume']} /", context.need_database()
        with database.open() as link:
            entries = link.run(StagingStatements(database.tables, database.dialect).entries, {"prefix": prefix})
        found = [match for (entry,) in entries if (match := LEDGER_ENTRY.fullmatch(entry[len(prefix) :]))]
        chunks, size = _chunks(context, rows, int(found[-1]["chunks"]) if found else None)
        context.progress("comparing rows", 0, 0)
        row, made = _row_hash(rows), str([context.options[name] for name in ("queue", "map")])
        content = F.sum(F.xxhash64(row, F.lit(made)).cast("decimal(38,0)"))
        sums = rows.groupBy(F.pmod(row, F.lit(chunks))).agg(F.count("*"), content).collect()
        contents = dict.fromkeys(range(chunks), "0 0")
        contents |= {number: f"{count} {int(total)}" for number, count, total in sums}
        done = {int(match["chunk"]): match for match in found if int(match["chunks"]) == chunks}
        load = cls(f"{prefix}{chunks}", chunks, size, contents, sum(count for _number, count, _total in sums), done)
        load._compare(context.options["resume"])
        return load

    def _compare(self, name: str) -> None:
        stored = {number: match for number, match in self.done.items() if match["content"]}
        if not (changed := [number for number, match in stored.items() if match["content"] != self.contents[number]]):
            return
        before, now = max(int(match["rows"]) for match in stored.values()), self.rows
        size = f"has {now:,} rows as before" if now == before else f"had {before:,} rows and has {now:,} now"
        raise PipelineError(
            f"The input of --resume {name} is not the one that was enqueued: it {size}, and {len(changed):,} of "
            f"{len(self.done):,} finished chunks have other rows (or --map or --queue is another). Nothing was "
            "enqueued, because some of these rows are tasks already. Load only the new rows, in a file of their own or "
            "with --where, under another name."
        )


def _chunks(context: Context, rows: DataFrame, number: int | None = None) -> tuple[int, int]:
    """Return the number of chunks, if none is given, and the rows of one; 0 if all rows are one."""
    options = context.options
    size: int = options["chunk"] or (DEFAULT_CHUNK_ROWS if options["rate"] or options["resume"] else 0)
    size = min(size, options["rate"] * MAX_BURST_S) if options["rate"] else size
    if size and number is None:
        context.progress("counting rows", 0, 0)
        number = (rows.count() - 1) // size + 1
    return max(1, number or 0), size


def _split(rows: DataFrame, chunks: int) -> Iterable[DataFrame]:
    """Return the rows in chunks. What a row was in the input decides its chunk: an expression may be ``now()``."""
    chunk = F.pmod(_row_hash(rows), F.lit(chunks))
    return (rows.where(chunk == number) for number in range(chunks)) if chunks > 1 else [rows]


def _row_hash(rows: DataFrame) -> Column:
    said = [f"{ROW}.text", f"{ROW}.fault.value"] if ROW in rows.columns else map(_column, rows.columns)
    return F.xxhash64(*(F.to_json(F.struct(one)) for one in said))
