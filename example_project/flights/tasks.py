"""The processors of the desk: ``claims``, and ``held-claims`` for those that wait for an arrival report."""

from __future__ import annotations

from datetime import timedelta

from django_dbtaskqueue import Complete, Fail, Geometric, Poison, processor
from django_dbtaskqueue.core.lease import Lease
from example_project.flights import rules
from example_project.flights.desk import APPROVED, HELD_QUEUE, QUEUE, REPORTED, FlightClaim
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


REPORT_TIMEOUT = timedelta(days=90)  # the airline must report until then
APPROVAL_ABOVE = 400  # US dollars, from which an operator must approve


@processor(HELD_QUEUE, payload=FlightClaim)
def settle_held(task: Lease) -> int:
    """Decide a claim once the airline has reported the arrival, and above a sum once an operator has approved it.

    Both may take weeks. Meanwhile the task is one row: it holds no slot, and spends no attempt.
    """
    minutes = task.wait_for(REPORTED, timeout=REPORT_TIMEOUT)
    dollars = task.step("assess", assess_report, task.payload.flight, minutes)
    if dollars > APPROVAL_ABOVE:
        task.wait_for(APPROVED)
    task.step("decide", decide, task.payload.flight)
    return dollars


def assess_report(reference: str, minutes: int) -> int:
    """Put the arrival on record; return what is due."""
    Flight.objects.filter(reference=reference).update(arrival_delay=minutes)
    return rules.assess(Flight.objects.facts([reference]).of(reference)).compensation


def decide(reference: str) -> None:
    """Write the decision of the desk."""
    known = Flight.objects.facts([reference]).of(reference)
    Claim.of(known, rules.assess(known)).save(force_insert=True)
