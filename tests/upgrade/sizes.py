"""How long a migration keeps a producer and a poller waiting, on a task table of a given size."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from time import monotonic

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
    """What a producer and a poller went through during a migration."""

    rounds: int = 0
    longest_round_s: float = 0.0
    longest_wait_s: float = 0.0  # for a lock

    def work(self, connection: psycopg.Connection[tuple[object, ...]], ended: Event) -> None:
        while not ended.is_set():
            began = monotonic()
            row = connection.execute(FILE).fetchone()
            for statement in (TAKE, SETTLE):
                assert connection.execute(statement, row).rowcount == 1
            self.longest_round_s = max(self.longest_round_s, monotonic() - began)
            self.rounds += 1

    def look(self, url: str, pid: int, ended: Event) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not ended.wait(LOOK_S):
                ((waited,),) = connection.execute(WAITS, [pid]).fetchall()
                self.longest_wait_s = max(self.longest_wait_s, waited)


def fill(url: str, old: Release, rows: int) -> None:
    old.manage(url, "migrate", "--verbosity", "0")
    old.manage(url, "generatetasks", "--tasks", str(rows))


def migrate(url: str, new: Release) -> tuple[Probe, float]:
    """Apply the migrations of a release under the probe; return it, and how many seconds they took."""
    probe, ended = Probe(), Event()
    with psycopg.connect(url, autocommit=True) as connection, ThreadPoolExecutor(2) as pool:
        pid = connection.info.backend_pid
        threads = pool.submit(probe.work, connection, ended), pool.submit(probe.look, url, pid, ended)
        began = monotonic()
        try:
            new.manage(url, "migrate", "--verbosity", "0")
            return probe, monotonic() - began
        finally:
            ended.set()
            for thread in threads:
                thread.result()
