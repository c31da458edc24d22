"""Statements of steps and signals. What writes a step locks the task's row while its lease holds.

A signal that was sent is a row of kind ``sent``, without a position.
"""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.outcomes import SIGNAL
from django_dbtaskqueue.core.sql.dialects import GROUP, Group, statement
from django_dbtaskqueue.core.states import sql_sources

OWN_LEASE = "t.id = %(task_id)s AND t.total_attempt = %(token)s"


class StepStatements(Group):
    """The steps of one task, and its signals. The alias ``step`` keeps the names of its columns."""

    @statement
    def steps(self) -> str:
        """The stored steps of a task.

        As (position, kind, name, result, seconds until the time, who sent the signal, whether of this task).
        """
        left = self.dialect.seconds_between(self.dialect.now, "step.until_time")
        return (
            f"SELECT step.position, step.kind, step.name, {self.dialect.text('step.result')}, {left},"
            f" step.actor, step.task_time = t.create_time FROM {self.tables.step} AS step JOIN {self.tables.task} AS t"
            " ON t.id = step.task_id WHERE step.location = %(location)s AND step.task_id = %(task_id)s"
            " AND step.kind <> 'sent'"
        )

    @statement
    def store_step(self) -> str:
        """Store a step while the lease holds, or end an open wait; locks the task."""
        json = "::jsonb" if self.dialect.vendor == "postgresql" else ""
        seconds = "CAST(%(seconds)s AS float8)"
        return (
            f"INSERT INTO {self.tables.step} AS step (location, task_id, task_time, position, name, kind, result,"
            " actor, until_time)"
            f" SELECT %(location)s, t.id, t.create_time, %(position)s, %(name)s, %(kind)s, %(result)s{json}, %(actor)s,"
            f" {self.dialect.maybe_later(seconds, start=self.dialect.now)}"
            f" FROM {self.tables.task} AS t WHERE {OWN_LEASE} AND t.status IN ({sql_sources('suspend')})"
            f" {self.dialect.lock}"
            f" ON CONFLICT (location, task_id, position) DO UPDATE SET kind = excluded.kind, result = excluded.result,"
            f" actor = excluded.actor, create_time = {self.dialect.now} WHERE step.kind = 'wait' RETURNING 1"
        )

    @statement
    def next_signal(self) -> str:
        """How many signals were sent to a task whose lease holds, and the id of the first one of a name not received.

        One statement: it sees both the count and the signal of each transaction, or neither.
        """
        first = (
            f"SELECT min(step.id) FROM {self.tables.step} AS step WHERE step.location = %(location)s"
            " AND step.task_id = t.id AND step.task_time = t.create_time AND step.name = %(name)s"
            " AND step.kind = 'sent'"
        )
        return (
            f"SELECT coalesce(t.signals, 0), ({first}) FROM {self.tables.task} AS t"
            f" WHERE {OWN_LEASE} AND t.status IN ({sql_sources('suspend')})"
        )

    @cached_property
    def receive_signal(self) -> str:
        """Take a signal, whose wait keeps its data from now on; returns the data, and who sent it."""
        return f"DELETE FROM {self.tables.step} WHERE id = %(signal)s RETURNING {self.dialect.text('result')}, actor"

    @statement
    def count_signal(self) -> str:
        """Count one more signal of a task that has not ended, and lock it: its settle compares the count."""
        return (
            f"UPDATE {self.tables.task} AS t SET signals = coalesce(t.signals, 0) + 1 WHERE t.id = %(task_id)s"
            " AND t.status IN ('CREATED', 'PROCESSING') RETURNING queue_name, group_key"
        )

    @statement
    def store_signal(self) -> str:
        """Store a signal of a task that ``count_signal`` has locked. Its kind is the column's default."""
        json = "::jsonb" if self.dialect.vendor == "postgresql" else ""
        return (
            f"INSERT INTO {self.tables.step} (location, task_id, task_time, name, result, actor)"
            f" SELECT %(location)s, t.id, t.create_time, %(name)s, %(data)s{json}, %(actor)s"
            f" FROM {self.tables.task} AS t WHERE t.id = %(task_id)s"
        )

    @statement
    def wake_signalled(self) -> str:
        """Make a task due that waits for a name. Apart from ``count_signal``, so that it sees what that waited for.

        Behind the head of its group the task gets its turn. Its time to live begins again, as with "run now".
        """
        now = self.dialect.now
        was = f"{self.dialect.least}(t.next_process_time, coalesce(t.ready_time, t.next_process_time))"
        apart = "t.group_key IS NULL OR t.ready_time IS NOT NULL"
        expire = self.dialect.later(self.dialect.seconds_between(was, now), start="t.expire_time")
        return (
            f"UPDATE {self.tables.task} AS t SET next_process_time = {now}, last_update_time = {now},"
            f" parked_by = CASE WHEN {apart} THEN NULL ELSE '{GROUP}' END,"
            f" ready_time = CASE WHEN {apart} THEN {now} END,"
            f" expire_time = CASE WHEN t.expire_time IS NOT NULL THEN {expire} END"
            f" WHERE t.id = %(task_id)s AND t.status IN ({sql_sources('signal')})"
            f" AND (t.parked_by IS NULL OR t.parked_by IN ('{SIGNAL}', '{GROUP}'))"
            f" AND EXISTS (SELECT 1 FROM {self.tables.step} AS step WHERE step.location = %(location)s"
            " AND step.task_id = t.id AND step.name = %(name)s AND step.kind = 'wait') RETURNING id"
        )
