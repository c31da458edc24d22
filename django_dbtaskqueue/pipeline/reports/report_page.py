"""The report as a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from django_dbtaskqueue.pipeline.reports import markup
from django_dbtaskqueue.pipeline.reports.charts import bar_chart, line_chart
from django_dbtaskqueue.pipeline.reports.history import Period
from django_dbtaskqueue.pipeline.reports.markup import number, percent, seconds

LINES = 6  # queues with a line of their own in a chart
BARS = 60
STEPS = tuple(timedelta(hours=hours) for hours in (1, 2, 4, 8, 24, 48, 168, 672, 8760))
Rows = Sequence[Mapping[str, Any]]


def page(data: Mapping[str, Any], tables: Mapping[str, pa.Table], period: Period) -> str:
    """Return the whole page."""
    levels, backlog = tables["levels"].to_pylist(), tables["backlog"].to_pylist()
    parts = [markup.sentence(data["summary"]), tiles(data["everything"])]
    parts += [*charts(levels, backlog, [row["queue"] for row in data["queues"]]), *lists(data)]
    return markup.page("Task queues: service report", str(period), parts)


def tiles(total: Mapping[str, Any]) -> str:
    """Return the figures over everything."""
    return markup.tiles(
        [
            ("tasks arrived", number(total["arrived"])),
            ("tasks ended", number(total["ended"])),
            ("completed", percent(total["success_rate"]) or "-"),
            ("needed a retry", percent(total["retry_rate"]) or "-"),
            ("wait, p95", seconds(total["wait_p95"]) or "-"),
            ("run, p95", seconds(total["run_p95"]) or "-"),
        ]
    )


def charts(levels: Rows, backlog: Rows, queues: Sequence[str]) -> Iterator[str]:
    """Yield the charts over time."""
    yield markup.heading("Over time", "Times are in UTC.")
    yield bar_chart("Tasks ended", *ended_bars(levels), value=lambda value: number(round(value)))
    busiest = sorted(queues, key=lambda queue: -sum(row["ended"] for row in levels if row["queue"] == queue))[:LINES]
    for column, title in (("wait_p95", "Wait, p95 of each hour"), ("run_p95", "Run, p95 of each hour")):
        yield line_chart(title, series(levels, busiest, column), value=lambda value: seconds(value) or "")
    yield line_chart(
        "Backlog at the end of each hour", series(backlog, busiest, "backlog"), value=lambda v: number(round(v))
    )
    yield line_chart(
        "Failures, share of what ended in each hour", series(levels, busiest, "failure_rate"),
        value=lambda value: percent(value) or "",
    )  # fmt: skip


def ended_bars(levels: Rows) -> tuple[list[tuple[str, list[float]]], list[str]]:
    """Return bars of completed and failed tasks, by hours, days or weeks: as many as can be told apart."""
    hours = [row["hour"] for row in levels if row["ended"]]
    if not hours:
        return [], []
    first, last = min(hours), max(hours)
    step = next((one for one in STEPS if (last - first) / one < BARS), STEPS[-1])
    if step >= timedelta(days=1):
        first = first.replace(hour=0)
    sums: dict[datetime, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in levels:
        if row["ended"]:
            bar = sums[first + (row["hour"] - first) // step * step]
            bar[0] += row["completed"]
            bar[1] += row["errors"] + row["poisoned"]
    places = [first + step * number for number in range(int((last - first) / step) + 1)]
    form = "%d %b" if step >= timedelta(days=1) else "%d %H:%M"
    return [(f"{place:{form}}", sums[place]) for place in places], ["completed", "failed"]


def series(rows: Rows, queues: Sequence[str], column: str) -> dict[str, list[tuple[float, float | None]]]:
    """Return a line for each queue that has a value."""
    lines: dict[str, list[tuple[float, float | None]]] = {queue: [] for queue in queues}
    for row in rows:
        if row["queue"] in lines and row[column] is not None:
            lines[row["queue"]].append((row["hour"].timestamp(), float(row[column])))
    return {queue: points for queue, points in lines.items() if points}


def lists(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables."""
    yield markup.heading("Queues")
    yield queues_table(data["queues"])
    yield markup.heading("Error budgets", "What a queue may get wrong, and how much of that is spent.")
    yield budgets_table(data["budgets"])
    yield markup.heading("Failures", "Grouped by message; numbers, ids and quoted text are left out of it.")
    heads = ["Queue", "Message", "Tasks ended so", "Attempts failed", "Last", "Example"]
    columns = ["queue", "message", "tasks_ended", "attempts_failed", "last", "example"]
    yield markup.table("Failures", heads, picked(data["failures"], columns))
    yield markup.heading("Never succeeded", "Kinds of tasks (queue, tag, reference to its first digit) that only fail.")
    heads = ["Queue", "Tag", "Reference", "Ended", "Last", "Example"]
    columns = ["queue", "tag", "reference", "ended", "last", "example"]
    yield markup.table("Never succeeded", heads, picked(data["never_succeeding"], columns))
    yield markup.heading("Noise", "Queues whose unsuccessful attempts outgrow their share of the tasks are noisy.")
    yield noise_table(data["noisy"])
    yield markup.heading("Retry waste", "Seconds worked in attempts that failed.")
    yield waste_table(data["retry_waste"])


