"""Out of the line, under a lease."""

from __future__ import annotations

from functools import cached_property, lru_cache

from django_dbtaskqueue.core.lease import LEASED
from django_dbtaskqueue.core.sql.dialects import GROUP, Dialect, Group, Tables, renamed, statement
from django_dbtaskqueue.core.states import sql_sources

NO_HANDLER = "no handler"  # how the parking reason of a task without a processor begins
# Remembered bounds, one per priority, in the order the priorities are to be served.
BOUNDS = "unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time, bound_id)"
# Several lines in the order they are to be served: of each the most tasks to take, and which bounds are its own.
LINES = "unnest(%(queues)s::text[], %(limits)s::int[], %(firsts)s::int[], %(lasts)s::int[]) AS l(q, most, b1, b2)"
BOUNDS_OF_LINE = (
    "unnest((%(priorities)s::smallint[])[l.b1:l.b2], (%(times)s::timestamptz[])[l.b1:l.b2],"
    " (%(ids)s::bigint[])[l.b1:l.b2]) AS b(p, bound_time, bound_id)"
)


def leased(dialect: Dialect) -> str:
    """Return the columns of a leased row; JSON and times as text, which is decoded only when it is read."""
    return ", ".join(
        dialect.text(column.db) if column.type in ("jsonb", "timestamptz") else column.db for column in LEASED
    )


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

    @statement
    def checkout_skip_locked(self) -> str:
        """Lock due rows, charge and lease them, in one HOT update.

        The array of ctids is an InitPlan that runs once, so LIMIT cannot be overrun and a TID scan has no rival plan.
        """
        line = self._line("ctid", "FOR NO KEY UPDATE SKIP LOCKED")
        return f"UPDATE {self.tables.task} SET {self.taken} WHERE ctid = ANY(ARRAY({line})) RETURNING {self.leased}"

    @statement
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
        return f"UPDATE {self.tables.task} SET {self.taken} WHERE ctid = ANY(ARRAY({taken})) RETURNING {self.leased}"

    @statement
    def candidates(self) -> str:
        """The head of the line without a lock: (id, total_attempt), for the optimistic strategy."""
        return self._line("id, total_attempt, priority, ready_time", "")

    @statement
    def checkout_optimistic(self) -> str:
        """Take those candidates that nobody changed since they were read, or is changing; losers take nothing.

        They are locked first, past those that others hold: an UPDATE alone locks in no order, and two would deadlock.
        """
        ours = f"SELECT t.id FROM {self.fenced('checkout')} AND {self.due_now} {self.passing}"
        chosen = f"= ANY(ARRAY({ours}))" if self.dialect.vendor == "postgresql" else f"IN ({ours})"
        return f"UPDATE {self.tables.task} SET {self.taken} WHERE id {chosen} RETURNING {self.leased}"

    @lru_cache(maxsize=2)  # noqa: B019 -- one object per location, alive as long as the process
    @renamed
    def checkout_single_writer(self, *, aged: bool = False) -> str:
        """Take the head of the line in one statement, where the database lets one writer in at a time (SQLite).

        ``aged``: the priorities named in the parameter of that name go first.
        """
        first = "priority NOT IN (SELECT value FROM json_each(%(aged)s)), " if aged else ""
        return (
            f"UPDATE {self.tables.task} SET {self.taken} WHERE id IN (SELECT id FROM {self.tables.task}"
            f" WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL AND {self.due_now}"
            f" AND status IN ({sql_sources('checkout')})"
            f" ORDER BY {first}priority, ready_time, id LIMIT %(limit)s) RETURNING {self.leased}"
        )

    @statement
    def ages(self) -> str:
        """Of each priority with something to take: (priority, seconds its head has been waiting)."""
        now = self.dialect.now
        age = self.dialect.seconds_between("x.ready_time", now)
        if self.dialect.vendor == "postgresql":
            line = self._line_of("ready_time", "ORDER BY ready_time, id LIMIT 1")
            return f"SELECT b.p, {age} FROM {BOUNDS} CROSS JOIN LATERAL ({line}) AS x"
        return (
            f"SELECT x.priority, max({age}) FROM {self.tables.task} AS x WHERE queue_name = %(queue_name)s"
            f" AND ready_time IS NOT NULL AND {self.due_now} GROUP BY x.priority"
        )

    @statement
    def priorities(self) -> str:
        """The distinct priorities in line, found by skipping through the index (PostgreSQL has no loose scan)."""
        return self._priorities_in("%(queue_name)s")

    @statement
    def priorities_of_many(self) -> str:
        """``priorities`` of several queues: (queue, priority)."""
        found = self._priorities_in("l.q")
        return f"SELECT l.q, x.* FROM unnest(%(queues)s::text[]) AS l(q) CROSS JOIN LATERAL ({found}) AS x"

    def _priorities_in(self, queue: str) -> str:
        first = f"SELECT priority FROM {self.tables.task} WHERE queue_name = {queue} AND ready_time IS NOT NULL"
        return (
            f"WITH RECURSIVE p AS (({first} ORDER BY priority LIMIT 1) UNION ALL"
            f" SELECT ({first} AND priority > p.priority ORDER BY priority LIMIT 1) FROM p"
            " WHERE p.priority IS NOT NULL)"
            " SELECT priority FROM p WHERE priority IS NOT NULL"
        )

    @statement
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
        return f"SELECT {wait} FROM {source}"

    @statement
    def next_due_of_many(self) -> str:
        """``next_due`` of several queues, of pairs of queue and priority: (queue, seconds), where there is any."""
        now = self.dialect.now
        return (
            f"SELECT l.q, {self.dialect.seconds_between(now, 'min(x.ready_time)')}"
            " FROM unnest(%(queues)s::text[], %(priorities)s::smallint[]) AS l(q, p) CROSS JOIN LATERAL (SELECT"
            f" ready_time FROM {self.tables.task} WHERE queue_name = l.q AND priority = l.p AND ready_time > {now}"
            " ORDER BY ready_time LIMIT 1) AS x GROUP BY l.q"
        )

    @statement
    def soon(self) -> str:
        """Whether a task is in line that is being processed, or can be taken within ``horizon`` seconds; not paused."""
        horizon = self.dialect.later("%(horizon)s")
        return (
            f"SELECT 1 FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND ready_time <= {horizon}"
            f" AND (status = 'PROCESSING' OR next_process_time <= {horizon} AND attempt < max_attempts)"
            f" AND (tag IS NULL OR {self.dialect.one_of('tag', 'tags')}) AND NOT {self._paused}"
            " ORDER BY priority, ready_time, id LIMIT 1"  # in the index's order, or the planner reads the whole table
        )


