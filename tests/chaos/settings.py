"""The tests' settings, with the queue's own from the environment, for the processes of ``tests/chaos``."""

import json
import os

from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

INSTALLED_APPS = [*INSTALLED_APPS, "tests.chaos"]  # noqa: F405 -- from the import above
DBTASKQUEUE = json.loads(os.environ.get("CHAOS_DBTASKQUEUE", "{}"))
