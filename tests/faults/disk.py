"""A file system of its own for the tasks of a run, which can be made full. It needs the right to mount."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

SIZE_BYTES = 2**31  # at most; a file system in memory takes what is used
TABLESPACE = "faults"


class Disk:
    """A mounted file system, and the folder of a tablespace in it."""

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
