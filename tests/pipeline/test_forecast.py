"""What a load needs, which hours are odd, and the job that says so."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, tzinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_dbtaskqueue.pipeline.reports import forecast as f
from django_dbtaskqueue.pipeline.reports.arrivals import Prediction
from django_dbtaskqueue.pipeline.reports.forecast import Need, Service, Target, sentence
from tests.pipeline.histories import BERLIN, HOUR, MONDAY, office

TARGET = Target(wait=30)


def test_erlang_c_is_that_of_the_tables() -> None:
    assert f.erlang_c(1, 0.5) == pytest.approx(0.5)  # M/M/1: the load itself
    assert f.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert f.erlang_c(10, 8.0) == pytest.approx(0.409180, abs=1e-6)
    assert f.erlang_c(4, 4.0) == 1.0
    assert 0 < f.erlang_c(2_000, 1_950.0) < 1


@settings(max_examples=60, deadline=None)
@given(rate=st.floats(0.001, 50), run=st.floats(0.01, 60), wait=st.floats(0, 600))
def test_the_servers_needed_are_the_least_that_do(rate: float, run: float, wait: float) -> None:
    service, target = Service(run), Target(wait)
    found = f.servers_needed(rate, service, target)
    assert f.late(found, rate, service, target) <= 0.05
    assert found == 1 or f.late(found - 1, rate, service, target) > 0.05


def test_uneven_arrivals_and_run_times_need_more() -> None:
    even = f.servers_needed(1.0, Service(10, 0.1), TARGET, 0.5)
    uneven = f.servers_needed(1.0, Service(10, 8.0), TARGET, 8.0)
    assert even < uneven
    assert f.servers_needed(0, Service(10), TARGET) == 0


def test_the_need_has_the_interval_of_the_arrivals() -> None:
    coming = Prediction("any", {9: 4000.0}, {9: 1000.0}, {9: 9000.0}, {}, None, 3, 2)
    (found,) = f.needs(coming, Service(2), TARGET, 1.0)
    assert (found.arrivals_least, found.arrivals, found.arrivals_most) == (1000, 4000, 9000)
    assert found.expected < found.servers == f.servers_needed(2.5, Service(2), TARGET)


def test_neighbouring_hours_of_a_day_are_one_stretch() -> None:
    found = [Need(hour, 1.0, servers, servers - 3) for hour, servers in ((9, 9), (10, 20), (11, 4), (23, 9), (24, 9))]
    stretches = f.short_stretches(found, have=2, slots=4)
    assert [(str(one), one.pollers, one.expected) for one in stretches] == [
        ("Monday 09-11", 5, 5), ("Monday 23-24", 3, 2), ("Tuesday 00-01", 3, 2),
    ]  # fmt: skip


def odd(values: dict[datetime, float], zone: tzinfo = UTC) -> list[f.Anomaly]:
    def least(_hour: datetime, usual: float) -> float:  # as the job's
        return math.sqrt(max(usual, 1))

    return list(f.anomalies("q", "arrivals", values, least=least, threshold=5.0, zone=zone))


def test_one_wild_hour_is_named_and_hides_no_other() -> None:
    values = {MONDAY + HOUR * hour: 100.0 for hour in range(24 * 28)}
    values[MONDAY + timedelta(days=8)] = 1_000_000.0
    values[MONDAY + timedelta(days=16)] = 0.0
    assert [(one.hour, one.usual, one.score > 0) for one in odd(values)] == [
        (MONDAY + timedelta(days=8), 100.0, True), (MONDAY + timedelta(days=16), 100.0, False),
    ]  # fmt: skip


def test_a_season_and_a_change_of_the_clock_are_no_anomaly() -> None:
    assert not odd({MONDAY + HOUR * hour: 5_000.0 if hour % 24 == 9 else 10.0 for hour in range(24 * 4)})
    assert not odd({MONDAY: 1.0, MONDAY + HOUR: 1e9})  # two hours say nothing
    arrivals = office(datetime(2026, 3, 9), 30)
    hours = {min(arrivals) + HOUR * step: 0.0 for step in range(29 * 24)} | arrivals
    assert not odd(hours, BERLIN)
    assert odd(hours, UTC)


def test_it_says_when_there_are_enough() -> None:
    options = {"share": 0.95, "target_wait": timedelta(seconds=30), "timezone": "UTC"}
    need = [Need(9, 400.0, 4, 4)]
    assert sentence([], need, have=9, slots=2, options=options) == (
        "9 pollers of 2 slots are enough in every hour of the week to keep 95 % of the waits within 30s; 2 would do."
    )
    assert sentence([], need, have=2, slots=2, options=options).endswith("within 30s.")
