"""Failures of tasks: by message, what they cost, and what never succeeds. Every function is pure.

The functions ``…_parts`` return what adds up, as in `transforms`.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core.states import COMPLETED, ERROR, POISON
from django_dbtaskqueue.pipeline.schema import TERMINAL_STATUSES

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


def normalised(message: Column) -> Column:
    """Return a message without what makes it unique: ids, numbers, quoted text. Null stays null."""
    for pattern, replacement in MESSAGE_PATTERNS:
        message = F.regexp_replace(message, pattern, replacement)
    return F.substring(F.trim(message), 1, MAX_MESSAGE_PATTERN_CHARS)


def last_line(text: Column) -> Column:
    """Return the last line that is not empty: of a traceback, the exception."""
    return F.regexp_extract(F.rtrim(text, F.lit(" \n\r\t")), r"([^\n]*)\z", 1)


def failure_clusters(tasks: DataFrame, attempts: DataFrame, *by: str) -> DataFrame:
    """Return the failures by queue and normalised message, and by further columns of both. They add up.

    ``tasks_ended`` counts the tasks that ended so, ``attempts_failed`` the recorded failed attempts of any task.
    ``example`` is one of the messages, unchanged.
    """
    ended = tasks.where(F.col("status").isin(str(ERROR), str(POISON))).select(
        *by,
        F.col("queue_name").alias("queue"),
        last_line(F.coalesce("process_result", F.lit(""))).alias("text"),
        F.col("finish_time").alias("time"),
        F.lit(1).alias("ended"),
    )
    kind = F.regexp_replace("error_type", r"^builtins\.", "")
    failed = attempts.select(
        *by,
        F.col("queue_name").alias("queue"),
        last_line(F.concat_ws(": ", F.nullif(kind, F.lit("")), F.nullif("message", F.lit("")))).alias("text"),
        F.col("finish_time").alias("time"),
        F.lit(0).alias("ended"),
    )
    message = F.when(F.col("text") == "", "(no message)").otherwise(normalised(F.col("text")))
    return (
        ended.unionByName(failed)
        .groupBy(*by, "queue", message.alias("message"))
        .agg(
            F.sum("ended").alias("tasks_ended"),
            F.sum(1 - F.col("ended")).alias("attempts_failed"),
            F.min("time").alias("first"),
            F.max("time").alias("last"),
            F.max("text").alias("example"),
        )
    )


def retry_waste(attempts: DataFrame, levels: DataFrame) -> DataFrame:
    """Return, by queue, the failed attempts, the seconds they ran, and those as a share of all seconds worked.

    ``levels`` are those by queue: all seconds worked are these and the seconds of the attempts that completed a task.
    """
    return waste_of(waste_parts(attempts), levels)


def waste_parts(attempts: DataFrame, *by: str) -> DataFrame:
    """Return how many attempts failed and their microseconds (``wasted``), by queue and further columns."""
    ran = F.greatest(F.unix_micros("finish_time") - F.unix_micros("start_time"), F.lit(0))
    return attempts.groupBy(*by, F.col("queue_name").alias("queue")).agg(
        F.count("*").alias("failed_attempts"), F.coalesce(F.sum(ran), F.lit(0)).alias("wasted")
    )


def waste_of(parts: DataFrame, levels: DataFrame) -> DataFrame:
    """Return what `retry_waste` returns, of its parts, each queue once."""
    wasted = parts.select("queue", "failed_attempts", (F.col("wasted") / 1_000_000).alias("wasted_seconds"))
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
    return never_succeeding_of(kind_parts(tasks))


def kind_parts(tasks: DataFrame, *by: str) -> DataFrame:
    """Return how many tasks of each kind ``ended`` and ``completed``, and the last one, by further columns too."""
    kind = F.regexp_extract(F.coalesce("reference_number", F.lit("")), f"^[^0-9]{{0,{MAX_REFERENCE_PREFIX_CHARS}}}", 0)
    ended = tasks.where(F.col("status").isin(*TERMINAL_STATUSES)).select(
        *by,
        F.col("queue_name").alias("queue"),
        "tag",
        kind.alias("reference"),
        F.col("reference_number").alias("example"),
        (F.col("status") == str(COMPLETED)).alias("completed"),
        F.col("finish_time").alias("last"),
    )
    counted = ended.groupBy(*by, *KIND_COLUMNS).agg(
        F.count("*").alias("ended"), F.count_if("completed").alias("completed"), F.max("last").alias("last")
    )
    # max() of a text makes Spark sort its rows: it gets the tasks that did not complete only.
    examples = ended.where(~F.col("completed")).groupBy(*by, *KIND_COLUMNS).agg(F.max("example").alias("example"))
    keys = (*by, *KIND_COLUMNS)
    same = [F.col(f"n.{name}").eqNullSafe(F.col(f"e.{name}")) for name in keys]
    return (
        counted.alias("n")
        .join(examples.alias("e"), same, "left")
        .select(*(f"n.{name}" for name in (*keys, "ended", "completed", "last")), "e.example")
    )


def never_succeeding_of(parts: DataFrame) -> DataFrame:
    """Return what `never_succeeding` returns, of its parts, each kind once."""
    never = parts.where((F.col("ended") >= MIN_ENDED_TASKS) & (F.col("completed") == 0))
    return never.select(*KIND_COLUMNS, "ended", "last", "example")
