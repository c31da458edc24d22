"""A listener that ends the thread that calls it, once: as code does whose error's text raises SystemExit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from django_dbtaskqueue.signals import Listener


class LeavesOnce(Listener):
    """Ends the fetch thread after the first tasks it took."""

    def poller_executed(self, poller: Any, tasks: int) -> None:
        """Leave, unless another process has done so."""
        flag = Path(os.environ["CHAOS_FLAG"])
        if not flag.exists():
            flag.touch()
            sys.exit(4)
