"""Statements about tasks that wait for the ends of others.

A statement names either the task table, whose columns a project may rename, or the tables of dependencies.
"""

from collections.abc import Mapping
from functools import cached_property

from django_dbtaskqueue.core.sql.dialects import Group, part, template

EDGE_TYPES = {
    "parent_location": "text", "parent_id": "bigint", "child_location": "text", "child_id": "bigint", "name": "text",
    "outcome": "text",
}  # fmt: skip
HOLD_TYPES = {"location": "text", "task_id": "bigint", "remaining": "int", "on_parent_failure": "text"}


def _inserting(table: str, types: Mapping[str, str]) -> cached_property[str]:
    picked, columns = ", ".join(f"u.{name}" for name in types), ", ".join(map(" ".join, types.items()))
    return template(f"INSERT INTO {{{table}}} ({', '.join(types)}) SELECT {picked} FROM {{rows:{columns}}}")


class DependencyStatements(Group):
    """What waits for the end of a task, and how it is told."""

    # -- the task table ----------------------------------------------------------------------------------------------

    # The tasks that ended and whose end is still to be told: ids, the lowest first.
    ended_watched = template(
        "SELECT id FROM {task} WHERE watched AND final_status IS NOT NULL AND id > %(after)s"
        " ORDER BY id LIMIT %(limit)s"
    )
    # Of the given tasks those whose end is still to be told, as (id, status); locks them.
    lock_ended = template(
        "SELECT t.id, t.status FROM {task} AS t WHERE t.id IN ({each:ids})"
        " AND t.watched AND t.final_status IS NOT NULL ORDER BY t.id {lock}"
    )
    # Note that the ends of tasks are told. Something still waits for another end of those in ``open``.
    mark_reported = template(
        "UPDATE {task} SET watched = CASE WHEN id IN ({each:open}) THEN false END WHERE id IN ({each:ids})"
    )
    # The given tasks as (id, status); locks them, so that none ends before its children are written.
    lock_parents = template("SELECT id, status FROM {task} AS t WHERE id IN ({each:ids}) AND {HERE} ORDER BY id {lock}")
    # Note that something waits for the ends of tasks; for another end of those that failed.
    watch = template(
        "UPDATE {task} SET watched = final_status IS NULL OR coalesce(watched, false) WHERE id IN ({each:ids})"
    )
    # Those of the given tasks that no savepoint has taken back; one with its id may be of a batch inside.
    joining = template("SELECT id FROM {task} WHERE id IN ({each:ids}) AND batch IS NULL")
    join_batch = template("UPDATE {task} SET batch = %(batch)s WHERE id IN ({each:ids})")
    # Let tasks wait again that had ended before their parents did. Each has its whole time to live, and no poller.
    hold_again = template(
        "UPDATE {task} AS t SET status = 'CREATED', final_status = NULL, parked_by = '{PARENTS}',"
        " attempt = 0, finish_time = NULL, process_result = NULL, last_update_time = {now}, poller_instance = NULL,"
        " next_process_time = {now}, expire_time = {later:{_waited}|expire_time},"
        " watched = CASE WHEN watched IS NOT NULL THEN true END"
        " WHERE id IN ({each:ids}) AND status IN ({_sources:kick}) RETURNING id, queue_name"
    )
    # Let the ends of those of the given tasks that failed be told once more.
    ask_again = template(
        "UPDATE {task} SET watched = true"
        " WHERE id IN ({each:ids}) AND final_status IN ('ERROR', 'POISON') AND NOT watched"
    )
    present = template("SELECT id FROM {task} WHERE id IN ({each:ids})")
    # Let tasks start whose parents have ended. Each one once: this takes the reason away that they waited for.
    let_go = template(
        "UPDATE {task} SET {_unparked} WHERE id IN ({each:ids}) AND parked_by = '{PARENTS}'"
        " RETURNING id, queue_name, group_key"
    )
    # Cancel tasks that still wait for a parent that failed; returns (id, queue, whether something waits).
    cancel_held = template(
        "UPDATE {task} AS t SET status = 'POISON', final_status = 'POISON', parked_by = NULL,"
        " finish_time = {now}, last_update_time = {now}, process_result = u.reason_text"
        " FROM {rows:child bigint, reason_text text}"
        " WHERE t.id = u.child AND t.parked_by = '{PARENTS}' AND t.status IN ({_sources:cancel})"
        " RETURNING id, queue_name, watched"
    )

    # -- dependencies and held tasks ---------------------------------------------------------------------------------

    # What waits for the given parents: (edge, parent, location of the child, child); locks the edges.
    open_edges = template(
        "SELECT t.id, t.parent_id, t.child_location, t.child_id FROM {dependency} AS t"
        " WHERE t.parent_location = %(location)s AND t.parent_id IN ({each:ids}) AND t.outcome IS NULL"
        " ORDER BY t.id {lock}"
    )
    # The given held tasks as (id, what to do when a parent fails); locks them.
    lock_holds = template(
        "SELECT t.task_id, t.on_parent_failure FROM {hold} AS t WHERE t.location = %(location)s"
        " AND t.task_id IN ({each:ids}) ORDER BY t.task_id {lock}"
    )
    end_edges = template("UPDATE {dependency} SET outcome = %(status)s WHERE id IN ({each:ids})")
    # Take ended parents off the counts of held tasks; returns (id, how many are left).
    count_down = template(
        "UPDATE {hold} AS t SET remaining = t.remaining - u.number FROM {rows:child bigint, number int}"
        " WHERE t.location = %(location)s AND t.task_id = u.child RETURNING task_id, remaining"
    )
    drop_holds = template("DELETE FROM {hold} WHERE location = %(location)s AND task_id IN ({each:ids})")
    edge_range = template("SELECT min(id), max(id) FROM {dependency}")
    # The parents of some dependencies whose wait has not ended, and the children of some.
    open_parents = template("{_side:parent} AND outcome IS NULL")
    waited_for = template("{_side:child}")
    drop_edges = template("DELETE FROM {dependency} WHERE child_location = %(location)s AND child_id IN ({each:ids})")
    moved_statuses = template(
        "SELECT task_id, status FROM {history} WHERE location = %(location)s AND task_id IN ({each:ids})"
    )

    def _side(self, side: str) -> str:
        return (
            f"SELECT DISTINCT {side}_id FROM {self.tables.dependency} WHERE id > %(after)s AND id <= %(until)s"
            f" AND {side}_location = %(location)s"
        )

    insert_edges = _inserting("dependency", EDGE_TYPES)
    insert_holds = _inserting("hold", HOLD_TYPES)


