"""What PostgreSQL and SQLite say differently."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MANY = 1_000_000  # rows: more than any batch
SQLITE_FORMAT = "%%Y-%%m-%%d %%H:%%M:%%f"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Fragments of SQL for one kind of database. The clock is always the database's."""

    vendor: str
    now: str
    greatest: str
    least: str
    lock: str  # what a SELECT adds to lock the rows of ``t`` it reads
    skip_locked: bool
    single: bool = False  # ``rows`` is one row of plain parameters

    def later(self, seconds: str, *, start: str | None = None) -> str:
        """Return the time ``seconds`` (an SQL expression, may be fractional) after ``start`` (now by default)."""
        if self.vendor == "postgresql":
            return f"{start or self.now} + {seconds} * interval '1 second'"
        return f"strftime('{SQLITE_FORMAT}', {start or repr('now')}, printf('%%.3f seconds', {seconds}))"

    def maybe_later(self, seconds: str, *, start: str) -> str:
        """Return ``later``, or NULL where ``seconds`` is NULL."""
        if self.vendor == "postgresql":
            return self.later(seconds, start=start)
        return f"CASE WHEN {seconds} IS NOT NULL THEN {self.later(seconds, start=start)} END"

    def seconds_between(self, early: str, late: str) -> str:
        """Return the seconds from ``early`` to ``late`` as a float."""
        if self.vendor == "postgresql":
            return f"extract(epoch FROM {late} - {early})::float8"
        return f"(julianday({late}) - julianday({early})) * 86400.0"

    def rows(self, columns: Mapping[str, str], *, param: str = "rows") -> str:
        """Return a FROM item ``u`` over a JSON array of objects, with the given columns and PostgreSQL types."""
        if self.single:
            cast = "::{}" if self.vendor == "postgresql" else ""
            picked = ", ".join(f"%({name})s{cast.format(kind)} AS {name}" for name, kind in columns.items())
            return f"(SELECT {picked}) AS u"
        if self.vendor == "postgresql":
            typed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
            # A LIMIT of unknown size makes the planner expect ten rows, and fetch what they join by primary key. Of
            # more it would rather scan the table for the status, of which the statistics know hardly any row.
            return f"(SELECT * FROM jsonb_to_recordset(%({param})s::jsonb) AS u({typed}) LIMIT (SELECT {MANY})) AS u"
        # ->> turns JSON true into 1 and null into NULL; -> keeps a value as JSON text
        picked = ", ".join(
            f"nullif(value -> '$.{name}', 'null') AS {name}" if kind == "jsonb" else f"value ->> '$.{name}' AS {name}"
            for name, kind in columns.items()
        )
        return f"(SELECT {picked} FROM json_each(%({param})s)) AS u"

    def one_of(self, column: str, param: str) -> str:
        """Return the test that a text column is among those of an array parameter (``array``)."""
        if self.vendor == "postgresql":
            return f"{column} = ANY(%({param})s::text[])"
        return f"{column} IN (SELECT value FROM json_each(%({param})s))"

    def each(self, param: str) -> str:
        """Return a SELECT of the whole numbers of an array parameter (``array``)."""
        if self.vendor == "postgresql":
            return f"SELECT unnest(%({param})s::bigint[])"
        return f"SELECT value FROM json_each(%({param})s)"

    def array(self, values: Iterable[str | int]) -> Any:
        """Return an array parameter."""
        return list(values) if self.vendor == "postgresql" else json.dumps(list(values))

    def time(self, expression: str) -> str:
        """Return a text parameter as a time."""
        return f"{expression}::timestamptz" if self.vendor == "postgresql" else expression

    def text(self, column: str) -> str:
        """Return a JSON column as text, so that it is decoded once, by us."""
        return f"{column}::text" if self.vendor == "postgresql" else column


POSTGRESQL = Dialect("postgresql", "statement_timestamp()", "greatest", "least", "FOR NO KEY UPDATE OF t", True)
SQLITE = Dialect("sqlite", f"strftime('{SQLITE_FORMAT}', 'now')", "max", "min", "", False)
DIALECTS = {dialect.vendor: dialect for dialect in (POSTGRESQL, SQLITE)}
