"""Failures out of tasks and attempts: what they say, what they cost, what never succeeds. Pure, like ``transforms``."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core.states import COMPLETED, ERROR, POISON, TERMINAL

LONGEST = 200  # characters of a normalised message
# What differs between two failures of one kind, and what stands for it; in this order.
VARIABLE = (
    (r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", "<id>"),
    (r"0x[0-9a-fA-F]+|\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b", "<hex>"),
    (r"'[^']*'|\"[^\"]*\"", "<text>"),
    (r"[0-9]+(?:[.,:/-][0-9]+)*", "<n>"),
    (r"\s+", " "),
)
ATTEMPT_COLUMNS = ("location", "task_id", "queue_name", "start_time", "finish_time", "error_type", "message")
KIND = ("queue", "tag", "reference")  # what tasks of one kind have in common
LONGEST_KIND = 60  # characters of a reference, before the first digit, that make a kind
ENOUGH = 3  # ended tasks of one kind, before "never" is said


def normalised(message: Column) -> Column:
    """Return a message without what makes it unique: ids, numbers, quoted text. Null stays null."""
    for pattern, stand_in in VARIABLE:
        message = F.regexp_replace(message, pattern, stand_in)
    return F.substring(F.trim(message), 1, LONGEST)


def last_line(text: Column) -> Column:
    """Return the last line that is not empty: of a traceback, the exception."""
    return F.regexp_extract(F.rtrim(text, F.lit(" \n\r\t")), r"([^\n]*)\z", 1)


def failure_clusters(tasks: DataFrame, attempts: DataFrame) -> DataFrame:
    """Return the failures by queue and normalised message.

    ``tasks_ended`` counts the tasks that ended so, ``attempts_failed`` the failed attempts on record, whatever became
    of their task. ``example`` is one of the messages, word by word.
    """
    ended = tasks.where(F.col("status").isin(str(ERROR), str(POISON))).select(
        F.col("queue_name").alias("queue"),
        last_line(F.coalesce("process_result", F.lit(""))).alias("said"),
        F.col("finish_time").alias("time"),
        F.lit(1).alias("ended"),
    )
    failed = attempts.select(
        F.col("queue_name").alias("queue"),
        last_line(F.concat_ws(": ", _short("error_type"), F.nullif("message", F.lit("")))).alias("said"),
        F.col("finish_time").alias("time"),
        F.lit(0).alias("ended"),
    )
    message = F.when(F.col("said") == "", "(no message)").otherwise(normalised(F.col("said")))
    return (
        ended.unionByName(failed)
        .groupBy("queue", message.alias("message"))
        .agg(
            F.sum("ended").alias("tasks_ended"),
            F.sum(1 - F.col("ended")).alias("attempts_failed"),
            F.min("time").alias("first"),
            F.max("time").alias("last"),
            F.max("said").alias("example"),
        )
        .select("queue", "message", "tasks_ended", "attempts_failed", "first", "last", "example")
    )


def _short(error_type: str) -> Column:
    return F.nullif(F.regexp_replace(error_type, r"^builtins\.", ""), F.lit(""))


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


def never_succeeding(tasks: DataFrame, *, enough: int = ENOUGH) -> DataFrame:
    """Return the kinds of tasks that ended at least ``enough`` times and never COMPLETED.

    Tasks are of one kind when queue, tag, and their references up to the first digit are the same: those of one
    schedule, one producer, or one business object.
    """
    kind = F.regexp_extract(F.coalesce("reference_number", F.lit("")), f"^[^0-9]{{0,{LONGEST_KIND}}}", 0)
    ended = tasks.where(F.col("status").isin(*TERMINAL)).select(
        F.col("queue_name").alias("queue"),
        "tag",
        kind.alias("reference"),
        F.col("reference_number").alias("example"),
        (F.col("status") == str(COMPLETED)).alias("completed"),
        F.col("finish_time").alias("last"),
    )
    never = (
        ended.groupBy(*KIND)
        .agg(F.count("*").alias("ended"), F.count_if("completed").alias("completed"), F.max("last").alias("last"))
        .where((F.col("ended") >= enough) & (F.col("completed") == 0))
    )
    # The greatest of texts would have Spark sort all tasks: only those that did not complete are asked for it.
    examples = ended.where(~F.col("completed")).groupBy(*KIND).agg(F.max("example").alias("example"))
    same = [F.col(f"n.{name}").eqNullSafe(F.col(f"e.{name}")) for name in KIND]
    return (
        never.alias("n")
        .join(examples.alias("e"), same)
        .select(*(f"n.{name}" for name in KIND), "n.ended", "n.last", "e.example")
    )
