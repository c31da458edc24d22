"""Statements that check tasks out, and those about leases."""

from __future__ import annotations

from functools import cached_property, lru_cache

from django_dbtaskqueue.core.lease import LEASED
from django_dbtaskqueue.core.sql.dialects import GROUP, MOVING, Dialect, Group, renamed, statement
from django_dbtaskqueue.core.sql.groups import HEAD
from django_dbtaskqueue.core.states import sql_sources

NO_HANDLER = "no handler"  # how the parking reason of a task without a processor begins
UNREADABLE = "unreadable"  # and that of a task whose row cannot be taken or read
# The watermark of each priority, in the order in which the priorities are served.
WATERMARKS = (
    "unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time, bound_id)"
)
# Queues in the order in which they are served: of each its limit, and which watermarks are its own.
QUEUE_SHARES = (
    "unnest(%(queues)s::text[], %(limits)s::int[], %(firsts)s::int[], %(lasts)s::int[]) AS l(q, max_tasks, b1, b2)"
)
WATERMARKS_OF_QUEUE = (
    "unnest((%(priorities)s::smallint[])[l.b1:l.b2], (%(times)s::timestamptz[])[l.b1:l.b2],"
    " (%(ids)s::bigint[])[l.b1:l.b2]) AS b(p, bound_time, bound_id)"
)


def leased(dialect: Dialect) -> str:
    """Return the columns of a leased row; JSON and times as text, which is decoded only when it is read."""
    return ", ".join(
        dialect.text(column.db) if column.type in ("jsonb", "timestamptz") else column.db for column in LEASED
    )


def lease_seconds(dialect: Dialect) -> str:
    """Return the length of a lease: the task's own or the queue's, and not shorter than a checkout takes."""
    return f"{dialect.greatest}(coalesce(lease_seconds, %(lease)s), %(min_lease)s)"


