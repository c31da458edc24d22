"""Statements that check tasks out, and those about leases."""

from django_dbtaskqueue.core.lease import LEASED
from django_dbtaskqueue.core.sql.dialects import Group, part, renamed, template
from django_dbtaskqueue.core.states import sql_sources

NO_HANDLER = "no handler"  # how the parking reason of a task without a processor begins
UNREADABLE = "unreadable"  # and that of a task whose row cannot be taken or read
# The watermark of each priority, in the order in which the priorities are served.
WATERMARKS = (
    "unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time, bound_id)"
)


class CheckoutStatements(Group):
    """The checkout strategies, questions about the ready order, and what is done to leases."""

    _wanted = ""  # a further condition; see ``Statements.narrowed``

    # The columns that every checkout returns; JSON and times as text, which is decoded only when it is read.
    leased = part(", ".join(f"{{text:{one.db}}}" if one.type in ("jsonb", "timestamptz") else one.db for one in LEASED))
    # The end of a lease: the task's own length or the queue's, and not shorter than a checkout takes.
    _lease_end = part("{later:{greatest}(coalesce(lease_seconds, %(lease)s), %(min_lease)s)}")
    # The SET of every checkout: charge the attempt and grant the lease. A row that is still PROCESSING had a lease that
    # ran out. Of any other row the count stands, as a negative.
    claim_set = part(
        "status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time = {now},"
        " last_update_time = {now}, next_process_time = {_lease_end}, poller_instance = %(poller_instance)s,"
        " lost_leases = CASE WHEN status = 'PROCESSING' THEN {least}(abs(lost_leases) + 1, 1000)"
        " ELSE -abs(lost_leases) END"
    )

    def _take(self, rows: str) -> str:
        return f"UPDATE {self.tables.task} SET {self.claim_set} WHERE {rows} RETURNING {self.leased}"

    # The WHERE of every checkout, but for the queue: due, an attempt left, not held, not paused. No condition on
    # status: ready_time IS NOT NULL says the same by CHECK, and each redundant condition lowers the planner's row guess
    # until a sequential scan looks cheaper than the index.
    due_now = part("{_takeable} AND NOT {_paused}")
    _takeable = part(
        "ready_time <= {now} AND next_process_time <= {now} AND attempt < max_attempts"
        " AND (tag IS NULL OR {one_of:tag|tags}){_wanted}"
    )
    # Evaluated once per statement: a pause takes effect before the very next checkout, anywhere.
    _paused = part("EXISTS (SELECT 1 FROM {queue} AS q WHERE q.name = %(queue_name)s AND {_in_pause})")
    _in_pause = part("q.paused_time IS NOT NULL AND (q.paused_until IS NULL OR q.paused_until > {now})")

    def _ready_tasks(self, columns: str, lock: str, watermarks: str = WATERMARKS, more: str = "") -> str:
        """The first ready tasks behind the watermarks, one index range per priority, at most ``limit``."""
        ready = self._ready_tasks_of(columns, f"{more}ORDER BY ready_time, id LIMIT %(limit)s {lock}")
        return f"SELECT x.* FROM {watermarks} CROSS JOIN LATERAL ({ready}) AS x LIMIT %(limit)s"

    def _ready_tasks_of(self, columns: str, order: str) -> str:
        return (
            f"SELECT {columns} FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND priority = b.p"
            f" AND (ready_time, id) > (b.bound_time, b.bound_id) AND {self.due_now} {order}"
        )

    # Lock due rows, charge and lease them, in one HOT update. The array of ctids is an InitPlan that runs once, so
    # LIMIT cannot be overrun and a TID scan has no rival plan.
    checkout_skip_locked = template("{_take:ctid = ANY(ARRAY({_ready_tasks:ctid|FOR NO KEY UPDATE SKIP LOCKED}))}")

    # ``checkout_skip_locked`` beside other pollers: it begins after the furthest row that one of them has told, so that
    # it does not walk over the rows that they hold, and tells its own last row, unless somebody has locked where.
    checkout_beside_others = template(
        "WITH b AS MATERIALIZED ({_furthest}),"
        " found AS MATERIALIZED"
        " ({_ready_tasks:ctid, priority, ready_time, id|FOR NO KEY UPDATE SKIP LOCKED|b|AND {_quiet} }),"
        " told AS (UPDATE {poller} SET taken_queue = %(queue_name)s, (taken_priority, taken_time, taken_id) ="
        " (SELECT priority, ready_time, id FROM found ORDER BY priority DESC, ready_time DESC, id DESC LIMIT 1)"
        " WHERE instance IN (SELECT p.instance FROM {poller} AS p WHERE p.instance = %(poller_instance)s"
        " AND EXISTS (SELECT FROM found) FOR NO KEY UPDATE OF p SKIP LOCKED))"
        " {_take:ctid = ANY(ARRAY(SELECT ctid FROM found))}"
    )
    # No transaction that still runs may have locked or changed the row: cheaper to see than to try the lock. What else
    # this leaves out, a full scan finds.
    _quiet = part("age(xmax) > (SELECT age(pg_snapshot_xmin(pg_current_snapshot())::xid))")
    _furthest = part(
        f"SELECT DISTINCT ON (p) p, bound_time, bound_id FROM (SELECT b.* FROM {WATERMARKS} UNION ALL"
        " SELECT taken_priority, taken_time, taken_id FROM {poller}"
        " WHERE taken_queue = %(queue_name)s AND taken_time <= {now}) AS m WHERE p = ANY(%(priorities)s::smallint[])"
        " ORDER BY p, bound_time DESC, bound_id DESC"
    )

    # Whether a snapshot pins so many old versions of the pollers' rows that to read them costs more than it saves.
    is_telling_dear = template("SELECT pg_stat_get_dead_tuples('{poller}'::regclass) > 1000", "SELECT true")

    # ``checkout_skip_locked`` of several queues in order: of each at most its share, in all ``limit``. Rows behind the
    # limit are neither read nor locked: the outer LIMIT stops the joins that feed it.
    checkout_of_many = template("{_take:ctid = ANY(ARRAY({_ready_of_many}))}")
    _ready_of_many = part(
        # The queues in the order in which they are served: of each its limit, and which watermarks are its own.
        "SELECT y.* FROM unnest(%(queues)s::text[], %(limits)s::int[], %(firsts)s::int[], %(lasts)s::int[])"
        " AS l(q, max_tasks, b1, b2) CROSS JOIN LATERAL (SELECT x.* FROM"
        " unnest((%(priorities)s::smallint[])[l.b1:l.b2], (%(times)s::timestamptz[])[l.b1:l.b2],"
        " (%(ids)s::bigint[])[l.b1:l.b2]) AS b(p, bound_time, bound_id) CROSS JOIN LATERAL"
        " (SELECT ctid FROM {task} WHERE queue_name = l.q AND priority = b.p"
        " AND (ready_time, id) > (b.bound_time, b.bound_id) AND {_takeable}"
        " ORDER BY ready_time, id LIMIT l.max_tasks FOR NO KEY UPDATE SKIP LOCKED) AS x LIMIT l.max_tasks) AS y"
        # The names of paused queues are an InitPlan. With one test per queue the planner could join and lose the order.
        " WHERE l.q <> ALL(ARRAY(SELECT q.name FROM {queue} AS q WHERE q.name = ANY(%(queues)s) AND {_in_pause}))"
        " LIMIT %(limit)s"
    )

    # The first ready tasks without a lock: (id, total_attempt), for the optimistic strategy.
    candidates = template("{_ready_tasks:id, total_attempt, priority, ready_time|}")
    # The first ready tasks of a queue, wherever the watermarks are: (id, total_attempt).
    first_ready = template(
        "SELECT id, total_attempt FROM {task} WHERE queue_name = %(queue_name)s"
        " AND ready_time IS NOT NULL AND {due_now} ORDER BY priority, ready_time, id LIMIT %(limit)s"
    )
    # ``first_ready`` of one group: (id, total_attempt). Sorted apart, or the planner reads the tasks of all groups.
    first_ready_of_group = template(
        "WITH ready AS MATERIALIZED (SELECT id, total_attempt, priority, ready_time FROM {task}"
        " AS t WHERE queue_name = %(queue_name)s AND group_key = %(group)s AND {HEAD} AND {due_now})"
        " SELECT id, total_attempt FROM ready ORDER BY priority, ready_time, id LIMIT %(limit)s"
    )
    # Take a task without a live lease out of the ready order.
    park_unleased = template(
        "UPDATE {task} SET status = 'CREATED', parked_by = %(reason)s, ready_time = NULL, poller_instance = NULL,"
        " last_update_time = {now} WHERE id = %(task_id)s AND total_attempt = %(token)s AND ready_time IS NOT NULL"
        " AND status IN ({_sources:checkout}) AND next_process_time <= {now} RETURNING id"
    )
    # Take the candidates that have not changed since they were read, and are not locked. A SELECT locks them first, in
    # order and past locked rows. An UPDATE alone has no lock order and could deadlock.
    checkout_optimistic = template("UPDATE {task} SET {claim_set} WHERE {among:id|{_still_ready}} RETURNING {leased}")
    # IS TRUE keeps the planner from the index of ready tasks, which it would read through for each candidate.
    _still_ready = part("SELECT t.id FROM {fenced:checkout} AND ({due_now}) IS TRUE {skipping}")

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

    # Of each priority with a due task: (priority, seconds its first task has been due).
    ages = template(
        f"SELECT b.p, {{_age}} FROM {WATERMARKS} CROSS JOIN LATERAL"
        " ({_ready_tasks_of:ready_time|ORDER BY ready_time, id LIMIT 1}) AS x",
        "SELECT x.priority, max({_age}) FROM {task} AS x WHERE queue_name = %(queue_name)s"
        " AND ready_time IS NOT NULL AND {due_now} GROUP BY x.priority",
    )
    _age = part("{seconds_between:x.ready_time|{now}}")
    priorities = template("{distinct:priority|queue_name = %(queue_name)s AND ready_time IS NOT NULL}")
    # ``priorities`` of several queues: (queue, priority).
    priorities_of_many = template(
        "SELECT l.q, x.* FROM unnest(%(queues)s::text[]) AS l(q)"
        " CROSS JOIN LATERAL ({distinct:priority|queue_name = l.q AND ready_time IS NOT NULL}) AS x"
    )

    # Seconds until the first scheduled task of each queue is due: (queue, seconds), where there is one. On PostgreSQL
    # of pairs of a queue and a priority, with which the index begins.
    next_due = template(
        "SELECT x.queue_name, {_due_in}"
        " FROM unnest(%(queues)s::text[], %(priorities)s::smallint[]) AS l(q, p) CROSS JOIN LATERAL"
        " (SELECT queue_name, ready_time FROM {task} WHERE queue_name = l.q AND priority = l.p"
        " AND ready_time > {now} ORDER BY ready_time LIMIT 1) AS x GROUP BY x.queue_name",
        "SELECT x.queue_name, {_due_in} FROM {task} AS x WHERE {one_of:queue_name|queues} AND ready_time > {now}"
        " GROUP BY x.queue_name",
    )
    _due_in = part("{seconds_between:{now}|min(x.ready_time)}")
    # Whether a ready task is being processed or can be taken within ``horizon`` seconds; false while paused. In the
    # index's order, or the planner reads the whole table.
    soon = template(
        "SELECT 1 FROM {task} WHERE queue_name = %(queue_name)s AND ready_time <= {later:%(horizon)s}"
        " AND (status = 'PROCESSING' OR next_process_time <= {later:%(horizon)s} AND attempt < max_attempts)"
        " AND (tag IS NULL OR {one_of:tag|tags}){_wanted} AND NOT {_paused} ORDER BY priority, ready_time, id LIMIT 1"
    )
    # Lease those of the given tasks that wait, ready or parked, past their time to live: to be ended, not run. Not
    # those on their way to another database. Like each leased task, one that was parked gets a ready time.
    checkout_expired = template(
        "UPDATE {task} SET {claim_set}, ready_time = coalesce(ready_time, next_process_time), parked_by = NULL"
        " WHERE {among:id|{_late}} RETURNING {leased}"
    )
    _late = part(
        "SELECT t.id FROM {task} AS t WHERE t.id IN ({each:ids}) AND t.status = 'CREATED' AND t.expire_time <= {now}"
        " AND {HERE} {skipping}"
    )

    _revivable = part("next_process_time > {later:%(since)s}")
    # Extend held leases. Skips locked rows, so a renewal never waits for a processor's own row lock.
    renew = template(
        "UPDATE {task} SET next_process_time = {_lease_end} WHERE {among:id|{unlocked}} AND {_revivable} RETURNING id"
    )
    leased_to = template(
        "SELECT {leased} FROM {task} WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL"
        " AND status IN ({_sources:renew}) AND poller_instance = %(poller_instance)s"
    )
    # The given leases that still hold, as checkout returns them, and the seconds each has left.
    held_leases = template("SELECT {leased}, {seconds_between:{now}|next_process_time} FROM {fenced:touch}")
    # Which of the given leases still hold, if their rows are not locked; locks them.
    unlocked = template("SELECT t.id FROM {fenced:renew} {skipping}")
    _one_lease = part("id = %(id)s AND total_attempt = %(total_attempt)s AND status IN ({_sources:touch})")
    # Extend one lease by ``delta`` seconds; returns its new end.
    touch = template(
        "UPDATE {task} SET next_process_time = {later:%(delta)s|next_process_time},"
        " expire_time = {maybe_later:%(delta)s|expire_time}"
        " WHERE {_one_lease} AND {_revivable} RETURNING {text:next_process_time}"
    )
    progress = template(
        "UPDATE {task} SET process_result = %(note)s, last_update_time = {now} WHERE {_one_lease} RETURNING id"
    )
    _last_attempt = part(
        "FROM {task} AS t WHERE t.queue_name = %(queue_name)s AND t.ready_time <= {now}"
        " AND t.attempt >= t.max_attempts AND t.status IN ({_sources:rescue})"
    )
    # Seconds until the first lease on a last attempt expires: negative if it has expired, NULL if none.
    seconds_until_exhausted = template("SELECT {seconds_between:{now}|min(t.next_process_time)} {_last_attempt}")
    # Expired leases of tasks without an attempt left: the process died in it. Locked in index order, or all is read.
    exhausted = template(
        "SELECT {leased} {_last_attempt} AND t.next_process_time <= {now}"
        " ORDER BY t.priority, t.ready_time, t.id LIMIT %(limit)s {skipping}"
    )
    # Pause a queue that has no row yet: no operator has paused or resumed it.
    start_paused = template(
        "INSERT INTO {queue} (name, paused_time, paused_by, paused_reason)"
        " VALUES (%(queue_name)s, {now}, 'settings', 'starts paused') ON CONFLICT (name) DO NOTHING"
    )
    # Queues, and whether each has tasks that were parked without a processor, and ready tasks with a group. By LIMIT:
    # an EXISTS for each queue the planner could hash, and read all ready tasks.
    to_prepare = template(
        "SELECT q.q, (SELECT 1 FROM {task} AS t WHERE queue_name = q.q AND {_no_handler} LIMIT 1) IS NOT NULL,"
        " (SELECT 1 FROM {task} AS t WHERE queue_name = q.q AND group_key IS NOT NULL AND {HEAD} LIMIT 1) IS NOT NULL"
        " FROM {texts:queues|q}"
    )
    _no_handler = part(f"{{begins:parked_by|{NO_HANDLER}}}")
    # One row if a queue has tasks that were parked without a processor. In the order of their index: else the planner
    # may read the table where it expects many such tasks.
    parked = template(
        "SELECT 1 FROM {task} WHERE queue_name = %(queue_name)s AND {_no_handler} ORDER BY payload_type LIMIT 1"
    )
    # Make parked tasks ready again, when this poller has a processor for their type.
    unpark = template(
        "UPDATE {task} SET {_unparked} WHERE queue_name = %(queue_name)s AND status IN ({_sources:unpark})"
        " AND {_no_handler} AND (payload_type IS NULL AND %(untyped)s OR {one_of:payload_type|types})"
        " RETURNING id, group_key"
    )
