"""Statements of statistics. Their cost does not grow with the tables, because every count has a limit.

Each statement answers for many queues, so the number of queries of a page does not depend on the number of queues.
"""

from __future__ import annotations

from django_dbtaskqueue.core.sql.dialects import COUNTS_TABLE, Dialect, Group, renamed, statement

COUNTED_STATUSES = ("COMPLETED", "ERROR", "POISON")
MAX_QUEUE_NAMES = 1000  # queues; others are found by name
MAX_PRIORITIES = 100  # of one queue
MAX_POSITIONS_PER_PRIORITY, MAX_POSITIONS = 1000, 10_000  # due tasks read for a task's position in the ready order


class StatsStatements(Group):
    """What pages of statistics ask."""

    @statement
    def names(self) -> str:
        if self.dialect.vendor != "postgresql":
            return f"SELECT DISTINCT queue_name FROM {self.tables.task} LIMIT {MAX_QUEUE_NAMES}"
        indexed = ("ready_time IS NOT NULL", "final_status IS NOT NULL", "parked_by IS NOT NULL")
        found = [f"({self.distinct('queue_name', rows)} LIMIT {MAX_QUEUE_NAMES})" for rows in indexed]
        return " UNION ".join(found)

    @renamed
    def counts(self, max_rows: int) -> str:
        """Of each queue, counted up to ``max_rows``: (name, ready or leased, leased, parked, each end status, and the
        tasks whose lease ran out with the seconds since the first of them).

        Leased tasks come first in the ready order, so they are counted there.
        """
        rows = f"{self.tables.task} WHERE queue_name = q.n AND"
        limited = ("parked_by IS NOT NULL", *(f"final_status = '{status}'" for status in COUNTED_STATUSES))
        counts = [f"(SELECT count(*) FROM (SELECT 1 FROM {rows} {one} LIMIT {max_rows}) AS x)" for one in limited]
        # The limit is a number, not a parameter, because the planner chooses by it.
        ready = (
            f"SELECT status, next_process_time FROM {rows} ready_time IS NOT NULL"
            f" ORDER BY priority, ready_time, id LIMIT {max_rows}"
        )
        return (
            f"SELECT q.n, l.ready, l.leased, {', '.join(counts)}, l.stale, l.seconds"
            " FROM unnest(%(names)s::text[]) AS q(n)"
            " CROSS JOIN LATERAL (SELECT count(*) AS ready, count(*) FILTER (WHERE h.status = 'PROCESSING') AS leased,"
            f" count(*) FILTER (WHERE {self._stale}) AS stale,"
            f" max({self._stale_seconds}) FILTER (WHERE {self._stale}) AS seconds FROM ({ready}) AS h) AS l"
        )

    @property
    def _stale(self) -> str:
        return f"h.status = 'PROCESSING' AND h.next_process_time <= {self.dialect.now}"

    @property
    def _stale_seconds(self) -> str:
        return self.dialect.seconds_between("h.next_process_time", self.dialect.now)

    @statement
    def counts_exact(self) -> str:
        """The same for databases without lateral joins, counted exactly: (name, status, whether parked, number, and of
        tasks whose lease ran out the number and the seconds since the first).
        """
        return (
            "SELECT queue_name, status, parked_by IS NOT NULL, count(*),"
            f" sum(CASE WHEN {self._stale} THEN 1 ELSE 0 END),"
            f" max(CASE WHEN {self._stale} THEN {self._stale_seconds} END)"
            f" FROM {self.tables.task} AS h GROUP BY 1, 2, 3"
        )

    @statement
    def due_ages(self) -> str:
        """Of each queue and priority with something to take: (name, priority, seconds its first task has been due)."""
        now = self.dialect.now
        age = self.dialect.seconds_between("x.ready_time", now)
        due = f"ready_time <= {now} AND next_process_time <= {now} AND attempt < max_attempts AND status = 'CREATED'"
        if self.dialect.vendor != "postgresql":
            return (
                f"SELECT x.queue_name, x.priority, max({age}) FROM {self.tables.task} AS x"
                f" WHERE x.ready_time IS NOT NULL AND {due} GROUP BY 1, 2"
            )
        first = (
            f"SELECT ready_time FROM {self.tables.task} WHERE queue_name = q.n AND priority = b.p AND {due}"
            " ORDER BY ready_time, id LIMIT 1"
        )
        return f"SELECT q.n, b.p, {age} FROM {self._priorities} CROSS JOIN LATERAL ({first}) AS x"

    @property
    def _priorities(self) -> str:
        """The queues asked for (q.n), each with the priorities of its ready tasks (b.p)."""
        found = self.distinct("priority", "queue_name = q.n AND ready_time IS NOT NULL")
        return f"unnest(%(names)s::text[]) AS q(n) CROSS JOIN LATERAL ({found} LIMIT {MAX_PRIORITIES}) AS b(p)"

    @renamed
    def first_tasks(self, max_rows: int, max_all: int) -> str:
        """Of the first ``max_rows`` tasks of each queue and priority, in all ``max_all``: (number, ids of PROCESSING).

        PostgreSQL only.
        """
        first = (
            f"SELECT id, status FROM {self.tables.task} WHERE queue_name = q.n AND priority = b.p"
            f" AND ready_time IS NOT NULL ORDER BY ready_time, id LIMIT {max_rows}"
        )
        return (
            "SELECT count(*), array_agg(x.id) FILTER (WHERE x.status = 'PROCESSING') FROM (SELECT q.n, b.p, h.* FROM"
            f" {self._priorities} CROSS JOIN LATERAL ({first}) AS h LIMIT {max_all}) AS x GROUP BY x.n, x.p"
        )

    @statement
    def ready_order_counts(self) -> str:
        """Of the due tasks of a task's queue: (whether before it in the ready order, the poller that holds a live lease
        or NULL, the payload type, number).
        """
        now, task = self.dialect.now, self.tables.task
        held = f"status = 'PROCESSING' AND next_process_time > {now}"
        columns = f"id, priority, ready_time, payload_type, CASE WHEN {held} THEN coalesce(poller_instance, '') END"
        due = f"SELECT {columns} AS holder FROM {task} WHERE ready_time <= {now} AND queue_name ="
        if self.dialect.vendor == "postgresql":
            first = f"{due} q.n AND priority = b.p ORDER BY ready_time, id LIMIT {MAX_POSITIONS_PER_PRIORITY}"
            rows = f"SELECT h.* FROM {self._priorities} CROSS JOIN LATERAL ({first}) AS h LIMIT {MAX_POSITIONS}"
        else:
            rows = f"{due} %(queue_name)s ORDER BY priority, ready_time, id LIMIT {MAX_POSITIONS}"
        own = f"SELECT t.priority, t.ready_time, t.id FROM {task} AS t WHERE t.id = %(task_id)s"
        return (
            "SELECT y.before, y.holder, y.payload_type, count(*) FROM (SELECT x.holder, x.payload_type,"
            f" (x.priority, x.ready_time, x.id) < ({own}) AS before FROM ({rows}) AS x) AS y GROUP BY 1, 2, 3"
        )

    @renamed
    def estimates(self, cells: int) -> str:
        """Ask the planner for the size of many cells at once; the answer names them ``c0``, ``c1`` and so on."""
        one = f"SELECT 1 FROM {self.tables.task} AS c{{0}} WHERE queue_name = %(q{{0}})s AND status = %(s{{0}})s"
        wanted = " UNION ALL ".join(one.format(number) for number in range(cells))
        return f"EXPLAIN (FORMAT JSON) {wanted}"

    @renamed
    def open_failures(self, max_rows: int) -> str:
        """Of each fingerprint: (fingerprint, its tasks in ERROR or POISON, counted up to ``max_rows``)."""
        tasks = (
            f"SELECT 1 FROM {self.tables.task} AS t WHERE t.fingerprint = f.f"
            f" AND t.final_status IN ('ERROR', 'POISON') LIMIT {max_rows}"
        )
        return f"SELECT f.f, (SELECT count(*) FROM ({tasks}) AS x) FROM {self.dialect.texts('prints', 'f')}"