class StepStatements(Group):
    """The steps of one task, and its signals. The alias ``step`` keeps the names of its columns.

    What writes a step locks the task's row while its lease holds. A signal sent is a row ``sent``, without a position.
    """

    _own_lease = part("t.id = %(task_id)s AND t.total_attempt = %(token)s AND t.status IN ({_sources:suspend})")

    _json = part("::jsonb", "")
    # The stored steps of a task: (position, kind, name, result, seconds until the time, sender, whether of this task).
    steps = template(
        "SELECT step.position, step.kind, step.name, {text:step.result}, {seconds_between:{now}|step.until_time},"
        " step.actor, step.task_time = t.create_time FROM {step} AS step JOIN {task} AS t ON t.id = step.task_id"
        " WHERE step.location = %(location)s AND step.task_id = %(task_id)s AND step.kind <> 'sent'"
    )
    # Store a step while the lease holds, or end an open wait; locks the task. Not in atomic mode: there the settle
    # finds a lost lease before anything is committed, and renewals, cancels and signals would wait to the end.
    store_step = template("{_stored_step} {lock} {_or_ended_wait}")
    store_step_atomic = template("{_stored_step} {_or_ended_wait}")
    _stored_step = part(
        "INSERT INTO {step} AS step (location, task_id, task_time, position, name, kind, result, actor, until_time)"
        " SELECT %(location)s, t.id, t.create_time, %(position)s, %(name)s, %(kind)s, %(result)s{_json}, %(actor)s,"
        " {maybe_later:CAST(%(seconds)s AS float8)|{now}} FROM {task} AS t WHERE {_own_lease}"
    )
    _or_ended_wait = part(
        "ON CONFLICT (location, task_id, position) DO UPDATE SET kind = excluded.kind, result = excluded.result,"
        " actor = excluded.actor, create_time = {now} WHERE step.kind = 'wait' RETURNING 1"
    )
    # How many signals were sent to a task whose lease holds, and the id of the first one of a name not received. One
    # statement: it sees both the count and the signal of each transaction, or neither.
    next_signal = template(
        "SELECT coalesce(t.signals, 0), (SELECT min(step.id) FROM {step} AS step WHERE step.location = %(location)s"
        " AND step.task_id = t.id AND step.task_time = t.create_time AND step.name = %(name)s AND step.kind = 'sent')"
        " FROM {task} AS t WHERE {_own_lease}"
    )
    # Take a signal, whose wait keeps its data from now on; returns the data, and who sent it.
    receive_signal = template("DELETE FROM {step} WHERE id = %(signal)s RETURNING {text:result}, actor")
    # Count one more signal of a task that has not ended or left, and lock it: its settle compares the count.
    count_signal = template(
        "UPDATE {task} AS t SET signals = coalesce(t.signals, 0) + 1 WHERE t.id = %(task_id)s"
        " AND t.status IN ('CREATED', 'PROCESSING') AND {HERE} RETURNING queue_name, group_key"
    )
    # Store a signal of a task that ``count_signal`` has locked. Its kind is the column's default.
    store_signal = template(
        "INSERT INTO {step} (location, task_id, task_time, name, result, actor)"
        " SELECT %(location)s, t.id, t.create_time, %(name)s, %(data)s{_json}, %(actor)s"
        " FROM {task} AS t WHERE t.id = %(task_id)s"
    )

    # Make a task due that waits for a name. Apart from ``count_signal``, so that it sees what that waited for. Behind
    # the head of its group the task gets its turn. Its time to live begins again, as with "run now".
    wake_signalled = template(
        "UPDATE {task} AS t SET next_process_time = {now}, last_update_time = {now},"
        " parked_by = CASE WHEN {_apart} THEN NULL ELSE '{GROUP}' END,"
        " ready_time = CASE WHEN {_apart} THEN {now} END,"
        " expire_time = CASE WHEN t.expire_time IS NOT NULL THEN {later:{_waited}|t.expire_time} END"
        " WHERE t.id = %(task_id)s AND t.status IN ({_sources:signal})"
        " AND (t.parked_by IS NULL OR t.parked_by IN ('{SIGNAL}', '{GROUP}'))"
        " AND EXISTS (SELECT 1 FROM {step} AS step WHERE step.location = %(location)s"
        " AND step.task_id = t.id AND step.name = %(name)s AND step.kind = 'wait') RETURNING id"
    )
    _apart = part("t.group_key IS NULL OR t.ready_time IS NOT NULL")
    _was_due = part("{least}(t.next_process_time, coalesce(t.ready_time, t.next_process_time))")
    _waited = part("{seconds_between:{_was_due}|{now}}")
