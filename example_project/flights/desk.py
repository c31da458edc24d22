"""Filing claims. Each function writes the filing and enqueues its task in one transaction: both commit, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db import transaction

from django_dbtaskqueue import enqueue, enqueue_many, signal
from django_dbtaskqueue.operations import lookup
from example_project.flights.models import Filing, Flight

QUEUE = "claims"
HELD_QUEUE = "held-claims"  # of flights whose arrival is not on record
REPORTED, APPROVED = "arrival-reported", "approved"  # the signals that a held claim waits for


@dataclass(frozen=True, slots=True)
class FlightClaim:
    """The payload of a task in the ``claims`` queue: which flight (its reference), and for whom."""

    flight: str
    passenger: str


def file_claim(flight: Flight, passenger: str) -> Filing:
    """File one claim. Atomic, also inside a caller's transaction.

    Raises ``IntegrityError`` when the flight was filed before.
    """
    with transaction.atomic():
        filing = Filing.objects.create(flight=flight, passenger=passenger)
        enqueue(QUEUE, flight.reference, FlightClaim(flight.reference, passenger))
    return filing


def file_claims(flights: Sequence[Flight], passenger: str) -> int:
    """File one claim for each of ``flights`` on behalf of ``passenger``; return how many. All of them, or none.

    Raises ``IntegrityError`` when one of the flights was filed before.
    """
    with transaction.atomic():
        Filing.objects.bulk_create(Filing(flight=flight, passenger=passenger) for flight in flights)
        claims = [(flight.reference, FlightClaim(flight.reference, passenger)) for flight in flights]
        return enqueue_many(QUEUE, claims).enqueued


def hold_claim(flight: Flight, passenger: str) -> Filing:
    """File a claim for a flight whose arrival is not on record. It waits for ``report_arrival``."""
    with transaction.atomic():
        filing = Filing.objects.create(flight=flight, passenger=passenger)
        enqueue(HELD_QUEUE, flight.reference, FlightClaim(flight.reference, passenger))
    return filing


def report_arrival(reference: str, minutes: int) -> bool:
    """Pass the airline's report to the claim that waits for it; return whether there is one."""
    task = lookup.find(HELD_QUEUE, reference)
    if task is None:
        return False
    signal(task, REPORTED, minutes, actor="airline")
    return True
