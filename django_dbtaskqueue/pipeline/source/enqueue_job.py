"""The job ``enqueue``: rows of files or tables become tasks, each chunk of them in one transaction."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core.durations import clock, parse_length
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.core.sql.pipeline import StagingStatements
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Result, count, pair, write_whole
from django_dbtaskqueue.pipeline.source import staging, write_tasks
from django_dbtaskqueue.pipeline.source.task_writer import prepared

__all__ = ["Enqueue"]

FILE_FORMATS = ("csv", "json", "parquet", "orc", "text")
FORMAT_ALIASES = {"jsonl": "json", "ndjson": "json", "tsv": "csv"}
READER_DEFAULTS = {"csv": {"header": "true", "mode": "FAILFAST"}, "json": {"mode": "FAILFAST"}}
REJECT_SCHEMA = pa.schema([(name, pa.string()) for name in staging.Reject._fields])
REJECT_DDL = "queue string, reference string, reason string, payload string"
MAX_REJECTS_IN_ERROR = 5
MAX_TRIED_REJECTS = 1000
DEFAULT_CHUNK_ROWS = 50_000  # of a load with a rate or a name
MAX_BURST_S = 10  # of the rate, in one chunk
LEDGER_ENTRY = re.compile(r"(\d+)(?: (\d+) (-?\d+) of (\d+))?")  # chunks; rows of one, their sum, rows of the input
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
    row never adds a task. A row that cannot be a task stops the job; with --rejects
    FILE such rows are written there, with the reason, and the others are enqueued.
    """

    name = "enqueue"
    summary = "rows of CSV, JSON, Parquet or a table become tasks"
    arguments = (
        Argument("input", "file, folder or pattern to read; repeatable", many=True, metavar="PATH"),
        Argument("format", "of the input: csv, json, parquet, orc, text. Default: by the files' name",
                 choices=FILE_FORMATS),
        Argument("option", "option of Spark's reader, as sep=; or inferSchema=true; repeatable", type=pair, many=True,
                 metavar="KEY=VALUE"),
        Argument("table", "table or view of Spark's catalog to read, instead of --input"),
        Argument("where", "SQL condition: only these rows"),
        Argument("queue", "queue of the tasks; required without --map queue=COLUMN"),
        Argument("map", "what a task is made of, as reference=flight_id or payload=*; repeatable", type=pair,
                 many=True, metavar="NAME=VALUE"),
        Argument("on_duplicate", "of a taken reference: error, or ignore", choices=("error", "ignore"),
                 default="error"),
        Argument("require_reference", "refuse rows without a reference", type=bool, default=False),
        Argument("rejects", "file for rows that cannot be tasks, as JSON lines", metavar="FILE"),
        Argument("rate", "at most N tasks per second", type=count, metavar="N"),
        Argument("chunk", "rows of one transaction. Default: all; with --rate or --resume 50,000", type=count,
                 metavar="N"),
        Argument("resume", "name of this load; run again with the same name to continue after a stop", type=load_name,
                 metavar="NAME"),
        Argument("max_attempts", "attempts of a row without max_attempts. Default: the queue's", type=count,
                 default=5, metavar="N"),
        Argument("priority", "priority of a row without one, lower first. Default: the queue's", type=int, default=0,
                 metavar="N"),
        Argument("ttl", "how long after it is due a task may still be started", type=parse_length, metavar="TIME"),
        Argument("known_queue", "name of a queue that exists; others are refused. Default: any, or the project's",
                 many=True, metavar="NAME"),
    )  # fmt: skip

    def run(self, context: Context) -> Result:
        """Enqueue, and return the counts. On PipelineError and DuplicateTask the chunk added nothing."""
        options = context.options
        if options["queue"] is None and "queue" not in dict(options["map"]):
            raise JobOptionError("--queue", "which queue? Give --queue NAME, or --map queue=COLUMN")
        known, queue = options["known_queue"], options["queue"]
        if known and queue is not None and queue not in known:
            near = near_match(queue, known)
            raise JobOptionError("--queue", f"unknown queue {queue!r}.{near} Known: {', '.join(sorted(known))}")
        tasks = mapped(read(context), dict(options["map"]))
        if context.dry_run:
            return tried(context, tasks)
        return written(context, tasks)


def read(context: Context) -> DataFrame:
    """Return the input. Raises JobOptionError if it does not exist."""
    options = context.options
    if bool(options["input"]) == bool(options["table"]):
        raise JobOptionError("--input", "give either files with --input, or a table with --table")
    if options["table"]:
        frame = context.spark.table(options["table"])
    else:
        kind = options["format"] or guessed(options["input"])
        reader = context.spark.read.options(**{**READER_DEFAULTS.get(kind, {}), **dict(options["option"])})
        frame = reader.format(kind).load(list(options["input"]))
    return only(frame, options["where"])


def only(frame: DataFrame, where: str | None) -> DataFrame:
    """Return the rows for which this SQL is true; None means all. Raises JobOptionError for SQL that does not fit."""
    try:
        return frame.where(where) if where else frame
    except (AnalysisException, ParseException) as error:
        raise JobOptionError("--where", f"Spark cannot use {where!r}: {_short(error)}") from None


