"""The application that child processes have and the tests' own process has not."""

from __future__ import annotations

from django.apps import AppConfig


class ChaosConfig(AppConfig):
    """Brings ``tasks.py``, and dies where the environment says."""

    name = "tests.chaos"
    label = "chaos"

    def ready(self) -> None:
        """Set the trap, which is only for processes whose environment names a point."""
        from tests.chaos import crashing  # it needs the models, which load after this module

        crashing.install()
