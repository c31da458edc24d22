"""The verbs of operators on schedules (make, edit, pause, resume, run, back to the code, delete) and on batches.

Which values of a schedule win: the code's, field by field, except where a person changed a field. That stays until
"Back to the code". Permission is checked first. The change and its record are one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_dbtaskqueue.conf.cron import default_zone
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core.exceptions import OperationRefused, near_match
from django_dbtaskqueue.core.states import ERROR, Status
from django_dbtaskqueue.flow.batches import BatchHandle, counts_of
from django_dbtaskqueue.flow.schedule import (
    SCHEDULE_FIELDS,
    Definition,
    aware,
    definition_of,
    enqueue_scheduled,
    home_of,
    is_unfinished,
    reschedule,
    rows_on,
)
from django_dbtaskqueue.models import Batch, Schedule
from django_dbtaskqueue.models.control import CODE
from django_dbtaskqueue.operations.actions import ADDITION, CHANGE, DELETION, log, record, recorded
from django_dbtaskqueue.operations.bounds import is_storable
from django_dbtaskqueue.operations.lookup import locations
from django_dbtaskqueue.operations.permissions import VIEW_PAYLOAD, Actor, Verb, all_queues, check, check_queue, narrow
from django_dbtaskqueue.operations.schedules import find, homes, is_declared, listed
from django_dbtaskqueue.operations.serializers import Document, RowDocument
from django_dbtaskqueue.operations.verbs import with_secrets_of

if TYPE_CHECKING:
    from django_dbtaskqueue.operations.permissions import Text


def _verb(name: str, label: Text, effect: Text, done: Text, permission: str = "change_schedule") -> Verb:
    return Verb(f"{name}_schedule", label, effect, done, permission)


ADD_SCHEDULE = _verb(
    "add", gettext_lazy("New schedule"), gettext_lazy("From its next tick on, pollers enqueue its tasks."),
    ngettext_lazy("%(number)s schedule made", "%(number)s schedules made", "number"), "add_schedule",
)  # fmt: skip
EDIT_SCHEDULE = _verb(
    "edit", gettext_lazy("Edit"),
    gettext_lazy("What you change here wins over the code, until you choose “Back to the code”."),
    ngettext_lazy("%(number)s schedule changed", "%(number)s schedules changed", "number"),
)  # fmt: skip
SCHEDULE_VERBS: Mapping[str, Verb] = {
    verb.name: verb
    for verb in (
        _verb(
            "pause", gettext_lazy("Pause"),
            gettext_lazy("No task is enqueued until the schedule is resumed. Ticks of the pause are not made up for."),
            ngettext_lazy("%(number)s schedule paused", "%(number)s schedules paused", "number"),
        ),
        _verb(
            "resume", gettext_lazy("Resume"), gettext_lazy("The next tick is the first one from now on."),
            ngettext_lazy("%(number)s schedule resumed", "%(number)s schedules resumed", "number"),
        ),
        _verb(
            "run", gettext_lazy("Run now"),
            gettext_lazy("One task is enqueued at once, also of a paused schedule. The next tick stays as it is."),
            ngettext_lazy("%(number)s task enqueued", "%(number)s tasks enqueued", "number"), "run_schedule",
        ),
        _verb(
            "reset", gettext_lazy("Back to the code"),
            gettext_lazy("What was changed by hand is dropped: the schedule is as the code says, and follows it."),
            ngettext_lazy("%(number)s schedule follows the code", "%(number)s schedules follow the code", "number"),
        ),
        _verb(
            "delete", gettext_lazy("Delete"),
            gettext_lazy("The schedule goes; its tasks stay. What the code declares cannot be deleted: pause it."),
            ngettext_lazy("%(number)s schedule deleted", "%(number)s schedules deleted", "number"), "delete_schedule",
        ),
    )
}  # fmt: skip


def act_on_schedule(verb: Verb, name: str, actor: Actor, *, reason: str = "", using: str | None = None) -> Schedule:
    """Pause, resume, run, reset or delete a schedule, and record it, in one transaction; return the row.

    Raises ``OperationRefused`` where it does not fit, and ``PermissionDenied``.
    """
    row = _found(name, actor, using)
    check(verb, reason, actor, row.queue)
    alias = str(row._state.db)
    with recorded(alias):
        entry = record(alias, actor, verb, queue=row.queue, reason=reason, changed=1, details={"schedule": name})
        row = _locked(name, alias)
        try:
            _ACTS[verb.name](row, alias)
        except ValueError as error:
            raise OperationRefused(str(error)) from None
        log(actor, [row], DELETION if verb.name == "delete_schedule" else CHANGE, f"{verb.label} {reason}".strip())
        if verb.name == "run_schedule":
            entry.details = {"schedule": name, "task_id": row.last_task}
            entry.save(using=alias, update_fields=["details"])
    return row


def _found(name: str, actor: Actor, using: str | None) -> Schedule:
    row = find(name, actor, using)
    if row is None:
        hint = near_match(name, [one.name for one in listed(actor, using)])
        raise OperationRefused(_("There is no schedule %(name)s.") % {"name": repr(name)} + hint)
    return row


def _locked(name: str, alias: str) -> Schedule:
    row = rows_on(alias).select_for_update().filter(pk=name).first()
    if row is None:
        raise OperationRefused(_("There is no schedule %(name)s.") % {"name": repr(name)})
    return row


def _pause(row: Schedule, alias: str) -> None:
    if row.paused:
        raise OperationRefused(_("%(name)s is paused already.") % {"name": row.name})
    row.paused = True
    row.save(using=alias, update_fields=["paused"])


def _resume(row: Schedule, alias: str) -> None:
    if not row.paused:
        raise OperationRefused(_("%(name)s is not paused.") % {"name": row.name})
    row.paused = False
    reschedule(row, alias)
    row.save(using=alias, update_fields=["paused", "next_time"])


def _run(row: Schedule, alias: str) -> None:
    if row.overlap == "skip" and is_unfinished(row, alias):
        words = _("The task before is not finished, and %(name)s does not overlap.")
        raise OperationRefused(words % {"name": row.name})
    now = aware(row.clock, alias)
    row.last_task = enqueue_scheduled(row, f"{row.name}@run {now.isoformat()}", alias).pk
    row.save(using=alias, update_fields=["last_task"])


def _reset(row: Schedule, alias: str) -> None:
    if not row.code or not row.edited:
        raise OperationRefused(_("Nothing of %(name)s was changed by hand.") % {"name": row.name})
    _write(row, Definition.of(row.code), alias)


def _delete(row: Schedule, alias: str) -> None:
    if row.source == CODE and is_declared(row):
        words = _("The code declares %(name)s, and would make it again. Pause it, or remove its @periodic.")
        raise OperationRefused(words % {"name": row.name})
    rows_on(alias).filter(pk=row.pk).delete()


_ACTS: Mapping[str, Callable[[Schedule, str], None]] = dict(
    zip(SCHEDULE_VERBS, (_pause, _resume, _run, _reset, _delete), strict=True)
)


def _write(row: Schedule, new: Definition, alias: str) -> None:
    """Write a definition to a row, note what differs from the code, and set the next tick if its times changed."""
    old = definition_of(row)
    for name in SCHEDULE_FIELDS:
        setattr(row, name, getattr(new, name))
    said = Definition.of(row.code) if row.code else new
    row.edited = [name for name in SCHEDULE_FIELDS if getattr(new, name) != getattr(said, name)]
    if row.next_time is None or (old.cron, old.timezone) != (new.cron, new.timezone):
        reschedule(row, alias)
    row.save(using=alias)


def add_schedule(
    name: str, values: Mapping[str, object], actor: Actor, *, reason: str = "", using: str | None = None
) -> Schedule:
    """Make a schedule of a person. Raises ``OperationRefused``, ``UnknownQueue``, ``PermissionDenied``."""
    new = Definition.of({"queue": "", "cron": "", "timezone": default_zone(), **values})
    taken = is_storable(name) and any(rows_on(home).filter(pk=name).exists() for home in homes(using))
    _check_new(name, new, actor, ADD_SCHEDULE, reason)
    alias = home_of(new.queue)
    with recorded(alias):
        record(alias, actor, ADD_SCHEDULE, queue=new.queue, reason=reason, changed=1, details={"schedule": name})
        row, made = rows_on(alias).get_or_create(name=name, defaults={"queue": new.queue, "cron": new.cron})
        if taken or not made:
            raise OperationRefused(_("There is a schedule %(name)s already.") % {"name": repr(name)})
        row = _locked(name, alias)
        _write(row, new, alias)
        log(actor, [row], ADDITION, str(ADD_SCHEDULE.label))
    return row


def edit_schedule(
    name: str, values: Mapping[str, object], actor: Actor, *, reason: str = "", using: str | None = None
) -> Schedule:
    """Change fields of a schedule. They stay as the person wrote them, whatever the code says. Raises as ``add``."""
    row = _found(name, actor, using)
    alias = str(row._state.db)
    check(EDIT_SCHEDULE, reason, actor, row.queue)
    if "payload" in values and not actor.may(VIEW_PAYLOAD, row.queue):
        raise PermissionDenied(_("To edit a payload you need the permission to see payloads."))
    with recorded(alias):
        entry = record(alias, actor, EDIT_SCHEDULE, queue=row.queue, reason=reason, changed=1)
        row = _locked(name, alias)
        old = definition_of(row)
        new = Definition.of({**asdict(old), **values})
        if "payload" in values:
            new = replace(new, payload=with_secrets_of(row.payload, values["payload"]))
        _check_new(name, new, actor, EDIT_SCHEDULE, reason)
        if home_of(new.queue) != alias:
            raise OperationRefused(_("Queue %(queue)s is in another database.") % {"queue": new.queue})
        _write(row, new, alias)
        before, after = asdict(old), asdict(new)
        changes = {key: [before[key], after[key]] for key in SCHEDULE_FIELDS if before[key] != after[key]}
        if "payload" in changes:
            changes["payload"] = []  # the audit is for users who may not see payloads, too
        entry.details = {"schedule": name, "changes": changes}
        entry.save(using=alias, update_fields=["details"])
        log(actor, [row], CHANGE, f"{EDIT_SCHEDULE.label}: {', '.join(changes)}")
    return row


def _check_new(name: str, new: Definition, actor: Actor, verb: Verb, reason: str) -> None:
    check_queue(new.queue, actor)
    check(verb, reason, actor, new.queue)
    queue_settings(new.queue, home_of(new.queue))
    try:
        new.check(name)
    except ValueError as error:
        raise OperationRefused(str(error)) from None


# -- batches -----------------------------------------------------------------------------------------------------------

MAX_BATCHES_LISTED = 500
MAX_ID_DIGITS = 18  # of an id that a column can hold
CANCEL_BATCH = Verb(
    "cancel_batch", gettext_lazy("Cancel all"),
    gettext_lazy("All tasks of the batch that wait or run end in POISON. The task that runs at its end still runs."),
    ngettext_lazy("%(number)s task cancelled", "%(number)s tasks cancelled", "number"), "cancel_task",
)  # fmt: skip
RETRY_BATCH = Verb(
    "retry_batch", gettext_lazy("Retry failed"),
    gettext_lazy("Tasks in ERROR run again. Tasks that were cancelled because one of them failed wait for it again."),
    ngettext_lazy("%(number)s task reprocessed", "%(number)s tasks reprocessed", "number"), "reprocess_task",
)  # fmt: skip
BATCH_VERBS: Mapping[str, Verb] = {verb.name: verb for verb in (CANCEL_BATCH, RETRY_BATCH)}
BATCH = RowDocument(
    "Batch", "A batch, and how many of its tasks are in each status.", Batch,
    ("id", "name", "create_time", "total", "queues", "callback_id"), {"statuses": dict[str, int]},
)  # fmt: skip
BatchDocument = Annotated[Document, BATCH]


def listed_batches(actor: Actor, using: str | None = None) -> list[Batch]:
    """Return the newest batches that the actor may view, of every database."""
    found: list[Batch] = []
    for alias in sorted({alias for alias, _model in locations(using)}):
        found += _rows(alias, actor).order_by("-pk")[:MAX_BATCHES_LISTED]
    return sorted(found, key=lambda row: row.create_time, reverse=True)[:MAX_BATCHES_LISTED]


def find_batch(pk: str, actor: Actor, using: str | None = None) -> Batch | None:
    """Return a batch by its id, if it is there and the actor may view it."""
    if not pk.isascii() or not pk.isdecimal() or len(pk) > MAX_ID_DIGITS:
        return None
    for alias in sorted({alias for alias, _model in locations(using)}):
        row = _rows(alias, actor, pk=int(pk)).first()
        if row is not None:
            return row
    return None


def _rows(alias: str, actor: Actor, **of: int) -> QuerySet[Batch]:
    """Return batches with the time of their database as ``clock``."""
    return narrow(Batch.objects.using(alias).filter(**of).order_by("-pk").annotate(clock=Now()), actor)


def batch_documents(rows: list[Batch]) -> list[BatchDocument]:
    """Return batches as data: one query for each of their task tables."""
    counts = counts_of(rows)
    return [BATCH.of(row, statuses={str(status): counts[row.pk][str(status)] for status in Status}) for row in rows]


def act_on_batch(verb: Verb, row: Batch, actor: Actor, *, reason: str = "") -> int:
    """Cancel all tasks of a batch, or go on from where it failed; return how many tasks changed, and record it.

    Raises ``PermissionDenied`` unless the actor may use the verb on each queue of the batch. A task that was moved to
    another queue since stays as it is if the actor may not use the verb there.
    """
    check(verb, reason, actor)
    for queue in row.queues:
        check(verb, reason, actor, queue)
    alias, handle = str(row._state.db), BatchHandle.of(row)
    handle.queues = None if actor.user is None else [queue for queue in all_queues() if actor.may(verb, queue)]
    with recorded(alias):
        queue, details = row.queues[0] if len(row.queues) == 1 else "", {"batch": row.pk, "name": row.name}
        entry = record(alias, actor, verb, queue=queue, reason=reason, details=details)
        entry.changed = handle.cancel() if verb == CANCEL_BATCH else handle.retry()
        entry.save(using=alias, update_fields=["changed"])
    return entry.changed


def fits(verb: Verb, counts: Mapping[str, int]) -> bool:
    """Whether a verb would change a batch with these counts."""
    if verb == CANCEL_BATCH:
        return bool(counts[str(Status.CREATED)] or counts[str(Status.PROCESSING)])
    return bool(counts[str(ERROR)])
