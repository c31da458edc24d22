"""Real connections, real commits: nothing here runs inside a test's transaction."""

from typing import Any

import pytest

STRATEGIES = {
    "postgresql-skip_locked": ("default", "skip_locked"),
    "postgresql-optimistic": ("default", "optimistic"),
    "sqlite-single_writer": ("sqlite", "auto"),
}


@pytest.fixture(params=STRATEGIES)
def place(request: pytest.FixtureRequest, settings: Any) -> str:
    alias, strategy = STRATEGIES[request.param]
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": strategy, "max_attempts": 3}}}
    return alias


@pytest.fixture
def parcels(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}
