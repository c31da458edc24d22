"""Placement: which database a task goes to, and whether its queue has room for it.

A queue with shards is spread over several databases; a task stays where it was enqueued. A queue with a capacity holds
at most that many live tasks. The limit is exact, by a lock on the queue's row: producers of such a queue take turns
until they commit. A queue without a capacity pays nothing. A rule of uniqueness gives a task its reference. A task
table of the project's own may have columns of its own, which an enqueue sets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, time, timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Any
from zlib import crc32

from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import CharField, IntegerField, JSONField, TextField
from django.db.utils import InterfaceError, OperationalError
from django.utils.encoding import force_bytes
from django.utils.module_loading import import_string

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import json as json_payload, logger
from django_dbtaskqueue.core.columns import BY_NAME, OWN_COLUMNS
from django_dbtaskqueue.core.exceptions import DuplicateTask, EnqueueError, PayloadError, near_match
from django_dbtaskqueue.core.json import short_repr
from django_dbtaskqueue.core.sql.enqueue import OwnColumns
from django_dbtaskqueue.core.unique import RULE_FORMS, UniqueRule, parse_rule
from django_dbtaskqueue.db.session import Session, aliases_of, model_of
from django_dbtaskqueue.models import AbstractTask, Queue, Task

UNIQUE_OVER_HISTORY = "history"  # the setting ``unique_over`` of a queue whose references stay taken
LEFT_TABLE = "left the table"  # what the task of a spent reference has done, in the error
OWN_MEMBERS = "own"  # a key of a row whose values for own columns are checked, and written as JSON
Row = dict[str, Any]
_turn = [0]


def route(settings: QueueSettings, reference: str | None, payload: Any) -> str:
    """Return the shard of a task: the router's word, else the reference's hash, else each in turn."""
    shards = settings.shards
    if settings.router is not None:
        router = import_string(settings.router) if isinstance(settings.router, str) else settings.router
        chosen = router(reference, payload, tuple(shards))
        if chosen not in shards:
            raise refused("router", chosen, f"is not one of the shards {', '.join(shards)}.")
        return str(chosen)
    if reference is None:
        _turn[0] += 1
        return shards[_turn[0] % len(shards)]
    return shards[crc32(reference.encode()) % len(shards)]


def with_fail_over(chosen: str, shards: Sequence[str], insert: Callable[[str], Task]) -> Task:
    """Run ``insert(alias)`` on the chosen shard, or on the next one if that is down and holds no transaction."""
    start = list(shards).index(chosen)
    candidates = [*shards[start:], *shards[:start]]
    for alias in candidates[:-1]:
        try:
            return insert(alias)
        except (OperationalError, InterfaceError) as error:
            if connections[alias].in_atomic_block:
                raise
            connections[alias].close()
            logger.warning("Shard %s is down, enqueueing on the next one: %s", alias, error)
    return insert(candidates[-1])


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is none of ``choices``."""
    if value not in choices:
        raise refused(name, value, f"must be one of {', '.join(map(repr, choices))}.")


def check_timeout(timeout: timedelta | None) -> None:
    """Refuse a time to wait that is no duration."""
    if timeout is not None and not isinstance(timeout, timedelta):
        raise refused("timeout", timeout, "must be None or a timedelta, e.g. timedelta(seconds=5).")


def lock_live(session: Session, queue: str, capacity: int, wanted: int = 0) -> int:
    """Lock the queue's row and return how many tasks are live, counted to one more than the capacity.

    Tasks that wait past their time to live are counted only where there is room for ``wanted`` beside them.
    """
    session.run(session.sql.make_queue, {"queue_name": queue})
    Queue.objects.using(session.connection.alias).select_for_update().get(pk=queue)
    for sql in (session.sql.live, session.sql.live_unexpired):  # the second reads more, and is rarely needed
        live = int(session.run(sql, {"queue_name": queue, "limit": capacity + 1})[0][0])
        if live + wanted <= capacity:
            break
    return live


def known_queues(using: str | None = None) -> set[str]:
    """Return the queues that have settings, a processor here, or a ``Queue`` row, as those made at runtime have.

    With ``using`` only that database's rows.
    """
    known = {*conf.settings_queues()}
    for alias in {alias for name in ("", *known) for alias in aliases_of(name, using)}:
        known.update(Queue.objects.using(alias).values_list("name", flat=True))
    return known


def known_places(using: str | None = None) -> list[tuple[str, str]]:
    """Return the known queues with their databases, but for rows that name no queue of their database."""
    with_settings, places = {*conf.settings_queues()}, list[tuple[str, str]]()
    for name in sorted(filter(conf.is_queue_name, known_queues(using))):
        for alias in aliases_of(name, using):
            if name in with_settings or Queue.objects.using(alias).filter(name=name).exists():
                places.append((name, alias))
    return places


