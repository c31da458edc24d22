"""systemd with ``Type=notify``: what a process tells its service manager, by the protocol of ``sd_notify``.

``READY=1``: a poll has worked. ``WATCHDOG=1``: no thread has ended, and none has been busy for longer than
``WatchdogSec``. A process that only exists does not send it. ``STOPPING=1``: the process drains.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from django_dbtaskqueue.core.durations import clock

if TYPE_CHECKING:
    from django_dbtaskqueue.poller.process.probe_port import Probes
    from django_dbtaskqueue.poller.process.status_lines import Snapshot

STATUS_INTERVAL_S = 5.0
SEND_TIMEOUT_S = 1.0  # the main thread may wait this long for a service manager that reads nothing


class ServiceManager:
    """The service manager that started this process, or none: then nothing is sent."""

    def __init__(self) -> None:
        """Read its address, and take it out of the environment: programs that we start must not speak for us."""
        address, pid = (os.environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_PID"))
        self._watchdog_s = int(os.environ.pop("WATCHDOG_USEC", "") or 0) / 1_000_000
        if pid and int(pid) != os.getpid():
            self._watchdog_s = 0.0
        self.present = bool(address)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = min(STATUS_INTERVAL_S, self._watchdog_s / 3 or STATUS_INTERVAL_S)
        self._next_time = 0.0
        self._ready = self._stopping = False

    def tell(self, probes: Probes, now: Snapshot, *, stopping: bool) -> None:
        """Send what is new. Call it several times in each ``WatchdogSec``."""
        if not self.present or self._stopping:
            return
        moment, lines = clock.monotonic(), []
        wrong = probes.live(self._watchdog_s) if self._watchdog_s else ""
        ready = self._ready or not probes.startup()
        if ready and not self._ready:
            lines.append("READY=1")
        if stopping:
            lines.append("STOPPING=1")
        if (lines or moment >= self._next_time) and not wrong and self._watchdog_s:
            lines.append("WATCHDOG=1")
        if lines or moment >= self._next_time:
            counts = f"{now.running} of {now.slots} slots run, {now.finished} finished, {now.failed} failed"
            if self._send([*lines, f"STATUS={now.state}: {wrong or counts}"]):
                self._ready, self._stopping, self._next_time = ready, stopping, moment + self._interval_s

    def stopped(self) -> None:
        """Say that the process ends, if nothing said so yet."""
        if self.present and not self._stopping:
            self._send(["STOPPING=1"])

    def _send(self, lines: list[str]) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_TIMEOUT_S)
            sender.sendto("\n".join(lines).encode(), self._address)
            return True
        return False
