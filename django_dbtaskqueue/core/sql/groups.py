"""Statements of groups: one task of each group is ready, and the others are parked behind it."""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.dialects import FENCE, FENCED, GROUP, Group, statement
from django_dbtaskqueue.core.states import sql_sources

# The heads of a group, and the tasks behind them, by the conditions of the indexes of groups (``AbstractTask``). They
# imply no other index's condition, not even in part. After the first tasks with a group, the table's statistics say for
# a while that there are none. All indexes that begin with the queue then cost the planner the same, and those of ready
# and of parked tasks hold all tasks of a queue.
HEAD = "coalesce(t.parked_by, t.final_status) IS NULL"
BEHIND = f"coalesce(t.parked_by, '') = '{GROUP}'"


def locked(queue: str, group: str) -> str:
    """PostgreSQL's call that locks a group to the end of the transaction."""
    return f"pg_advisory_xact_lock(hashtextextended({queue} || ' ' || {group}, 0))"


class GroupStatements(Group):
    """The head of each group: its first task. Callers hold the groups' locks."""

    @cached_property
    def lock_groups(self) -> str:
        """Lock groups to the end of the transaction, in one order everywhere. Nothing to do with a single writer."""
        return (  # counted, for a settle would else read a row for each group
            f"SELECT count({locked('%(queue_name)s', 'g')})"
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
            f"SELECT t.id FROM {self.tables.task} AS t WHERE t.queue_name = %(queue_name)s AND t.group_key = g.g"
            f" AND {BEHIND} AND t.next_process_time"
        )
        due = f"({parked} <= {now} ORDER BY t.priority, t.id LIMIT 1)"
        later = f"({parked} > {now} ORDER BY t.next_process_time, t.priority, t.id LIMIT 1)"
        return (
            f"SELECT {columns} FROM {groups} JOIN {self.tables.task} AS t ON t.queue_name = %(queue_name)s"
            f" AND t.group_key = g.g AND {HEAD}"
            f" UNION ALL SELECT {columns} FROM {self.tables.task} AS t"
            f" WHERE t.id IN (SELECT coalesce({due}, {later}) FROM {groups})"
        )

    @property
    def _ranked(self) -> str:
        """The members of groups; ``stays``: the first ``number``. A head that a checkout is just taking goes first."""
        first = "row_number() OVER (PARTITION BY m.g ORDER BY {}m.kind, m.wait, m.priority, m.id) <= %(number)s::int"
        taken = "m.id <> ALL(ARRAY(SELECT l.id FROM locked AS l WHERE l.status = 'PROCESSING')), "
        leaving = "ARRAY(SELECT p.g FROM placed AS p WHERE p.ready AND NOT p.chosen AND p.kind > 0)"
        return (
            f"placed AS (SELECT m.*, {first.format('')} AS chosen FROM members AS m),"
            # Only where a head has to leave, this waits for such a checkout.
            f" locked AS MATERIALIZED (SELECT t.id, t.status FROM {self.tables.task} AS t WHERE t.id = ANY(ARRAY(SELECT"
            f" p.id FROM placed AS p WHERE p.ready AND p.kind > 0 AND p.g = ANY({leaving}))) FOR NO KEY UPDATE),"
            f" ranked AS (SELECT m.*, {first.format(taken)} AS stays FROM placed AS m)"
        )

    @statement
    def place_heads(self) -> str:
        """Make the first ``number`` tasks of each group ready, and park the others (``flow.groups.choose``).

        Returns of each changed task whether it became ready. Without ``every``, groups without a parked task are passed
        over, because no task of theirs can become ready. PostgreSQL only.
        """
        now = self.dialect.now
        wait = f"{self.dialect.greatest}({self.dialect.seconds_between(now, 't.next_process_time')}, 0)"
        of_group = f"{self.tables.task} AS t WHERE t.queue_name = %(queue_name)s AND t.group_key = g.g"
        parked = f"{of_group} AND {BEHIND}"
        first = f"SELECT t.id AS id, t.priority AS priority, {wait} AS wait FROM {parked} AND t.next_process_time"
        return (
            "WITH g AS MATERIALIZED (SELECT g.g FROM unnest(%(groups)s::text[]) AS g(g)"
            # Most queues have no parked task: then one probe is enough. It must say false and not NULL, after which
            # AND looks on. An EXISTS for each group the planner could hash, and read all parked tasks of the queue.
            f" WHERE %(every)s OR EXISTS (SELECT 1 FROM {self.tables.task} AS t WHERE t.queue_name = %(queue_name)s"
            f" AND {BEHIND}) AND (SELECT 1 FROM {parked} LIMIT 1) = 1),"
            # Of the ready tasks: 0 for those that run, 1 for those that wait for a retry. With OFFSET 0 it is no join,
            # for which the planner may read the heads of the whole queue, once for each group.
            " heads AS MATERIALIZED (SELECT g.g, t.id AS id, t.priority AS priority,"
            " CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN %(hold)s AND t.attempt > 0 THEN 1 ELSE 2 END AS kind,"
            f" {wait} AS wait FROM g CROSS JOIN LATERAL (SELECT t.id, t.priority, t.status, t.attempt,"
            f" t.next_process_time FROM {of_group} AND {HEAD} OFFSET 0) AS t),"
            " room AS MATERIALIZED (SELECT g.g, %(number)s::int - count(*) FILTER (WHERE h.kind < 2) AS places,"
            " %(number)s::int - count(*) FILTER (WHERE h.kind < 2 OR h.wait = 0) AS free"
            " FROM g LEFT JOIN heads AS h ON h.g = g.g GROUP BY g.g),"
            " due AS MATERIALIZED (SELECT g.g, g.free, f.* FROM room AS g CROSS JOIN LATERAL"
            f" ({first} <= {now} ORDER BY t.priority, t.id LIMIT greatest(g.places, 0)) AS f),"
            " later AS (SELECT g.g, f.* FROM (SELECT r.g, r.free - count(d.g) AS free FROM room AS r"
            " LEFT JOIN due AS d ON d.g = r.g GROUP BY r.g, r.free) AS g CROSS JOIN LATERAL"
            f" ({first} > {now} ORDER BY t.next_process_time, t.priority, t.id LIMIT greatest(g.free, 0)) AS f),"
            " members AS (SELECT g, id, kind, true AS ready, wait, priority FROM heads"
            " UNION ALL SELECT g, id, 2, false, wait, priority FROM due"
            " UNION ALL SELECT g, id, 2, false, wait, priority FROM later),"
            f" {self._ranked}"
            f" UPDATE {self.tables.task} SET parked_by = CASE WHEN parked_by IS NULL THEN '{GROUP}' END,"
            f" ready_time = CASE WHEN parked_by IS NOT NULL THEN {self.dialect.greatest}({now}, next_process_time) END"
            " WHERE id = ANY(ARRAY(SELECT r.id FROM ranked AS r WHERE r.stays <> r.ready AND r.kind > 0))"
            f" AND (parked_by = '{GROUP}' OR parked_by IS NULL AND status = 'CREATED') RETURNING ready_time IS NOT NULL"
        )

    @statement
    def groups_over(self) -> str:
        """The groups of a queue with more than ``number`` ready tasks."""
        return (
            f"SELECT group_key FROM {self.tables.task} AS t WHERE queue_name = %(queue_name)s"
            f" AND group_key IS NOT NULL AND {HEAD} GROUP BY group_key HAVING count(*) > %(number)s"
        )

    @statement
    def make_ready(self) -> str:
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


# -- limits ------------------------------------------------------------------------------------------------------------

# Statements of limits: how many tasks of a queue run at a time, and how many start in a time.
#
# One row for each limited queue, with the group "". A checkout locks it, so that checkouts of the queue take turns.

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