# -- references that stay taken ----------------------------------------------------------------------------------------


def without_spent(session: Session, queue: str, rows: list[Row], on_duplicate: str) -> list[Row]:
    """Claim the references of rows for this transaction. Return the rows but for those whose reference is spent.

    A reference is spent if its task has left the table: ``DuplicateTask``, unless ``on_duplicate`` is "ignore". If the
    task is in the table, the statement that inserts decides.
    """
    wanted = {str(row["reference_number"]) for row in rows if row["reference_number"] is not None}
    text = json.dumps([{"reference_number": reference} for reference in sorted(wanted)])
    claimed = session.run(session.sql.claim_references, {"queue_name": queue, "rows": text}) if wanted else []
    taken = wanted.difference(reference for (reference,) in claimed)
    tasks = session.model._base_manager.using(session.connection.alias).filter(queue=queue, reference__in=taken)
    spent = taken.difference(tasks.values_list("reference", flat=True)) if taken else set()
    if spent and on_duplicate != "ignore":
        raise DuplicateTask(queue, min(spent), status=LEFT_TABLE)
    return [row for row in rows if row["reference_number"] not in spent] if spent else rows


# -- rules of uniqueness -----------------------------------------------------------------------------------------------


class PeriodTaken(Exception):
    """Another producer began the period of one of the references first. The transaction of this one is rolled back."""


def rule_of(unique: object, settings: QueueSettings, reference: str | None) -> UniqueRule | None:
    """Return the rule of uniqueness for a task: that of the call, or else the queue's if it has no reference."""
    if unique is None:
        return settings.unique if reference is None else None
    try:
        rule = parse_rule(unique) if isinstance(unique, str) else unique
    except ValueError as error:
        raise EnqueueError(f"unique: {error!s:.900}") from None
    if not isinstance(rule, UniqueRule):
        raise refused("unique", unique, f"must be Unique(), Throttle(…), Debounce(…), or text. {RULE_FORMS}")
    if reference is not None:
        raise EnqueueError(
            f"reference={reference!r:.80} and unique={rule} are two keys for one task. Leave the reference out, or "
            "name the field of the payload that holds it: unique=Unique(fields=(…,))."
        )
    return rule


def apply_rule(rule: UniqueRule, row: Row) -> None:
    """Give a row the reference that its rule derives, and the due time if the rule sets it."""
    # The last key is the oldest: while a new one is introduced, all processes derive the same reference.
    oldest = [django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS][-1]
    row["reference_number"] = rule.reference(row["payload_type"], row["payload"], sha256(force_bytes(oldest)).digest())
    if rule.wait is not None:
        if row["delay"] is not None or row["run_at"] is not None:
            raise EnqueueError(f"unique={rule} says when the task is due. Leave delay= and run_at= out.")
        row["delay"] = rule.wait.total_seconds()


def in_period(session: Session, queue: str, rule: UniqueRule, references: Sequence[str]) -> set[str]:
    """Return the references whose period is not over: they are taken, also if their tasks have left the table."""
    if rule.period is None or not references:
        return set()
    return {found for (found,) in session.run(session.sql.in_period, _selected(session, queue, rule, references))}


def free_by_rule(session: Session, queue: str, rule: UniqueRule, references: Sequence[str]) -> int:
    """Rename the references of tasks that the rule does not hold any more; return how many there were."""
    keeping = session.sql.dialect.array([str(status) for status in rule.keeping])
    return len(session.run(session.sql.free, {**_selected(session, queue, rule, references), "keeping": keeping}))


def claim_periods(session: Session, queue: str, rule: UniqueRule, references: Sequence[str]) -> None:
    """Begin the period of references whose tasks this transaction has inserted. Raises ``PeriodTaken``."""
    if rule.period is None or not references:
        return
    text = json.dumps([{"reference_number": reference} for reference in references])
    selected = {**_selected(session, queue, rule, ()), "rows": text, "period": rule.period.total_seconds()}
    if len(session.run(session.sql.claim_periods, selected)) < len(references):
        raise PeriodTaken


def _selected(session: Session, queue: str, rule: UniqueRule, references: Sequence[str]) -> Row:
    ago = 0.0 if rule.period is None else -rule.period.total_seconds()
    named = {"queue_name": queue, "references": session.sql.dialect.array(references)}
    return {**named, "location": session.location, "ago": ago}


# -- columns of the project's own table --------------------------------------------------------------------------------


