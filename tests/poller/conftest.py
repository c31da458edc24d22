"""What several tests of pollers are given."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ProcessDatabase
from tests.poller.processes import Gate, PollerProcess, runtaskpoller

Start = Callable[..., AbstractContextManager[PollerProcess]]


@pytest.fixture
def start(postgres_process_database: ProcessDatabase) -> Start:
    """Run ``runtaskpoller`` with options, for a ``with`` block."""
    return partial(runtaskpoller, postgres_process_database)


@pytest.fixture
def start_on_sqlite(sqlite_process_database: ProcessDatabase) -> Start:
    return partial(runtaskpoller, sqlite_process_database)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)
