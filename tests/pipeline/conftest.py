"""Databases as the pipeline sees them."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.pipeline.database import Database
from tests import templates
from tests.conftest import ProcessDatabase, _as_default, _postgres_copy
from tests.forks import program
from tests.pipeline.lakes import AZURE, AZURITE, MAKE_CONTAINER, Bucket


@pytest.fixture(autouse=True)
def _quick_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """To import statsforecast takes seconds, so only slow tests have its model."""
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setitem(sys.modules, "statsforecast", None)


@pytest.fixture
def pg(postgres_process_database: ProcessDatabase) -> Database:
    """A migrated PostgreSQL database of its own, Django's ``default`` as well."""
    return Database.from_url(postgres_process_database.url)


@pytest.fixture(scope="session")
def _quiet_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    server = EmbeddedPostgres.start(tmp_path_factory.mktemp("quiet"), settings={"fsync": "off", "autovacuum": "off"})
    yield server.url, templates.on_postgresql(server.url)
    server.close()


@pytest.fixture
def quiet_pg(_quiet_template: tuple[str, str], django_db_blocker: DjangoDbBlocker) -> Iterator[Database]:
    """As ``pg``, on a server that nothing else uses: a stream waits for each transaction that runs on its server."""
    with _postgres_copy(*_quiet_template) as database, _as_default(database, django_db_blocker):
        yield Database.from_url(database.url)


@pytest.fixture
def sqlite(sqlite_process_database: ProcessDatabase) -> Database:
    """A migrated SQLite database of its own, Django's ``default`` as well."""
    return Database.from_url(sqlite_process_database.url)


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest) -> Database:
    return request.getfixturevalue({"postgresql": "pg", "sqlite": "sqlite"}[request.param])


@pytest.fixture
def own(pg: Database, settings: Any) -> Database:
    """A table whose columns have other names, with three tasks, beside the common one."""
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"model": "testapp.Parcel"}}}
    enqueue_many("parcels", [(name, None) for name in "abc"])
    enqueue_many("other", [("x", None)])
    return database_of_alias(None, "testapp.parcel")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "la[k]e {of}*? 50% é"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with program([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], os.environ) as server:
        server.until_logged("Press CTRL+C")
        yield re.findall(r"http://127.0.0.1:\d+", server.log)[0]


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    found = Bucket(s3_server, f"b-{uuid.uuid4().hex}")
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    found.put("", b"")
    return found


@pytest.fixture(scope="session")
def azurite() -> Iterator[None]:
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with program([str(AZURITE), *options], os.environ) as server:
        server.until_logged("successfully listens")
        subprocess.run(["node", "-e", MAKE_CONTAINER], check=True)
        yield


@pytest.fixture
def container(azurite: None, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in AZURE.items():
        monkeypatch.setenv(name, value)
    return f"abfss://lake@devstoreaccount1.dfs.core.windows.net/{uuid.uuid4().hex}/lake"
