"""The job ``check``: finds faults in the tasks of database and lake. ``archive`` applies its rules too."""

from collections.abc import Iterator, Sequence
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window, functions as F

from django_dbtaskqueue.core.exceptions import CheckFailed
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Options, Result, above_zero, count
from django_dbtaskqueue.pipeline.lake import Lake, State, one_state, read_lake
from django_dbtaskqueue.pipeline.reports.transforms import MAD_TO_SIGMA
from django_dbtaskqueue.pipeline.source import read_tasks
from django_dbtaskqueue.pipeline.spark import Cached

__all__ = ["Check"]

# Name of a finding -> SQL that is true for a row that has it.
ROW_RULES = {
    "no id": "id IS NULL",
    "no queue": "queue_name IS NULL OR queue_name = ''",
    "unknown status": f"status IS NULL OR status NOT IN ({', '.join(repr(str(one)) for one in Status)})",
    "finished before it started": "finish_time < start_time",
}
DUPLICATE_ID, DAMAGED_FILE = "the same id twice", "damaged file"
GAP, DRIFT = "days without a task", "unusual number of tasks"
FAULTS = (*ROW_RULES, DUPLICATE_ID, DAMAGED_FILE)
QUALITY_COLUMNS = ("id", "queue_name", "status", "start_time", "finish_time", "last_update_time")
MAX_FINDINGS = 200
Finding = dict[str, str | int]
USUAL_DAYS = 28  # the usual number of tasks is that of these earlier days
MIN_USUAL_DAYS = 7  # with fewer earlier days no day is unusual


def rule_breaks(tasks: pa.Table) -> dict[str, pa.Array]:
    """Return which rows in memory break each rule of ``violations`` and ``twice``, if any row does."""
    broken = (
        pc.is_null(tasks["id"]),
        pc.equal(pc.fill_null(tasks["queue_name"], ""), ""),
        pc.invert(pc.is_in(tasks["status"], value_set=pa.array([str(one) for one in Status]))),
        pc.fill_null(pc.less(tasks["finish_time"], tasks["start_time"]), False),
        pa.array(tasks.select(["location", "id"]).to_pandas().duplicated(keep=False)),
    )
    found = dict(zip((*ROW_RULES, DUPLICATE_ID), broken, strict=True))
    return {name: rows for name, rows in found.items() if pc.any(rows).as_py()}


def violations(tasks: DataFrame) -> DataFrame:
    """Return (check, place, queue_name, rows): how many rows break which of ROW_RULES."""
    broken = F.filter(F.array(*(F.when(F.expr(rule), name) for name, rule in ROW_RULES.items())), F.isnotnull)
    one = tasks.select(F.explode(broken).alias("check"), "place", "queue_name")
    return one.groupBy("check", "place", "queue_name").agg(F.count("*").alias("rows"))


def twice(tasks: DataFrame) -> DataFrame:
    """Return (location, id, rows, places) of tasks that have more than one row."""
    places = F.array_sort(F.collect_set("place")).alias("places")
    return tasks.groupBy("location", "id").agg(F.count("*").alias("rows"), places).filter("rows > 1")


def daily(tasks: DataFrame) -> DataFrame:
    """Return (queue_name, day, tasks): how many tasks finished on each day that has any."""
    day = F.to_date(F.coalesce("finish_time", "last_update_time")).alias("day")
    ended = tasks.filter("status IN ('COMPLETED', 'ERROR', 'POISON')").select("queue_name", day)
    return ended.groupBy("queue_name", "day").agg(F.count("*").alias("tasks"))


def gaps(days: DataFrame, *, longest: int) -> DataFrame:
    """Return (queue_name, after, until, missing): stretches of more than ``longest`` days without a finished task."""
    before = F.lag("day").over(Window.partitionBy("queue_name").orderBy("day"))
    missing = F.datediff("until", "after") - 1
    stretches = days.select("queue_name", before.alias("after"), F.col("day").alias("until"))
    return stretches.withColumn("missing", missing).filter(F.col("missing") > longest)


def drift(days: DataFrame, *, threshold: float) -> DataFrame:
    """Return (queue_name, day, tasks, usual): days whose number is further from the usual than ``threshold`` spreads.

    Usual is the median of up to 28 earlier days; the spread is the median deviation, and at least what chance gives.
    """
    earlier = Window.partitionBy("queue_name").orderBy("day").rowsBetween(-USUAL_DAYS, -1)
    past = days.select("queue_name", "day", "tasks", F.collect_list("tasks").over(earlier).alias("past"))
    usual = past.filter(F.size("past") >= MIN_USUAL_DAYS).withColumn("usual", _median(F.col("past")))
    off = F.abs(F.col("tasks") - F.col("usual"))
    deviation = _median(F.transform("past", lambda number: F.abs(number - F.col("usual"))))
    chance = F.sqrt(F.greatest(F.col("usual"), F.lit(1.0)))
    return usual.filter(off > threshold * F.greatest(deviation * MAD_TO_SIGMA, chance)).drop("past")


