"""How long a migration keeps a producer and a poller waiting, on a task table of a given size."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

import psycopg

from tests.upgrade.releases import Release

MAX_WAIT_S = 0.1  # of a statement for a lock on the task table
LOOK_S = 0.002  # between two looks at the locks
FILE = "INSERT INTO dbtaskqueue_task (queue_name) VALUES ('probe') RETURNING id"
TAKE = """\
UPDATE dbtaskqueue_task SET status = 'PROCESSING', attempt = 1, total_attempt = 1, poller_instance = 'probe'
WHERE id = %s AND status = 'CREATED'
"""
SETTLE = """\
UPDATE dbtaskqueue_task SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL,
    finish_time = statement_timestamp() WHERE id = %s AND total_attempt = 1
"""
WAITS = """\
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - waitstart)), 0)::float FROM pg_locks
WHERE pid = %s AND NOT granted
"""


@dataclass
class Probe:
    """A thread that enqueues, takes and settles a task, again and again; another one looks what it waits for."""

    url: str
    rounds: int = 0
    longest_round_s: float = 0.0
    longest_wait_s: float = 0.0  # for a lock
    error: BaseException | None = None

    def __enter__(self) -> Probe:
        self._ended, self._pid = threading.Event(), 0
        self._connected = threading.Event()
        self._threads = [threading.Thread(target=target) for target in (self._work, self._look)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        try:
            with psycopg.connect(self.url, autocommit=True) as connection:
                self._pid = connection.info.backend_pid
                self._connected.set()
                while not self._ended.is_set():
                    began = monotonic()
                    row = connection.execute(FILE).fetchone()
                    assert row is not None
                    for statement in (TAKE, SETTLE):
                        assert connection.execute(statement, row).rowcount == 1
                    self.longest_round_s = max(self.longest_round_s, monotonic() - began)
                    self.rounds += 1
        except Exception as error:
            self.error = error
            self._connected.set()

    def _look(self) -> None:
        self._connected.wait()
        with psycopg.connect(self.url, autocommit=True) as connection:
            while not self._ended.wait(LOOK_S):
                ((waited,),) = connection.execute(WAITS, [self._pid]).fetchall()
                self.longest_wait_s = max(self.longest_wait_s, waited)


def fill(url: str, old: Release, rows: int) -> None:
    """Make the tables of a release, with so many tasks."""
    old.manage(url, "migrate", "--verbosity", "0")
    old.manage(url, "generatetasks", "--tasks", str(rows))


def migrate(url: str, new: Release) -> tuple[Probe, float]:
    """Apply the migrations of a release under the probe; return it, and how many seconds they took."""
    with Probe(url) as probe:
        began = monotonic()
        new.manage(url, "migrate", "--verbosity", "0")
        took = monotonic() - began
    if probe.error is not None:
        raise probe.error
    return probe, took
