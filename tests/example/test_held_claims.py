"""A claim that waits for the airline's arrival report, and above a sum for an operator's approval."""

from datetime import timedelta

import pytest

from django_dbtaskqueue import signal
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import advance, drain
from example_project.flights import data
from example_project.flights.demo import loading
from example_project.flights.desk import APPROVED, HELD_QUEUE, hold_claim, report_arrival
from example_project.flights.models import Claim, Flight, Plane

pytestmark = pytest.mark.django_db
FOUR_HOURS = 240


@pytest.fixture
def flight() -> Flight:
    """A flight that departed, and whose arrival is not on record."""
    loading.load([next(iter(data.flights()))])
    found = Flight.objects.get()
    Plane.objects.get_or_create(pk=found.plane_id, defaults={"model": "737", "seats": 150})
    Flight.objects.update(arrival_delay=None)
    return found


def task() -> Task:
    return Task.objects.get(queue=HELD_QUEUE)


@pytest.mark.parametrize(("miles", "dollars"), [(500, 250), (3_000, 600)])
def test_a_held_claim_is_decided_after_the_report_and_above_a_sum_after_an_approval(
    flight: Flight, miles: int, dollars: int
) -> None:
    Flight.objects.update(distance_miles=miles)
    hold_claim(flight, "Ada Lovelace")
    drain(HELD_QUEUE)
    advance(timedelta(days=30))
    assert not Claim.objects.exists()

    assert report_arrival(flight.reference, FOUR_HOURS)
    drain(HELD_QUEUE)
    if dollars > 400:
        assert not Claim.objects.exists()
        advance(timedelta(days=3))
        signal(task(), APPROVED)
        drain(HELD_QUEUE)

    assert (task().status, task().result, task().attempt) == ("COMPLETED", dollars, 1)
    assert Claim.objects.get().compensation == dollars


def test_without_a_report_the_claim_ends_and_an_operator_sees_why(flight: Flight) -> None:
    hold_claim(flight, "Ada Lovelace")
    drain(HELD_QUEUE)
    advance(timedelta(days=90))
    drain(HELD_QUEUE)
    assert task().status == "ERROR"
    assert "waited for the signal" in str(task().process_result)
    assert not report_arrival("unknown", FOUR_HOURS)
