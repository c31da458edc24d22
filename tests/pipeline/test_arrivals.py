"""What the next week brings: on real flights, over changes of the clock, by a model that wins its backtest."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_dbtaskqueue.pipeline.reports.arrivals import NAIVE, models, predict
from tests.benchmarks.forecast import flights, judged
from tests.pipeline.histories import BERLIN, HOUR, office


@pytest.fixture(scope="module")
def departures() -> dict[datetime, int]:
    return flights()


@pytest.mark.parametrize(("weeks", "most"), [pytest.param(4, 1.45, marks=pytest.mark.slow), (26, 1.6)])
def test_it_is_better_than_the_same_hour_last_week_on_real_flights(
    departures: dict[datetime, int], weeks: int, most: float
) -> None:
    found = judged(departures, ZoneInfo("America/New_York"), weeks)
    assert found.error < found.naive
    assert found.error < most
    assert 0.88 <= found.held <= 0.96  # of 90 %, in weeks that the model had not seen


@pytest.mark.parametrize("monday", [datetime(2026, 3, 9), datetime(2026, 10, 5)])
def test_a_change_of_the_clock_moves_no_hour(monday: datetime) -> None:
    arrivals = office(monday, 30)
    found = predict(arrivals, BERLIN)
    assert {hour for hour, count in found.expected.items() if count == 100} == {day * 24 + 9 for day in range(7)}
    assert (found.weeks, found.errors[NAIVE], found.coverage) == (4, 0, 1)
    assert predict(arrivals, UTC).errors[NAIVE] > 1  # what an hour of UTC makes of it


def test_an_hour_that_is_there_twice_counts_once_and_one_that_is_not_there_is_filled() -> None:
    first = datetime(2026, 10, 12, tzinfo=BERLIN).astimezone(UTC)
    even = {first + HOUR * step: 10 for step in range(24 * 22)}
    assert set(predict(even, BERLIN).expected.values()) == {10}
    spring = datetime(2026, 3, 16, tzinfo=BERLIN).astimezone(UTC)
    assert set(predict({spring + HOUR * step: 10 for step in range(24 * 15)}, BERLIN).expected.values()) == {10}


@settings(max_examples=15, deadline=None)
@given(weeks=st.integers(2, 9), level=st.floats(0, 50), jump=st.floats(-0.9, 3), seed=st.integers(0, 99))
def test_no_model_is_used_whose_backtest_is_worse_than_the_naive_one(
    weeks: int, level: float, jump: float, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    first = datetime(2026, 1, 5, tzinfo=UTC)
    rates = [level * (1 + (jump if step // 168 >= weeks // 2 else 0)) for step in range(weeks * 168)]
    arrivals = {first + HOUR * step: int(chance.poisson(rate)) for step, rate in enumerate(rates)}
    found = predict(arrivals, UTC)
    assert found.errors[found.model] <= found.errors[NAIVE]
    assert all(found.least[hour] <= found.most[hour] for hour in range(168))


def test_a_short_history_says_what_it_saw() -> None:
    first = datetime(2026, 1, 6, 22, tzinfo=UTC)
    found = predict({first: 4, first + HOUR * 3: 9}, UTC)
    assert found.expected == {46: 4, 47: 0, 48: 0, 49: 9}
    assert (found.model, found.errors, found.coverage) == (NAIVE, {}, None)


def test_the_library_s_model_is_compared_where_it_is_installed() -> None:
    pytest.importorskip("statsforecast")
    arrivals = office(datetime(2026, 3, 9), 29)
    assert set(predict(arrivals, BERLIN).errors) == set(models())
    assert "statsforecast" in models()
