"""Out of the line, under a lease."""

from __future__ import annotations

from functools import cached_property, lru_cache

from django_dbtaskqueue.core.sql.base import Group, Tables
from django_dbtaskqueue.core.sql.dialects import Dialect
from django_dbtaskqueue.core.states import sql_sources

# Columns a lease is built from, in the order flow/checkout.py unpacks them.
LEASED = (
    "id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority, "
    "payload_type, {payload}, {context}, {create_time}, {start_time}, {next_process_time}, poller_instance, "
    "{ready_time}, group_key, {expire_time}, lease_seconds"
)
AS_TEXT = ("payload", "context", "create_time", "start_time", "next_process_time", "ready_time", "expire_time")
# Remembered bounds, one per priority, in the order the priorities are to be served.
BOUNDS = "unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time, bound_id)"
# Several lines in the order they are to be served: of each the most tasks to take, and which bounds are its own.
LINES = "unnest(%(queues)s::text[], %(limits)s::int[], %(firsts)s::int[], %(lasts)s::int[]) AS l(q, most, b1, b2)"
BOUNDS_OF_LINE = (
    "unnest((%(priorities)s::smallint[])[l.b1:l.b2], (%(times)s::timestamptz[])[l.b1:l.b2],"
    " (%(ids)s::bigint[])[l.b1:l.b2]) AS b(p, bound_time, bound_id)"
)


def leased(dialect: Dialect) -> str:
    """Return the columns of a leased row; JSON and times as text, which is decoded when somebody asks for it."""
    return LEASED.format(**{name: dialect.text(name) for name in AS_TEXT})


