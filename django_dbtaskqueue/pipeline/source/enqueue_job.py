"""The job ``enqueue``: rows of files or tables become tasks, each chunk of them in one transaction."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, count, pair, write_whole
from django_dbtaskqueue.pipeline.source import write_tasks
from django_dbtaskqueue.pipeline.source.staging import (
    COLUMNS,
    STAGED_DURATIONS,
    STAGED_TEXTS,
    WHOLE,
    Reject,
    Rules,
    stage,
)
from django_dbtaskqueue.pipeline.source.task_writer import prepared

FILE_FORMATS = ("csv", "json", "parquet", "orc", "text")
READER_DEFAULTS = {"csv": {"header": "true", "mode": "FAILFAST"}, "json": {"mode": "FAILFAST"}}
REJECT_DDL = "queue string, reference string, reason string, payload string"
MAX_REJECTS_IN_ERROR = 5
MAX_TRIED_REJECTS = 1000
DEFAULT_CHUNK_ROWS = 50_000  # of a load with a rate or a name
MAX_BURST_S = 10  # of the rate, in one chunk


class Enqueue(Job):
    """Reads rows with Spark, maps columns to the arguments of ``enqueue``, and enqueues the rows.

    --map NAME=VALUE: NAME is reference, payload, priority, run_at, delay, group, tag, ttl, lease, max_attempts,
    context, payload_type or queue. VALUE is a column or an SQL expression; for a payload ``*`` is the whole row as an
    object, and ``a,b`` is an object of these columns.

    Each chunk of rows is written in one transaction. A job that was stopped continues when it runs again with the same
    input and the same --resume NAME: it skips the chunks of that name that are done. With references and
    --on-duplicate ignore a repeated row adds nothing in any case. A row that cannot be a task stops the job; with
    --rejects FILE such rows are written there, with the reason, and the others are enqueued.
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
        Argument("queue", "queue to enqueue in; needed unless --map queue= says it for each row"),
        Argument("map", "what a task is made of, as reference=flight_id or payload=*; repeatable", type=pair,
                 many=True, metavar="NAME=VALUE"),
        Argument("on_duplicate", "of a taken reference: error, or ignore", choices=("error", "ignore"),
                 default="error"),
        Argument("require_reference", "refuse rows without a reference", type=bool, default=False),
        Argument("rejects", "file for rows that cannot be tasks, as JSON lines", metavar="FILE"),
        Argument("rate", "at most N tasks per second", type=count, metavar="N"),
        Argument("chunk", "rows of one transaction. Default: all; with --rate or --resume 50,000", type=count,
                 metavar="N"),
        Argument("resume", "name of this load; run again with it to go on after a stop", metavar="NAME"),
        Argument("max_attempts", "attempts of a task that says nothing else. Default: the queue's", type=count,
                 default=5, metavar="N"),
        Argument("ttl", "how long after it is due a task may still be started", type=parse_length, metavar="TIME"),
        Argument("known_queue", "name of a queue that exists; others are refused. Default: any, or the project's",
                 many=True, metavar="NAME"),
    )  # fmt: skip

    def run(self, context: Context) -> Mapping[str, Any]:
        """Enqueue, and return the counts. On PipelineError and DuplicateTask the chunk added nothing."""
        options = context.options
        if options["queue"] is None and "queue" not in dict(options["map"]):
            raise JobOptionError("--queue", "which queue? Give --queue NAME, or --map queue=COLUMN")
        refuse_unknown(options)
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
    """Return the format by the files' names. Raises JobOptionError if the names do not tell."""
    for path in paths:
        folder = Path(path)
        names = [folder.name, *(one.name for one in (folder.iterdir() if folder.is_dir() else ()))]
        for name in names:
            for ending in name.split(".")[1:]:
                if (kind := {"jsonl": "json", "ndjson": "json", "tsv": "csv"}.get(ending, ending)) in FILE_FORMATS:
                    return kind
    raise JobOptionError(
        "--format", f"no name says the format of {', '.join(paths)}: give one of {', '.join(FILE_FORMATS)}"
    )


def mapped(frame: DataFrame, mapping: Mapping[str, str]) -> DataFrame:
    """Return a column for each mapped argument of ``enqueue``; without a mapping, the columns of these names.

    Raises JobOptionError for an argument or a column that does not exist.
    """
    if not mapping and not {"reference", "payload"} & set(frame.columns):
        columns = ", ".join(frame.columns)
        wanted = "what is a task? Give its reference, its payload or both, as in --map payload=*"
        raise JobOptionError("--map", f"{wanted}. The columns are {columns}")
    chosen = []
    mapping = mapping or {name: name for name in frame.columns if name in COLUMNS}
    for name, value in mapping.items():
        if name not in COLUMNS:
            raise JobOptionError(
                "--map", f"a task has no {name!r}.{near_match(name, COLUMNS)} It has {', '.join(COLUMNS)}"
            )
        column = _typed(name, _value(frame, name, value)).alias(name)
        _check(frame, column, f"{name}={value}")
        chosen.append(column)
    return frame.select(*chosen)


def _value(frame: DataFrame, name: str, value: str) -> Column:
    words = [word.strip() for word in value.split(",")]
    if name in ("payload", "context") and (value == "*" or (len(words) > 1 and set(words) <= set(frame.columns))):
        return F.struct(*(F.col(f"`{word}`") for word in (frame.columns if value == "*" else words)))
    return F.expr(f"`{value}`" if value in frame.columns else value)


