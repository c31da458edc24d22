"""The tests' settings with the queues of the crossings, one for each feature; ``second`` is a shard's database."""

import os
from typing import Any

from example_project.database import database_from_url
from tests.settings import *  # noqa: F403 -- settings are made to be imported whole
from tests.settings import DATABASES, INSTALLED_APPS

DATABASES = {**DATABASES, "second": database_from_url(os.environ.get("SECOND_URL", "sqlite:///second"))}
INSTALLED_APPS = [*INSTALLED_APPS, "tests.crossings"]
DBTASKQUEUE: dict[str, Any] = {
    "HEARTBEAT": "200ms",
    "THREADS": 2,
    "LISTENERS": ["tests.crossings.features.Books"],
    "EMBEDDED_POLLER": {"tags": ["gpu"]},
    "DEFAULTS": {"poll_interval": "20ms", "idle_interval": "20ms"},
    "QUEUES": {
        "max_running": {"max_running": 1},
        "rate": {"rate": "1/h", "burst": 2},
        "rate_per_group": {"rate_per_group": "1/h", "burst_per_group": 1},
        "priorities": {"batch_size": 1},
        "unique": {"unique": "unique"},
        "own_table": {"model": "testapp.Parcel"},
        "shards": {"shards": ["default", "second"]},
        "history": {"keep": "history"},
    },
}
