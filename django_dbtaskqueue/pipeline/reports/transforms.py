"""Service levels and failures of tasks. Every function is pure: from DataFrame to DataFrame.

The functions ``…_parts`` return what adds up: the parts of some tasks and those of others make the parts of all.
`service_levels` joins two tables of `hour_parts`: `hours` (counts), and `percentiles` of the waits (creation to start,
of tasks taken once) and the runs (last start to end).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from pyspark.sql import Column, DataFrame, Window, functions as F

from django_dbtaskqueue.core.durations import MICROSECOND
from django_dbtaskqueue.core.failure_signature import VARYING_PATTERNS
from django_dbtaskqueue.core.states import COMPLETED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.pipeline.jobs import EVERY_QUEUE, Objective, by_queue
from django_dbtaskqueue.pipeline.source import TERMINAL_STATUSES

__all__ = [
    "as_of", "backlog", "error_budgets", "failure_clusters", "hour_parts", "hours", "kind_parts", "measured",
    "never_succeeding", "noisy_queues", "percentiles", "retry_waste", "service_levels", "waste_parts",
]  # fmt: skip

# -- failures: by message, what they cost, and what never succeeds -----------------------------------------------------

MAX_MESSAGE_PATTERN_CHARS = 200
ATTEMPT_COLUMNS = ("location", "task_id", "queue_name", "start_time", "finish_time", "error_type", "message")
KIND_COLUMNS = ("queue", "tag", "reference")  # tasks of one kind share these
MAX_REFERENCE_PREFIX_CHARS = 60  # the reference up to its first digit tells the kind
MIN_ENDED_TASKS = 3  # fewer ended tasks of one kind do not prove that it never succeeds


def normalised_column(message: Column) -> Column:
    """Return a message in one line, with what varies from case to case replaced as in the tasks' failure groups."""
    message = F.regexp_replace(message, r"\s+", " ")
    for pattern, placeholder in VARYING_PATTERNS:
        message = F.regexp_replace(message, pattern.pattern, placeholder)
    return F.substring(F.trim(message), 1, MAX_MESSAGE_PATTERN_CHARS)


def failure_clusters(tasks: DataFrame, attempts: DataFrame, *by: str) -> DataFrame:
    """Return the failures by queue and normalised message, and by further columns of both. They add up.

    ``tasks_ended`` counts the tasks that ended so, ``attempts_failed`` the recorded failed attempts of any task.
    ``example`` is one of the messages, unchanged.
    """

    def failures(rows: DataFrame, text: Column, ended: int) -> DataFrame:
        queue, time = F.col("queue_name").alias("queue"), F.col("finish_time").alias("time")
        # The last line that is not empty: of a traceback, the exception.
        said = F.regexp_extract(F.rtrim(text, F.lit(" \n\r\t")), r"([^\n]*)\z", 1).alias("text")
        return rows.select(*by, queue, said, time, F.lit(ended).alias("ended"))

    kind, nothing = F.regexp_replace("error_type", r"^builtins\.", ""), F.lit("")
    given_up = tasks.where(F.col("status").isin(str(ERROR), str(POISON)))
    ended = failures(given_up, F.coalesce("process_result", nothing), 1)
    failed = failures(attempts, F.concat_ws(": ", F.nullif(kind, nothing), F.nullif("message", nothing)), 0)
    message = F.when(F.col("text") == "", "(no message)").otherwise(normalised_column(F.col("text")))
    return ended.unionByName(failed).groupBy(*by, "queue", message.alias("message")).agg(
        F.sum("ended").alias("tasks_ended"), F.sum(1 - F.col("ended")).alias("attempts_failed"),
        F.min("time").alias("first"), F.max("time").alias("last"), F.max("text").alias("example"),
    )  # fmt: skip


def waste_parts(attempts: DataFrame, *by: str) -> DataFrame:
    """Return how many attempts failed and their microseconds (``wasted``), by queue and further columns."""
    ran = F.greatest(F.unix_micros("finish_time") - F.unix_micros("start_time"), F.lit(0))
    return attempts.groupBy(*by, F.col("queue_name").alias("queue")).agg(
        F.count("*").alias("failed_attempts"), F.coalesce(F.sum(ran), F.lit(0)).alias("wasted")
    )


