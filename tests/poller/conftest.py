"""What several tests of pollers are given."""

from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ProcessDatabase
from tests.flow.conftest import alias as alias
from tests.poller.processes import Gate, Start, runtaskpoller


@pytest.fixture
def start(postgres_process_database: ProcessDatabase) -> Start:
    return partial(runtaskpoller, postgres_process_database)


@pytest.fixture
def start_on_sqlite(sqlite_process_database: ProcessDatabase) -> Start:
    return partial(runtaskpoller, sqlite_process_database)


@pytest.fixture
def children_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead the children of pollers in this process to the test's database."""
    name = "process_database" if "process_database" in request.fixturenames else "postgres_process_database"
    for key, value in request.getfixturevalue(name).env.items():
        monkeypatch.setenv(key, value)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)
