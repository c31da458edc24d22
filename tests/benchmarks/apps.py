"""The benchmarks as an app, so that its ``tasks.py`` is found."""

from __future__ import annotations

from django.apps import AppConfig


class BenchmarksConfig(AppConfig):
    """Brings the processors."""

    name = "tests.benchmarks"
    label = "benchmarks"
