"""Statements that insert tasks."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from django_dbtaskqueue.core.columns import ENQUEUED, TIMING
from django_dbtaskqueue.core.sql.dialects import GROUP, HERE, PARENTS, Group, part, renamed, template
from django_dbtaskqueue.core.states import SIGNAL, sql_sources

ENQUEUED_TYPES = {column.db: column.type for column in ENQUEUED}  # what enqueue writes, with PostgreSQL types
RETURNED = (
    "id", "create_time", "next_process_time", "ready_time", "attempt", "reenqueue_attempt", "total_attempt",
    "last_update_time", "reference_number",
)  # fmt: skip
REPLACE = ("replace", "replace_running")  # what ``on_duplicate`` may be where a task that holds the reference changes
RARE_COLUMNS = ("payload_type", "context", "group_key", "tag", "lease_seconds")  # most tasks have none of them
VARYING_COLUMNS = ("reference_number", "payload")
# The reference names the row; a task stays in its group (to move it, cancel it first); the budget has its own rule.
NOT_REPLACED = ("reference_number", "group_key", "max_attempts")
READY_COLUMNS = "next_process_time, ready_time, parked_by, expire_time"
OwnColumns = tuple[tuple[str, str], ...]  # of a project's own table: quoted name, PostgreSQL type


class EnqueueStatements(Group):
    """Inserts, and what happens when a reference is taken."""

    @renamed
    def insert(self, *, timed: bool, referenced: bool, bare: bool, own: OwnColumns = ()) -> str:
        """Insert one task that is ready; answers the first columns of ``RETURNED``, or nothing: the reference is taken.

        ``bare``: it has none of the ``RARE_COLUMNS``, which need no parameters. A task without a reference is never a
        duplicate, so PostgreSQL need not look first. The values of ``own`` columns are the parameters ``own_0``, ….
        """
        due = self._due("%(delay)s", "%(run_at)s") if timed else self.dialect.now
        expire = self.dialect.maybe_later("%(ttl)s", start=due) if timed else "NULL"
        nulls = RARE_COLUMNS if bare else ()
        values = ", ".join("NULL" if key in nulls else f"%({key})s" for key in [*ENQUEUED_TYPES, *_keys(own)])
        return (
            f"INSERT INTO {self.tables.task} AS t"
            f" (queue_name, {', '.join([*ENQUEUED_TYPES, *dict(own)])}, {READY_COLUMNS})"
            f" VALUES (%(queue_name)s, {values}, {due}, {due}, NULL, {expire})"
            f" {self._conflict('ignore') if referenced else ''}"
            f" RETURNING {', '.join(RETURNED[: 3 if timed else 2])}"
        )

    @renamed
    def insert_uniform(self, *, referenced: bool, ordered: bool, ids: bool) -> str:
        """Insert tasks that differ in ``references`` and ``payloads`` alone, two JSON arrays, where these are free.

        For PostgreSQL. ``ordered``: the references ascend by code point already. With ``ids`` it returns what
        ``insert_many`` does, else nothing: how many were written is in the answer of any INSERT.
        """
        same = ", ".join(f"%({name})s::{kind}" for name, kind in ENQUEUED_TYPES.items() if name not in VARYING_COLUMNS)
        other = ", ".join(name for name in ENQUEUED_TYPES if name not in VARYING_COLUMNS)
        arrays = "jsonb_array_elements_text(%(references)s::jsonb), jsonb_array_elements(%(payloads)s::jsonb)"
        key, source = "", f"ROWS FROM ({arrays}) AS u(r, p)"
        if referenced and not ordered:
            key, source = self._ordered(source, "u.r")
        now = self.dialect.now
        insert = (
            f"INSERT INTO {self.tables.task} AS t ({key}queue_name, {', '.join(VARYING_COLUMNS)}, {other},"
            f" {READY_COLUMNS})"
            f" SELECT {key and 'u.id, '}%(queue_name)s, u.r, nullif(u.p, 'null'), {same}, {now}, {now}, NULL, NULL"
            f" FROM {source} {self._conflict('ignore') if referenced else ''}"
        )
        return self._counted(insert) if ids else insert

    @renamed
    def insert_many(
        self,
        on_duplicate: str,
        *,
        timed: bool,
        grouped: bool,
        keep_due: bool = False,
        bounded: bool = False,
        waits: bool = False,
        own: OwnColumns = (),
        whole: bool = False,
    ) -> str:
        """Insert the JSON array ``rows``, as ``WRITE`` writes them; returns what ``_counted`` says.

        ``bounded``: a replaced task is due at most ``max_wait`` seconds after it was created. ``waits``: the tasks wait
        for others. The values of ``own`` columns are the keys ``own_0``, ….
        """
        columns = {**ENQUEUED_TYPES, **TIMING, "run_at": "text"} if timed else {**ENQUEUED_TYPES}
        columns |= {key: kind for key, (_, kind) in zip(_keys(own), own, strict=True)}
        due = self._due("u.delay", "u.run_at") if timed else self.dialect.now
        expire = self.dialect.maybe_later("u.ttl", start=due) if timed else "NULL"
        picked = ", ".join(f"u.{name}" for name in [*ENQUEUED_TYPES, *_keys(own)])
        names = ", ".join([*ENQUEUED_TYPES, *dict(own)])
        ready, parked = ("NULL", f"'{PARENTS}'") if waits else (due, "NULL")
        enters, entering = "u.group_key IS NULL", ""
        if grouped and not waits:
            if not timed and self.dialect.vendor == "postgresql":
                enters, entering = "u.enters", f", {enters} OR {self._leads} AS enters"
            ready, parked = f"CASE WHEN {enters} THEN {due} END", f"CASE WHEN NOT {enters} THEN '{GROUP}' END"
        key, source = self._ordered(self.dialect.rows(", ".join(map(" ".join, columns.items()))), more=entering)
        return self._counted(
            f"INSERT INTO {self.tables.task} AS t ({key}queue_name, {names}, {READY_COLUMNS})"
            f" SELECT {key and 'u.id, '}%(queue_name)s, {picked}, {due}, {ready}, {parked}, {expire} FROM {source}"
            f" {self._conflict(on_duplicate, keep_due=keep_due, bounded=bounded, own=own)}",
            whole=whole,
        )

    # Whether its group has room for a task: with those before it here, it has fewer than ``number`` heads. Then it is a
    # head at once. Parked first and made ready by ``place_heads``, it would be written twice.
    _leads = part(
        "{_place} <= %(number)s::int AND {_place} + (SELECT count(*) FROM (SELECT 1 FROM {task} AS t"
        " WHERE t.queue_name = %(queue_name)s AND t.group_key = u.group_key AND {HEAD} LIMIT %(number)s::int) AS h)"
        " <= %(number)s::int"
    )
    _place = part("row_number() OVER (PARTITION BY u.group_key ORDER BY u.priority, u.id)")

    @renamed
    def copy_uniform(self, names: tuple[str, ...]) -> str:
        """Insert tasks due now by COPY; an error where a reference is taken. The times are the columns' defaults."""
        return f"COPY {self.tables.task} ({', '.join(names)}) FROM STDIN"

    # Whether tasks hold some of the ``references``.
    some_taken = template(
        "SELECT EXISTS (SELECT 1 FROM {task} WHERE queue_name = %(queue_name)s"
        " AND {one_of:reference_number|references})"
    )

    # Take ``number`` ids for a COPY whose rows are not in the order of the items, as text.
    reserve_ids = part("SELECT string_agg(nextval({_sequence})::text, ',') FROM generate_series(1, %(number)s)")
    _sequence = part("(SELECT pg_get_serial_sequence('{task}', 'id'))::regclass")

    def _counted(self, insert: str, *, whole: bool = False) -> str:
        """Return a row for each task: ``RETURNED`` if ``whole``, else the id; whether it is new; if steps may be left.

        PostgreSQL counts unless ``whole``, because so many rows would cost as much as the rest of the answer: how many
        were written, how many of these are new, the ids of all if ``ids``, and of those that have run.
        """
        returned = ", ".join(RETURNED) if whole else "id"
        returned += ", last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run"
        returning = f"{insert} RETURNING {returned}"
        if whole or self.dialect.vendor != "postgresql":
            return returning
        return (
            f"WITH w AS ({returning}) SELECT count(*), count(*) FILTER (WHERE is_new),"
            " array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER (WHERE has_run) FROM w"
        )

    def _ordered(self, rows: str, reference: str = "u.reference_number", *, more: str = "") -> tuple[str, str]:
        """Return the rows' source so that references are locked in one order everywhere, and ids follow the items.

        ``more``: further columns, which may use the ids.

        Two producers of the same references in another order would otherwise wait for each other: a deadlock.
        """
        if self.dialect.vendor != "postgresql":
            return "", f"{rows} WHERE true"
        numbered = f"(SELECT nextval({self._sequence}) AS id, u.* FROM {rows}) AS u"
        numbered = f"(SELECT u.*{more} FROM {numbered}) AS u" if more else numbered
        return "id, ", f'{numbered} ORDER BY {reference} COLLATE "C"'

    def _due(self, delay: str, run_at: str) -> str:
        base = f"{self.dialect.greatest}({self.dialect.now}, coalesce({self.dialect.time(run_at)}, {self.dialect.now}))"
        return self.dialect.later(f"coalesce({delay}, 0)", start=base)

    def _conflict(
        self, on_duplicate: str, *, keep_due: bool = False, bounded: bool = False, own: OwnColumns = ()
    ) -> str:
        if on_duplicate not in REPLACE:
            return "ON CONFLICT (reference_number, queue_name) DO NOTHING"
        names = [name for name in ENQUEUED_TYPES if name not in NOT_REPLACED]
        changes = {name: f"excluded.{name}" for name in [*names, *dict(own)]}
        due, expire = "excluded.next_process_time", "excluded.expire_time"
        if bounded:
            span = self.dialect.seconds_between(due, expire)
            due = f"{self.dialect.least}({due}, {self.dialect.later('%(max_wait)s', start='t.create_time')})"
            expire = self.dialect.maybe_later(span, start=due)
        if not keep_due:
            changes |= {"next_process_time": due, "expire_time": expire}
        attempt, running = "t.attempt", "t.status = 'PROCESSING'"
        if on_duplicate == "replace_running":
            attempt = f"CASE WHEN {running} THEN 0 ELSE t.attempt END"
            reset = {"poller_instance": "NULL", "start_time": "NULL", "process_result": "NULL", "lost_leases": "0"}
            changes |= {name: f"CASE WHEN {running} THEN {value} ELSE t.{name} END" for name, value in reset.items()}
            changes |= {"status": "'CREATED'", "attempt": attempt}
            if keep_due:  # while a task is held, next_process_time is the end of the lease
                changes["next_process_time"] = f"CASE WHEN {running} THEN t.ready_time ELSE t.next_process_time END"
        # A smaller budget leaves at least one attempt: without one no poller could take the task.
        changes["max_attempts"] = f"{self.dialect.greatest}(excluded.max_attempts, {attempt} + 1)"
        # A parked task stays parked, unless it waits for a signal: its steps go with the old values.
        kept = "t.ready_time" if keep_due else f"CASE WHEN t.parked_by IS NULL THEN {due} END"
        changes["ready_time"] = f"CASE WHEN t.parked_by = '{SIGNAL}' THEN {due} ELSE {kept} END"
        changes["parked_by"] = f"nullif(t.parked_by, '{SIGNAL}')"
        # Later than create_time by construction, which is how a replaced row is told from a new one.
        later = self.dialect.later("0.001", start="t.create_time")
        changes["last_update_time"] = f"{self.dialect.greatest}({self.dialect.now}, {later})"
        return (
            f"ON CONFLICT (reference_number, queue_name) DO UPDATE SET"
            f" {', '.join(f'{name} = {value}' for name, value in changes.items())}"
            f" WHERE {self._status if bounded else 't.status'} IN ({sql_sources(on_duplicate)})"
            " AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')"
            f" AND {HERE}"
        )

    # Make the row of a queue, if it has none. Only its name is written: a producer may write no more.
    make_queue = template("INSERT INTO {queue} (name) VALUES (%(queue_name)s) ON CONFLICT (name) DO NOTHING")
    # How many tasks of a queue are CREATED or PROCESSING, counted no further than ``limit``.
    live = template("{_live:}")
    # ``live`` without the tasks that wait and are past their time to live. It must read the rows.
    live_unexpired = template("{_live: AND (expire_time IS NULL OR expire_time > {now} OR status = 'PROCESSING')}")

    def _live(self, condition: str) -> str:
        live = f"SELECT 1 FROM {self.tables.task} WHERE queue_name = %(queue_name)s AND"
        return (
            f"SELECT count(*) FROM ({live} ready_time IS NOT NULL{condition}"
            f" UNION ALL {live} parked_by IS NOT NULL{condition} LIMIT %(limit)s) AS x"
        )

    # The rows ``reference_number`` in one order everywhere: no deadlock.
    _references = part("{rows:reference_number text} WHERE true ORDER BY u.reference_number{_byte_wise}")
    # Write references into the ledger; returns those that were free.
    claim_references = template(
        "INSERT INTO {ledger} (queue_name, reference_number) SELECT %(queue_name)s, u.reference_number"
        " FROM {_references} ON CONFLICT (queue_name, reference_number) DO NOTHING RETURNING reference_number"
    )
    # Begin a period for references of a rule; returns those whose last period of ``period`` seconds is over.
    claim_periods = template(
        "INSERT INTO {ledger} AS l (queue_name, reference_number, expire_time) SELECT %(queue_name)s,"
        " u.reference_number, {later:%(period)s} FROM {_references}"
        " ON CONFLICT (queue_name, reference_number) DO UPDATE SET expire_time = excluded.expire_time,"
        " create_time = {now} WHERE l.create_time <= {later:%(ago)s} RETURNING reference_number"
    )
    # Of the ``references`` those whose period began less than ``-ago`` seconds ago.
    in_period = template(
        "SELECT reference_number FROM {ledger} WHERE queue_name = %(queue_name)s"
        " AND {one_of:reference_number|references} AND create_time > {later:%(ago)s}"
    )

    # Rename the ``references`` of tasks that a rule does not hold any more; returns one row for each task. In one order
    # everywhere: no deadlock. The new name is unique, because the id of the task is its end.
    free = template(
        "UPDATE {task} SET reference_number = reference_number || ':' || id WHERE {among:id|{_not_held}} RETURNING id"
    )
    _not_held = part(
        "SELECT t.id FROM {task} AS t WHERE t.queue_name = %(queue_name)s"
        " AND {one_of:t.reference_number|references} AND NOT {one_of:{_status}|keeping}"
        " AND t.create_time <= {later:%(ago)s} ORDER BY t.reference_number{_byte_wise} {lock}"
    )
    # The status that counts for a rule: a task that failed, was put back or took a step has started, others not.
    _status = part(
        "CASE WHEN t.status = 'CREATED' AND (t.attempt > 0 OR t.reenqueue_attempt > 0 OR EXISTS (SELECT 1"
        " FROM {step} AS step WHERE step.location = %(location)s AND step.task_id = t.id"
        " AND step.task_time = t.create_time AND step.kind <> 'sent')) THEN 'PROCESSING' ELSE t.status END"
    )
    # The tasks that hold some ``references``.
    find = template("SELECT id, reference_number, status, group_key {_holders}")
    # ``find``, and no poller takes the tasks until the transaction of the producer ends. In one order, too.
    lock_found = template('{_held} ORDER BY reference_number COLLATE "C" FOR SHARE OF t', "{_held}")
    _held = part("SELECT id, reference_number, {_status}, group_key {_holders}")
    _holders = part("FROM {task} AS t WHERE queue_name = %(queue_name)s AND {one_of:reference_number|references}")


