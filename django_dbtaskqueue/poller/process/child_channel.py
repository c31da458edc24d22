"""The line between a supervisor and its child: a socket whose other end tells each that the other one lives.

The child writes snapshots, a JSON object per line, each of which is also a sign of life. The supervisor writes what is
asked of the child, one digit each. The end of the stream is the death of the other side.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from select import select
from typing import Any

from django_dbtaskqueue.poller.process.shutdown import DRAIN, Stops

logger = logging.getLogger("django_dbtaskqueue")
MOST_BEAT = 1.0  # seconds between two signs of life, at most
TAKEN = 65_536


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Return the supervisor's end and the child's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


def beats(stream: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Return the snapshots in what a child wrote, and the rest that is not a whole line yet."""
    *lines, rest = stream.split(b"\n")
    found = []
    for line in lines:
        with suppress(ValueError):  # cut short when the line was full
            found.append(json.loads(line))
    return found, rest


class Lifeline:
    """The child's end. It shows that this process runs its threads; what they do is for the heartbeat row to say."""

    def __init__(self, fd: int, stops: Stops, heartbeat: timedelta) -> None:
        self.snapshot: Callable[[], dict[str, Any]] = dict
        self._stops = stops
        self._beat = min(MOST_BEAT, heartbeat.total_seconds() / 3)
        os.set_inheritable(fd, False)  # a program started by a processor must not keep it open
        self._wire = socket.socket(fileno=fd)
        self._thread = threading.Thread(target=self._loop, name="dbtaskqueue-lifeline", daemon=True)

    def start(self) -> None:
        """Begin; it ends with the process."""
        self._thread.start()

    def _loop(self) -> None:
        while True:
            self._send()
            if not select([self._wire], [], [], self._beat)[0]:
                continue
            asked = self._receive()
            if not asked:
                break
            self._stops.tell(max(int(digit) for digit in asked.decode()))
        logger.warning("The supervisor is gone: stopping")
        self._stops.tell(DRAIN)

    def _send(self) -> None:
        line = json.dumps(self.snapshot()).encode() + b"\n"
        with suppress(OSError):  # a supervisor that reads no more is gone, or stopped and full
            self._wire.send(line, socket.MSG_DONTWAIT)

    def _receive(self) -> bytes:
        try:
            return self._wire.recv(TAKEN)
        except OSError:
            return b""
