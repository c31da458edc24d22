"""Loading the real data into the desk's tables. Idempotent: what is there stays as it is, corrections included."""

from __future__ import annotations

from collections.abc import Iterable

from example_project.flights import data
from example_project.flights.models import Airline, Flight, Plane

BATCH = 2_000


def load(flights: Iterable[data.FlightRecord]) -> None:
    """Load all airlines, the whole register, and ``flights``."""
    airlines = (Airline(code=code, name=name) for code, name in data.airlines())
    Airline.objects.bulk_create(airlines, ignore_conflicts=True)
    planes = (Plane(tail_number=tail, model=model, seats=seats) for tail, model, seats in data.planes())
    Plane.objects.bulk_create(planes, batch_size=BATCH, ignore_conflicts=True)
    Flight.objects.bulk_create(map(_flight, flights), batch_size=BATCH, ignore_conflicts=True)


def _flight(record: data.FlightRecord) -> Flight:
    return Flight(
        reference=record.reference,
        airline_id=record.carrier,
        number=record.number,
        origin=record.origin,
        destination=record.destination,
        flown_on=record.flown_on,
        scheduled_departure=record.scheduled_departure,
        departure_delay=record.departure_delay,
        arrival_delay=record.arrival_delay,
        plane_id=record.tail_number or None,
        distance_miles=record.distance_miles,
    )
