"""Statements of the job ``erase``: the tasks of some references, and all rows about these tasks.

``references`` and ``queues`` are array parameters; ``every`` is true for all queues. ``rows`` are tasks by location
and id.
"""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.dialects import Group, statement

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
    def _about(self) -> str:
        joined = f"JOIN {self.dialect.rows(ERASED_TASK_TYPES)} ON t.location = u.location AND t.task_id = u.task_id"
        return f"FROM {{table}} AS t {joined}"

    @cached_property
    def count_about(self) -> str:
        """How many rows of a table are about the tasks ``rows``."""
        return f"SELECT count(*) {self._about}"

    @cached_property
    def delete_about(self) -> str:
        return f"DELETE FROM {{table}} WHERE id IN (SELECT t.id {self._about})"

    @property
    def _changed(self) -> str:
        return (
            f"FROM {CHANGES_TABLE} AS t JOIN {self.dialect.rows(ERASED_TASK_TYPES)} ON t.location = u.location"
            f" AND u.task_id BETWEEN t.first_task_id AND t.last_task_id AND {self._names_task}"
            " WHERE t.before IS NOT NULL OR t.difference IS NOT NULL"
        )

    @cached_property
    def count_changes(self) -> str:
        """How many changes by operators hold values of the tasks ``rows``."""
        return f"SELECT count(DISTINCT t.id) {self._changed}"

    @cached_property
    def clear_changes(self) -> str:
        return f"UPDATE {CHANGES_TABLE} SET before = NULL, difference = NULL WHERE id IN (SELECT t.id {self._changed})"

    @property
    def about(self) -> dict[str, tuple[str, str]]:
        """By place: the count of the rows about tasks, and the statement that removes them."""
        own = {"attempts": self.tables.attempt, "steps and signals": self.tables.step}
        found = {
            place: (self.count_about.format(table=table), self.delete_about.format(table=table))
            for place, table in own.items()
        }
        return {**found, "changes by operators": (self.count_changes, self.clear_changes)}

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
