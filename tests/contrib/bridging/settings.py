"""The tests' settings, with the queue's own from the environment."""

import json
import os

from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

INSTALLED_APPS = [*INSTALLED_APPS, "tests.contrib.bridging"]  # noqa: F405 -- from the import above
DBTASKQUEUE = json.loads(os.environ["BRIDGING"])
ROOT_URLCONF = "tests.contrib.bridging.urls"
ALLOWED_HOSTS = ["127.0.0.1"]
