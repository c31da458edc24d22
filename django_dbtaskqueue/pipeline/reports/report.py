"""The job ``report``: how well the queues are served, from the database, its history and the lake."""

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from datetime import timedelta

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, functions as F

from django_dbtaskqueue.core.durations import percent, seconds, thousands
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.pipeline import reports
from django_dbtaskqueue.pipeline.jobs import Argument, Context, count, objective
from django_dbtaskqueue.pipeline.reports import ONE_HOUR, KeptDays, Period, TaskRows, transforms as T
from django_dbtaskqueue.pipeline.spark import Cached

__all__ = ["Report"]

HOURLY_TABLES = ("levels", "backlog")
CHART_TABLES = ("chart_levels", "chart_backlog")  # by seconds or minutes, if the tasks span few hours
SORT_COLUMNS = ("queue", "hour", "tag", "reference", "message")
MAX_CHART_QUEUES = 6  # queues with a line of their own
MAX_CHART_STEPS = 200
CHART_STEPS = (
    *(timedelta(seconds=one) for one in (1, 2, 5, 10, 30)),
    *(timedelta(minutes=one) for one in (1, 2, 5, 10, 30)),
    *(timedelta(hours=one) for one in (1, 2, 4, 8, 24, 48, 168, 672, 8760)),
)
FINE_STEPS_S = (1, 60)  # of charts of a short span


class Report(reports.ReportJob):
    """Reads each task once (task table, history, lake) and reports by queue and hour: how many arrived and ended, how
    many succeeded, were retried and failed, how long they waited and ran (p50, p95, p99), and how many were waiting.
    Then: what is left of error budgets, failures by message, noisy queues, the cost of retries, what never succeeds.

    Waiting times are of tasks taken once, from creation to start; a delay the producer asked for is part of them.
    Deleted tasks are not counted. With --out it writes figures, tables and, in a Django project, a page; with a
    database it keeps the figures there.
    """

    name = "report"
    summary = "service levels, error budgets and failures, as a page, JSON and Parquet"
    arguments = (
        *reports.PERIOD_ARGUMENTS,
        Argument("objective", 'of a queue: "claims=99.9%/5m", "*=99%". Default: 99% complete', objective, many=True),
        Argument("top", "rows of each list on the page and in the JSON", count, 20),
        *reports.OUTPUT_ARGUMENTS,
    )

    def figures(self, context: Context, period: Period) -> tuple[reports.Figures, reports.Tables]:
        """Return the report. Raises the errors of unreadable sources, and NoTasks when there is none."""
        kept = KeptDays(context, period, context.options["objective"])
        columns = {"tasks": T.REPORT_COLUMNS, "attempts": T.ATTEMPT_COLUMNS}
        with reports.rows_in(context, period, kept, **columns) as (found, failed):
            tasks, attempts = T.as_of(found, period.until), failed.where(F.col("finish_time") < F.lit(period.until))
            tables = _computed(context, period, kept, tasks, attempts)
            step = ONE_HOUR
            times = pc.min_max(tables["levels"]["hour"]).as_py()
            if times["max"] - times["min"] < timedelta(seconds=FINE_STEPS_S[-1] * MAX_CHART_STEPS):
                every = reports.rows_in(context, period, tasks=T.TIMED_COLUMNS) if kept.files else nullcontext([tasks])
                with every as (found,):
                    charts, step = _charts(context, period, T.as_of(found, period.until))
                tables |= charts
        figures = report_of(tables, context.options["top"], step)
        written = {name: table for name, table in tables.items() if table.num_rows and name not in CHART_TABLES}
        return {**figures, "days_kept": len(kept.files)}, written

    def details(self, result: reports.Row) -> Iterable[str]:
        return (
            f"  {row['queue']}: {thousands(row['ended'])} ended, {percent(row['success_rate'])} completed, "
            f"p95 wait {seconds(row['wait_p95'])}, p95 run {seconds(row['run_p95'])}"
            for row in result["queues"]
        )


