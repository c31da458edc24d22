"""Enqueue: a task is a row in the caller's own transaction.

It commits or rolls back with the caller's business data, savepoints included; only the wake-up of the pollers waits
for the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any, Unpack, cast

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models import Model
from django.db.models import signals as model_signals
from django.db.models.base import ModelState

from django_dbtaskqueue.conf import overrides
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import codecs, context
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import COPIED, ENQUEUED, OWN_COLUMNS, EnqueueOptions
from django_dbtaskqueue.core.context import enqueue_hook
from django_dbtaskqueue.core.durations import MIN_LEASE
from django_dbtaskqueue.core.exceptions import DuplicateTask, EnqueueError, PayloadError
from django_dbtaskqueue.core.outcomes import MAX_DELAY
from django_dbtaskqueue.core.sql.enqueue import RARE_COLUMNS, REPLACE
from django_dbtaskqueue.core.states import CREATED
from django_dbtaskqueue.core.unique import UniqueRule
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, alias_for, model_of
from django_dbtaskqueue.flow import groups, selection, usage
from django_dbtaskqueue.flow.parents import checked_parents, insert_related, members
from django_dbtaskqueue.flow.placement import (
    UNIQUE_OVER_HISTORY,
    PeriodTaken,
    check_timeout,
    claim_periods,
    existing_task,
    free_capacity,
    free_references,
    in_period,
    own_columns,
    own_fields,
    own_values,
    refused,
    route,
    rule_of,
    with_fail_over,
    without_spent,
)
from django_dbtaskqueue.models import AbstractTask, Task

Row = dict[str, Any]  # the values of a task's columns, as parameters
HELD = "held"  # a key of the row of a task that waits for others
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
    rewrites that task while it is CREATED (``keep_due=True`` leaves its due time) and raises ``DuplicateTask`` when it
    is not. ``"replace_running"`` does so while it is PROCESSING, too: the run is cancelled, and the task starts again
    as the new one. The transaction stays usable in each case.

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
    options = locals()  # the arguments by name, of which row_of takes those that make the row
    if enqueue_hook.around is not None and enqueue_hook.applies():
        return enqueue_hook.surround(queue, lambda: enqueue(**options))
    queue = queue.value if isinstance(queue, Enum) else queue
    alias = alias_for(queue, using)
    settings = overrides.queue_settings(queue, alias, connection := connections[alias])
    row = row_of(options, settings)
    rule, parents = None if unique is None and settings.unique is None else rule_of(unique, settings, row), None
    if row["payload_type"] is not None and queue in codecs.expected:
        codecs.refuse_namesake(queue, row["payload_type"], type(payload))
    if on_duplicate not in ON_DUPLICATE:
        check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
    if timeout is not None:
        check_timeout(timeout)
    if after is not None:
        if (on_duplicate if rule is None else rule.on_duplicate) in REPLACE:
            raise refused("on_duplicate", on_duplicate, "does not go with after=: a task keeps its parents.")
        alias, parents = checked_parents(after, on_parent_failure, settings, alias, using)
        row[HELD] = True

    def insert(at: str) -> Task:
        session = Session(connection if at == connection.alias else connections[at], model_of(settings))
        if rule is not None:
            return _insert_unique(session, queue, row, rule, settings.capacity, timeout)
        if row["reference_number"] is not None and settings.unique_over == UNIQUE_OVER_HISTORY:
            with session.atomic():
                if not without_spent(session, queue, [row], on_duplicate):
                    return existing_task(session, queue, row["reference_number"], on_duplicate, None, None)
                with free_capacity(session, queue, settings.capacity, 1, timeout):
                    return _insert_grouped(session, queue, row, on_duplicate, keep_due=keep_due)
        if settings.capacity is None and row["group_key"] is None and on_duplicate not in REPLACE:
            return _insert(session, queue, row, on_duplicate, keep_due=keep_due)
        with free_capacity(session, queue, settings.capacity, 1, timeout):
            return _insert_grouped(session, queue, row, on_duplicate, keep_due=keep_due)

    if parents is not None or members.get() is not None:
        insert = partial(insert_related, insert, parents, on_parent_failure)
    if settings.shards and using is None and parents is None:
        return with_fail_over(route(settings, row["reference_number"], payload), settings.shards, insert)
    return insert(alias)


def enqueue_copy(task: AbstractTask) -> AbstractTask:
    """Insert a new task with all that was enqueued with ``task`` but its reference, due now, with the same ``ttl``."""
    alias = str(task._state.db)
    settings = overrides.queue_settings(task.queue, alias)
    options = {column.option: getattr(task, column.name) for column in COPIED if column.option}
    options["lease"] = None if task.lease_seconds is None else timedelta(seconds=task.lease_seconds)
    options["columns"] = {name: getattr(task, name) for name in own_fields(type(task))}
    options["ttl"] = None if task.expire_time is None else max(timedelta(0), task.expire_time - task.create_time)
    row = row_of(options, settings)
    # The payload is JSON already, so its type cannot be seen from it; and the budget is no argument.
    row |= {column.db: getattr(task, column.name) for column in COPIED if not column.option}
    return _insert_new(task.queue, row, settings, alias)


def enqueue_stored(queue: str, stored: Row, *, using: str | None = None, **options: Any) -> Task:
    """Insert one task whose ``stored`` columns are written as they are, and the others as ``enqueue`` makes them."""
    if enqueue_hook.around is not None and enqueue_hook.applies():
        return enqueue_hook.surround(queue, lambda: enqueue_stored(queue, stored, using=using, **options))
    alias = alias_for(queue, using)
    settings = overrides.queue_settings(queue, alias)
    row = row_of(options, settings) | stored
    if settings.shards and using is None:
        shard = route(settings, None, options["payload"])
        return with_fail_over(shard, settings.shards, lambda alias: _insert_new(queue, row, settings, alias))
    return _insert_new(queue, row, settings, alias)


def _insert_new(queue: str, row: dict[str, Any], settings: conf.QueueSettings, alias: str) -> Task:
    """Insert a task when its queue has room for it. Raises ``DuplicateTask``."""
    session = Session(connections[alias], model_of(settings))
    with free_capacity(session, queue, settings.capacity, 1, None):
        if row["reference_number"] is not None and settings.unique_over == UNIQUE_OVER_HISTORY:
            without_spent(session, queue, [row], "error")
        return _insert_grouped(session, queue, row, "error", keep_due=False)


def _insert_unique(
    session: Session,
    queue: str,
    row: Row,
    rule: UniqueRule,
    capacity: int | None,
    timeout: timedelta | None,
) -> Task:
    """Insert under a rule of uniqueness. A task whose period another producer began first is rolled back."""
    reference = row["reference_number"]
    while not in_period(session, queue, rule, [reference]):
        with suppress(PeriodTaken), session.atomic(), free_capacity(session, queue, capacity, 1, timeout):
            return insert_by_rule(session, queue, row, rule)
    found = session.run(session.sql.find, {"queue_name": queue, "reference_number": reference})
    return existing_task(session, queue, reference, rule.on_duplicate, next(iter(found), None), rule)


def insert_by_rule(session: Session, queue: str, row: Row, rule: UniqueRule) -> Task:
    """Insert or replace a task, or return the existing one. Raises ``PeriodTaken``."""
    task = _insert_grouped(session, queue, row, rule.on_duplicate, keep_due=False, rule=rule)
    if not task.enqueue_note:
        claim_periods(session, queue, rule, [row["reference_number"]])
    return task


def _insert_grouped(
    session: Session,
    queue: str,
    row: Row,
    on_duplicate: str,
    *,
    keep_due: bool,
    rule: UniqueRule | None = None,
) -> Task:
    """Insert under the group's lock: at most one task of each group is ready. A replaced task begins anew."""
    group = row["group_key"]
    if (group is None and on_duplicate not in REPLACE) or HELD in row:  # a task that waits enters its group later
        return _insert(session, queue, row, on_duplicate, keep_due=keep_due, rule=rule)
    with session.atomic():
        keys = [] if group is None else [group]
        groups.lock(session, queue, keys)
        task = _insert(session, queue, row, on_duplicate, keep_due=keep_due, rule=rule)
        if on_duplicate in REPLACE and task.total_attempt:
            selection.delete_steps(session.model, session.connection.alias, [task.pk])
        groups.regroup(session, queue, keys)
    return task


