"""The job ``whatif``: history replayed by a simulation of discrete events: the same tasks give the same waits."""

import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
from pyspark.sql import functions as F

from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.durations import percent, seconds
from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.pipeline import reports
from django_dbtaskqueue.pipeline.jobs import Argument, Context, count, pair, reader
from django_dbtaskqueue.pipeline.reports import Period, transforms as T

__all__ = ["WhatIf"]

REPLAY_COLUMNS = (*T.TIMED_COLUMNS, "priority")
WAIT_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
PERCENT_STEPS = tuple(step / 100 for step in range(101))
WAIT_CHART_STEPS = 120

BackOff = Callable[[int], timedelta | None]


class Arrival(NamedTuple):
    """A task of the history: its time in seconds since 1970, seconds of a run, failed attempts, and priority."""

    time: float
    run: float
    failures: int = 0
    priority: int = 0


class Served(NamedTuple):
    """When the replay served a task: its arrival, seconds until its first start, and until its last attempt ended."""

    arrival: float
    wait: float
    lead: float


def back_off(text: str) -> BackOff:
    """Return the delays of a retry policy such as "geometric:10s,x2,max=1h", without its jitter."""
    policy = retry.parse_policy(text)
    delay = getattr(policy, "delay", None)
    return delay if callable(delay) else partial(retry.next_delay, policy)


