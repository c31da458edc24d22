"""Real connections, real commits: nothing here runs inside a test's transaction."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.conftest import STRATEGIES
from tests.support import Audit


@pytest.fixture(params=["postgresql-skip_locked", "postgresql-optimistic", "sqlite-single_writer"])
def place(request: pytest.FixtureRequest, settings: Any) -> str:
    alias, strategy = STRATEGIES[request.param]
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": strategy, "max_attempts": 3}}}
    return alias


@pytest.fixture
def parcels(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}


@pytest.fixture
def audit(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[Audit]:
    one = Audit(request.getfixturevalue("place") if "place" in request.fixturenames else "default")
    one.install()
    one.clear()
    yield one
    assert one.problems() == []
