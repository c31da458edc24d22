"""Statements of limits: how many tasks of a queue run at a time, and how many start in a time.

One row for each limited queue, with the group "". A checkout locks it, so that checkouts of the queue take turns.
"""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.dialects import FENCE, FENCED, Group, statement
from django_dbtaskqueue.core.states import sql_sources

QUEUE_ROW = "queue_name = %(queue_name)s AND group_key = ''"


class LimitStatements(Group):
    """The row of a limited queue, and the leases that it names."""

    @cached_property
    def lock_limit(self) -> str:
        """Lock the row of a queue, and refill its tokens: ``rate`` per second, at most ``burst``.

        As (stamp, "" where the leases are not known, the leases unless the stamp is ``stamp``, tokens, seconds
        since it was locked last).
        """
        return (
            f"INSERT INTO {self.tables.limit} AS l (queue_name, tokens) VALUES (%(queue_name)s, %(burst)s)"
            f" ON CONFLICT (queue_name, group_key) DO UPDATE SET tokens = {self._tokens}, {self._watched}"
            " RETURNING stamp, CASE WHEN stamp <> %(stamp)s THEN leases END, tokens, idle_seconds"
        )

    @property
    def _idle(self) -> str:
        return self.dialect.seconds_between("l.check_time", self.dialect.now)

    @property
    def _tokens(self) -> str:
        refill = f"{self.dialect.greatest}({self._idle}, 0.0) * %(rate)s"
        return f"{self.dialect.least}(%(burst)s, l.tokens + {refill})"

    @property
    def _watched(self) -> str:
        # The time of a statement is that of its begin, before it waits for the lock: it must not go back.
        return f"check_time = {self.dialect.greatest}(l.check_time, {self.dialect.now}), idle_seconds = {self._idle}"

    @cached_property
    def count_in_limit(self) -> str:
        """``lock_limit`` and ``store_limit`` of rows that were taken; returns the tokens that are left.

        It writes and returns nothing if the row's stamp is not ``known``, its tokens are too few, or the row was not
        locked for ``watched`` seconds.
        """
        return (
            f"UPDATE {self.tables.limit} AS l SET tokens = {self._tokens} - %(taken)s, {self._watched},"
            f" leases = %(leases)s, stamp = %(stamp)s WHERE {QUEUE_ROW} AND stamp = %(known)s"
            f" AND {self._idle} <= %(watched)s AND (%(rate)s = 0 OR {self._tokens} >= %(taken)s) RETURNING tokens"
        )

    @cached_property
    def store_limit(self) -> str:
        """Store which leases count, and take ``taken`` tokens."""
        return (
            f"UPDATE {self.tables.limit} SET leases = %(leases)s, stamp = %(stamp)s,"
            f" tokens = tokens - %(taken)s WHERE {QUEUE_ROW}"
        )

    @cached_property
    def lock_group_limits(self) -> str:
        """Lock the rows of groups in one order, and refill their tokens as ``lock_limit`` does: (group, tokens)."""
        now, greatest = self.dialect.now, self.dialect.greatest
        return (
            f"INSERT INTO {self.tables.limit} AS l (queue_name, group_key, tokens, check_time, full_time)"
            f" SELECT %(queue_name)s, g.g, %(burst)s, {now}, {now} FROM {self.dialect.texts('groups', 'g')}"
            f" WHERE true ORDER BY g.g ON CONFLICT (queue_name, group_key) DO UPDATE SET tokens ="
            f" {self._tokens}, check_time = {greatest}(l.check_time, {now}) RETURNING group_key, tokens"
        )

    @cached_property
    def charge_groups(self) -> str:
        rows = self.dialect.rows({"group_name": "text", "taken": "float8"})
        missing = "(%(burst)s - l.tokens + u.taken) / %(rate)s"
        return (
            f"UPDATE {self.tables.limit} AS l SET tokens = l.tokens - u.taken,"
            f" full_time = {self.dialect.later(missing)} FROM {rows}"
            " WHERE l.queue_name = %(queue_name)s AND l.group_key = u.group_name"
        )

    @statement
    def put_off(self) -> str:
        """Undo the checkout of tasks, which are ready again in ``delay`` seconds. Their due time stays in the past.

        So no later task of the group passes them. A task whose lease had run out stays one.
        """
        now = self.dialect.now
        return (
            f"UPDATE {self.tables.task} AS t SET last_update_time = {now}, next_process_time = {now},"
            f" ready_time = {self.dialect.later('u.delay')}, attempt = t.attempt - 1,"
            " status = CASE WHEN t.lost_leases > 0 THEN t.status ELSE 'CREATED' END,"
            " poller_instance = CASE WHEN t.lost_leases > 0 THEN t.poller_instance END,"
            " lost_leases = CASE WHEN t.lost_leases > 0 THEN t.lost_leases - 1 ELSE t.lost_leases END"
            f" FROM {self.dialect.rows({**FENCED, 'delay': 'float8'})}"
            f" WHERE {FENCE} AND t.status IN ({sql_sources('release')}) RETURNING id"
        )

    @cached_property
    def limit_state(self) -> str:
        """The row of a queue without a lock: (leases, tokens, seconds since it was locked last)."""
        return (
            "SELECT leases, tokens,"
            f" {self.dialect.seconds_between('check_time', self.dialect.now)}"
            f" FROM {self.tables.limit} WHERE {QUEUE_ROW}"
        )

    @statement
    def running_of(self) -> str:
        """The leases of the tasks ``ids``: (id, total_attempt, seconds left), negative after their end."""
        left = self.dialect.seconds_between(self.dialect.now, "next_process_time")
        ids = "= ANY(%(ids)s::bigint[])" if self.dialect.vendor == "postgresql" else f"IN ({self.dialect.each('ids')})"
        return (
            f"SELECT id, total_attempt, {left} FROM {self.tables.task}"
            f" WHERE id {ids} AND status IN ({sql_sources('renew')})"
        )

    @statement
    def all_running(self) -> str:
        """The leases of a queue: (id, total_attempt). It reads the ready order as far as it is due."""
        return (
            f"SELECT id, total_attempt FROM {self.tables.task} WHERE queue_name = %(queue_name)s"
            f" AND ready_time <= {self.dialect.now} AND status IN ({sql_sources('renew')})"
        )
