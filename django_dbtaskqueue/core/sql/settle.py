"""Statements that write outcomes. Each one is fenced by id, ``total_attempt`` and status.

Each answers with the ids of the rows it wrote, and whether something waits for the end that it wrote (``watched``).
"""

from django_dbtaskqueue.core.columns import HISTORY_COLUMNS
from django_dbtaskqueue.core.sql.dialects import FENCED, Group, part, template

# The columns of rows handed to statements. None is a column of a task: such a name would be ambiguous beside one.
RESULT_TYPE = "result_json text"
FAILURE_TYPES = "error_type text, message text, traceback text, failure_key text"  # the key is the fingerprint
OUTCOME_TYPES = (
    "new_status text,"
    " delay float8,"  # seconds; NULL keeps the place in the ready order
    " attempts_added int,"  # NULL sets the attempts to 0
    " reenqueues_added int,"
    " deaths int,"  # 1 if the task ended its process, so that it runs apart from the others again
    f" result_text text, {RESULT_TYPE}, park_reason text, failure_key text,"
    " signals_seen int"  # of a task that waits for one; if there are more, it is due at once
)
# The columns of a row that leaves as COMPLETED, where they are not the task's.
LEAVING = {
    "status": "'COMPLETED'", "process_result": "NULL", "result": "{_result}", "finish_time": "{now}",
    "last_update_time": "{now}",
}  # fmt: skip


