"""The tests' settings with the queues of the fault runs, for every process of ``tests/faults``."""

import os
from typing import Any

from example_project.database import database_from_url
from tests.faults.sizes import CAPACITY, LEASE_S, LETHAL_ATTEMPTS
from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

INSTALLED_APPS = [*INSTALLED_APPS, "tests.faults"]  # noqa: F405 -- from the import above

# An innocent task may lose many attempts to processes that are killed around it.
QUEUE: dict[str, Any] = {"lease": f"{LEASE_S}s", "max_attempts": 60, "retry": "fixed:50ms", "poll_interval": "300ms"}
OTHERS = {"evented": {"keep": "history"}, "small": {"capacity": CAPACITY}, "last": {"max_attempts": 1}}
OTHERS |= {"lethal": {"max_attempts": LETHAL_ATTEMPTS}, "plain": {}, "effects": {}, "grouped": {}}
DBTASKQUEUE = {"HEARTBEAT": "1s", "QUEUES": {name: QUEUE | other for name, other in OTHERS.items()}}

if past := os.environ.get("FAULTS_PAST_POOLER"):  # the poller's own address leads to a pooler in transaction mode
    DATABASES["default"] |= {"DISABLE_SERVER_SIDE_CURSORS": True}  # noqa: F405 -- from the import above
    DATABASES["past_pooler"] = database_from_url(past)  # noqa: F405 -- from the import above
    DBTASKQUEUE |= {"PREPARE": False, "LISTEN": {"default": "past_pooler"}}
