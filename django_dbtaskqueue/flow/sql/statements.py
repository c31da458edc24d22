"""Every statement of the flow, rendered for one table and one dialect.

The texts use the seed's column names. A table with other names gets them replaced word by word, so what stands here
reads true for the default table and holds for every other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from django_dbtaskqueue.flow.sql.dialects import Dialect
from django_dbtaskqueue.status import sql_sources

# Columns a lease is built from, in the order flow/checkout.py unpacks them.
LEASED = (
    "id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority, "
    "payload_type, {payload}, {context}, create_time, start_time, next_process_time, poller_instance, ready_time"
)
# Columns that TASKS and the history share and that move over unchanged.
MOVED = (
    "queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority, payload, "
    "payload_type, context, group_key, tag, poller_instance, create_time, next_process_time, expire_time, start_time"
)
GIVEN = {  # what enqueue writes, with PostgreSQL types
    "reference_number": "text",
    "payload": "jsonb",
    "payload_type": "text",
    "priority": "smallint",
    "group_key": "text",
    "tag": "text",
    "context": "jsonb",
    "max_attempts": "int",
}
WRITTEN = {  # one settled row: id, token, status, delay, attempt change, reenqueue change, texts, parking reason
    "i": "bigint",
    "k": "bigint",
    "s": "text",
    "d": "float8",
    "a": "int",
    "e": "int",
    "p": "text",
    "r": "jsonb",
    "w": "text",
}
FAILED = {"i": "bigint", "k": "bigint", "t": "text", "m": "text", "b": "text"}
NO_HANDLER = "no handler"  # how the parking reason of a task without a processor begins
FENCED = {"i": "bigint", "k": "bigint"}
COMPLETED = {"i": "bigint", "k": "bigint", "p": "text", "r": "jsonb"}


@dataclass(frozen=True)
class Tables:
    """Quoted names of one location's tables, and the columns that are named otherwise there."""

    task: str
    history: str = '"dbtaskqueue_taskhistory"'
    attempt: str = '"dbtaskqueue_attempt"'
    deleted: str = '"dbtaskqueue_deletedtasks"'
    queue: str = '"dbtaskqueue_queue"'
    columns: Mapping[str, str] = field(default_factory=dict)  # seed's name -> quoted name

    def rename(self, sql: str) -> str:
        """Return ``sql`` with this table's column names."""
        if not self.columns:
            return sql
        return re.sub(r"\b(" + "|".join(self.columns) + r")\b", lambda m: self.columns[m[1]], sql)


