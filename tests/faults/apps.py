"""The application of the fault runs."""

from __future__ import annotations

import os

from django.apps import AppConfig


class FaultsConfig(AppConfig):
    """Brings ``tasks.py``, and breaks the package where the environment says so."""

    name = "tests.faults"
    label = "faults"

    def ready(self) -> None:
        """Apply the mutation, if there is one."""
        mutation = os.environ.get("FAULTS_MUTATION")
        if mutation:
            from tests.faults import mutations  # it needs the models, which load after this module

            mutations.apply(mutation)
