"""The processor of the ``claims`` queue."""

from __future__ import annotations

from datetime import timedelta

from django_dbtaskqueue import Geometric, Poison, processor
from django_dbtaskqueue.lease import Lease
from example_project.flights import rules
from example_project.flights.desk import QUEUE, FlightClaim
from example_project.flights.models import Claim, Flight

RETRY = {
    Exception: Geometric(timedelta(seconds=0.2)),  # quick, for a demo: an arrival report may be on its way
    rules.AircraftNotRegistered: None,  # straight to an operator: a register changes in days
}


@processor(QUEUE, payload=FlightClaim, mode="atomic", retry=RETRY, max_attempts=3)
def assess(task: Lease) -> Poison | None:
    """Decide the claim and store the decision; ``atomic`` mode commits it together with the task's outcome.

    ``rules`` has the table of all outcomes.
    """
    facts = Flight.objects.facts(task.payload.flight)
    try:
        award = rules.assess(facts)
    except rules.NeverAssigned as reason:
        return Poison(str(reason))
    Claim.objects.decide(facts, award)
    return None
