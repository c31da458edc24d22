"""Which database the demo runs on, and its operator."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import connection

OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Database:
    """The database in use."""

    vendor: str
    version: str
    embedded: bool

    def __str__(self) -> str:
        return f"{connection.display_name} {self.version}{', embedded' if self.embedded else ''}"


def database() -> Database:
    """Connect, and say to what."""
    connection.ensure_connection()
    version = ".".join(map(str, connection.get_database_version()))
    embedded = connection.vendor == "postgresql" and not os.environ.get("DATABASE_URL")
    return Database(connection.vendor, version, embedded)


def lake() -> Path:
    """Return the folder of this database's lake: what one database archived is not another one's."""
    if connection.vendor == "postgresql" and not os.environ.get("DATABASE_URL"):
        return Path(settings.LAKES / "embedded")
    parts = [connection.vendor, *(str(connection.settings_dict[name]) for name in ("HOST", "PORT", "NAME"))]
    return Path(settings.LAKES / hashlib.sha256("|".join(parts).encode()).hexdigest()[:12])


def archived() -> int:
    """Count the tasks in this database's lake by the lake's own log, without Spark."""
    if not lake().exists():
        return 0
    from django_dbtaskqueue.pipeline.lake import Lake  # needs the extra "demo", as making a lake did

    return sum(file.rows for file in Lake.at(lake()).files("tasks"))


def make_operator() -> str:
    """Make the superuser ``operator``, or renew its password; return the password. It is new each time."""
    password = secrets.token_urlsafe(9)
    user, _ = get_user_model().objects.get_or_create(username=OPERATOR)
    user.is_staff = user.is_superuser = True
    user.set_password(password)
    user.save()
    return password
