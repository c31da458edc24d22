"""Migrated databases that others are copied from. One is made when the code that migrates has changed, for all runs."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import django
import psycopg

REPOSITORY = Path(__file__).resolve().parent.parent
# What migrations, permissions and content types are made from.
SOURCES = ("django_dbtaskqueue/**/*.py", "example_project/**/*.py", "tests/testapp/**/*.py", "tests/settings.py")
KEPT = 20  # on a server, and of files; those of older code go
FOLDER = Path(tempfile.gettempdir()) / f"dbtaskqueue-tests-{os.getuid()}-templates"


@cache
def name() -> str:
    digest = hashlib.sha256(f"{django.__version__} {sys.version_info[:2]}".encode())
    for file in sorted(file for pattern in SOURCES for file in REPOSITORY.glob(pattern)):
        digest.update(file.read_bytes())
    return f"dbtaskqueue_template_{digest.hexdigest()[:16]}"


def on_postgresql(server_url: str) -> str:
    """Return the name of the template on a server; make it unless it is there."""
    with _one_at_a_time(), psycopg.connect(server_url, autocommit=True) as server:
        found = server.execute("SELECT datname, datistemplate FROM pg_database WHERE datname ~ %s ORDER BY oid DESC",
                               ["^dbtaskqueue_template_"]).fetchall()  # fmt: skip
        if (name(), True) not in found:  # it becomes a template when it is complete
            for outdated in [one for one, _ in found[KEPT:]] + [name()]:
                server.execute(f'ALTER DATABASE "{outdated}" IS_TEMPLATE false') if (outdated, True) in found else None
                server.execute(f'DROP DATABASE IF EXISTS "{outdated}" WITH (FORCE)')
            server.execute(f'CREATE DATABASE "{name()}"')
            migrate(url_of(server_url, name()))
            server.execute(f'ALTER DATABASE "{name()}" IS_TEMPLATE true')
    return name()


def on_sqlite() -> Path:
    """Return the file of the template; make it unless it is there."""
    with _one_at_a_time():
        file = FOLDER / f"{name()}.sqlite3"
        if not file.exists():
            for outdated in sorted(FOLDER.glob("*.sqlite3"), key=lambda one: one.stat().st_mtime)[:-KEPT]:
                outdated.unlink()
            unfinished = file.with_suffix(".unfinished")
            unfinished.unlink(missing_ok=True)
            migrate(f"sqlite:///{unfinished}")
            unfinished.rename(file)
    return file


def migrate(url: str) -> None:
    env = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "manage.py"), "migrate", "--run-syncdb", "--verbosity", "0"]
    subprocess.run(command, env=env, cwd=REPOSITORY, check=True)


def url_of(server_url: str, database: str) -> str:
    return urlsplit(server_url)._replace(path=f"/{database}").geturl()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