def _computed(
    context: Context, period: Period, kept: KeptDays, tasks: DataFrame, attempts: DataFrame
) -> dict[str, pa.Table]:
    objectives = context.options["objective"]
    # Three passes read the tasks, with few columns each: reading those again from the lake costs less than caching all.
    with Cached() as cached:
        rest = TaskRows(tasks, attempts, cached.hold(T.hour_parts(tasks, objectives)))
        by_hour = cached.hold(kept.part("hours", rest))
        hours, times = T.hours(by_hour), cached.hold(T.percentiles(kept.part("sketches", rest), by_hour))
        chosen = period.only(hours)
        by_queue = cached.hold(T.service_levels(chosen, times, "queue"))
        context.progress("reading tasks", 0, 0)
        plans = {
            "queues": by_queue,
            "everything": T.service_levels(chosen, times),
            "levels": T.service_levels(chosen, times, "queue", "hour"),
            "backlog": T.backlog(hours),
            "budgets": T.error_budgets(by_queue, objectives),
            "noisy": T.noisy_queues(by_queue),
            "retry_waste": T.retry_waste(kept.part("waste", rest), by_queue),
            "failures": kept.part("failures", rest),
            "never_succeeding": T.never_succeeding(kept.part("kinds", rest)),
        }
        found = _tables(context, plans)
        if not found["queues"].num_rows:
            reports.raise_no_tasks(context, period)
        return found


def _tables(context: Context, plans: Mapping[str, DataFrame]) -> dict[str, pa.Table]:
    """Return the rows of each plan. One query for all of few tasks was tried: Spark planned it for longer."""
    found = {}
    for place, (name, plan) in enumerate(plans.items()):
        context.progress(name.replace("_", " "), place, len(plans))
        table = plan.toArrow()
        for text in {"message", "example"}.intersection(table.column_names):  # it may be older than a rule of masking
            masked = pa.array([one and masked_text(one) for one in table[text].to_pylist()], pa.string())
            table = table.set_column(table.column_names.index(text), text, masked)
        # Spark would read them twice to sort.
        order = [(column, "ascending") for column in SORT_COLUMNS if column in table.column_names]
        found[name] = table.sort_by(order) if order else table
    return found


def _charts(context: Context, period: Period, tasks: DataFrame) -> tuple[Mapping[str, pa.Table], timedelta]:
    """Return the tables of the charts by the shortest step that can show all tasks, and the step: none for hours."""
    ends = T.measured(tasks).select(F.explode(F.array("created", "ended")).alias("time"))
    if period.since is not None:
        ends = ends.where(F.col("time") >= int(period.since.timestamp()) * 1_000_000)
    first, last = ends.agg(F.min("time"), F.max("time")).collect()[0]
    step_s = next((one for one in FINE_STEPS_S if (last - first) / 1_000_000 < one * (MAX_CHART_STEPS - 1)), None)
    if step_s is None:
        return {}, ONE_HOUR
    with Cached() as cached:
        sums = cached.hold(T.hour_parts(tasks, context.options["objective"], step_s=step_s))
        hours, times = T.hours(sums), T.percentiles(sums)
        levels = T.service_levels(period.only(hours, step_s=step_s), times, "queue", "hour", step_s=step_s)
        found = levels, T.backlog(hours, step_s=step_s)
        return _tables(context, dict(zip(CHART_TABLES, found, strict=True))), timedelta(seconds=step_s)


def report_of(tables: reports.Tables, top: int, shortest: timedelta) -> reports.Figures:
    """Return the report as JSON can hold it: the ``top`` of each list, and of the hours what the charts show."""
    shown = CHART_TABLES if CHART_TABLES[0] in tables else HOURLY_TABLES
    levels, backlog = (tables[name].to_pandas() for name in shown)
    rows = {name: table.to_pylist() for name, table in tables.items() if name not in (*HOURLY_TABLES, *CHART_TABLES)}
    (everything,) = rows["everything"]
    found = {
        "everything": everything,
        "queues": rows["queues"],
        "budgets": sorted(rows["budgets"], key=lambda row: -_spent(row)),
        "failures": _most(rows["failures"], top, "tasks_ended", "attempts_failed"),
        "never_succeeding": _most(rows["never_succeeding"], top, "ended"),
        "noisy": _most(rows["noisy"], top, "unsuccessful_attempts"),
        "retry_waste": _most(rows["retry_waste"], top, "wasted_seconds"),
        "over_time": over_time(levels, backlog, {row["queue"]: row["allowed"] for row in rows["budgets"]}, shortest),
    }
    return {"summary": summary_text(found), **found}


