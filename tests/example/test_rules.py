"""The desk's rules: a table of cases. test_data.py has the whole real year."""

from datetime import timedelta
from typing import Any

import pytest

from example_project.flights import rules
from example_project.flights.rules import Award, Decision, Facts

MILES_1500_KM, MILES_3500_KM = 932, 2175  # the last whole miles within 1,500 and 3,500 km


def facts(**changes: Any) -> Facts:
    late = {"flight": 1, "departure_delay": timedelta(minutes=5), "arrival_delay": timedelta(hours=5)}
    return Facts(**{**late, "distance_miles": 500, "tail_number": "N14228", "seats": 149, **changes})


def test_decisions() -> None:
    for changes, award in [
        ({"arrival_delay": timedelta(minutes=-20)}, Award(Decision.NOT_LATE)),
        ({"arrival_delay": timedelta(minutes=179)}, Award(Decision.NOT_LATE)),
        ({"arrival_delay": timedelta(minutes=180)}, Award(Decision.PAID, 250)),
        ({"distance_miles": MILES_1500_KM}, Award(Decision.PAID, 250)),
        ({"distance_miles": MILES_1500_KM + 1}, Award(Decision.PAID, 400)),
        ({"distance_miles": MILES_3500_KM}, Award(Decision.PAID, 400)),
        ({"distance_miles": MILES_3500_KM + 1}, Award(Decision.PAID, 600)),
        ({"distance_miles": 2475, "arrival_delay": timedelta(minutes=239)}, Award(Decision.PAID, 300)),
        ({"distance_miles": 2475, "arrival_delay": timedelta(minutes=240)}, Award(Decision.PAID, 600)),
        ({"seats": 29}, Award(Decision.EXEMPT)),
        ({"seats": 30}, Award(Decision.PAID, 250)),
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
