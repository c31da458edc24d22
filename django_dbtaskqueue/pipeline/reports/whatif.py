"""The job ``whatif``: history replayed with other slots, priorities or back-off.

The replay is a simulation of discrete events, without Spark and without a clock: the same tasks give the same waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from statistics import fmean

import numpy as np
from pyspark.sql import Column
from pyspark.sql import functions as F

from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.core.numbers import seconds
from django_dbtaskqueue.pipeline import reports
from django_dbtaskqueue.pipeline.jobs import Argument, Context, count, pair
from django_dbtaskqueue.pipeline.reports import transforms as T
from django_dbtaskqueue.pipeline.schema import TERMINAL_STATUSES

__all__ = ["WhatIf"]

REPLAY_COLUMNS = (
    "queue_name", "status", "priority", "total_attempt", "reenqueue_attempt", "create_time", "start_time",
    "finish_time",
)  # fmt: skip
WAIT_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
PERCENT_STEPS = tuple(step / 100 for step in range(101))
PRINTED_WAITS = ("p50", "p95", "p99", "max")
WAIT_CHART_STEPS = 120

BackOff = Callable[[int], timedelta | None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A task of the history: seconds since 1970, seconds of a run, failed attempts, and priority (low first)."""

    time: float
    run: float
    failures: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """When the replay served a task: its arrival, seconds until its first start, and until its last attempt ended."""

    arrival: float
    wait: float
    lead: float


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
        raise ValueError(f"{value!r} is not a whole number; write mails=-5, low numbers go first") from None


class WhatIf(reports.ReportJob):
    """Replays the tasks that arrived, as they arrived, twice: with the slots and back-off of now, and with others.

    A task gets the run time of its last attempt, and as many failures as it had. The slots of now are --now-slots, else
    the largest number of tasks that ran at once. The result also has the waits that were recorded: they show how
    exact the first replay is. Compare the two replays with each other, not a replay with the recorded waits.
    """

    name = "whatif"
    summary = "history replayed with other slots, priorities or back-off: what the waits would have been"
    arguments = (
        *reports.PERIOD_ARGUMENTS,
        Argument("slots", "tasks that run at once, over all pollers. Default: as now", type=count, metavar="N"),
        Argument("now_slots", "the slots of now. Default: the most that ran at once", type=count, metavar="N"),
        Argument("priority", "priority of all tasks of a queue, as mails=-5 (low first); repeatable",
                 type=queue_priority, many=True, metavar="QUEUE=N"),
        Argument("back_off", "a retry policy, as fixed:5s or geometric:10s,x2,max=1h. Default: as now", type=back_off,
                 metavar="POLICY"),
        Argument("now_back_off", "the retry policy of now", type=back_off, default="geometric:10s,x2,max=1h",
                 metavar="POLICY"),
        Argument("limit", "the most tasks to replay: the latest ones", type=count, default=200_000, metavar="N"),
        *reports.OUTPUT_ARGUMENTS,
    )  # fmt: skip

    def run(self, context: Context) -> reports.Figures:
        """Report. Raises JobOptionError when no option changes anything."""
        if not any(context.options[name] for name in ("slots", "priority", "back_off")):
            raise JobOptionError("--slots", "which change? Give --slots, --priority or --back-off")
        return super().run(context)

    def figures(self, context: Context, period: reports.Period) -> tuple[reports.Figures, reports.Tables]:
        """Return the waits."""
        options = context.options
        rows = tasks(context, period)
        now_slots = options["now_slots"] or most_at_once([(row["started"], row["ended"]) for row in rows])
        slots = options["slots"] or now_slots
        other = _arrivals(rows, dict(options["priority"]))
        context.progress("replaying", 0, 2)
        now = replay(_arrivals(rows, {}), slots=now_slots, back_off=options["now_back_off"])
        context.progress("replaying", 1, 2)
        then = replay(other, slots=slots, back_off=options["back_off"] or options["now_back_off"])
        recorded = [Served(row["created"], max(row["started"] - row["created"], 0), 0) for row in rows if row["once"]]
        waits = {name: waits_of(served) for name, served in (("recorded", recorded), ("now", now), ("then", then))}
        times, waits_now = zip(*over_time(now), strict=True)
        figures = {
            "summary": sentence(waits["now"]["p95"], waits["then"]["p95"]),
            "since": period.since,
            "until": period.until,
            "tasks": len(now),
            "slots_now": now_slots,
            "slots_then": slots,
            **waits,
            "over_time": {
                "times": [datetime.fromtimestamp(time, UTC) for time in times],
                "now": waits_now,
                "then": [wait for _, wait in over_time(then)],
            },
            "curve": {name: quantiles(served, PERCENT_STEPS) for name, served in (("now", now), ("then", then))},
        }
        return figures, {}

    def details(self, result: reports.Row) -> Iterable[str]:
        return (
            f"  wait {name}: {seconds(result['now'][name])} now, {seconds(result['then'][name])} then"
            for name in PRINTED_WAITS
        )


