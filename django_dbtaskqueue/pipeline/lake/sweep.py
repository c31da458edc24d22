"""Staging tables that a killed driver left behind."""

from __future__ import annotations

import sqlite3
from datetime import datetime, timedelta

import psycopg

from django_dbtaskqueue.core.sql.staging import PREFIX, STAMP, Staging
from django_dbtaskqueue.pipeline.database import Database

AFTER = timedelta(days=1)
FORMAT = "%Y%m%d%H%M%S"


def sweep_staging(database: Database, *, older_than: timedelta = AFTER) -> list[str]:
    """Drop the staging tables made longer ago than that; return their names. Each write does it for those of a day.

    A table being written to is left alone. A write that takes longer than ``older_than`` fails as a whole when its
    table is gone: it can lose nothing but time.
    """
    sql = Staging(database.tables, database.dialect)
    dropped = []
    with database.open() as link:
        now = _time(link.run(sql.stamp)[0][0])
        for (name,) in link.run(sql.existing):
            if now - _time(name.removeprefix(PREFIX)) < older_than:
                continue
            try:
                with link.transaction():
                    if link.postgresql:
                        link.run("SET LOCAL lock_timeout = '100ms'")
                    link.run(f'DROP TABLE IF EXISTS "{name}"')
                dropped.append(name)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege, sqlite3.OperationalError):
                continue  # in use, or another user's
    return dropped


def _time(stamp: str) -> datetime:
    return datetime.strptime(stamp[:STAMP], FORMAT)
