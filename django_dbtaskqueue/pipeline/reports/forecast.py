"""The job ``forecast``: what the week will need, and which hours were out of line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as F

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline.arguments import Argument, count, duration, share
from django_dbtaskqueue.pipeline.jobs import Context, Job
from django_dbtaskqueue.pipeline.reports import findings, forecasting, history, markup
from django_dbtaskqueue.pipeline.reports import transforms as T
from django_dbtaskqueue.pipeline.reports.charts import heat_map
from django_dbtaskqueue.pipeline.reports.forecasting import Anomaly, Need, Service, Stretch, Target
from django_dbtaskqueue.pipeline.reports.history import Period
from django_dbtaskqueue.pipeline.reports.markup import number, seconds

LIVE_POLLERS = (
    "SELECT count(*), coalesce(max(slots), 0) FROM dbtaskqueue_poller WHERE state <> 'STOPPED' AND heartbeat_time > "
)
RECENTLY = {
    "postgresql": "statement_timestamp() - interval '1 minute'",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 minute')",
}
MOST_ANOMALIES = 50
Hourly = dict[datetime, float]


class Forecast(Job):
    """Learns from history how many tasks arrive in each hour of the week and how long they run, and works out how many
    pollers keep the wait: an M/M/c queue with Allen and Cunneen's correction for uneven arrivals and run times, and an
    interval that 90 % of 400 resamples of the weeks fall into. A run of a task counts each of its attempts.

    It also names the hours whose arrivals, p95 wait or failures were out of line with the same hour of other weeks
    (or days, while there are few weeks), by a score that a few wild hours cannot hide from: median and MAD.
    """

    name = "forecast"
    summary = "pollers needed in each hour of the week for a target wait, and anomalies"
    arguments = (
        *history.ARGUMENTS,
        Argument("target_wait", "wait to keep", type=duration, default=timedelta(seconds=30), metavar="TIME"),
        Argument("share", "of the tasks that are to keep it, as 95%", type=share, default=0.95),
        Argument("pollers", "pollers there are now. Default: the running ones in the database, else 1", type=count,
                 metavar="N"),
        Argument("slots", "tasks one poller runs at the same time. Default: a running one's, else 4", type=count,
                 metavar="N"),
        Argument("threshold", "robust standard deviations from which an hour is an anomaly", type=float, default=5.0),
        *findings.ARGUMENTS,
    )  # fmt: skip

    def run(self, context: Context) -> Mapping[str, Any]:
        """Compute, write, and return the figures. Raises PipelineError when there is too little history."""
        period = Period.of(context.options)
        findings.check(context.options)
        rows, service = observed(context, period)
        have, slots = fleet(context)
        options = context.options
        weeks = forecasting.by_hour_of_week(arrivals_of(rows))
        found = forecasting.needs(weeks, service, Target(options["target_wait"].total_seconds(), options["share"]))
        stretches = forecasting.short_stretches(found, have=have, slots=slots)
        odd = sorted(odd_hours(rows, options["threshold"]), key=lambda one: -abs(one.score))[:MOST_ANOMALIES]
        data: dict[str, Any] = {
            "summary": sentence(stretches, found, have=have, slots=slots, options=options),
            "since": period.since,
            "until": period.until,
            "pollers": have,
            "slots": slots,
            "run_seconds": service.mean,
            "unevenness_of_arrivals": forecasting.unevenness_of(weeks),
            "unevenness_of_run_times": service.unevenness,
            "stretches": [{"when": str(one), **asdict(one)} for one in stretches],
            "hours": [asdict(one) for one in found],
            "anomalies": [asdict(one) for one in odd],
        }
        page = markup.page("Task queues: forecast", str(period), parts(data, found, odd))
        tables = {"needs": pa.Table.from_pylist(data["hours"])}
        kept = findings.Findings("forecast", period, data["summary"], data, page, tables).keep(context)
        return {**data, **kept}

    def say(self, result: Mapping[str, Any]) -> str:
        """Return the sentence, and the oddest hours."""
        return "\n".join(lines(result))


def observed(context: Context, period: Period) -> tuple[list[dict[str, Any]], Service]:
    """Return the levels by queue and hour, and how long an attempt runs. Raises PipelineError when nothing ran."""
    with history.tasks_of(context, T.COLUMNS, period) as found:
        tasks = T.as_of(found, period.until).select(*T.TIMED).persist()
        hours = T.hours(tasks).persist()
        context.progress("reading tasks", 0, 0)
        if hours.isEmpty():
            history.refuse_nothing(context, period)
        levels = T.service_levels(period.only(hours), T.hourly_times(tasks), "queue", "hour")
        rows = levels.orderBy("queue", "hour").toArrow().to_pylist()
        runs = T.histogram(tasks).where(F.col("measure") == "run").collect()
        hours.unpersist()
        tasks.unpersist()
    ran, total = sum(row["tasks"] for row in runs), sum(row["seconds"] for row in runs)
    if not total:
        raise PipelineError(f"No task ended after it ran, from {period}: nothing says how long tasks run.")
    mean = total / ran
    variance = sum(row["tasks"] * (row["seconds"] / row["tasks"] - mean) ** 2 for row in runs) / ran
    ended, attempts = sum(row["ended"] for row in rows), sum(row["attempts"] for row in rows)
    return rows, Service(mean * attempts / ended if ended else mean, variance / mean**2)


def fleet(context: Context) -> tuple[int, int]:
    """Return the pollers there are and the slots of one: as told, else those running, else one of four."""
    running = slots = 0
    if context.database is not None:
        connection = context.database.connect()
        try:
            running, slots = connection.execute(LIVE_POLLERS + RECENTLY[context.database.vendor]).fetchone()
        finally:
            connection.close()
    return context.options["pollers"] or running or 1, context.options["slots"] or slots or 4


def arrivals_of(rows: Sequence[Mapping[str, Any]]) -> dict[datetime, int]:
    """Return the arrivals of all queues by hour."""
    found: dict[datetime, int] = {}
    for row in rows:
        hour = row["hour"].astimezone(UTC)
        found[hour] = found.get(hour, 0) + row["arrived"]
    return found


def odd_hours(rows: Sequence[Mapping[str, Any]], threshold: float) -> Iterator[Anomaly]:
    """Yield the anomalies of every queue in arrivals, wait and failures."""
    for queue in sorted({row["queue"] for row in rows}):
        own = {row["hour"].astimezone(UTC): row for row in rows if row["queue"] == queue}
        arrivals: Hourly = {}
        hour, last = min(own), max(own)
        while hour <= last:
            arrivals[hour] = own[hour]["arrived"] if hour in own else 0
            hour += forecasting.HOUR
        waits = {hour: row["wait_p95"] for hour, row in own.items() if row["wait_p95"] is not None}
        failed = {hour: row["failure_rate"] for hour, row in own.items() if row["ended"]}
        ended = {hour: row["ended"] for hour, row in own.items()}

        def of_arrivals(hour: datetime, usual: float) -> float:
            return math.sqrt(max(usual, 1))

        def of_waits(hour: datetime, usual: float) -> float:
            return 0.1 * usual + 1

        def of_failures(hour: datetime, usual: float, ended: Mapping[datetime, int] = ended) -> float:
            return math.sqrt(max(usual * (1 - usual), 0.01) / ended[hour])

        for measure, values, least in (
            ("arrivals", arrivals, of_arrivals),
            ("wait_p95", waits, of_waits),
            ("failure_rate", failed, of_failures),
        ):
            yield from forecasting.anomalies(queue, measure, values, least=least, threshold=threshold)


def sentence(
    stretches: Sequence[Stretch], found: Sequence[Need], *, have: int, slots: int, options: Mapping[str, Any]
) -> str:
    """Return what is to be done, in one sentence."""
    goal = f"to keep {options['share'] * 100:g} % of the waits within {options['target_wait'].total_seconds():g} s"
    if stretches:
        worst, there = stretches[0], "is" if have == 1 else "are"
        pollers = "poller" if worst.pollers - have == 1 else "pollers"
        more = f"; {len(stretches) - 1} other stretches of the week are short, too" if len(stretches) > 1 else ""
        return (
            f"Add {worst.pollers - have} {pollers} {worst} UTC, {goal}: it needs {worst.pollers} of {slots} slots each "
            f"({worst.least} to {worst.most} in 90 % of the resampled weeks), and there {there} {have}{more}."
        )
    most = max((forecasting.pollers(need.servers, slots) for need in found), default=0)
    spare = "" if most >= have else f"; {most} would do"
    return f"{have} pollers of {slots} slots are enough in every hour of the week {goal}{spare}."


def parts(data: Mapping[str, Any], found: Sequence[Need], odd: Sequence[Anomaly]) -> Iterator[str]:
    """Yield the parts of the page."""
    yield markup.sentence(data["summary"])
    yield markup.tiles(
        [
            ("pollers now", number(data["pollers"])),
            ("slots of one", number(data["slots"])),
            ("run of a task, mean", seconds(data["run_seconds"]) or "-"),
            ("unevenness of arrivals", number(data["unevenness_of_arrivals"])),
            ("unevenness of run times", number(data["unevenness_of_run_times"])),
        ]
    )
    yield markup.heading("The week", "UTC. 1 is the unevenness of independent arrivals and of exponential run times.")
    hours = [f"{hour:02}" for hour in range(24)]
    for title, value in (("Arrivals per hour", "arrivals"), ("Pollers needed", "pollers")):
        grid = [[0.0] * 24 for _ in forecasting.DAYS]
        for need in found:
            wanted = need.arrivals if value == "arrivals" else forecasting.pollers(need.servers, data["slots"])
            grid[need.hour // 24][need.hour % 24] = float(wanted)
        yield heat_map(title, [day[:3] for day in forecasting.DAYS], hours, grid, value=number)
    yield markup.heading("Where pollers are missing")
    heads = ["When", "Needed", "At least", "At most"]
    rows = [[one["when"], one["pollers"], one["least"], one["most"]] for one in data["stretches"]]
    yield markup.table("Where pollers are missing", heads, rows)
    yield markup.heading("Anomalies", "Hours out of line with the same hour of other weeks or days.")
    heads = ["Queue", "Hour", "Measure", "Value", "Usual", "Score"]
    yield markup.table(
        "Anomalies", heads,
        [[one.queue, f"{one.hour:%a %Y-%m-%d %H:%M}", one.measure, one.value, one.usual, one.score] for one in odd],
    )  # fmt: skip


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the command prints."""
    yield result["summary"]
    for one in result["anomalies"][:5]:
        yield (
            f"  {one['hour']:%a %Y-%m-%d %H:%M} {one['queue']}: {one['measure']} {number(one['value'])}, "
            f"usually {number(one['usual'])} (score {one['score']:+.1f})"
        )
    for name in ("page", "report_id"):
        if result.get(name):
            yield f"{name.replace('_', ' ')}: {result[name]}"
