"""The tests' settings for a process of its own: the queue ``spread`` on two PostgreSQL databases."""

import os

from example_project.database import database_from_url
from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

URLS = {"default": "DATABASE_URL", "second": "SECOND_URL"}
DATABASES = {alias: database_from_url(os.environ[name]) for alias, name in URLS.items()}
DBTASKQUEUE = {"QUEUES": {"spread": {"shards": ["default", "second"]}}}
