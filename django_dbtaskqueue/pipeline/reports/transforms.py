"""Service levels and failures of tasks. Every function is pure: from DataFrame to DataFrame.

Two small tables are made from the tasks, of the sums of one pass (`summed`); `service_levels` joins them:

* `hours`: counts by queue and hour, arrivals in the hour of the creation and all else in the hour of the end
* `percentiles` of the waits (creation to start, of tasks taken once) and the runs (last start to end)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from django_dbtaskqueue.core.durations import MICROSECOND
from django_dbtaskqueue.core.states import COMPLETED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.pipeline.jobs import EVERY_QUEUE, Objective, by_queue
from django_dbtaskqueue.pipeline.schema import TERMINAL_STATUSES

__all__ = [
    "as_of", "backlog", "error_budgets", "failure_clusters", "hours", "measured", "never_succeeding", "noisy_queues",
    "percentiles", "retry_waste", "service_levels",
]  # fmt: skip

HOUR_S = 3600
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
MEASURES = ("wait", "run")
PERCENTILE_COLUMNS = tuple(f"{time}_{name}" for time in MEASURES for name in PERCENTILES)
SKETCH_SIZE = 3000  # k of a KLL sketch: exact up to so many tasks; of more, the rank is off by two in a thousand
MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
COUNTED = (
    "arrived", "ended", "completed", "errors", "poisoned", "good", "attempts", "retried", "retries", "run_seconds",
    "useful_seconds",
)  # fmt: skip
# What the report reads of a task.
REPORT_COLUMNS = (
    "queue_name", "reference_number", "status", "tag", "total_attempt", "reenqueue_attempt", "process_result",
    "create_time", "start_time", "finish_time",
)  # fmt: skip
# What the times and counts are made of.
TIMED_COLUMNS = (
    "queue_name", "status", "total_attempt", "reenqueue_attempt", "create_time", "start_time", "finish_time",
)  # fmt: skip

MAX_MESSAGE_PATTERN_CHARS = 200
# (pattern, replacement), in this order: what differs between two failures of one kind.
MESSAGE_PATTERNS = (
    (r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", "<id>"),
    (r"0x[0-9a-fA-F]+|\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b", "<hex>"),
    (r"'[^']*'|\"[^\"]*\"", "<text>"),
    (r"[0-9]+(?:[.,:/-][0-9]+)*", "<n>"),
    (r"\s+", " "),
)
ATTEMPT_COLUMNS = ("location", "task_id", "queue_name", "start_time", "finish_time", "error_type", "message")
KIND_COLUMNS = ("queue", "tag", "reference")  # tasks of one kind share these
MAX_REFERENCE_PREFIX_CHARS = 60  # the reference up to its first digit tells the kind
MIN_ENDED_TASKS = 3  # fewer ended tasks of one kind do not prove that it never succeeds


def as_of(tasks: DataFrame, until: datetime) -> DataFrame:
    """Return the tasks as they stood at a time: what was created later is left out, what ended later had not ended."""
    later = F.col("finish_time") >= F.lit(until)
    status = F.when(later, str(PROCESSING)).otherwise(F.col("status"))
    finish = F.when(~later, F.col("finish_time"))
    return tasks.where(F.col("create_time") < F.lit(until)).withColumns({"status": status, "finish_time": finish})


def measured(tasks: DataFrame) -> DataFrame:
    """Return queue, status, attempts, retries, and in microseconds: created, ended (null if not), wait, run, lead."""
    times = tasks.select(
        F.col("queue_name").alias("queue"),
        "status",
        F.col("total_attempt").alias("attempts"),
        F.greatest(F.col("total_attempt") - F.col("reenqueue_attempt") - 1, F.lit(0)).alias("retries"),
        F.unix_micros("create_time").alias("created"),
        F.unix_micros("start_time").alias("started"),
        F.when(F.col("status").isin(*TERMINAL_STATUSES), F.unix_micros("finish_time")).alias("ended"),
    )
    created, started, ended = F.col("created"), F.col("started"), F.col("ended")
    return times.select(
        *("queue", "status", "attempts", "retries", "created", "ended"),
        F.when(ended.isNotNull() & (F.col("attempts") == 1), _not_negative(started - created)).alias("wait"),
        _not_negative(ended - started).alias("run"),
        _not_negative(ended - created).alias("lead"),
    )


def summed(tasks: DataFrame, objectives: Sequence[Objective] = (), *, step_s: int = HOUR_S) -> DataFrame:
    """Return counts, microseconds and sketches of times by queue, ``came`` and ``went``: the hours of creation and end.

    `hours_of` and `percentiles_of` make the other tables of it, without a second pass over the tasks. ``went`` is null
    if the tasks have not ended. Another ``step_s``, here and below, makes an "hour" of so many seconds.
    """
    rows = measured(tasks)
    limits = {queue: one.within and one.within // MICROSECOND for queue, one in by_queue(objectives).items()}
    within = _by_queue(limits, "bigint")
    completed = F.col("status") == str(COMPLETED)
    sums = {
        "ended": F.count("*"),
        "completed": F.count_if(completed),
        "errors": F.count_if(F.col("status") == str(ERROR)),
        "poisoned": F.count_if(F.col("status") == str(POISON)),
        "good": F.count_if(completed & (within.isNull() | (F.col("lead") <= within))),
        "attempts": F.sum("attempts"),
        "retried": F.count_if(F.col("retries") > 0),
        "retries": F.sum("retries"),
        "run_seconds": F.sum("run"),
        "useful_seconds": F.sum(F.when(completed, F.col("run"))),
        **{time: F.kll_sketch_agg_bigint(time, SKETCH_SIZE) for time in MEASURES},
    }
    came, went = (hour_of(F.col(name), step_s) for name in ("created", "ended"))
    return rows.groupBy("queue", came.alias("came"), went.alias("went")).agg(
        F.count("*").alias("arrived"), *(value.alias(name) for name, value in sums.items())
    )


def hours(tasks: DataFrame, objectives: Sequence[Objective] = (), *, step_s: int = HOUR_S) -> DataFrame:
    """Return counts and seconds (`COUNTED`) by queue and hour, a whole number of hours since 1970."""
    return hours_of(summed(tasks, objectives, step_s=step_s))


def hours_of(sums: DataFrame) -> DataFrame:
    """Return what `hours` returns, for the tasks that were `summed` up."""
    nothing = F.lit(0).cast("bigint")
    ended = COUNTED[1:]
    arrivals = F.struct(F.col("came").alias("hour"), "arrived", *(nothing.alias(name) for name in ended))
    ends = F.struct(F.col("went").alias("hour"), nothing.alias("arrived"), *ended)
    parts = sums.select("queue", F.explode(F.array(arrivals, F.when(F.col("went").isNotNull(), ends))).alias("part"))
    counted = (
        parts.where(F.col("part").isNotNull())
        .select("queue", "part.*")
        .groupBy("queue", "hour")
        .agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in COUNTED))
    )
    return counted.select(
        "queue", "hour",
        *((F.col(name) / 1_000_000).alias(name) if name.endswith("_seconds") else F.col(name) for name in COUNTED),
    )  # fmt: skip


def hour_of(micros: Column, step_s: int = HOUR_S) -> Column:
    """Return the number of the hour since 1970 that a time in microseconds lies in."""
    return F.floor(micros / (step_s * 1_000_000))


def percentiles(tasks: DataFrame, *, step_s: int = HOUR_S) -> DataFrame:
    """Return p50, p95 and p99 of wait and run in seconds, by queue and hour of the end, by queue, and over all.

    ``keys`` is 2, 1 or 0: how many of queue and hour (whole hours since 1970) are not null. They are exact for groups
    of up to `SKETCH_SIZE` tasks.
    """
    return percentiles_of(summed(tasks, step_s=step_s))


def percentiles_of(sums: DataFrame) -> DataFrame:
    """Return what `percentiles` returns, for the tasks that were `summed` up."""
    ended = sums.where(F.col("went").isNotNull()).withColumnRenamed("went", "hour")
    merged = ended.rollup("queue", "hour").agg(
        (2 - F.grouping("queue") - F.grouping("hour")).alias("keys"),
        *(F.kll_merge_agg_bigint(time, SKETCH_SIZE).alias(time) for time in MEASURES),
    )
    shares = F.array(*map(F.lit, PERCENTILES.values()))
    # A sketch of no task has no quantile: Spark raises an error for it.
    found = merged.select("keys", "queue", "hour", *(
        F.when(F.kll_sketch_get_n_bigint(time) > 0, F.kll_sketch_get_quantile_bigint(time, shares)).alias(time)
        for time in MEASURES
    ))  # fmt: skip
    times = [F.col(time)[place] / 1_000_000 for time in MEASURES for place in range(len(PERCENTILES))]
    return found.select(
        "keys", "queue", "hour", *(time.alias(name) for time, name in zip(times, PERCENTILE_COLUMNS, strict=True))
    )


def service_levels(hours: DataFrame, times: DataFrame, *by: str, step_s: int = HOUR_S) -> DataFrame:
    """Return counts, rates and `percentiles` (``times``) by queue and hour, by queue, or over all.

    Times are in seconds; rates are null where nothing ended. ``throughput`` is ended tasks per second of the hours in
    which any of these tasks arrived or ended.
    """
    counted = hours.groupBy(*by).agg(
        *(F.sum(name).alias(name) for name in COUNTED), F.count_distinct("hour").alias("_hours")
    )
    times = times.where(F.col("keys") == len(by)).select(*by, *PERCENTILE_COLUMNS)
    ended = F.col("ended")
    return counted.join(times, list(by) or F.lit(True), "left").select(
        *(F.timestamp_seconds(F.col(name) * step_s).alias(name) if name == "hour" else F.col(name) for name in by),
        *COUNTED,
        F.try_divide(ended, F.col("_hours") * step_s).alias("throughput"),
        F.try_divide("completed", ended).alias("success_rate"),
        F.try_divide("retried", ended).alias("retry_rate"),
        F.try_divide(F.col("errors") + F.col("poisoned"), ended).alias("failure_rate"),
        *PERCENTILE_COLUMNS,
    )


def backlog(hours: DataFrame, *, step_s: int = HOUR_S) -> DataFrame:
    """Return queue, hour and the backlog at the end of that hour: tasks that had arrived and not ended.

    Hours without arrivals and ends are left out: the backlog stayed as it was.
    """
    until_then = Window.partitionBy("queue").orderBy("hour")
    return hours.select(
        "queue",
        F.timestamp_seconds(F.col("hour") * step_s).alias("hour"),
        F.sum(F.col("arrived") - F.col("ended")).over(until_then).alias("backlog"),
    )


def error_budgets(levels: DataFrame, objectives: Sequence[Objective] = ()) -> DataFrame:
    """Return, for the levels by queue, what each queue may get wrong, and how much of it is spent.

    ``spent`` is 1 when the budget is used up. It is null if the budget is 0 and there are failures.
    """
    known = by_queue(objectives)
    wanted = _by_queue({queue: one.share for queue, one in known.items()}, "double")
    bad = F.col("ended") - F.col("good")
    allowed = F.col("ended") * (1 - wanted)
    return levels.where(F.col("ended") > 0).select(
        "queue",
        _by_queue({queue: str(one) for queue, one in known.items()}, "string").alias("objective"),
        wanted.alias("wanted"),
        F.try_divide("good", "ended").alias("reached"),
        "ended",
        bad.alias("bad"),
        allowed.alias("allowed"),
        F.when(bad == 0, 0.0).otherwise(F.try_divide(bad, allowed)).alias("spent"),
    )


def noisy_queues(levels: DataFrame) -> DataFrame:
    """Return each queue's share of all run time, attempts and unsuccessful attempts, for the levels by queue.

    ``noisy`` marks a queue whose share of the unsuccessful attempts is at least twice its share of the tasks.
    """
    everything = Window.partitionBy()
    unsuccessful = F.col("attempts") - F.col("completed")

    def part(value: Column) -> Column:
        return F.try_divide(value, F.sum(value).over(everything))

    shares = levels.select(
        "queue", "ended", "attempts",
        unsuccessful.alias("unsuccessful_attempts"),
        part(F.col("ended")).alias("share_of_tasks"),
        part(F.col("run_seconds")).alias("share_of_run_time"),
        part(unsuccessful).alias("share_of_unsuccessful"),
    )  # fmt: skip
    noisy = F.coalesce(F.col("share_of_unsuccessful") >= 2 * F.col("share_of_tasks"), F.lit(False))
    return shares.select("*", (noisy & (F.col("unsuccessful_attempts") > 0)).alias("noisy"))


def _by_queue(values: Mapping[str, object], kind: str) -> Column:
    """Return the value of the row's queue, else the one for every other queue."""
    found = F.lit(values[EVERY_QUEUE]).cast(kind)
    for queue, value in values.items():
        if queue != EVERY_QUEUE:
            found = F.when(F.col("queue") == queue, F.lit(value).cast(kind)).otherwise(found)
    return found


