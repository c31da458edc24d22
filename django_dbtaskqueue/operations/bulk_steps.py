"""One chunk of a bulk operation, inside the transaction that holds the operation's row."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.db.models import F
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext as _

from django_dbtaskqueue.db.session import model_named
from django_dbtaskqueue.models import BulkOperation, BulkSkip
from django_dbtaskqueue.models.operations import FINISHED, FIRST_WINDOW, RUNNING
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.actions import Order, Report, change, note
from django_dbtaskqueue.operations.audit import CHANGE, Actor, log
from django_dbtaskqueue.operations.search.query import select
from django_dbtaskqueue.operations.verbs import BULK_VERBS, Aging

CHUNK = 500  # tasks of one chunk, and so of one transaction
LARGEST_WINDOW = 1_000_000  # ids looked through by one statement
LOOKING = 1.0  # seconds of one turn spent on ids where nothing matches


def step(operation: BulkOperation) -> None:
    """Carry out the next chunk and write what came of it; end the operation after the last one.

    Raises ``PermissionDenied`` when whoever ordered it may no longer do so.
    """
    verb, actor, alias = BULK_VERBS[operation.verb], _actor(operation), str(operation._state.db)
    if not actor.may(verb):
        words = _("%(who)s may not use %(verb)s any more.")
        raise PermissionDenied(words % {"who": operation.actor, "verb": verb.name})
    if operation.start_time is None:
        operation.start_time = Now()
    operation.state = RUNNING
    options = operation.options
    aging = Aging(timedelta(seconds=options["older_than"]), options["to"])
    order = Order(verb, operation.reason, aging, operation.query)
    tasks: TaskQuerySet = model_named(operation.location)._default_manager.using(alias).all()
    ids = _next_chunk(operation, tasks, select(operation.query, tasks))
    report = change(tasks.model, alias, ids, order, actor) if ids else Report()
    _count_in(operation, report)
    if operation.cursor >= operation.top or _remaining(operation) == 0:
        end(operation, FINISHED)
        log(actor, [operation], CHANGE, f"{note(order)}: {operation.changed} / {operation.skipped}")
    operation.update_time = Now()
    operation.save(using=alias)


def _next_chunk(operation: BulkOperation, tasks: TaskQuerySet, matching: TaskQuerySet) -> list[int]:
    """Return the ids of the next tasks that match, and move the cursor to where the search for them ended.

    Looks through windows of ids: whatever the search, no statement reads more than one window. Windows grow while
    nothing is found; gaps between ids cost nothing.
    """
    deadline = monotonic() + LOOKING
    size = min(CHUNK, _remaining(operation))
    while operation.cursor < operation.top:
        rest = tasks.filter(pk__gt=operation.cursor, pk__lte=operation.top).order_by("pk")
        first = rest.values_list("pk", flat=True).first()
        if first is None:
            operation.cursor = operation.top
            break
        last = min(first + operation.window - 1, operation.top)
        found = matching.filter(pk__gte=first, pk__lte=last).order_by("pk")
        ids = list(found.values_list("pk", flat=True)[:size])
        operation.cursor = ids[-1] if len(ids) == size else last
        if ids:
            operation.window = FIRST_WINDOW
            return ids
        operation.window = min(operation.window * 2, LARGEST_WINDOW)
        if monotonic() > deadline:
            break
    return []


def _remaining(operation: BulkOperation) -> int:
    return CHUNK if operation.most is None else operation.most - operation.changed - operation.skipped


def _count_in(operation: BulkOperation, report: Report) -> None:
    alias = str(operation._state.db)
    operation.changed += report.changed
    operation.skipped += report.skipped
    skips = dict(operation.skips)
    for reason, ids in report.skips.items():
        skips[reason] = skips.get(reason, 0) + len(ids)
    operation.skips = skips
    BulkSkip.objects.using(alias).bulk_create(
        BulkSkip(operation=operation, reason=reason[:500], count=len(ids), task_ids=ids)
        for reason, ids in report.skips.items()
    )
    ordered = operation.audit.using(alias).order_by("pk").values_list("pk", flat=True)[:1]
    operation.audit.using(alias).filter(pk__in=list(ordered)).update(
        changed=F("changed") + report.changed, skipped=F("skipped") + report.skipped
    )


def end(operation: BulkOperation, state: str, words: str = "") -> None:
    """Set an operation's end; the caller saves it."""
    operation.state = state
    operation.note = words or operation.note
    operation.finish_time = Coalesce(F("finish_time"), Now())


def _actor(operation: BulkOperation) -> Actor:
    """Return who ordered it, as they are now: rights taken away meanwhile are gone for the next chunk, too."""
    if not operation.user_key:
        return Actor(None, operation.way)
    users: Any = get_user_model()._default_manager
    user = users.filter(pk=operation.user_key).first()
    if user is None:
        raise PermissionDenied(_("The user %(who)s, who ordered it, is gone.") % {"who": operation.actor})
    return Actor(user, operation.way)
