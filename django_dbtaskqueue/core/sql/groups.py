"""Statements of groups: one task of each group is ready, and the others are parked behind it."""

from django_dbtaskqueue.core.sql.dialects import Group, part, template


def locked(queue: str, group: str) -> str:
    """PostgreSQL's call that locks a group to the end of the transaction."""
    return f"pg_advisory_xact_lock(hashtextextended({queue} || ' ' || {group}, 0))"


class GroupStatements(Group):
    """The head of each group: its first task. Callers hold the groups' locks."""

    # Lock groups to the end of the transaction, in one order everywhere. Nothing to do with a single writer. Counted,
    # because a settle would else read a row for each group.
    lock_groups = template(
        f"SELECT count({locked('%(queue_name)s', 'g')})"
        " FROM (SELECT g FROM unnest(%(groups)s::text[]) AS g ORDER BY g) AS x",
        "SELECT 1",
    )
    _of_group = part("{task} AS t WHERE t.queue_name = %(queue_name)s AND t.group_key = g.g")
    _wait = part("{greatest}({seconds_between:{now}|t.next_process_time}, 0)")
    # 0 for a task that runs, 1 for one that waits for a retry, 2 for others.
    _kind = part("CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN %(hold)s AND {_failed_last} THEN 1 ELSE 2 END")
    _swap = part(
        "UPDATE {task} SET parked_by = CASE WHEN parked_by IS NULL THEN '{GROUP}' END,"
        " ready_time = CASE WHEN parked_by IS NOT NULL THEN {_now_or_due} END WHERE"
        " (parked_by = '{GROUP}' OR parked_by IS NULL AND status = 'CREATED') AND"
    )
    # ``place_heads`` where the database has one writer at a time, and no LATERAL (SQLite).
    _place_heads_of_one_writer = part(
        "WITH members AS (SELECT g.g AS g, t.id AS id, {_kind} AS kind, true AS ready, {_wait} AS wait,"
        " t.priority AS priority FROM {texts:groups|g} JOIN {_of_group} AND {HEAD} UNION ALL"
        " SELECT g.g, t.id, 2, false, {_wait}, t.priority FROM {texts:groups|g} JOIN {task} AS t ON t.id IN"
        " ({_behind} <= {now} ORDER BY t.priority, t.id LIMIT %(number)s) UNION ALL"
        # Only for groups without so many due tasks, because this reads all the tasks behind.
        " SELECT g.g, t.id, 2, false, {_wait}, t.priority FROM {texts:groups|g} JOIN {task} AS t ON"
        " (SELECT count(*) FROM ({_behind} <= {now} LIMIT %(number)s)) < %(number)s AND t.id IN"
        " ({_behind} > {now} ORDER BY t.next_process_time, t.priority, t.id LIMIT %(number)s)),"
        " ranked AS (SELECT m.*, row_number() OVER (PARTITION BY m.g ORDER BY m.kind, m.wait, m.priority, m.id)"
        " <= %(number)s AS stays FROM members AS m)"
        " {_swap} id IN (SELECT r.id FROM ranked AS r WHERE r.stays <> r.ready AND r.kind > 0)"
        " RETURNING ready_time IS NOT NULL"
    )
    _behind = part("SELECT t.id FROM {_of_group} AND {BEHIND} AND t.next_process_time")

    # The members of groups; ``stays``: the first ``number``. A head that a checkout is just taking goes first.
    _ranked = part(
        "placed AS (SELECT m.*, {_first:} AS chosen FROM members AS m),"
        # Only where a head has to leave, this waits for such a checkout.
        " locked AS MATERIALIZED (SELECT t.id, t.status FROM {task} AS t WHERE t.id = ANY(ARRAY(SELECT p.id"
        " FROM placed AS p WHERE p.ready AND p.kind > 0 AND p.g = ANY(ARRAY("
        "SELECT p.g FROM placed AS p WHERE p.ready AND NOT p.chosen AND p.kind > 0)))) FOR NO KEY UPDATE),"
        " ranked AS (SELECT m.*,"
        " {_first:m.id <> ALL(ARRAY(SELECT l.id FROM locked AS l WHERE l.status = 'PROCESSING')), } AS stays"
        " FROM placed AS m)"
    )
    _first_due = part("SELECT t.id AS id, t.priority AS priority, {_wait} AS wait FROM {_next} AND t.next_process_time")
    _next = part("{_of_group} AND {BEHIND}")
    # Make the first ``number`` tasks of each group ready, and park the others.
    #
    # First come tasks in process, then those that wait for a retry, then the first due, by priority and age. Returns of
    # each changed task whether it became ready. Without ``every``, groups without a parked task may be passed over,
    # because no task of theirs can become ready.
    place_heads = template(
        "WITH g AS MATERIALIZED (SELECT g.g FROM unnest(%(groups)s::text[]) AS g(g)"
        # Most queues have no parked task: then one probe is enough. It must say false and not NULL, after which AND
        # looks on. An EXISTS for each group the planner could hash, and read all parked tasks of the queue.
        " WHERE %(every)s OR EXISTS (SELECT 1 FROM {task} AS t WHERE t.queue_name = %(queue_name)s"
        " AND {BEHIND}) AND (SELECT 1 FROM {_next} LIMIT 1) = 1),"
        # With OFFSET 0 it is no join, for which the planner may read the heads of the whole queue, once for each group.
        " heads AS MATERIALIZED (SELECT g.g, t.id AS id, t.priority AS priority, {_kind} AS kind, {_wait} AS wait"
        " FROM g CROSS JOIN LATERAL (SELECT t.id, t.priority, t.status, t.attempt, t.result, t.process_result,"
        " t.next_process_time FROM {_of_group} AND {HEAD} OFFSET 0) AS t),"
        " room AS MATERIALIZED (SELECT g.g, %(number)s::int - count(*) FILTER (WHERE h.kind < 2) AS places,"
        " %(number)s::int - count(*) FILTER (WHERE h.kind < 2 OR h.wait = 0) AS free"
        " FROM g LEFT JOIN heads AS h ON h.g = g.g GROUP BY g.g),"
        " due AS MATERIALIZED (SELECT g.g, g.free, f.* FROM room AS g CROSS JOIN LATERAL"
        " ({_first_due} <= {now} ORDER BY t.priority, t.id LIMIT greatest(g.places, 0)) AS f),"
        " later AS (SELECT g.g, f.* FROM (SELECT r.g, r.free - count(d.g) AS free FROM room AS r"
        " LEFT JOIN due AS d ON d.g = r.g GROUP BY r.g, r.free) AS g CROSS JOIN LATERAL"
        " ({_first_due} > {now} ORDER BY t.next_process_time, t.priority, t.id LIMIT greatest(g.free, 0)) AS f),"
        " members AS (SELECT g, id, kind, true AS ready, wait, priority FROM heads"
        " UNION ALL SELECT g, id, 2, false, wait, priority FROM due"
        " UNION ALL SELECT g, id, 2, false, wait, priority FROM later), {_ranked} {_swap}"
        " id = ANY(ARRAY(SELECT r.id FROM ranked AS r WHERE r.stays <> r.ready AND r.kind > 0))"
        " RETURNING ready_time IS NOT NULL",
        "{_place_heads_of_one_writer}",
    )

    def _first(self, before: str) -> str:
        order = f"{before}m.kind, m.wait, m.priority, m.id"
        return f"row_number() OVER (PARTITION BY m.g ORDER BY {order}) <= %(number)s::int"

    # The groups of a queue with more than ``number`` ready tasks.
    groups_over = template(
        "SELECT group_key FROM {task} AS t WHERE queue_name = %(queue_name)s"
        " AND group_key IS NOT NULL AND {HEAD} GROUP BY group_key HAVING count(*) > %(number)s"
    )
    make_ready = template(
        "UPDATE {task} SET parked_by = NULL, ready_time = {_now_or_due}"
        " WHERE id IN ({each:ids}) AND parked_by = '{GROUP}' RETURNING id"
    )
    park = template(
        "UPDATE {task} SET parked_by = '{GROUP}', ready_time = NULL"
        " WHERE id IN ({each:ids}) AND status = 'CREATED' RETURNING id"
    )


