"""The tests' settings for a process of its own: the queue ``spread`` on two PostgreSQL databases."""

import os

from example_project.database import database_from_url
from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

DATABASES = {
    "default": database_from_url(os.environ["DATABASE_URL"]),
    "second": database_from_url(os.environ["SECOND_URL"]),
}
DBTASKQUEUE = {"QUEUES": {"spread": {"shards": ["default", "second"]}}}