def _keys(own: OwnColumns) -> list[str]:
    return [f"own_{number}" for number in range(len(own))]


def _writer(types: Mapping[str, str]) -> Callable[[Mapping[str, Any], Callable[[datetime], str]], str]:
    """Return the function that writes one row of ``rows``, compiled: a loop over the columns takes twice as long."""
    parts = ",".join(f'"{name}":{{{_VALUES.get(name, _VALUES[kind]).format(name)}}}' for name, kind in types.items())
    found: Callable[[Mapping[str, Any], Callable[[datetime], str]], str]
    found = eval(f"lambda row, time: f'''{{{{{parts}}}}}'''", {"known": _known, "text": _text})  # noqa: S307 -- made of our own columns
    return found


_text = json.JSONEncoder(ensure_ascii=False).encode
_known = lru_cache(maxsize=1024)(_text)  # the same values come again and again
_VALUES = {  # by column or type; whole numbers are not cached, because 1 and 1.0 are one key to a cache
    "reference_number": "text(row['{0}'])",
    "jsonb": "row['{0}'] or 'null'",
    "int": "row['{0}']",
    "smallint": "row['{0}']",
    "text": "known(row['{0}'])",
    "float8": "known(row['{0}'])",
    "timestamptz": "known(row['{0}'] and time(row['{0}']))",
}
WRITE, WRITE_TIMED = _writer(ENQUEUED_TYPES), _writer({**ENQUEUED_TYPES, **TIMING})
