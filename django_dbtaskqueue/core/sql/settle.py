"""Out of PROCESSING: every statement here is fenced by id, ``total_attempt`` and status."""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.base import FENCED, Group
from django_dbtaskqueue.core.states import sql_sources

# Columns that TASKS and the history share and that move over unchanged.
MOVED = (
    "queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority, payload, "
    "payload_type, context, group_key, lease_seconds, tag, poller_instance, create_time, next_process_time, "
    "expire_time, start_time"
)
WRITTEN = {  # one row: id, token, status, delay, changes of attempt and reenqueue, texts, parking reason, fingerprint
    "i": "bigint",
    "k": "bigint",
    "s": "text",
    "d": "float8",
    "a": "int",
    "e": "int",
    "p": "text",
    "r": "jsonb",
    "w": "text",
    "f": "text",
}
FAILED = {"i": "bigint", "k": "bigint", "t": "text", "m": "text", "b": "text", "f": "text"}
COMPLETED = {"i": "bigint", "k": "bigint", "p": "text", "r": "jsonb"}


class Settling(Group):
    """Every way to write an outcome."""

    @cached_property
    def complete_plain(self) -> str:
        """COMPLETED without a result, by arrays: what nearly every batch is."""
        return self._complete(
            # Inside a SELECT the planner cannot count the array, and takes the primary key whatever the statistics say:
            # they know hardly any PROCESSING, and a scan for those would be compared with each element.
            "unnest((SELECT %(ids)s::bigint[]), (SELECT %(tokens)s::bigint[])) AS u(i, k)"
            if self.dialect.vendor == "postgresql" and not self.dialect.single
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
            f"UPDATE {self.tables.task} AS t SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL,"
            f" finish_time = {now}, last_update_time = {now}, process_result = {process_result}, result = {result}"
            f" FROM {source}"
            f" WHERE t.id = u.i AND t.total_attempt = u.k AND t.status IN ({sql_sources('complete')}) RETURNING id"
        )

    @cached_property
    def write(self) -> str:
        """Every other way out of PROCESSING that keeps the row. A NULL delay keeps the place in line (release)."""
        now = self.dialect.now
        left = f"{self.dialect.least}(t.attempt + u.a, t.max_attempts - 1)"  # without one left nobody could take it
        return self.tables.rename(
            f"UPDATE {self.tables.task} AS t SET status = u.s, last_update_time = {now}, parked_by = u.w,"
            " ready_time = CASE WHEN u.s <> 'CREATED' OR u.w IS NOT NULL THEN NULL WHEN u.d IS NULL THEN t.ready_time"
            f" ELSE {self.dialect.later('u.d')} END,"
            f" next_process_time = CASE WHEN u.s = 'CREATED' THEN {self.dialect.later('coalesce(u.d, 0)')}"
            " ELSE t.next_process_time END,"
            f" attempt = CASE WHEN u.a IS NULL THEN 0 WHEN u.s = 'CREATED' THEN {left} ELSE t.attempt + u.a END,"
            " reenqueue_attempt = t.reenqueue_attempt + u.e,"
            " process_result = CASE WHEN u.s = 'CREATED' AND u.d IS NULL THEN t.process_result ELSE u.p END,"
            " result = CASE WHEN u.s = 'CREATED' AND u.d IS NULL THEN t.result ELSE u.r END,"
            " poller_instance = CASE WHEN u.s = 'CREATED' THEN NULL ELSE t.poller_instance END,"
            f" finish_time = CASE WHEN u.s = 'CREATED' THEN NULL ELSE {now} END,"
            " final_status = nullif(u.s, 'CREATED'), fingerprint = coalesce(u.f, t.fingerprint)"
            f" FROM {self.dialect.rows(WRITTEN)}"
            f" WHERE t.id = u.i AND t.total_attempt = u.k AND t.status IN ({sql_sources('fail')}) RETURNING id"
        )

    @cached_property
    def attempts(self) -> str:
        """The failed attempts of rows about to be written, while their leases stand; locks them."""
        return self.tables.rename(
            f"INSERT INTO {self.tables.attempt} (location, task_id, queue_name, attempt, total_attempt,"
            " poller_instance, start_time, error_type, message, traceback, fingerprint)"
            " SELECT %(location)s, t.id, t.queue_name, t.attempt, t.total_attempt, t.poller_instance, t.start_time,"
            f" u.t, u.m, u.b, u.f FROM {self.fenced('fail', FAILED)} {self.dialect.lock}"
        )

    @cached_property
    def to_history(self) -> str:
        """Copy rows about to leave as COMPLETED into the history; locks them."""
        now = self.dialect.now
        return self.tables.rename(
            f"INSERT INTO {self.tables.history} (location, task_id, status, process_result, result, finish_time,"
            f" last_update_time, {MOVED}) SELECT %(location)s, t.id, 'COMPLETED', u.p, u.r, {now}, {now},"
            f" {', '.join('t.' + name for name in MOVED.split(', '))}"
            f" FROM {self.fenced('complete', COMPLETED)} {self.dialect.lock}"
        )

    @cached_property
    def count_deleted(self) -> str:
        """Count rows about to be deleted by their holders; locks them."""
        return self.tables.rename(
            f"INSERT INTO {self.tables.deleted} (queue_name, count) SELECT x.q, count(*) FROM"
            f" (SELECT t.queue_name AS q FROM {self.fenced('complete_delete')} {self.dialect.lock}) AS x"
            " GROUP BY x.q"
        )

    @cached_property
    def remove(self) -> str:
        """Delete leased rows; returns the ids really deleted."""
        return self.tables.rename(
            f"DELETE FROM {self.tables.task} WHERE id IN (SELECT t.id FROM {self.fenced('complete_delete')})"
            " RETURNING id"
        )

    @cached_property
    def outcome_of(self) -> str:
        """What became of the given leases, for a commit whose reply was lost: (id, status) while the token stands."""
        return self.tables.rename(
            f"SELECT t.id, t.status FROM {self.tables.task} AS t JOIN {self.dialect.rows(FENCED)}"
            " ON t.id = u.i AND t.total_attempt = u.k"
        )
