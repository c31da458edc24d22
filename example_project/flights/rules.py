"""The desk's business rules: what a passenger is owed for one flight. Pure: no database, no clock, no queue.

What the desk does with each kind of flight in the year, and why:

| the record says | flights | the task becomes | because |
|---|---|---|---|
| arrived less than 3 h late (or early) | 323,449 | COMPLETED, nothing due | nothing is owed, whatever the aircraft |
| arrived 3 h late or more, aircraft on the register | 3,454 | COMPLETED, paid (or exempt) | the normal case |
| never departed, aircraft on the register | 4,199 | COMPLETED, paid (or exempt) | cancelled is owed like late |
| departed, but no arrival delay on record | 1,175 | retried, then ERROR | the report may come; else an operator asks |
| money is due, aircraft not on the register | 1,987 | ERROR at once | seats decide; registers change in days |
| never departed, no tail number at all | 2,512 | POISON | no aircraft was ever assigned: no rule can decide it |
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

KM_PER_MILE = 1.609344
LATE = timedelta(hours=3)
VERY_LATE = timedelta(hours=4)
EXEMPT_BELOW_SEATS = 30
TARIFF = ((1_500, 250), (3_500, 400))
LONG_HAUL = 600


class Decision(StrEnum):
    """What the desk decided."""

    PAID = "paid"
    NOT_LATE = "not_late"
    EXEMPT = "exempt"

    @property
    def label(self) -> str:
        """Return the decision in the passenger's words."""
        return {
            Decision.PAID: "Compensation is due",
            Decision.NOT_LATE: "Less than three hours late: nothing is due",
            Decision.EXEMPT: "Aircraft of fewer than 30 seats: exempt",
        }[self]


class ArrivalNotRecorded(Exception):
    """The flight departed, and its arrival is not on record (yet)."""


class AircraftNotRegistered(Exception):
    """Money is due, and the register does not know the aircraft (yet)."""


class NeverAssigned(Exception):
    """The flight never departed and no aircraft was ever assigned to it, so the rules cannot decide it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is on record about a flight, by its id; None means "not on record"."""

    flight: int
    departure_delay: timedelta | None
    arrival_delay: timedelta | None
    distance_miles: int
    tail_number: str
    seats: int | None

    @property
    def cancelled(self) -> bool:
        """Return whether the flight never departed."""
        return self.departure_delay is None


@dataclass(frozen=True, slots=True)
class Award:
    """A decision, and the compensation in whole US dollars."""

    decision: Decision
    compensation: int = 0


def assess(facts: Facts) -> Award:
    """Decide a claim.

    Raises ``ArrivalNotRecorded``, ``AircraftNotRegistered`` or ``NeverAssigned`` when the facts do not allow it.
    """
    if not _delay_counts(facts):
        return Award(Decision.NOT_LATE)
    if facts.cancelled and not facts.tail_number:
        raise NeverAssigned("The flight never departed and has no tail number: no aircraft was ever assigned to it.")
    if facts.seats is None:
        raise AircraftNotRegistered(
            f"Aircraft {facts.tail_number!r} is not on the register, and its number of seats decides the claim. "
            "Add it to the register, then reprocess the task."
        )
    if facts.seats < EXEMPT_BELOW_SEATS:
        return Award(Decision.EXEMPT)
    return Award(Decision.PAID, _compensation(facts))


def minutes(delay: int | None) -> timedelta | None:
    """Return a delay on record as a duration."""
    return None if delay is None else timedelta(minutes=delay)


def kilometres(miles: int) -> int:
    """Return a distance in whole kilometres."""
    return round(miles * KM_PER_MILE)


def _delay_counts(facts: Facts) -> bool:
    if facts.cancelled:
        return True
    if facts.arrival_delay is None:
        raise ArrivalNotRecorded(
            "The flight departed, but no arrival delay is on record. "
            "Ask the airline for the arrival report, then reprocess the task."
        )
    return facts.arrival_delay >= LATE


def _compensation(facts: Facts) -> int:
    """Return the tariff by distance; a long flight less than four hours late pays half."""
    distance = kilometres(facts.distance_miles)
    for limit, amount in TARIFF:
        if distance <= limit:
            return amount
    moderately_late = facts.arrival_delay is not None and facts.arrival_delay < VERY_LATE
    return LONG_HAUL // 2 if moderately_late else LONG_HAUL
