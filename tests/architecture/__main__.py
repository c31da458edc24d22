"""``python -m tests.architecture`` prints the shape of the package in figures."""

from __future__ import annotations

from tests.architecture.figures import report

print(report())
