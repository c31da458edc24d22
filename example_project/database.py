"""Which database the project runs on: ``DATABASE_URL``, else an embedded PostgreSQL, else SQLite, said aloud."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres, PostgresNotFound

FORMS = "postgres://USER:PASSWORD@HOST:PORT[,HOST:PORT]/NAME?OPTION=VALUE or sqlite:///PATH"


def database_from_url(url: str) -> dict[str, Any]:
    """Return the ``DATABASES`` entry for a URL, with the options that a task queue wants.

    Raises ImproperlyConfigured for a URL of another form.
    """
    parts = urlsplit(url)
    path = unquote(parts.path[1:])
    with suppress(ValueError):  # a port that is not a number
        if parts.scheme in ("postgres", "postgresql") and path:
            return _postgres(parts, path)
    if parts.scheme == "sqlite" and path and not parts.netloc:
        return sqlite(path)
    # Not the whole address, for it may hold a password.
    raise ImproperlyConfigured(f"DATABASE_URL starting with {parts.scheme + '://'!r} is not understood. Write {FORMS}.")


def sqlite(path: str | Path) -> dict[str, Any]:
    """Return the entry for a SQLite file that several processes write to."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(path),
        "OPTIONS": {
            # A transaction that reads first and writes later would fail at once, whatever the timeout.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }


def choose_database(data_root: Path) -> dict[str, Any]:
    """Return the entry for this process; ``data_root`` is where a database of our own keeps its files."""
    if url := os.environ.get("DATABASE_URL"):
        return database_from_url(url)
    try:
        return database_from_url(EmbeddedPostgres.start(data_root / "postgres").url)
    except PostgresNotFound as error:
        data_root.mkdir(parents=True, exist_ok=True)
        print(f"Running on SQLite, which is slower and has one writer at a time. {error}", file=sys.stderr)
        return sqlite(data_root / "db.sqlite3")


def _postgres(parts: SplitResult, name: str) -> dict[str, Any]:
    # A primary and its standbys, as libpq writes them
    places = [urlsplit(f"//{place}") for place in parts.netloc.rpartition("@")[2].split(",")]
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": ",".join(unquote(place.hostname or "") for place in places),
        "PORT": ",".join(str(place.port or "") for place in places),
        "OPTIONS": dict(parse_qsl(parts.query)),
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
    }
