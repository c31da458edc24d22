"""LISTEN: be told that there may be something to take. Polling finds it all the same, a little later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import jittered, next_pause
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session

logger = logging.getLogger(__name__)
BEAT = 1.0  # seconds between two looks at whether to end
RETRY_SECONDS = 0.1, 5.0  # between two attempts to connect: the first and the longest pause


class Wakeup:
    """Calls ``wake(queue)`` for each wake-up, from this process or, on PostgreSQL, from any."""

    def __init__(self, alias: str, wake: Callable[[str], None]) -> None:
        self._session = Session.open(conf.settings().listen.get(alias, alias))
        self._wake = wake
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen."""
        notify.listen(self._wake)
        if self._session.postgresql and conf.settings().notify:
            self._thread = threading.Thread(target=self._loop, name="dbtaskqueue-listen", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        notify.unlisten(self._wake)
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT)

    def _loop(self) -> None:
        pause = 0.0
        while not self._ended.is_set():
            try:
                self._listen()
                pause = 0.0
            except Exception as error:
                logger.debug("Listening broke off, polling goes on: %s", error)
                self._session.close()
                pause = next_pause(pause, *RETRY_SECONDS)
                self._ended.wait(jittered(pause))
        self._session.close()

    def _listen(self) -> None:
        raw = self._connect()
        self._wake("")  # whatever came while nobody listened
        while not self._ended.is_set():
            for notification in raw.notifies(timeout=BEAT):
                self._wake(notification.payload)

    def _connect(self) -> Any:
        self._session.run(f"LISTEN {notify.CHANNEL}", {})
        return self._session.connection.connection