def _insert(
    session: Session, queue: str, row: Row, on_duplicate: str, *, keep_due: bool, rule: UniqueRule | None = None
) -> Task:
    timed = row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None
    grouped, referenced = row["group_key"] is not None, row["reference_number"] is not None
    own, own_params = own_columns(session, row) if row[OWN_COLUMNS] else ((), {})
    bounded = rule is not None and rule.bound is not None
    sql = session.sql.insert(
        on_duplicate, timed=timed, grouped=grouped, keep_due=keep_due, bounded=bounded, referenced=referenced,
        held=HELD in row, bare=RARE_VALUES(row) == NO_RARE_VALUES, own=own,
    )  # fmt: skip
    run_at = None if row["run_at"] is None else session.time_text(row["run_at"])
    returned = session.sql.returned(on_duplicate, timed=timed)
    params = {**row, **own_params, "queue_name": queue, "run_at": run_at}
    del params[OWN_COLUMNS]
    if rule is not None and rule.bound is not None:
        params["max_wait"] = rule.bound.total_seconds()
    for _ in range(MAX_ROUNDS):  # the row in the way may go, or start, between two statements
        written = session.repeat(sql, params)
        if written:
            usage.after_commit(session.connection, {(queue, "put"): written[0][:1]}, wake=notify.notify)
            if on_duplicate == "replace_running":
                notify.after_commit(session.connection, queue, lost=True)
            task = _task(session, queue, row, zip(returned, written[0], strict=True))
            if on_duplicate in REPLACE and task.last_update_time > task.create_time:
                why = f" The rule allows {rule.words}." if rule is not None else ""
                task.enqueue_note = f"No task was inserted: task {task.pk} has the new values.{why}"
            return task
        if rule is not None and free_references(session, queue, rule, [row["reference_number"]]):
            continue
        held = rule is not None and rule.until_started and rule
        found = session.run(session.sql.hold if held else session.sql.find, params)
        if found and on_duplicate in REPLACE and found[0][2] != row["group_key"]:
            task_id, status, _ = found[0]
            raise DuplicateTask(queue, row["reference_number"], task_id=task_id, status=status, in_other_group=True)
        if held and (on_duplicate == "replace" or (found and found[0][1] != CREATED and not held.period)):
            continue  # it has started meanwhile: it holds its reference no more
        if found:
            return existing_task(session, queue, row["reference_number"], on_duplicate, next(iter(found)), rule)
    raise DuplicateTask(queue, row["reference_number"])