class SettleStatements(Group):
    """Every way to write an outcome."""

    # COMPLETED without a result, by arrays: most batches are such.
    complete_plain = template("{_completed} NULL FROM {_plain} {_still_held}")
    complete = template("{_completed} {_result} FROM {_with_results} {_still_held}")
    _completed = part(
        "UPDATE {task} AS t SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL,"
        " finish_time = {now}, last_update_time = {now}, process_result = NULL, result ="
    )
    _still_held = part("WHERE {FENCE} AND t.status IN ({_sources:complete}) RETURNING id, watched")
    _plain = property(lambda self: self._ended(FENCED))
    _with_results = property(lambda self: self._ended(f"{FENCED}, {RESULT_TYPE}"))

    def _ended(self, columns: str) -> str:
        if self.dialect.vendor != "postgresql" or self.dialect.single:
            return self.dialect.rows(columns)
        typed = [column.split() for column in columns.split(", ")]
        # Inside a SELECT the planner cannot count the array: it expects ten rows.
        arrays = ", ".join(f"(SELECT %({name})s::{kind}[])" for name, kind in typed)
        return self.dialect.expect_few(f"unnest({arrays}) AS u({', '.join(name for name, _ in typed)})")

    _result = part("u.result_json::jsonb", "u.result_json")
    # Every other way out of PROCESSING that keeps the row. A NULL delay keeps the ready time (release).
    #
    # A task that waits for a signal is due at once if a signal came meanwhile: its sender raised ``signals``.
    #
    # A delay moves the end of the time to live with the due time. A task that ended keeps its due time, from which the
    # verb that brings it back counts (``flow.move``).
    write = template(
        "UPDATE {task} AS t SET status = u.new_status, last_update_time = {now}, parked_by = {_parked_by},"
        " ready_time = CASE WHEN u.new_status <> 'CREATED' OR {_parked_by} IS NOT NULL THEN NULL"
        " WHEN u.delay IS NULL THEN t.ready_time ELSE {_retry_time} END,"
        " next_process_time = CASE WHEN u.new_status = 'CREATED' THEN {_retry_time}"
        " WHEN u.new_status IN ('ERROR', 'POISON') THEN t.ready_time ELSE t.next_process_time END,"
        " expire_time = CASE WHEN t.expire_time IS NULL OR u.delay IS NULL THEN t.expire_time"
        " ELSE {later:{_moved}|t.expire_time} END,"
        " attempt = CASE WHEN u.attempts_added IS NULL THEN 0 WHEN u.new_status = 'CREATED' THEN {_left}"
        " ELSE t.attempt + u.attempts_added END,"
        " reenqueue_attempt = t.reenqueue_attempt + u.reenqueues_added,"
        " process_result = CASE WHEN u.new_status = 'CREATED' AND u.delay IS NULL THEN t.process_result"
        " ELSE u.result_text END,"
        " result = CASE WHEN u.new_status = 'CREATED' AND u.delay IS NULL THEN t.result ELSE {_result} END,"
        " poller_instance = CASE WHEN u.new_status = 'CREATED' THEN NULL ELSE t.poller_instance END,"
        " finish_time = CASE WHEN u.new_status = 'CREATED' THEN NULL ELSE {now} END,"
        " lost_leases = CASE WHEN u.attempts_added = -1 AND u.delay IS NULL THEN t.lost_leases ELSE u.deaths END,"
        " final_status = nullif(u.new_status, 'CREATED'), fingerprint = coalesce(u.failure_key, t.fingerprint)"
        " FROM {_outcomes} WHERE {FENCE} AND t.status IN ({_sources:fail})"
        " RETURNING id, watched AND final_status IS NOT NULL"
    )
    _called = part("u.signals_seen <> coalesce(t.signals, 0)")
    _retry_time = part("{later:CASE WHEN {_called} THEN 0 ELSE coalesce(u.delay, 0) END}")
    _moved = part("{seconds_between:t.ready_time|{_retry_time}}")
    _parked_by = part("CASE WHEN {_called} THEN NULL ELSE u.park_reason END")
    # Without an attempt left no poller could take the task.
    _left = part("{least}(t.attempt + u.attempts_added, t.max_attempts - 1)")

    _outcomes = part(f"{{rows:{{FENCED}}, {OUTCOME_TYPES}}}")
    # The failed attempts of rows about to be written, while their leases hold; locks them.
    attempts = template(
        "INSERT INTO {attempt} (location, task_id, queue_name, attempt, total_attempt,"
        " poller_instance, start_time, error_type, message, traceback, fingerprint)"
        " SELECT %(location)s, t.id, t.queue_name, t.attempt, t.total_attempt, t.poller_instance, t.start_time,"
        f" u.error_type, u.message, u.traceback, u.failure_key FROM {{fenced:fail|{FAILURE_TYPES}}} {{lock}}"
    )
    # Copy rows about to leave as COMPLETED into the history; locks them.
    to_history = template(
        f"INSERT INTO {{history}} (location, task_id, {', '.join(column.db for column in HISTORY_COLUMNS)})"
        f" SELECT %(location)s, t.id, {', '.join(LEAVING.get(one.db, f't.{one.db}') for one in HISTORY_COLUMNS)}"
        f" FROM {{fenced:complete|{RESULT_TYPE}}} {{lock}}"
    )
    # Which of the given leases were settled by moving their tasks into the history.
    moved = template(
        "SELECT h.task_id FROM {history} AS h JOIN {rows:{FENCED}}"
        " ON h.task_id = u.task_id AND h.total_attempt = u.token WHERE h.location = %(location)s"
    )
    # Count the rows that their holders are about to delete; locks them.
    count_deleted = template("{_counting:(SELECT t.queue_name AS q FROM {_deleted} {lock}) AS x|x.q}")
    # ``count_deleted`` and ``delete_settled`` in one statement, which finds each row once. For PostgreSQL.
    delete_counted = template(
        "WITH gone AS (DELETE FROM {task} WHERE {among:id|SELECT t.id FROM {_deleted} {lock}}"
        " RETURNING id, watched, queue_name AS q), counted AS ({_counting:gone|q}) SELECT id, watched FROM gone"
    )
    # Note the batches of tasks that have expired and are about to be deleted; locks them.
    note_expired = template(
        "{_noting:(SELECT t.batch, t.queue_name, 'DELETED' AS status FROM {_deleted} {lock}) AS x WHERE true}"
    )
    # Delete leased rows; returns those really deleted.
    delete_settled = template("DELETE FROM {task} WHERE {among:id|SELECT t.id FROM {_deleted}} RETURNING id, watched")
    _deleted = part("{fenced:complete_delete}")
    # What became of the given leases, when the reply to a commit was lost: (id, status) of the same attempt. Without
    # those that ended without their holder: then the row has no start, or an end without a poller or of a dead one.
    outcome_of = template(
        "SELECT t.id, t.status FROM {task} AS t JOIN {rows:{FENCED}} ON {FENCE} WHERE t.start_time IS NOT NULL"
        " AND (t.status NOT IN ('ERROR', 'POISON') OR t.poller_instance IS NOT NULL AND t.lost_leases <= 0)"
    )

    # One task, from its table or else from the history, with its failed attempts as a JSON array.
    task_with_attempts = part(
        "{_task_here} UNION ALL SELECT {_texts}, {_attempts} FROM {history}"
        " WHERE location = %(location)s AND task_id = %(task_id)s LIMIT 1"
    )
    _task_here = template("SELECT {_texts}, {_attempts} FROM {task} WHERE id = %(task_id)s")
    _texts = part(", ".join(f"{{text:{one.db}}}" if one.type == "jsonb" else one.db for one in HISTORY_COLUMNS))
    _attempts = part(
        "(SELECT jsonb_agg(jsonb_build_array({_attempt}) ORDER BY a.total_attempt)::text FROM {_failed})",
        "(SELECT json_group_array(json_array({_attempt}))"
        " FROM (SELECT * FROM {_failed} ORDER BY a.total_attempt) AS a)",
    )
    _attempt = "a.error_type, a.traceback, a.poller_instance, a.start_time, a.total_attempt"
    _failed = part("{attempt} AS a WHERE a.location = %(location)s AND a.task_id = %(task_id)s")

    # Write the metadata of a Django task into its payload; with a token, only while that lease holds.
    save_metadata = template(
        "UPDATE {task} SET payload = {_with_metadata} WHERE id = %(task_id)s"
        " AND (CAST(%(token)s AS bigint) IS NULL OR total_attempt = %(token)s AND status = 'PROCESSING')"
        " RETURNING id"
    )
    _with_metadata = part(
        "jsonb_set(payload, '{{metadata}}', %(metadata)s::jsonb)", "json_set(payload, '$.metadata', json(%(metadata)s))"
    )
