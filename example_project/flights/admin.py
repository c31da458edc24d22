"""The desk's tables in the admin. Filings and claims are records: nobody edits them by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from example_project.flights.models import Airline, Claim, Filing, Flight, Plane

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin


class RecordAdmin(ModelAdmin):
    """A list without a count of the whole table, over rows that only the desk writes."""

    show_full_result_count = False
    list_select_related = ("flight",)
    search_fields = ("flight__reference",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody adds a record by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody changes a record by hand."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody deletes a record by hand."""
        return False


@admin.register(Airline)
class AirlineAdmin(ModelAdmin):
    """Airlines."""

    list_display = ("code", "name")


@admin.register(Plane)
class PlaneAdmin(ModelAdmin):
    """The register: add an aircraft here, then reprocess the tasks that miss it."""

    list_display = ("tail_number", "model", "seats")
    search_fields = ("tail_number",)
    show_full_result_count = False


@admin.register(Flight)
class FlightAdmin(ModelAdmin):
    """Flights: enter a late arrival report here, then reprocess the task."""

    list_display = ("reference", "airline", "departure_delay", "arrival_delay", "plane_id", "distance_miles")
    list_select_related = ("airline",)
    raw_id_fields = ("plane",)
    search_fields = ("reference",)
    show_full_result_count = False


@admin.register(Filing)
class FilingAdmin(RecordAdmin):
    """What passengers filed."""

    list_display = ("flight", "passenger", "filed_at")


@admin.register(Claim)
class ClaimAdmin(RecordAdmin):
    """What the desk decided."""

    list_display = ("flight", "decision", "compensation", "distance_km", "decided_at")