class Tending(Group):
    """Renewal, touch, rescue, parking."""

    @statement
    def renew(self) -> str:
        """Extend held leases. Skips locked rows: a renewal never waits for a handler's own row lock."""
        return (
            f"UPDATE {self.tables.task} SET next_process_time ="
            f" {self.dialect.later('coalesce(lease_seconds, %(lease)s)')} WHERE id IN"
            f" (SELECT t.id FROM {self.fenced('renew')} {self.passing}) RETURNING id"
        )

    @statement
    def leased_to(self) -> str:
        """The leases of a queue that stand in the name of one poller."""
        return (
            f"SELECT {leased(self.dialect)} FROM {self.tables.task}"
            " WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL"
            f" AND status IN ({sql_sources('renew')}) AND poller_instance = %(poller_instance)s"
        )

    @statement
    def held(self) -> str:
        """Which of the given leases still stand."""
        return f"SELECT t.id FROM {self.fenced('renew')}"

    @statement
    def standing(self) -> str:
        """The given leases that still stand, as checkout returns them, and the seconds each has left."""
        left = self.dialect.seconds_between(self.dialect.now, "next_process_time")
        return f"SELECT {leased(self.dialect)}, {left} FROM {self.fenced('touch')}"

    @statement
    def unlocked(self) -> str:
        """Which of the given leases still stand, their rows locked by nobody; locks them."""
        return f"SELECT t.id FROM {self.fenced('renew')} {self.passing}"

    @statement
    def touch(self) -> str:
        """Extend one lease by ``delta`` seconds; returns its new end."""
        return (
            f"UPDATE {self.tables.task} SET next_process_time ="
            f" {self.dialect.later('%(delta)s', start='next_process_time')},"
            f" expire_time = {self.dialect.maybe_later('%(delta)s', start='expire_time')}"
            f" WHERE id = %(id)s AND total_attempt = %(total_attempt)s AND status IN ({sql_sources('touch')})"
            f" RETURNING {self.dialect.text('next_process_time')}"
        )

    @statement
    def progress(self) -> str:
        """Store a progress note under a lease."""
        return (
            f"UPDATE {self.tables.task} SET process_result = %(note)s, last_update_time = {self.dialect.now}"
            f" WHERE id = %(id)s AND total_attempt = %(total_attempt)s AND status IN ({sql_sources('touch')})"
            " RETURNING id"
        )

    @property
    def _last_attempt(self) -> str:
        return (
            f"FROM {self.tables.task} AS t WHERE t.queue_name = %(queue_name)s AND t.ready_time <= {self.dialect.now}"
            f" AND t.attempt >= t.max_attempts AND t.status IN ({sql_sources('rescue')})"
        )

    @statement
    def spent_in(self) -> str:
        """Seconds until the first lease on a last attempt runs out: negative when it has, NULL without such a lease."""
        left = self.dialect.seconds_between(self.dialect.now, "min(t.next_process_time)")
        return f"SELECT {left} {self._last_attempt}"

    @statement
    def spent(self) -> str:
        """Expired leases of tasks with no attempt left: their process died on the last one. Locks them."""
        return (
            f"SELECT {leased(self.dialect)} {self._last_attempt} AND t.next_process_time <= {self.dialect.now}"
            # In the index's order, or the planner reads the whole table.
            f" ORDER BY t.priority, t.ready_time, t.id LIMIT %(limit)s {self.passing}"
        )

    @cached_property
    def last_failures(self) -> str:
        """The failed attempts of the given tasks: (id, number of the attempt), the last one last."""
        return (
            f"SELECT a.task_id, a.attempt FROM {self.tables.attempt} AS a"
            f" JOIN {self.dialect.rows({'task_id': 'bigint'})}"
            " ON a.task_id = u.task_id WHERE a.location = %(location)s ORDER BY a.total_attempt"
        )

    @cached_property
    def start_paused(self) -> str:
        """Pause a queue that has no row yet: nobody has paused or resumed it."""
        return (
            f"INSERT INTO {self.tables.queue} (name, paused_time, paused_by, paused_reason)"
            f" VALUES (%(queue_name)s, {self.dialect.now}, 'settings', 'starts paused') ON CONFLICT (name) DO NOTHING"
        )

    @statement
    def unpark(self) -> str:
        """Put tasks that waited for a handler back in line, now that this poller has one for their type."""
        now = self.dialect.now
        return (
            f"UPDATE {self.tables.task} SET parked_by = CASE WHEN group_key IS NOT NULL THEN '{GROUP}' END,"
            f" last_update_time = {now},"
            f" ready_time = CASE WHEN group_key IS NULL THEN {self.dialect.greatest}({now}, next_process_time) END"
            f" WHERE queue_name = %(queue_name)s AND status IN ({sql_sources('unpark')})"
            f" AND substr(parked_by, 1, {len(NO_HANDLER)}) = '{NO_HANDLER}'"
            f" AND (payload_type IS NULL AND %(untyped)s OR {self.dialect.one_of('payload_type', 'types')})"
            " RETURNING id, group_key"
        )
