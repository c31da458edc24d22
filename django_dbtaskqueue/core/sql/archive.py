"""Out of the database into the lake: what the archive freezes, and what it deletes once the lake holds it.

Mostly nobody has written to any row of a batch since its export, which the rows themselves say: then ``remove_old``
deletes them by the batch's own predicate. Else the rows exported stand in the temporary tables ``archived_key`` (tasks)
and ``archived_attempt``, and a delete takes those among them that are still what was exported, by id, fencing token,
status and time of the last update.
"""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.base import Group
from django_dbtaskqueue.core.sql.stream import older
from django_dbtaskqueue.core.states import sql_sources

BATCH = '"dbtaskqueue_archivebatch"'
FINISHED = sql_sources("housekeep")  # to archive is to housekeep into the lake
COLUMNS = "id, token, location, source, lake, state, first_id, last_id, cutoff, statuses, queues, withdrawn"
KEYS = ("location", "id", "total_attempt", "status", "last_update_time")
ATTEMPT_KEYS = ("id", "location", "task_id")
OPEN_BATCHES = f"SELECT {COLUMNS} FROM {BATCH} WHERE state IN ('open', 'deleted') ORDER BY id"
CREATE = (
    f"INSERT INTO {BATCH} (token, location, source, lake, first_id, last_id, cutoff, statuses, queues)"
    " VALUES (%(token)s, %(location)s, %(source)s, %(lake)s, %(first_id)s, %(last_id)s, %(cutoff)s, %(statuses)s,"
    " %(queues)s)"
)


