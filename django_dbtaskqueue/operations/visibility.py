"""What an actor may view: rows of hidden queues are left out of every list, count, chart and answer.

Without ``DBTASKQUEUE["CAN_VIEW"]``, and without a token for some queues, nothing is hidden and no query is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

from django.db.models import Exists, OuterRef, Q, QuerySet

from django_dbtaskqueue.core.exceptions import SearchError, UnknownQueue
from django_dbtaskqueue.models import AuditEntry, Batch, BulkOperation, Poller, Queue, SavedSearch
from django_dbtaskqueue.models.control import queue_names_in
from django_dbtaskqueue.operations.permissions import Actor, Verb, all_queues, check
from django_dbtaskqueue.operations.search import parse

Rows = TypeVar("Rows", bound=QuerySet[Any])
VISIBLE = "visible queues"
MAX_ROWS_JUDGED_ONE_BY_ONE = 2000  # pollers, saved searches


def visible_queues(actor: Actor) -> list[str] | None:
    """Return the queues that the actor may view; None: all of them, without a question to the database."""
    if actor.sees_all:
        return None
    if VISIBLE not in actor.memo:
        actor.memo[VISIBLE] = [name for name in actor.scope.queues or all_queues() if actor.sees(name)]
    return actor.memo[VISIBLE]


def narrow(rows: Rows, actor: Actor) -> Rows:
    """Return those of ``rows`` that the actor may view."""
    names = visible_queues(actor)
    found: Any = rows if names is None else rows.filter(_condition(rows, names, actor))
    return cast(Rows, found)


def check_queue(queue: str, actor: Actor) -> None:
    """Raise ``UnknownQueue`` for a queue that is hidden, or not there: only visible ones are named."""
    names = visible_queues(actor)
    if names is not None and queue not in names:
        raise UnknownQueue(queue, names)


def check_there(queues: Iterable[str], actor: Actor) -> None:
    """Raise ``UnknownQueue`` for a queue that is not there. Call it after the check of permissions: it names queues."""
    names = all_queues()
    for queue in queues:
        if queue not in names:
            raise UnknownQueue(queue, visible_names(names, actor))


def queues_of(text: str) -> tuple[str, ...]:
    """Return the queues that a stored search names; none of one that can no longer be read."""
    try:
        return parse(text).queues()
    except SearchError:
        return ()


def sees_search(text: str, actor: Actor) -> bool:
    """Whether a search that somebody wrote names queues, and the actor may view each of them."""
    queues = queues_of(text)
    return actor.sees_all or (bool(queues) and all(map(actor.sees, queues)))


def sees_operation(operation: BulkOperation, actor: Actor) -> bool:
    """Whether the actor may view a bulk operation: its search names queues they may view, or they ordered it."""
    return sees_search(operation.query, actor) or owns(operation, actor)


def sees_entry(entry: AuditEntry, actor: Actor) -> bool:
    """Whether the actor may view an entry of the audit: it is about one queue they may view, or they did it."""
    seen = actor.sees_all or (bool(entry.queue) and actor.sees(entry.queue))
    return seen or (entry.actor_id == actor.key and not actor.scope.queues)


def _condition(rows: QuerySet[Any], names: list[str], actor: Actor) -> Q:
    model = rows.model
    if issubclass(model, Queue):
        return Q(name__in=names)
    if issubclass(model, Poller):
        seen = set(names)
        pollers = rows.values_list("pk", "queues")[:MAX_ROWS_JUDGED_ONE_BY_ONE]
        return Q(pk__in=[pk for pk, queues in pollers if seen & {*queue_names_in(queues)}])
    if issubclass(model, Batch):  # its counts are about all of its queues
        batches = rows.values_list("pk", "queues")[:MAX_ROWS_JUDGED_ONE_BY_ONE]
        return Q(pk__in=[pk for pk, queues in batches if queues and {*queues} <= {*names}])
    if issubclass(model, SavedSearch):
        searches = rows.values_list("pk", "owner", "query")[:MAX_ROWS_JUDGED_ONE_BY_ONE]
        return Q(pk__in=[pk for pk, owner, text in searches if owner == actor.name or sees_search(text, actor)])
    if issubclass(model, BulkOperation):
        entries = AuditEntry.objects.using(rows.db).filter(operation=OuterRef("pk"), queue__in=names)
        return Q(Exists(entries)) | _own(actor)
    if issubclass(model, AuditEntry):
        return Q(queue__in=names) | _own(actor)
    if any(field.name == "queue" for field in model._meta.concrete_fields):
        return Q(queue__in=names)
    return Q(pk__in=[])  # about all queues together, such as a report of the pipeline


def _own(actor: Actor) -> Q:
    """Return the condition for what the actor did; a token of some queues is not its user."""
    return Q(pk__in=[]) if actor.scope.queues else Q(actor_id=actor.key)


def owns(operation: BulkOperation, actor: Actor) -> bool:
    """Whether the actor ordered it. A token of some queues is not its user."""
    return bool(operation.actor_id) and operation.actor_id == actor.key and not actor.scope.queues


def check_cancel(operation: BulkOperation, verb: Verb, actor: Actor) -> None:
    """Raise ``PermissionDenied`` unless the actor may cancel an operation with this verb, or put its tasks back."""
    queues = queues_of(operation.query)
    check(verb, "cancelled", actor)
    if actor.user is None or (not queues and owns(operation, actor)):
        return
    for queue in queues or all_queues():
        check(verb, "cancelled", actor, queue)


def visible_names(names: Iterable[str], actor: Actor) -> list[str]:
    """Return those of the names that the actor may view."""
    return [name for name in names if actor.sees(name)]
