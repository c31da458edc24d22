"""The passenger's form."""

from __future__ import annotations

from typing import Any

from django import forms

from example_project.flights.data import reference_of
from example_project.flights.models import Flight


class ClaimForm(forms.Form):
    """What a passenger knows of a flight. A valid form has the ``flight``, which was not filed before."""

    flown_on = forms.DateField(label="Date", widget=forms.DateInput(attrs={"type": "date"}))
    carrier = forms.CharField(label="Airline code", max_length=2, help_text="Two letters, e.g. UA.")
    number = forms.IntegerField(label="Flight number", min_value=1, max_value=9999)
    origin = forms.CharField(label="From", max_length=3, help_text="Three letters, e.g. EWR.")
    destination = forms.CharField(label="To", max_length=3, help_text="Three letters, e.g. IAH.")
    passenger = forms.CharField(label="Your name", max_length=100)

    flight: Flight

    def clean(self) -> dict[str, Any]:
        """Find the flight by its natural reference."""
        values = super().clean() or {}
        if self.errors:
            return values
        reference = reference_of(
            values["flown_on"],
            values["carrier"].upper(),
            values["number"],
            values["origin"].upper(),
            values["destination"].upper(),
        )
        flight = Flight.objects.filter(reference=reference).select_related("filing").first()
        if flight is None:
            raise forms.ValidationError(f"There is no flight {reference} in the timetable. Check each field.")
        self.flight = flight
        if hasattr(flight, "filing"):
            self.refuse_duplicate()
        return values

    def refuse_duplicate(self) -> None:
        """Say that the flight's claim was filed before."""
        self.add_error(None, f"A claim for flight {self.flight.reference} was filed before; see its page.")
