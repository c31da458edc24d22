"""The job ``replay``: archived tasks are enqueued again, as new tasks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Window
from pyspark.sql import functions as F

from django_dbtaskqueue.core.columns import COPIED
from django_dbtaskqueue.core.columns import Column as TaskColumn
from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, count, day
from django_dbtaskqueue.pipeline.lake import read_lake
from django_dbtaskqueue.pipeline.source import write_tasks

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TERMINAL_STATUSES = tuple(str(status) for status in TERMINAL)
MAX_SHOWN_REFERENCES = 5  # by a dry run


def per_second(text: str) -> float:
    """Return a rate above 0."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise ValueError(f"{text!r} is no number of tasks per second above 0")
    return rate


def chosen(tasks: DataFrame, options: Mapping[str, Any]) -> DataFrame:
    """Return the archived tasks by queue, status, reference, day of their finish, and the user's SQL."""
    for column, name in (("queue_name", "queue"), ("status", "status"), ("reference_number", "reference")):
        if options[name]:
            tasks = tasks.filter(F.col(column).isin(*options[name]))
    if options["since"]:
        tasks = tasks.filter(F.col("finished_date") >= F.lit(options["since"]))
    if options["until"]:
        tasks = tasks.filter(F.col("finished_date") <= F.lit(options["until"]))
    if options["where"]:
        tasks = tasks.filter(_condition(tasks, options["where"]))
    if options["limit"]:
        tasks = tasks.orderBy("finish_time", "location", "id").limit(options["limit"])
    return tasks.select("*")


def _condition(tasks: DataFrame, sql: str) -> Column:
    try:
        tasks.filter(sql).schema  # noqa: B018 -- Spark analyses the text
    except (AnalysisException, ParseException) as error:
        raise JobOptionError("--where", f"Spark cannot use {sql!r}: {str(error).splitlines()[0]}") from None
    return F.expr(sql)


def _copied(column: TaskColumn) -> Column:
    """Return an archived column under the name ``write_tasks`` gives it; what the table holds in seconds as a span."""
    value = F.col(column.db)
    return (F.make_dt_interval(secs=value) if column.type == "float8" else value).alias(column.argument)


def as_new(tasks: DataFrame, *, to: str | None = None, start: datetime | None = None, rate: float = 1.0) -> DataFrame:
    """Return archived tasks as new ones; of each (queue, reference) the one that was archived last.

    A task without a reference gets one made of its old id, so that replaying it twice adds one task. With ``start``
    ``rate`` tasks become due per second.
    """
    named = F.concat_ws(":", F.lit("replay"), "location", "id")
    columns = [
        (F.lit(to) if to else F.col("queue_name")).alias("queue"),
        F.coalesce("reference_number", named).alias("reference"),
        *[_copied(column) for column in COPIED],
        # How long it could live from its creation on; the archive knows no more.
        (F.col("expire_time") - F.col("create_time")).alias("ttl"),
        F.coalesce("finish_time", "last_update_time").alias("_ended"),
        F.col("id").alias("_id"),
    ]
    last = Window.partitionBy("queue", "reference").orderBy(F.desc("_ended"), F.desc("_id"))
    new = tasks.select(*columns).withColumn("_rank", F.row_number().over(last)).filter("_rank = 1")
    if start is not None:
        place = F.row_number().over(Window.orderBy("_ended", "_id")) - 1
        due = F.timestamp_seconds(F.lit(start.timestamp()) + place / F.lit(rate))
        return new.withColumn("run_at", due).drop("_ended", "_id", "_rank").select("*")
    return new.drop("_ended", "_id", "_rank").select("*")


class Replay(Job):
    """Enqueues archived tasks again, as new tasks with the old reference, payload, priority, group and tag.

    A task whose reference is taken in its queue, by a task of any status, is left out: so a second replay adds nothing
    while the first one's tasks exist. A task without a reference gets one made of its old id. The archive is not
    changed. --dry-run counts the tasks and shows the first references.
    """

    name = "replay"
    summary = "enqueue archived tasks again"
    arguments = (
        Argument("queue", "only tasks of this queue; may be given again", many=True),
        Argument("status", "only tasks that ended so; may be given again", many=True, choices=TERMINAL_STATUSES),
        Argument("reference", "only the task of this reference; may be given again", many=True),
        Argument("since", "only tasks that finished on this day or later", day),
        Argument("until", "only tasks that finished on this day or earlier", day),
        Argument("where", "only tasks for which this SQL is true, such as \"process_result LIKE '%Kyiv%'\""),
        Argument("limit", "at most N tasks, the oldest first", count),
        Argument("to", "the queue to put them into; default: each task's own"),
        Argument("rate", "spread them: N become due in a second", per_second),
    )

    def run(self, context: Context) -> Mapping[str, Any]:
        """Return how many tasks were ``chosen``, ``enqueued``, and ``already_there``."""
        database, options = context.need_database(), context.options
        _refuse_backwards(options["since"], options["until"])
        context.progress("reading the archive", 0, 0)
        archived = read_lake(context.spark, context.need_lake(), database=database)
        start = datetime.now(UTC) if options["rate"] else None
        new = as_new(chosen(archived, options), to=options["to"], start=start, rate=options["rate"] or 1.0).cache()
        try:
            number = new.count()
            if context.dry_run:
                return {"chosen": number, "dry_run": True, "first": _first(new)}
            context.progress("enqueueing", 0, number)
            report = write_tasks(new, database, on_duplicate="ignore")
        finally:
            new.unpersist()
        return {"chosen": number, "enqueued": report.enqueued, "already_there": report.ignored}


def _first(new: DataFrame) -> list[str]:
    rows = new.select("queue", "reference").orderBy("queue", "reference").limit(MAX_SHOWN_REFERENCES).collect()
    return [f"{row['queue']}/{row['reference']}" for row in rows]


def _refuse_backwards(since: date | None, until: date | None) -> None:
    if since and until and since > until:
        raise JobOptionError("--since", f"{since} comes after --until {until}")
