"""The tests' settings with the queues of the fault runs, for every process of ``tests/faults``."""

from __future__ import annotations

from typing import Any

from tests.faults.sizes import CAPACITY, LEASE_S, LETHAL_ATTEMPTS
from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

INSTALLED_APPS = [*INSTALLED_APPS, "tests.faults.apps.FaultsConfig"]  # noqa: F405 -- from the import above

# An innocent task may lose many attempts to processes that are killed around it.
QUEUE: dict[str, Any] = {"lease": f"{LEASE_S}s", "max_attempts": 60, "retry": "fixed:50ms", "poll_interval": "300ms"}
DBTASKQUEUE = {
    "HEARTBEAT": "1s",
    "QUEUES": {
        "plain": QUEUE,
        "effects": QUEUE,
        "evented": QUEUE | {"keep": "history"},
        "grouped": QUEUE,
        "small": QUEUE | {"capacity": CAPACITY},
        "last": QUEUE | {"max_attempts": 1},
        "lethal": QUEUE | {"max_attempts": LETHAL_ATTEMPTS},
    },
}
