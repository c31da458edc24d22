"""Statements about tasks that wait for the ends of others.

A statement names the task table alone, or the tables of dependencies alone: only the former has columns that a project
may rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from django_dbtaskqueue.core.outcomes import SIGNAL
from django_dbtaskqueue.core.sql.dialects import GROUP, PARENTS, Group, statement
from django_dbtaskqueue.core.states import sql_sources

EDGE_TYPES = {
    "parent_location": "text", "parent_id": "bigint", "child_location": "text", "child_id": "bigint", "name": "text",
    "outcome": "text",
}  # fmt: skip
HOLD_TYPES = {"location": "text", "task_id": "bigint", "remaining": "int", "on_parent_failure": "text"}


class DependencyStatements(Group):
    """What waits for the end of a task, and how it is told."""

    # -- the task table ----------------------------------------------------------------------------------------------

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
    def mark_reported(self) -> str:
        """Note that the ends of tasks are told. Something still waits for another end of those in ``open``."""
        return (
            f"UPDATE {self.tables.task} SET watched = CASE WHEN id IN ({self.dialect.each('open')}) THEN false END"
            f" WHERE id IN ({self.dialect.each('ids')})"
        )

    @statement
    def lock_parents(self) -> str:
        """The given tasks as (id, status); locks them, so that none ends before its children are written."""
        return (
            f"SELECT t.id, t.status FROM {self.tables.task} AS t WHERE t.id IN ({self.dialect.each('ids')})"
            f" ORDER BY t.id {self.dialect.lock}"
        )

    @statement
    def watch(self) -> str:
        """Note that something waits for the ends of tasks; for another end of those that failed."""
        return (
            f"UPDATE {self.tables.task} SET watched = final_status IS NULL OR coalesce(watched, false)"
            f" WHERE id IN ({self.dialect.each('ids')})"
        )

    @statement
    def join_batch(self) -> str:
        """Note that tasks belong to a batch."""
        return f"UPDATE {self.tables.task} SET batch = %(batch)s WHERE id IN ({self.dialect.each('ids')})"

    @statement
    def hold_again(self) -> str:
        """Let tasks wait again that were cancelled because a parent had failed."""
        return (
            f"UPDATE {self.tables.task} SET status = 'CREATED', final_status = NULL, parked_by = '{PARENTS}',"
            f" attempt = 0, finish_time = NULL, process_result = NULL, last_update_time = {self.dialect.now},"
            " watched = CASE WHEN watched IS NOT NULL THEN true END"
            f" WHERE id IN ({self.dialect.each('ids')}) AND status IN ({sql_sources('kick')}) RETURNING id, queue_name"
        )

    @statement
    def ask_again(self) -> str:
        """Let the ends of failed tasks of a batch be told once more."""
        return (
            f"UPDATE {self.tables.task} SET watched = true WHERE batch = %(batch)s"
            " AND final_status IN ('ERROR', 'POISON') AND NOT watched"
        )

    @statement
    def present(self) -> str:
        """Which of the given tasks are in the table."""
        return f"SELECT id FROM {self.tables.task} WHERE id IN ({self.dialect.each('ids')})"

    @statement
    def let_go(self) -> str:
        """Let tasks start whose parents have ended. Each one once: this takes the reason away that they waited for."""
        now = self.dialect.now
        return (
            f"UPDATE {self.tables.task} SET parked_by = CASE WHEN group_key IS NOT NULL THEN '{GROUP}' END,"
            f" last_update_time = {now},"
            f" ready_time = CASE WHEN group_key IS NULL THEN {self.dialect.greatest}({now}, next_process_time) END"
            f" WHERE id IN ({self.dialect.each('ids')}) AND parked_by = '{PARENTS}' RETURNING id, queue_name, group_key"
        )

    @statement
    def cancel_held(self) -> str:
        """Cancel tasks that still wait for a parent that failed; returns (id, queue, whether something waits)."""
        now = self.dialect.now
        return (
            f"UPDATE {self.tables.task} AS t SET status = 'POISON', final_status = 'POISON', parked_by = NULL,"
            f" finish_time = {now}, last_update_time = {now}, process_result = u.reason_text"
            f" FROM {self.dialect.rows({'child': 'bigint', 'reason_text': 'text'})} WHERE t.id = u.child"
            f" AND t.parked_by = '{PARENTS}' AND t.status IN ({sql_sources('cancel')})"
            " RETURNING id, queue_name, watched"
        )

    # -- dependencies and held tasks ---------------------------------------------------------------------------------

    @cached_property
    def open_edges(self) -> str:
        """What waits for the given parents: (edge, parent, location of the child, child); locks the edges."""
        return (
            f"SELECT t.id, t.parent_id, t.child_location, t.child_id FROM {self.tables.dependency} AS t"
            f" WHERE t.parent_location = %(location)s AND t.parent_id IN ({self.dialect.each('ids')})"
            f" AND t.outcome IS NULL ORDER BY t.id {self.dialect.lock}"
        )

    @cached_property
    def lock_holds(self) -> str:
        """The given held tasks as (id, what to do when a parent fails); locks them."""
        return (
            f"SELECT t.task_id, t.on_parent_failure FROM {self.tables.hold} AS t WHERE t.location = %(location)s"
            f" AND t.task_id IN ({self.dialect.each('ids')}) ORDER BY t.task_id {self.dialect.lock}"
        )

    @cached_property
    def end_edges(self) -> str:
        """Note that waits have ended, by the status of the parent."""
        return f"UPDATE {self.tables.dependency} SET outcome = %(status)s WHERE id IN ({self.dialect.each('ids')})"

    @cached_property
    def count_down(self) -> str:
        """Take ended parents off the counts of held tasks; returns (id, how many are left)."""
        return (
            f"UPDATE {self.tables.hold} AS t SET remaining = t.remaining - u.number"
            f" FROM {self.dialect.rows({'child': 'bigint', 'number': 'int'})}"
            " WHERE t.location = %(location)s AND t.task_id = u.child RETURNING task_id, remaining"
        )

    @cached_property
    def drop_holds(self) -> str:
        """Delete the rows of tasks that wait no more."""
        return (
            f"DELETE FROM {self.tables.hold} WHERE location = %(location)s AND task_id IN ({self.dialect.each('ids')})"
        )

    @cached_property
    def insert_edges(self) -> str:
        return self._insert(self.tables.dependency, EDGE_TYPES)

    @cached_property
    def insert_holds(self) -> str:
        return self._insert(self.tables.hold, HOLD_TYPES)

    def _insert(self, table: str, types: Mapping[str, str]) -> str:
        picked = ", ".join(f"u.{name}" for name in types)
        return f"INSERT INTO {table} ({', '.join(types)}) SELECT {picked} FROM {self.dialect.rows(types)}"

    @cached_property
    def edge_range(self) -> str:
        """The lowest and the highest id of a dependency."""
        return f"SELECT min(id), max(id) FROM {self.tables.dependency}"

    @cached_property
    def open_parents(self) -> str:
        """The parents of some dependencies whose wait has not ended."""
        return f"{self._side('parent')} AND outcome IS NULL"

    @cached_property
    def waited_for(self) -> str:
        """The children of some dependencies."""
        return self._side("child")

    def _side(self, side: str) -> str:
        return (
            f"SELECT DISTINCT {side}_id FROM {self.tables.dependency} WHERE id > %(after)s AND id <= %(until)s"
            f" AND {side}_location = %(location)s"
        )

    @cached_property
    def drop_edges(self) -> str:
        return (
            f"DELETE FROM {self.tables.dependency} WHERE child_location = %(location)s"
            f" AND child_id IN ({self.dialect.each('ids')})"
        )

    @cached_property
    def moved_statuses(self) -> str:
        """The statuses of tasks that are in the history."""
        return (
            f"SELECT task_id, status FROM {self.tables.history} WHERE location = %(location)s"
            f" AND task_id IN ({self.dialect.each('ids')})"
        )


# -- steps -------------------------------------------------------------------------------------------------------------

# Statements of steps and signals. What writes a step locks the task's row while its lease holds.
#
# A signal that was sent is a row of kind ``sent``, without a position.

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
