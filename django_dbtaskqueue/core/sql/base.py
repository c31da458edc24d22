"""What every group of statements starts from: the names of one location's tables, and a dialect.

The texts use the seed's column names. A table with other names gets them replaced word by word, so what stands in the
statements reads true for the default table and holds for every other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from django_dbtaskqueue.core.sql.dialects import Dialect
from django_dbtaskqueue.core.states import sql_sources

# Values handed over, singly or as the rows ``u`` of a JSON array: named by us, not by the table.
PARAMETERS = r"%\(\w+\)s|\bu\.\w+|jsonb_to_recordset\(.*?\) AS u\(.*?\)|\(SELECT (?:nullif|value).*?\) AS u\b"
GROUP = "group"  # the parking reason of a task behind the head of its group
FENCED = {"i": "bigint", "k": "bigint"}  # a lease: id and token


@dataclass(frozen=True)
class Tables:
    """Quoted names of one location's tables, and the columns that are named otherwise there."""

    task: str
    history: str = '"dbtaskqueue_taskhistory"'
    attempt: str = '"dbtaskqueue_attempt"'
    deleted: str = '"dbtaskqueue_deletedtasks"'
    queue: str = '"dbtaskqueue_queue"'
    columns: Mapping[str, str] = field(default_factory=dict)  # seed's name -> quoted name

    def rename(self, sql: str) -> str:
        """Return ``sql`` with this table's column names; parameters and other tables' columns stay as they are."""
        if not self.columns:
            return sql
        others = "|".join(map(re.escape, (self.history, self.attempt, self.deleted)))
        kept = rf"{PARAMETERS}|INSERT INTO (?:{others}) \(.*?\)"
        names = "|".join(self.columns)
        return re.sub(rf"({kept})|\b({names})\b", lambda match: match[1] or self.columns[match[2]], sql)


class Group:
    """Statements of one purpose, each rendered once and cached, so that prepared statements are reused."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self.tables = tables
        self.dialect = dialect

    def fenced(self, verb: str, columns: Mapping[str, str] = FENCED) -> str:
        """Return the FROM and WHERE that join ``rows`` to the leases that still stand."""
        return (
            f"{self.tables.task} AS t JOIN {self.dialect.rows(columns)} ON t.id = u.i AND t.total_attempt = u.k"
            f" WHERE t.status IN ({sql_sources(verb)})"
        )

    @property
    def passing(self) -> str:
        """What a SELECT adds to lock its rows and pass over those others have locked."""
        return f"{self.dialect.lock} SKIP LOCKED" if self.dialect.skip_locked else ""