def _not_negative(time: Column) -> Column:
    return F.when(time > 0, time).when(time <= 0, 0)  # greatest() would make 0 of null


# -- failures ----------------------------------------------------------------------------------------------------------


def normalised(message: Column) -> Column:
    """Return a message without what makes it unique: ids, numbers, quoted text. Null stays null."""
    for pattern, replacement in MESSAGE_PATTERNS:
        message = F.regexp_replace(message, pattern, replacement)
    return F.substring(F.trim(message), 1, MAX_MESSAGE_PATTERN_CHARS)


def last_line(text: Column) -> Column:
    """Return the last line that is not empty: of a traceback, the exception."""
    return F.regexp_extract(F.rtrim(text, F.lit(" \n\r\t")), r"([^\n]*)\z", 1)


def failure_clusters(tasks: DataFrame, attempts: DataFrame) -> DataFrame:
    """Return the failures by queue and normalised message.

    ``tasks_ended`` counts the tasks that ended so, ``attempts_failed`` the recorded failed attempts of any task.
    ``example`` is one of the messages, unchanged.
    """
    ended = tasks.where(F.col("status").isin(str(ERROR), str(POISON))).select(
        F.col("queue_name").alias("queue"),
        last_line(F.coalesce("process_result", F.lit(""))).alias("text"),
        F.col("finish_time").alias("time"),
        F.lit(1).alias("ended"),
    )
    kind = F.regexp_replace("error_type", r"^builtins\.", "")
    failed = attempts.select(
        F.col("queue_name").alias("queue"),
        last_line(F.concat_ws(": ", F.nullif(kind, F.lit("")), F.nullif("message", F.lit("")))).alias("text"),
        F.col("finish_time").alias("time"),
        F.lit(0).alias("ended"),
    )
    message = F.when(F.col("text") == "", "(no message)").otherwise(normalised(F.col("text")))
    return (
        ended.unionByName(failed)
        .groupBy("queue", message.alias("message"))
        .agg(
            F.sum("ended").alias("tasks_ended"),
            F.sum(1 - F.col("ended")).alias("attempts_failed"),
            F.min("time").alias("first"),
            F.max("time").alias("last"),
            F.max("text").alias("example"),
        )
        .select("queue", "message", "tasks_ended", "attempts_failed", "first", "last", "example")
    )


