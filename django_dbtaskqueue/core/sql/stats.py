"""Statements of statistics. Their cost does not grow with the tables, because every count has a limit.

Each statement answers for many queues, so the number of queries of a page does not depend on the number of queues.
A field in braces that is left in a statement is filled in by its caller, such as a limit: the planner chooses by it.
"""

from django_dbtaskqueue.core.sql.dialects import Group, part, template

MAX_POSITIONS_PER_PRIORITY = 1000  # due tasks read for a task's position in the ready order


class StatsStatements(Group):
    """What pages of statistics ask."""

    _max_names = 1000  # queues; others are found by name
    _max_priorities = 100  # of one queue
    _max_positions, _max_all_positions = MAX_POSITIONS_PER_PRIORITY, 10_000

    names = template(
        "({distinct:queue_name|ready_time IS NOT NULL} LIMIT {_max_names})"
        " UNION ({distinct:queue_name|final_status IS NOT NULL} LIMIT {_max_names})"
        " UNION ({distinct:queue_name|parked_by IS NOT NULL} LIMIT {_max_names})",
        "SELECT DISTINCT queue_name FROM {task} LIMIT {_max_names}",
    )
    # Of each queue, counted up to ``most``: (name, ready or leased, leased, parked, each end status, tasks whose lease
    # ran out, the seconds since the first of these). Leased tasks come first in the ready order. PostgreSQL only.
    counts = template(
        "SELECT q.n, l.ready, l.leased, {_counted:parked_by IS NOT NULL}, {_counted:final_status = 'COMPLETED'},"
        " {_counted:final_status = 'ERROR'}, {_counted:final_status = 'POISON'}, l.stale, l.seconds"
        " FROM unnest(%(names)s::text[]) AS q(n) CROSS JOIN LATERAL (SELECT count(*) AS ready,"
        " count(*) FILTER (WHERE h.status = 'PROCESSING') AS leased, count(*) FILTER (WHERE {_stale}) AS stale,"
        " max({_stale_seconds}) FILTER (WHERE {_stale}) AS seconds FROM (SELECT status, next_process_time FROM {task}"
        " WHERE queue_name = q.n AND ready_time IS NOT NULL"
        " ORDER BY priority, ready_time, id LIMIT {{most}}) AS h) AS l"
    )
    _stale = part("h.status = 'PROCESSING' AND h.next_process_time <= {now}")
    _stale_seconds = part("{seconds_between:h.next_process_time|{now}}")

    def _counted(self, condition: str) -> str:
        rows = f"SELECT 1 FROM {self.tables.task} WHERE queue_name = q.n AND {condition} LIMIT {{most}}"
        return f"(SELECT count(*) FROM ({rows}) AS x)"

    # The same for databases without lateral joins, counted exactly: (name, status, whether parked, number, and of tasks
    # whose lease ran out the number and the seconds since the first).
    counts_exact = template(
        "SELECT queue_name, status, parked_by IS NOT NULL, count(*), sum(CASE WHEN {_stale} THEN 1 ELSE 0 END),"
        " max(CASE WHEN {_stale} THEN {_stale_seconds} END) FROM {task} AS h GROUP BY 1, 2, 3"
    )
    # Of each queue and priority with something to take: (name, priority, seconds its first task has been due).
    due_ages = template(
        "SELECT q.n, b.p, {_due_age} FROM {_priorities} CROSS JOIN LATERAL (SELECT ready_time FROM {task}"
        " WHERE queue_name = q.n AND priority = b.p AND {_due} ORDER BY ready_time, id LIMIT 1) AS x",
        "SELECT x.queue_name, x.priority, max({_due_age}) FROM {task} AS x"
        " WHERE x.ready_time IS NOT NULL AND {_due} GROUP BY 1, 2",
    )
    _due = part("ready_time <= {now} AND next_process_time <= {now} AND attempt < max_attempts AND status = 'CREATED'")
    _due_age = part("{seconds_between:x.ready_time|{now}}")
    # The queues asked for (q.n), each with the priorities of its ready tasks (b.p).
    _priorities = part(
        "unnest(%(names)s::text[]) AS q(n) CROSS JOIN LATERAL"
        " ({distinct:priority|queue_name = q.n AND ready_time IS NOT NULL} LIMIT {_max_priorities}) AS b(p)"
    )
    # Of the first ``most`` tasks of each queue and priority, in all ``most_of_all``: (number, ids of PROCESSING).
    first_tasks = template(
        "SELECT count(*), array_agg(x.id) FILTER (WHERE x.status = 'PROCESSING') FROM (SELECT q.n, b.p, h.*"
        " FROM {_priorities} CROSS JOIN LATERAL (SELECT id, status FROM {task} WHERE queue_name = q.n"
        " AND priority = b.p AND ready_time IS NOT NULL ORDER BY ready_time, id LIMIT {{most}}) AS h"
        " LIMIT {{most_of_all}}) AS x GROUP BY x.n, x.p"
    )
    # Of the due tasks of a task's queue: (whether before it, poller with a live lease or NULL, payload type, number).
    ready_order_counts = template(
        "SELECT y.before, y.holder, y.payload_type, count(*) FROM (SELECT x.holder, x.payload_type,"
        " (x.priority, x.ready_time, x.id) < (SELECT t.priority, t.ready_time, t.id FROM {task} AS t"
        " WHERE t.id = %(task_id)s) AS before FROM ({_holders}) AS x) AS y GROUP BY 1, 2, 3"
    )
    _holders = part(
        "SELECT h.* FROM {_priorities} CROSS JOIN LATERAL ({_held} q.n AND priority = b.p"
        " ORDER BY ready_time, id LIMIT {_max_positions}) AS h LIMIT {_max_all_positions}",
        "{_held} %(queue_name)s ORDER BY priority, ready_time, id LIMIT {_max_all_positions}",
    )
    _held = part(
        "SELECT id, priority, ready_time, payload_type, CASE WHEN status = 'PROCESSING' AND next_process_time > {now}"
        " THEN coalesce(poller_instance, '') END AS holder FROM {task} WHERE ready_time <= {now} AND queue_name ="
    )
    # What the planner is asked for the size of cell number ``at``. PostgreSQL only.
    estimate = template("SELECT 1 FROM {task} AS c{{at}} WHERE queue_name = %(q{{at}})s AND status = %(s{{at}})s")
    # Of each fingerprint: (fingerprint, its tasks in ERROR or POISON, counted up to ``most``).
    open_failures = template(
        "SELECT f.f, (SELECT count(*) FROM (SELECT 1 FROM {task} AS t WHERE t.fingerprint = f.f"
        " AND t.final_status IN ('ERROR', 'POISON') LIMIT {{most}}) AS x) FROM {texts:prints|f}"
    )

    # Questions to the counts by the minute. A row that SQL wrote may say anything: it spoils no figure of the others.

    # What ended from a time on, until now: (queue, outcome, how many steps ago, number).
    ended = template("SELECT queue_name, name, {_steps_ago}, {_total} FROM {counts} WHERE {_recent} GROUP BY 1, 2, 3")
    _steps_ago = part(
        "floor({seconds_between:minute|{now}} / %(step)s)::int",
        "CAST({seconds_between:minute|{now}} / %(step)s AS integer)",
    )
    _recent = part("kind = 'outcome' AND minute >= {time:%(start)s} AND minute <= {now}")
    _total = part("least(sum(count), 1e18)::bigint", "CAST(total(count) AS integer)")
    # What ended, in every queue or some: (step of time, outcome, number).
    outcomes = template("SELECT {minute_step}, name, {_total} FROM {counts} WHERE {_wanted} GROUP BY 1, 2")
    _wanted = part("{_recent} AND (CAST(%(every)s AS boolean) OR {one_of:queue_name|queues})")
    # The step of time that a row's minute lies in, counted from 1970.
    minute_step = part(
        "floor(extract(epoch FROM minute) / %(step)s::int)::bigint",
        "CAST(strftime('%%s', minute) AS integer) / %(step)s",
    )
    # The histogram ``times`` of what ended, by ``by``, the queue or the step of time: (queue or step, class, number).
    durations = template(
        "SELECT {{by}}, h.key, sum(h.value::bigint)::bigint FROM {counts},"
        " jsonb_each_text(CASE WHEN jsonb_typeof({{times}}) = 'object' THEN {{times}} END) AS h"
        " WHERE {_wanted} AND h.key ~ '^[0-9][0-9]?$' AND h.value ~ '^[0-9]+$' AND length(h.value) <= 15 GROUP BY 1, 2",
        "SELECT {{by}}, h.key, sum(h.value) FROM {counts}, json_each({{times}}) AS h"
        " WHERE {_wanted} AND h.type = 'integer' AND h.value BETWEEN 0 AND 1e15"
        " AND (h.key GLOB '[0-9]' OR h.key GLOB '[0-9][0-9]') GROUP BY 1, 2",
    )
    # In which steps of time, of those between two times, counts of a kind have rows to add up.
    crowded = template(
        "SELECT {minute_step} FROM {counts} WHERE kind = %(kind)s AND minute >= {time:%(start)s}"
        " AND minute <= {time:%(end)s} GROUP BY 1 HAVING count(*) > count(DISTINCT queue_name || ' ' || name)"
        " ORDER BY 1 LIMIT %(limit)s"
    )
