"""The job ``forecast``: the pollers that each hour of the week needs, and the hours that were unusual.

`whatif` replays the result on recorded tasks.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, functions as F

from django_dbtaskqueue.core.durations import format_duration, parse_length, percent, thousands
from django_dbtaskqueue.pipeline import reports
from django_dbtaskqueue.pipeline.jobs import Argument, Context, NoTasks, above_zero, count, reader, share
from django_dbtaskqueue.pipeline.reports import ONE_HOUR, KeptDays, Period, TaskRows, transforms as T
from django_dbtaskqueue.pipeline.spark import Cached

# -- arrivals ----------------------------------------------------------------------------------------------------------

# A week is 168 hours of the wall clock of a time zone. A backtest predicts each of the last weeks from those before.

Weeks = NDArray[np.float64]  # one row of 168 hours for each week, the latest one last
Week = NDArray[np.float64]
Model = Callable[[Weeks], Week]

HOURS_OF_DAY, HOURS_OF_WEEK = 24, 168
NAIVE, ORDINARY, SMOOTHED = "same hour last week", "last week without unusual days", "statsforecast"
BACKTEST_WEEKS = 12
ORDINARY_WEEKS = 4  # of which the median is the usual day
MIN_ORDINARY_WEEKS, MIN_SMOOTHED_WEEKS = 3, 2
UNUSUAL_SHARE = 0.1  # a day is unusual if its total differs by more than this share,
UNUSUAL_DEVIATIONS = 2  # and by more than so many standard deviations of independent arrivals
INTERVAL_SHARE = 0.9
WIDTHS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # factors of the interval; the first that holds enough hours is taken
NORMAL_EDGES = (-1.645, 1.645)  # standard deviations that hold 90 % of a normal distribution


class Prediction(NamedTuple):
    """Arrivals in each hour of the week, which begins on Monday at midnight; hours without history are not there.

    90 % of the hours should lie between the ``edges``, in standard deviations; in the backtest the share ``coverage``
    did (None: fewer than three weeks are known). ``errors`` are the models' mean absolute ones in the backtest.
    """

    model: str
    expected: Mapping[int, float]
    edges: tuple[float, float]
    errors: Mapping[str, float]
    coverage: float | None
    weeks: int
    weeks_tested: int

    def interval(self, hour: int) -> tuple[float, float]:
        """Return the least and the most arrivals of an hour."""
        mean = self.expected[hour]
        least, most = (max(mean + edge * math.sqrt(mean + 1), 0.0) for edge in self.edges)
        return least, most


def predict(arrivals: Mapping[datetime, int], zone: tzinfo) -> Prediction:
    """Return what the week after the last arrival brings. The keys of ``arrivals`` are whole hours of UTC."""
    begin, counts = wall_clock(arrivals, zone)
    midnight = -begin.hour % HOURS_OF_DAY
    days = (len(counts) - midnight) // HOURS_OF_DAY
    number, end = days // 7, midnight + days * HOURS_OF_DAY
    if number < 1:
        known = {_hour_of_week(begin + timedelta(hours=hour)): float(count) for hour, count in enumerate(counts)}
        return Prediction(NAIVE, known, NORMAL_EDGES, {}, None, 0, 0)
    weeks = counts[end - number * HOURS_OF_WEEK : end].reshape(number, HOURS_OF_WEEK)
    first = _hour_of_week(begin + timedelta(hours=end))
    return _predicted(weeks, [(first + hour) % HOURS_OF_WEEK for hour in range(HOURS_OF_WEEK)])


def _predicted(weeks: Weeks, hours: list[int]) -> Prediction:
    tested = range(max(1, len(weeks) - BACKTEST_WEEKS), len(weeks))
    actual, known = weeks[tested.start :], models()
    found = {
        name: np.array([model(weeks[:week]) for week in tested]).reshape(actual.shape) for name, model in known.items()
    }
    errors = {name: float(np.abs(actual - values).mean()) for name, values in found.items() if len(tested)}
    name = min(errors, key=lambda one: errors[one], default=NAIVE)  # of equal ones the first
    # In standard deviations of independent arrivals, which makes hours comparable.
    scores = (actual - found[name]) / np.sqrt(found[name] + 1)
    coverage, width = None, 1.0
    for width in WIDTHS if len(scores) > 1 else ():
        edges = np.array([_edges(scores[:week], width) for week in range(1, len(scores))])
        coverage = float(np.mean((edges[:, :1] <= scores[1:]) & (scores[1:] <= edges[:, 1:])))
        if coverage >= INTERVAL_SHARE:
            break
    means: dict[int, float] = dict(zip(hours, known[name](weeks).tolist(), strict=True))
    last = _edges(scores, width) if len(scores) else NORMAL_EDGES
    return Prediction(name, means, last, errors, coverage, len(weeks), len(tested))


def wall_clock(arrivals: Mapping[datetime, int], zone: tzinfo) -> tuple[datetime, NDArray[np.float64]]:
    """Return the first hour, and the arrivals of it and each later hour of the zone's clock, none left out.

    When clocks are put back an hour is there twice: its value is the mean. When they are put forward an hour is not
    there: it gets the value of a week before, or else of the hour before.
    """
    counts = pd.Series(arrivals, dtype=float).sort_index().asfreq("h", fill_value=0)
    counts.index = counts.index.tz_convert(zone).tz_localize(None).floor("h")
    counts = counts.groupby(level=0).mean().asfreq("h")
    counts = counts.fillna(counts.shift(HOURS_OF_WEEK)).ffill()
    return counts.index[0].to_pydatetime(), counts.to_numpy()


def models() -> Mapping[str, Model]:
    """Return the models by name. One is of the library statsforecast, if it is installed."""
    found: dict[str, Model] = {ORDINARY: ordinary, NAIVE: itemgetter(-1)}
    with suppress(ImportError):
        from statsforecast.models import SeasonalExponentialSmoothingOptimized

        smoothing = SeasonalExponentialSmoothingOptimized(HOURS_OF_WEEK)
        found[SMOOTHED] = lambda weeks: (
            np.maximum(smoothing.forecast(y=weeks.ravel(), h=HOURS_OF_WEEK)["mean"], 0)
            if len(weeks) >= MIN_SMOOTHED_WEEKS
            else weeks[-1]
        )
    return found


def ordinary(weeks: Weeks) -> Week:
    """Return the last week; instead of an unusual day, as a holiday, the median of that day of the week."""
    last: Week = weeks[-1]
    if len(weeks) < MIN_ORDINARY_WEEKS:
        return last
    days = weeks[-ORDINARY_WEEKS:].reshape(-1, 7, HOURS_OF_DAY)
    totals = days.sum(axis=2)
    usual = np.median(totals, axis=0)
    unusual = np.abs(totals[-1] - usual) > np.maximum(UNUSUAL_SHARE * usual, UNUSUAL_DEVIATIONS * np.sqrt(usual))
    return np.where(unusual[:, None], np.median(days, axis=0), days[-1]).ravel()


def _edges(scores: Weeks, width: float) -> tuple[float, float]:
    low, high = np.quantile(scores, ((1 - INTERVAL_SHARE) / 2, (1 + INTERVAL_SHARE) / 2))
    return min(float(low) * width, 0.0), max(float(high) * width, 0.0)


def _hour_of_week(time: datetime) -> int:
    return time.weekday() * HOURS_OF_DAY + time.hour


# -- forecast ----------------------------------------------------------------------------------------------------------

__all__ = ["Forecast"]

LIVE_POLLERS = (
    "SELECT count(*), coalesce(max(slots), 0) FROM dbtaskqueue_poller WHERE state <> 'STOPPED' AND heartbeat_time > "
)
DEFAULT_SLOTS = 4
MAX_ANOMALIES = 50
MAX_PRINTED_ANOMALIES = 5
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MINUTES_OF_HOUR = 60
MIN_SEASON_VALUES = 3  # a median of fewer values is not used
MAX_UNEVENNESS = 25.0

Deviation = Callable[[datetime, float], float]

time_zone = reader(ZoneInfo, "a time zone. Write it as Europe/Berlin")


class Forecast(reports.ReportJob):
    """Predicts how many tasks arrive in each hour of the next week, and computes how many pollers keep the wait: an
    M/M/c queue with Allen and Cunneen's correction for uneven arrivals and run times. A run of a task counts each of
    its attempts. The hours are those of the clocks of --timezone.

    Several models predict each of the last weeks from the weeks before it; the one with the smallest error is used.
    One is "same hour last week", another is of the library statsforecast, if it is installed. The interval of 90 %
    is that of the model's errors; the pollers are for its upper edge. The result says what share the interval held.

    It also names the hours whose arrivals, p95 wait or failures differ from the same hour of other weeks (or days,
    while there are few weeks), by a score of median and MAD, which a few extreme hours do not distort.
    """

    name = "forecast"
    summary = "pollers needed in each hour of the week for a target wait, and anomalies"
    arguments = (
        *reports.PERIOD_ARGUMENTS,
        Argument("target_wait", "wait to keep", parse_length, timedelta(seconds=30)),
        Argument("share", "of the tasks that are to keep it, as 95%", share, 0.95),
        Argument("pollers", "pollers there are now. Default: the running ones in the database, else 1", count),
        Argument("slots", "tasks one poller runs at the same time. Default: a running one's, else 4", count),
        Argument("timezone", "time zone of the hours of the week. Default: the project's, else UTC", time_zone, "UTC"),
        Argument("threshold", "robust standard deviations from which an hour is an anomaly", above_zero, 5.0),
        *reports.OUTPUT_ARGUMENTS,
    )

    def figures(self, context: Context, period: Period) -> tuple[reports.Figures, reports.Tables]:
        """Return the forecast. Raises NoTasks when there is too little history."""
        options = context.options
        zone = options["timezone"]
        rows, service, unevenness = observed(context, period, kept := KeptDays(context, period))
        have, slots = fleet(context)
        arrivals: Counter[datetime] = Counter()
        for row in rows:
            arrivals[row["hour"].astimezone(UTC)] += row["arrived"]
        for edge in (period.since, options["until"] and period.until - ONE_HOUR):
            if edge is not None:
                arrivals[edge] += 0  # the history begins and ends there, whether or not a task arrived
        coming = predict(arrivals, zone)
        target = Target(options["target_wait"].total_seconds(), options["share"])
        found = needs(coming, service, target, unevenness)
        stretches = short_stretches(found, have=have, slots=slots)
        queues = sorted({row["queue"] for row in rows})
        unusual = [one for queue in queues for one in _unusual_hours(rows, queue, options["threshold"], zone)]
        unusual = sorted(unusual, key=lambda one: -abs(one.score))[:MAX_ANOMALIES]
        figures: reports.Figures = {
            "summary": advice(stretches, found, have=have, slots=slots, options=options),
            "time_zone": str(zone),
            "target_wait": target.wait,
            "share": target.share,
            "pollers": have,
            "slots": slots,
            "run_seconds": service.mean,
            "unevenness_of_arrivals": unevenness,
            "unevenness_of_run_times": service.unevenness,
            **{name: getattr(coming, name) for name in ("model", "coverage", "weeks", "weeks_tested")},
            "errors": [{"model": name, "error": error} for name, error in coming.errors.items()],
            "stretches": [{"when": str(one), **one._asdict()} for one in stretches],
            "hours": [one._asdict() for one in found],
            "anomalies": [one._asdict() for one in unusual],
            "days_kept": len(kept.files),
        }
        return figures, {"needs": pa.Table.from_pylist(figures["hours"])}

    def details(self, result: reports.Row) -> Iterable[str]:
        if errors := {one["model"]: one["error"] for one in result["errors"]}:
            held = "not measured" if result["coverage"] is None else percent(result["coverage"])
            yield (
                f"  arrivals: {result['model']}; mean error {thousands(errors[result['model']])} an hour "
                f"({NAIVE}: {thousands(errors[NAIVE])}); weeks tested: {result['weeks_tested']}; "
                f"hours in the 90 % interval: {held}"
            )
        yield from (
            f"  {one['hour']:%a %Y-%m-%d %H:%M} {one['queue']}: {one['measure']} {thousands(one['value'])}, "
            f"usually {thousands(one['usual'])} (score {one['score']:+.1f})"
            for one in result["anomalies"][:MAX_PRINTED_ANOMALIES]
        )


def observed(context: Context, period: Period, kept: KeptDays) -> "tuple[reports.Rows, Service, float]":
    """Return the levels by queue and hour, how long an attempt runs, and the unevenness of arrivals. Raises NoTasks."""
    with reports.rows_in(context, period, kept, tasks=T.TIMED_COLUMNS) as (found,), Cached() as cached:
        tasks = cached.hold(T.as_of(found, period.until))
        rest = TaskRows(tasks, None, cached.hold(T.hour_parts(tasks)))
        by_hour = cached.hold(kept.part("hours", rest))
        context.progress("reading tasks", 0, 0)
        if by_hour.isEmpty():
            reports.raise_no_tasks(context, period)
        times = T.percentiles(kept.part("sketches", rest), by_hour)
        levels = T.service_levels(period.only(T.hours(by_hour)), times, "queue", "hour")
        rows = levels.orderBy("queue", "hour").toArrow().to_pylist()
        unevenness = unevenness_of(period.only(kept.part("minutes", rest), step_s=T.MINUTE_S))
        (runs,) = by_hour.agg(*(F.sum(name).alias(name) for name in ("runs", "run_seconds", "run_squares"))).collect()
    if not runs["run_seconds"]:
        raise NoTasks(f"No task ended after it ran, from {period}: nothing says how long tasks run.")
    mean = runs["run_seconds"] / runs["runs"]  # in microseconds
    variance = max(runs["run_squares"] / runs["runs"] - mean**2, 0.0)
    ended, attempts = sum(row["ended"] for row in rows), sum(row["attempts"] for row in rows)
    return rows, Service(mean / 1_000_000 * (attempts / ended if ended else 1), variance / mean**2), unevenness


def unevenness_of(minutes: DataFrame) -> float:
    """Return the variance over the mean of arrivals per minute within an hour, of `minute_parts`; 1 if independent."""
    by_minute = minutes.groupBy("hour").agg(F.sum("arrived").cast("double").alias("tasks"))
    hours = by_minute.groupBy(F.floor(F.col("hour") / MINUTES_OF_HOUR))
    sums_of_hours = hours.agg(F.sum("tasks").alias("tasks"), F.sum(F.col("tasks") ** 2).alias("squares"))
    variance = F.sum(F.col("squares") - F.col("tasks") ** 2 / MINUTES_OF_HOUR).alias("variance")
    (sums,) = sums_of_hours.agg(F.sum("tasks").alias("mean"), variance).collect()
    if not sums["mean"]:
        return 1.0
    found = sums["variance"] * MINUTES_OF_HOUR / (MINUTES_OF_HOUR - 1) / sums["mean"]
    return float(np.clip(found, 1 / MAX_UNEVENNESS, MAX_UNEVENNESS))


def fleet(context: Context) -> tuple[int, int]:
    """Return the number of pollers and the slots of one: the options', else those running, else one poller of four."""
    running = slots = 0
    if context.database is not None:
        with context.database.open() as link:
            running, slots = link.run(LIVE_POLLERS + context.database.dialect.later("-60"))[0]
    return context.options["pollers"] or running or 1, context.options["slots"] or slots or DEFAULT_SLOTS