def guessed(paths: Iterable[str]) -> str:
    """Return the format by the files' names. Raises JobOptionError if no name has a known ending."""
    for path in map(Path, paths):
        for name in (path.name, *(one.name for one in (path.iterdir() if path.is_dir() else ()))):
            for ending in name.split(".")[1:]:
                if (kind := FORMAT_ALIASES.get(ending, ending)) in FILE_FORMATS:
                    return kind
    reason = f"no name says the format of {', '.join(paths)}: give one of {', '.join(FILE_FORMATS)}"
    raise JobOptionError("--format", reason)


def mapped(frame: DataFrame, mapping: Mapping[str, str]) -> DataFrame:
    """Return a column for each mapped argument of ``enqueue``; without a mapping, the columns of these names.

    Raises JobOptionError for an argument or a column that does not exist.
    """
    if not mapping and not {"reference", "payload"} & set(frame.columns):
        wanted = "what is a task? Give its reference, its payload or both, as in --map payload=*"
        raise JobOptionError("--map", f"{wanted}. The columns are {', '.join(frame.columns)}")
    chosen = []
    mapping = mapping or {name: name for name in frame.columns if name in staging.COLUMNS}
    for name, value in mapping.items():
        if name not in staging.COLUMNS:
            near = near_match(name, staging.COLUMNS)
            raise JobOptionError("--map", f"a task has no {name!r}.{near} It has {', '.join(staging.COLUMNS)}")
        chosen.append(_typed(name, _value(frame, name, value)).alias(name))
        try:
            frame.select(chosen[-1]).schema  # noqa: B018 -- asking for it analyses the column
        except (AnalysisException, ParseException) as error:
            reason = f"{_short(error)}.{near_match(value, frame.columns)} The columns are {', '.join(frame.columns)}"
            raise JobOptionError(f"--map {name}={value}", reason) from None
    return frame.select(*chosen)


def _value(frame: DataFrame, name: str, value: str) -> Column:
    words = [word.strip() for word in value.split(",")]
    if name in ("payload", "context") and (value == "*" or (len(words) > 1 and set(words) <= set(frame.columns))):
        return F.struct(*(F.col(f"`{word}`") for word in (frame.columns if value == "*" else words)))
    return F.expr(f"`{value}`" if value in frame.columns else value)


def _typed(name: str, column: Column) -> Column:
    if name in staging.STAGED_TEXTS:
        return column.cast("string")
    if name in staging.WHOLE:
        return column.cast("int")
    if name in staging.STAGED_DURATIONS:  # a number is of seconds
        return F.make_dt_interval(secs=column.cast("decimal(18,6)"))
    return column.cast("timestamp") if name == "run_at" else column


def _short(error: Exception) -> str:
    return str(error).split(" SQLSTATE")[0].splitlines()[0].rstrip(".")


def written(context: Context, tasks: DataFrame) -> Result:
    """Enqueue all chunks, at most at the rate, and return the counts."""
    options, database = context.options, context.need_database()
    load = Load.of(context, tasks) if options["resume"] else None
    chunks, size = (load.chunks, load.size) if load else _chunks(context, tasks)
    totals = {"enqueued": 0, "ignored": 0, "rejected": 0, "chunks": chunks, "chunks_done_before": 0}
    rejects: list[staging.Reject] = []
    for number, chunk in enumerate(_split(tasks, chunks)):
        context.progress("enqueueing", number, chunks)
        if load and number in load.done:
            totals["chunks_done_before"] += 1
            continue
        began = clock.monotonic()
        done = write_tasks(
            chunk,
            database,
            queue=options["queue"],
            on_duplicate=options["on_duplicate"],
            on_invalid="reject" if options["rejects"] else "error",
            queues=options["known_queue"] or None,
            require_reference=options["require_reference"],
            max_attempts=options["max_attempts"],
            priority=options["priority"],
            ttl=options["ttl"],
            once=f"{load.prefix}{load.chunks}" if load else None,
            batch=number,
            content=load.content(number) if load else None,
        )
        rejects += done.rejects
        totals["enqueued"] += done.enqueued
        totals["ignored"] += done.ignored
        totals["chunks_done_before"] += done.repeated
        if options["rate"] and number < chunks - 1 and not done.repeated:
            threading.Event().wait(max(0.0, size / options["rate"] - (clock.monotonic() - began)))
    totals["rejected"] = len(rejects)
    if file := options["rejects"]:
        write_whole(Path(file), "".join(f"{json.dumps(one._asdict(), ensure_ascii=False)}\n" for one in rejects))
    return {**totals, **({"rejects": file} if file else {})}


