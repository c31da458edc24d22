"""The SQL of ``pipeline/``: rows from a staging table into TASKS, and finished rows into the archive.

Each attempt of a Spark task fills a staging table under a number of its own. One transaction at the end takes the rows
of the successful attempts, and drops the table. Staged columns are named ``u.``.

The archive deletes only rows that are as they were exported. In most batches the rows' transaction ids show that nobody
has written to them since: ``remove_old`` deletes these by the batch's predicate. Otherwise temporary tables hold the
exported rows, and the delete compares id, fencing token, status and time of the last update.
"""

from functools import cached_property
from zlib import crc32

from django_dbtaskqueue.core.columns import TIMING
from django_dbtaskqueue.core.sql.dialects import GROUP, Dialect, Group, Tables, part, renamed, template
from django_dbtaskqueue.core.sql.enqueue import ENQUEUED_TYPES, READY_COLUMNS
from django_dbtaskqueue.core.sql.groups import locked
from django_dbtaskqueue.core.states import sql_sources

STAGING_PREFIX = "dbtaskqueue_stg_"
STAGED = {"queue_name": "text", **ENQUEUED_TYPES, **TIMING}
STREAMS = "streams/"  # as the queue of a reference: of micro-batches, as "query batch"


class StagingStatements(Group):
    """Statements about staging tables, most of them about ``table``, a quoted name."""

    def __init__(self, tables: Tables, dialect: Dialect, table: str = "") -> None:
        super().__init__(tables, dialect)
        self.table = table

    _columns = ", ".join(f"{name} {kind}" for name, kind in {"_attempt": "bigint", **STAGED}.items())
    _copied, _of_staged = ", ".join(ENQUEUED_TYPES), ", ".join(f"u.{name}" for name in ENQUEUED_TYPES)
    _prefix = STAGING_PREFIX
    _counted = part("{table} AS u WHERE u._attempt IN ({each:attempts})")
    # The begin of the name of a staging table that was made ``age`` seconds ago, in UTC; ``~`` is after all names.
    name = template("SELECT {_name}")
    _name = part(
        "'{_prefix}' || to_char(({later:-%(age)s}) AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISS')",
        "'{_prefix}' || strftime('%%Y%%m%%d%%H%%M%%S', {later:-%(age)s})",
    )
    # The names of the staging tables that are at least ``age`` seconds old.
    abandoned = template(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^{_prefix}[0-9]{{14}}_'"
        " AND relname < {_name} || '~' AND pg_table_is_visible(oid) ORDER BY relname",
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE '{_prefix}%%' AND name < {_name} || '~'"
        " ORDER BY name",
    )
    create = template(
        "CREATE UNLOGGED TABLE {table} ({_columns}) WITH (autovacuum_enabled = false)",
        "CREATE TABLE {table} ({_columns})",
    )

    @renamed
    def insert(self, *, ignore: bool, timed: bool, grouped: bool) -> str:
        """Insert the rows of ``attempts`` by reference, so that no writers deadlock. ``ignore``: not the taken ones."""
        due = self.dialect.now
        if timed:
            start = f"{self.dialect.greatest}({due}, coalesce(u.run_at, {due}))"
            due = self.dialect.later("coalesce(u.delay, 0)", start=start)
        expire = self.dialect.maybe_later("u.ttl", start=due) if timed else "NULL"
        ready, parked = due, "NULL"
        if grouped:
            ready = f"CASE WHEN u.group_key IS NULL THEN {due} END"
            parked = f"CASE WHEN u.group_key IS NOT NULL THEN '{GROUP}' END"
        conflict = " ON CONFLICT (reference_number, queue_name) DO NOTHING" if ignore else ""
        return (
            f"INSERT INTO {self.tables.task} (queue_name, {self._copied}, {READY_COLUMNS})"
            f" SELECT u.queue_name, {self._of_staged}, {due}, {ready}, {parked}, {expire} FROM {self._counted}"
            f" ORDER BY u.reference_number{self._byte_wise}, u.queue_name{self._byte_wise}{conflict}"
        )

    staged = template("SELECT count(*) FROM {_counted}")
    # How many of the staged rows ``insert`` would add with ``ignore``.
    new = template(
        "SELECT (SELECT count(*) FROM {_counted} AND u.reference_number IS NULL) + count(*)"
        " FROM (SELECT DISTINCT u.queue_name, u.reference_number FROM {_counted} AND u.reference_number IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM {task} AS t WHERE {_taken})) AS n"
    )
    _taken = "t.reference_number = u.reference_number AND t.queue_name = u.queue_name"
    # The first staged reference that a task holds, as (queue, reference, task, status).
    conflicts = template(
        "SELECT u.queue_name, u.reference_number, t.id, t.status FROM {table} AS u JOIN {task} AS t ON {_taken}"
        " WHERE u._attempt IN ({each:attempts}) ORDER BY 2, 1 LIMIT 1"
    )
    # The first reference that two staged rows have, as (queue, reference).
    twice = template(
        "SELECT u.queue_name, u.reference_number FROM {_counted} AND u.reference_number IS NOT NULL"
        " GROUP BY u.queue_name, u.reference_number HAVING count(*) > 1 ORDER BY 2, 1 LIMIT 1"
    )
    groups = template("SELECT count(*) FROM ({_groups}) AS g")
    _groups = part("SELECT DISTINCT u.queue_name AS q, u.group_key AS k FROM {_counted} AND u.group_key > ''")
    # Lock these groups to the end of the transaction, in the order of ``Grouping.lock_groups``.
    lock_groups_of = template(f"SELECT {locked('x.q', 'x.k')} FROM ({{_groups}} ORDER BY q, k) AS x")
    # Block other writers of tasks until the end of the transaction, when there are too many groups to lock.
    lock_table = template("LOCK TABLE {task} IN SHARE ROW EXCLUSIVE MODE")
    # Of the groups just written: (id, whether ready) of heads that are not ready, and of others that are. The head is
    # the one being processed, the one being retried, else the first that is due (``place_heads``).
    misplaced = template(
        "SELECT m.id, m.ready FROM (SELECT t.id AS id, t.ready_time IS NOT NULL AS ready,"
        " t.status AS s, row_number() OVER (PARTITION BY t.queue_name, t.group_key ORDER BY {_rank}) AS place"
        " FROM {task} AS t JOIN ({_groups}) AS g ON t.queue_name = g.q AND t.group_key = g.k WHERE {HEAD} OR {BEHIND}"
        ") AS m WHERE m.place = 1 AND NOT m.ready OR m.place > 1 AND m.ready AND m.s <> 'PROCESSING'"
    )
    _rank = part(
        "CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN t.ready_time IS NOT NULL AND {_failed_last} THEN 1 ELSE 2 END,"
        " {greatest}({seconds_between:{now}|t.next_process_time}, 0), t.priority, t.id"
    )
    # Add an entry to the ledger; no row is written if the ledger has it.
    enter = template(
        f"INSERT INTO {{ledger}} (queue_name, reference_number) VALUES ('{STREAMS}', %(entry)s)"
        " ON CONFLICT (queue_name, reference_number) DO NOTHING"
    )
    # The entries of the ledger that begin with ``prefix``, the oldest first.
    entries = template(
        f"SELECT reference_number FROM {{ledger}} WHERE queue_name = '{STREAMS}'"
        " AND substr(reference_number, 1, length({_text})) = {_text} ORDER BY id"
    )
    _text = "CAST(%(prefix)s AS text)"


