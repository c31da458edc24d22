"""What holds where a feature meets a road."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue.models import Queue
from example_project.database import database_from_url
from tests import templates
from tests.conftest import ProcessDatabase
from tests.crossings import features, settings as crossings
from tests.crossings.features import FEATURES
from tests.crossings.roads import ROADS, SPARK
from tests.support import alias_beside, eventually

START_OF_SPARK_S = 300.0


@pytest.fixture
def database(
    process_database: ProcessDatabase, tmp_path: Path, settings: Any, monkeypatch: Any, taskqueue_registry: None
) -> Iterator[ProcessDatabase]:
    """A database with another one as ``second``, for this process and those that it starts."""
    url = f"sqlite:///{shutil.copy(templates.on_sqlite(), tmp_path / 'second.sqlite3')}"
    made = replace(process_database, extra={"SECOND_URL": url, "DJANGO_SETTINGS_MODULE": "tests.crossings.settings"})
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    settings.DBTASKQUEUE = crossings.DBTASKQUEUE
    features.register()
    with alias_beside("second", **database_from_url(url)):
        yield made


def check(road: str, database: ProcessDatabase, seconds: float = 60.0) -> None:
    """Enqueue for all features, run them on one road, and compare what is found while it runs and after it."""
    expected = {name: feature.after(road) for name, feature in FEATURES.items()}
    for name, feature in FEATURES.items():
        feature.fill(name)

    def holds() -> None:
        assert {name: FEATURES[name].found(name) for name in expected} == expected

    with ROADS[road](database):
        eventually(holds, timeout=seconds)
        Queue.objects.create(name="rate", overrides={"rate": "1000/s"})  # else a drain would wait for an hour
        del expected["rate"]
    holds()


# Of the roads that start processes, PostgreSQL's are quick enough together.
SLOW = [("sqlite", "--drain"), ("sqlite", "poller")]
QUICK = sorted({*product(["postgresql", "sqlite"], ROADS.keys() - {SPARK})} - {*SLOW})
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("process_database", "road"), CASES, indirect=["process_database"])
def test_a_road_does_what_the_table_says(road: str, database: ProcessDatabase) -> None:
    check(road, database)


@pytest.mark.slow
@pytest.mark.parametrize("process_database", ["postgresql"], indirect=True)
def test_spark_does_what_the_table_says(database: ProcessDatabase) -> None:
    check(SPARK, database, START_OF_SPARK_S)
