"""One state of the database, for many connections to read at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django_dbtaskqueue.core.sql.stream import HORIZON
from django_dbtaskqueue.pipeline.database import Database


@dataclass(frozen=True)
class Snapshot:
    """The name of a state of ``database``; None on SQLite, which reads in one statement.

    ``horizon``: all transactions below this number had ended by then.
    """

    database: Database
    name: str | None
    horizon: int | None = None


@contextmanager
def open_snapshot(database: Database) -> Iterator[Snapshot]:
    """Hold the present state of a PostgreSQL database, for reads of any table in any number of partitions.

    It lives as long as the ``with`` block, on one connection of the driver. The server cannot vacuum away what has
    died since: keep the block as short as the scan. What a Spark task reads again, it reads from the same state.
    """
    if database.vendor != "postgresql":
        yield Snapshot(database, None)
        return
    with database.open() as link, link.transaction():
        link.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        link.run("SET LOCAL idle_in_transaction_session_timeout = 0")
        yield Snapshot(database, link.run("SELECT pg_export_snapshot()")[0][0], link.run(HORIZON)[0][0])
