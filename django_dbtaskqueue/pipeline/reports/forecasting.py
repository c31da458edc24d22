"""How many servers a load needs, and which hours were out of line. Plain numbers in, plain numbers out; no Spark.

The queueing model is M/M/c with Allen and Cunneen's correction: the tail of the wait is stretched by how unevenly
tasks arrive and how much their run times differ. It says what a steady hour needs; a burst inside an hour needs more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import numpy.typing as npt

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HOUR = timedelta(hours=1)
WEEK_HOURS = 168
RESAMPLES = 400
INTERVAL = (0.05, 0.95)
ENOUGH = 3  # values that a median is taken of
MOST_UNEVEN = 25.0


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
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
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
    found: dict[int, list[int]] = {hour: [] for hour in range(WEEK_HOURS)}
    if arrivals:
        hour, last = min(arrivals), max(arrivals)
        while hour <= last:
            found[hour.weekday() * 24 + hour.hour].append(arrivals.get(hour, 0))
            hour += HOUR
    return found


def unevenness_of(weeks: Mapping[int, Sequence[int]]) -> float:
    """Return the variance of hourly arrivals over their mean, seasons apart: 1 for independent arrivals."""
    known = [np.asarray(counts, dtype=float) for counts in weeks.values() if len(counts) >= ENOUGH]
    mean = sum(float(counts.mean()) for counts in known)
    if not mean:
        return 1.0
    return float(np.clip(sum(float(counts.var(ddof=1)) for counts in known) / mean, 1 / MOST_UNEVEN, MOST_UNEVEN))


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
            least, most = (servers(float(edge)) for edge in np.quantile(means, INTERVAL))
            mean = float(np.mean(counts))
            found.append(Need(hour, mean, servers(mean), least, most))
    return found


Numbers = npt.NDArray[np.float64]


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


def pollers(servers: int, slots: int) -> int:
    """Return how many pollers of ``slots`` slots have so many servers."""
    return math.ceil(servers / slots)


def short_stretches(found: Sequence[Need], *, have: int, slots: int) -> list[Stretch]:
    """Return the stretches that need more than ``have`` pollers, those that need the most first."""
    stretches: list[Stretch] = []
    for need in sorted(found, key=lambda one: one.hour):
        wanted = pollers(need.servers, slots)
        if wanted <= have:
            continue
        one = Stretch(need.hour, need.hour + 1, wanted, pollers(need.least, slots), pollers(need.most, slots))
        before = stretches[-1] if stretches else None
        if before and before.end == need.hour and need.hour % 24:
            edges = max(before.pollers, one.pollers), max(before.least, one.least), max(before.most, one.most)
            stretches[-1] = Stretch(before.start, one.end, *edges)
        else:
            stretches.append(one)
    return sorted(stretches, key=lambda stretch: -stretch.pollers)


# -- anomalies ---------------------------------------------------------------------------------------------------------


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
    least: Callable[[datetime, float], float],
    threshold: float,
) -> Iterable[Anomaly]:
    """Yield the hours whose robust seasonal score reaches the threshold.

    The season of an hour is its hour of the week where three weeks are known, else its hour of the day, else all.
    ``least(hour, usual)`` is the smallest deviation worth calling one standard deviation.
    """
    seasons = _seasons(values)
    for hour, value in sorted(values.items()):
        season = next((one for key in _keys(hour) if len(one := seasons[key]) >= ENOUGH), None)
        if season is None:
            continue
        usual = float(np.median(season))
        spread = 1.4826 * float(np.median(np.abs(np.asarray(season) - usual)))
        score = (value - usual) / max(spread, least(hour, usual), 1e-12)
        if abs(score) >= threshold:
            yield Anomaly(queue, hour, measure, value, usual, score)


def _keys(hour: datetime) -> tuple[tuple[str, int], ...]:
    return ("week", hour.weekday() * 24 + hour.hour), ("day", hour.hour), ("all", 0)


def _seasons(values: Mapping[datetime, float]) -> dict[tuple[str, int], list[float]]:
    seasons: dict[tuple[str, int], list[float]] = defaultdict(list)
    for hour, value in values.items():
        for key in _keys(hour):
            seasons[key].append(value)
    return seasons