XMIN_SQL = "pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
HORIZON_SQL = f"SELECT {XMIN_SQL}"
XMAX_SQL = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
XID_EPOCH = 2**32  # a row holds the low half of its writer's transaction id


def older(horizon: int) -> str:
    """Return the test for rows last written by transactions below ``horizon``, 64 bits wide.

    It fails for all rows when, after many later transactions, a younger row could look like an older one.
    """
    return f"{XMAX_SQL} - {horizon} < {XID_EPOCH // 2} AND {distance(horizon)} >= {XID_EPOCH // 2}"


def distance(start: int) -> str:
    """Return how many transactions after ``start`` a row was written, modulo 2**32."""
    return f"mod(xmin::text::bigint - {start % XID_EPOCH} + {XID_EPOCH}, {XID_EPOCH})"


BATCH_TABLE = '"dbtaskqueue_archivebatch"'
TERMINAL_SQL = sql_sources("housekeep")  # to archive is to housekeep into the lake
TASK_KEYS = ("location", "id", "total_attempt", "status", "last_update_time")
ATTEMPT_KEYS = ("id", "location", "task_id")
OPEN_BATCHES = f"SELECT token, location, lake FROM {BATCH_TABLE} WHERE state = 'open' ORDER BY id"
CREATE_BATCH = (
    f"INSERT INTO {BATCH_TABLE} (token, location, source, lake, first_id, last_id, cutoff, statuses, queues)"
    " VALUES (%(token)s, %(location)s, %(source)s, %(lake)s, %(first_id)s, %(last_id)s, %(cutoff)s, %(statuses)s,"
    " %(queues)s)"
)


