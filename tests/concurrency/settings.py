"""The tests' settings with the checkout strategy from the environment, for the processes of this folder."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

DBTASKQUEUE = {"DEFAULTS": {"strategy": os.environ["TEST_STRATEGY"]}}