class CheckoutStatements(Group):
    """The checkout strategies, and questions about the ready order."""

    _wanted = ""  # a further condition; see ``Statements.narrowed``

    @cached_property
    def leased(self) -> str:
        """The columns that every checkout returns."""
        return leased(self.dialect)

    @cached_property
    def claim_set(self) -> str:
        """The SET of every checkout: charge the attempt and grant the lease."""
        return (
            "status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1,"
            f" start_time = {self.dialect.now}, last_update_time = {self.dialect.now},"
            f" next_process_time = {self.dialect.later(lease_seconds(self.dialect))},"
            " poller_instance = %(poller_instance)s,"
            # A row that is still PROCESSING had a lease that ran out. Of any other row the count stands, as a negative.
            f" lost_leases = CASE WHEN status = 'PROCESSING' THEN {self.dialect.least}(abs(lost_leases) + 1, 1000)"
            " ELSE -abs(lost_leases) END"
        )

    def _take(self, rows: str) -> str:
        return f"UPDATE {self.tables.task} SET {self.claim_set} WHERE {rows} RETURNING {self.leased}"

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
    def _paused(self) -> str:
        # Evaluated once per statement: a pause takes effect before the very next checkout, anywhere.
        return f"EXISTS (SELECT 1 FROM {self.tables.queue} AS q WHERE q.name = %(queue_name)s AND {self._in_pause})"

    @property
    def _in_pause(self) -> str:
        return f"q.paused_time IS NOT NULL AND (q.paused_until IS NULL OR q.paused_until > {self.dialect.now})"

    def _ready_tasks(self, columns: str, lock: str) -> str:
        """The first ready tasks behind the watermarks, one index range per priority, at most ``limit``."""
        ready = self._ready_tasks_of(columns, f"ORDER BY ready_time, id LIMIT %(limit)s {lock}")
        return f"SELECT x.* FROM {WATERMARKS} CROSS JOIN LATERAL ({ready}) AS x LIMIT %(limit)s"

    def _ready_tasks_of(self, columns: str, order: str) -> str:
        return (
            f"SELECT {columns} FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND priority = b.p"
            f" AND (ready_time, id) > (b.bound_time, b.bound_id) AND {self.due_now} {order}"
        )

    @statement
    def checkout_skip_locked(self) -> str:
        """Lock due rows, charge and lease them, in one HOT update.

        The array of ctids is an InitPlan that runs once, so LIMIT cannot be overrun and a TID scan has no rival plan.
        """
        return self._take(f"ctid = ANY(ARRAY({self._ready_tasks('ctid', 'FOR NO KEY UPDATE SKIP LOCKED')}))")

    @statement
    def checkout_of_many(self) -> str:
        """``checkout_skip_locked`` of several queues in order: of each at most its share, in all ``limit``.

        Rows behind the limit are neither read nor locked: the outer LIMIT stops the joins that feed it.
        """
        # The names of paused queues are an InitPlan. With one test per queue the planner could join and lose the order.
        paused = f"SELECT q.name FROM {self.tables.queue} AS q WHERE q.name = ANY(%(queues)s) AND {self._in_pause}"
        first = (
            f"SELECT ctid FROM {self.tables.task} WHERE queue_name = l.q AND priority = b.p"
            f" AND (ready_time, id) > (b.bound_time, b.bound_id) AND {self._takeable}"
            " ORDER BY ready_time, id LIMIT l.max_tasks FOR NO KEY UPDATE SKIP LOCKED"
        )
        ready = f"SELECT x.* FROM {WATERMARKS_OF_QUEUE} CROSS JOIN LATERAL ({first}) AS x LIMIT l.max_tasks"
        chosen = (
            f"SELECT y.* FROM {QUEUE_SHARES} CROSS JOIN LATERAL ({ready}) AS y WHERE l.q <> ALL(ARRAY({paused}))"
            " LIMIT %(limit)s"
        )
        return self._take(f"ctid = ANY(ARRAY({chosen}))")

    @statement
    def candidates(self) -> str:
        """The first ready tasks without a lock: (id, total_attempt), for the optimistic strategy."""
        return self._ready_tasks("id, total_attempt, priority, ready_time", "")

    @statement
    def first_ready(self) -> str:
        """The first ready tasks of a queue, wherever the watermarks are: (id, total_attempt)."""
        return (
            f"SELECT id, total_attempt FROM {self.tables.task} WHERE queue_name = %(queue_name)s"
            f" AND ready_time IS NOT NULL AND {self.due_now} ORDER BY priority, ready_time, id LIMIT %(limit)s"
        )

    @statement
    def first_ready_of_group(self) -> str:
        """``first_ready`` of one group: (id, total_attempt)."""
        # Sorted apart, or the planner reads the index of the ready order, and so the tasks of all other groups.
        return (
            f"WITH ready AS MATERIALIZED (SELECT id, total_attempt, priority, ready_time FROM {self.tables.task}"
            f" AS t WHERE queue_name = %(queue_name)s AND group_key = %(group)s AND {HEAD} AND {self.due_now})"
            " SELECT id, total_attempt FROM ready ORDER BY priority, ready_time, id LIMIT %(limit)s"
        )

    @statement
    def park_unleased(self) -> str:
        """Take a task without a live lease out of the ready order."""
        return (
            f"UPDATE {self.tables.task} SET status = 'CREATED', parked_by = %(reason)s, ready_time = NULL,"
            f" poller_instance = NULL, last_update_time = {self.dialect.now}"
            f" WHERE id = %(task_id)s AND total_attempt = %(token)s AND ready_time IS NOT NULL"
            f" AND status IN ({sql_sources('checkout')}) AND next_process_time <= {self.dialect.now} RETURNING id"
        )

    @statement
    def checkout_optimistic(self) -> str:
        """Take the candidates that have not changed since they were read, and are not locked.

        A SELECT locks them first, in order and past locked rows. An UPDATE alone has no lock order and could deadlock.
        """
        # IS TRUE keeps the planner from the index of ready tasks, which it would read through for each candidate.
        ours = f"SELECT t.id FROM {self.fenced('checkout')} AND ({self.due_now}) IS TRUE {self.skipping}"
        return self._take(self.dialect.among("id", ours))

    @lru_cache(maxsize=2)  # noqa: B019 -- one object per location, alive as long as the process
    @renamed
    def checkout_single_writer(self, *, aged: bool = False) -> str:
        """Take the first ready tasks in one statement, where the database has one writer at a time (SQLite).

        ``aged``: the priorities named in the parameter of that name go first.
        """
        first = "priority NOT IN (SELECT value FROM json_each(%(aged)s)), " if aged else ""
        return self._take(
            f"id IN (SELECT id FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL"
            f" AND {self.due_now} AND status IN ({sql_sources('checkout')})"
            f" ORDER BY {first}priority, ready_time, id LIMIT %(limit)s)"
        )

    @statement
    def ages(self) -> str:
        """Of each priority with a due task: (priority, seconds its first task has been due)."""
        now = self.dialect.now
        age = self.dialect.seconds_between("x.ready_time", now)
        if self.dialect.vendor == "postgresql":
            ready = self._ready_tasks_of("ready_time", "ORDER BY ready_time, id LIMIT 1")
            return f"SELECT b.p, {age} FROM {WATERMARKS} CROSS JOIN LATERAL ({ready}) AS x"
        return (
            f"SELECT x.priority, max({age}) FROM {self.tables.task} AS x WHERE queue_name = %(queue_name)s"
            f" AND ready_time IS NOT NULL AND {self.due_now} GROUP BY x.priority"
        )

    @statement
    def priorities(self) -> str:
        return self.distinct("priority", "queue_name = %(queue_name)s AND ready_time IS NOT NULL")

    @statement
    def priorities_of_many(self) -> str:
        """``priorities`` of several queues: (queue, priority)."""
        found = self.distinct("priority", "queue_name = l.q AND ready_time IS NOT NULL")
        return f"SELECT l.q, x.* FROM unnest(%(queues)s::text[]) AS l(q) CROSS JOIN LATERAL ({found}) AS x"

    @statement
    def next_due(self) -> str:
        """Seconds until the first scheduled task of each queue is due: (queue, seconds), where there is one.

        On PostgreSQL of pairs of a queue and a priority, with which the index begins.
        """
        now = self.dialect.now
        wait = self.dialect.seconds_between(now, "min(x.ready_time)")
        if self.dialect.vendor == "postgresql":
            source = (
                "unnest(%(queues)s::text[], %(priorities)s::smallint[]) AS l(q, p) CROSS JOIN LATERAL"
                f" (SELECT queue_name, ready_time FROM {self.tables.task} WHERE queue_name = l.q AND priority = l.p"
                f" AND ready_time > {now} ORDER BY ready_time LIMIT 1) AS x"
            )
        else:
            wanted = self.dialect.one_of("queue_name", "queues")
            source = f"{self.tables.task} AS x WHERE {wanted} AND ready_time > {now}"
        return f"SELECT x.queue_name, {wait} FROM {source} GROUP BY x.queue_name"

    @statement
    def soon(self) -> str:
        """Whether a ready task is being processed or can be taken within ``horizon`` seconds; false while paused."""
        horizon = self.dialect.later("%(horizon)s")
        return (
            f"SELECT 1 FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND ready_time <= {horizon}"
            f" AND (status = 'PROCESSING' OR next_process_time <= {horizon} AND attempt < max_attempts)"
            f" AND (tag IS NULL OR {self.dialect.one_of('tag', 'tags')}){self._wanted} AND NOT {self._paused}"
            " ORDER BY priority, ready_time, id LIMIT 1"  # in the index's order, or the planner reads the whole table
        )

    @statement
    def checkout_expired(self) -> str:
        """Lease those of the given tasks that wait, ready or parked, past their time to live: to be ended, not run.

        Not those on their way to another database. Like each leased task, one that was parked gets a ready time.
        """
        late = (
            f"SELECT t.id FROM {self.tables.task} AS t WHERE t.id IN ({self.dialect.each('ids')})"
            f" AND t.status = 'CREATED' AND t.expire_time <= {self.dialect.now}"
            f" AND (t.parked_by IS NULL OR NOT {self.dialect.begins('t.parked_by', MOVING)}) {self.skipping}"
        )
        ready = "ready_time = coalesce(ready_time, next_process_time), parked_by = NULL"
        claim = f"UPDATE {self.tables.task} SET {self.claim_set}, {ready}"
        return f"{claim} WHERE {self.dialect.among('id', late)} RETURNING {self.leased}"