class ArchiveStatements(Group):
    """Statements of the archive for the task table of one location."""

    _source = part("{task}")
    _key = "id"  # of a task
    _same_key = "t.id = k.id"
    # No task whose end is to be told, or that another one waits for.
    _unneeded, _needless = " AND watched IS NULL", " AND t.watched IS NULL"
    cutoff = template("SELECT {later:-%(age)s}")
    # The next rows that a batch takes: (first id, last id, number of rows).
    frozen = template(
        "SELECT min(x.id), max(x.id), count(*) FROM (SELECT id FROM {_source} WHERE id > %(after)s"
        " AND {_wanted} ORDER BY id LIMIT %(limit)s) AS x"
    )
    _wanted = part(
        f"status IN ({TERMINAL_SQL}) AND {{one_of:status|statuses}}"
        " AND coalesce(finish_time, last_update_time) < {time:%(cutoff)s}"
        " AND (%(every)s OR {one_of:queue_name|queues}){_unneeded}"
    )
    # Delete the rows of a batch that were last written before a horizon: ``{{older}}`` is its `older`.
    #
    # Returns (number, sum of the tasks' ids, their exclusive or, sum of the total attempts). A snapshot of that
    # horizon holds exactly the rows that are deleted. PostgreSQL only.
    remove_old = template(
        "WITH gone AS (DELETE FROM {_source} WHERE id BETWEEN %(first_id)s AND %(last_id)s"
        " AND {_wanted} AND {{older}} RETURNING {_key} AS k, total_attempt AS n{_batch}){_noted}"
        " SELECT count(*), coalesce(sum(k), 0), coalesce(bit_xor(k), 0), coalesce(sum(n), 0) FROM gone"
    )
    _batch, _noted = ", batch, queue_name, status", part(", noted AS ({_noting:gone WHERE true})")
    note_locked = template("{_noting:{_source} WHERE id IN (SELECT row_id FROM archived_gone)}")
    remove_exported_attempts = template("DELETE FROM {attempt} WHERE id IN (SELECT id FROM archived_attempt)")
    # Choose the exported rows that are unchanged. PostgreSQL locks them, and leaves out rows that are locked.
    lock = template(
        "INSERT INTO archived_gone (location, id, row_id) SELECT k.location, k.id, t.id"
        " FROM {_source} AS t JOIN archived_key AS k ON {_same_key} AND t.total_attempt = k.total_attempt"
        f" AND t.status = k.status AND {{_same_time}} AND t.status IN ({TERMINAL_SQL}){{_needless}}{{_locking}}"
    )
    # On SQLite texts of one time differ; a change moves it by more than a millisecond.
    _same_time = part(
        "t.last_update_time = k.last_update_time",
        "abs(julianday(t.last_update_time) - julianday(k.last_update_time)) < 1e-8",
    )
    _locking = part(" FOR UPDATE OF t SKIP LOCKED", "")
    # Delete the rows that ``lock`` has chosen in this transaction.
    remove_locked = template("DELETE FROM {_source} WHERE id IN (SELECT row_id FROM archived_gone)")
    remove_attempts = template(
        "DELETE FROM {attempt} WHERE id IN (SELECT a.id FROM archived_attempt AS a"
        " JOIN archived_gone AS g ON a.task_id = g.id AND a.location = g.location)"
    )
    # The exported tasks that were not deleted: (location, id).
    stayed = (
        "SELECT k.location, k.id FROM archived_key AS k WHERE NOT EXISTS"
        " (SELECT 1 FROM archived_gone AS g WHERE g.id = k.id AND g.location = k.location)"
    )
    # Close a batch, in the transaction that deletes; fenced by its state.
    batch_closed = template(
        f"UPDATE {BATCH_TABLE} SET state = 'closed', tasks = %(tasks)s, attempts = %(attempts)s, size = %(size)s,"
        " withdrawn = %(withdrawn)s, close_time = {now} WHERE token = %(token)s AND state = 'open'"
    )
    # End a batch of which nothing left the database.
    batch_abandoned = template(
        f"UPDATE {BATCH_TABLE} SET state = 'abandoned', note = %(note)s, close_time = {{now}}"
        " WHERE token = %(token)s AND state = 'open'"
    )

    @cached_property
    def temporary(self) -> dict[str, str]:
        time, end = ("timestamptz", " ON COMMIT DROP") if self.dialect.vendor == "postgresql" else ("text", "")
        columns = {
            "archived_key": f"location text, id bigint, total_attempt bigint, status text, last_update_time {time}",
            "archived_attempt": "id bigint, location text, task_id bigint",
            "archived_gone": "location text, id bigint, row_id bigint",
        }
        return {name: f"CREATE TEMPORARY TABLE {name} ({listed}){end}" for name, listed in columns.items()}


