"""The processor of the ``claims`` queue."""

from __future__ import annotations

from datetime import timedelta

from django_dbtaskqueue import Complete, Fail, Geometric, Poison, processor
from django_dbtaskqueue.core.lease import Lease
from example_project.flights import rules
from example_project.flights.desk import QUEUE, FlightClaim
from example_project.flights.models import Claim, Flight

RETRY = {
    Exception: Geometric(timedelta(seconds=0.2)),  # quick, for a demo: an arrival report may be on its way
    rules.AircraftNotRegistered: None,  # straight to an operator: a register changes in days
}


@processor(QUEUE, payload=FlightClaim, mode="atomic", batch=100, retry=RETRY, max_attempts=3)
def assess(tasks: list[Lease]) -> list[Complete | Fail | Poison]:
    """Decide up to 100 claims with two statements; ``atomic`` mode commits the decisions together with the outcomes.

    ``rules`` has the table of all outcomes.
    """
    facts = Flight.objects.facts({task.payload.flight for task in tasks})
    outcomes: list[Complete | Fail | Poison] = []
    claims = []
    for task in tasks:
        try:
            known = facts.of(task.payload.flight)
            claims.append(Claim.of(known, rules.assess(known)))
        except rules.NeverAssigned as reason:
            outcomes.append(Poison(str(reason)))
        except (Flight.DoesNotExist, rules.ArrivalNotRecorded, rules.AircraftNotRegistered) as reason:
            outcomes.append(Fail(reason))
        else:
            outcomes.append(Complete())
    Claim.objects.bulk_create(claims)
    return outcomes
