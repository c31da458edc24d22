"""A processor with a fault that an operator can repair: it fails until a file is there."""

import os
from datetime import timedelta
from pathlib import Path

from django_dbtaskqueue import Complete, Fixed, processor
from django_dbtaskqueue.core.lease import Lease
from tests.browser.policy import REPAIRED


class WarehouseClosed(Exception):
    """Nobody answers the door."""


@processor("orders", max_attempts=1, retry=Fixed(timedelta(milliseconds=50)))
def ship(task: Lease) -> Complete:
    if not Path(os.environ[REPAIRED]).exists():
        raise WarehouseClosed(f"order {task.reference} cannot be picked")
    return Complete({"shipped": task.reference})
