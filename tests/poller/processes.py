"""Pollers for tests: as real processes, or as threads of the test's own process with their heartbeat."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_dbtaskqueue import enqueue_many, models
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.poller.heartbeat import Heartbeat
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.forks import Fork, Program, Started, killed, program
from tests.support import PATIENCE, sql, until

SELDOM = {"poll_interval": "1h", "idle_interval": "1h", "lease": "20h"}  # settings by which only an event is in time
Start = Callable[..., AbstractContextManager[Program]]


def manage(database: ProcessDatabase, *words: str) -> AbstractContextManager[Started]:
    return program([sys.executable, str(REPOSITORY / "manage.py"), *words], database.env)


def runtaskpoller(database: ProcessDatabase, *options: str) -> AbstractContextManager[Program]:
    return killed(lambda log: Fork(["runtaskpoller", *options], database.env, log))


@contextmanager
def polling(weights: dict[str, int], **options: Any) -> Iterator[Poller]:
    """A poller and its heartbeat, in threads; stopped and closed on the way out."""
    poller = Poller(weights, Options(**options))
    with running(poller):
        yield poller


@contextmanager
def running(poller: Poller) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(poller)
    poller.start()
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        poller.stop()
        ended = poller.wait(PATIENCE)
        heartbeat.stop()
        poller.close()
    assert ended, f"the poller still holds {poller.settler.held}"


class Held:
    """A processor that holds its tasks until ``go_on`` is set."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Semaphore(0), threading.Event()

    def __call__(self, task: Lease) -> None:
        self.started.release()
        self.go_on.wait(PATIENCE)

    def until_started(self, number: int = 1) -> None:
        for _ in range(number):
            assert self.started.acquire(timeout=PATIENCE)


class Gate:
    """Tasks with its payload mark their start, and wait until it opens."""

    def __init__(self, folder: Path) -> None:
        self._mark, self._file = folder / "mark of the gate", folder / "gate"
        self.payload = {"do": "wait", "until": str(self._file), "mark": str(self._mark)}

    def starts(self) -> list[list[str]]:
        return lines(self._mark)

    def until_started(self, number: int = 1) -> None:
        until(lambda: len(self.starts()) >= number)

    def open(self) -> None:
        self._file.touch()


def completed() -> int:
    return models.Task.objects.filter(status="COMPLETED").count()


def status_of(task: models.Task) -> str:
    return models.Task.objects.get(pk=task.pk).status


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
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def lines(path: Path) -> list[list[str]]:
    """Return the marks that processors left: [id, reference, total_attempt, pid] of each start."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def cut_connections() -> None:
    """End all connections to the default database but the caller's, as a restart of the server does."""
    here = "datname = current_database() AND pid <> pg_backend_pid()"
    sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {here}")


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