class LimitStatements(Group):
    """How many tasks of a queue run at a time, and how many start in a time.

    One row for each limited queue, with the group "", names leases. A checkout locks it: checkouts take turns.
    """

    _queue_row = part("queue_name = %(queue_name)s AND group_key = ''")
    _idle = part("{seconds_between:l.check_time|{now}}")
    _tokens = part("{least}(%(burst)s, l.tokens + {greatest}({_idle}, 0.0) * %(rate)s)")
    # The time of a statement is that of its begin, before it waits for the lock: it must not go back.
    _checked = part("check_time = {greatest}(l.check_time, {now})")
    # Lock the row of a queue, and refill its tokens: ``rate`` per second, at most ``burst``. As (stamp, "" where the
    # leases are not known, the leases unless the stamp is ``stamp``, tokens, seconds since it was locked last).
    lock_limit = template(
        "INSERT INTO {limit} AS l (queue_name, tokens) VALUES (%(queue_name)s, %(burst)s)"
        " ON CONFLICT (queue_name, group_key) DO UPDATE SET tokens = {_tokens}, {_checked}, idle_seconds = {_idle}"
        " RETURNING stamp, CASE WHEN stamp <> %(stamp)s THEN leases END, tokens, idle_seconds"
    )
    # ``lock_limit`` and ``store_limit`` of rows that were taken; returns the tokens that are left. It does
    # nothing if the row's stamp is not ``known``, its tokens are too few, or it was not locked for ``watched`` seconds.
    count_in_limit = template(
        "UPDATE {limit} AS l SET tokens = {_tokens} - %(taken)s, {_checked}, idle_seconds = {_idle},"
        " leases = %(leases)s, stamp = %(stamp)s WHERE {_queue_row} AND stamp = %(known)s"
        " AND {_idle} <= %(watched)s AND (%(rate)s = 0 OR {_tokens} >= %(taken)s) RETURNING tokens"
    )
    store_limit = template(
        "UPDATE {limit} SET leases = %(leases)s, stamp = %(stamp)s, tokens = tokens - %(taken)s WHERE {_queue_row}"
    )
    # Lock the rows of groups in one order, and refill their tokens as ``lock_limit`` does: (group, tokens).
    lock_group_limits = template(
        "INSERT INTO {limit} AS l (queue_name, group_key, tokens, check_time, full_time)"
        " SELECT %(queue_name)s, g.g, %(burst)s, {now}, {now} FROM {texts:groups|g} WHERE true ORDER BY g.g"
        " ON CONFLICT (queue_name, group_key) DO UPDATE SET tokens = {_tokens}, {_checked} RETURNING group_key, tokens"
    )
    charge_groups = template(
        "UPDATE {limit} AS l SET tokens = l.tokens - u.taken,"
        " full_time = {later:(%(burst)s - l.tokens + u.taken) / %(rate)s} FROM {rows:group_name text, taken float8}"
        " WHERE l.queue_name = %(queue_name)s AND l.group_key = u.group_name"
    )
    # Of tasks just taken: (id, heads of its group and priority before it that are ready later, seconds until the last).
    heads_before = template(
        "SELECT x.id, count(*), {seconds_between:{now}|max(t.ready_time)} FROM {rows:{FENCED}} JOIN {task} AS x"
        " ON x.id = u.task_id JOIN {task} AS t ON t.queue_name = x.queue_name AND t.group_key = x.group_key"
        " AND {HEAD} AND t.next_process_time <= {now} AND t.priority = x.priority AND t.id < x.id"
        " AND t.ready_time > x.ready_time GROUP BY x.id"
    )
    # Undo the checkout of tasks, which are ready again in ``delay`` seconds. Their due time stays in the past, so no
    # later task of the group passes them. A task whose lease had run out stays one.
    put_off = template(
        "UPDATE {task} AS t SET last_update_time = {now}, next_process_time = {now}, ready_time = {later:u.delay},"
        " attempt = t.attempt - 1, status = CASE WHEN t.lost_leases > 0 THEN t.status ELSE 'CREATED' END,"
        " poller_instance = CASE WHEN t.lost_leases > 0 THEN t.poller_instance END,"
        " lost_leases = CASE WHEN t.lost_leases > 0 THEN t.lost_leases - 1 ELSE t.lost_leases END"
        " FROM {rows:task_id bigint, token bigint, delay float8}"
        " WHERE {FENCE} AND t.status IN ({_sources:release}) RETURNING id"
    )
    # The row of a queue without a lock: (leases, tokens, seconds since it was locked last).
    limit_state = template("SELECT leases, tokens, {seconds_between:check_time|{now}} FROM {limit} WHERE {_queue_row}")

    # The leases of the tasks ``ids``: (id, total_attempt, seconds left), negative after their end.
    running_of = template(
        "SELECT id, total_attempt, {seconds_between:{now}|next_process_time} FROM {task}"
        " WHERE id {_among_ids} AND status IN ({_sources:renew})"
    )
    _among_ids = part("= ANY(%(ids)s::bigint[])", "IN ({each:ids})")
    # The leases of a queue: (id, total_attempt). It reads the ready order as far as it is due.
    all_running = template(
        "SELECT id, total_attempt FROM {task} WHERE queue_name = %(queue_name)s"
        " AND ready_time <= {now} AND status IN ({_sources:renew})"
    )
