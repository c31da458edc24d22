"""Pollers as real processes: ``manage.py runtaskpoller``, as an operator would start it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from example_project.flights.desk import QUEUE

MANAGE = Path(__file__).resolve().parents[3] / "manage.py"
STOP_SECONDS = 30
LOOK_SECONDS = 0.25
THREADS = "2"  # one waits for its commit while the other computes; more only fight for the interpreter


class PollerFailed(Exception):
    """A poller process ended with an exit code other than 0."""

    def __init__(self, pid: int, code: int, log: str) -> None:
        super().__init__(f"Poller process {pid} ended with exit code {code}. The end of its log:\n{log}")


@dataclass(frozen=True, slots=True)
class PollerProcess:
    """A poller and its log."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def check(self) -> None:
        """Raise ``PollerFailed`` with the end of the log when the process failed."""
        if self.process.returncode:
            self.log.seek(0)
            tail = self.log.read().decode(errors="replace").splitlines()[-20:]
            raise PollerFailed(self.process.pid, self.process.returncode, "\n".join(tail))


@contextmanager
def running(count: int, *options: str) -> Iterator[list[PollerProcess]]:
    """Run ``count`` pollers of the claims queue; on the way out, stop those that still run and wait for them."""
    with ExitStack() as stack:
        yield [stack.enter_context(_started(options)) for _ in range(count)]


def drain(count: int, watch: Callable[[], None]) -> None:
    """Run ``count`` pollers until the queue is empty, calling ``watch`` a few times a second.

    Raises ``PollerFailed``, after all of them ended.
    """
    with running(count, "--drain") as pollers:
        while any(poller.process.poll() is None for poller in pollers):
            watch()
            time.sleep(LOOK_SECONDS)
        watch()
        for poller in pollers:
            poller.check()


@contextmanager
def _started(options: tuple[str, ...]) -> Iterator[PollerProcess]:
    command = [sys.executable, str(MANAGE), "runtaskpoller", "--queue", QUEUE, "--threads", THREADS, *options]
    with tempfile.TemporaryFile() as log:
        # A session of its own: a Ctrl-C reaches only the demo, which stops each poller exactly once.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield PollerProcess(process, log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