class ArchiveOfHistory(ArchiveStatements):
    """The same for its history, whose rows nobody waits for."""

    _source, _key = part("{history}"), "task_id"
    _same_key = "t.task_id = k.id AND t.location = k.location"
    _unneeded = _needless = _batch = ""

    def _noting(self, rows: str) -> str:
        return "SELECT 1"  # it does not know batches


ARCHIVES = {"task": ArchiveStatements, "history": ArchiveOfHistory}  # by the table that is archived


# -- streams of finished tasks -----------------------------------------------------------------------------------------

# While a stream is registered, a trigger writes an event in the transaction that finishes a task. Telling others of the
# end, which writes to the task once more, writes none. A stream reads the events of transactions that have all ended,
# so that a late commit is never skipped, and of each task only the last event, so that none is read twice.
#
# Without events a stream compares the transaction ids of all rows, which reads the whole table. PostgreSQL only.

EVENT_TABLE, POSITION_TABLE = '"dbtaskqueue_finishevent"', '"dbtaskqueue_streamposition"'
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
        # A scan of the table but for tasks with an event in a later window: their ends are told then.
        later = f"SELECT 1 FROM {events} AND e.task_id = {self.tables.task}.id AND e.transaction_id >= {until}"
        written = f" AND ({distance(since)} < {XMAX_SQL} - {since} OR watched)" if since else ""
        return f"status IN ({TERMINAL_SQL}){written} AND NOT EXISTS ({later})"

    # Whether the trigger is there, and fires.
    has_trigger = part("SELECT {_trigger}")
    _trigger = part(
        "EXISTS (SELECT 1 FROM pg_trigger WHERE tgrelid = to_regclass('{task}')"
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

    @cached_property
    def _function(self) -> str:
        return f"{TRIGGER_NAME}_{crc32(self.tables.task.encode()):08x}"

    # Register a stream, or note that a registered one reads again.
    register = (
        f"INSERT INTO {POSITION_TABLE} (location, name) VALUES (%(location)s, %(name)s)"
        " ON CONFLICT (location, name) DO UPDATE SET read_time = statement_timestamp()"
    )
    # Lock the streams of the location until the end of the transaction; returns their names.
    lock_positions = f"SELECT name FROM {POSITION_TABLE} WHERE location = %(location)s ORDER BY id FOR UPDATE"
    # Let new streams have the events of all transactions that begin from now on. The streams are locked before.
    # Of those with a lower id, some may have ended before there was a trigger, though one that is older still runs.
    begin = (
        f"UPDATE {POSITION_TABLE} SET position = {XMAX_SQL} WHERE location = %(location)s AND position IS NULL"
        f" AND NOT {ABSENT_SQL}"
    )
    # Note that events of the location may be missing.
    unknown_positions = f"UPDATE {POSITION_TABLE} SET position = NULL WHERE location = %(location)s"

    # The transaction from which on a stream has all events; NULL if it is unknown. Notes that the stream reads.
    read_position = part(
        f"UPDATE {POSITION_TABLE} SET read_time = statement_timestamp() WHERE location = %(location)s"
        " AND name = %(name)s RETURNING CASE WHEN {_trigger} THEN position END"
    )
    advance = (
        f"UPDATE {POSITION_TABLE} SET position = greatest(position, %(position)s)"
        " WHERE location = %(location)s AND name = %(name)s AND position IS NOT NULL"
    )
    # Delete at most ``limit`` of the events that all streams have passed. The streams are locked before.
    trim = (
        f"DELETE FROM {EVENT_TABLE} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {EVENT_TABLE}"
        f" WHERE location = %(location)s AND transaction_id < coalesce((SELECT min(position) FROM {POSITION_TABLE}"
        f" WHERE location = %(location)s), {XMIN_SQL})"
        " ORDER BY transaction_id LIMIT %(limit)s::bigint))"
    )
    unregister = f"DELETE FROM {POSITION_TABLE} WHERE location = %(location)s AND name = %(name)s"
    clear = f"DELETE FROM {EVENT_TABLE} WHERE location = %(location)s"