def _task(session: Session, queue: str, row: Row, written: Iterable[tuple[str, Any]]) -> Task:
    """Return the row just written as a model instance; columns not in hand are loaded when they are read."""
    values: Row = {"queue": queue, "status": "CREATED", "attempt": 0, "reenqueue_attempt": 0, "total_attempt": 0}
    values.update(zip(PLAIN_NAMES, PLAIN_VALUES(row), strict=True))
    values.update(written)
    if not session.postgresql:
        # A replaced task may be parked: it has no ready time.
        values |= {n: session.time(value) for n, value in values.items() if n.endswith("_time") and value is not None}
    due = values.setdefault("next_process_time", values["create_time"])
    if row["group_key"] is not None or HELD in row:
        values.pop("ready_time", None)  # whether it is ready is decided next
    else:
        values.setdefault("ready_time", due)
    for name, column in JSON_COLUMNS:
        values[name] = None if (text := row[column]) is None else json_payload.loads(text)
    if row[OWN_COLUMNS]:
        fields = own_fields(session.model)
        values |= {fields[name].attname: getattr(value, "pk", value) for name, value in row[OWN_COLUMNS].items()}
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


async def aenqueue(
    queue: str, reference: str | None = None, payload: Any = None, **options: Unpack[EnqueueOptions]
) -> Task:
    """The async twin of ``enqueue``, with the same arguments and promises."""
    return await sync_to_async(enqueue)(queue, reference, payload, **options)


