"""The job ``whatif``: history replayed with other slots, priorities or back-off.

The replay is a simulation of discrete events, without Spark and without a clock: the same tasks give the same waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.core.numbers import seconds
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.pipeline.jobs import Argument, Context, count, pair
from django_dbtaskqueue.pipeline.reports import (
    OUTPUT_ARGUMENTS,
    PERIOD_ARGUMENTS,
    Figures,
    Period,
    ReportJob,
    Row,
    Rows,
    Tables,
    raise_no_tasks,
    tasks_of,
)
from django_dbtaskqueue.pipeline.reports import transforms as T

REPLAY_COLUMNS = (
    "queue_name", "status", "priority", "total_attempt", "reenqueue_attempt", "create_time", "start_time",
    "finish_time",
)  # fmt: skip
WAIT_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
PRINTED_WAITS = ("p50", "p95", "p99", "max")
WAIT_CHART_STEPS = 120

BackOff = Callable[[int], timedelta | None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A task as history knows it: seconds since 1970, priority (low first), failed attempts, and the run."""

    time: float
    run: float
    failures: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of it: seconds until it was first taken, and until its last attempt ended."""

    arrival: float
    wait: float
    lead: float


Arrivals = list[Arrival]


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


class WhatIf(ReportJob):
    """Replays the tasks that arrived, as they arrived, twice: with the slots and back-off of now, and with others.

    A task is given the run time its last attempt had, and as many failures as it had. The slots of now are, unless
    --now-slots says them, the most tasks that ever ran at once. The waits of the first replay stand beside those that
    were recorded, so that one sees how far the model can be trusted; compare the two replays, not a replay and life.
    """

    name = "whatif"
    summary = "history replayed with other slots, priorities or back-off: what the waits would have been"
    arguments = (
        *PERIOD_ARGUMENTS,
        Argument("slots", "tasks that run at once, over all pollers. Default: as now", type=count, metavar="N"),
        Argument("now_slots", "the slots of now. Default: the most that ran at once", type=count, metavar="N"),
        Argument("priority", "priority of all tasks of a queue, as mails=-5 (low first); repeatable",
                 type=queue_priority, many=True, metavar="QUEUE=N"),
        Argument("back_off", "a retry policy, as fixed:5s or geometric:10s,x2,max=1h. Default: as now", type=back_off,
                 metavar="POLICY"),
        Argument("now_back_off", "the retry policy of now", type=back_off, default="geometric:10s,x2,max=1h",
                 metavar="POLICY"),
        Argument("limit", "the most tasks to replay: the latest ones", type=count, default=200_000, metavar="N"),
        *OUTPUT_ARGUMENTS,
    )  # fmt: skip

    def figures(self, context: Context, period: Period) -> tuple[Figures, Tables]:
        """Return the waits. Raises JobOptionError when no option changes anything."""
        options = context.options
        if not (options["slots"] or options["priority"] or options["back_off"]):
            raise JobOptionError("--slots", "what is to be other than now? Give --slots, --priority or --back-off")
        rows = tasks(context, period)
        now_slots = options["now_slots"] or most_at_once([(row["started"], row["ended"]) for row in rows])
        slots = options["slots"] or now_slots
        arrivals = [arrival_of(row) for row in rows]
        context.progress("replaying", 0, 2)
        now = replay(arrivals, slots=now_slots, back_off=options["now_back_off"])
        context.progress("replaying", 1, 2)
        then = replay(
            changed(arrivals, rows, dict(options["priority"])), slots=slots,
            back_off=options["back_off"] or options["now_back_off"],
        )  # fmt: skip
        recorded = [
            Served(row["created"], max(row["started"] - row["created"], 0.0), 0.0) for row in rows if row["once"]
        ]
        waits = {name: waits_of(served) for name, served in (("recorded", recorded), ("now", now), ("then", then))}
        figures = {
            "summary": sentence(waits["now"]["p95"], waits["then"]["p95"]),
            "since": period.since,
            "until": period.until,
            "tasks": len(now),
            "slots_now": now_slots,
            "slots_then": slots,
            **waits,
            "over_time": {
                "times": [datetime.fromtimestamp(time, UTC) for time, _ in over_time(now)],
                "now": [wait for _, wait in over_time(now)],
                "then": [wait for _, wait in over_time(then)],
            },
            "curve": {"now": curve(now), "then": curve(then)},
        }
        return figures, {}

    def details(self, result: Row) -> Iterable[str]:
        """Return the waits."""
        return (
            f"  wait {name}: {seconds(result['now'][name])} now, {seconds(result['then'][name])} then"
            for name in PRINTED_WAITS
        )


def tasks(context: Context, period: Period) -> Rows:
    """Return the tasks that ran and ended, in the order of their arrival."""
    context.progress("reading tasks", 0, 0)
    with tasks_of(context, REPLAY_COLUMNS, period) as found:
        latest = replayable(T.as_of(found, period.until)).orderBy(F.desc("created")).limit(context.options["limit"])
        rows = latest.toArrow().to_pylist()
    if not rows:
        raise_no_tasks(context, period)
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


def arrival_of(row: Row) -> Arrival:
    """Return the task for the replay. Its last attempt ended it, whatever became of it; those before failed."""
    return Arrival(row["created"], max(row["ended"] - row["started"], 0.0), row["failures"], row["priority"])


def changed(arrivals: Arrivals, rows: Rows, priorities: Mapping[str, int]) -> Arrivals:
    """Return the tasks with the priorities of their queues. Raises JobOptionError for a queue without a task."""
    queues = {row["queue"] for row in rows}
    if unknown := sorted(set(priorities) - queues):
        raise JobOptionError("--priority", f"no task of a queue {unknown[0]!r}. Queues: {', '.join(sorted(queues))}")
    return [
        replace(one, priority=priorities.get(row["queue"], one.priority))
        for one, row in zip(arrivals, rows, strict=True)
    ]


def sentence(before: float, after: float) -> str:
    """Return the result in one sentence, from the p95 of the wait."""
    word = "shorter" if after < before else "longer" if after > before else "the same"
    waits = f"95 % of the tasks would have waited at most {seconds(after)} instead of {seconds(before)}"
    return f"{waits}: {word}."


def waits_of(served: Sequence[Served]) -> dict[str, float]:
    """Return percentiles of the wait, and the mean of the time until the end."""
    ordered = sorted(one.wait for one in served)
    found = {f"p{share * 100:g}".replace(".", ""): quantile(ordered, share) for share in WAIT_QUANTILES}
    mean = sum(one.lead for one in served) / len(served) if served else 0.0
    return {**found, "max": ordered[-1] if ordered else 0.0, "mean_lead": mean}


def curve(served: Sequence[Served]) -> list[float]:
    """Return the wait that 0 %, 1 %, … 100 % of the tasks did not exceed."""
    ordered = sorted(one.wait for one in served)
    return [quantile(ordered, step / 100) for step in range(101)]


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


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the ordered ``values`` that this share of them does not exceed; 0 without values."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def over_time(served: Sequence[Served], steps: int = WAIT_CHART_STEPS) -> Iterator[tuple[float, float]]:
    """Yield (time, p95 of the wait) for each of the equal steps of time in which tasks arrived."""
    if not served:
        return
    width = max((served[-1].arrival - served[0].arrival) / steps, 1.0)
    groups: dict[int, list[float]] = {}
    for one in served:
        groups.setdefault(int((one.arrival - served[0].arrival) / width), []).append(one.wait)
    for step, waits in sorted(groups.items()):
        yield served[0].arrival + (step + 0.5) * width, quantile(sorted(waits), 0.95)
