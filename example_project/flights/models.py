"""The desk's tables: what the airline and the register say, what passengers filed, and what the desk decided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.db import models
from django.db.models.functions import Now
from django.urls import reverse

from example_project.flights.rules import Award, Decision, Facts, kilometres, minutes


class Airline(models.Model):
    """A carrier by its two-letter code."""

    code = models.CharField(max_length=2, primary_key=True)
    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.name


class Plane(models.Model):
    """An aircraft on the register."""

    tail_number = models.CharField(max_length=10, primary_key=True)
    model = models.CharField(max_length=100)
    seats = models.PositiveSmallIntegerField()

    def __str__(self) -> str:
        return f"{self.tail_number} ({self.model})"


class Records(dict[str, Facts]):
    """What is on record, by a flight's reference."""

    def of(self, reference: str) -> Facts:
        """Return what is on record about one flight; raise ``Flight.DoesNotExist``."""
        if reference not in self:
            raise Flight.DoesNotExist(f"There is no flight {reference!r} in the timetable.")
        return self[reference]


class FlightManager(models.Manager["Flight"]):
    """Flights."""

    def facts(self, references: Iterable[str]) -> Records:
        """Return what is on record about flights and their aircraft, with one statement."""
        columns = ("id", "departure_delay", "arrival_delay", "distance_miles", "plane_id", "plane__seats")
        rows = self.filter(reference__in=references).values_list("reference", *columns)
        return Records(
            (reference, Facts(flight, minutes(departure), minutes(arrival), miles, tail_number or "", seats))
            for reference, flight, departure, arrival, miles, tail_number, seats in rows
        )


class Flight(models.Model):
    """A scheduled departure; ``reference`` is its natural key, e.g. ``2013-01-01-UA-1545-EWR-IAH``."""

    id = models.BigAutoField(primary_key=True)
    reference = models.CharField(max_length=40)
    airline = models.ForeignKey(Airline, models.PROTECT, db_index=False)
    number = models.PositiveSmallIntegerField()
    origin = models.CharField(max_length=3)
    destination = models.CharField(max_length=3)
    flown_on = models.DateField()
    scheduled_departure = models.DateTimeField()
    departure_delay = models.SmallIntegerField(null=True, blank=True, help_text="Minutes. Empty: never departed.")
    arrival_delay = models.SmallIntegerField(null=True, blank=True, help_text="Minutes. Empty: not on record.")
    # No constraint in the database: one flight in seven names an aircraft that is not on the register.
    plane = models.ForeignKey(
        Plane, models.DO_NOTHING, null=True, blank=True, db_constraint=False, db_index=False, db_column="tail_number"
    )
    distance_miles = models.PositiveSmallIntegerField()

    objects: ClassVar[FlightManager] = FlightManager()

    class Meta:
        constraints: ClassVar[list[Any]] = [models.UniqueConstraint(fields=["reference"], name="flight_reference")]

    def __str__(self) -> str:
        return self.reference


class Filing(models.Model):
    """A passenger's claim as filed: one row for every task the desk ever enqueued, written in the same transaction."""

    flight = models.OneToOneField(Flight, models.PROTECT, primary_key=True)
    passenger = models.CharField(max_length=100)
    filed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.passenger}, {self.flight}"

    def get_absolute_url(self) -> str:
        """Return the page that shows how far the claim is."""
        return reverse("flights:claim", args=[self.flight.reference])


class Claim(models.Model):
    """What the desk decided. One row per flight: a second decision about the same flight is impossible."""

    flight = models.OneToOneField(Flight, models.PROTECT, primary_key=True)
    decision = models.CharField(max_length=20, choices=[(str(decision), decision.label) for decision in Decision])
    distance_km = models.PositiveIntegerField()
    compensation = models.PositiveIntegerField(help_text="Whole US dollars.")
    decided_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"{self.flight}: {self.decision}"

    @classmethod
    def of(cls, facts: Facts, award: Award) -> Claim:
        """Return a decision about a flight, unsaved."""
        return cls(
            flight_id=facts.flight,
            decision=award.decision,
            distance_km=kilometres(facts.distance_miles),
            compensation=award.compensation,
        )
