"""Statements of groups: one task of each group is ready, and the others are parked behind it."""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.dialects import GROUP, Group, statement


class GroupStatements(Group):
    """The head of each group: its first task. Callers hold the groups' locks."""

    @cached_property
    def lock_groups(self) -> str:
        """Lock groups to the end of the transaction, in one order everywhere. Nothing to do with a single writer."""
        return (
            "SELECT pg_advisory_xact_lock(hashtextextended(%(queue_name)s || ' ' || g, 0))"
            " FROM (SELECT g FROM unnest(%(groups)s::text[]) AS g ORDER BY g) AS x"
            if self.dialect.vendor == "postgresql"
            else "SELECT 1"
        )

    @statement
    def group_heads(self) -> str:
        """Of each group: its ready tasks, and the first parked one: due, or else the next to become due.

        As (group, id, whether ready, whether processing, whether a failed attempt is being retried, seconds until it
        is due, priority).
        """
        now = self.dialect.now
        groups = self.dialect.texts("groups", "g")
        wait = f"{self.dialect.greatest}({self.dialect.seconds_between(now, 't.next_process_time')}, 0)"
        columns = (
            f"t.group_key, t.id, t.ready_time IS NOT NULL, t.status = 'PROCESSING', t.attempt > 0, {wait}, t.priority"
        )
        parked = (
            f"SELECT p.id FROM {self.tables.task} AS p WHERE p.queue_name = %(queue_name)s AND p.group_key = g.g"
            f" AND p.parked_by = '{GROUP}' AND p.next_process_time"
        )
        due = f"({parked} <= {now} ORDER BY p.priority, p.id LIMIT 1)"
        later = f"({parked} > {now} ORDER BY p.next_process_time, p.priority, p.id LIMIT 1)"
        return (
            f"SELECT {columns} FROM {groups} JOIN {self.tables.task} AS t ON t.queue_name = %(queue_name)s"
            " AND t.group_key = g.g AND t.ready_time IS NOT NULL"
            f" UNION ALL SELECT {columns} FROM {self.tables.task} AS t"
            f" WHERE t.id IN (SELECT coalesce({due}, {later}) FROM {groups})"
        )

    @statement
    def make_ready(self) -> str:
        """Make heads of groups ready."""
        ready = f"{self.dialect.greatest}({self.dialect.now}, next_process_time)"
        return (
            f"UPDATE {self.tables.task} SET parked_by = NULL, ready_time = {ready}"
            f" WHERE id IN ({self.dialect.each('ids')}) AND parked_by = '{GROUP}' RETURNING id"
        )

    @statement
    def park(self) -> str:
        """Park tasks behind the head of their group."""
        return (
            f"UPDATE {self.tables.task} SET parked_by = '{GROUP}', ready_time = NULL"
            f" WHERE id IN ({self.dialect.each('ids')}) AND status = 'CREATED' RETURNING id"
        )
