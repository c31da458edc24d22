"""One act of an operator: who does what to which tasks, why, what came of it, and the record of it.

Every face acts through here. Permission and reason are asked for before anything is written; the change, the audit
and Django's ``LogEntry`` are one transaction (where users live in another database, one there and one here).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from django.db import transaction
from django.db.models import BooleanField, ExpressionWrapper
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.flow.selection import base_rows
from django_dbtaskqueue.models import AbstractTask
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.audit import CHANGE, DELETION, Actor, check, log, record, recorded
from django_dbtaskqueue.operations.verbs import Aging, TaskVerb

MOST = 1000  # tasks of one act; more are a bulk operation
NAMED = 100  # ids that an audit entry names


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done. ``query`` is how the tasks were found, for the record."""

    verb: TaskVerb
    reason: str = ""
    aging: Aging = field(default_factory=Aging)
    query: str = ""


@dataclass(slots=True)
class Report:
    """What came of an act: the tasks changed, and for each reason those left as they were."""

    changed: int = 0
    skips: dict[str, list[int]] = field(default_factory=dict)
    tasks: list[AbstractTask] = field(default_factory=list)  # those changed, as they were before

    @property
    def skipped(self) -> int:
        """How many were left as they were."""
        return sum(map(len, self.skips.values()))


def act(tasks: TaskQuerySet, order: Order, actor: Actor) -> Report:
    """Carry an order out on up to 1,000 tasks and record it, in one transaction.

    Raises ``PermissionDenied`` without the verb's permission, and ``OperationRefused`` for want of a reason or for too
    many tasks. Tasks of queues the actor may not touch are skipped with that reason, like all that do not fit.
    """
    check(order.verb, order.reason, actor)
    tasks = tasks.using(base_rows(tasks).db)  # statuses are judged where they are written: a replica may lag behind
    # Not ordered by the database: with a bound, it could walk through the whole table in that order.
    ids = sorted(tasks.order_by().values_list("pk", flat=True)[: MOST + 1])
    if len(ids) > MOST:
        raise OperationRefused(
            _("%(verb)s on more than %(most)s tasks is a bulk operation: start one, or narrow the search.")
            % {"verb": order.verb.name, "most": f"{MOST:,}"}
        )
    return _recorded(tasks.model, tasks.db, ids, order, actor)


def act_on_ids(model: type[AbstractTask], alias: str, ids: Sequence[int], order: Order, actor: Actor) -> Report:
    """As ``act``, on tasks by id; an id without a task is skipped with that reason."""
    check(order.verb, order.reason, actor)
    if len(ids) > MOST:
        words = _("%(verb)s takes up to %(most)s ids at once, not %(number)s.")
        raise OperationRefused(words % {"verb": order.verb.name, "most": f"{MOST:,}", "number": f"{len(ids):,}"})
    return _recorded(model, alias, sorted(set(ids)), order, actor)


def change(model: type[AbstractTask], alias: str, ids: Sequence[int], order: Order, actor: Actor) -> Report:
    """Change what can be changed of these tasks and say why the others cannot. Call it in ``atomic``; no record.

    Each task that can be changed is read once, and locked by that. Rows that another transaction has locked are
    skipped: this never waits for a processor's transaction.
    """
    rows = model._default_manager.using(alias)
    locked = {row.pk: row for row in _lock(order.verb.eligible(rows.filter(pk__in=ids), order.aging))}
    left = [pk for pk in ids if pk not in locked]
    why = _reasons_for_others(rows.filter(pk__in=left), order) if left else {}
    queues = {row.queue for row in locked.values()} | {queue for queue, _reason in why.values()}
    denied = {queue for queue in queues if not actor.may(order.verb, queue)}
    report, skips = Report(), defaultdict(list)
    for pk in ids:
        queue, reason = (locked[pk].queue, "") if pk in locked else why.get(pk, ("", _("there is no such task")))
        if queue in denied:
            reason = _("not permitted on queue %(queue)s") % {"queue": queue}
        if reason:
            skips[reason].append(pk)
        else:
            report.tasks.append(locked[pk])
    report.changed = order.verb.run(report.tasks, order.aging) if report.tasks else 0
    report.skips = dict(skips)
    return report


def _recorded(model: type[AbstractTask], alias: str, ids: Sequence[int], order: Order, actor: Actor) -> Report:
    with recorded(alias):
        # First a write: where there are no row locks, it is what keeps others from changing what is read next.
        entry = record(alias, actor, order.verb, query=order.query, reason=order.reason)
        report = change(model, alias, ids, order, actor)
        log(actor, report.tasks, DELETION if order.verb.removes else CHANGE, note(order))
        queues = {row.queue for row in report.tasks}
        entry.queue = queues.pop() if len(queues) == 1 else ""
        entry.changed, entry.skipped = report.changed, report.skipped
        skips = {reason: len(ids) for reason, ids in report.skips.items()}
        entry.details = {"task_ids": [row.pk for row in report.tasks][:NAMED], "skips": skips}
        entry.save(using=alias, update_fields=["queue", "changed", "skipped", "details"])
    return report


def note(order: Order) -> str:
    """Return an order in words, for Django's log."""
    words = str(order.verb.label)
    if order.verb.ages:
        days = order.aging.older_than.days
        age = ngettext("older than %(days)s day", "older than %(days)s days", days) % {"days": days}
        words += f": {age}, {order.aging.to}"
    return f"{words} ({order.reason})" if order.reason else words


def _reasons_for_others(tasks: TaskQuerySet, order: Order) -> dict[int, tuple[str, str]]:
    """Return the queue of each task that could not be locked, and why the verb does not change it."""
    verb = order.verb
    fits = ExpressionWrapper(verb.condition(order.aging), output_field=BooleanField())
    wanted = ", ".join(sorted(verb.sources))

    def reason(status: str, *, fits: bool) -> str:
        if status not in verb.sources:
            return _("in %(status)s, not in %(wanted)s") % {"status": status, "wanted": wanted}
        return _("somebody else is changing it") if fits else verb.skipped(order.aging)

    read = tasks.annotate(fits=fits).values_list("pk", "queue", "status", "fits")
    return {pk: (queue, reason(status, fits=fits)) for pk, queue, status, fits in read}


def _lock(tasks: TaskQuerySet) -> TaskQuerySet:
    """Return the rows that no other transaction has locked, with what an act needs; reading them locks them."""
    features = transaction.get_connection(tasks.db).features
    tasks = tasks.only("queue", "group_key", "reference").order_by("pk")
    if not features.has_select_for_update_skip_locked:
        return tasks
    return tasks.select_for_update(skip_locked=True, of=("self",) * features.has_select_for_update_of)
