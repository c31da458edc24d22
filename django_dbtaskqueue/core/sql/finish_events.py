"""The SQL of streams of finished tasks: events, which a trigger writes while a stream is registered, and their use.

An event says which transaction finished a task. It is written by that transaction, and by nothing else: telling others
of the end, which writes to the task once more, writes no event. A stream reads the events of transactions that have all
ended, so that a late commit is never skipped, and of each task only the last event, so that none is read twice.

Without events a stream compares the transaction ids of all rows, which reads the whole table. PostgreSQL only.
"""

from __future__ import annotations

from functools import cached_property
from zlib import crc32

from django_dbtaskqueue.core.sql.dialects import Group, renamed
from django_dbtaskqueue.core.sql.pipeline import TERMINAL_SQL, XMAX_SQL, XMIN_SQL, distance

EVENT_TABLE = '"dbtaskqueue_finishevent"'
POSITION_TABLE = '"dbtaskqueue_streamposition"'
TRIGGER_NAME = "dbtaskqueue_finish"
TRIGGER_LOCK_TIMEOUT = "2s"  # making or dropping the trigger waits for open transactions, and writers wait behind it
EVENT_SCHEMA_SQL = f"SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('{EVENT_TABLE}')"
# For a stream that has not read for so long no events are kept: when it comes back, it scans the table once.
ABSENT_SQL = "read_time < statement_timestamp() - interval '7 days'"
RESET_ABSENT_SQL = f"UPDATE {POSITION_TABLE} SET position = NULL WHERE position IS NOT NULL AND {ABSENT_SQL}"
ABSENT_LOCATIONS_SQL = f"SELECT DISTINCT location FROM {POSITION_TABLE} WHERE {ABSENT_SQL}"
ABSENT_STREAMS_SQL = (
    f"SELECT location, name, extract(epoch FROM statement_timestamp() - read_time)::int FROM {POSITION_TABLE}"
    f" WHERE {ABSENT_SQL} ORDER BY read_time LIMIT 10"
)


def window(since: int, until: int, *, finished: bool) -> str:
    """Return the test for rows last written by transactions from ``since`` to below ``until``, both 64 bits wide.

    With ``since`` 0: all rows that are in no later window. ``finished``: rows of TASKS that are terminal. Where another
    task waits for the end, these are those that are told to have ended: telling it writes to the row once more.
    """
    tests = [f"status IN ({TERMINAL_SQL}) AND watched IS NOT TRUE"] if finished else []
    if since:
        tests.append(f"{distance(since)} < {until - since}")
    else:  # ids are reused after 2**32 transactions: a row that is so old is in no later window for a long time
        tests.append(f"{distance(until)} >= {XMAX_SQL} - {until}")
    return " AND ".join(tests)


