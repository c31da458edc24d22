"""From a staging table into TASKS: how the data pipeline enqueues in bulk, with the meaning of ``enqueue_many``.

A staging table is a plain table named by its time of birth. Executors fill it, each attempt of theirs under a number;
one transaction at the end takes the rows of the attempts that counted, and drops it. Staged columns are named ``u.``.
"""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.base import GROUP, Group
from django_dbtaskqueue.core.sql.enqueue import GIVEN, PLACE

PREFIX = "dbtaskqueue_stg_"
STAMP = 14  # digits of the time in a staging table's name, in UTC
STAGED = {"queue_name": "text", **GIVEN, "delay": "float8", "run_at": "timestamptz", "ttl": "float8"}
LEDGER = '"dbtaskqueue_streamledger"'


class Staging(Group):
    """Statements about staging tables; ``table`` is a quoted name."""

    @cached_property
    def stamp(self) -> str:
        """Now, as it stands in the name of a staging table."""
        if self.dialect.vendor == "postgresql":
            return "SELECT to_char(statement_timestamp() AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISS')"
        return "SELECT strftime('%%Y%%m%%d%%H%%M%%S', 'now')"

    @cached_property
    def existing(self) -> str:
        """The names of all staging tables."""
        if self.dialect.vendor == "postgresql":
            return (
                f"SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^{PREFIX}[0-9]{{{STAMP}}}_'"
                " AND pg_table_is_visible(oid) ORDER BY relname"
            )
        return f"SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE '{PREFIX}%%' ORDER BY name"

    def create(self, table: str) -> str:
        """Make a staging table; what a crash of the server would lose, the lost job writes again."""
        columns = ", ".join(f"{name} {kind}" for name, kind in {"_attempt": "bigint", **STAGED}.items())
        if self.dialect.vendor == "postgresql":
            return f"CREATE UNLOGGED TABLE {table} ({columns}) WITH (autovacuum_enabled = false)"
        return f"CREATE TABLE {table} ({columns})"

    def insert(self, table: str, *, ignore: bool, timed: bool, grouped: bool) -> str:
        """Insert the rows of ``attempts``. In the order of their references: two writers never wait in a circle.

        Without ``ignore`` a taken reference fails the statement.
        """
        due = self._due() if timed else self.dialect.now
        expire = self.dialect.maybe_later("u.ttl", start=due) if timed else "NULL"
        ready, parked = due, "NULL"
        if grouped:
            ready = f"CASE WHEN u.group_key IS NULL THEN {due} END"
            parked = f"CASE WHEN u.group_key IS NOT NULL THEN '{GROUP}' END"
        byte_wise = ' COLLATE "C"' if self.dialect.vendor == "postgresql" else ""
        conflict = " ON CONFLICT (reference_number, queue_name) DO NOTHING" if ignore else ""
        return self.tables.rename(
            f"INSERT INTO {self.tables.task} (queue_name, {', '.join(GIVEN)}, {PLACE})"
            f" SELECT u.queue_name, {', '.join(f'u.{name}' for name in GIVEN)}, {due}, {ready}, {parked}, {expire}"
            f" FROM {self._counted(table)} ORDER BY u.reference_number{byte_wise}, u.queue_name{byte_wise}{conflict}"
        )

    def _due(self) -> str:
        base = f"{self.dialect.greatest}({self.dialect.now}, coalesce(u.run_at, {self.dialect.now}))"
        return self.dialect.later("coalesce(u.delay, 0)", start=base)

    def _counted(self, table: str) -> str:
        return f"{table} AS u WHERE u._attempt IN ({self.dialect.each('attempts')})"

    def taken(self, table: str) -> str:
        """The first staged reference that a task holds, as (queue, reference, task, status)."""
        return self.tables.rename(
            f"SELECT u.queue_name, u.reference_number, t.id, t.status FROM {table} AS u JOIN {self.tables.task} AS t"
            " ON t.reference_number = u.reference_number AND t.queue_name = u.queue_name"
            f" WHERE u._attempt IN ({self.dialect.each('attempts')}) ORDER BY 2, 1 LIMIT 1"
        )

    def twice(self, table: str) -> str:
        """The first reference that stands twice among the staged rows, as (queue, reference)."""
        return (
            f"SELECT u.queue_name, u.reference_number FROM {self._counted(table)} AND u.reference_number IS NOT NULL"
            " GROUP BY u.queue_name, u.reference_number HAVING count(*) > 1 ORDER BY 2, 1 LIMIT 1"
        )

    def groups(self, table: str) -> str:
        """How many groups the rows of ``attempts`` name."""
        return f"SELECT count(*) FROM ({self._groups(table)}) AS g"

    def _groups(self, table: str) -> str:
        return f"SELECT DISTINCT u.queue_name AS q, u.group_key AS k FROM {self._counted(table)} AND u.group_key > ''"

    def lock_groups_of(self, table: str) -> str:
        """Lock these groups to the end of the transaction, as ``Grouping.lock_groups`` does and in its order."""
        return (
            "SELECT pg_advisory_xact_lock(hashtextextended(x.q || ' ' || x.k, 0))"
            f" FROM ({self._groups(table)} ORDER BY q, k) AS x"
        )

    @cached_property
    def lock_table(self) -> str:
        """Let nobody else write tasks until the end of the transaction: when there are too many groups to lock."""
        return f"LOCK TABLE {self.tables.task} IN SHARE ROW EXCLUSIVE MODE"

    def misplaced(self, table: str) -> str:
        """Of the groups just written: (id, whether in line) of heads not in line, and of others that are.

        The head is the one being processed, the one being retried, else the first that is due (``groups.choose``).
        """
        wait = f"{self.dialect.greatest}({self.dialect.seconds_between(self.dialect.now, 't.next_process_time')}, 0)"
        rank = (
            "CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN t.ready_time IS NOT NULL AND t.attempt > 0 THEN 1"
            f" ELSE 2 END, {wait}, t.priority, t.id"
        )
        return self.tables.rename(
            "SELECT m.id, m.in_line FROM (SELECT t.id AS id, t.ready_time IS NOT NULL AS in_line,"
            f" t.status AS s, row_number() OVER (PARTITION BY t.queue_name, t.group_key ORDER BY {rank}) AS place"
            f" FROM {self.tables.task} AS t JOIN ({self._groups(table)}) AS g"
            f" ON t.queue_name = g.q AND t.group_key = g.k WHERE t.ready_time IS NOT NULL OR t.parked_by = '{GROUP}'"
            ") AS m WHERE m.place = 1 AND NOT m.in_line OR m.place > 1 AND m.in_line AND m.s <> 'PROCESSING'"
        )

    @cached_property
    def enter(self) -> str:
        """Enter (``query``, ``batch``) in the ledger; no row is written when it stands there."""
        return (
            f"INSERT INTO {LEDGER} (query, batch, rows) VALUES (%(query)s, %(batch)s, 0)"
            " ON CONFLICT (query, batch) DO NOTHING"
        )

    @cached_property
    def entered(self) -> str:
        """Say in the ledger how many rows were written."""
        return f"UPDATE {LEDGER} SET rows = %(rows)s WHERE query = %(query)s AND batch = %(batch)s"
