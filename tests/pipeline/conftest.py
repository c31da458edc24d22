"""One Spark session for all tests of the pipeline, and databases as the pipeline sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.session import spark_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import ProcessDatabase


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores, a second try for a failed task, an event log (in ``spark.eventLog.dir``) for the search of secrets."""
    events = tmp_path_factory.mktemp("events")
    conf = {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",  # half the start; tests run no long jobs
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    if (other := SparkSession.getActiveSession()) is not None:
        other.stop()  # a page of the documentation has started it
    session = spark_session(master="local[2,2]", app_name="tests", memory="1g", conf=conf)
    yield session
    session.stop()


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
