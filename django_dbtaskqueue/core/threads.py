"""A thread that tells how it ended."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("django_dbtaskqueue")


class WatchedThread(threading.Thread):
    """A daemon thread that something depends on: ``ended`` is set at its end, and an exception is logged.

    Python says nothing about a thread that a SystemExit ends.
    """

    ended = False

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            logger.exception("Thread %s ended by an exception", self.name)
        finally:
            self.ended = True