def retry_waste(parts: DataFrame, levels: DataFrame) -> DataFrame:
    """Return, by queue, the failed attempts, the seconds they ran, and those as a share of all seconds worked.

    ``parts`` are `waste_parts`, each queue once. ``levels`` by queue have the seconds that completed a task.
    """
    wasted = parts.select("queue", "failed_attempts", (F.col("wasted") / 1_000_000).alias("wasted_seconds"))
    share = F.try_divide("wasted_seconds", F.coalesce("useful_seconds", F.lit(0.0)) + F.col("wasted_seconds"))
    known = wasted.join(levels.select("queue", "useful_seconds"), "queue", "left")
    return known.select(*wasted.columns, share.alias("share_of_work"))


def kind_parts(tasks: DataFrame, *by: str) -> DataFrame:
    """Return how many tasks of each kind ``ended`` and ``completed``, and the last one, by further columns too.

    Tasks are of one kind when queue, tag, and their references up to the first digit are the same: those of one
    schedule, one producer, or one business object.
    """
    kind = F.regexp_extract(F.coalesce("reference_number", F.lit("")), f"^[^0-9]{{0,{MAX_REFERENCE_PREFIX_CHARS}}}", 0)
    ended = tasks.where(F.col("status").isin(*TERMINAL_STATUSES)).select(
        *by, F.col("queue_name").alias("queue"), "tag", kind.alias("reference"),
        F.col("reference_number").alias("example"), (F.col("status") == str(COMPLETED)).alias("completed"),
        F.col("finish_time").alias("last"),
    )  # fmt: skip
    keys = (*by, *KIND_COLUMNS)
    counted = ended.groupBy(*keys).agg(
        F.count("*").alias("ended"), F.count_if("completed").alias("completed"), F.max("last").alias("last")
    )
    # max() of a text makes Spark sort its rows: it gets the tasks that did not complete only.
    examples = ended.where(~F.col("completed")).groupBy(*keys).agg(F.max("example").alias("example"))
    same = [F.col(f"n.{name}").eqNullSafe(F.col(f"e.{name}")) for name in keys]
    return counted.alias("n").join(examples.alias("e"), same, "left").select("n.*", "e.example")


def never_succeeding(parts: DataFrame) -> DataFrame:
    """Return the kinds that ended at least `MIN_ENDED_TASKS` times and never COMPLETED, of `kind_parts`, each once."""
    never = parts.where((F.col("ended") >= MIN_ENDED_TASKS) & (F.col("completed") == 0))
    return never.select(*KIND_COLUMNS, "ended", "last", "example")


# -- service levels ----------------------------------------------------------------------------------------------------

HOUR_S = 3600
MINUTE_S = 60
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
MEASURES = ("wait", "run")
PERCENTILE_COLUMNS = tuple(f"{time}_{name}" for time in MEASURES for name in PERCENTILES)
SKETCH_SIZE = 3000  # k of a KLL sketch: exact up to so many tasks; of more, the rank is off by two in a thousand
MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
COUNTED = (
    "arrived", "ended", "completed", "errors", "poisoned", "good", "attempts", "retried", "retries", "run_seconds",
    "useful_seconds",
)  # fmt: skip
RUN_SUMS = ("runs", "run_squares")  # how many run times there are, and the sum of their squares in microseconds
# What the times and counts are made of.
TIMED_COLUMNS = (
    "queue_name", "status", "total_attempt", "reenqueue_attempt", "create_time", "start_time", "finish_time",
)  # fmt: skip
REPORT_COLUMNS = (*TIMED_COLUMNS, "reference_number", "tag", "process_result")  # what the report reads of a task


def as_of(tasks: DataFrame, until: datetime) -> DataFrame:
    """Return the tasks as they stood at a time: what was created later is left out, what ended later had not ended."""
    later = F.col("finish_time") >= F.lit(until)
    status = F.when(later, str(PROCESSING)).otherwise(F.col("status"))
    finish = F.when(~later, F.col("finish_time"))
    return tasks.where(F.col("create_time") < F.lit(until)).withColumns({"status": status, "finish_time": finish})