class LeaseStatements(Group):
    """Renewal, touch, rescue, parking."""

    @statement
    def renew(self) -> str:
        """Extend held leases. Skips locked rows, so a renewal never waits for a processor's own row lock."""
        return (
            f"UPDATE {self.tables.task} SET next_process_time ="
            f" {self.dialect.later(lease_seconds(self.dialect))} WHERE {self.dialect.among('id', self.unlocked)}"
            " RETURNING id"
        )

    @statement
    def leased_to(self) -> str:
        """The leases of a queue that one poller holds."""
        return (
            f"SELECT {leased(self.dialect)} FROM {self.tables.task}"
            " WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL"
            f" AND status IN ({sql_sources('renew')}) AND poller_instance = %(poller_instance)s"
        )

    @statement
    def held_leases(self) -> str:
        """The given leases that still hold, as checkout returns them, and the seconds each has left."""
        left = self.dialect.seconds_between(self.dialect.now, "next_process_time")
        return f"SELECT {leased(self.dialect)}, {left} FROM {self.fenced('touch')}"

    @statement
    def unlocked(self) -> str:
        """Which of the given leases still hold, if their rows are not locked; locks them."""
        return f"SELECT t.id FROM {self.fenced('renew')} {self.skipping}"

    @statement
    def touch(self) -> str:
        """Extend one lease by ``delta`` seconds; returns its new end."""
        return (
            f"UPDATE {self.tables.task} SET next_process_time ="
            f" {self.dialect.later('%(delta)s', start='next_process_time')},"
            f" expire_time = {self.dialect.maybe_later('%(delta)s', start='expire_time')}"
            f" WHERE {self._one_lease} RETURNING {self.dialect.text('next_process_time')}"
        )

    @statement
    def progress(self) -> str:
        """Store a progress note under a lease."""
        return (
            f"UPDATE {self.tables.task} SET process_result = %(note)s, last_update_time = {self.dialect.now}"
            f" WHERE {self._one_lease} RETURNING id"
        )

    @property
    def _one_lease(self) -> str:
        return f"id = %(id)s AND total_attempt = %(total_attempt)s AND status IN ({sql_sources('touch')})"

    @property
    def _last_attempt(self) -> str:
        return (
            f"FROM {self.tables.task} AS t WHERE t.queue_name = %(queue_name)s AND t.ready_time <= {self.dialect.now}"
            f" AND t.attempt >= t.max_attempts AND t.status IN ({sql_sources('rescue')})"
        )

    @statement
    def seconds_until_exhausted(self) -> str:
        """Seconds until the first lease on a last attempt expires: negative if it has expired, NULL if none."""
        left = self.dialect.seconds_between(self.dialect.now, "min(t.next_process_time)")
        return f"SELECT {left} {self._last_attempt}"

    @statement
    def exhausted(self) -> str:
        """Expired leases of tasks without an attempt left: the process died in the last one. Locks them."""
        return (
            f"SELECT {leased(self.dialect)} {self._last_attempt} AND t.next_process_time <= {self.dialect.now}"
            # In the index's order, or the planner reads the whole table.
            f" ORDER BY t.priority, t.ready_time, t.id LIMIT %(limit)s {self.skipping}"
        )

    @cached_property
    def start_paused(self) -> str:
        """Pause a queue that has no row yet: no operator has paused or resumed it."""
        return (
            f"INSERT INTO {self.tables.queue} (name, paused_time, paused_by, paused_reason)"
            f" VALUES (%(queue_name)s, {self.dialect.now}, 'settings', 'starts paused') ON CONFLICT (name) DO NOTHING"
        )

    @statement
    def to_prepare(self) -> str:
        """Queues, and whether each has tasks that were parked without a processor, and ready tasks with a group."""
        # By LIMIT: an EXISTS for each queue the planner could hash, and read all ready tasks.
        found = f"(SELECT 1 FROM {self.tables.task} AS t WHERE queue_name = q.q AND"
        return (
            f"SELECT q.q, {found} {self.dialect.begins('parked_by', NO_HANDLER)} LIMIT 1) IS NOT NULL,"
            f" {found} group_key IS NOT NULL AND {HEAD} LIMIT 1) IS NOT NULL"
            f" FROM {self.dialect.texts('queues', 'q')}"
        )

    @statement
    def parked(self) -> str:
        """One row if a queue has tasks that were parked without a processor."""
        # In the order of their index: else the planner may read the table where it expects many such tasks.
        return (
            f"SELECT 1 FROM {self.tables.task} WHERE queue_name = %(queue_name)s"
            f" AND {self.dialect.begins('parked_by', NO_HANDLER)} ORDER BY payload_type LIMIT 1"
        )

    @statement
    def unpark(self) -> str:
        """Make parked tasks ready again, when this poller has a processor for their type."""
        now = self.dialect.now
        return (
            f"UPDATE {self.tables.task} SET parked_by = CASE WHEN group_key IS NOT NULL THEN '{GROUP}' END,"
            f" last_update_time = {now},"
            f" ready_time = CASE WHEN group_key IS NULL THEN {self.dialect.greatest}({now}, next_process_time) END"
            f" WHERE queue_name = %(queue_name)s AND status IN ({sql_sources('unpark')})"
            f" AND {self.dialect.begins('parked_by', NO_HANDLER)}"
            f" AND (payload_type IS NULL AND %(untyped)s OR {self.dialect.one_of('payload_type', 'types')})"
            " RETURNING id, group_key"
        )