class Statements:
    """The statements of one location. Each is rendered once and cached, so prepared statements are reused."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self.tables = tables
        self.dialect = dialect
        self.leased = LEASED.format(payload=dialect.text("payload"), context=dialect.text("context"))

    # -- enqueue -----------------------------------------------------------------------------------------------------

    @lru_cache(maxsize=16)  # noqa: B019 -- one object per location, alive as long as the process
    def insert(self, on_duplicate: str, *, timed: bool, keep_due: bool = False) -> str:
        """Insert one task; returns its row, or nothing when the reference is taken and nothing was written."""
        due = self._due("%(delay)s", "%(run_at)s") if timed else self.dialect.now
        expire = self.dialect.maybe_later("%(ttl)s", start=due) if timed else "NULL"
        values = ", ".join(f"%({name})s" for name in GIVEN)
        return self.tables.rename(
            f"INSERT INTO {self.tables.task} AS t"
            f" (queue_name, {', '.join(GIVEN)}, ready_time, next_process_time, expire_time)"
            f" VALUES (%(queue_name)s, {values}, {due}, {due}, {expire})"
            f" {self._conflict(on_duplicate, keep_due=keep_due)}"
            " RETURNING id, create_time, ready_time, next_process_time, attempt, reenqueue_attempt, total_attempt"
        )

    @lru_cache(maxsize=16)  # noqa: B019 -- as above
    def insert_many(self, on_duplicate: str, *, timed: bool, keep_due: bool = False) -> str:
        """Insert the JSON array ``rows``; returns (id, whether it is new) of each written task."""
        columns = {**GIVEN, "delay": "float8", "run_at": "text", "ttl": "float8"} if timed else GIVEN
        due = self._due("u.delay", "u.run_at") if timed else self.dialect.now
        expire = self.dialect.maybe_later("u.ttl", start=due) if timed else "NULL"
        picked = ", ".join(f"u.{name}" for name in GIVEN)
        return self.tables.rename(
            f"INSERT INTO {self.tables.task} AS t"
            f" (queue_name, {', '.join(GIVEN)}, ready_time, next_process_time, expire_time)"
            f" SELECT %(queue_name)s, {picked}, {due}, {due}, {expire} FROM {self.dialect.rows(columns)} WHERE true"
            f" {self._conflict(on_duplicate, keep_due=keep_due)}"
            " RETURNING id, last_update_time = create_time"
        )

    def _due(self, delay: str, run_at: str) -> str:
        base = f"{self.dialect.greatest}({self.dialect.now}, coalesce({self.dialect.time(run_at)}, {self.dialect.now}))"
        return self.dialect.later(f"coalesce({delay}, 0)", start=base)

    def _conflict(self, on_duplicate: str, *, keep_due: bool) -> str:
        if on_duplicate != "replace":
            return "ON CONFLICT (reference_number, queue_name) DO NOTHING"
        names = ["payload", "payload_type", "priority", "group_key", "tag", "context", "max_attempts"]
        names += [] if keep_due else ["ready_time", "next_process_time", "expire_time"]
        changes = ", ".join(f"{name} = excluded.{name}" for name in names)
        # Later than create_time by construction, which is how a replaced row is told from a new one.
        touched = f"{self.dialect.greatest}({self.dialect.now}, {self.dialect.later('0.001', start='t.create_time')})"
        return (
            f"ON CONFLICT (reference_number, queue_name) DO UPDATE SET {changes}, last_update_time = {touched}"
            f" WHERE t.status IN ({sql_sources('replace')})"
        )

    @cached_property
    def find(self) -> str:
        """The task that holds a reference."""
        return self.tables.rename(
            f"SELECT id, status FROM {self.tables.task} WHERE reference_number = %(reference_number)s"
            " AND queue_name = %(queue_name)s"
        )

    # -- checkout ----------------------------------------------------------------------------------------------------

    @cached_property
    def _take(self) -> str:
        return (
            "status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1,"
            f" start_time = {self.dialect.now}, last_update_time = {self.dialect.now},"
            f" next_process_time = {self.dialect.later('%(lease)s')}, poller_instance = %(poller_instance)s"
        )

    @property
    def _due_now(self) -> str:
        # No condition on status: ready_time IS NOT NULL says the same by CHECK, and each redundant condition lowers
        # the planner's row guess until a sequential scan looks cheaper than the index.
        now = self.dialect.now
        return f"ready_time <= {now} AND next_process_time <= {now} AND attempt < max_attempts AND NOT {self._paused}"

    @property
    def _paused(self) -> str:
        # Evaluated once per statement: a pause takes effect before the very next checkout, anywhere.
        return (
            f"EXISTS (SELECT 1 FROM {self.tables.queue} AS q WHERE q.name = %(queue_name)s AND q.paused_time IS NOT NULL"
            f" AND (q.paused_until IS NULL OR q.paused_until > {self.dialect.now}))"
        )

    def _line(self, columns: str, lock: str) -> str:
        """The head of the line behind remembered bounds, one index range per priority, never more than ``limit``."""
        return (
            "SELECT x.* FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[])"
            f" AS b(p, bound_time, bound_id) CROSS JOIN LATERAL (SELECT {columns} FROM {self.tables.task}"
            " WHERE queue_name = %(queue_name)s AND priority = b.p AND (ready_time, id) > (b.bound_time, b.bound_id)"
            f" AND {self._due_now} ORDER BY ready_time, id LIMIT %(limit)s {lock}) AS x LIMIT %(limit)s"
        )

    @cached_property
    def checkout_skip_locked(self) -> str:
        """Lock due rows, charge and lease them, in one HOT update.

        The array of ctids is an InitPlan that runs once, so LIMIT cannot be overrun and a TID scan has no rival plan.
        """
        line = self._line("ctid", "FOR NO KEY UPDATE SKIP LOCKED")
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET {self._take} WHERE ctid = ANY(ARRAY({line})) RETURNING {self.leased}"
        )

    @cached_property
    def candidates(self) -> str:
        """The head of the line without a lock: (id, total_attempt), for the optimistic strategy."""
        return self.tables.rename(self._line("id, total_attempt, priority, ready_time", ""))

    @cached_property
    def checkout_optimistic(self) -> str:
        """Take those candidates that nobody changed since they were read; losers take nothing."""
        return self.tables.rename(
            f"UPDATE {self.tables.task} AS t SET {self._take} FROM {self.dialect.rows(FENCED)}"
            f" WHERE t.id = u.i AND t.total_attempt = u.k AND t.status IN ({sql_sources('checkout')})"
            f" AND {self._due_now} RETURNING {self.leased}"
        )

    @cached_property
    def checkout_single_writer(self) -> str:
        """Take the head of the line in one statement, where the database lets one writer in at a time (SQLite)."""
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET {self._take} WHERE id IN (SELECT id FROM {self.tables.task}"
            f" WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL AND {self._due_now}"
            f" AND status IN ({sql_sources('checkout')})"
            f" ORDER BY priority, ready_time, id LIMIT %(limit)s) RETURNING {self.leased}"
        )

    @cached_property
    def priorities(self) -> str:
        """The distinct priorities in line, found by skipping through the index (PostgreSQL has no loose scan)."""
        first = f"SELECT priority FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL"
        return self.tables.rename(
            f"WITH RECURSIVE p AS (({first} ORDER BY priority LIMIT 1) UNION ALL"
            f" SELECT ({first} AND priority > p.priority ORDER BY priority LIMIT 1) FROM p WHERE p.priority IS NOT NULL)"
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
    def soon(self) -> str:
        """Whether a task is in line that is due, being processed, or due within ``horizon`` seconds; and not paused."""
        return self.tables.rename(
            f"SELECT 1 FROM {self.tables.task} WHERE queue_name = %(queue_name)s"
            f" AND ready_time <= {self.dialect.later('%(horizon)s')} AND NOT {self._paused} LIMIT 1"
        )

    # -- lease -------------------------------------------------------------------------------------------------------

    @cached_property
    def renew(self) -> str:
        """Extend held leases. Skips locked rows: a renewal never waits for a handler's own row lock."""
        lock = f"{self.dialect.lock} SKIP LOCKED" if self.dialect.skip_locked else ""
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET next_process_time = {self.dialect.later('%(lease)s')} WHERE id IN"
            f" (SELECT t.id FROM {self._fenced('renew')} {lock}) RETURNING id"
        )

    @cached_property
    def held(self) -> str:
        """Which of the given leases still stand."""
        return self.tables.rename(f"SELECT t.id FROM {self._fenced('renew')}")

    @cached_property
    def touch(self) -> str:
        """Extend one lease by ``delta`` seconds; returns its new end."""
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET next_process_time ="
            f" {self.dialect.later('%(delta)s', start='next_process_time')}"
            f" WHERE id = %(id)s AND total_attempt = %(total_attempt)s AND status IN ({sql_sources('touch')})"
            " RETURNING next_process_time"
        )

    @cached_property
    def progress(self) -> str:
        """Store a progress note under a lease."""
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET process_result = %(note)s, last_update_time = {self.dialect.now}"
            f" WHERE id = %(id)s AND total_attempt = %(total_attempt)s AND status IN ({sql_sources('touch')})"
            " RETURNING id"
        )

    def _fenced(self, verb: str, columns: Mapping[str, str] = FENCED) -> str:
        return (
            f"{self.tables.task} AS t JOIN {self.dialect.rows(columns)} ON t.id = u.i AND t.total_attempt = u.k"
            f" WHERE t.status IN ({sql_sources(verb)})"
        )

    # -- settle ------------------------------------------------------------------------------------------------------

    @cached_property
    def complete_plain(self) -> str:
        """COMPLETED without a result, by arrays: what nearly every batch is."""
        return self._complete(
            "unnest(%(ids)s::bigint[], %(tokens)s::bigint[]) AS u(i, k)"
            if self.dialect.vendor == "postgresql"
            else self.dialect.rows(FENCED),
            "NULL",
            "NULL",
        )

    @cached_property
    def complete(self) -> str:
        """COMPLETED with results."""
        return self._complete(self.dialect.rows(COMPLETED), "u.p", "u.r")

    def _complete(self, source: str, process_result: str, result: str) -> str:
        now = self.dialect.now
        return self.tables.rename(
            f"UPDATE {self.tables.task} AS t SET status = 'COMPLETED', ready_time = NULL, finish_time = {now},"
            f" last_update_time = {now}, process_result = {process_result}, result = {result} FROM {source}"
            f" WHERE t.id = u.i AND t.total_attempt = u.k AND t.status IN ({sql_sources('complete')}) RETURNING id"
        )

    @cached_property
    def write(self) -> str:
        """Every other way out of PROCESSING that keeps the row. A NULL delay keeps the place in line (release)."""
        now = self.dialect.now
        return self.tables.rename(
            f"UPDATE {self.tables.task} AS t SET status = u.s, last_update_time = {now}, parked_by = u.w,"
            " ready_time = CASE WHEN u.s <> 'CREATED' OR u.w IS NOT NULL THEN NULL WHEN u.d IS NULL THEN t.ready_time"
            f" ELSE {self.dialect.later('u.d')} END,"
            f" next_process_time = CASE WHEN u.s = 'CREATED' THEN {self.dialect.later('coalesce(u.d, 0)')}"
            " ELSE t.next_process_time END,"
            " attempt = CASE WHEN u.a IS NULL THEN 0 ELSE t.attempt + u.a END,"
            " reenqueue_attempt = t.reenqueue_attempt + u.e,"
            " process_result = CASE WHEN u.s = 'CREATED' AND u.d IS NULL THEN t.process_result ELSE u.p END,"
            " result = CASE WHEN u.s = 'CREATED' AND u.d IS NULL THEN t.result ELSE u.r END,"
            " poller_instance = CASE WHEN u.s = 'CREATED' THEN NULL ELSE t.poller_instance END,"
            f" finish_time = CASE WHEN u.s = 'CREATED' THEN NULL ELSE {now} END"
            f" FROM {self.dialect.rows(WRITTEN)}"
            f" WHERE t.id = u.i AND t.total_attempt = u.k AND t.status IN ({sql_sources('fail')}) RETURNING id"
        )

    @cached_property
    def attempts(self) -> str:
        """The failed attempts of rows about to be written, while their leases stand; locks them."""
        return self.tables.rename(
            f"INSERT INTO {self.tables.attempt} (location, task_id, queue_name, attempt, total_attempt,"
            " poller_instance, start_time, error_type, message, traceback)"
            " SELECT %(location)s, t.id, t.queue_name, t.attempt, t.total_attempt, t.poller_instance, t.start_time,"
            f" u.t, u.m, u.b FROM {self._fenced('fail', FAILED)} {self.dialect.lock}"
        )

    @cached_property
    def to_history(self) -> str:
        """Copy rows about to leave as COMPLETED into the history; locks them."""
        now = self.dialect.now
        return self.tables.rename(
            f"INSERT INTO {self.tables.history} (location, task_id, status, process_result, result, finish_time,"
            f" last_update_time, {MOVED}) SELECT %(location)s, t.id, 'COMPLETED', u.p, u.r, {now}, {now},"
            f" {', '.join('t.' + name for name in MOVED.split(', '))}"
            f" FROM {self._fenced('complete', COMPLETED)} {self.dialect.lock}"
        )

    @cached_property
    def count_deleted(self) -> str:
        """Count rows about to be deleted by their holders; locks them."""
        return self.tables.rename(
            f"INSERT INTO {self.tables.deleted} (queue_name, count) SELECT x.queue_name, count(*) FROM"
            f" (SELECT t.queue_name FROM {self._fenced('complete_delete')} {self.dialect.lock}) AS x"
            " GROUP BY x.queue_name"
        )

    @cached_property
    def remove(self) -> str:
        """Delete leased rows; returns the ids really deleted."""
        return self.tables.rename(
            f"DELETE FROM {self.tables.task} WHERE id IN (SELECT t.id FROM {self._fenced('complete_delete')})"
            " RETURNING id"
        )

    @cached_property
    def outcome_of(self) -> str:
        """What became of the given leases, for a commit whose reply was lost: (id, status) while the token stands."""
        return self.tables.rename(
            f"SELECT t.id, t.status FROM {self.tables.task} AS t JOIN {self.dialect.rows(FENCED)}"
            " ON t.id = u.i AND t.total_attempt = u.k"
        )

    # -- rescue and parking ------------------------------------------------------------------------------------------

    @cached_property
    def spent(self) -> str:
        """Expired leases of tasks with no attempt left: their process died on the last one. Locks them."""
        lock = f"{self.dialect.lock} SKIP LOCKED" if self.dialect.skip_locked else ""
        return self.tables.rename(
            f"SELECT t.id, t.total_attempt, t.attempt, t.poller_instance FROM {self.tables.task} AS t"
            f" WHERE t.queue_name = %(queue_name)s AND t.ready_time <= {self.dialect.now}"
            f" AND t.next_process_time <= {self.dialect.now} AND t.attempt >= t.max_attempts"
            f" AND t.status IN ({sql_sources('rescue')}) LIMIT %(limit)s {lock}"
        )

    @cached_property
    def unpark(self) -> str:
        """Put tasks that waited for a handler back in line, now that this poller has one for their type."""
        now = self.dialect.now
        known = (
            "payload_type = ANY(%(types)s)"
            if self.dialect.vendor == "postgresql"
            else "payload_type IN (SELECT value FROM json_each(%(types)s))"
        )
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET parked_by = NULL, last_update_time = {now},"
            f" ready_time = {self.dialect.greatest}({now}, next_process_time)"
            f" WHERE queue_name = %(queue_name)s AND status IN ({sql_sources('unpark')})"
            f" AND substr(parked_by, 1, {len(NO_HANDLER)}) = '{NO_HANDLER}'"
            f" AND (payload_type IS NULL OR {known}) RETURNING id"
        )