def measured(tasks: DataFrame, *by: str) -> DataFrame:
    """Return ``by``, queue, status, attempts, retries; in microseconds created, ended (or null), wait, run, lead."""
    attempts, created, started = F.col("total_attempt"), F.unix_micros("create_time"), F.unix_micros("start_time")
    ended = F.when(F.col("status").isin(*TERMINAL_STATUSES), F.unix_micros("finish_time"))
    found = {
        "queue": F.col("queue_name"),
        "status": F.col("status"),
        "attempts": attempts,
        "retries": F.greatest(attempts - F.col("reenqueue_attempt") - 1, F.lit(0)),
        "created": created,
        "ended": ended,
        "wait": F.when(ended.isNotNull() & (attempts == 1), _not_negative(started - created)),
        "run": _not_negative(ended - started),
        "lead": _not_negative(ended - created),
    }
    return tasks.select(*by, *(value.alias(name) for name, value in found.items()))


def hour_parts(tasks: DataFrame, objectives: Sequence[Objective] = (), *by: str, step_s: int = HOUR_S) -> DataFrame:
    """Return counts, microseconds and sketches of times by queue and hour, a whole number of hours since 1970.

    Arrivals are in the hour of the creation, all else in that of the end. ``by`` are further columns to group by.
    Another ``step_s``, here and below, makes an "hour" of so many seconds.
    """
    sums, ended = _summed(tasks, objectives, *by, step_s=step_s), (*COUNTED[1:], *RUN_SUMS)
    nothing, none = F.lit(0).cast("bigint"), F.lit(None).cast("binary")
    no_ends = [(F.lit(0.0) if name == "run_squares" else nothing).alias(name) for name in ended]
    no_times = [none.alias(time) for time in MEASURES]
    arrivals = F.struct(F.col("came").alias("hour"), "arrived", *no_ends, *no_times)
    ends = F.struct(F.col("went").alias("hour"), nothing.alias("arrived"), *ended, *MEASURES)
    part = F.explode(F.array_compact(F.array(arrivals, F.when(F.col("went").isNotNull(), ends))))
    parts = sums.select(*by, "queue", part.alias("part")).select(*by, "queue", "part.*")
    return parts.groupBy(*by, "queue", "hour").agg(
        *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in (*COUNTED, *RUN_SUMS)),
        *(F.kll_merge_agg_bigint(time, SKETCH_SIZE).alias(time) for time in MEASURES),
    )


def _summed(tasks: DataFrame, objectives: Sequence[Objective], *by: str, step_s: int) -> DataFrame:
    """Return `hour_parts` by queue, ``came`` and ``went``: the hours of creation and end (null if not ended)."""
    within = _by_queue(limits(objectives), "bigint")
    completed = F.col("status") == str(COMPLETED)
    sums = {
        "arrived": F.count("*"),
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
        "runs": F.count("run"),
        "run_squares": F.sum(F.col("run").cast("double") * F.col("run")),
        **{time: F.kll_sketch_agg_bigint(time, SKETCH_SIZE) for time in MEASURES},
    }
    came, went = (hour_of(F.col(name), step_s) for name in ("created", "ended"))
    groups = measured(tasks, *by).groupBy(*by, "queue", came.alias("came"), went.alias("went"))
    return groups.agg(*(value.alias(name) for name, value in sums.items()))


