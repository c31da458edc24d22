"""The database that all is measured on: one PostgreSQL of our own, whose commits are durable."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import psutil
import psycopg
from psycopg.rows import dict_row

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from tests.templates import REPOSITORY as REPOSITORY

# Durability is PostgreSQL's default. The rest keeps a checkpoint from falling into one run and not into another.
SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
SETTINGS |= {"max_connections": "500"}
COMMITS = 31  # that are timed before each reading
COUNTED = """
SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 AS wal, n_tup_upd::float8 AS updates,
    n_tup_hot_upd::float8 AS hot, (heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit, 0)
        + coalesce(idx_blks_read, 0))::float8 AS buffers,
    (SELECT idx_tup_read::float8 FROM pg_stat_user_indexes WHERE relid = t.relid AND indexrelname ~ 'rdy$') AS walked
FROM pg_stat_user_tables AS t JOIN pg_statio_user_tables USING (relid) WHERE relid = %s::regclass
"""


@dataclass
class Span:
    """A stretch of time that is measured, and what says how noisy the machine was meanwhile."""

    commit: float  # milliseconds that a commit took, just before
    seconds: float = 0.0
    cpu: float = 0.0  # seconds of PostgreSQL
    others: float = 0.0  # seconds of all processes that are not ours

    @property
    def noise(self) -> dict[str, float]:
        """The figures that stand beside every rate."""
        return {"ms/commit": self.commit, "cores used by others": self.others / self.seconds}

    def cost(self, tasks: float) -> dict[str, float]:
        return {"µs CPU PostgreSQL": self.cpu / tasks * 1e6, **self.noise}


@dataclass(frozen=True)
class Server:
    url: str
    embedded: EmbeddedPostgres
    settings: Mapping[str, str]

    @property
    def log(self) -> Path:
        return self.embedded.root / "data" / "server.log"

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=autocommit)

    def run(self, sql: str, params: Any = None) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            cursor = connection.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def counted(self, table: str) -> dict[str, float]:
        """Return the server's counters, and those of one table; differences of two are what happened between."""
        with self.connect() as connection, connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(COUNTED, [table]).fetchone()

    def processes(self) -> set[psutil.Process]:
        return family(int((self.embedded.root / "data" / "postmaster.pid").read_text().split()[0]))

    def cpu(self) -> float:
        """Return the seconds of CPU that PostgreSQL has used in all its processes, ended ones included."""
        return sum(cpu_of(one, ended=True) for one in self.processes())

    @contextmanager
    def span(self) -> Iterator[Span]:
        """Measure what goes on meanwhile. Before, see what a commit costs: an INSERT in a transaction of its own."""
        times = []
        with self.connect() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS commits (number int)")
            for number in range(COMMITS):
                began = monotonic()
                connection.execute("INSERT INTO commits VALUES (%s)", [number], prepare=True)
                times.append(monotonic() - began)
        span = Span(statistics.median(times) * 1000)
        cpu, ours = self.cpu(), self._cpu_of_ours()
        began, used = monotonic(), _cpu_of_all()
        yield span
        span.seconds, used = monotonic() - began, _cpu_of_all() - used
        span.cpu = self.cpu() - cpu
        span.others = max(0.0, used - (self._cpu_of_ours() - ours) - span.cpu)

    def _cpu_of_ours(self) -> float:
        """Return the seconds of CPU of this process and its children, ended ones included, without PostgreSQL's."""
        return sum(cpu_of(one, ended=True) for one in family(os.getpid()) - self.processes())

    def calm(self, *tables: str) -> None:
        """Leave no work of earlier runs for the next one."""
        with self.connect() as connection:
            for table in tables:
                connection.execute(f'VACUUM (ANALYZE) "{table}"')
            connection.execute("CHECKPOINT")


def family(pid: int) -> set[psutil.Process]:
    process = psutil.Process(pid)
    return {process, *process.children(recursive=True)}


def cpu_of(process: psutil.Process, *, ended: bool = False) -> float:
    """Return the seconds of CPU a process has used, and its ended children; 0 when it has ended meanwhile."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + (times.children_user + times.children_system if ended else 0))


def _cpu_of_all() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


@contextmanager
def serving(commit_delay: float = 0) -> Iterator[Server]:
    """Start a server, migrate a database on it, and lead this process's Django to it.

    ``commit_delay``: milliseconds that each commit waits before it is written, as on a slower disk.
    """
    slow = {"commit_delay": str(round(commit_delay * 1000)), "commit_siblings": "0"} if commit_delay else {}
    settings = SETTINGS | slow
    with (
        tempfile.TemporaryDirectory(prefix="dbtaskqueue-benchmarks-", ignore_cleanup_errors=True) as folder,
        closing(EmbeddedPostgres.start(Path(folder), settings=settings)) as embedded,
    ):
        with psycopg.connect(embedded.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE benchmarks")
        url = urlsplit(embedded.url)._replace(path="/benchmarks").geturl()
        os.environ |= {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.benchmarks.settings"}
        subprocess.run([sys.executable, "manage.py", "migrate", "--verbosity", "0"], cwd=REPOSITORY, check=True)
        import django

        django.setup()
        yield Server(url, embedded, settings)
