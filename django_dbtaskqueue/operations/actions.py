"""One act of an operator: who does what to which tasks, why, what came of it, and the record of it.

Every face acts through here. Permission and reason are asked for before anything is written; the change, the audit
and Django's ``LogEntry`` are one transaction (where users live in another database, one there and one here).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from django.db import transaction
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

    Rows that somebody has locked at this moment are skipped, too: nobody waits for a processor's transaction.
    """
    verb, report, rows = order.verb, Report(), model._default_manager.using(alias)
    found = {row[0]: row[1:] for row in rows.filter(pk__in=ids).values_list("pk", "queue", "status")}
    reasons = _reasons(verb, {queue for queue, _status in found.values()}, actor)
    skips: defaultdict[str, list[int]] = defaultdict(list)
    candidates = []
    for pk in ids:
        why = reasons(*found[pk]) if pk in found else _("there is no such task")
        skips[why].append(pk) if why else candidates.append(pk)
    fitting = verb.eligible(rows.filter(pk__in=candidates), order.aging)
    ready = set(fitting.values_list("pk", flat=True))
    locked = list(_lock(fitting).values_list("pk", flat=True))
    if young := [pk for pk in candidates if pk not in ready]:
        skips[verb.skipped(order.aging)] += young
    if busy := sorted(ready.difference(locked)):
        skips[_("somebody else is changing it")] += busy
    report.changed = verb.run(rows.filter(pk__in=locked), order.aging)
    report.skips = dict(skips)
    return report


def _recorded(model: type[AbstractTask], alias: str, ids: Sequence[int], order: Order, actor: Actor) -> Report:
    with recorded(alias):
        # First a write: where there are no row locks, it is what keeps others from changing what is read next.
        entry = record(alias, actor, order.verb, query=order.query, reason=order.reason)
        rows = list(model._default_manager.using(alias).filter(pk__in=ids).only("queue", "reference"))
        report = change(model, alias, ids, order, actor)
        left = {pk for skipped in report.skips.values() for pk in skipped}
        changed = [row for row in rows if row.pk not in left]
        log(actor, changed, DELETION if order.verb.removes else CHANGE, note(order))
        queues = sorted({row.queue for row in changed})
        entry.queue = queues[0] if len(queues) == 1 else ""
        entry.changed, entry.skipped = report.changed, report.skipped
        entry.details = {"task_ids": [row.pk for row in changed][:NAMED], "skips": _counted(report)}
        entry.save(using=alias)
    return report


def note(order: Order) -> str:
    """Return an order in words, for Django's log."""
    words = str(order.verb.label)
    if order.verb.ages:
        days = order.aging.older_than.days
        age = ngettext("older than %(days)s day", "older than %(days)s days", days) % {"days": days}
        words += f": {age}, {order.aging.to}"
    return f"{words} ({order.reason})" if order.reason else words


def _counted(report: Report) -> dict[str, int]:
    return {reason: len(ids) for reason, ids in report.skips.items()}


def _reasons(verb: TaskVerb, queues: set[str], actor: Actor) -> Callable[[str, str], str]:
    denied = {queue for queue in queues if not actor.may(verb, queue)}
    sources = {str(status) for status in verb.sources}
    wanted = ", ".join(sorted(sources))

    def reason(queue: str, status: str) -> str:
        if queue in denied:
            return _("not permitted on queue %(queue)s") % {"queue": queue}
        if status not in sources:
            return _("in %(status)s, not in %(wanted)s") % {"status": status, "wanted": wanted}
        return ""

    return reason


def _lock(tasks: TaskQuerySet) -> TaskQuerySet:
    features = transaction.get_connection(tasks.db).features
    if not features.has_select_for_update_skip_locked:
        return tasks.order_by("pk")
    return tasks.order_by("pk").select_for_update(skip_locked=True, of=("self",) * features.has_select_for_update_of)
