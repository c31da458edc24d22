"""Statements of retention. Each one takes a bounded number of rows and skips locked ones."""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.columns import HISTORY_COLUMNS
from django_dbtaskqueue.core.sql.dialects import Group, statement
from django_dbtaskqueue.core.states import sql_sources


class RetentionStatements(Group):
    """What housekeeping does, one batch at a time."""

    @statement
    def finished(self) -> str:
        """The next finished tasks of a queue and status behind an id: (id, seconds since it ended, since it was made).

        Ids grow with time, so the caller can stop at the first task that was created too late.
        """
        now, ended = self.dialect.now, "coalesce(finish_time, last_update_time)"
        return (
            f"SELECT id, {self.dialect.seconds_between(ended, now)},"
            f" {self.dialect.seconds_between('create_time', now)}"
            f" FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND final_status = %(status)s"
            " AND id > %(after)s ORDER BY id LIMIT %(limit)s"
        )

    @statement
    def expired(self) -> str:
        """Tasks of a queue that wait, ready or parked, and are past their time to live."""
        found = (
            f"SELECT id FROM {self.tables.task} WHERE queue_name = %(queue_name)s"
            f" AND status = 'CREATED' AND expire_time <= {self.dialect.now}"
        )
        return f"{found} AND ready_time IS NOT NULL UNION ALL {found} AND parked_by IS NOT NULL LIMIT %(limit)s"

    @statement
    def lock(self) -> str:
        """Lock those of the given tasks that are still finished as they were and that are told to have ended.

        Returns (id, watched); not NULL: a task may wait for another end of it (``needed``).
        """
        return (
            f"SELECT t.id, t.watched FROM {self.tables.task} AS t WHERE t.id IN ({self.dialect.each('ids')})"
            f" AND t.final_status = %(status)s AND t.status IN ({sql_sources('housekeep')})"
            " AND (t.watched IS NULL OR NOT t.watched)"
            f" ORDER BY t.id {self.skipping}"
        )

    @statement
    def lock_reported(self) -> str:
        """Lock the failed tasks that a task may wait for; returns their ids."""
        return (
            f"SELECT t.id FROM {self.tables.task} AS t WHERE NOT t.watched"
            f" AND t.final_status IN ({sql_sources('housekeep')}) ORDER BY t.id {self.skipping}"
        )

    @cached_property
    def needed(self) -> str:
        """Those of the given tasks that a task waits for.

        The tasks are locked by a statement before: a statement sees no row of a dependency that came after its start.
        """
        return (
            f"SELECT DISTINCT d.parent_id FROM {self.tables.dependency} AS d JOIN {self.tables.hold} AS h"
            " ON h.location = d.child_location AND h.task_id = d.child_id"
            f" WHERE d.parent_location = %(location)s AND d.parent_id IN ({self.dialect.each('ids')})"
            " AND d.outcome IS NULL"
        )

    @statement
    def unwatch(self) -> str:
        """Note that nothing waits for tasks any more."""
        return f"UPDATE {self.tables.task} SET watched = NULL WHERE id IN ({self.dialect.each('ids')})"

    @statement
    def keep(self) -> str:
        """Copy locked tasks into the history."""
        names = ", ".join(column.db for column in HISTORY_COLUMNS)
        values = ", ".join(f"t.{column.db}" for column in HISTORY_COLUMNS)
        return (
            f"INSERT INTO {self.tables.history} (location, task_id, {names}) SELECT %(location)s, t.id, {values}"
            f" FROM {self.tables.task} AS t WHERE t.id IN ({self.dialect.each('ids')})"
        )

    @statement
    def count(self) -> str:
        """Count locked tasks that are about to be deleted for good."""
        return self._counting(f"{self.tables.task} AS t WHERE t.id IN ({self.dialect.each('ids')})", "t.queue_name")

    @statement
    def delete(self) -> str:
        return f"DELETE FROM {self.tables.task} WHERE id IN ({self.dialect.each('ids')}) RETURNING id"

    @cached_property
    def old_history(self) -> str:
        """Some rows of a table of the history that moved there long ago; locks them."""
        return (
            f"SELECT id FROM {{table}} AS t WHERE moved_time <= {self.dialect.later('%(age)s')}"
            f" ORDER BY id LIMIT %(limit)s {self.skipping}"
        )

    @cached_property
    def delete_history(self) -> tuple[str, str]:
        """Count rows of the history, and delete them."""
        chosen = f"WHERE id IN ({self.dialect.each('ids')})"
        return self._counting(f"{{table}} {chosen}"), f"DELETE FROM {{table}} {chosen} RETURNING id"

    @cached_property
    def count_all(self) -> str:
        """Count all rows of a month of the history, which is about to be dropped."""
        return self._counting("{table}")

    @cached_property
    def delete_attempts(self) -> str:
        """Delete the oldest records of failed attempts, as far as they are old."""
        oldest = f"SELECT id FROM {self.tables.attempt} AS t ORDER BY id LIMIT %(limit)s {self.skipping}"
        return (
            f"DELETE FROM {self.tables.attempt} WHERE {self.dialect.among('id', oldest)}"
            f" AND finish_time <= {self.dialect.later('%(age)s')} RETURNING id"
        )