def series_sql(dialect: Dialect) -> tuple[str, str]:
    """Return two questions to the per-minute counts, by step of time: outcomes, and one histogram (``{times}``)."""
    postgresql, step = dialect.vendor == "postgresql", _step(dialect)
    every = "%(every)s::boolean" if postgresql else "%(every)s"
    names = f"SELECT q.q FROM {dialect.texts('queues', 'q')}"
    wanted = f"{_recent(dialect)} AND ({every} OR queue_name IN ({names}))"
    each, fits, number = _entries(dialect)
    return (
        f"SELECT {step}, name, {_total(dialect)} FROM {COUNTS_TABLE} WHERE {wanted} GROUP BY 1, 2",
        f"SELECT {step}, h.key, {number} FROM {COUNTS_TABLE}, {each} WHERE {wanted} AND {fits} GROUP BY 1, 2",
    )


def durations_sql(dialect: Dialect) -> str:
    """Return the question for a histogram (``{times}``) of each queue since a time: (queue, bucket, number)."""
    each, fits, number = _entries(dialect)
    rows = f"{COUNTS_TABLE}, {each} WHERE {_recent(dialect)}"
    return f"SELECT queue_name, h.key, {number} FROM {rows} AND {fits} GROUP BY 1, 2"


def ended_sql(dialect: Dialect) -> str:
    """Return the question for what ended in each queue since a time: (queue, outcome, how many steps ago, number)."""
    ago = f"{dialect.seconds_between('minute', dialect.now)} / %(step)s"
    ago = f"floor({ago})::int" if dialect.vendor == "postgresql" else f"CAST({ago} AS integer)"
    rows = f"{COUNTS_TABLE} WHERE {_recent(dialect)}"
    return f"SELECT queue_name, name, {ago}, {_total(dialect)} FROM {rows} GROUP BY 1, 2, 3"