def _unusual_hours(rows: reports.Rows, queue: str, threshold: float, zone: tzinfo) -> "Iterator[Anomaly]":
    own = {row["hour"].astimezone(UTC): row for row in rows if row["queue"] == queue}
    hours = (min(own) + ONE_HOUR * step for step in range((max(own) - min(own)) // ONE_HOUR + 1))
    arrivals = {hour: own[hour]["arrived"] if hour in own else 0 for hour in hours}
    waits = {hour: row["wait_p95"] for hour, row in own.items() if row["wait_p95"] is not None}
    failures = {hour: row["failure_rate"] for hour, row in own.items() if row["ended"]}
    measures: dict[str, tuple[dict[datetime, float], Deviation]] = {
        "arrivals": (arrivals, lambda _hour, usual: math.sqrt(max(usual, 1))),
        "wait_p95": (waits, lambda _hour, usual: 0.1 * usual + 1),
        "failure_rate": (failures, lambda hour, usual: math.sqrt(max(usual * (1 - usual), 0.01) / own[hour]["ended"])),
    }
    for measure, (values, least) in measures.items():
        yield from anomalies(queue, measure, values, least=least, threshold=threshold, zone=zone)


def advice(stretches: "list[Stretch]", found: "list[Need]", *, have: int, slots: int, options: reports.Row) -> str:
    """Return what is to be done, in one sentence."""
    goal = f"to keep {options['share'] * 100:g} % of the waits within {format_duration(options['target_wait'])}"
    if stretches:
        worst, there = stretches[0], "is" if have == 1 else "are"
        pollers = "poller" if worst.pollers - have == 1 else "pollers"
        more = f"; {len(stretches) - 1} other stretches of the week are short, too" if len(stretches) > 1 else ""
        return (
            f"Add {worst.pollers - have} {pollers} {worst} {options['timezone']}, {goal}: it needs {worst.pollers} "
            f"of {slots} slots each ({worst.expected} for the expected arrivals), and there {there} {have}{more}."
        )
    most = max((math.ceil(need.servers / slots) for need in found), default=0)
    spare = "" if most >= have else f"; {most} would do"
    return f"{have} pollers of {slots} slots are enough in every hour of the week {goal}{spare}."


# -- the model ---------------------------------------------------------------------------------------------------------


class Service(NamedTuple):
    """Run times: mean in seconds, and variance over the square of the mean (1 for exponential ones)."""

    mean: float
    unevenness: float = 1.0


class Target(NamedTuple):
    """``share`` of the tasks are to wait at most ``wait`` seconds."""

    wait: float
    share: float = 0.95


class Need(NamedTuple):
    """What an hour of the week needs: servers for the most arrivals of the interval, and for the expected ones."""

    hour: int  # 0 is Monday 00 to 01
    arrivals: float
    servers: int
    expected: int
    arrivals_least: float = 0.0
    arrivals_most: float = 0.0


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

    def enough(servers: int) -> bool:
        return late(servers, rate, service, target, unevenness) <= 1 - target.share

    low = high = max(1, math.floor(rate * service.mean) + 1)
    while not enough(high):
        low, high = high + 1, high * 2
    return bisect_left(range(high), True, low, key=enough)  # the share of late ones falls as servers are added


def needs(coming: Prediction, service: Service, target: Target, unevenness: float) -> list[Need]:
    """Return what each hour of the week needs that has been seen: replays kept the promise for the upper edge only."""
    found = []
    for hour, mean in sorted(coming.expected.items()):
        least, most = coming.interval(hour)
        servers, expected = (servers_needed(rate / 3600, service, target, unevenness) for rate in (most, mean))
        found.append(Need(hour, mean, servers, expected, least, most))
    return found


class Stretch(NamedTuple):
    """Neighbouring hours of one day that need more pollers than there are, and what the busiest of them needs."""

    start: int
    end: int
    pollers: int
    expected: int

    def __str__(self) -> str:
        return f"{DAYS[self.start // 24]} {self.start % 24:02}-{(self.end - 1) % 24 + 1:02}"


def short_stretches(found: Sequence[Need], *, have: int, slots: int) -> list[Stretch]:
    """Return the stretches that need more than ``have`` pollers, those that need the most first."""
    short = [need for need in sorted(found, key=attrgetter("hour")) if math.ceil(need.servers / slots) > have]
    # Of neighbouring hours the place in the list and the hour differ by the same number.
    neighbours = groupby(enumerate(short), lambda one: (one[1].hour - one[0], one[1].hour // HOURS_OF_DAY))
    stretches = []
    for hours in ([need for _place, need in group] for _key, group in neighbours):
        most = (max(need.servers for need in hours), max(need.expected for need in hours))
        stretches.append(Stretch(hours[0].hour, hours[-1].hour + 1, *(math.ceil(one / slots) for one in most)))
    return sorted(stretches, key=lambda stretch: -stretch.pollers)


class Anomaly(NamedTuple):
    """An hour unlike its season: ``score`` robust standard deviations above (below: negative) ``usual``."""

    queue: str
    hour: datetime
    measure: str
    value: float
    usual: float
    score: float


def anomalies(
    queue: str, measure: str, values: Mapping[datetime, float], *, least: Deviation, threshold: float,
    zone: tzinfo = UTC,
) -> Iterable[Anomaly]:  # fmt: skip
    """Yield the hours whose robust seasonal score reaches the threshold.

    The season of an hour is its hour of the week where three weeks are known, else its hour of the day, else all.
    ``least(hour, usual)`` is the smallest standard deviation.
    """
    seasons: dict[tuple[str, int], list[float]] = defaultdict(list)
    local = {hour: hour.astimezone(zone) for hour in values}
    keys = {hour: (("week", _hour_of_week(one)), ("day", one.hour), ("all", 0)) for hour, one in local.items()}
    for hour, value in values.items():
        for key in keys[hour]:
            seasons[key].append(value)
    for hour, value in sorted(values.items()):
        season = next((one for key in keys[hour] if len(one := seasons[key]) >= MIN_SEASON_VALUES), None)
        if season is None:
            continue
        usual = float(np.median(season))
        spread = T.MAD_TO_SIGMA * float(np.median(np.abs(np.asarray(season) - usual)))
        score = (value - usual) / max(spread, least(hour, usual), 1e-12)
        if abs(score) >= threshold:
            yield Anomaly(queue, hour, measure, value, usual, score)
