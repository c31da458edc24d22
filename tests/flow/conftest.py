"""Tests of the flow's stages: on PostgreSQL and on SQLite."""

from __future__ import annotations

from typing import Any

import pytest

QUEUES: dict[str, Any] = {"parcels": {"max_attempts": 4}, "letters": {}}


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": QUEUES}


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)