class Checkouts(Group):
    """The checkout strategies, and questions about the line."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        super().__init__(tables, dialect)
        self.leased = leased(dialect)

    @cached_property
    def taken(self) -> str:
        """The SET of every checkout: charge the attempt and grant the lease."""
        return (
            "status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1,"
            f" start_time = {self.dialect.now}, last_update_time = {self.dialect.now},"
            f" next_process_time = {self.dialect.later('coalesce(lease_seconds, %(lease)s)')},"
            " poller_instance = %(poller_instance)s"
        )

    @property
    def due_now(self) -> str:
        """The WHERE of every checkout, but for the queue: due, an attempt left, not held, not paused."""
        # No condition on status: ready_time IS NOT NULL says the same by CHECK, and each redundant condition lowers
        # the planner's row guess until a sequential scan looks cheaper than the index.
        return f"{self._takeable} AND NOT {self._paused}"

    @property
    def _takeable(self) -> str:
        now = self.dialect.now
        return (
            f"ready_time <= {now} AND next_process_time <= {now} AND attempt < max_attempts"
            f" AND (tag IS NULL OR {self.dialect.one_of('tag', 'tags')}){self._wanted}"
        )

    @property
    def _wanted(self) -> str:
        """What else a task must be; see ``statements.Narrowed``."""
        return ""

    @property
    def _paused(self) -> str:
        # Evaluated once per statement: a pause takes effect before the very next checkout, anywhere.
        return f"EXISTS (SELECT 1 FROM {self.tables.queue} AS q WHERE q.name = %(queue_name)s AND {self._in_pause})"

    @property
    def _in_pause(self) -> str:
        return f"q.paused_time IS NOT NULL AND (q.paused_until IS NULL OR q.paused_until > {self.dialect.now})"

    def _line(self, columns: str, lock: str) -> str:
        """The head of the line behind remembered bounds, one index range per priority, never more than ``limit``."""
        line = self._line_of(columns, f"ORDER BY ready_time, id LIMIT %(limit)s {lock}")
        return f"SELECT x.* FROM {BOUNDS} CROSS JOIN LATERAL ({line}) AS x LIMIT %(limit)s"

    def _line_of(self, columns: str, order: str) -> str:
        """One priority's line behind its bound."""
        return (
            f"SELECT {columns} FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND priority = b.p"
            f" AND (ready_time, id) > (b.bound_time, b.bound_id) AND {self.due_now} {order}"
        )

    @cached_property
    def checkout_skip_locked(self) -> str:
        """Lock due rows, charge and lease them, in one HOT update.

        The array of ctids is an InitPlan that runs once, so LIMIT cannot be overrun and a TID scan has no rival plan.
        """
        line = self._line("ctid", "FOR NO KEY UPDATE SKIP LOCKED")
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET {self.taken} WHERE ctid = ANY(ARRAY({line})) RETURNING {self.leased}"
        )

    @cached_property
    def checkout_of_many(self) -> str:
        """``checkout_skip_locked`` of several lines: in their order, of none more than its share, nor ``limit`` in all.

        What stands behind the limit is not looked at, and not locked: the outer LIMIT stops all that feeds it.
        """
        # The names of paused queues are an InitPlan; asked by line, the planner could join, and lose the order.
        paused = f"SELECT q.name FROM {self.tables.queue} AS q WHERE q.name = ANY(%(queues)s) AND {self._in_pause}"
        head = (
            f"SELECT ctid FROM {self.tables.task} WHERE queue_name = l.q AND priority = b.p"
            f" AND (ready_time, id) > (b.bound_time, b.bound_id) AND {self._takeable}"
            " ORDER BY ready_time, id LIMIT l.most FOR NO KEY UPDATE SKIP LOCKED"
        )
        line = f"SELECT x.* FROM {BOUNDS_OF_LINE} CROSS JOIN LATERAL ({head}) AS x LIMIT l.most"
        taken = (
            f"SELECT y.* FROM {LINES} CROSS JOIN LATERAL ({line}) AS y WHERE l.q <> ALL(ARRAY({paused}))"
            " LIMIT %(limit)s"
        )
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET {self.taken} WHERE ctid = ANY(ARRAY({taken})) RETURNING {self.leased}"
        )

    @cached_property
    def candidates(self) -> str:
        """The head of the line without a lock: (id, total_attempt), for the optimistic strategy."""
        return self.tables.rename(self._line("id, total_attempt, priority, ready_time", ""))

    @cached_property
    def checkout_optimistic(self) -> str:
        """Take those candidates that nobody changed since they were read, or is changing; losers take nothing.

        They are locked first, past those that others hold: an UPDATE alone locks in no order, and two would deadlock.
        """
        ours = f"SELECT t.id FROM {self.fenced('checkout')} AND {self.due_now} {self.passing}"
        chosen = f"= ANY(ARRAY({ours}))" if self.dialect.vendor == "postgresql" else f"IN ({ours})"
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET {self.taken} WHERE id {chosen} RETURNING {self.leased}"
        )

    @lru_cache(maxsize=2)  # noqa: B019 -- one object per location, alive as long as the process
    def checkout_single_writer(self, *, aged: bool = False) -> str:
        """Take the head of the line in one statement, where the database lets one writer in at a time (SQLite).

        ``aged``: the priorities named in the parameter of that name go first.
        """
        first = "priority NOT IN (SELECT value FROM json_each(%(aged)s)), " if aged else ""
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET {self.taken} WHERE id IN (SELECT id FROM {self.tables.task}"
            f" WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL AND {self.due_now}"
            f" AND status IN ({sql_sources('checkout')})"
            f" ORDER BY {first}priority, ready_time, id LIMIT %(limit)s) RETURNING {self.leased}"
        )

    @cached_property
    def ages(self) -> str:
        """Of each priority with something to take: (priority, seconds its head has been waiting)."""
        now = self.dialect.now
        age = self.dialect.seconds_between("x.ready_time", now)
        if self.dialect.vendor == "postgresql":
            line = self._line_of("ready_time", "ORDER BY ready_time, id LIMIT 1")
            return self.tables.rename(f"SELECT b.p, {age} FROM {BOUNDS} CROSS JOIN LATERAL ({line}) AS x")
        return self.tables.rename(
            f"SELECT x.priority, max({age}) FROM {self.tables.task} AS x WHERE queue_name = %(queue_name)s"
            f" AND ready_time IS NOT NULL AND {self.due_now} GROUP BY x.priority"
        )

    @cached_property
    def priorities(self) -> str:
        """The distinct priorities in line, found by skipping through the index (PostgreSQL has no loose scan)."""
        return self.tables.rename(self._priorities_in("%(queue_name)s"))

    @cached_property
    def priorities_of_many(self) -> str:
        """``priorities`` of several queues: (queue, priority)."""
        found = self._priorities_in("l.q")
        return self.tables.rename(
            f"SELECT l.q, x.* FROM unnest(%(queues)s::text[]) AS l(q) CROSS JOIN LATERAL ({found}) AS x"
        )

    def _priorities_in(self, queue: str) -> str:
        first = f"SELECT priority FROM {self.tables.task} WHERE queue_name = {queue} AND ready_time IS NOT NULL"
        return (
            f"WITH RECURSIVE p AS (({first} ORDER BY priority LIMIT 1) UNION ALL"
            f" SELECT ({first} AND priority > p.priority ORDER BY priority LIMIT 1) FROM p"
            " WHERE p.priority IS NOT NULL)"
            " SELECT priority FROM p WHERE priority IS NOT NULL"
        )

    @cached_property
    def next_due(self) -> str:
        """Seconds until the first task of the given priorities that is scheduled for later becomes due."""
        now = self.dialect.now
        wait = self.dialect.seconds_between(now, "min(x.ready_time)")
        if self.dialect.vendor == "postgresql":
            source = (
                f"unnest(%(priorities)s::smallint[]) AS b(p) CROSS JOIN LATERAL (SELECT ready_time FROM"
                f" {self.tables.task} WHERE queue_name = %(queue_name)s AND priority = b.p AND ready_time > {now}"
                " ORDER BY ready_time LIMIT 1) AS x"
            )
        else:
            source = f"{self.tables.task} AS x WHERE queue_name = %(queue_name)s AND ready_time > {now}"
        return self.tables.rename(f"SELECT {wait} FROM {source}")

    @cached_property
    def next_due_of_many(self) -> str:
        """``next_due`` of several queues, of pairs of queue and priority: (queue, seconds), where there is any."""
        now = self.dialect.now
        return self.tables.rename(
            f"SELECT l.q, {self.dialect.seconds_between(now, 'min(x.ready_time)')}"
            " FROM unnest(%(queues)s::text[], %(priorities)s::smallint[]) AS l(q, p) CROSS JOIN LATERAL (SELECT"
            f" ready_time FROM {self.tables.task} WHERE queue_name = l.q AND priority = l.p AND ready_time > {now}"
            " ORDER BY ready_time LIMIT 1) AS x GROUP BY l.q"
        )

    @cached_property
    def soon(self) -> str:
        """Whether a task is in line that is being processed, or can be taken within ``horizon`` seconds; not paused."""
        horizon = self.dialect.later("%(horizon)s")
        return self.tables.rename(
            f"SELECT 1 FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND ready_time <= {horizon}"
            f" AND (status = 'PROCESSING' OR next_process_time <= {horizon} AND attempt < max_attempts)"
            f" AND (tag IS NULL OR {self.dialect.one_of('tag', 'tags')}) AND NOT {self._paused}"
            " ORDER BY priority, ready_time, id LIMIT 1"  # in the index's order, or the planner reads the whole table
        )
