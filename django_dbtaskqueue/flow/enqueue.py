"""Enqueue: a task is a row in the caller's own transaction.

It commits or rolls back with the caller's business data, savepoints included; the pollers are woken after the commit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any, cast

from django.db import connections
from django.db.models import Model, signals as model_signals
from django.db.models.base import ModelState

from django_dbtaskqueue.conf import overrides, settings as conf
from django_dbtaskqueue.core import codecs, context, json as json_payload
from django_dbtaskqueue.core.columns import BOUNDS, ENQUEUED, OWN_COLUMNS, InsertOptions, TaskOptions
from django_dbtaskqueue.core.context import enqueue_hook
from django_dbtaskqueue.core.exceptions import DuplicateTask, EnqueueError, PayloadError
from django_dbtaskqueue.core.sql.enqueue import RARE_COLUMNS, REPLACE, RETURNED
from django_dbtaskqueue.core.unique import UniqueRule
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, alias_for, asynchronous, model_of
from django_dbtaskqueue.flow import placement, usage
from django_dbtaskqueue.flow.dependencies import members, related_of
from django_dbtaskqueue.flow.insert import MAX_ROUNDS, REFERENCE, Insert
from django_dbtaskqueue.flow.placement import LEFT_TABLE, Row, refused, route, stored_key
from django_dbtaskqueue.models import Task

NO_RULES = (None, None, None, None)  # of uniqueness, of other tasks, of the queue's capacity, of a group
RARE_VALUES, NO_RARE_VALUES = itemgetter(*RARE_COLUMNS), (None,) * len(RARE_COLUMNS)
PLAIN_COLUMNS = tuple(column for column in ENQUEUED if column.type != "jsonb")
PLAIN_NAMES = [column.name for column in PLAIN_COLUMNS]
PLAIN_VALUES = itemgetter(*(column.db for column in PLAIN_COLUMNS))
JSON_COLUMNS = tuple((column.name, column.db) for column in ENQUEUED if column.type == "jsonb")


def enqueue(
    queue: str,
    reference: str | None = None,
    payload: Any = None,
    *,
    delay: timedelta | None = None,
    run_at: datetime | None = None,
    priority: int | None = None,
    group: str | None = None,
    tag: str | None = None,
    ttl: timedelta | None = None,
    context: Mapping[str, Any] | None = None,
    unique: UniqueRule | str | None = None,
    on_duplicate: str = "error",
    keep_due: bool = False,
    lease: timedelta | None = None,
    columns: Mapping[str, object] | None = None,
    after: object = None,
    on_parent_failure: str = "hold",
    timeout: timedelta | None = None,
    using: str | None = None,
) -> Task:
    """Insert one task on the caller's connection; it exists exactly if the caller's transaction commits.

    ``reference`` is the caller's business key, unique in its queue; None is never a duplicate. When it is taken:
    ``on_duplicate="error"`` raises ``DuplicateTask``, ``"ignore"`` returns the task that holds it, ``"replace"``
    rewrites that task while it is CREATED (``keep_due=True`` leaves its due time and its expiry) and raises
    ``DuplicateTask`` when it is not. ``"replace_running"`` does so while it is PROCESSING, too: the run is cancelled,
    and the task starts again as the new one. The transaction stays usable in each case.

    ``unique``: a rule (``Unique``, ``Throttle``, ``Debounce``, or text) that derives the reference from the payload and
    says what a further call does; None: the queue's, which is not in force for a call with a reference. The task's
    ``enqueue_note`` says why none was inserted.

    Due at ``run_at`` plus ``delay``, never in the past. ``priority``: lower first; None is the queue's. ``ttl`` counts
    from the due time. ``group``: tasks of one group are processed one at a time, in order. ``tag``: only pollers
    started with it take the task. ``lease`` overrides the queue's. ``columns``: values of the columns that only the
    queue's own table has, by field name. ``timeout``: how long to wait for room in a queue with a capacity.

    ``after``: parents, which are tasks or ids of tasks of the same table, or a mapping of names to them. The task waits
    until all have completed. ``on_parent_failure``: when one ends in ERROR or POISON, the task waits on (``"hold"``,
    until the parent completes after all), ends in POISON (``"cancel"``), or counts the parent as ended (``"run"``).

    Raises ``UnknownQueue``, ``PayloadError``, ``DuplicateTask``, ``QueueFull`` before or instead of any write.
    """
    task = TaskOptions(
        reference=reference, payload=payload, delay=delay, run_at=run_at, priority=priority, group=group, tag=tag,
        ttl=ttl, context=context, lease=lease, columns=columns,
    )  # fmt: skip
    how = InsertOptions(unique, on_duplicate, keep_due, after, on_parent_failure, timeout, using)
    return enqueue_task(queue, task, how)


def enqueue_task(queue: str, task: TaskOptions, how: InsertOptions, stored: Mapping[str, object] | None = None) -> Task:
    """Insert one task. The ``stored`` columns are written as they are; no rule of uniqueness is in force for them."""
    if enqueue_hook.around is not None and enqueue_hook.applies():
        return enqueue_hook.surround(queue, partial(enqueue_task, queue, task, how, stored))
    queue = queue.value if isinstance(queue, Enum) else queue
    alias = alias_for(queue, how.using)
    settings = overrides.overridden_settings(queue, alias, connections[alias])
    row, rule, related = row_of(queue, task, settings), None, None
    if stored is not None:
        row |= stored
    elif how.unique is not None or settings.unique is not None:
        rule = placement.rule_of(how.unique, settings, row["reference_number"])
        if rule is not None:
            placement.apply_rule(rule, row)
    if how.on_duplicate not in ON_DUPLICATE:
        placement.check_choice("on_duplicate", how.on_duplicate, ON_DUPLICATE)
    if how.timeout is not None:
        placement.check_timeout(how.timeout)
    if how.after is not None and (how.on_duplicate if rule is None else rule.on_duplicate) in REPLACE:
        raise refused("on_duplicate", how.on_duplicate, "does not go with after=: a task keeps its parents.")
    if how.after is not None or how.on_parent_failure != "hold" or members.get() is not None:
        alias, related = related_of(how, settings, alias)
    insert: Callable[[str], Task] = partial(_insert_plain, queue, row, settings, how.on_duplicate)
    is_spent_once = settings.unique_over == placement.UNIQUE_OVER_HISTORY and row["reference_number"] is not None
    if (rule, related, settings.capacity, row["group_key"]) != NO_RULES or is_spent_once or how.on_duplicate in REPLACE:
        insert = partial(_insert, Insert(queue, settings, how, related, one=True), row, rule)
    if settings.shards and how.using is None and (how.after is None or row["reference_number"] is not None):
        shard = route(settings, row["reference_number"], task.payload)
        if how.after is None:
            return placement.with_fail_over(shard, settings.shards, insert)
        if shard != alias:  # a call without after= would not find the task, and insert another
            words = f"belongs in shard {shard!r}, and after= names tasks of {alias!r}. Take another, or name using=."
            raise refused("reference", row["reference_number"], words)
    return insert(alias)


def _insert_plain(queue: str, row: Row, settings: conf.QueueSettings, on_duplicate: str, alias: str) -> Task:
    """Insert a task by one statement: nothing but its reference can stand in its way."""
    session = Session(connections[alias], model_of(settings))
    timed = row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None
    own = placement.own_types(session, row[OWN_COLUMNS]) if row[OWN_COLUMNS] else ()
    bare, referenced = RARE_VALUES(row) == NO_RARE_VALUES, row["reference_number"] is not None
    sql = session.sql.insert(timed=timed, referenced=referenced, bare=bare, own=own)
    params = {**row, **(placement.own_parameters(session, row) if own else {}), "queue_name": queue}
    params["run_at"] = None if row["run_at"] is None else session.time_text(row["run_at"])
    del params[OWN_COLUMNS]
    for _ in range(MAX_ROUNDS):  # the task in the way may go between two statements
        if written := session.repeat(sql, params):
            usage.count_calls(session.connection, {(queue, "put"): written[0][:1]}, wake=notify.notify)
            return _task(session, queue, row, written[0])
        if (existing := _existing(session, queue, row, on_duplicate)) is not None:
            return existing
    raise DuplicateTask(queue, row["reference_number"])


def _insert(insert: Insert, row: Row, rule: UniqueRule | None, alias: str) -> Task:
    """Insert a task in the way of many, under all that is asked for."""
    session, queue = Session(connections[alias], model_of(insert.settings)), insert.queue
    on_duplicate = insert.how.on_duplicate if rule is None else rule.on_duplicate
    for _ in range(MAX_ROUNDS):  # as above
        written = insert.by_reference(session, [row]) if rule is None else insert.by_rule(session, [row], rule)
        if written.rows:
            task = _task(session, queue, row, written.rows[0], is_parked=insert.waits or row["group_key"] is not None)
            if not written.new:
                why = "" if rule is None else f" The rule allows {rule.words}."
                task.enqueue_note = f"No task was inserted: task {task.pk} has the new values.{why}"
            return task
        if (existing := _existing(session, queue, row, on_duplicate, rule, spent=written.spent)) is not None:
            return existing
    raise DuplicateTask(queue, row["reference_number"])


def _existing(
    session: Session, queue: str, row: Row, on_duplicate: str, rule: UniqueRule | None = None, *, spent: bool = False
) -> Task | None:
    """Return the task with the reference, or raise ``DuplicateTask``; None if it has gone and was not ``spent``."""
    reference, words = row["reference_number"], "" if rule is None else rule.words
    found = session.run(session.sql.find, {"queue_name": queue, "references": session.sql.dialect.array([reference])})
    if not found and not spent:
        return None
    task_id, _, status, group = found[0] if found else (None, reference, LEFT_TABLE, row["group_key"])
    if on_duplicate != "ignore":
        moves = on_duplicate in REPLACE and group != row["group_key"]
        raise DuplicateTask(queue, reference, task_id=task_id, status=status, in_other_group=moves, rule=words)
    task = session.model(queue=queue, reference=reference)  # all that is known of one that has left the table
    there = "its task has left the table"
    if task_id is not None:
        task = session.model._default_manager.using(session.connection.alias).get(pk=task_id)
        there = f"there is task {task_id} ({status})"
        if rule is not None:
            usage.count_calls(session.connection, {(queue, "ignored"): [task_id]})
    taken = f"The rule allows {words}." if words else f"The reference {reference!r} is taken."
    task.enqueue_note = f"No task was inserted: {there}. {taken}"
    return cast(Task, task)


def _task(session: Session, queue: str, row: Row, written: tuple[Any, ...], *, is_parked: bool = False) -> Task:
    """Return the row just written as a model instance; columns not in hand are loaded when they are read."""
    values: Row = {"queue": queue, "status": "CREATED", "attempt": 0, "reenqueue_attempt": 0, "total_attempt": 0}
    values.update(zip(PLAIN_NAMES, PLAIN_VALUES(row), strict=True))
    values.update(zip(RETURNED[:REFERENCE], written, strict=False))
    if not session.postgresql:
        # A replaced task may be parked: it has no ready time.
        values |= {n: session.time(value) for n, value in values.items() if n.endswith("_time") and value is not None}
    due = values.setdefault("next_process_time", values["create_time"])
    if is_parked:
        values.pop("ready_time", None)  # whether it is ready is decided next
    else:
        values.setdefault("ready_time", due)
    for name, column in JSON_COLUMNS:
        values[name] = None if (text := row[column]) is None else json_payload.loads(text)
    if row[OWN_COLUMNS]:
        fields = placement.own_fields(session.model)
        values |= {fields[name].attname: stored_key(fields[name], value) for name, value in row[OWN_COLUMNS].items()}
    return _instance(session, values)


def _instance(session: Session, values: Row) -> Task:
    """Make what ``from_db`` makes, as unpickling does: without a walk over all fields, which no listener asks for."""
    model, alias = session.model, session.connection.alias
    if model_signals.pre_init.receivers or model_signals.post_init.receivers or model.__init__ is not Model.__init__:
        names = [field.attname for field in model._meta.concrete_fields if field.attname in values]
        return cast(Task, model.from_db(alias, names, [values[name] for name in names]))
    task: Task = model.__new__(model)  # type: ignore[assignment]
    task._state = ModelState()
    task._state.adding, task._state.db = False, alias
    task.__dict__.update(values)
    return task


aenqueue = asynchronous(enqueue)
MAX_KEY_LENGTH = json_payload.MAX_NAME_CHARS
TEXT_COLUMNS = tuple((column.option, column.db) for column in ENQUEUED if column.option and column.type == "text")
ON_DUPLICATE = ("error", "ignore", *REPLACE)


def row_of(queue: str, task: TaskOptions, settings: conf.QueueSettings) -> Row:
    """Check what a caller says of a task; return its column values, payload and context as JSON text."""
    payload_type, plain = codecs.encode(task.payload)
    limits, ttl = conf.settings().payload_limits, task.ttl or settings.ttl
    priority = settings.priority if task.priority is None else task.priority
    given = {"delay": task.delay, "ttl": ttl, "lease": task.lease, "priority": priority, "run_at": task.run_at}
    for name, value in given.items():
        least, most, words = BOUNDS[name]
        bare = value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
        is_kind = isinstance(bare, type(least)) and not isinstance(bare, bool | Enum)
        if bare is not None and not (is_kind and least <= bare <= most):
            raise refused(name, value, f"must be {words}.")
    row: Row = {
        "payload": None if plain is None else json_payload.dumps(plain, limits=limits),
        "payload_type": payload_type,
        "priority": priority,
        "context": _context(task.context, limits),
        "max_attempts": settings.max_attempts,
        "delay": None if task.delay is None else task.delay.total_seconds(),
        "run_at": task.run_at,
        OWN_COLUMNS: placement.own_values(task.columns, settings) if task.columns else {},
        "ttl": ttl and ttl.total_seconds(),
        "lease_seconds": task.lease and task.lease.total_seconds(),
    }
    if payload_type is not None and queue in codecs.expected:
        codecs.refuse_namesake(queue, payload_type, type(task.payload))
    for option, column in TEXT_COLUMNS:
        row[column] = None if (text := getattr(task, option)) is None else checked_text(option, text)
    return row


def _context(value: Any, limits: json_payload.Limits) -> str | None:
    """Return the context of a task: the one around the call with its span, and what the caller gives over it."""
    if value is not None and not isinstance(value, Mapping):
        raise refused("context", value, "must be a mapping, e.g. {'trace': '…'}.")
    inherited = context.ambient.get()
    if "opentelemetry.trace" in sys.modules:
        inherited = context.with_span(inherited)
    if value is None and not inherited:
        return None
    try:
        return json_payload.dumps({**inherited, **(value or {})}, limits=limits)
    except PayloadError as error:
        raise EnqueueError(f"Context cannot be stored: {joined('context', error.path)}: {error.reason}") from None


def joined(place: str, path: str) -> str:
    """Return ``path`` as a path inside ``place``."""
    return f"{place}{path}" if not path or path.startswith("[") else f"{place}.{path}"


def checked_text(name: str, value: Any) -> str:
    """Return a reference, group or tag, or raise for what cannot be one."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_KEY_LENGTH or json_payload.ODD.search(value):
        raise refused(name, value, "must be None or text of 1 to 200 characters, without NUL and lone surrogates.")
    return value