def queues_table(rows: Rows) -> str:
    """Return the service levels of each queue."""
    heads = ["Queue", "Arrived", "Ended", "Completed", "Retried", "Failed"]
    heads += [f"{time} {p}" for time in ("Wait", "Run") for p in ("p50", "p95", "p99")]
    times = [f"{time}_{p}" for time in ("wait", "run") for p in ("p50", "p95", "p99")]
    rates = ("success_rate", "retry_rate", "failure_rate")
    body = [
        [
            *(row[name] for name in ("queue", "arrived", "ended")),
            *(percent(row[rate]) for rate in rates),
            *(seconds(row[time]) for time in times),
        ]
        for row in rows
    ]
    return markup.table("Queues", heads, body)


def budgets_table(rows: Rows) -> str:
    """Return what is left of each error budget."""
    body = [
        [
            row["queue"], row["objective"], percent(row["reached"]), row["bad"], round(row["allowed"], 1),
            percent(row["spent"]) if row["spent"] is not None else "all, and there was none",
        ]
        for row in rows
    ]  # fmt: skip
    broken = [place for place, row in enumerate(rows) if row["spent"] is None or row["spent"] > 1]
    heads = ["Queue", "Objective", "Reached", "Missed it", "Allowed to", "Spent"]
    return markup.table("Error budgets", heads, body, bad=broken)


def noise_table(rows: Rows) -> str:
    """Return each queue's share of the work and of the trouble."""
    heads = ["Queue", "Attempts", "Unsuccessful", "Share of tasks", "of run time", "of unsuccessful attempts", "Noisy"]
    shares = ("share_of_tasks", "share_of_run_time", "share_of_unsuccessful")
    body = [
        [row["queue"], row["attempts"], row["unsuccessful_attempts"], *(percent(row[s]) for s in shares), row["noisy"]]
        for row in rows
    ]
    return markup.table("Noise", heads, body, bad=[place for place, row in enumerate(rows) if row["noisy"]])


def waste_table(rows: Rows) -> str:
    """Return what failed attempts cost."""
    heads = ["Queue", "Failed attempts", "Worked for nothing", "Share of all work"]
    return markup.table(
        "Retry waste", heads,
        [
            [row["queue"], row["failed_attempts"], seconds(row["wasted_seconds"]), percent(row["share_of_work"])]
            for row in rows
        ],
    )  # fmt: skip


def picked(rows: Rows, columns: Sequence[str]) -> list[list[object]]:
    """Return these columns of the rows; times without seconds."""
    return [
        [f"{row[name]:%Y-%m-%d %H:%M}" if isinstance(row[name], datetime) else row[name] for name in columns]
        for row in rows
    ]