# -- erase -------------------------------------------------------------------------------------------------------------

# Statements of the job ``erase``: the tasks of some references, and all rows about these tasks.
#
# ``references`` and ``queues`` are array parameters; ``every`` is true for all queues. ``rows`` are tasks by
# location and id.

ERASED_TASK_TYPES = {"location": "text", "task_id": "bigint"}
CHANGES_TABLE = '"dbtaskqueue_taskchange"'
AUDIT_TABLE = '"dbtaskqueue_auditentry"'


class EraseStatements(Group):
    """What `erase` finds, counts and removes in a database."""

    @property
    def _wanted(self) -> str:
        queues = self.dialect.one_of("queue_name", "queues")
        return f"{self.dialect.one_of('reference_number', 'references')} AND (%(every)s OR {queues})"

    @statement
    def tasks(self) -> str:
        """The tasks of these references, as (reference, id, status, watched); locks them as housekeeping does."""
        return (
            f"SELECT t.reference_number, t.id, t.status, t.watched FROM {self.tables.task} AS t WHERE {self._wanted}"
            f" ORDER BY t.id {self.dialect.lock}"
        )

    @cached_property
    def history(self) -> str:
        """The tasks of these references in the history, as (reference, location, task)."""
        return f"SELECT reference_number, location, task_id FROM {self.tables.history} WHERE {self._wanted}"

    @cached_property
    def used_references(self) -> str:
        """Which of these references stay taken, once for each queue."""
        return f"SELECT reference_number FROM {self.tables.ledger} WHERE {self._wanted}"

    @cached_property
    def count_history(self) -> str:
        return self._counting(f"{self.tables.history} WHERE {self._wanted}")

    @cached_property
    def count_archived(self) -> str:
        """Count tasks of one queue that leave the lake."""
        return f"INSERT INTO {self.tables.counts} (kind, queue_name, count) VALUES ('deletion', %(queue)s, %(count)s)"

    @cached_property
    def delete_history(self) -> str:
        return f"DELETE FROM {self.tables.history} WHERE {self._wanted}"

    @cached_property
    def delete_used_references(self) -> str:
        return f"DELETE FROM {self.tables.ledger} WHERE {self._wanted}"

    @property
    def about(self) -> dict[str, tuple[str, str]]:
        """By place: the count of the rows about the tasks ``rows``, and the statement that removes them.

        Changes by operators stay, without the values that they hold of these tasks.
        """
        joined = f"JOIN {self.dialect.rows(ERASED_TASK_TYPES)} ON t.location = u.location"
        found = {}
        for place, table in {"attempts": self.tables.attempt, "steps and signals": self.tables.step}.items():
            rows = f"FROM {table} AS t {joined} AND t.task_id = u.task_id"
            found[place] = f"SELECT count(*) {rows}", f"DELETE FROM {table} WHERE id IN (SELECT t.id {rows})"
        rows = (
            f"FROM {CHANGES_TABLE} AS t {joined} AND u.task_id BETWEEN t.first_task_id AND t.last_task_id"
            f" AND {self._names_task} WHERE t.before IS NOT NULL OR t.difference IS NOT NULL"
        )
        clear = f"UPDATE {CHANGES_TABLE} SET before = NULL, difference = NULL WHERE id IN (SELECT t.id {rows})"
        return {**found, "changes by operators": (f"SELECT count(DISTINCT t.id) {rows}", clear)}

    @property
    def _names_task(self) -> str:
        if self.dialect.vendor == "postgresql":
            return "t.task_ids @> to_jsonb(u.task_id)"
        return "u.task_id IN (SELECT named.value FROM json_each(t.task_ids) AS named)"

    @cached_property
    def lakes(self) -> str:
        """The lakes that hold tasks of this database."""
        return "SELECT DISTINCT lake FROM \"dbtaskqueue_archivebatch\" WHERE state = 'closed' ORDER BY lake"

    @cached_property
    def audit(self) -> str:
        """Begin the record of an erasure; returns its id."""
        return (
            f"INSERT INTO {AUDIT_TABLE} (actor, source, verb, reason, details)"
            " VALUES (%(actor)s, 'command', 'erase', %(reason)s, %(details)s) RETURNING id"
        )

    @cached_property
    def audited(self) -> str:
        """Complete the record of an erasure."""
        return f"UPDATE {AUDIT_TABLE} SET changed = %(changed)s, details = %(details)s WHERE id = %(id)s"

    @property
    def tables_of_people(self) -> tuple[str, ...]:
        """The tables that lose rows."""
        own = self.tables
        return own.task, own.history, own.attempt, own.step, own.ledger, CHANGES_TABLE