class FinishEventStatements(Group):
    """Statements about the events of one location's task table. Parameters: ``location``, ``name`` of the stream."""

    # -- which rows a micro-batch reads ------------------------------------------------------------------------------

    @renamed
    def finished_in(self, since: int, until: int, location: str, complete_from: int | None) -> str:
        """Return the test for tasks that transactions from ``since`` to below ``until`` finished.

        ``complete_from``: each finish by this transaction or a later one has its event; None: there are no events.
        """
        if complete_from is None or complete_from > until:
            return window(since, until, finished=True)
        place = location.replace("'", "''")
        events = f"{EVENT_TABLE} AS e WHERE e.location = '{place}'"
        if complete_from <= since:
            found = (
                f"SELECT e.task_id FROM {events} AND e.transaction_id >= {since} AND e.transaction_id < {until}"
                f" EXCEPT SELECT e.task_id FROM {events} AND e.transaction_id >= {until}"
            )
            # As an array: statistics of the events, which come and go, would mislead the planner.
            return f"status IN ({TERMINAL_SQL}) AND id = ANY(ARRAY({found}))"
        # A scan of the table without tasks that have an event in a later window. A task whose end is still to be told
        # was in no earlier window.
        later = f"SELECT 1 FROM {events} AND e.task_id = {self.tables.task}.id AND e.transaction_id >= {until}"
        written = f" AND ({distance(since)} < {XMAX_SQL} - {since} OR watched)" if since else ""
        return f"status IN ({TERMINAL_SQL}){written} AND NOT EXISTS ({later})"

    # -- the trigger -------------------------------------------------------------------------------------------------

    @cached_property
    def has_trigger(self) -> str:
        """Whether the trigger is there, and fires."""
        return f"SELECT {self._trigger}"

    @property
    def _trigger(self) -> str:
        return (
            f"EXISTS (SELECT 1 FROM pg_trigger WHERE tgrelid = to_regclass('{self.tables.task}')"
            f" AND tgname = '{TRIGGER_NAME}' AND tgenabled = 'A')"
        )

    def create_trigger(self, schema: str, location: str) -> tuple[str, ...]:
        """Make the trigger; ``schema`` (quoted) holds the table of events.

        Its function has the rights of its owner, so that a poller needs none on the table of events. The lock is held
        by no transaction that wrote to the task table before: all later ones write events.
        """
        body = self.tables.rename(
            "BEGIN IF OLD.final_status IS DISTINCT FROM NEW.final_status"
            " OR OLD.last_update_time IS DISTINCT FROM NEW.last_update_time THEN"
            f" INSERT INTO {schema}.{EVENT_TABLE} (location, transaction_id, task_id)"
            " VALUES (TG_ARGV[0], pg_current_xact_id()::text::bigint, NEW.id) ON CONFLICT DO NOTHING;"
            " END IF; RETURN NULL; END"
        )
        column, place = self.tables.rename("final_status"), location.replace("'", "''")
        return (
            f"CREATE OR REPLACE FUNCTION {schema}.{self._function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
            f" SET search_path = pg_catalog AS $${body}$$",
            f"CREATE OR REPLACE TRIGGER {TRIGGER_NAME} AFTER INSERT OR UPDATE OF {column} ON {self.tables.task}"
            f" FOR EACH ROW WHEN (NEW.{column} IS NOT NULL) EXECUTE FUNCTION {schema}.{self._function}('{place}')",
            f"ALTER TABLE {self.tables.task} ENABLE ALWAYS TRIGGER {TRIGGER_NAME}",
        )

    def drop_trigger(self, schema: str) -> str:
        return f"DROP FUNCTION IF EXISTS {schema}.{self._function}() CASCADE"

    @property
    def _function(self) -> str:
        return f"{TRIGGER_NAME}_{crc32(self.tables.task.encode()):08x}"

    # -- registered streams ------------------------------------------------------------------------------------------

    @cached_property
    def register(self) -> str:
        """Register a stream, or note that a registered one reads again."""
        return (
            f"INSERT INTO {POSITION_TABLE} (location, name) VALUES (%(location)s, %(name)s)"
            " ON CONFLICT (location, name) DO UPDATE SET read_time = statement_timestamp()"
        )

    @cached_property
    def lock_positions(self) -> str:
        """Lock the streams of the location until the end of the transaction; returns their names."""
        return f"SELECT name FROM {POSITION_TABLE} WHERE location = %(location)s ORDER BY id FOR UPDATE"

    @cached_property
    def begin(self) -> str:
        """Let new streams have the events of all transactions that begin from now on. The streams are locked before.

        Of those with a lower id, some may have ended before there was a trigger, though one that is older still runs.
        """
        return (
            f"UPDATE {POSITION_TABLE} SET position = {XMAX_SQL} WHERE location = %(location)s AND position IS NULL"
            f" AND NOT {ABSENT_SQL}"
        )

    @cached_property
    def unknown_positions(self) -> str:
        """Note that events of the location may be missing."""
        return f"UPDATE {POSITION_TABLE} SET position = NULL WHERE location = %(location)s"

    @cached_property
    def read_position(self) -> str:
        """The transaction from which on a stream has all events; NULL if it is unknown. Notes that the stream reads."""
        return (
            f"UPDATE {POSITION_TABLE} SET read_time = statement_timestamp() WHERE location = %(location)s"
            f" AND name = %(name)s RETURNING CASE WHEN {self._trigger} THEN position END"
        )

    @cached_property
    def advance(self) -> str:
        """Note that a stream has passed a transaction."""
        return (
            f"UPDATE {POSITION_TABLE} SET position = greatest(position, %(position)s)"
            " WHERE location = %(location)s AND name = %(name)s AND position IS NOT NULL"
        )

    @cached_property
    def trim(self) -> str:
        """Delete at most ``limit`` of the events that all streams have passed. The streams are locked before."""
        passed = f"SELECT min(position) FROM {POSITION_TABLE} WHERE location = %(location)s"
        return (
            f"DELETE FROM {EVENT_TABLE} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {EVENT_TABLE}"
            f" WHERE location = %(location)s AND transaction_id < coalesce(({passed}), {XMIN_SQL})"
            " ORDER BY transaction_id LIMIT %(limit)s::bigint))"
        )

    @cached_property
    def unregister(self) -> str:
        return f"DELETE FROM {POSITION_TABLE} WHERE location = %(location)s AND name = %(name)s"

    @cached_property
    def clear(self) -> str:
        """Delete all events of the location."""
        return f"DELETE FROM {EVENT_TABLE} WHERE location = %(location)s"
