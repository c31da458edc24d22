"""All there is to know of tasks in one DataFrame: the hot table, the history table, and the lake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.pipeline.arguments import Argument, duration, moment
from django_dbtaskqueue.pipeline.jobs import Context
from django_dbtaskqueue.pipeline.lake.lake import read_lake
from django_dbtaskqueue.pipeline.source.source import read_tasks

HOUR = timedelta(hours=1)


def beginning(text: str) -> datetime | timedelta:
    """Return the time, or the duration before the end, of text such as "2026-01-31" or "30d"."""
    try:
        return duration(text)
    except ValueError:
        try:
            return moment(text)
        except ValueError:
            raise ValueError(f'{text!r} is neither a time, as 2026-01-31, nor a duration, as "30d"') from None


ARGUMENTS = (
    Argument("since", "from this time on (2026-01-31), or so long before the end (30d). Default: all", type=beginning),
    Argument("until", "up to this time. Default: now", type=moment),
    Argument("queue", "only this queue; repeatable", many=True),
)


@dataclass(frozen=True)
class Period:
    """Whole hours: from ``since``, if there is a beginning, to before ``until``."""

    since: datetime | None
    until: datetime

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Period:
        """Return the period that ``since`` and ``until`` mean. Raises JobOptionError for an empty one."""
        until = (options["until"] or datetime.now(UTC)).astimezone(UTC)
        since = options["since"]
        since = until - since if isinstance(since, timedelta) else since and since.astimezone(UTC)
        if since is not None and since >= until:
            raise JobOptionError("--since", f"{since:%Y-%m-%d %H:%M} is not before the end, {until:%Y-%m-%d %H:%M}")
        return cls(since and _whole(since), _whole(until + HOUR - timedelta(microseconds=1)))

    def __str__(self) -> str:
        return f"{f'{self.since:%Y-%m-%d %H:%M}' if self.since else 'the beginning'} to {self.until:%Y-%m-%d %H:%M} UTC"

    def only(self, hours: DataFrame) -> DataFrame:
        """Return the rows of these hours; ``hour`` is a whole number of hours since 1970."""
        return hours if self.since is None else hours.where(F.col("hour") >= _number(self.since)).select("*")


def _whole(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _number(time: datetime) -> int:
    return int(time.timestamp()) // 3600


@contextmanager
def tasks_of(context: Context, columns: Sequence[str], period: Period) -> Iterator[DataFrame]:
    """Yield these columns of every task that had not ended before the period; each task stands there once.

    The database is read once, whatever is made of the frame. Raises JobOptionError when there is neither a database
    nor a lake.
    """
    if context.database is None and not context.lake:
        raise JobOptionError("--lake", "there is nothing to read: name a lake, a database, or both")
    with _read(context, columns, period, ("task", "history"), "tasks") as frame:
        yield frame


@contextmanager
def attempts_of(context: Context, columns: Sequence[str], period: Period) -> Iterator[DataFrame]:
    """Yield these columns of every failed attempt in the period. The database is read once."""
    with _read(context, columns, period, ("attempt",), "attempts") as frame:
        yield frame.where(F.col("finish_time") < F.lit(period.until)).select(*columns)


@contextmanager
def _read(
    context: Context, columns: Sequence[str], period: Period, tables: Sequence[str], archived: str
) -> Iterator[DataFrame]:
    frames, live = [], None
    if context.database is not None:
        parts = [read_tasks(context.spark, context.database, columns, table=table) for table in tables]
        live = _chosen(reduce(DataFrame.unionByName, parts), context, period).persist()
        frames.append(live)
    if context.lake:
        lake = read_lake(context.spark, context.lake, table=archived, database=context.database)
        if period.since is not None:
            lake = lake.where(F.col("finished_date") >= F.lit(period.since.date()))
        frames.append(_chosen(lake.select(*columns), context, period))
    try:
        yield reduce(DataFrame.unionByName, frames).select(*columns)
    finally:
        if live is not None:
            live.unpersist()


def _chosen(frame: DataFrame, context: Context, period: Period) -> DataFrame:
    if queues := context.options.get("queue"):
        frame = frame.where(F.col("queue_name").isin(*queues))
    if period.since is not None:
        frame = frame.where(F.col("finish_time").isNull() | (F.col("finish_time") >= F.lit(period.since)))
    return frame


def refuse_nothing(context: Context, period: Period) -> None:
    """Raise the error of a job that found no task: an unknown queue, or a period in which nothing was."""
    wanted = context.options.get("queue") or ()
    everything = Context(database=context.database, lake=context.lake, started=context.spark)
    with tasks_of(everything, ["queue_name", "finish_time"], Period(None, period.until)) as names:
        known = sorted(row["queue_name"] for row in names.select("queue_name").distinct().collect())
    for queue in wanted:
        if queue not in known:
            near = near_match(queue, known)
            raise JobOptionError("--queue", f"no task of a queue {queue!r}.{near} Queues: {', '.join(known) or 'none'}")
    raise PipelineError(f"There is no task in the time from {period}. Choose another --since or --until.")