def _median(numbers: Column) -> Column:
    ordered, size = F.sort_array(numbers), F.size(numbers)
    low = F.element_at(ordered, ((size + 1) / 2).cast("int"))
    return (low + F.element_at(ordered, (size / 2 + 1).cast("int"))) / F.lit(2.0)


def placed(context: Context, state: State, damaged: list[str]) -> DataFrame:
    """Return the QUALITY_COLUMNS of each task in that state, and its ``place``; errors of files go to ``damaged``."""
    spark, found = context.spark, {}  # a session must run before a column is made
    if (database := context.database) is not None:
        hot = read_tasks(spark, database, QUALITY_COLUMNS, "task", snapshot=state.snapshot)
        found["task"] = hot.withColumn("location", F.lit(database.location))
        names = ("location", "task_id", *QUALITY_COLUMNS[1:])
        history = read_tasks(spark, database, names, "history", snapshot=state.snapshot)
        found["history"] = history.withColumnRenamed("task_id", "id")
    if context.lake:
        found["lake"] = read_lake(spark, context.lake, state=state, damaged=damaged)
    rows = (one.select(F.lit(place).alias("place"), "location", *QUALITY_COLUMNS) for place, one in found.items())
    return reduce(DataFrame.unionAll, rows)


class Check(Job):
    """Reads the tasks in the database, its history and the lake (with --lake), and looks for faults.

    Faults are: no id, no queue, an unknown status, a finish before the start, an id in two rows, a file of the lake
    with a wrong checksum. They fail the job (exit code 3). A gap of days, and a day with an unusual number of tasks,
    are only reported, unless --strict is given. The first 200 of each kind are listed. Nothing is written.
    """

    name = "check"
    summary = "look for faults in the tasks of database and lake"
    arguments = (
        Argument("longest_gap", "days without a finished task that are no gap yet", count, 3),
        Argument("threshold", "how many spreads from the usual a day's number of tasks may be", above_zero, 6.0),
        Argument("strict", "fail for gaps and unusual days too", bool, False),
    )

    def run(self, context: Context) -> Result:
        """Return ``rows`` and ``findings``. Raises CheckFailed, with the same as its result, when there are faults."""
        if not context.lake:
            context.need_database()
        damaged: list[str] = []
        with one_state(context.database, context.lake) as state, Cached() as cached:
            context.progress("reading tasks", 0, 0)
            tasks = cached.hold(placed(context, state, damaged))
            rows, days = tasks.count(), cached.hold(daily(tasks))
            found = [*_findings(tasks, days, context.options)]
        if context.lake:
            context.progress("reading files", 0, 0)
            lake = Lake.at(context.lake)
            lake.sound([*lake.files("attempts"), *lake.files("finished")], damaged)
        found = [*(_finding(DAMAGED_FILE, "lake", "", 0, error) for error in damaged), *found]
        faults = [one for one in found if context.options["strict"] or one["check"] in FAULTS]
        result = {"rows": rows, "faults": len(faults), "findings": found}
        if faults:
            raise CheckFailed(f"The data has faults.\n{table(found)}", result)
        return result

    def as_text(self, result: Result) -> str:
        return f"{result['rows']:,} tasks checked\n{table(result['findings'])}"


def _findings(tasks: DataFrame, days: DataFrame, options: Options) -> Iterator[Finding]:
    for row in violations(tasks).orderBy("check", "place", "queue_name").limit(MAX_FINDINGS).collect():
        yield _finding(row.check, row.place, row.queue_name, row.rows)
    for row in twice(tasks).orderBy("location", "id").limit(MAX_FINDINGS).collect():
        yield _finding(DUPLICATE_ID, " and ".join(row.places), "", row.rows, f"{row.location} {row.id}")
    today = F.current_date()  # incomplete
    for row in gaps(days, longest=options["longest_gap"]).orderBy("queue_name", "until").limit(MAX_FINDINGS).collect():
        yield _finding(GAP, "", row.queue_name, 0, f"{row.missing} days between {row.after} and {row.until}")
    unusual = drift(days.filter(F.col("day") < today), threshold=options["threshold"])
    for row in unusual.orderBy("queue_name", "day").limit(MAX_FINDINGS).collect():
        yield _finding(DRIFT, "", row.queue_name, row.tasks, f"{row.day}: usual are {row.usual:,.0f}")


def _finding(check: str, place: str, queue: str | None, rows: int, detail: str = "") -> Finding:
    return {"check": check, "place": place, "queue": queue or "", "rows": rows, "detail": detail}


def table(findings: Sequence[Finding]) -> str:
    """Return findings as a table of text."""
    if not findings:
        return "no findings"
    cells = [list(findings[0]), *([str(value) for value in one.values()] for one in findings)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