class Advice(NamedTuple):
    """The slots that a forecast advises for each hour of the week, and the wait that it promises."""

    hours: Mapping[int, int]
    poller: int  # slots of one poller, which also is there in hours that the forecast does not know
    zone: tzinfo
    wait: float
    share: float

    def slots(self, time: float) -> int:
        """Return the slots at a time, in seconds since 1970. They change at whole hours."""
        local = datetime.fromtimestamp(time // T.HOUR_S * T.HOUR_S, self.zone)
        return self.hours.get(local.weekday() * 24 + local.hour, self.poller)

    def kept(self, served: Sequence[Served]) -> str:
        """Return the sentence on what became of the promise."""
        found, wait = fmean([one.wait <= self.wait for one in served] or [0]), seconds(self.wait)
        return f" Started within {wait}, as the forecast promises for {percent(self.share)}: {percent(found)}."


def advice_of(text: str) -> Advice:
    """Return the advice of the file that the job forecast wrote."""
    try:
        found = json.loads(Path(text).read_text(encoding="utf-8"))
        slots = found["slots"]
        hours = {one["hour"]: max(math.ceil(one["servers"] / slots), 1) * slots for one in found["hours"]}
        return Advice(hours, slots, ZoneInfo(found["time_zone"]), found["target_wait"], found["share"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{text} is not the forecast.json of this version's job forecast: {error}") from None


def queue_priority(text: str) -> tuple[str, int]:
    """Return (queue, priority) of text such as "mails=-5"."""
    queue, value = pair(text)
    return queue, reader(int, "a whole number; write mails=-5, low numbers go first")(value)


class WhatIf(reports.ReportJob):
    """Replays the tasks that arrived, as they arrived, twice: with the slots and back-off of now, and with others.

    A task gets the run time of its last attempt, and as many failures as it had. The slots of now are --now-slots, else
    the largest number of tasks that ran at once. The result also has the waits that were recorded: they show how
    exact the first replay is. Compare the two replays with each other, not a replay with the recorded waits.

    With --forecast the second replay has the pollers that a forecast advises. Let the period begin where the history
    of the forecast ends: then the result says how many tasks would have kept the promised wait.
    """

    name = "whatif"
    summary = "history replayed with other slots, priorities or back-off: what the waits would have been"
    arguments = (
        *reports.PERIOD_ARGUMENTS,
        Argument("slots", "tasks that run at once, over all pollers. Default: as now", count),
        Argument("forecast", "forecast.json of the job forecast: replay the pollers that it advises", advice_of),
        Argument("now_slots", "the slots of now. Default: the most that ran at once", count),
        Argument("priority", "priority of all tasks of a queue, as mails=-5 (low first)", queue_priority, many=True),
        Argument("back_off", "a retry policy, as fixed:5s or geometric:10s,x2,max=1h. Default: as now", back_off),
        Argument("now_back_off", "the retry policy of now", back_off, "geometric:10s,x2,max=1h"),
        Argument("limit", "the most tasks to replay: the latest ones", count, 200_000),
        *reports.OUTPUT_ARGUMENTS,
    )

    def run(self, context: Context) -> reports.Figures:
        """Report. Raises JobOptionError when no option changes anything."""
        if not any(context.options[name] for name in ("slots", "forecast", "priority", "back_off")):
            raise JobOptionError("--slots", "which change? Give --slots, --forecast, --priority or --back-off")
        if context.options["slots"] and context.options["forecast"]:
            raise JobOptionError("--slots", "a forecast has its own slots: give --slots or --forecast")
        return super().run(context)

    def figures(self, context: Context, period: Period) -> tuple[reports.Figures, reports.Tables]:
        options, rows = context.options, tasks(context, period)
        now_slots = options["now_slots"] or most_at_once([(row["started"], row["ended"]) for row in rows])
        slots, advice = options["slots"] or now_slots, options["forecast"]
        other = _arrivals(rows, dict(options["priority"]))
        context.progress("replaying", 0, 2)
        now = replay(_arrivals(rows, {}), slots=now_slots, back_off=options["now_back_off"])
        context.progress("replaying", 1, 2)
        back_off = options["back_off"] or options["now_back_off"]
        then = replay(other, slots=advice.slots if advice else slots, back_off=back_off)
        recorded = [Served(row["created"], max(row["started"] - row["created"], 0), 0) for row in rows if row["once"]]
        waits = {name: waits_of(served) for name, served in (("recorded", recorded), ("now", now), ("then", then))}
        before, after = waits["now"]["p95"], waits["then"]["p95"]
        word = "shorter" if after < before else "longer" if after > before else "the same"
        sentence = f"95 % of the tasks would have waited at most {seconds(after)} instead of {seconds(before)}"
        times, waits_now = zip(*waits_over_time(now), strict=True)
        figures = {
            "summary": f"{sentence}: {word}.{advice.kept(then) if advice else ''}",
            "tasks": len(now),
            "slots_now": now_slots,
            "slots_then": max(advice.hours.values(), default=advice.poller) if advice else slots,
            **waits,
            "over_time": {
                "times": [datetime.fromtimestamp(time, UTC) for time in times],
                "now": waits_now,
                "then": [wait for _, wait in waits_over_time(then)],
            },
            "curve": {name: quantiles(served, PERCENT_STEPS) for name, served in (("now", now), ("then", then))},
        }
        return figures, {}

    def details(self, result: reports.Row) -> Iterable[str]:
        return (
            f"  wait {name}: {seconds(result['now'][name])} now, {seconds(result['then'][name])} then"
            for name in ("p50", "p95", "p99", "max")
        )


def tasks(context: Context, period: Period) -> reports.Rows:
    """Return the tasks that ran and ended, in the order of their arrival; times are in seconds since 1970."""
    context.progress("reading tasks", 0, 0)
    with reports.rows_in(context, period, tasks=REPLAY_COLUMNS) as (found,):
        timed = T.measured(T.as_of(found, period.until), "priority", "start_time")
        times = {"created": F.col("created"), "started": F.unix_micros("start_time"), "ended": F.col("ended")}
        chosen = timed.where("ended IS NOT NULL AND start_time IS NOT NULL").select(
            "queue",
            F.col("priority").cast("int"),
            F.col("retries").cast("int").alias("failures"),
            (F.col("attempts") == 1).alias("once"),
            *((micros / 1_000_000).alias(name) for name, micros in times.items()),
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


def waits_of(served: Sequence[Served]) -> dict[str, float]:
    """Return percentiles of the wait, and the mean of the time until the end."""
    names = [f"p{share * 100:g}".replace(".", "") for share in WAIT_QUANTILES]
    found = dict(zip([*names, "max"], quantiles(served, [*WAIT_QUANTILES, 1]), strict=True))
    return {**found, "mean_lead": fmean(one.lead for one in served) if served else 0.0}


def quantiles(served: Sequence[Served], shares: Sequence[float]) -> list[float]:
    """Return for each share the least wait that this share of the tasks did not exceed; 0 without tasks."""
    found: list[float] = np.quantile([one.wait for one in served] or [0.0], shares, method="inverted_cdf").tolist()
    return found


# -- the replay --------------------------------------------------------------------------------------------------------


def replay(arrivals: Sequence[Arrival], *, slots: int | Callable[[float], int], back_off: BackOff) -> list[Served]:
    """Return when each task is served with these slots, of all time or of each hour, in the order of their arrival.

    A free slot takes the due task first in (priority, due time, arrival). Each failed attempt runs as long as the last
    one did, and the task is due again after ``back_off(number of the failure)``; None gives it up there.
    """
    due = [(arrival.time, number) for number, arrival in enumerate(arrivals)]
    heapq.heapify(due)
    ready: list[tuple[int, float, int]] = []
    busy: list[float] = []  # when the running ones end
    failed = [0] * len(arrivals)
    first: list[float | None] = [None] * len(arrivals)
    ends = [0.0] * len(arrivals)
    now = due[0][0] if due else 0.0
    while due or ready:
        if not ready:
            now = max(now, due[0][0])
        while due and due[0][0] <= now:
            time, number = heapq.heappop(due)
            heapq.heappush(ready, (arrivals[number].priority, time, number))
        while busy and busy[0] <= now:
            heapq.heappop(busy)
        if len(busy) >= (slots(now) if callable(slots) else slots):
            now = min(busy[0], (now // T.HOUR_S + 1) * T.HOUR_S) if callable(slots) else busy[0]
            continue
        _, _, number = heapq.heappop(ready)
        arrival = arrivals[number]
        first[number] = now if first[number] is None else first[number]
        ends[number] = now + arrival.run
        heapq.heappush(busy, ends[number])
        if failed[number] < arrival.failures:
            failed[number] += 1
            if (delay := back_off(failed[number])) is not None:
                heapq.heappush(due, (ends[number] + delay.total_seconds(), number))
    return [
        Served(arrival.time, (first[number] or 0.0) - arrival.time, ends[number] - arrival.time)
        for number, arrival in enumerate(arrivals)
    ]


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return the largest number of spans (start, end) that any moment lies in; at least 1."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max([1, *accumulate(change for _, change in changes)])


def waits_over_time(served: Sequence[Served]) -> Iterator[tuple[float, float]]:
    """Yield (time, p95 of the wait) for each of the equal steps of time in which tasks arrived."""
    width = max((served[-1].arrival - served[0].arrival) / WAIT_CHART_STEPS, 1.0)
    for step, group in groupby(served, key=lambda one: int((one.arrival - served[0].arrival) / width)):
        yield served[0].arrival + (step + 0.5) * width, quantiles(list(group), [0.95])[0]
