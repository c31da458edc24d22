"""What keeps leases alive and tasks from being stuck."""

from __future__ import annotations

from functools import cached_property

from django_dbtaskqueue.core.sql.base import GROUP, Group
from django_dbtaskqueue.core.sql.checkout import leased
from django_dbtaskqueue.core.states import sql_sources

NO_HANDLER = "no handler"  # how the parking reason of a task without a processor begins


class Tending(Group):
    """Renewal, touch, rescue, parking."""

    @cached_property
    def renew(self) -> str:
        """Extend held leases. Skips locked rows: a renewal never waits for a handler's own row lock."""
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET next_process_time ="
            f" {self.dialect.later('coalesce(lease_seconds, %(lease)s)')} WHERE id IN"
            f" (SELECT t.id FROM {self.fenced('renew')} {self.passing}) RETURNING id"
        )

    @cached_property
    def leased_to(self) -> str:
        """The leases of a queue that stand in the name of one poller."""
        return self.tables.rename(
            f"SELECT {leased(self.dialect)} FROM {self.tables.task}"
            " WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL"
            f" AND status IN ({sql_sources('renew')}) AND poller_instance = %(poller_instance)s"
        )

    @cached_property
    def held(self) -> str:
        """Which of the given leases still stand."""
        return self.tables.rename(f"SELECT t.id FROM {self.fenced('renew')}")

    @cached_property
    def standing(self) -> str:
        """The given leases that still stand, as checkout returns them, and the seconds each has left."""
        left = self.dialect.seconds_between(self.dialect.now, "next_process_time")
        return self.tables.rename(f"SELECT {leased(self.dialect)}, {left} FROM {self.fenced('touch')}")

    @cached_property
    def unlocked(self) -> str:
        """Which of the given leases still stand, their rows locked by nobody; locks them."""
        return self.tables.rename(f"SELECT t.id FROM {self.fenced('renew')} {self.passing}")

    @cached_property
    def touch(self) -> str:
        """Extend one lease by ``delta`` seconds; returns its new end."""
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET next_process_time ="
            f" {self.dialect.later('%(delta)s', start='next_process_time')},"
            f" expire_time = {self.dialect.maybe_later('%(delta)s', start='expire_time')}"
            f" WHERE id = %(id)s AND total_attempt = %(total_attempt)s AND status IN ({sql_sources('touch')})"
            f" RETURNING {self.dialect.text('next_process_time')}"
        )

    @cached_property
    def progress(self) -> str:
        """Store a progress note under a lease."""
        return self.tables.rename(
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

    @cached_property
    def spent_in(self) -> str:
        """Seconds until the first lease on a last attempt runs out: negative when it has, NULL without such a lease."""
        left = self.dialect.seconds_between(self.dialect.now, "min(t.next_process_time)")
        return self.tables.rename(f"SELECT {left} {self._last_attempt}")

    @cached_property
    def spent(self) -> str:
        """Expired leases of tasks with no attempt left: their process died on the last one. Locks them."""
        return self.tables.rename(
            f"SELECT {leased(self.dialect)} {self._last_attempt} AND t.next_process_time <= {self.dialect.now}"
            # In the index's order, or the planner reads the whole table.
            f" ORDER BY t.priority, t.ready_time, t.id LIMIT %(limit)s {self.passing}"
        )

    @cached_property
    def last_failures(self) -> str:
        """The failed attempts of the given tasks: (id, number of the attempt), the last one last."""
        return (
            f"SELECT a.task_id, a.attempt FROM {self.tables.attempt} AS a JOIN {self.dialect.rows({'i': 'bigint'})}"
            " ON a.task_id = u.i WHERE a.location = %(location)s ORDER BY a.total_attempt"
        )

    @cached_property
    def start_paused(self) -> str:
        """Pause a queue that has no row yet: nobody has paused or resumed it."""
        return (
            f"INSERT INTO {self.tables.queue} (name, paused_time, paused_by, paused_reason)"
            f" VALUES (%(queue_name)s, {self.dialect.now}, 'settings', 'starts paused') ON CONFLICT (name) DO NOTHING"
        )

    @cached_property
    def unpark(self) -> str:
        """Put tasks that waited for a handler back in line, now that this poller has one for their type."""
        now = self.dialect.now
        return self.tables.rename(
            f"UPDATE {self.tables.task} SET parked_by = CASE WHEN group_key IS NOT NULL THEN '{GROUP}' END,"
            f" last_update_time = {now},"
            f" ready_time = CASE WHEN group_key IS NULL THEN {self.dialect.greatest}({now}, next_process_time) END"
            f" WHERE queue_name = %(queue_name)s AND status IN ({sql_sources('unpark')})"
            f" AND substr(parked_by, 1, {len(NO_HANDLER)}) = '{NO_HANDLER}'"
            f" AND (payload_type IS NULL AND %(untyped)s OR {self.dialect.one_of('payload_type', 'types')})"
            " RETURNING id, group_key"
        )