def _typed(name: str, column: Column) -> Column:
    if name in STAGED_TEXTS:
        return column.cast("string")
    if name in WHOLE:
        return column.cast("int")
    if name in STAGED_DURATIONS:  # a number is of seconds
        return F.make_dt_interval(secs=column.cast("decimal(18,6)"))
    return column.cast("timestamp") if name == "run_at" else column


def _check(frame: DataFrame, column: Column, said: str) -> None:
    try:
        frame.select(column).schema  # noqa: B018 -- asking for it analyses the column
    except (AnalysisException, ParseException) as error:
        value = said.partition("=")[2]
        near = near_match(value, frame.columns)
        columns = ", ".join(frame.columns)
        raise JobOptionError(f"--map {said}", f"{_short(error)}.{near} The columns are {columns}") from None


def _short(error: Exception) -> str:
    return str(error).split(" SQLSTATE")[0].splitlines()[0].rstrip(".")


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise JobOptionError for a queue that is not known."""
    known = options["known_queue"]
    if known and options["queue"] is not None and options["queue"] not in known:
        near = near_match(options["queue"], known)
        raise JobOptionError("--queue", f"unknown queue {options['queue']!r}.{near} Known: {', '.join(sorted(known))}")


# -- writing -----------------------------------------------------------------------------------------------------------


def written(context: Context, tasks: DataFrame) -> dict[str, Any]:
    """Enqueue all chunks, at most at the rate, and return the counts."""
    options, database = context.options, context.need_database()
    name = options["resume"]
    chunks, size = _chunks(context, tasks)
    totals = {"enqueued": 0, "ignored": 0, "rejected": 0, "chunks": chunks, "chunks_done_before": 0}
    rejects: list[Reject] = []
    for number, chunk in enumerate(_split(tasks, chunks)):
        context.progress("enqueueing", number, chunks)
        began = monotonic()
        done = write_tasks(
            chunk,
            database,
            queue=options["queue"],
            on_duplicate=options["on_duplicate"],
            on_invalid="reject" if options["rejects"] else "error",
            queues=options["known_queue"] or None,
            require_reference=options["require_reference"],
            max_attempts=options["max_attempts"],
            ttl=options["ttl"],
            once=name and f"enqueue {name} /{chunks}",
            batch=number,
        )
        rejects += done.rejects
        totals["enqueued"] += done.enqueued
        totals["ignored"] += done.ignored
        totals["chunks_done_before"] += done.repeated
        if options["rate"] and number < chunks - 1 and not done.repeated:
            threading.Event().wait(max(0.0, size / options["rate"] - (monotonic() - began)))
    totals["rejected"] = len(rejects)
    return {**totals, **_kept(rejects, options["rejects"])}


def _chunks(context: Context, tasks: DataFrame) -> tuple[int, int]:
    """Return the number of chunks, and the rows of one."""
    options = context.options
    size = options["chunk"] or (DEFAULT_CHUNK_ROWS if options["rate"] or options["resume"] else None)
    if size is None:
        return 1, 0
    if options["rate"]:
        size = min(size, options["rate"] * MAX_BURST_S)
    context.progress("counting rows", 0, 0)
    rows = tasks.count()
    return max(1, math.ceil(rows / size)), size


def _split(tasks: DataFrame, chunks: int) -> Iterator[DataFrame]:
    """Yield the rows in chunks. A row's content decides its chunk, so that it is the same in every run."""
    if chunks == 1:
        yield tasks
        return
    row = F.xxhash64(*(F.to_json(F.struct(name)) for name in tasks.columns))
    for number in range(chunks):
        yield tasks.where(F.pmod(row, F.lit(chunks)) == number)


def _kept(rejects: Iterable[Reject], file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    write_whole(Path(file), "".join(f"{json.dumps(one._asdict(), ensure_ascii=False)}\n" for one in rejects))
    return {"rejects": file}


# -- dry run -----------------------------------------------------------------------------------------------------------


def tried(context: Context, tasks: DataFrame) -> dict[str, Any]:
    """Check every row, write nothing, and return the counts.

    Raises PipelineError for rows that cannot be tasks, unless a file for rejects is named.
    """
    options = context.options
    rules = Rules(
        queue=options["queue"],
        queues=frozenset(options["known_queue"]) or None,
        require_reference=options["require_reference"],
    )
    context.progress("checking rows", 0, 0)
    bad = prepared(tasks, options["queue"]).mapInArrow(partial(_rejects, rules), REJECT_DDL)
    rejects = [Reject(*row) for row in bad.limit(MAX_TRIED_REJECTS).collect()]
    if rejects and not options["rejects"]:
        shown = "; ".join(f"{one.reference or one.payload}: {one.reason}" for one in rejects[:MAX_REJECTS_IN_ERROR])
        raise PipelineError(f"At least {len(rejects):,} rows cannot be tasks. {shown}. --rejects FILE sets them aside.")
    rows = tasks.count()
    return {"would_enqueue": rows - len(rejects), "rejected": len(rejects), "columns": ", ".join(tasks.columns)}


def _rejects(rules: Rules, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        _, rejects = stage(batch, rules)
        columns = [[one[place] for one in rejects] for place in range(len(Reject._fields))]
        yield pa.RecordBatch.from_arrays([pa.array(values, pa.string()) for values in columns], list(Reject._fields))