RUN_AT_YEARS = range(2, 9001)  # the time zones of a first or last day lead out of what Python can say
MAX_KEY_LENGTH = 200  # characters of a reference, group or tag
MAX_ROUNDS = 6  # of the two statements of an insert, until another row in the way is given up
TEXT_COLUMNS = tuple((column.option, column.db) for column in ENQUEUED if column.option and column.type == "text")
DURATION_COLUMNS = tuple((column.option, column.db) for column in ENQUEUED if column.option and column.type == "float8")
ON_DUPLICATE = ("error", "ignore", *REPLACE)


def row_of(options: Mapping[str, Any], settings: conf.QueueSettings) -> Row:
    """Check one task's arguments and return its column values, payload and context as JSON text."""
    get = options.get
    payload_type, plain = codecs.encode(get("payload"))
    limits = conf.payload_limits()
    row = {
        "payload": None if plain is None else json_payload.dumps(plain, limits=limits),
        "payload_type": payload_type,
        "priority": settings.priority if (priority := get("priority")) is None else priority,
        "context": _context(get("context"), limits),
        "max_attempts": settings.max_attempts,
        "delay": None if (delay := get("delay")) is None else _seconds("delay", delay),
        "run_at": get("run_at"),
        OWN_COLUMNS: own_values(given, settings) if (given := get(OWN_COLUMNS)) else {},
        "ttl": None if (ttl := get("ttl") or settings.ttl) is None else _seconds("ttl", ttl),
    }
    for option, column in TEXT_COLUMNS:
        row[column] = None if (text := get(option)) is None else checked_text(option, text)
    for option, column in DURATION_COLUMNS:
        row[column] = None if (span := get(option)) is None else _seconds(option, span) or None
    if (lease := get("lease")) and lease < MIN_LEASE:
        raise refused("lease", lease, "must be at least 100 ms. Leave it out to have the queue's lease.")
    if type(row["priority"]) is not int or not -32768 <= row["priority"] <= 32767:
        raise refused("priority", row["priority"], "must be a whole number from -32768 to 32767, lower first.")
    if row["run_at"] is not None and not (isinstance(row["run_at"], datetime) and row["run_at"].year in RUN_AT_YEARS):
        raise refused(
            "run_at", row["run_at"], f"must be a datetime of the years {RUN_AT_YEARS[0]} to {RUN_AT_YEARS[-1]}."
        )
    return row


def _context(value: Any, limits: json_payload.Limits) -> str | None:
    if value is not None and not isinstance(value, Mapping):
        raise refused("context", value, "must be a mapping, e.g. {'trace': '…'}.")
    taken_along = context.captured(value)
    if taken_along is None:
        return None
    try:
        return json_payload.dumps(dict(taken_along), limits=limits)
    except PayloadError as error:
        raise EnqueueError(f"Context cannot be stored: {joined('context', error.path)}: {error.reason}") from None


def joined(place: str, path: str) -> str:
    """Return ``path`` as a path inside ``place``."""
    return f"{place}{path}" if not path or path.startswith("[") else f"{place}.{path}"


def checked_text(name: str, value: Any) -> str:
    """Return a reference, group or tag, or raise for what cannot be one."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_KEY_LENGTH or "\0" in value:
        raise refused(name, value, f"must be None or text of 1 to {MAX_KEY_LENGTH} characters without NUL.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(name, value, f"holds a lone surrogate at {error.start}; it is not text.") from None
    return value


def _seconds(name: str, value: Any) -> float:
    if not isinstance(value, timedelta) or not timedelta(0) <= value <= MAX_DELAY:
        raise refused(name, value, "must be a timedelta from zero to a hundred years.")
    return value.total_seconds()


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is none of ``choices``."""
    if value not in choices:
        raise refused(name, value, f"must be one of {', '.join(map(repr, choices))}.")
