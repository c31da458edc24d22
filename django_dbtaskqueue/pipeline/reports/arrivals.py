"""How many tasks will arrive in each hour of the next week, by the model whose backtest has the smallest error.

A week is 168 hours of the wall clock of a time zone. A backtest predicts each of the last weeks from the weeks before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

import numpy as np
from numpy.typing import NDArray

Weeks = NDArray[np.float64]  # one row of 168 hours for each week, the latest one last
Model = Callable[[Weeks], NDArray[np.float64]]

HOURS_OF_DAY, HOURS_OF_WEEK = 24, 168
NAIVE, ORDINARY, SMOOTHED = "same hour last week", "last week without unusual days", "statsforecast"
BACKTEST_WEEKS = 12
ORDINARY_WEEKS = 4  # of which the median is the usual day
MIN_ORDINARY_WEEKS = 3
MIN_SMOOTHED_WEEKS = 2
UNUSUAL_SHARE = 0.1  # a day is unusual if its total differs by more than this share,
UNUSUAL_DEVIATIONS = 2  # and by more than so many standard deviations of independent arrivals
INTERVAL_SHARE = 0.9
WIDTHS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # factors of the interval; the first that holds enough hours is taken
NORMAL_EDGE = 1.645  # standard deviations that hold 90 % of a normal distribution


@dataclass(frozen=True)
class Prediction:
    """Arrivals in each hour of the week, which begins on Monday at midnight; hours without history are not there.

    ``least`` and ``most`` are the interval that 90 % of the hours should lie in. ``coverage`` is the share that did in
    the backtest, each week judged by the weeks before it; None when fewer than three weeks are known. ``errors`` is
    the mean absolute error of each model in the backtest.
    """

    model: str
    expected: Mapping[int, float]
    least: Mapping[int, float]
    most: Mapping[int, float]
    errors: Mapping[str, float]
    coverage: float | None
    weeks: int
    weeks_tested: int


def predict(arrivals: Mapping[datetime, int], zone: tzinfo) -> Prediction:
    """Return what the week after the last arrival brings. The keys of ``arrivals`` are whole hours of UTC."""
    begin, counts = wall_clock(arrivals, zone)
    midnight = -begin.hour % HOURS_OF_DAY
    days = (len(counts) - midnight) // HOURS_OF_DAY
    number = days * HOURS_OF_DAY // HOURS_OF_WEEK
    if number < 1:
        known = {_hour_of_week(begin + timedelta(hours=hour)): float(count) for hour, count in enumerate(counts)}
        least, most = ({hour: _edge(count, side * NORMAL_EDGE) for hour, count in known.items()} for side in (-1, 1))
        return Prediction(NAIVE, known, least, most, {}, None, 0, 0)
    end = midnight + days * HOURS_OF_DAY
    weeks = counts[end - number * HOURS_OF_WEEK : end].reshape(number, HOURS_OF_WEEK)
    first = _hour_of_week(begin + timedelta(hours=end))
    return _predicted(weeks, [(first + hour) % HOURS_OF_WEEK for hour in range(HOURS_OF_WEEK)])


def _predicted(weeks: Weeks, hours: list[int]) -> Prediction:
    tested = range(max(1, len(weeks) - BACKTEST_WEEKS), len(weeks))
    found = {name: np.array([model(weeks[:week]) for week in tested]) for name, model in models().items()}
    errors = {
        name: float(np.abs(weeks[tested.start :] - values).mean()) for name, values in found.items() if len(tested)
    }
    name = min(errors, key=lambda one: errors[one], default=NAIVE)  # of equal ones the first
    expected = models()[name](weeks)
    scores = [_scores(actual, value) for actual, value in zip(weeks[tested.start :], found[name], strict=True)]
    coverage: float | None = None
    width = 1.0
    for width in WIDTHS if len(scores) > 1 else ():
        coverage = float(np.mean([_held(scores[week], _edges(scores[:week], width)) for week in range(1, len(scores))]))
        if coverage >= INTERVAL_SHARE:
            break
    edges = _edges(scores, width) if scores else (-NORMAL_EDGE, NORMAL_EDGE)
    least, most = (
        {hour: _edge(float(value), edge) for hour, value in zip(hours, expected, strict=True)} for edge in edges
    )
    means = {hour: float(value) for hour, value in zip(hours, expected, strict=True)}
    return Prediction(name, means, least, most, errors, coverage, len(weeks), len(tested))


def wall_clock(arrivals: Mapping[datetime, int], zone: tzinfo) -> tuple[datetime, NDArray[np.float64]]:
    """Return the first hour, and the arrivals of it and each later hour of the zone's clock, none left out.

    When clocks are put back an hour is there twice: its value is the mean. When they are put forward an hour is not
    there: it gets the value of a week before, or else of the hour before.
    """
    found: dict[datetime, list[int]] = defaultdict(list)
    hour, last = min(arrivals), max(arrivals)
    while hour <= last:
        local = hour.astimezone(zone).replace(minute=0, tzinfo=None, fold=0)
        found[local].append(arrivals.get(hour, 0))
        hour += timedelta(hours=1)
    begin, end = min(found), max(found)
    counts: list[float] = []
    for step in range((end - begin) // timedelta(hours=1) + 1):
        values = found.get(begin + timedelta(hours=step))
        earlier = counts[-HOURS_OF_WEEK] if len(counts) >= HOURS_OF_WEEK else counts[-1] if counts else 0.0
        counts.append(sum(values) / len(values) if values else earlier)
    return begin, np.array(counts)


# -- the models --------------------------------------------------------------------------------------------------------


def models() -> Mapping[str, Model]:
    """Return the models by name. One is of the library statsforecast, if it is installed."""
    found: dict[str, Model] = {ORDINARY: ordinary, NAIVE: naive}
    with suppress(ImportError):
        from statsforecast.models import SeasonalExponentialSmoothingOptimized

        smoothing = SeasonalExponentialSmoothingOptimized(HOURS_OF_WEEK)

        def smoothed(weeks: Weeks) -> NDArray[np.float64]:
            if len(weeks) < MIN_SMOOTHED_WEEKS:
                return naive(weeks)
            mean: NDArray[np.float64] = np.maximum(smoothing.forecast(y=weeks.ravel(), h=HOURS_OF_WEEK)["mean"], 0)
            return mean

        found[SMOOTHED] = smoothed
    return found


def naive(weeks: Weeks) -> NDArray[np.float64]:
    """Return the last week."""
    last: NDArray[np.float64] = weeks[-1]
    return last


def ordinary(weeks: Weeks) -> NDArray[np.float64]:
    """Return the last week; instead of an unusual day, as a holiday, the median of that day of the week."""
    if len(weeks) < MIN_ORDINARY_WEEKS:
        return naive(weeks)
    days = weeks[-ORDINARY_WEEKS:].reshape(-1, 7, HOURS_OF_DAY)
    totals = days.sum(axis=2)
    usual = np.median(totals, axis=0)
    unusual = np.abs(totals[-1] - usual) > np.maximum(UNUSUAL_SHARE * usual, UNUSUAL_DEVIATIONS * np.sqrt(usual))
    return np.where(unusual[:, None], np.median(days, axis=0), days[-1]).ravel()


def _scores(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the errors in standard deviations of independent arrivals, which makes hours comparable."""
    scores: NDArray[np.float64] = (actual - expected) / np.sqrt(expected + 1)
    return scores


def _edges(scores: list[NDArray[np.float64]], width: float) -> tuple[float, float]:
    low, high = np.quantile(np.concatenate(scores), ((1 - INTERVAL_SHARE) / 2, (1 + INTERVAL_SHARE) / 2))
    return min(float(low) * width, 0.0), max(float(high) * width, 0.0)


def _held(score: NDArray[np.float64], edges: tuple[float, float]) -> float:
    return float(np.mean((edges[0] <= score) & (score <= edges[1])))


def _edge(expected: float, score: float) -> float:
    return max(expected + score * math.sqrt(expected + 1), 0.0)


def _hour_of_week(time: datetime) -> int:
    return time.weekday() * HOURS_OF_DAY + time.hour
