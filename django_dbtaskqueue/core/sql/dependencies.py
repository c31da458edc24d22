"""Statements about the ends of tasks that something waits for.

A statement names the task table alone, or the tables of dependencies alone: only the former has columns that a project
may rename.
"""

from __future__ import annotations

from django_dbtaskqueue.core.sql.dialects import Group, statement


class DependencyStatements(Group):
    """What waits for the end of a task, and how it is told."""

    @statement
    def ended_watched(self) -> str:
        """The tasks that ended and whose end is still to be told: ids, the lowest first."""
        return (
            f"SELECT id FROM {self.tables.task} WHERE watched AND final_status IS NOT NULL AND id > %(after)s"
            " ORDER BY id LIMIT %(limit)s"
        )

    @statement
    def lock_ended(self) -> str:
        """Of the given tasks those whose end is still to be told, as (id, status); locks them."""
        return (
            f"SELECT t.id, t.status FROM {self.tables.task} AS t WHERE t.id IN ({self.dialect.each('ids')})"
            f" AND t.watched AND t.final_status IS NOT NULL ORDER BY t.id {self.dialect.lock}"
        )

    @statement
    def set_told(self) -> str:
        """Note that the ends of tasks are told. Something still waits for another end of those in ``open``."""
        return (
            f"UPDATE {self.tables.task} SET watched = CASE WHEN id IN ({self.dialect.each('open')}) THEN false END"
            f" WHERE id IN ({self.dialect.each('ids')})"
        )
