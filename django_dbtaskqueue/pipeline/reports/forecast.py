"""The job ``forecast``: the pollers that each hour of the week needs, and the hours that were unusual.

The queueing model is M/M/c with Allen and Cunneen's correction: the tail of the wait is stretched by how unevenly
tasks arrive and how much their run times differ. It says what a steady hour needs; a burst inside an hour needs more.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import functions as F

from django_dbtaskqueue.core.durations import format_duration, parse_length
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.core.numbers import number
from django_dbtaskqueue.pipeline.jobs import Argument, Context, count, share
from django_dbtaskqueue.pipeline.reports import (
    ONE_HOUR,
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

LIVE_POLLERS = (
    "SELECT count(*), coalesce(max(slots), 0) FROM dbtaskqueue_poller WHERE state <> 'STOPPED' AND heartbeat_time > "
)
DEFAULT_SLOTS = 4
MAX_ANOMALIES = 50
MAX_PRINTED_ANOMALIES = 5
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HOURS_OF_WEEK = 168
RESAMPLES = 400
INTERVAL_QUANTILES = (0.05, 0.95)
MIN_SEASON_VALUES = 3  # a median of fewer values is not used
MAX_UNEVENNESS = 25.0

Hourly = dict[datetime, float]
Deviation = Callable[[datetime, float], float]
Numbers = npt.NDArray[np.float64]


class Forecast(ReportJob):
    """Learns from history how many tasks arrive in each hour of the week and how long they run, and works out how many
    pollers keep the wait: an M/M/c queue with Allen and Cunneen's correction for uneven arrivals and run times, and an
    interval that 90 % of 400 resamples of the weeks fall into. A run of a task counts each of its attempts.

    It also names the hours whose arrivals, p95 wait or failures were out of line with the same hour of other weeks
    (or days, while there are few weeks), by a score that a few wild hours cannot hide from: median and MAD.
    """

    name = "forecast"
    summary = "pollers needed in each hour of the week for a target wait, and anomalies"
    arguments = (
        *PERIOD_ARGUMENTS,
        Argument("target_wait", "wait to keep", type=parse_length, default=timedelta(seconds=30), metavar="TIME"),
        Argument("share", "of the tasks that are to keep it, as 95%", type=share, default=0.95),
        Argument("pollers", "pollers there are now. Default: the running ones in the database, else 1", type=count,
                 metavar="N"),
        Argument("slots", "tasks one poller runs at the same time. Default: a running one's, else 4", type=count,
                 metavar="N"),
        Argument("threshold", "robust standard deviations from which an hour is an anomaly", type=float, default=5.0),
        *OUTPUT_ARGUMENTS,
    )  # fmt: skip

    def figures(self, context: Context, period: Period) -> tuple[Figures, Tables]:
        """Return the forecast. Raises PipelineError when there is too little history."""
        options = context.options
        rows, service = observed(context, period)
        have, slots = fleet(context)
        weeks = by_hour_of_week(arrivals_of(rows))
        found = needs(weeks, service, Target(options["target_wait"].total_seconds(), options["share"]))
        stretches = short_stretches(found, have=have, slots=slots)
        unusual = sorted(unusual_hours(rows, options["threshold"]), key=lambda one: -abs(one.score))[:MAX_ANOMALIES]
        figures: Figures = {
            "summary": sentence(stretches, found, have=have, slots=slots, options=options),
            "since": period.since,
            "until": period.until,
            "pollers": have,
            "slots": slots,
            "run_seconds": service.mean,
            "unevenness_of_arrivals": unevenness_of(weeks),
            "unevenness_of_run_times": service.unevenness,
            "stretches": [{"when": str(one), **asdict(one)} for one in stretches],
            "hours": [asdict(one) for one in found],
            "anomalies": [asdict(one) for one in unusual],
        }
        return figures, {"needs": pa.Table.from_pylist(figures["hours"])}

    def details(self, result: Row) -> Iterable[str]:
        """Return the most unusual hours."""
        return (
            f"  {one['hour']:%a %Y-%m-%d %H:%M} {one['queue']}: {one['measure']} {number(one['value'])}, "
            f"usually {number(one['usual'])} (score {one['score']:+.1f})"
            for one in result["anomalies"][:MAX_PRINTED_ANOMALIES]
        )


def observed(context: Context, period: Period) -> tuple[Rows, Service]:
    """Return the levels by queue and hour, and how long an attempt runs. Raises PipelineError when nothing ran."""
    with tasks_of(context, T.REPORT_COLUMNS, period) as found:
        tasks = T.as_of(found, period.until).select(*T.TIMED_COLUMNS).persist()
        hours = T.hours(tasks).persist()
        context.progress("reading tasks", 0, 0)
        if hours.isEmpty():
            raise_no_tasks(context, period)
        levels = T.service_levels(period.only(hours), T.percentiles(tasks), "queue", "hour")
        rows = levels.orderBy("queue", "hour").toArrow().to_pylist()
        (runs,) = T.measured(tasks).agg(F.avg("run").alias("mean"), F.var_pop("run").alias("variance")).collect()
        hours.unpersist()
        tasks.unpersist()
    if not runs["mean"]:
        raise PipelineError(f"No task ended after it ran, from {period}: nothing says how long tasks run.")
    mean = runs["mean"] / 1_000_000
    ended, attempts = sum(row["ended"] for row in rows), sum(row["attempts"] for row in rows)
    return rows, Service(mean * attempts / ended if ended else mean, runs["variance"] / runs["mean"] ** 2)


def fleet(context: Context) -> tuple[int, int]:
    """Return the number of pollers and the slots of one: the options', else those running, else one poller of four."""
    running = slots = 0
    if context.database is not None:
        with context.database.open() as link:
            running, slots = link.run(LIVE_POLLERS + context.database.dialect.later("-60"))[0]
    return context.options["pollers"] or running or 1, context.options["slots"] or slots or DEFAULT_SLOTS