def crowded_sql(dialect: Dialect) -> str:
    """Return the question in which steps of time, of those between two times, counts of a kind have rows to add up."""
    return (
        f"SELECT {_step(dialect)} FROM {COUNTS_TABLE} WHERE kind = %(kind)s"
        f" AND minute >= {dialect.time('%(start)s')} AND minute <= {dialect.time('%(end)s')}"
        " GROUP BY 1 HAVING count(*) > count(DISTINCT queue_name || ' ' || name) ORDER BY 1 LIMIT %(limit)s"
    )


# A row that SQL wrote may say anything: it spoils no figure of the others.


def _recent(dialect: Dialect) -> str:
    """Return the condition for outcomes from a time on, until now."""
    return f"kind = 'outcome' AND minute >= {dialect.time('%(start)s')} AND minute <= {dialect.now}"


def _total(dialect: Dialect) -> str:
    return "least(sum(count), 1e18)::bigint" if dialect.vendor == "postgresql" else "CAST(total(count) AS integer)"


def _entries(dialect: Dialect) -> tuple[str, str, str]:
    """Return the entries of a histogram (``{times}``) as ``h``, which of them are counts, and the sum of these."""
    if dialect.vendor == "postgresql":
        each = "jsonb_each_text(CASE WHEN jsonb_typeof({times}) = 'object' THEN {times} END) AS h"
        return each, "h.key ~ '^[0-9]{{1,2}}$' AND h.value ~ '^[0-9]{{1,15}}$'", "sum(h.value::bigint)::bigint"
    fits = "h.type = 'integer' AND h.value BETWEEN 0 AND 1e15 AND (h.key GLOB '[0-9]' OR h.key GLOB '[0-9][0-9]')"
    return "json_each({times}) AS h", fits, "sum(h.value)"


def _step(dialect: Dialect) -> str:
    """Return which step of time a row's minute lies in, counted from 1970."""
    if dialect.vendor == "postgresql":
        return "floor(extract(epoch FROM minute) / %(step)s::int)::bigint"
    return "CAST(strftime('%%s', minute) AS integer) / %(step)s"
