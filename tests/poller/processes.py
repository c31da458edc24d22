"""Pollers for tests: as real processes, or as threads of the test's own process with their heartbeat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_dbtaskqueue import enqueue_many, models, signals
from django_dbtaskqueue.poller.heartbeat import Heartbeat
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.support import PATIENCE, until


@dataclass
class PollerProcess:
    """A ``runtaskpoller`` and its log."""

    process: subprocess.Popen[bytes]
    file: IO[bytes]

    @property
    def log(self) -> str:
        return Path(self.file.name).read_text(errors="replace")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self, code: int = 0) -> str:
        """Wait for the end with this exit code; return the log."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        assert self.process.returncode == code, self.log
        return self.log

    def until_logged(self, text: str) -> None:
        until(lambda: text in self.log)


@contextmanager
def runtaskpoller(database: ProcessDatabase, *options: str) -> Iterator[PollerProcess]:
    """Start it; kill it on the way out if it still runs."""
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, str(REPOSITORY / "manage.py"), "runtaskpoller", *options]
        process = subprocess.Popen(command, env=database.env, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield PollerProcess(process, file)
        finally:
            process.kill()
            process.wait(PATIENCE)


@contextmanager
def polling(weights: dict[str, int], *, settle: float = PATIENCE, **options: Any) -> Iterator[Poller]:
    """A poller and its heartbeat, in threads; stopped and closed on the way out."""
    poller = Poller(weights, Options(**options))
    heartbeat = Heartbeat(poller)
    poller.start()
    heartbeat.start()
    try:
        yield poller
    finally:
        poller.stop()
        ended = poller.wait(settle)
        heartbeat.stop()
        poller.close()
    assert ended, f"the poller still holds {poller.settler.held}"


class StuckPoller(signals.Listener):
    """A poller whose fetching thread its listener keeps until ``go`` is set, as a bug in a project's listener would."""

    def __init__(self) -> None:
        self.poller = Poller({"work": 1})
        self.heartbeat = Heartbeat(self.poller)
        self.entered, self.go = threading.Event(), threading.Event()

    def poller_idle(self, poller: signals.RunningPoller) -> None:
        self.entered.set()
        self.go.wait(PATIENCE)

    def start(self) -> None:
        """Return when the thread is stuck."""
        self.poller.start()
        self.heartbeat.start()
        assert self.entered.wait(PATIENCE)


@contextmanager
def stuck_poller() -> Iterator[StuckPoller]:
    """A poller that gets stuck when it is started; stopped and closed on the way out."""
    stuck = StuckPoller()
    signals.register(stuck)
    try:
        yield stuck
    finally:
        stuck.go.set()
        signals.unregister(stuck)
        stuck.poller.stop()
        stuck.poller.wait(PATIENCE)
        stuck.heartbeat.stop()
        stuck.poller.close()


def keep_full(queue: str, number: int = 3000) -> None:
    """Enqueue more if few tasks wait, so that the queue does not run empty."""
    if models.Task.objects.filter(queue=queue, status="CREATED").count() < number / 2:
        enqueue_many(queue, ({"payload": one} for one in range(number)))


def let_others_start() -> None:
    """Run for a while, so that another task that ran beside this one, and must not, would be seen."""
    time.sleep(0.02)


def pids() -> list[int]:
    """Return the processes of the pollers that report, the newest last."""
    return list(models.Poller.objects.exclude(state="STOPPED").order_by("start_time").values_list("pid", flat=True))


def alive(pid: int) -> bool:
    """Whether a process that is not our child runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0]


def lines(path: Path) -> list[list[str]]:
    """Return the marks that processors left: [id, reference, total_attempt, pid] of each start."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def counted_queries() -> Iterator[list[str]]:
    """Every statement on every connection that is opened meanwhile."""
    seen: list[str] = []

    def count(execute: Any, sql: str, *rest: Any) -> Any:
        seen.append(sql)
        return execute(sql, *rest)

    def watch(connection: BaseDatabaseWrapper, **_: Any) -> None:
        connection.execute_wrappers.append(count)

    connection_created.connect(watch)
    try:
        yield seen
    finally:
        connection_created.disconnect(watch)
