"""PostgreSQL's binary COPY as Arrow, by ADBC: its driver in C makes a column of what Python would take row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg import sql

from django_dbtaskqueue.core.exceptions import PipelineError

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Connection

    from django_dbtaskqueue.pipeline.database import Database

BLOCK = 4 * 2**20  # bytes of one record batch
HINT = "adbc.postgresql.batch_size_hint_bytes"
ONE_STATE = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"


def copied(
    database: Database, query: str, params: Mapping[str, Any], schema: pa.Schema, snapshot: str | None
) -> Iterator[pa.RecordBatch]:
    """Yield what a query returns, in the state of the database that ``snapshot`` names, if any.

    Its columns are those of ``schema``, in that order. Raises `PipelineError` for a database that cannot be reached and
    a snapshot that is gone; other errors of the server are ADBC's.
    """
    text = query % {name: sql.Literal(value).as_string(None) for name, value in params.items()} if params else query
    with closing(database.connect_arrow()) as connection:
        if snapshot is not None:
            _join(connection, snapshot)
        with connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{HINT: str(BLOCK)})
            cursor.execute(text)
            for batch in cursor.fetch_record_batch():
                columns = [column.cast(one.type) for column, one in zip(batch.columns, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _join(connection: Connection, snapshot: str) -> None:
    from adbc_driver_manager import Error

    with connection.cursor() as cursor:
        cursor.execute(ONE_STATE)
        try:
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
        except Error as error:
            raise gone(snapshot, error) from None


def gone(snapshot: str, error: Exception) -> PipelineError:
    """Return the error of a snapshot that the server does not know."""
    return PipelineError(
        f"The snapshot {snapshot!r} is gone ({str(error).strip()}). Use the DataFrame inside its `with "
        "open_snapshot(database) as snapshot:` block, on the same server and database."
    )
