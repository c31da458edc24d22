"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig


class FlightsConfig(AppConfig):
    """The compensation desk; its processor is found in ``tasks.py`` by the queue's autodiscovery."""

    name = "example_project.flights"
    verbose_name = "Flight-delay compensation desk"
    default_auto_field = "django.db.models.BigAutoField"
