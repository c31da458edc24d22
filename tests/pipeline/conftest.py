"""Databases as the pipeline sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from django_dbtaskqueue.pipeline.database import Database

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import ProcessDatabase


@pytest.fixture
def pg(postgres_process_database: ProcessDatabase) -> Database:
    """A migrated PostgreSQL database of its own, Django's ``default`` as well."""
    return Database.from_url(postgres_process_database.url)


@pytest.fixture
def sqlite(sqlite_process_database: ProcessDatabase) -> Database:
    """A migrated SQLite database of its own, Django's ``default`` as well."""
    return Database.from_url(sqlite_process_database.url)


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest) -> Database:
    """Both, one after the other."""
    found: Database = request.getfixturevalue({"postgresql": "pg", "sqlite": "sqlite"}[request.param])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a lake, which is not made yet."""
    return tmp_path / "lake"
