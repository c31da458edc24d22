"""Batches for operators: lists, documents, and the two verbs on all tasks of one: cancel all, and retry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_dbtaskqueue.core.states import ERROR, Status
from django_dbtaskqueue.flow.batches import BatchHandle, counts_of
from django_dbtaskqueue.models import Batch
from django_dbtaskqueue.operations.actions import record, recorded
from django_dbtaskqueue.operations.lookup import locations
from django_dbtaskqueue.operations.permissions import Actor, Verb, all_queues, check
from django_dbtaskqueue.operations.serializers import document
from django_dbtaskqueue.operations.visibility import narrow

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


class BatchDocument(TypedDict):
    """A batch as data."""

    id: int
    name: str
    created: str
    total: int
    statuses: dict[str, int]
    queues: list[str]
    callback: int | None


def listed(actor: Actor, using: str | None = None) -> list[Batch]:
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
    return [
        document(
            BatchDocument,
            row,
            created=row.create_time.isoformat(),
            statuses={str(status): counts[row.pk][str(status)] for status in Status},
            callback=row.callback_id,
        )
        for row in rows
    ]


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
        entry = record(alias, actor, verb, queue=row.queues[0] if len(row.queues) == 1 else "", reason=reason)
        entry.changed = handle.cancel() if verb == CANCEL_BATCH else handle.retry()
        entry.details = {"batch": row.pk, "name": row.name}
        entry.save(using=alias, update_fields=["changed", "details"])
    return entry.changed


def fits(verb: Verb, counts: Mapping[str, int]) -> bool:
    """Whether a verb would change a batch with these counts."""
    if verb == CANCEL_BATCH:
        return bool(counts[str(Status.CREATED)] or counts[str(Status.PROCESSING)])
    return bool(counts[str(ERROR)])