def tasks(context: Context, period: reports.Period) -> reports.Rows:
    """Return the tasks that ran and ended, in the order of their arrival; times are in seconds since 1970."""

    def moment(name: str) -> Column:
        return F.unix_micros(name) / 1_000_000

    context.progress("reading tasks", 0, 0)
    with reports.tasks_of(context, REPLAY_COLUMNS, period) as found:
        ended = F.col("status").isin(*TERMINAL_STATUSES) & F.col("start_time").isNotNull()
        chosen = (
            T.as_of(found, period.until)
            .where(ended)
            .select(
                F.col("queue_name").alias("queue"),
                F.col("priority").cast("int"),
                moment("create_time").alias("created"),
                moment("start_time").alias("started"),
                moment("finish_time").alias("ended"),
                F.greatest(F.col("total_attempt") - F.col("reenqueue_attempt") - 1, F.lit(0))
                .cast("int")
                .alias("failures"),
                (F.col("total_attempt") == 1).alias("once"),
            )
        )
        rows = chosen.orderBy(F.desc("created")).limit(context.options["limit"]).toArrow().to_pylist()
    if not rows:
        reports.raise_no_tasks(context, period)
    return sorted(rows, key=lambda row: row["created"])


def _arrivals(rows: reports.Rows, priorities: Mapping[str, int]) -> list[Arrival]:
    """Return the tasks with the priorities of their queues. Raises JobOptionError for a queue without a task."""
    queues = {row["queue"] for row in rows}
    if unknown := sorted(set(priorities) - queues):
        raise JobOptionError("--priority", f"no task of a queue {unknown[0]!r}. Queues: {', '.join(sorted(queues))}")
    return [
        # The last attempt ended the task, with any outcome; those before it failed.
        Arrival(row["created"], max(row["ended"] - row["started"], 0.0), row["failures"],
                priorities.get(row["queue"], row["priority"]))
        for row in rows
    ]  # fmt: skip


def sentence(before: float, after: float) -> str:
    """Return the result in one sentence, from the p95 of the wait."""
    word = "shorter" if after < before else "longer" if after > before else "the same"
    waits = f"95 % of the tasks would have waited at most {seconds(after)} instead of {seconds(before)}"
    return f"{waits}: {word}."


def waits_of(served: Sequence[Served]) -> dict[str, float]:
    """Return percentiles of the wait, and the mean of the time until the end."""
    names = [f"p{share * 100:g}".replace(".", "") for share in WAIT_QUANTILES]
    found = dict(zip([*names, "max"], quantiles(served, [*WAIT_QUANTILES, 1]), strict=True))
    return {**found, "mean_lead": fmean(one.lead for one in served) if served else 0.0}


def quantiles(served: Sequence[Served], shares: Sequence[float]) -> list[float]:
    """Return for each share the least wait that this share of the tasks did not exceed; 0 without tasks."""
    waits = [one.wait for one in served] or [0.0]
    found: list[float] = np.quantile(waits, shares, method="inverted_cdf").tolist()
    return found


# -- the replay --------------------------------------------------------------------------------------------------------


def replay(arrivals: Sequence[Arrival], *, slots: int, back_off: BackOff) -> list[Served]:
    """Return when each task is served with this number of slots, in the order of their arrival.

    A free slot takes the due task first in (priority, due time, arrival). Each failed attempt runs as long as the last
    one did, and the task is due again after ``back_off(number of the failure)``; None gives it up there.
    """
    due = [(arrival.time, number) for number, arrival in enumerate(arrivals)]
    heapq.heapify(due)
    ready: list[tuple[int, float, int]] = []
    free = [0.0] * slots
    heapq.heapify(free)
    failed = [0] * len(arrivals)
    first: list[float | None] = [None] * len(arrivals)
    ends = [0.0] * len(arrivals)
    now = 0.0
    while due or ready:
        now = max(now, heapq.heappop(free))
        if not ready:
            now = max(now, due[0][0])
        while due and due[0][0] <= now:
            time, number = heapq.heappop(due)
            heapq.heappush(ready, (arrivals[number].priority, time, number))
        _, _, number = heapq.heappop(ready)
        arrival = arrivals[number]
        first[number] = now if first[number] is None else first[number]
        ends[number] = now + arrival.run
        heapq.heappush(free, ends[number])
        if failed[number] < arrival.failures:
            failed[number] += 1
            delay = back_off(failed[number])
            if delay is not None:
                heapq.heappush(due, (ends[number] + delay.total_seconds(), number))
    return [
        Served(arrival.time, (first[number] or 0.0) - arrival.time, ends[number] - arrival.time)
        for number, arrival in enumerate(arrivals)
    ]


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return the largest number of spans (start, end) that any moment lies in; at least 1."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return max(most, 1)


def over_time(served: Sequence[Served]) -> Iterator[tuple[float, float]]:
    """Yield (time, p95 of the wait) for each of the equal steps of time in which tasks arrived."""
    width = max((served[-1].arrival - served[0].arrival) / WAIT_CHART_STEPS, 1.0)
    for step, group in groupby(served, key=lambda one: int((one.arrival - served[0].arrival) / width)):
        yield served[0].arrival + (step + 0.5) * width, quantiles(list(group), [0.95])[0]