def refused(name: str, value: object, wanted: str) -> EnqueueError:
    """Return the error of an argument: its value, and what it must be."""
    return EnqueueError(f"{name}={short_repr(value)} {wanted}")


@lru_cache(maxsize=64)
def own_fields(model: type[AbstractTask]) -> dict[str, Any]:
    """Return the fields that only this task table has, by name."""
    return {field.name: field for field in model._meta.concrete_fields if field.name not in BY_NAME}


def own_values(given: object, settings: QueueSettings) -> dict[str, object]:
    """Check the names of values for own columns; return the values by field name, in one order."""
    model = model_of(settings)
    fields = own_fields(model)
    if not isinstance(given, Mapping):
        raise refused("columns", given, "must be a mapping of the table's own fields to values.")
    for name in given:
        if name not in fields:
            shown = short_repr(name)
            raise EnqueueError(
                f"columns: {model._meta.label} has no own field {shown}.{near_match(shown[1:-1], fields)} "
                f"Its own fields: {', '.join(fields) or 'none'}. A queue gets a table of its own by the setting model."
            )
    return {name: given[name] for name in sorted(given)}


def stored_key(field: Any, value: object) -> object:
    """Return what a foreign key stores of a model instance; other values as they are."""
    return getattr(value, field.target_field.attname if field.is_relation else "pk", value)


def own_types(session: Session, names: Iterable[str]) -> OwnColumns:
    """Return the columns of some own fields, with their types."""
    fields, to = own_fields(session.model), session.connection
    return tuple((to.ops.quote_name(str(fields[name].column)), str(fields[name].db_type(to))) for name in names)


def own_parameters(session: Session, row: Row, *, as_json: bool = False) -> Row:
    """Return the values of the own columns that a row sets, as parameters, or each as JSON text."""
    fields, found = own_fields(session.model), Row()
    for number, (name, value) in enumerate(row[OWN_COLUMNS].items()):
        field = fields[name]
        try:
            written = field.get_db_prep_save(stored_key(field, value), session.connection)
            _check_column(field, written, session.connection)
            if isinstance(field, JSONField) and value is not None:
                text = json_payload.dumps(json.loads(json.dumps(value, cls=field.encoder)))
                written = text if as_json else written
            elif as_json:
                written = json.dumps(written, cls=OwnValueEncoder, allow_nan=False)
        except (TypeError, ValueError, ValidationError, PayloadError) as error:
            raise EnqueueError(f"columns: {name}={short_repr(value)} cannot be stored: {error}") from None
        found[f"own_{number}"] = written
    return found


def own_members(session: Session, row: Row) -> str:
    """Return the values of the own columns that a row sets, as the last members of a JSON object."""
    return ",".join(f'"{name}":{text}' for name, text in own_parameters(session, row, as_json=True).items()) + "}"


def _check_column(field: Any, value: object, connection: BaseDatabaseWrapper) -> None:
    """Raise ``ValueError`` for what the column refuses: the database would refuse all rows of the statement."""
    if value is None and not field.null:
        raise ValueError("the column cannot be NULL")
    if isinstance(value, str) and isinstance(field, CharField | TextField):
        if len(value) > (field.max_length or len(value)):
            raise ValueError(f"it has {len(value):,} characters, and the column {field.max_length:,}")
        if json_payload.ODD.search(value):
            raise ValueError("PostgreSQL stores no NUL character and no lone surrogate")
    if isinstance(value, int) and isinstance(field, IntegerField):
        low, high = connection.ops.integer_field_range(field.get_internal_type())
        if high is not None and not low <= value <= high:
            raise ValueError(f"the column holds {low:,} to {high:,}")


class OwnValueEncoder(DjangoJSONEncoder):
    """Writes times with their microseconds, which Django's cuts."""

    def default(self, value: object) -> object:
        return value.isoformat() if isinstance(value, datetime | time) else super().default(value)


def without_orphans(session: Session, rows: list[Row], reject: Callable[[Row, str], object]) -> list[Row]:
    """Return rows whose foreign keys lead to a row, and reject the others: a database does so at the commit only."""
    for name, field in own_fields(session.model).items():
        if field.is_relation and field.db_constraint:
            target, model = field.target_field, field.related_model
            keys = [target.to_python(stored_key(field, row[OWN_COLUMNS].get(name))) for row in rows]
            there = model._base_manager.using(session.connection.alias).filter(**{f"{target.attname}__in": {*keys}})
            known = {None, *there.values_list(target.attname, flat=True)}
            for row, key in zip(rows, keys, strict=True):
                if key not in known:
                    reject(row, f"columns: {name}={short_repr(key)}: there is no such {model._meta.label}.")
            rows = [row for row, key in zip(rows, keys, strict=True) if key in known]
    return rows
