"""Statements of retention. Each one takes a bounded number of rows and skips locked ones."""

from functools import cached_property

from django_dbtaskqueue.core.columns import HISTORY_COLUMNS
from django_dbtaskqueue.core.sql.dialects import Group, part, template


class RetentionStatements(Group):
    """What housekeeping does, one batch at a time."""

    # The next finished tasks of a queue and status behind an id: (id, seconds since it ended, since it was made). Ids
    # grow with time, so the caller can stop at the first task that was created too late.
    finished = template(
        "SELECT id, {seconds_between:coalesce(finish_time, last_update_time)|{now}},"
        " {seconds_between:create_time|{now}} FROM {task} WHERE queue_name = %(queue_name)s"
        " AND final_status = %(status)s AND id > %(after)s ORDER BY id LIMIT %(limit)s"
    )
    # Tasks of a queue that wait, ready or parked, and are past their time to live.
    expired = template(
        "{_expired} AND ready_time IS NOT NULL UNION ALL {_expired} AND parked_by IS NOT NULL LIMIT %(limit)s"
    )
    _expired = part(
        "SELECT id FROM {task} WHERE queue_name = %(queue_name)s AND status = 'CREATED' AND expire_time <= {now}"
    )
    # Lock those of the given tasks that are still finished as they were and that are told to have ended. Returns (id,
    # watched); not NULL: a task may wait for another end of it (``needed``).
    lock_finished = template(
        "SELECT t.id, t.watched FROM {task} AS t WHERE t.id IN ({each:ids}) AND t.final_status = %(status)s"
        " AND t.status IN ({_sources:housekeep}) AND (t.watched IS NULL OR NOT t.watched) ORDER BY t.id {skipping}"
    )
    # Lock the failed tasks that a task may wait for; returns their ids.
    lock_reported = template(
        "SELECT t.id FROM {task} AS t WHERE NOT t.watched"
        " AND t.final_status IN ({_sources:housekeep}) ORDER BY t.id {skipping}"
    )
    # Those of the given tasks that a task waits for. The tasks are locked by a statement before: a statement sees no
    # row of a dependency that came after its start.
    needed = template(
        "SELECT DISTINCT d.parent_id FROM {dependency} AS d JOIN {hold} AS h"
        " ON h.location = d.child_location AND h.task_id = d.child_id"
        " WHERE d.parent_location = %(location)s AND d.parent_id IN ({each:ids}) AND d.outcome IS NULL"
    )
    unwatch = template("UPDATE {task} SET watched = NULL WHERE id IN ({each:ids})")

    # Copy locked tasks into the history.
    keep = template(
        f"INSERT INTO {{history}} (location, task_id, {', '.join(column.db for column in HISTORY_COLUMNS)})"
        f" SELECT %(location)s, t.id, {', '.join(f't.{column.db}' for column in HISTORY_COLUMNS)}"
        " FROM {task} AS t WHERE t.id IN ({each:ids})"
    )
    count_chosen = template("{_counting:{task} AS t WHERE t.id IN ({_ids})|t.queue_name}")
    note_chosen = template("{_noting:{task} AS t WHERE t.id IN ({_ids})}")
    delete_chosen = template("DELETE FROM {task} WHERE id IN ({each:ids}) RETURNING queue_name, batch, status")
    # Some rows of a table of the history that moved there long ago; locks them.
    old_history = template(
        "SELECT id FROM {{table}} AS t WHERE moved_time <= {later:%(age)s} ORDER BY id LIMIT %(limit)s {skipping}"
    )
    _ids = part("{each:ids}")

    @cached_property
    def delete_history(self) -> tuple[str, str]:
        chosen = f"WHERE id IN ({self._ids})"
        return self._counting(f"{{table}} {chosen}"), f"DELETE FROM {{table}} {chosen} RETURNING id"

    # Count all rows of a month of the history, which is about to be dropped.
    count_all = template("{_counting:{{table}}|queue_name}")


CHANGES_TABLE, AUDIT_TABLE = '"dbtaskqueue_taskchange"', '"dbtaskqueue_auditentry"'


class EraseStatements(Group):
    """What the job ``erase`` finds, counts and removes: the tasks of some references, and all rows about them.

    ``references``, ``queues``: array parameters; ``every`` is true for all queues. ``rows``: tasks by location and id.
    """

    _wanted = part("{one_of:reference_number|references} AND (%(every)s OR {one_of:queue_name|queues})")
    # The tasks of these references, as (reference, id, status, watched); locks them as housekeeping does.
    tasks = template(
        "SELECT t.reference_number, t.id, t.status, t.watched FROM {task} AS t WHERE {_wanted} ORDER BY t.id {lock}"
    )
    # The tasks of these references in the history, as (reference, location, task).
    history = template("SELECT reference_number, location, task_id FROM {history} WHERE {_wanted}")
    # Which of these references stay taken, once for each queue.
    used_references = template("SELECT reference_number FROM {ledger} WHERE {_wanted}")
    count_history = template("{_counting:{history} WHERE {_wanted}|queue_name}")
    # Count tasks of one queue that leave the lake.
    count_archived = template(
        "INSERT INTO {counts} (kind, queue_name, count) VALUES ('deletion', %(queue)s, %(count)s)"
    )
    delete_history = template("DELETE FROM {history} WHERE {_wanted}")
    delete_used_references = template("DELETE FROM {ledger} WHERE {_wanted}")
    # The references in a staging table.
    staged = template("SELECT reference_number FROM {{table}} WHERE {_wanted}")
    delete_staged = template("DELETE FROM {{table}} WHERE {_wanted} RETURNING reference_number")

    @property
    def about(self) -> dict[str, tuple[str, str]]:
        """By place: the count of the rows about the tasks ``rows``, and the statement that removes them.

        Changes by operators stay, without the values that they hold of these tasks.
        """
        joined = f"JOIN {self.dialect.rows('location text, task_id bigint')} ON t.location = u.location"
        found = {}
        for place, table in {"attempts": self.tables.attempt, "steps and signals": self.tables.step}.items():
            rows = f"FROM {table} AS t {joined} AND t.task_id = u.task_id"
            found[place] = f"SELECT count(*) {rows}", f"DELETE FROM {table} WHERE id IN (SELECT t.id {rows})"
        rows = (
            f"FROM {CHANGES_TABLE} AS t {joined} AND u.task_id BETWEEN t.first_task_id AND t.last_task_id"
            f" AND {self._names_task} WHERE t.before IS NOT NULL OR t.difference IS NOT NULL"
        )
        clear = f"UPDATE {CHANGES_TABLE} SET before = NULL, difference = NULL WHERE id IN (SELECT t.id {rows})"
        return {**found, "changes by operators": (f"SELECT count(DISTINCT t.id) {rows}", clear)}

    _names_task = part(
        "t.task_ids @> to_jsonb(u.task_id)", "u.task_id IN (SELECT named.value FROM json_each(t.task_ids) AS named)"
    )
    # The lakes that hold tasks of this database.
    lakes = template("SELECT DISTINCT lake FROM \"dbtaskqueue_archivebatch\" WHERE state = 'closed' ORDER BY lake")
    # Begin the record of an erasure; returns its id.
    audit = template(
        f"INSERT INTO {AUDIT_TABLE} (actor, source, verb, reason, details)"
        " VALUES (%(actor)s, 'command', 'erase', %(reason)s, %(details)s) RETURNING id"
    )
    audited = template(f"UPDATE {AUDIT_TABLE} SET changed = %(changed)s, details = %(details)s WHERE id = %(id)s")
