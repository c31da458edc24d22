"""The job ``whatif``: history replayed with other slots, priorities or back-off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.pipeline.arguments import Argument, count, pair
from django_dbtaskqueue.pipeline.jobs import Context, Job
from django_dbtaskqueue.pipeline.reports import findings, history, markup, simulation
from django_dbtaskqueue.pipeline.reports import transforms as T
from django_dbtaskqueue.pipeline.reports.charts import line_chart
from django_dbtaskqueue.pipeline.reports.history import Period
from django_dbtaskqueue.pipeline.reports.markup import number, seconds
from django_dbtaskqueue.pipeline.reports.simulation import BackOff, Served

COLUMNS = (
    "queue_name", "status", "priority", "total_attempt", "reenqueue_attempt", "create_time", "start_time",
    "finish_time",
)  # fmt: skip
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
Jobs = list[simulation.Job]


def back_off(text: str) -> BackOff:
    """Return the delays of a retry policy such as "geometric:10s,x2,max=1h", without its jitter."""
    policy = retry.parse(text)
    delay = getattr(policy, "delay", None)
    return delay if callable(delay) else partial(retry.next_delay, policy)


def queue_priority(text: str) -> tuple[str, int]:
    """Return (queue, priority) of text such as "mails=-5"."""
    queue, value = pair(text)
    try:
        return queue, int(value)
    except ValueError:
        raise ValueError(f"{value!r} is no whole number; write a priority as in mails=-5, low ones go first") from None


class WhatIf(Job):
    """Replays the tasks that arrived, as they arrived, twice: with the slots and back-off of now, and with others.

    A task is given the run time its last attempt had, and as many failures as it had. The slots of now are, unless
    --now-slots says them, the most tasks that ever ran at once. The waits of the first replay stand beside those that
    were recorded, so that one sees how far the model can be trusted; compare the two replays, not a replay and life.
    """

    name = "whatif"
    summary = "history replayed with other slots, priorities or back-off: what the waits would have been"
    arguments = (
        *history.ARGUMENTS,
        Argument("slots", "tasks that run at once, over all pollers. Default: as now", type=count, metavar="N"),
        Argument("now_slots", "the slots of now. Default: the most that ran at once", type=count, metavar="N"),
        Argument("priority", "priority of all tasks of a queue, as mails=-5 (low first); repeatable",
                 type=queue_priority, many=True, metavar="QUEUE=N"),
        Argument("back_off", "a retry policy, as fixed:5s or geometric:10s,x2,max=1h. Default: as now", type=back_off,
                 metavar="POLICY"),
        Argument("now_back_off", "the retry policy of now", type=back_off, default="geometric:10s,x2,max=1h",
                 metavar="POLICY"),
        Argument("limit", "the most tasks to replay: the latest ones", type=count, default=200_000, metavar="N"),
        *findings.ARGUMENTS,
    )  # fmt: skip

    def run(self, context: Context) -> Mapping[str, Any]:
        """Replay, write, and return the figures. Raises JobOptionError when nothing is to be changed."""
        options = context.options
        if not (options["slots"] or options["priority"] or options["back_off"]):
            raise JobOptionError("--slots", "what is to be other than now? Give --slots, --priority or --back-off")
        period = Period.of(options)
        findings.check(options)
        rows = tasks(context, period)
        now_slots = options["now_slots"] or simulation.most_at_once([(row["started"], row["ended"]) for row in rows])
        slots = options["slots"] or now_slots
        jobs = [job_of(row) for row in rows]
        context.progress("replaying", 0, 2)
        now = simulation.replay(jobs, slots=now_slots, back_off=options["now_back_off"])
        context.progress("replaying", 1, 2)
        other = simulation.replay(
            changed(jobs, rows, dict(options["priority"])), slots=slots,
            back_off=options["back_off"] or options["now_back_off"],
        )  # fmt: skip
        recorded = [
            Served(row["created"], max(row["started"] - row["created"], 0.0), 0.0) for row in rows if row["once"]
        ]
        data = figures(recorded, now, other, now_slots=now_slots, slots=slots, period=period)
        page = markup.page("Task queues: what if", str(period), parts(data, now, other))
        kept = findings.Findings("whatif", period, data["summary"], data, page).keep(context)
        return {**data, **kept}

    def say(self, result: Mapping[str, Any]) -> str:
        """Return the sentence, and the waits."""
        waits = (
            f"  wait {name}: {seconds(result['now'][name])} now, {seconds(result['then'][name])} then"
            for name in ("p50", "p95", "p99", "max")
        )
        places = (f"{name.replace('_', ' ')}: {result[name]}" for name in ("page", "report_id") if result.get(name))
        return "\n".join([result["summary"], *waits, *places])


def tasks(context: Context, period: Period) -> list[Mapping[str, Any]]:
    """Return the tasks that ran and ended, in the order of their arrival."""
    context.progress("reading tasks", 0, 0)
    with history.tasks_of(context, COLUMNS, period) as found:
        latest = replayable(T.as_of(found, period.until)).orderBy(F.desc("created")).limit(context.options["limit"])
        rows = latest.toArrow().to_pylist()
    if not rows:
        history.refuse_nothing(context, period)
    return sorted(rows, key=lambda row: row["created"])


def replayable(tasks: DataFrame) -> DataFrame:
    """Return what a replay needs of the tasks that ran and ended; times are in seconds since 1970."""

    def moment(name: str) -> Column:
        return F.unix_micros(name) / 1_000_000

    retries = F.greatest(F.col("total_attempt") - F.col("reenqueue_attempt") - 1, F.lit(0))
    ended = tasks.where(F.col("status").isin(*TERMINAL) & F.col("start_time").isNotNull())
    return ended.select(
        F.col("queue_name").alias("queue"),
        F.col("priority").cast("int"),
        moment("create_time").alias("created"),
        moment("start_time").alias("started"),
        moment("finish_time").alias("ended"),
        retries.cast("int").alias("failures"),
        (F.col("total_attempt") == 1).alias("once"),
    )


def job_of(row: Mapping[str, Any]) -> simulation.Job:
    """Return the task for the replay. Its last attempt ended it, whatever became of it; those before failed."""
    return simulation.Job(row["created"], max(row["ended"] - row["started"], 0.0), row["failures"], row["priority"])


def changed(jobs: Jobs, rows: Sequence[Mapping[str, Any]], priorities: Mapping[str, int]) -> Jobs:
    """Return the tasks with the priorities of their queues. Raises JobOptionError for a queue without a task."""
    queues = {row["queue"] for row in rows}
    if unknown := sorted(set(priorities) - queues):
        raise JobOptionError("--priority", f"no task of a queue {unknown[0]!r}. Queues: {', '.join(sorted(queues))}")
    return [
        replace(job, priority=priorities.get(row["queue"], job.priority)) for job, row in zip(jobs, rows, strict=True)
    ]


def figures(
    recorded: Sequence[Served], now: Sequence[Served], other: Sequence[Served], *, now_slots: int, slots: int,
    period: Period,
) -> dict[str, Any]:  # fmt: skip
    """Return the result as JSON can hold it."""
    found = {"recorded": waits(recorded), "now": waits(now), "then": waits(other)}
    before, after = found["now"]["p95"], found["then"]["p95"]
    word = "shorter" if after < before else "longer" if after > before else "the same"
    said = f"95 % of the tasks would have waited at most {seconds(after)} instead of {seconds(before)}"
    return {
        "summary": f"{said}: {word}.",
        "since": period.since,
        "until": period.until,
        "tasks": len(now),
        "slots_now": now_slots,
        "slots_then": slots,
        **found,
    }


def waits(served: Sequence[Served]) -> dict[str, float]:
    """Return percentiles of the wait, and the mean of the time until the end."""
    ordered = sorted(one.wait for one in served)
    found = {f"p{share * 100:g}".replace(".", ""): simulation.quantile(ordered, share) for share in SHARES[:-1]}
    mean = sum(one.lead for one in served) / len(served) if served else 0.0
    return {**found, "max": ordered[-1] if ordered else 0.0, "mean_lead": mean}


def parts(data: Mapping[str, Any], now: Sequence[Served], other: Sequence[Served]) -> Iterator[str]:
    """Yield the parts of the page."""
    yield markup.sentence(data["summary"])
    facts = [("tasks", "tasks"), ("slots_now", "slots now"), ("slots_then", "slots then")]
    yield markup.tiles([(name, number(data[key])) for key, name in facts])
    lines = {"now": list(simulation.over_time(now)), "then": list(simulation.over_time(other))}
    yield line_chart("Wait, p95, by time of arrival (UTC)", lines, value=lambda value: seconds(value) or "")
    curves = {name: curve(served) for name, served in (("now", now), ("then", other))}
    yield line_chart(
        "Wait curve: the share of tasks (below) that waited at most so long", curves,
        value=lambda value: seconds(value) or "", place=lambda share: f"{share * 100:.0f} %",
    )  # fmt: skip
    names = [name for name in data["now"] if name != "mean_lead"]
    rows = [[name, *(seconds(data[key][name]) for key in ("recorded", "now", "then"))] for name in names]
    yield markup.heading("Waits", "Recorded: of tasks taken once. Now and then: replayed.")
    yield markup.table("Waits", ["Wait", "Recorded", "Now", "Then"], rows)


def curve(served: Sequence[Served]) -> list[tuple[float, float | None]]:
    """Return the wait by share of the tasks."""
    ordered = sorted(one.wait for one in served)
    return [(step / 100, simulation.quantile(ordered, step / 100)) for step in range(101)]