def _most(rows: reports.Rows, top: int, *by: str) -> reports.Rows:
    return sorted(rows, key=lambda row: [-(row[name] or 0) for name in by])[:top]


def _spent(row: reports.Row) -> float:
    return float("inf") if row["spent"] is None else row["spent"]


def summary_text(found: reports.Figures) -> str:
    """Return the report in three sentences."""
    total = found["everything"]
    rate = "none" if total["success_rate"] is None else percent(total["success_rate"])
    text = f"{thousands(total['ended'])} tasks ended, {rate} of them COMPLETED"
    if total["wait_p95"] is not None:
        text += f"; 95 % of those taken once waited at most {seconds(total['wait_p95'])}"
    broken = [row["queue"] for row in found["budgets"] if _spent(row) > 1 + 1e-9]
    budget = f" Beyond their error budget: {', '.join(broken)}." if broken else " Every queue keeps its objective."
    never = len(found["never_succeeding"])
    kinds = "kind of task" if never == 1 else "kinds of tasks"
    return f"{text}.{budget}" + (f" {never} {kinds} never succeeded." if never else "")


def over_time(
    levels: pd.DataFrame, backlog: pd.DataFrame, allowed: Mapping[str, float], shortest: timedelta
) -> reports.Figures:
    """Return what the charts show, in equal steps of time: sums of the tasks that ended, lines of the busiest queues.

    A line shows the highest value of each step. A step without arrivals and ends keeps the backlog before it. A line of
    the error budget shows the share of ``allowed``, the tasks that may miss the objective, that is spent until then.
    """
    first, last = levels["hour"].min(), levels["hour"].max()
    fit = (one for one in CHART_STEPS if one >= shortest and (last - first) / one < MAX_CHART_STEPS)
    step = next(fit, CHART_STEPS[-1])
    first = first.replace(hour=0) if step >= timedelta(days=1) else first
    steps = range((last - first) // step + 1)
    levels, backlog = (rows.assign(step=(rows["hour"] - first) // step) for rows in (levels, backlog))
    sums = levels.groupby("step")[["completed", "errors", "poisoned"]].sum().reindex(steps, fill_value=0)
    busiest = levels.groupby("queue")["ended"].sum().nlargest(MAX_CHART_QUEUES).index

    def lines(values: pd.DataFrame) -> reports.Rows:
        shown = values.reindex(index=steps, columns=busiest).astype(float).round(6).dropna(axis=1, how="all")
        return [
            {"name": queue, "values": [None if math.isnan(one) else one for one in shown[queue]]} for queue in shown
        ]

    def peaks(rows: pd.DataFrame, column: str) -> pd.DataFrame:
        return rows.astype({column: float}).groupby(["step", "queue"])[column].max().unstack()

    ended = backlog.assign(step=backlog["step"].clip(lower=-1)).groupby(["step", "queue"])["backlog"].last().unstack()
    ended = ended.reindex(range(-1, len(steps))).ffill()
    bad = levels.assign(bad=levels["ended"] - levels["good"]).groupby(["step", "queue"])["bad"].sum().unstack()
    spent = bad.reindex(steps).fillna(0).cumsum() / pd.Series(allowed, dtype=float).replace(0, math.nan)
    return {
        "times": [(first + step * number).to_pydatetime() for number in steps],
        "completed": sums["completed"].tolist(),
        "failed": (sums["errors"] + sums["poisoned"]).tolist(),
        **{column: lines(peaks(levels, column)) for column in ("wait_p95", "run_p95", "failure_rate")},
        "budget_spent": lines(spent),
        "backlog": lines(peaks(backlog, "backlog").reindex_like(ended).fillna(ended)),
    }
