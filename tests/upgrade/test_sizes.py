"""Migrations of a large table: work goes on. How long it waits is measured on demand, on a table of any size."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from time import monotonic

import psycopg
import pytest

from tests.upgrade import planted
from tests.upgrade.conftest import Next
from tests.upgrade.releases import Release

pytestmark = [pytest.mark.upgrade, pytest.mark.timeout(7200)]
CI_ROWS = 100_000
# A rewrite of the table, under a lock that nobody gets past.
REWRITE = f"""{planted.HEAD}
        migrations.RunSQL("ALTER TABLE dbtaskqueue_task ALTER COLUMN attempt TYPE bigint"),
    ]
"""
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


def test_tasks_are_enqueued_and_settled_while_a_large_table_is_migrated(
    previous: Release, today: Release, next_release: Next, database: str, pytestconfig: pytest.Config
) -> None:
    """First today's migrations, then one that a next release could bring."""
    rows = pytestconfig.getoption("rows", default=0)
    fill(database, previous, rows or CI_ROWS)
    for name, release in {"today": today, "planted": next_release(planted.SAFE)}.items():
        probe, took = migrate(database, release)
        print(
            f"{name}: {rows or CI_ROWS:,} rows, migrated in {took:.1f} s; {probe.rounds} rounds meanwhile, longest "
            f"{probe.longest_round_s * 1000:.0f} ms, longest wait for a lock {probe.longest_wait_s * 1000:.0f} ms"
        )
        assert probe.rounds
        if rows:  # on demand, on a machine that does nothing else
            assert probe.longest_wait_s <= MAX_WAIT_S, f"{name}: {probe.longest_wait_s:.3f} s"


def test_the_probe_sees_a_table_that_is_locked(today: Release, next_release: Next, database: str) -> None:
    """The figure above can be bad: a rewrite keeps the probe waiting for all of its time."""
    fill(database, today, CI_ROWS)
    probe, _took = migrate(database, next_release(REWRITE))
    assert probe.longest_wait_s > 0
