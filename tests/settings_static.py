"""The example project without a database, for mypy and ``makemigrations --check``."""

import os

os.environ["DBTASKQUEUE_NO_DATABASE"] = "1"

from example_project.settings import *  # noqa: F403 - the variable above is read on import
