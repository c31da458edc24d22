"""A standby of a run's PostgreSQL, which follows it synchronously until it takes its place."""

import subprocess
from dataclasses import replace
from pathlib import Path

import psycopg

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from tests.faults.disk import Disk


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", f"{source}/.", target], check=True)


class Standby:
    """A server that replays what the primary writes. No commit is answered before the standby has it."""

    def __init__(self, primary: EmbeddedPostgres, root: Path, disk: Disk | None) -> None:
        self.disk = disk
        primary.stop()
        _copy(primary.root, root)
        data = root / "data"
        for link in (data / "pg_tblspc").iterdir():
            assert disk is not None  # it would write to the primary's disk
            _copy(link.resolve(), disk.folder)
            link.unlink()
            link.symlink_to(disk.folder)
        signal = data / "standby.signal"
        signal.touch()
        primary.account.give(signal)
        primary.restart()
        password = (primary.root / "password").read_text()
        source = f"host=127.0.0.1 port={primary.port} user=postgres password={password}"
        settings = {"primary_conninfo": source, "wal_retrieve_retry_interval": "100ms"}
        self.server = EmbeddedPostgres.start(root, settings=settings)
        with psycopg.connect(primary.url, autocommit=True) as control:
            control.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            control.execute("SELECT pg_reload_conf()")

    def take_over(self, primary: EmbeddedPostgres) -> EmbeddedPostgres:
        """End the primary as a crash does, and serve at its address what it had answered."""
        primary.stop("immediate")
        with psycopg.connect(self.server.url, autocommit=True) as control:
            control.execute("SELECT pg_promote()")
        self.server = replace(self.server, port=primary.port)
        self.server.restart()
        return self.server

    def close(self) -> None:
        self.server.close()
