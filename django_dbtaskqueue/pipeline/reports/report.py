"""The job ``report``: how well the queues are served, from the database, its history and the lake."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import pyarrow as pa
from pyspark.sql import DataFrame

from django_dbtaskqueue.core.numbers import number, percent, seconds
from django_dbtaskqueue.pipeline.jobs import Argument, Context, count, objective
from django_dbtaskqueue.pipeline.reports import (
    OUTPUT_ARGUMENTS,
    PERIOD_ARGUMENTS,
    Figures,
    Period,
    ReportJob,
    Row,
    Rows,
    Tables,
    attempts_of,
    raise_no_tasks,
    tasks_of,
)
from django_dbtaskqueue.pipeline.reports import transforms as T

MAX_CHART_QUEUES = 6  # queues with a line of their own
MAX_CHART_STEPS = 200
CHART_STEPS = tuple(timedelta(hours=hours) for hours in (1, 2, 4, 8, 24, 48, 168, 672, 8760))
MAX_DECIMALS = 6


class Report(ReportJob):
    """Reads each task once (hot table, history, lake) and reports by queue and hour: how many arrived and ended, how
    many succeeded, were retried and failed, how long they waited and ran (p50, p95, p99), and how many
    were waiting. Then: what is left of the error budgets, what the failures say, which queues are noisy, what the
    retries cost, and what never succeeds.

    Waiting times are of tasks taken once, from creation to start; a delay the producer asked for is part of them.
    Deleted tasks are in no table, so they are in no report. With --out it writes figures, tables and, in a Django
    project, a page; with a database it keeps the figures there.
    """

    name = "report"
    summary = "service levels, error budgets and failures, as a page, JSON and Parquet"
    arguments = (
        *PERIOD_ARGUMENTS,
        Argument(
            "objective", 'what a queue is held to: "claims=99.9%/5m", "*=99%"; repeatable. Default: 99% complete',
            type=objective, many=True, metavar="QUEUE=SHARE[/TIME]",
        ),
        Argument("top", "rows of each list on the page and in the JSON", type=count, default=20, metavar="N"),
        *OUTPUT_ARGUMENTS,
    )  # fmt: skip

    def figures(self, context: Context, period: Period) -> tuple[Figures, Tables]:
        """Return the report. Raises the errors of unreadable sources, and PipelineError when there is no task."""
        with (
            tasks_of(context, T.REPORT_COLUMNS, period) as found,
            attempts_of(context, T.ATTEMPT_COLUMNS, period) as attempts,
        ):
            tables = _computed(context, period, T.as_of(found, period.until), attempts)
        rows = {name: table.to_pylist() for name, table in tables.items()}
        return report_of(rows, period, context.options["top"]), {
            name: table for name, table in tables.items() if table.num_rows
        }

    def details(self, result: Row) -> Iterable[str]:
        """Return a line for each queue."""
        return (
            f"  {row['queue']}: {number(row['ended'])} ended, {percent(row['success_rate'])} completed, "
            f"p95 wait {seconds(row['wait_p95'])}, p95 run {seconds(row['run_p95'])}"
            for row in result["queues"]
        )


def _computed(context: Context, period: Period, tasks: DataFrame, attempts: DataFrame) -> dict[str, pa.Table]:
    # Four passes read the tasks, with few columns each: reading those again from the lake costs less than caching all.
    hours, times = T.hours(tasks, context.options["objective"]).persist(), T.percentiles(tasks).persist()
    chosen = period.only(hours)
    by_queue = T.service_levels(chosen, times, "queue").persist()
    try:
        context.progress("reading tasks", 0, 0)
        if chosen.isEmpty():
            raise_no_tasks(context, period)
        plans = {
            "queues": by_queue.orderBy("queue"),
            "everything": T.service_levels(chosen, times),
            "levels": T.service_levels(chosen, times, "queue", "hour").orderBy("queue", "hour"),
            "backlog": T.backlog(hours).orderBy("queue", "hour"),
            "budgets": T.error_budgets(by_queue, context.options["objective"]).orderBy("queue"),
            "noisy": T.noisy_queues(by_queue).orderBy("queue"),
            "retry_waste": T.retry_waste(attempts, by_queue).orderBy("queue"),
            "failures": T.failure_clusters(tasks, attempts).orderBy("queue", "message"),
            "never_succeeding": T.never_succeeding(tasks).orderBy("queue", "tag", "reference"),
        }
        return dict(_collected(context, plans))
    finally:
        for frame in (by_queue, times, hours):
            frame.unpersist()


def _collected(context: Context, plans: Mapping[str, DataFrame]) -> Iterator[tuple[str, pa.Table]]:
    for place, (name, plan) in enumerate(plans.items()):
        context.progress(name.replace("_", " "), place, len(plans))
        yield name, plan.toArrow()


def report_of(rows: Mapping[str, Rows], period: Period, top: int) -> Figures:
    """Return the report as JSON can hold it: the ``top`` of each list, and of the hours what the charts show."""
    (everything,) = rows["everything"]
    found = {
        "since": period.since,
        "until": period.until,
        "everything": everything,
        "queues": rows["queues"],
        "budgets": sorted(rows["budgets"], key=lambda row: -_spent(row)),
        "failures": _most(rows["failures"], top, "tasks_ended", "attempts_failed"),
        "never_succeeding": _most(rows["never_succeeding"], top, "ended"),
        "noisy": _most(rows["noisy"], top, "unsuccessful_attempts"),
        "retry_waste": _most(rows["retry_waste"], top, "wasted_seconds"),
        "over_time": over_time(rows["levels"], rows["backlog"]),
    }
    return {"summary": summary(found), **found}


def _most(rows: Rows, top: int, *by: str) -> Rows:
    return sorted(rows, key=lambda row: [-(row[name] or 0) for name in by])[:top]


def _spent(row: Row) -> float:
    return float("inf") if row["spent"] is None else row["spent"]


def summary(found: Figures) -> str:
    """Return the report in three sentences."""
    total = found["everything"]
    rate = "none" if total["success_rate"] is None else percent(total["success_rate"])
    text = f"{number(total['ended'])} tasks ended, {rate} of them COMPLETED"
    if total["wait_p95"] is not None:
        text += f"; 95 % of those taken once waited at most {seconds(total['wait_p95'])}"
    broken = [row["queue"] for row in found["budgets"] if _spent(row) > 1 + 1e-9]
    budget = f" Beyond their error budget: {', '.join(broken)}." if broken else " Every queue keeps its objective."
    never = len(found["never_succeeding"])
    kinds = "kind of task" if never == 1 else "kinds of tasks"
    return f"{text}.{budget}" + (f" {never} {kinds} never succeeded." if never else "")


# -- the charts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Equal steps of time, at most `MAX_CHART_STEPS`, that a chart shows."""

    first: datetime
    step: timedelta
    count: int

    @classmethod
    def over(cls, hours: Sequence[datetime]) -> Steps:
        """Return the shortest steps that cover these hours."""
        first, last = min(hours), max(hours)
        step = next((one for one in CHART_STEPS if (last - first) / one < MAX_CHART_STEPS), CHART_STEPS[-1])
        if step >= timedelta(days=1):
            first = first.replace(hour=0)
        return cls(first, step, (last - first) // step + 1)

    def place(self, hour: datetime) -> int:
        """Return the number of the step of an hour, below 0 for an hour before the first."""
        return (hour - self.first) // self.step

    def sums(self, rows: Rows, *columns: str) -> list[int]:
        """Return the sum of these columns in each step."""
        values = [0] * self.count
        for row in rows:
            values[self.place(row["hour"])] += sum(row[column] for column in columns)
        return values

    def peaks(self, rows: Rows, column: str) -> list[float | None]:
        """Return the highest value of each step: a reader looks for peaks."""
        values: list[float | None] = [None] * self.count
        for row in rows:
            place, value = self.place(row["hour"]), row[column]
            if place >= 0 and value is not None:
                values[place] = round(max(value, values[place] or 0), MAX_DECIMALS)
        return values

    def backlog(self, rows: Rows) -> list[float | None]:
        """Return the highest backlog of each step; ``rows`` are in the order of time.

        A step without arrivals and ends keeps the backlog before it.
        """
        values, latest = self.peaks(rows, "backlog"), {self.place(row["hour"]): row["backlog"] for row in rows}
        now = next((latest[place] for place in reversed(latest) if place < 0), None)
        for place, value in enumerate(values):
            values[place] = now if value is None else value
            now = latest.get(place, now)
        return values


def over_time(levels: Rows, backlog: Rows) -> Figures:
    """Return what the charts show: sums of the tasks that ended, and lines of the busiest queues."""
    steps = Steps.over([row["hour"] for row in levels])
    levels_of, backlog_of = _by_queue(levels), _by_queue(backlog)
    busiest = sorted(levels_of, key=lambda queue: -sum(row["ended"] for row in levels_of[queue]))[:MAX_CHART_QUEUES]
    lines = {
        column: {queue: steps.peaks(levels_of[queue], column) for queue in busiest}
        for column in ("wait_p95", "run_p95", "failure_rate")
    }
    lines["backlog"] = {queue: steps.backlog(backlog_of.get(queue, [])) for queue in busiest}
    return {
        "times": [steps.first + steps.step * number for number in range(steps.count)],
        "completed": steps.sums(levels, "completed"),
        "failed": steps.sums(levels, "errors", "poisoned"),
        **{
            column: [{"name": queue, "values": values} for queue, values in found.items() if set(values) != {None}]
            for column, found in lines.items()
        },
    }


def _by_queue(rows: Rows) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["queue"]].append(row)
    return found