class Archiving(Group):
    """Statements of the archive for the tables of one location."""

    @property
    def _time(self) -> str:
        return "timestamptz" if self.dialect.vendor == "postgresql" else "text"

    @cached_property
    def cutoff(self) -> str:
        """The time ``age`` seconds ago."""
        return f"SELECT {self.dialect.later('-%(age)s')}"

    def frozen(self, source: str) -> str:
        """The next rows of ``task`` or ``history`` that a batch takes: (first id, last id, how many)."""
        table = {"task": self.tables.task, "history": self.tables.history}[source]
        sql = (
            f"SELECT min(x.id), max(x.id), count(*) FROM (SELECT id FROM {table} WHERE id > %(after)s"
            f" AND {self._wanted} ORDER BY id LIMIT %(limit)s) AS x"
        )
        return self.tables.rename(sql) if source == "task" else sql

    @property
    def _wanted(self) -> str:
        """The test for rows that a batch takes."""
        return (
            f"status IN ({FINISHED}) AND {self.dialect.one_of('status', 'statuses')}"
            f" AND coalesce(finish_time, last_update_time) < {self.dialect.time('%(cutoff)s')}"
            f" AND (%(every)s OR {self.dialect.one_of('queue_name', 'queues')})"
        )

    def remove_old(self, source: str, horizon: int) -> str:
        """Delete the rows of a batch that were last written before ``horizon``; return (number, sum of the
        tasks' ids, their exclusive or, sum of the total attempts).

        Whatever it deletes stood in a snapshot of that horizon, word for word. PostgreSQL only.
        """
        table, key = {"task": (self.tables.task, "id"), "history": (self.tables.history, "task_id")}[source]
        sql = (
            f"WITH gone AS (DELETE FROM {table} WHERE id BETWEEN %(first_id)s AND %(last_id)s AND {self._wanted}"
            f" AND {older(horizon)} RETURNING {key} AS k, total_attempt AS n)"
            " SELECT count(*), coalesce(sum(k), 0), coalesce(bit_xor(k), 0), coalesce(sum(n), 0) FROM gone"
        )
        return self.tables.rename(sql) if source == "task" else sql

    @cached_property
    def remove_exported_attempts(self) -> str:
        """Delete all the failed attempts exported."""
        return f"DELETE FROM {self.tables.attempt} WHERE id IN (SELECT id FROM archived_attempt)"

    @cached_property
    def attempts_in(self) -> str:
        """How many failed attempts the tasks of a range have."""
        return (
            f"SELECT count(*) FROM {self.tables.attempt} WHERE location = %(location)s"
            " AND task_id BETWEEN %(first_id)s AND %(last_id)s"
        )

    @cached_property
    def temporary(self) -> tuple[str, ...]:
        """The temporary tables of one delete."""
        end = " ON COMMIT DROP" if self.dialect.vendor == "postgresql" else ""
        return (
            f"CREATE TEMPORARY TABLE archived_key (location text, id bigint, total_attempt bigint, status text,"
            f" last_update_time {self._time}){end}",
            f"CREATE TEMPORARY TABLE archived_attempt (id bigint, location text, task_id bigint){end}",
            f"CREATE TEMPORARY TABLE archived_gone (location text, id bigint, row_id bigint){end}",
        )

    def _unchanged(self, source: str) -> str:
        """Return the join of rows ``t`` to the exported keys ``k`` that holds while nobody has changed the row."""
        key = "t.id = k.id" if source == "task" else "t.task_id = k.id AND t.location = k.location"
        time = "t.last_update_time = k.last_update_time"
        if self.dialect.vendor == "sqlite":  # texts of one time differ; a change moves it by more than a millisecond
            time = "abs(julianday(t.last_update_time) - julianday(k.last_update_time)) < 1e-8"
        return (
            f"{key} AND t.total_attempt = k.total_attempt AND t.status = k.status AND {time}"
            f" AND t.status IN ({FINISHED})"
        )

    def _gone(self, rows: str) -> str:
        return f"INSERT INTO archived_gone (location, id, row_id) {rows}"

    def remove(self, source: str) -> str:
        """Delete the rows exported that are still what they were; waits for rows others have locked."""
        table = {"task": self.tables.task, "history": self.tables.history}[source]
        if self.dialect.vendor == "sqlite":
            sql = self._gone(f"SELECT k.location, k.id, t.id FROM {table} AS t, archived_key AS k"
                             f" WHERE {self._unchanged(source)}")  # fmt: skip
        else:
            sql = (
                f"WITH gone AS (DELETE FROM {table} AS t USING archived_key AS k WHERE {self._unchanged(source)}"
                f" RETURNING k.location, k.id AS task_id, t.id) {self._gone('SELECT location, task_id, id FROM gone')}"
            )
        return self.tables.rename(sql) if source == "task" else sql

    def lock(self, source: str) -> str:
        """Lock the same rows, passing over those that others have locked: they stay."""
        table = {"task": self.tables.task, "history": self.tables.history}[source]
        sql = self._gone(
            f"SELECT k.location, k.id, t.id FROM {table} AS t JOIN archived_key AS k ON {self._unchanged(source)}"
            " FOR UPDATE OF t SKIP LOCKED"
        )
        return self.tables.rename(sql) if source == "task" else sql

    def remove_locked(self, source: str) -> str:
        """Delete the rows that ``lock`` (or, on SQLite, ``remove``) has chosen in this transaction."""
        table = {"task": self.tables.task, "history": self.tables.history}[source]
        sql = f"DELETE FROM {table} WHERE id IN (SELECT row_id FROM archived_gone)"
        return self.tables.rename(sql) if source == "task" else sql

    @cached_property
    def remove_attempts(self) -> str:
        """Delete the failed attempts exported of tasks that are gone."""
        return (
            f"DELETE FROM {self.tables.attempt} WHERE id IN (SELECT a.id FROM archived_attempt AS a"
            " JOIN archived_gone AS g ON a.task_id = g.id AND a.location = g.location)"
        )

    @property
    def counted(self) -> str:
        """How many tasks are gone."""
        return "SELECT count(*) FROM archived_gone"

    @property
    def withdrawn(self) -> str:
        """The exported tasks that are not: (location, id)."""
        return (
            "SELECT k.location, k.id FROM archived_key AS k WHERE NOT EXISTS"
            " (SELECT 1 FROM archived_gone AS g WHERE g.id = k.id AND g.location = k.location)"
        )

    @property
    def batch_deleted(self) -> str:
        """Say, in the transaction that deletes, that a batch's rows are gone; fenced by its state."""
        return (
            f"UPDATE {BATCH} SET state = 'deleted', tasks = %(tasks)s, attempts = %(attempts)s,"
            " withdrawn = %(withdrawn)s, size = %(size)s WHERE token = %(token)s AND state = 'open'"
        )

    @property
    def batch_ended(self) -> str:
        """Close or abandon a batch; fenced by the state it must be in."""
        return (
            f"UPDATE {BATCH} SET state = %(state)s, note = %(note)s, close_time = {self.dialect.now}"
            " WHERE token = %(token)s AND state = %(before)s"
        )