def retry_waste(attempts: DataFrame, levels: DataFrame) -> DataFrame:
    """Return, by queue, the failed attempts, the seconds they ran, and those as a share of all seconds worked.

    ``levels`` are those by queue: all seconds worked are these and the seconds of the attempts that completed a task.
    """
    seconds = F.greatest(F.unix_micros("finish_time") - F.unix_micros("start_time"), F.lit(0)) / 1_000_000
    wasted = attempts.groupBy(F.col("queue_name").alias("queue")).agg(
        F.count("*").alias("failed_attempts"), F.coalesce(F.sum(seconds), F.lit(0.0)).alias("wasted_seconds")
    )
    whole = F.coalesce(F.col("useful_seconds"), F.lit(0.0)) + F.col("wasted_seconds")
    return wasted.join(levels.select("queue", "useful_seconds"), "queue", "left").select(
        "queue",
        "failed_attempts",
        "wasted_seconds",
        F.try_divide("wasted_seconds", whole).alias("share_of_work"),
    )


def never_succeeding(tasks: DataFrame) -> DataFrame:
    """Return the kinds of tasks that ended at least `MIN_ENDED_TASKS` times and never COMPLETED.

    Tasks are of one kind when queue, tag, and their references up to the first digit are the same: those of one
    schedule, one producer, or one business object.
    """
    kind = F.regexp_extract(F.coalesce("reference_number", F.lit("")), f"^[^0-9]{{0,{MAX_REFERENCE_PREFIX_CHARS}}}", 0)
    ended = tasks.where(F.col("status").isin(*TERMINAL_STATUSES)).select(
        F.col("queue_name").alias("queue"),
        "tag",
        kind.alias("reference"),
        F.col("reference_number").alias("example"),
        (F.col("status") == str(COMPLETED)).alias("completed"),
        F.col("finish_time").alias("last"),
    )
    never = (
        ended.groupBy(*KIND_COLUMNS)
        .agg(F.count("*").alias("ended"), F.count_if("completed").alias("completed"), F.max("last").alias("last"))
        .where((F.col("ended") >= MIN_ENDED_TASKS) & (F.col("completed") == 0))
    )
    # max() of a text makes Spark sort its rows: it gets the tasks that did not complete only.
    examples = ended.where(~F.col("completed")).groupBy(*KIND_COLUMNS).agg(F.max("example").alias("example"))
    same = [F.col(f"n.{name}").eqNullSafe(F.col(f"e.{name}")) for name in KIND_COLUMNS]
    return (
        never.alias("n")
        .join(examples.alias("e"), same)
        .select(*(f"n.{name}" for name in KIND_COLUMNS), "n.ended", "n.last", "e.example")
    )
