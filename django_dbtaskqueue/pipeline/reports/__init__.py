"""What ``report``, ``forecast`` and ``whatif`` share: a period, the tasks of database and lake, a place for figures."""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PythonException
from pyspark.sql import Column, DataFrame, SparkSession, functions as F
from pyspark.sql.types import StructType

from django_dbtaskqueue.core.durations import parse_length, thousands
from django_dbtaskqueue.core.exceptions import JobOptionError, LakeError, PipelineError, near_match
from django_dbtaskqueue.pipeline import jobs
from django_dbtaskqueue.pipeline.database import Database, statement_errors
from django_dbtaskqueue.pipeline.lake import LAKE_SUMMARIES, PARTITION, DataFile, Lake, export, one_state, read_files
from django_dbtaskqueue.pipeline.reports import transforms as T
from django_dbtaskqueue.pipeline.source import arrow_schema, chunked, few_tasks, read_tasks, schema_of
from django_dbtaskqueue.pipeline.spark import Cached

Figures = dict[str, Any]
Tables = Mapping[str, pa.Table]
Row = Mapping[str, Any]
Rows = Sequence[Row]

SOURCES = {"tasks": ("task", "history"), "attempts": ("attempt",)}  # of the lake's tables, in the database
MAX_FEW_LAKE_BYTES, MAX_FEW_LAKE_ROWS = 16 * 2**20, 100_000  # of its compressed files
REPORT_FILES = {"report.json", "forecast.json", "whatif.json"}
ONE_HOUR = timedelta(hours=1)
INSERT_REPORT = (
    "INSERT INTO dbtaskqueue_pipelinereport (kind, since, until, summary, data, location)"
    " VALUES (%(kind)s, %(since)s, %(until)s, %(summary)s, %(data)s, %(location)s) RETURNING id"
)


def beginning(text: str) -> datetime | timedelta:
    """Return the time, or the duration before the end, of text such as "2026-01-31" or "30d"."""
    for read in (partial(parse_length, needs_unit=True), jobs.utc_moment):
        with suppress(ValueError):
            return read(text)
    raise ValueError(f'{text!r} is neither a time, as 2026-01-31, nor a duration, as "30d"')


def folder(text: str) -> str:
    """Return the name of a folder. Raises ValueError if it cannot be written, or holds other data than a report."""
    if Path(text).is_dir() and (names := {path.name for path in Path(text).iterdir()}) and not names & REPORT_FILES:
        raise ValueError(f"{text} holds other data. Give --out a folder of its own")
    jobs.writable(f"{text}/report.json")
    jobs.writable(f"{Path(text).absolute()}.part")  # a report is written beside its folder, and then put in its place
    return text


PERIOD_ARGUMENTS = (
    jobs.Argument("since", "from this time (2026-01-31), or this long before the end (30d). Default: all", beginning),
    jobs.Argument("until", "up to this time. Default: now", jobs.utc_moment),
    jobs.Argument("queue", "only this queue", many=True),
)
OUTPUT_ARGUMENTS = (
    jobs.Argument("out", "folder for the page (HTML), the figures (JSON) and the tables (Parquet)", folder),
    jobs.Argument("store", "keep the figures in the database too, where the admin shows them", bool, True),
)


class Period(NamedTuple):
    """Whole hours: from ``since`` (None: from the first task) to before ``until``."""

    since: datetime | None
    until: datetime

    @classmethod
    def of(cls, options: jobs.Options) -> "Period":
        """Return the period that ``since`` and ``until`` mean. Raises JobOptionError for an empty one."""
        until = (options["until"] or datetime.now(UTC)).astimezone(UTC)
        since = options["since"]
        since = until - since if isinstance(since, timedelta) else since and since.astimezone(UTC)
        if since is not None and since >= until:
            raise JobOptionError("--since", f"{since:%Y-%m-%d %H:%M} is not before the end, {until:%Y-%m-%d %H:%M}")
        return cls(since and _start_of_hour(since), _start_of_hour(until + ONE_HOUR - timedelta(microseconds=1)))

    def __str__(self) -> str:
        return f"{f'{self.since:%Y-%m-%d %H:%M}' if self.since else 'the beginning'} to {self.until:%Y-%m-%d %H:%M} UTC"

    def only(self, hours: DataFrame, *, step_s: int = 3600) -> DataFrame:
        """Return the rows of these hours, and of none; ``hour`` counts hours, or other steps, since 1970."""
        begin = int(self.since.timestamp()) // step_s if self.since else None
        return hours if begin is None else hours.where(F.col("hour").isNull() | (F.col("hour") >= begin))


