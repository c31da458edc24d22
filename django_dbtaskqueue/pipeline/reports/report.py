"""The job ``report``: how well the queues are served, out of the database, its history and the lake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from django_dbtaskqueue.pipeline.arguments import Argument, count
from django_dbtaskqueue.pipeline.jobs import Context, Job
from django_dbtaskqueue.pipeline.reports import findings, history, report_page
from django_dbtaskqueue.pipeline.reports import transforms as T
from django_dbtaskqueue.pipeline.reports import transforms_failures as failures
from django_dbtaskqueue.pipeline.reports.history import Period
from django_dbtaskqueue.pipeline.reports.markup import number, percent, seconds
from django_dbtaskqueue.pipeline.reports.objectives import objective

Table = list[dict[str, Any]]


class Report(Job):
    """Reads each task once (hot table, history, lake) and says, by queue and hour: how many arrived and ended, how
    many succeeded, were retried and failed, how long they waited and ran (p50, p95, p99, within 1 %), and how many
    were waiting. Then: what is left of the error budgets, what the failures say, which queues are noisy, what the
    retries cost, and what never succeeds.

    Waiting times are of tasks taken once, from creation to start; a delay the producer asked for is part of them.
    Deleted tasks are in no table, so they are in no report. With --out it writes a page, figures and tables; with a
    database it keeps the page in there.
    """

    name = "report"
    summary = "service levels, error budgets and failures, as a page, JSON and Parquet"
    arguments = (
        *history.ARGUMENTS,
        Argument(
            "objective", 'what a queue is held to: "claims=99.9%/5m", "*=99%"; repeatable. Default: 99% complete',
            type=objective, many=True, metavar="QUEUE=SHARE[/TIME]",
        ),
        Argument("top", "rows of each list on the page and in the JSON", type=count, default=20, metavar="N"),
        *findings.ARGUMENTS,
    )  # fmt: skip

    def run(self, context: Context) -> Mapping[str, Any]:
        """Compute, write, and return the figures. Raises PipelineError when there is no task at all."""
        period = Period.of(context.options)
        findings.check(context.options)
        tables = compute(context, period)
        data = figures(tables, period, context.options["top"])
        found = findings.Findings(
            "report", period, data["summary"], data, report_page.page(data, tables, period),
            {name: table for name, table in tables.items() if table.num_rows},
        )  # fmt: skip
        return {**data, **found.keep(context)}

    def say(self, result: Mapping[str, Any]) -> str:
        """Return the summary, a line for each queue, and where the rest is."""
        return "\n".join(lines(result))


def compute(context: Context, period: Period) -> dict[str, pa.Table]:
    """Return the report's tables by name. Raises the errors of unreadable sources, and one when nothing was found."""
    with (
        history.tasks_of(context, T.COLUMNS, period) as found,
        history.attempts_of(context, failures.ATTEMPT_COLUMNS, period) as attempts,
    ):
        return _computed(context, period, T.as_of(found, period.until), attempts)


def _computed(context: Context, period: Period, tasks: DataFrame, attempts: DataFrame) -> dict[str, pa.Table]:
    # Five passes go over the tasks, of few columns each: to read those from the lake again costs less than to keep all.
    hours, histogram = T.hours(tasks, context.options["objective"]).persist(), T.histogram(tasks).persist()
    chosen = period.only(hours)
    by_queue = T.service_levels(chosen, T.percentiles(histogram, "queue"), "queue").persist()
    try:
        context.progress("reading tasks", 0, 0)
        if hours.isEmpty():
            history.refuse_nothing(context, period)
        plans = {
            "queues": by_queue.orderBy("queue"),
            "everything": T.service_levels(chosen, T.percentiles(histogram)),
            "levels": T.service_levels(chosen, T.hourly_times(tasks), "queue", "hour").orderBy("queue", "hour"),
            "backlog": T.backlog(hours).orderBy("queue", "hour"),
            "budgets": T.error_budgets(by_queue, context.options["objective"]).orderBy("queue"),
            "noisy": T.noisy_queues(by_queue).orderBy("queue"),
            "retry_waste": failures.retry_waste(attempts, by_queue).orderBy("queue"),
            "failures": failures.failure_clusters(tasks, attempts).orderBy("queue", "message"),
            "never_succeeding": failures.never_succeeding(tasks).orderBy("queue", "tag", "reference"),
        }
        return dict(_collected(context, plans))
    finally:
        for frame in (by_queue, histogram, hours):
            frame.unpersist()


def _collected(context: Context, plans: Mapping[str, DataFrame]) -> Iterator[tuple[str, pa.Table]]:
    for place, (name, plan) in enumerate(plans.items()):
        context.progress(name.replace("_", " "), place, len(plans))
        yield name, plan.toArrow()


def figures(tables: Mapping[str, pa.Table], period: Period, top: int) -> dict[str, Any]:
    """Return the report as JSON can hold it: all but the hours, and the ``top`` of each list."""
    rows = {name: table.to_pylist() for name, table in tables.items() if name not in ("levels", "backlog")}
    (everything,) = rows["everything"]
    spent = sorted(rows["budgets"], key=lambda row: -_spent(row))
    found = {
        "since": period.since,
        "until": period.until,
        "everything": everything,
        "queues": rows["queues"],
        "budgets": spent,
        "failures": _most(rows["failures"], top, "tasks_ended", "attempts_failed"),
        "never_succeeding": _most(rows["never_succeeding"], top, "ended"),
        "noisy": _most(rows["noisy"], top, "unsuccessful_attempts"),
        "retry_waste": _most(rows["retry_waste"], top, "wasted_seconds"),
    }
    return {"summary": summary(found), **found}


def _most(rows: Table, top: int, *by: str) -> Table:
    return sorted(rows, key=lambda row: [-(row[name] or 0) for name in by])[:top]


def _spent(row: Mapping[str, Any]) -> float:
    return float("inf") if row["spent"] is None else float(row["spent"])


def summary(found: Mapping[str, Any]) -> str:
    """Return the report in three sentences."""
    total = found["everything"]
    text = f"{number(total['ended'])} tasks ended, {percent(total['success_rate']) or 'none of them'} of them COMPLETED"
    if total["wait_p95"] is not None:
        text += f"; 95 % of those taken once waited at most {seconds(total['wait_p95'])}"
    broken = [row["queue"] for row in found["budgets"] if _spent(row) > 1 + 1e-9]
    budget = f" Beyond their error budget: {', '.join(broken)}." if broken else " Every queue keeps its objective."
    never = len(found["never_succeeding"])
    kinds = "kind of task" if never == 1 else "kinds of tasks"
    return f"{text}.{budget}" + (f" {never} {kinds} never succeeded." if never else "")


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the command prints."""
    yield result["summary"]
    for row in result["queues"]:
        yield (
            f"  {row['queue']}: {number(row['ended'])} ended, {percent(row['success_rate']) or '-'} completed, "
            f"p95 wait {seconds(row['wait_p95']) or '-'}, p95 run {seconds(row['run_p95']) or '-'}"
        )
    for name in ("page", "report_id"):
        if result.get(name):
            yield f"{name.replace('_', ' ')}: {result[name]}"