def arrivals_of(rows: Rows) -> dict[datetime, int]:
    """Return the arrivals of all queues by hour."""
    found: Counter[datetime] = Counter()
    for row in rows:
        found[row["hour"].astimezone(UTC)] += row["arrived"]
    return found


def unusual_hours(rows: Rows, threshold: float) -> Iterator[Anomaly]:
    """Yield the anomalies of every queue in arrivals, wait and failures."""
    for queue in sorted({row["queue"] for row in rows}):
        own = {row["hour"].astimezone(UTC): row for row in rows if row["queue"] == queue}
        hours = (min(own) + ONE_HOUR * step for step in range((max(own) - min(own)) // ONE_HOUR + 1))
        arrivals = {hour: own[hour]["arrived"] if hour in own else 0 for hour in hours}
        waits = {hour: row["wait_p95"] for hour, row in own.items() if row["wait_p95"] is not None}
        failed = {hour: row["failure_rate"] for hour, row in own.items() if row["ended"]}
        smallest_deviations: dict[str, tuple[Hourly, Deviation]] = {
            "arrivals": (arrivals, lambda _hour, usual: math.sqrt(max(usual, 1))),
            "wait_p95": (waits, lambda _hour, usual: 0.1 * usual + 1),
            "failure_rate": (failed, partial(_chance_of_failures, own)),
        }
        for measure, (values, least) in smallest_deviations.items():
            yield from anomalies(queue, measure, values, least=least, threshold=threshold)


def _chance_of_failures(levels: Mapping[datetime, Row], hour: datetime, usual: float) -> float:
    return math.sqrt(max(usual * (1 - usual), 0.01) / float(levels[hour]["ended"]))


def sentence(stretches: Sequence[Stretch], found: Sequence[Need], *, have: int, slots: int, options: Row) -> str:
    """Return what is to be done, in one sentence."""
    goal = f"to keep {options['share'] * 100:g} % of the waits within {format_duration(options['target_wait'])}"
    if stretches:
        worst, there = stretches[0], "is" if have == 1 else "are"
        pollers = "poller" if worst.pollers - have == 1 else "pollers"
        more = f"; {len(stretches) - 1} other stretches of the week are short, too" if len(stretches) > 1 else ""
        return (
            f"Add {worst.pollers - have} {pollers} {worst} UTC, {goal}: it needs {worst.pollers} of {slots} slots each "
            f"({worst.least} to {worst.most} in 90 % of the resampled weeks), and there {there} {have}{more}."
        )
    most = max((pollers_of(need.servers, slots) for need in found), default=0)
    spare = "" if most >= have else f"; {most} would do"
    return f"{have} pollers of {slots} slots are enough in every hour of the week {goal}{spare}."


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    """Run times: mean in seconds, and variance over the square of the mean (1 for exponential ones)."""

    mean: float
    unevenness: float = 1.0


@dataclass(frozen=True)
class Target:
    """``share`` of the tasks are to wait at most ``wait`` seconds."""

    wait: float
    share: float = 0.95


@dataclass(frozen=True)
class Need:
    """What one hour of the week needs: arrivals per hour, servers, and the interval of 90 % of the resamples."""

    hour: int  # 0 is Monday 00 to 01 UTC
    arrivals: float
    servers: int
    least: int
    most: int


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a task has to wait, with ``load`` = arrival rate times mean run time, in servers."""
    if load >= servers:
        return 1.0
    blocked = 1.0  # Erlang B by its recursion, which no load overflows
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def late(servers: int, rate: float, service: Service, target: Target, unevenness: float = 1.0) -> float:
    """Return the share of tasks that wait longer than the target; ``rate`` is in tasks per second."""
    load = rate * service.mean
    if load >= servers:
        return 1.0
    spread = max((unevenness + service.unevenness) / 2, 1e-9)
    return erlang_c(servers, load) * math.exp(-(servers / service.mean - rate) * target.wait / spread)


def servers_needed(rate: float, service: Service, target: Target, unevenness: float = 1.0) -> int:
    """Return the least number of servers that meets the target; 0 without arrivals."""
    if rate <= 0 or service.mean <= 0:
        return 0
    low = high = max(1, math.floor(rate * service.mean) + 1)
    while late(high, rate, service, target, unevenness) > 1 - target.share:
        low, high = high + 1, high * 2
    while low < high:  # the share of late ones falls as servers are added
        middle = (low + high) // 2
        enough = late(middle, rate, service, target, unevenness) <= 1 - target.share
        low, high = (low, middle) if enough else (middle + 1, high)
    return high


def by_hour_of_week(arrivals: Mapping[datetime, int]) -> dict[int, list[int]]:
    """Return the arrivals of each hour of the week, one number for each week; hours without any count as 0."""
    found: dict[int, list[int]] = {hour: [] for hour in range(HOURS_OF_WEEK)}
    if arrivals:
        hour, last = min(arrivals), max(arrivals)
        while hour <= last:
            found[hour.weekday() * 24 + hour.hour].append(arrivals.get(hour, 0))
            hour += ONE_HOUR
    return found


def unevenness_of(weeks: Mapping[int, Sequence[int]]) -> float:
    """Return the variance of hourly arrivals over their mean, seasons apart: 1 for independent arrivals."""
    known = [np.asarray(counts, dtype=float) for counts in weeks.values() if len(counts) >= MIN_SEASON_VALUES]
    mean = sum(float(counts.mean()) for counts in known)
    if not mean:
        return 1.0
    return float(np.clip(sum(float(counts.var(ddof=1)) for counts in known) / mean, 1 / MAX_UNEVENNESS, MAX_UNEVENNESS))


def needs(weeks: Mapping[int, Sequence[int]], service: Service, target: Target, *, seed: int = 0) -> list[Need]:
    """Return what each hour of the week needs that has been seen, with bootstrap intervals over the weeks."""
    random = np.random.default_rng(seed)
    unevenness = unevenness_of(weeks)

    def servers(per_hour: float) -> int:
        return servers_needed(per_hour / 3600, service, target, unevenness)

    found = []
    for hour, counts in weeks.items():
        if counts:
            means = _resampled(np.asarray(counts, dtype=float), random)
            least, most = (servers(float(edge)) for edge in np.quantile(means, INTERVAL_QUANTILES))
            mean = float(np.mean(counts))
            found.append(Need(hour, mean, servers(mean), least, most))
    return found


def _resampled(counts: Numbers, random: np.random.Generator) -> Numbers:
    if len(counts) == 1:  # one week says nothing of the next but what chance alone would do
        return random.poisson(counts[0], RESAMPLES).astype(float)
    means: Numbers = random.choice(counts, (RESAMPLES, len(counts))).mean(axis=1)
    return means


@dataclass(frozen=True)
class Stretch:
    """Neighbouring hours of one day that need more pollers than there are: from ``start`` to before ``end``."""

    start: int
    end: int
    pollers: int
    least: int
    most: int

    def __str__(self) -> str:
        return f"{DAYS[self.start // 24]} {self.start % 24:02}-{(self.end - 1) % 24 + 1:02}"


def pollers_of(servers: int, slots: int) -> int:
    """Return how many pollers with ``slots`` slots each make this number of servers."""
    return math.ceil(servers / slots)


def short_stretches(found: Sequence[Need], *, have: int, slots: int) -> list[Stretch]:
    """Return the stretches that need more than ``have`` pollers, those that need the most first."""
    stretches: list[Stretch] = []
    for need in sorted(found, key=lambda one: one.hour):
        wanted = pollers_of(need.servers, slots)
        if wanted <= have:
            continue
        one = Stretch(need.hour, need.hour + 1, wanted, pollers_of(need.least, slots), pollers_of(need.most, slots))
        before = stretches[-1] if stretches else None
        if before and before.end == need.hour and need.hour % 24:
            edges = max(before.pollers, one.pollers), max(before.least, one.least), max(before.most, one.most)
            stretches[-1] = Stretch(before.start, one.end, *edges)
        else:
            stretches.append(one)
    return sorted(stretches, key=lambda stretch: -stretch.pollers)


@dataclass(frozen=True)
class Anomaly:
    """An hour out of line with its season: ``score`` robust standard deviations above (below: negative) ``usual``."""

    queue: str
    hour: datetime
    measure: str
    value: float
    usual: float
    score: float


def anomalies(
    queue: str,
    measure: str,
    values: Mapping[datetime, float],
    *,
    least: Deviation,
    threshold: float,
) -> Iterable[Anomaly]:
    """Yield the hours whose robust seasonal score reaches the threshold.

    The season of an hour is its hour of the week where three weeks are known, else its hour of the day, else all.
    ``least(hour, usual)`` is the smallest deviation worth calling one standard deviation.
    """
    seasons: dict[tuple[str, int], list[float]] = defaultdict(list)
    for hour, value in values.items():
        for key in _keys(hour):
            seasons[key].append(value)
    for hour, value in sorted(values.items()):
        season = next((one for key in _keys(hour) if len(one := seasons[key]) >= MIN_SEASON_VALUES), None)
        if season is None:
            continue
        usual = float(np.median(season))
        spread = T.MAD_TO_SIGMA * float(np.median(np.abs(np.asarray(season) - usual)))
        score = (value - usual) / max(spread, least(hour, usual), 1e-12)
        if abs(score) >= threshold:
            yield Anomaly(queue, hour, measure, value, usual, score)


def _keys(hour: datetime) -> tuple[tuple[str, int], ...]:
    return ("week", hour.weekday() * 24 + hour.hour), ("day", hour.hour), ("all", 0)