def _start_of_hour(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


@contextmanager
def rows_in(
    context: jobs.Context, period: Period, kept: "KeptDays | None" = None, **wanted: Sequence[str]
) -> Iterator[list[DataFrame]]:
    """Yield the ``wanted`` columns of ``tasks`` and ``attempts``: each row once that had not ended before the period.

    With ``kept``, those of the days that are kept are not there. The database is read once; few rows, also of the lake,
    are read by this process. Raises JobOptionError when there is neither a database nor a lake.
    """
    state, database, lake = context.state, context.database, Lake.at(context.lake) if context.lake else None
    if database is None and lake is None:
        raise JobOptionError("--lake", "there is nothing to read: name a lake, a database, or both")
    assert state is not None  # noqa: S101 -- a report holds one while it reads
    held: dict[str, list[pa.Table | None]] = {
        table: [few_tasks(database, columns, name, state.snapshot) for name in SOURCES[table] if database]
        for table, columns in wanted.items()
    }
    since = period.since.date() if period.since is not None else None
    files = {table: lake.counted(table, state, since) if lake else [] for table in wanted}
    counted = [one for found in files.values() for one in found]
    few = (  # this process can hold them
        all(rows is not None for tables in held.values() for rows in tables)
        and sum(one.bytes for one in counted) <= MAX_FEW_LAKE_BYTES
        and sum(one.rows for one in counted) <= MAX_FEW_LAKE_ROWS
    )
    if few:
        context.session = {**context.session, "short": context.alone}
        for table, columns in wanted.items():
            held[table] += [lake.rows(table, files[table], columns, context.damaged)] if lake else []
    with Cached() as cached:
        frames = {
            table: [cached.hold(_chosen(_live(context, table, columns, held[table], few=few), context, period))]
            for table, columns in wanted.items()
            if held[table]
        }
        if lake and not few:
            if kept is not None:
                kept.choose(frames["tasks"][0] if "tasks" in frames else None)
            for table, columns in wanted.items():
                read_again = [one for one in files[table] if kept is None or one.day not in kept.files]
                archived = read_files(context.spark, lake, table, lake.sound(read_again, context.damaged))
                frames.setdefault(table, []).append(_chosen(archived.select(*columns), context, period))
        yield [reduce(DataFrame.unionByName, frames[table]).select(*columns) for table, columns in wanted.items()]


def _live(
    context: jobs.Context, table: str, columns: Sequence[str], held: Sequence[pa.Table | None], *, few: bool
) -> DataFrame:
    """Return these tables; what is too large for this process, as Spark reads it."""
    if few:  # one partition: Spark need not move the rows between its tasks
        return spark_frame(context.spark, held, schema_of(SOURCES[table][0], columns)).coalesce(1)
    snapshot = context.state.snapshot if context.state else None
    frames = [
        spark_frame(context.spark, [rows], schema_of(name, columns))
        if rows is not None
        else read_tasks(context.spark, context.need_database(), columns, name, snapshot=snapshot)
        for name, rows in zip(SOURCES[table], held, strict=True)
    ]
    return reduce(DataFrame.unionByName, frames)


def spark_frame(spark: SparkSession, tables: Iterable[pa.Table | None], schema: StructType) -> DataFrame:
    """Return these columns of tables for Spark, which reads no further than to an empty chunk of a table."""
    wanted = arrow_schema(schema)
    found = [one.select(wanted.names).cast(wanted) for one in tables if one is not None]
    return spark.createDataFrame(pa.concat_tables(found).combine_chunks(), schema)


def _chosen(frame: DataFrame, context: jobs.Context, period: Period) -> DataFrame:
    if queues := context.options.get("queue"):
        frame = frame.where(F.col("queue_name").isin(*queues))
    if period.since is not None:
        frame = frame.where(F.col("finish_time").isNull() | (F.col("finish_time") >= F.lit(period.since)))
    return frame


def raise_no_tasks(context: jobs.Context, period: Period) -> None:
    """Raise the error of a job that found no task: the queue is unknown, or the period has no task."""
    everything = replace(context, options={}, damaged=[])
    with rows_in(everything, Period(None, period.until), tasks=["queue_name", "finish_time"]) as (names,):
        known = sorted(row["queue_name"] for row in names.select("queue_name").distinct().collect())
    for queue in context.options.get("queue") or ():
        if known and queue not in known:
            near = near_match(queue, known)
            raise JobOptionError("--queue", f"no task of a queue {queue!r}.{near} Queues: {', '.join(known)}")
    when = f"There is no task in the time from {period}. Choose another --since or --until."
    raise jobs.NoTasks(when if known else "There is no task yet, so there is nothing to compute from.")


# -- where the figures go ----------------------------------------------------------------------------------------------


class ReportJob(jobs.Job):
    """A job that computes figures and writes them to a folder, and to a row that the admin shows: to both or neither.

    The folder gets a page too where the caller can render one: ``context.render_page`` needs Django.
    """

    def run(self, context: jobs.Context) -> Figures:
        """Compute, write, and return the figures. Raises NoTasks when there is too little to compute from."""
        period = Period.of(context.options)
        with one_state(context.database, context.lake) as context.state:
            found, tables = self.figures(context, period)
        figures = {"kind": self.name, **period._asdict(), **found}
        if context.damaged:
            figures["summary"] += f" Damaged files of the lake were left out: {len(set(context.damaged))}."
        return {**figures, **({"written": None} if context.dry_run else _written(context, period, figures, tables))}

    def figures(self, context: jobs.Context, period: Period) -> tuple[Figures, Tables]:
        """Return the figures, with a ``summary`` of a sentence or two, and the tables for Parquet."""
        raise PipelineError(f"The job {type(self).__name__} has no figures().")

    def as_text(self, result: Row) -> str:
        """Return the summary, the most important figures, and where the rest is."""
        lines = [result["summary"], *self.details(result)]
        if kept := result.get("days_kept"):
            lines.append(f"  days of the lake that were not read again: {thousands(kept)}")
        if "page" in result:
            lines.append(f"page: {result['page']}")
        elif "folder" in result:
            file = Path(result["folder"], f"{result['kind']}.json")
            lines.append(f"figures: {file}; for a page: manage.py runtaskpipeline page {file}")
        if "report_id" in result:
            lines.append(f"report id: {result['report_id']}")
        return "\n".join(lines)

    def details(self, result: Row) -> Iterable[str]:
        """Return the lines that the command prints after the summary."""
        return ()


def _written(context: jobs.Context, period: Period, figures: Figures, tables: Tables) -> Figures:
    """Write everything, and return where it is. Raises PipelineError when a place cannot be written: nothing is."""
    context.progress("writing", 0, 0)
    stored, kind = jobs.plain(figures), figures["kind"]
    folder = Path(context.options["out"]).absolute() if context.options["out"] else None
    page = context.render_page(kind, stored) if folder and context.render_page else None
    database = context.database if context.options["store"] else None
    with _row(database, period, stored, str(folder or "")) if database else nullcontext() as row_id:
        if folder:
            _publish(folder, stored, page, tables)  # the files are in place before the row is committed
    places = {"report_id": row_id, "folder": folder, "page": folder / f"{kind}.html" if folder and page else None}
    return {name: jobs.plain(place) for name, place in places.items() if place is not None}


def _publish(folder: Path, figures: Figures, page: str | None, tables: Tables) -> None:
    """Write all files beside ``folder``, then put them in its place; after an error remove them."""
    part, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        part.mkdir(parents=True)
        (part / f"{figures['kind']}.json").write_text(f"{json.dumps(figures, indent=2)}\n", encoding="utf-8")
        if page is not None:
            (part / f"{figures['kind']}.html").write_text(page, encoding="utf-8")
        for name, rows in tables.items():
            pq.write_table(rows, part / f"{name}.parquet", compression="zstd")
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise PipelineError(f"{folder} cannot be written: {error.strerror or error}. Give another --out.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _row(database: Database, period: Period, figures: Figures, location: str) -> Iterator[int]:
    """Insert the row and yield its id; it is committed when the block ends without an error."""
    row = {
        "kind": figures["kind"],
        "since": period.since and f"{period.since:%Y-%m-%d %H:%M:%S}",  # in UTC, as the session is
        "until": f"{period.until:%Y-%m-%d %H:%M:%S}",
        "summary": figures["summary"],
        "data": json.dumps(figures),
        "location": location,
    }
    refused = statement_errors(f"The report cannot be kept in {database!r}", "Run migrate, or give --no-store.")
    with refused, database.open() as link, link.transaction():
        yield int(link.run(INSERT_REPORT, row)[0][0])


# -- what adds up ------------------------------------------------------------------------------------------------------

# The parts of a closed day of the lake are computed once, kept in the lake, and read instead of the tasks. A day is
# closed when no task of the database finished on it: all its ends lie in its files, and its percentiles are final.

MAX_CHUNK_BYTES = 256 * 2**20  # of files whose days are summed up at once
DAY_S = 86_400
Files = Mapping[str, Sequence[DataFile]]  # by day


class ReportPart(NamedTuple):
    """What the rows of one part have: ``keys``, and columns by the function that adds up rows with the same keys."""

    keys: tuple[str, ...]
    added: Mapping[Callable[[str], Column], tuple[str, ...]]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.keys, *chain.from_iterable(self.added.values()))

    def merged(self, rows: DataFrame, *by: str) -> DataFrame:
        """Return the rows with each group of keys once."""
        values = (add(name).alias(name) for add, names in self.added.items() for name in names)
        return rows.groupBy(*by, *self.keys).agg(*values)


# The percentiles of an hour are in one row only, that of the day on which its tasks ended: its `most` is that value.
REPORT_PARTS = {
    "hours": ReportPart(("queue", "hour"), {F.sum: (*T.COUNTED, *T.RUN_SUMS), F.max: T.PERCENTILE_COLUMNS}),
    "sketches": ReportPart(("queue",), {partial(F.kll_merge_agg_bigint, k=T.SKETCH_SIZE): T.MEASURES}),
    "minutes": ReportPart(("queue", "hour"), {F.sum: ("arrived",)}),
    "failures": ReportPart(
        ("queue", "message"), {F.sum: ("tasks_ended", "attempts_failed"), F.min: ("first",), F.max: ("last", "example")}
    ),
    "waste": ReportPart(("queue",), {F.sum: ("failed_attempts", "wasted")}),
    "kinds": ReportPart(T.KIND_COLUMNS, {F.sum: ("ended", "completed"), F.max: ("last", "example")}),
}
OF_ATTEMPTS = ("failures", "waste")  # kept by hour too: an attempt may be older than the period, its task is not


class TaskRows(NamedTuple):
    """Tasks, their failed attempts, and their `transforms.hour_parts`; ``by`` are further columns to group by."""

    tasks: DataFrame
    attempts: Any  # a DataFrame; the forecast reads none, and asks for no part of them
    hours: DataFrame
    by: tuple[str, ...] = ()

    def part(self, name: str) -> DataFrame:
        """Return one of `REPORT_PARTS`."""
        by_hour = (*self.by, "hour") if self.by else ()
        made = {
            "hours": lambda: T.with_percentiles(self.hours),
            "sketches": lambda: REPORT_PARTS[name].merged(self.hours, *self.by) if self.by else self.hours,
            "minutes": lambda: T.minute_parts(self.tasks, *self.by),
            "failures": lambda: T.failure_clusters(self.tasks, self.attempts, *by_hour),
            "waste": lambda: T.waste_parts(self.attempts, *by_hour),
            "kinds": lambda: T.kind_parts(self.tasks, *self.by),
        }
        return made[name]()


@dataclass
class KeptDays:
    """The closed days of a lake that lie in a period, and whose parts are kept: a report need not read their tasks."""

    context: jobs.Context
    period: Period
    objectives: Sequence[jobs.Objective] = ()
    files: dict[str, DataFile] = field(default_factory=dict)  # the summaries, by day

    @property
    def lake(self) -> Lake:
        return Lake.at(self.context.need_lake())

    def choose(self, live: DataFrame | None) -> None:
        """Find the summaries to use, and make those that are missing. ``live`` are the tasks of the database.

        A dry run and a report on some queues make none. If the lake cannot be written to, all its tasks are read.
        """
        closed = self._closed(live)
        options = json.dumps(T.limits(self.objectives), sort_keys=True)
        keys = {day: export.key_of(files, options) for day, files in closed.items()}
        try:
            self.files = export.summaries(self.lake, keys)
            missing = {day: files for day, files in closed.items() if day not in self.files}
            if not missing or self.context.dry_run or self.context.options.get("queue"):
                return
            self.lake.prepare(export.SUMMARY_TABLE)
            sizes = {day: sum(one.bytes for one in files) for day, files in missing.items()}
            chunks = [*chunked(sorted(missing), sizes.__getitem__, MAX_CHUNK_BYTES)]
            for done, days in enumerate(chunks):
                self.context.progress("summing up days", done, len(chunks))
                self._keep({day: missing[day] for day in days}, keys)
                self.files = export.summaries(self.lake, keys)
        except (LakeError, PythonException) as error:
            _before, is_in_task, reason = str(error).rpartition(f"{LakeError.__name__}: ")
            if isinstance(error, PythonException) and not is_in_task:
                raise
            self.context.progress(f"the summaries of days are not kept: {reason.splitlines()[0]}", 0, 0)

    def _closed(self, live: DataFrame | None) -> Files:
        """Return the files of the closed days that lie in the period."""
        state, lake, open_days = self.context.state, self.lake, set()
        assert state is not None  # noqa: S101 -- a report holds one while it reads
        if live is not None:
            days = live.select(F.floor(F.unix_seconds("finish_time") / DAY_S).alias("day")).distinct().collect()
            open_days = {str(date(1970, 1, 1) + timedelta(days=row.day)) for row in days if row.day is not None}
        found = defaultdict(list)
        for file in (*lake.counted("tasks", state), *lake.counted("attempts", state)):
            begin, since = datetime.fromisoformat(file.day).replace(tzinfo=UTC), self.period.since
            lies_in_period = (since is None or since <= begin) and begin + timedelta(days=1) <= self.period.until
            if file.day not in open_days and lies_in_period:
                found[file.day].append(file)
        return found

    def _keep(self, days: Files, keys: Mapping[str, str]) -> None:
        """Write the summaries of those days that have no damaged file."""
        sound = {one.name for one in self.lake.sound([one for files in days.values() for one in files], [])}
        days = {day: files for day, files in days.items() if all(one.name in sound for one in files)}
        if not days:
            return
        tasks, attempts = (self._rows(table, days) for table in ("tasks", "attempts"))
        writer = partial(export.write_summaries, self.lake, {day: keys[day] for day in days})
        with Cached() as cached:
            rows = TaskRows(tasks, attempts, cached.hold(T.hour_parts(tasks, self.objectives, PARTITION)), (PARTITION,))
            parts = reduce(DataFrame.unionByName, (_as_summary(rows.part(name), name) for name in REPORT_PARTS))
            written = export.files_of(parts.repartition(len(days), PARTITION), writer)
        export.remove_out_of_date(self.lake, written)

    def _rows(self, table: str, days: Files) -> DataFrame:
        files = [one for found in days.values() for one in found if one.table == table]
        rows = read_files(self.context.spark, self.lake, table, files)
        rows = rows.where(F.col("finish_time").isNotNull()) if table == "attempts" else rows
        return rows.withColumn("hour", T.hour_of(F.unix_micros("finish_time")))

    def part(self, name: str, rest: TaskRows) -> DataFrame:
        """Return one of `REPORT_PARTS`, of these days and of the ``rest`` of the tasks."""
        read = rest.part(name)
        if not self.files:
            return read
        kept = read_files(self.context.spark, self.lake, export.SUMMARY_TABLE, [*self.files.values()])
        kept = kept.where(F.col("part") == name)
        if queues := self.context.options.get("queue"):
            kept = kept.where(F.col("queue").isin(*queues))
        if name in OF_ATTEMPTS:
            kept = self.period.only(kept)  # the hour is null for a task that has no time of its end
        columns = REPORT_PARTS[name].columns
        return REPORT_PARTS[name].merged(read.select(*columns).unionByName(kept.select(*columns)))


def _as_summary(part: DataFrame, name: str) -> DataFrame:
    values = {"part": F.lit(name), **{column: F.col(column) for column in part.columns}}
    fields = LAKE_SUMMARIES.fields
    return part.select(*(values.get(one.name, F.lit(None)).cast(one.dataType).alias(one.name) for one in fields))
