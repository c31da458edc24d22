"""``--reload``: start the poller's process again when a file of the project changes. For development.

The parent does nothing but start the process, which runs the poller and watches the files that it has loaded. At a
change it drains, as at the first signal, and ends with ``RELOAD_CODE``. A process that cannot start, such as one whose
file has a syntax error, is started again at the next change, which the parent sees.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Sequence

from django.utils import autoreload

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.poller.process.shutdown import DRAIN, REQUEST_POLL_INTERVAL_S, RUN, ShutdownRequest

logger = logging.getLogger("django_dbtaskqueue")

RELOAD_CODE = 4  # exit code


def is_parent() -> bool:
    """Whether this process is to start the one that polls, and not that one."""
    return os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) != "true"


def run_parent(command: Sequence[str], shutdown: ShutdownRequest) -> int:
    """Start the command, and start it again after a change, until a shutdown is requested; return its exit code."""
    env = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
    while True:
        files = dict(autoreload.StatReloader().snapshot_files())
        process = subprocess.Popen(command, env=env, close_fds=False)
        # Ctrl-C on a terminal reaches the process by itself. A SIGTERM may be sent to this one alone.
        before = signal.signal(signal.SIGTERM, lambda *_, process=process: process.terminate())
        code = process.wait()
        signal.signal(signal.SIGTERM, before)
        if code == RELOAD_CODE:
            continue
        if code <= 0 or shutdown.level > RUN:
            return abs(code)
        logger.error("The poller ended with exit code %s. It is started again when a file changes", code)
        while shutdown.level == RUN and files == dict(autoreload.StatReloader().snapshot_files()):
            clock.wait(threading.Event(), REQUEST_POLL_INTERVAL_S * 10)
        if shutdown.level > RUN:
            return code


class FileWatcher:
    """Requests a drain when a file that this process has loaded changes."""

    def __init__(self, shutdown: ShutdownRequest) -> None:
        self.changed = False
        self._shutdown = shutdown

    def start(self) -> None:
        """Start the thread; it ends with the process."""
        threading.Thread(target=self._follow, name="dbtaskqueue-reload", daemon=True).start()

    def _follow(self) -> None:
        try:
            autoreload.get_reloader().run(threading.main_thread())
        except SystemExit:  # how Django's reloader reports a change
            self.changed = True
            self._shutdown.request(DRAIN)
