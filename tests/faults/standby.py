"""The disk of a run's tasks, which can be made full, and a standby that follows PostgreSQL until it takes its place."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres

SIZE_BYTES = 2**31  # at most; a file system in memory takes what is used
TABLESPACE = "faults"


class Disk:
    """A mounted file system, which needs the right to mount, and the folder of a tablespace in it."""

    def __init__(self, mount: Path) -> None:
        self._mount, self.folder = mount, mount / "tables"
        self.folder.mkdir()

    def fill(self) -> None:
        """Leave no room: what is written now is the size from now on."""
        for _ in range(50):  # while others write to it
            facts = os.statvfs(self._mount)
            if self._resize((facts.f_blocks - facts.f_bfree) * facts.f_frsize):
                return
        raise OSError(f"{self._mount} grew faster than its size could be set")

    def free(self) -> None:
        self._resize(SIZE_BYTES)

    def _resize(self, size: int) -> bool:
        command = ["mount", "-o", f"remount,size={size}", self._mount]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def take(self, control: psycopg.Connection[tuple[object, ...]]) -> None:
        """Move the tasks and their indexes of a database here; the folder belongs to the server's account."""
        control.execute(f"CREATE TABLESPACE {TABLESPACE} LOCATION '{self.folder}'")
        indexes = control.execute("SELECT indexname FROM pg_indexes WHERE tablename = 'dbtaskqueue_task'").fetchall()
        control.execute(f"ALTER TABLE dbtaskqueue_task SET TABLESPACE {TABLESPACE}")
        for (name,) in indexes:
            control.execute(f'ALTER INDEX "{name}" SET TABLESPACE {TABLESPACE}')


@contextmanager
def mounted(folder: Path) -> Iterator[Disk | None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES},mode=755", "tmpfs", folder]
    try:
        allowed = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    try:
        yield Disk(folder) if allowed else None
    finally:
        if allowed:
            subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)


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
