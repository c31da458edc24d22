"""What reports are made of, in a form that adds up: the parts of some tasks and those of others make the parts of all.

So the parts of a closed day of the lake are computed once, kept in the lake, and read instead of the tasks. A day is
closed when no task of the database finished on it: all its ends lie in its files, and the percentiles of its hours are
final.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import partial, reduce

from pyspark.errors import PythonException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core.durations import MICROSECOND
from django_dbtaskqueue.core.exceptions import JobOptionError, LakeError
from django_dbtaskqueue.pipeline.jobs import Context, Objective, Options, by_queue
from django_dbtaskqueue.pipeline.lake import LAKE_SUMMARIES, PARTITION, DataFile, Lake, read_files
from django_dbtaskqueue.pipeline.lake import export as lake_export
from django_dbtaskqueue.pipeline.reports import transforms as T

MAX_CHUNK_BYTES = 256 * 2**20  # of files whose days are summed up at once
DAY_S = 86_400
ONE_HOUR = timedelta(hours=1)
Files = Mapping[str, Sequence[DataFile]]  # by day


@dataclass(frozen=True)
class Period:
    """Whole hours: from ``since`` (None: from the first task) to before ``until``."""

    since: datetime | None
    until: datetime

    @classmethod
    def of(cls, options: Options) -> Period:
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
        """Return the rows of these hours; ``hour`` is a whole number of hours, or of other steps, since 1970."""
        return hours if self.since is None else hours.where(F.col("hour") >= int(self.since.timestamp()) // step_s)


def _start_of_hour(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


@dataclass(frozen=True)
class Part:
    """What the rows of one part are: they have ``keys``. Rows with the same keys are added up."""

    keys: tuple[str, ...]
    sums: tuple[str, ...] = ()
    least: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    sketches: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.keys, *self.sums, *self.least, *self.most, *self.sketches)

    def merged(self, rows: DataFrame, *by: str) -> DataFrame:
        """Return the rows with each group of keys once."""
        functions: Sequence[tuple[Callable[[Column], Column], tuple[str, ...]]] = (
            (F.sum, self.sums),
            (F.min, self.least),
            (F.max, self.most),
            (lambda one: F.kll_merge_agg_bigint(one, T.SKETCH_SIZE), self.sketches),
        )
        found = [function(F.col(name)).alias(name) for function, names in functions for name in names]
        return rows.groupBy(*by, *self.keys).agg(*found)


# The percentiles of an hour are in one row only, that of the day on which its tasks ended: its `most` is that value.
REPORT_PARTS = {
    "hours": Part(("queue", "hour"), sums=(*T.COUNTED, *T.RUN_SUMS), most=T.PERCENTILE_COLUMNS),
    "sketches": Part(("queue",), sketches=T.MEASURES),
    "minutes": Part(("queue", "hour"), sums=("arrived",)),
    "failures": Part(
        ("queue", "message"), sums=("tasks_ended", "attempts_failed"), least=("first",), most=("last", "example")
    ),
    "waste": Part(("queue",), sums=("failed_attempts", "wasted")),
    "kinds": Part(T.KIND_COLUMNS, sums=("ended", "completed"), most=("last", "example")),
}
OF_ATTEMPTS = ("failures", "waste")  # kept by hour too: an attempt may be older than the period, its task is not


@dataclass(frozen=True)
class Rows:
    """Tasks, their failed attempts, and their `transforms.hour_parts`; ``by`` are further columns to group by."""

    tasks: DataFrame
    attempts: DataFrame | None
    hours: DataFrame
    by: tuple[str, ...] = ()

    def part(self, name: str) -> DataFrame:
        """Return one of `REPORT_PARTS`."""
        match name:
            case "hours":
                return T.with_percentiles(self.hours)
            case "sketches":
                rows = self.hours.select(*self.by, *REPORT_PARTS[name].columns)
                return REPORT_PARTS[name].merged(rows, *self.by) if self.by else rows
            case "minutes":
                return T.minute_parts(self.tasks, *self.by)
            case "kinds":
                return T.kind_parts(self.tasks, *self.by)
        by = (*self.by, "hour") if self.by else ()
        assert self.attempts is not None, name  # noqa: S101 -- the forecast reads none, and asks for none of these
        if name == "failures":
            return T.failure_clusters(self.tasks, self.attempts, *by)
        return T.waste_parts(self.attempts, *by)


@dataclass
class KeptDays:
    """The closed days of a lake that lie in a period, and whose parts are kept: a report need not read their tasks."""

    context: Context
    period: Period
    objectives: Sequence[Objective] = ()
    files: dict[str, DataFile] = field(default_factory=dict)  # the summaries, by day

    @property
    def lake(self) -> Lake:
        return Lake.at(self.context.need_lake())

    def choose(self, live: DataFrame | None) -> None:
        """Find the summaries to use, and make those that are missing. ``live`` are the tasks of the database.

        A dry run and a report on some queues make none. If the lake cannot be written to, all its tasks are read.
        """
        closed = self._closed(live)
        options = {queue: one.within and one.within // MICROSECOND for queue, one in by_queue(self.objectives).items()}
        keys = {day: lake_export.key_of(files, json.dumps(options, sort_keys=True)) for day, files in closed.items()}
        try:
            self.files = lake_export.summaries(self.lake, keys)
            missing = {day: files for day, files in closed.items() if day not in self.files}
            if not missing or self.context.dry_run or self.context.options.get("queue"):
                return
            self.lake.prepare(lake_export.SUMMARY_TABLE)
            for done, days in enumerate(
                chunks := [*lake_export.chunked(sorted(missing.items()), _size, MAX_CHUNK_BYTES)]
            ):
                self.context.progress("summing up days", done, len(chunks))
                self._keep(dict(days), keys)
                self.files = lake_export.summaries(self.lake, keys)
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
            if file.day not in open_days and self._in_period(file.day):
                found[file.day].append(file)
        return found

    def _in_period(self, day: str) -> bool:
        begin = datetime.fromisoformat(day).replace(tzinfo=UTC)
        since, until = self.period.since, self.period.until
        return (since is None or since <= begin) and begin + timedelta(seconds=DAY_S) <= until

    def _keep(self, days: Files, keys: Mapping[str, str]) -> None:
        """Write the summaries of those days that have no damaged file."""
        sound = {one.name for one in self.lake.sound([one for files in days.values() for one in files], [])}
        days = {day: files for day, files in days.items() if all(one.name in sound for one in files)}
        if not days:
            return
        tasks, attempts = (self._rows(table, days) for table in ("tasks", "attempts"))
        hours = T.hour_parts(tasks, self.objectives, PARTITION).persist()
        rows = Rows(tasks, attempts, hours, (PARTITION,))
        parts = reduce(DataFrame.unionByName, (_as_summary(rows.part(name), name) for name in REPORT_PARTS))
        writer = partial(lake_export.write_summaries, self.lake, {day: keys[day] for day in days})
        try:
            written = lake_export.Export(self.lake, "").files_of(parts.repartition(len(days), PARTITION), writer)
        finally:
            hours.unpersist()
        lake_export.remove_out_of_date(self.lake, written)

    def _rows(self, table: str, days: Files) -> DataFrame:
        files = [one for found in days.values() for one in found if one.table == table]
        rows = read_files(self.context.spark, self.lake, table, files)
        rows = rows.where(F.col("finish_time").isNotNull()) if table == "attempts" else rows
        return rows.withColumn("hour", T.hour_of(F.unix_micros("finish_time")))

    def part(self, name: str, rest: Rows) -> DataFrame:
        """Return one of `REPORT_PARTS`, of these days and of the ``rest`` of the tasks."""
        read = rest.part(name)
        if not self.files:
            return read
        kept = read_files(self.context.spark, self.lake, lake_export.SUMMARY_TABLE, [*self.files.values()]).where(
            F.col("part") == name
        )
        if queues := self.context.options.get("queue"):
            kept = kept.where(F.col("queue").isin(*queues))
        if name in OF_ATTEMPTS and self.period.since is not None:
            hour = F.col("hour")  # null for a task that has no time of its end
            kept = kept.where(hour.isNull() | (hour >= int(self.period.since.timestamp()) // T.HOUR_S))
        columns = REPORT_PARTS[name].columns
        return REPORT_PARTS[name].merged(read.select(*columns).unionByName(kept.select(*columns)))


def _size(day: tuple[str, Sequence[DataFile]]) -> int:
    return sum(one.bytes for one in day[1])


def _as_summary(part: DataFrame, name: str) -> DataFrame:
    values = {"part": F.lit(name), **{column: F.col(column) for column in part.columns}}
    fields = LAKE_SUMMARIES.fields
    return part.select(*(values.get(one.name, F.lit(None)).cast(one.dataType).alias(one.name) for one in fields))
