"""Bulk operations: a verb over all tasks that match a search, in chunks, by whoever has time.

``preview`` says what would happen, ``start`` orders it, and each ``turn`` carries out one chunk: its effect, the
operation's cursor (an id), its counts, the reason of every skipped task and the audit are one transaction under the
operation's row lock. So no chunk is done twice or by two workers at once, and after a kill the next worker goes on
where the last chunk ended. Tasks enqueued after the start are not touched.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import Max, QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.exceptions import OperationRefused, SearchTooSlow
from django_dbtaskqueue.models import BulkOperation
from django_dbtaskqueue.models.operations import CANCELLED, FAILED, UNFINISHED
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.actions import Order, note
from django_dbtaskqueue.operations.audit import ADDITION, CHANGE, Actor, check, check_search, log, record, recorded
from django_dbtaskqueue.operations.bulk_steps import end, step
from django_dbtaskqueue.operations.paginators import Count, bounded_count, estimate
from django_dbtaskqueue.operations.search.parse import Search, parse, to_text
from django_dbtaskqueue.operations.search.query import select, tasks_for
from django_dbtaskqueue.operations.timeouts import bounded
from django_dbtaskqueue.operations.verbs import BULK_VERBS, PURGE, Aging, TaskVerb

logger = logging.getLogger("django_dbtaskqueue")


@dataclass(frozen=True, slots=True)
class Preview:
    """What an operation would do, from bounded counts; None where counting took too long."""

    order: Order
    selected: Count | None
    eligible: Count | None
    about: int | None  # the planner's estimate of the selection, where it was not counted to its end

    @property
    def sentences(self) -> list[str]:
        """The effect and the numbers, in words."""
        lines = [str(self.order.verb.effect)]
        if self.selected is None:
            lines.append(_("More tasks match than could be counted in time."))
        else:
            lines.append(_("%(count)s tasks match.") % {"count": self.selected})
        if self.about is not None:
            lines.append(_("The database thinks about ≈%(number)s.") % {"number": f"{self.about:,}"})
        if self.eligible is not None:
            reason = self.order.verb.skipped(self.order.aging)
            lines.append(
                _("%(count)s would change; the others are skipped: %(reason)s.")
                % {"count": self.eligible, "reason": reason}
            )
        return lines


def order_of(
    verb: str | TaskVerb, q: str | Search, *, reason: str = "", aging: Aging | None = None
) -> tuple[Order, Search]:
    """Return an order and its search, read and checked. Raises ``SearchError`` and ``OperationRefused``."""
    name = verb if isinstance(verb, str) else verb.name
    if name not in BULK_VERBS:
        words = _("There is no verb %(verb)s for tasks; they are %(names)s.")
        raise OperationRefused(words % {"verb": repr(name), "names": ", ".join(BULK_VERBS)})
    search = parse(q) if isinstance(q, str) else q
    if not search:
        words = _(
            "An empty search would %(verb)s every task of every queue. Say which: queue:claims, status:ERROR, age:>1d, "
            "or all of these."
        )
        raise OperationRefused(words % {"verb": name})
    if name == PURGE.name and not (len(search.terms) == 1 and len(search.queues()) == 1):
        raise OperationRefused(_("purge empties one whole queue: queue:claims. To delete a part of one, use delete."))
    return Order(BULK_VERBS[name], reason.strip(), aging or Aging(), to_text(search)), search


def preview(verb: str | TaskVerb, q: str | Search, using: str | None = None, *, aging: Aging | None = None) -> Preview:
    """Count what matches and what would change, each up to 10,000 and within ``OPERATIONS_TIMEOUT``. Writes nothing."""
    order, search = order_of(verb, q, aging=aging)
    tasks = select(search, tasks_for(search, using, write=True))
    selected = _counted(tasks)
    eligible = _counted(order.verb.eligible(tasks, order.aging))
    about = estimate(tasks) if selected is None or selected.more else None
    return Preview(order, selected, eligible, about)


def start(
    verb: str | TaskVerb,
    q: str | Search,
    user: Any,
    reason: str = "",
    using: str | None = None,
    *,
    way: str = "admin",
    aging: Aging | None = None,
    most: int | None = None,
) -> BulkOperation:
    """Order a bulk operation and record who did; pollers carry it out. ``most``: tasks to look at, at most.

    ``user`` None is the command line. Raises ``PermissionDenied``, ``OperationRefused`` (no reason for a verb that
    needs one, an empty search) and ``SearchError``; nothing is written then.
    """
    order, search = order_of(verb, q, reason=reason, aging=aging)
    actor = Actor(user, way)
    queues = search.queues()
    check(order.verb, order.reason, actor, queues[0] if len(queues) == 1 else None)
    check_search(search, actor)
    tasks = tasks_for(search, using, write=True)
    expected = preview(order.verb, search, tasks.db, aging=order.aging).selected
    top = int(tasks.aggregate(top=Max("pk"))["top"] or 0)
    first = int(tasks.order_by("pk").values_list("pk", flat=True).first() or 1) - 1
    with recorded(tasks.db):
        operation = BulkOperation(
            verb=order.verb.name,
            query=order.query,
            location=tasks.model._meta.label_lower,
            options={"older_than": order.aging.older_than.total_seconds(), "to": order.aging.to},
            most=most,
            reason=order.reason,
            actor=actor.name[:200],
            user_key=actor.key,
            way=way,
            first=first,
            cursor=first,
            top=top,
            estimate=None if expected is None else expected.number,
            estimate_more=expected is None or expected.more,
        )
        operation.save(using=tasks.db, force_insert=True)
        operation.refresh_from_db(using=tasks.db)
        queue = queues[0] if len(queues) == 1 else ""
        record(tasks.db, actor, order.verb, query=order.query, reason=order.reason, queue=queue, operation=operation)
        log(actor, [operation], ADDITION, f"{note(order)}: {order.query}")
    return operation


def cancel(pk: int, user: Any, reason: str = "", using: str | None = None, *, way: str = "admin") -> bool:
    """Stop an operation between two chunks; what is done stays done. False: it had ended.

    Needs the permission of the operation's verb.
    """
    alias = using or tasks_for(Search(), None, write=True).db
    actor = Actor(user, way)
    with recorded(alias):
        operation = BulkOperation.objects.using(alias).select_for_update().get(pk=pk)
        check(BULK_VERBS[operation.verb], "cancelled", actor)
        if operation.state not in UNFINISHED:
            return False
        words = _("cancelled by %(who)s") % {"who": actor.name}
        end(operation, CANCELLED, f"{words}: {reason}" if reason else words)
        operation.save(using=alias)
        details = {"cancelled": operation.pk, "changed": operation.changed}
        record(
            alias, actor, BULK_VERBS[operation.verb], query=operation.query, reason=reason, details=details,
            operation=operation,
        )  # fmt: skip
        log(actor, [operation], CHANGE, words)
    return True


def turn(using: str) -> bool:
    """Carry out one chunk of one unfinished operation; return whether there was one to carry out.

    Operations take turns. One whose search, verb or user is no longer valid ends as FAILED, with the reason. A database
    that is away, or a deadlock, is raised; the chunk is undone, and the next turn does it again.
    """
    waiting = BulkOperation.objects.using(using).filter(state__in=UNFINISHED).order_by("update_time", "pk")
    due = waiting.values_list("pk", flat=True).first()
    if due is None:
        return False
    try:
        with transaction.atomic(using=using):
            operation = _taken(waiting, due)
            if operation is None:
                return False
            due = operation.pk
            step(operation)
    except OperationalError:
        raise
    except Exception as error:
        logger.exception("Bulk operation %s failed", due)
        _failed(due, using, f"{type(error).__name__}: {error}")
    return True


def _taken(waiting: QuerySet[BulkOperation], due: int) -> BulkOperation | None:
    """Lock the operation whose turn it is; None when somebody else has it."""
    connection = connections[waiting.db]
    if connection.features.has_select_for_update_skip_locked:
        return waiting.select_for_update(skip_locked=True).first()
    # A write comes first: the lock of the whole database that it takes is held to the end of the chunk.
    if not waiting.filter(pk=due).update(update_time=Now()):
        return None
    return waiting.get(pk=due)


def _failed(pk: int, using: str, words: str) -> None:
    rows = BulkOperation.objects.using(using).filter(pk=pk, state__in=UNFINISHED)
    rows.update(state=FAILED, note=words, finish_time=Now(), update_time=Now())


def _counted(tasks: TaskQuerySet) -> Count | None:
    try:
        with bounded(tasks.db):
            return bounded_count(tasks)
    except SearchTooSlow:
        return None