@dataclass(frozen=True)
class Load:
    """The chunks of a load with a name. The first run decides their number; the ledger has the content of each."""

    prefix: str
    chunks: int
    size: int
    contents: Mapping[int, tuple[int, int]]  # of each chunk that has rows: their number, and a sum over them
    done: Collection[int]

    @classmethod
    def of(cls, context: Context, tasks: DataFrame) -> Load:
        """Return the load, with what earlier runs have done. Raises PipelineError if rows of that have changed."""
        prefix = f"enqueue {context.options['resume']} /"
        database = context.need_database()
        with database.open() as link:
            entries = link.run(StagingStatements(database.tables, database.dialect).entries, {"prefix": prefix})
        found = [(match, batch) for query, batch in entries if (match := LEDGER_ENTRY.fullmatch(query[len(prefix) :]))]
        chunks, size = (int(found[-1][0][1]), _chunk_rows(context)) if found else _chunks(context, tasks)
        context.progress("comparing rows", 0, 0)
        contents = _contents(tasks, chunks, context.options["queue"])
        stored = {batch: match for match, batch in found if int(match[1]) == chunks}
        load = cls(prefix, chunks, size, contents, stored)
        load._compare(context.options["resume"], {batch: match for batch, match in stored.items() if match[2]})
        return load

    def content(self, number: int) -> str:
        """Return what the ledger keeps about a chunk."""
        rows, content = self.contents.get(number, (0, 0))
        return f"{rows} {content} of {sum(one for one, _ in self.contents.values())}"

    def _compare(self, name: str, stored: Mapping[int, re.Match[str]]) -> None:
        changed = [
            number
            for number, match in sorted(stored.items())
            if (int(match[2]), int(match[3])) != self.contents.get(number, (0, 0))
        ]
        if not changed:
            return
        before = max(int(match[4]) for match in stored.values())
        now = sum(rows for rows, _ in self.contents.values())
        size = f"has {now:,} rows as before" if now == before else f"had {before:,} rows and has {now:,} now"
        raise PipelineError(
            f"The input of --resume {name} is not the one that was enqueued: it {size}, and {len(changed):,} of "
            f"{len(self.done):,} finished chunks have other rows (or --map or --queue is another). Nothing was "
            "enqueued, because some of these rows are tasks already. Load only the new rows, in a file of their own or "
            "with --where, under another name."
        )


def _contents(tasks: DataFrame, chunks: int, queue: str | None) -> dict[int, tuple[int, int]]:
    row = _row_hash(tasks)
    content = F.xxhash64(row, F.lit(queue)).cast("decimal(38,0)").alias("content")
    found = tasks.select(_chunk(row, chunks).alias("chunk"), content)
    sums = found.groupBy("chunk").agg(F.count("*"), F.sum("content")).collect()
    return {number: (rows, int(total)) for number, rows, total in sums}


def _chunk_rows(context: Context) -> int:
    """Return the rows of one chunk; 0 if all rows are one."""
    options = context.options
    size: int = options["chunk"] or (DEFAULT_CHUNK_ROWS if options["rate"] or options["resume"] else 0)
    return min(size, options["rate"] * MAX_BURST_S) if options["rate"] else size


def _chunks(context: Context, tasks: DataFrame) -> tuple[int, int]:
    """Return the number of chunks, and the rows of one."""
    size = _chunk_rows(context)
    if not size:
        return 1, 0
    context.progress("counting rows", 0, 0)
    return max(1, math.ceil(tasks.count() / size)), size


def _split(tasks: DataFrame, chunks: int) -> Iterator[DataFrame]:
    """Yield the rows in chunks. A row's content decides its chunk, so that it is the same in every run."""
    if chunks == 1:
        yield tasks
        return
    for number in range(chunks):
        yield tasks.where(_chunk(_row_hash(tasks), chunks) == number)


def _row_hash(tasks: DataFrame) -> Column:
    return F.xxhash64(*(F.to_json(F.struct(name)) for name in tasks.columns))


def _chunk(row: Column, chunks: int) -> Column:
    return F.pmod(row, F.lit(chunks))


def tried(context: Context, tasks: DataFrame) -> Result:
    """Check every row, write nothing, and return the counts.

    Raises PipelineError for rows that cannot be tasks, unless a file for rejects is named.
    """
    options = context.options
    rules = staging.Rules(
        queue=options["queue"],
        queues=frozenset(options["known_queue"]) or None,
        require_reference=options["require_reference"],
    )
    context.progress("checking rows", 0, 0)
    bad = prepared(tasks, options["queue"]).mapInArrow(partial(_rejects, rules), REJECT_DDL)
    rejects = [staging.Reject(*row) for row in bad.limit(MAX_TRIED_REJECTS).collect()]
    if rejects and not options["rejects"]:
        shown = "; ".join(f"{one.reference or one.payload}: {one.reason}" for one in rejects[:MAX_REJECTS_IN_ERROR])
        raise PipelineError(f"At least {len(rejects):,} rows cannot be tasks. {shown}. --rejects FILE sets them aside.")
    rows = tasks.count()
    return {"would_enqueue": rows - len(rejects), "rejected": len(rejects), "columns": ", ".join(tasks.columns)}


def _rejects(rules: staging.Rules, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        _, rejects = staging.stage(batch, rules)
        yield pa.RecordBatch.from_pylist([one._asdict() for one in rejects], REJECT_SCHEMA)