def limits(objectives: Sequence[Objective]) -> dict[str, int | None]:
    """Return the time within which a task must complete, in microseconds, by queue; None: any time."""
    known = by_queue(objectives)
    return {queue: None if one.within is None else one.within // MICROSECOND for queue, one in known.items()}


def hours(parts: DataFrame) -> DataFrame:
    """Return counts and seconds (`COUNTED`) by queue and hour, a whole number of hours since 1970, of `hour_parts`."""
    return parts.select(
        "queue", "hour",
        *((F.col(name) / 1_000_000).alias(name) if name.endswith("_seconds") else F.col(name) for name in COUNTED),
    )  # fmt: skip


def hour_of(micros: Column, step_s: int = HOUR_S) -> Column:
    """Return the number of the hour since 1970 that a time in microseconds lies in."""
    return F.floor(micros / (step_s * 1_000_000))


def with_percentiles(parts: DataFrame) -> DataFrame:
    """Return the parts with the percentiles of their sketches, in seconds, instead of the sketches."""
    shares = F.array(*map(F.lit, PERCENTILES.values()))
    # A sketch of no task has no quantile: Spark raises an error for it.
    found = parts.withColumns({
        time: F.when(F.kll_sketch_get_n_bigint(time) > 0, F.kll_sketch_get_quantile_bigint(time, shares))
        for time in MEASURES
    })  # fmt: skip
    times = [F.col(time)[place] / 1_000_000 for time in MEASURES for place in range(len(PERCENTILES))]
    return found.withColumns(dict(zip(PERCENTILE_COLUMNS, times, strict=True))).drop(*MEASURES)


def percentiles(sketches: DataFrame, by_hour: DataFrame | None = None) -> DataFrame:
    """Return p50, p95 and p99 of wait and run in seconds, by queue and hour of the end, by queue, and over all.

    ``sketches`` are `hour_parts`. Without the hours they are merged already, and ``by_hour`` has their percentiles.
    ``keys`` is how many of queue and hour are not null. Exact for groups of up to `SKETCH_SIZE` tasks.
    """
    by_hour = with_percentiles(sketches) if by_hour is None else by_hour
    merged = sketches.rollup("queue").agg(
        (1 - F.grouping("queue")).cast("int").alias("keys"),
        F.lit(None).cast("bigint").alias("hour"),
        *(F.kll_merge_agg_bigint(time, SKETCH_SIZE).alias(time) for time in MEASURES),
    )
    columns = ("keys", "queue", "hour", *PERCENTILE_COLUMNS)
    hourly = by_hour.withColumn("keys", F.lit(2)).where(" OR ".join(f"{one} IS NOT NULL" for one in PERCENTILE_COLUMNS))
    return hourly.select(*columns).unionByName(with_percentiles(merged).select(*columns))


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
    """Return queue, hour, and the backlog at its end (arrived, not ended), for hours with arrivals or ends."""
    waiting = F.sum(F.col("arrived") - F.col("ended")).over(Window.partitionBy("queue").orderBy("hour"))
    return hours.select("queue", F.timestamp_seconds(F.col("hour") * step_s).alias("hour"), waiting.alias("backlog"))


def error_budgets(levels: DataFrame, objectives: Sequence[Objective] = ()) -> DataFrame:
    """Return what each queue may get wrong, by its level, and the share ``spent``: null if nothing may and some did."""
    known = by_queue(objectives)
    wanted = _by_queue({queue: one.share for queue, one in known.items()}, "double")
    objective = _by_queue({queue: str(one) for queue, one in known.items()}, "string")
    bad, allowed = F.col("ended") - F.col("good"), F.col("ended") * (1 - wanted)
    return levels.where(F.col("ended") > 0).select(
        "queue", objective.alias("objective"), wanted.alias("wanted"), F.try_divide("good", "ended").alias("reached"),
        "ended", bad.alias("bad"), allowed.alias("allowed"),
        F.when(bad == 0, 0.0).otherwise(F.try_divide(bad, allowed)).alias("spent"),
    )  # fmt: skip


def noisy_queues(levels: DataFrame) -> DataFrame:
    """Return each queue's share of all run time, attempts and unsuccessful attempts, for the levels by queue.

    ``noisy`` marks a queue whose share of the unsuccessful attempts is at least twice its share of the tasks.
    """
    everything = Window.partitionBy()
    unsuccessful = F.col("attempts") - F.col("completed")

    def part(value: Column) -> Column:
        return F.try_divide(value, F.sum(value).over(everything))

    shares = levels.select(
        "queue", "ended", "attempts", unsuccessful.alias("unsuccessful_attempts"),
        part(F.col("ended")).alias("share_of_tasks"), part(F.col("run_seconds")).alias("share_of_run_time"),
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


def minute_parts(tasks: DataFrame, *by: str) -> DataFrame:
    """Return how many tasks arrived, by queue and minute since 1970, and by further columns."""
    minute = F.floor(F.unix_seconds("create_time") / MINUTE_S)
    groups = tasks.groupBy(*by, F.col("queue_name").alias("queue"), minute.alias("hour"))
    return groups.agg(F.count("*").alias("arrived"))
