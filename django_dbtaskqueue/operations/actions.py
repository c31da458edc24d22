"""Actions of operators on tasks, each with its report and its record: the audit entry and Django's ``LogEntry``.

Pages, commands and the API act through here. Permission and reason are checked before anything is written. The change
and its record are one transaction; if users are in another database, one there and one here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from django.apps import apps
from django.db import router, transaction
from django.db.models import BooleanField, ExpressionWrapper, Model
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.flow.selection import base_rows
from django_dbtaskqueue.models import AbstractTask, AuditEntry
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, bounded_count
from django_dbtaskqueue.operations.permissions import Actor, Verb, check, narrow
from django_dbtaskqueue.operations.task_changes import columns_of, named, record_changes
from django_dbtaskqueue.operations.verbs import ONE_TASK_VERBS, TaskVerb, VerbOptions

MAX_TASKS_PER_ACTION = 1000  # more are a bulk operation
MAX_IDS_IN_AUDIT = 100  # that an audit entry names, of the changed and for each reason of the skipped
ADDITION, CHANGE, DELETION = 1, 2, 3  # Django's action flags; the admin need not be installed


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """What is to be done. ``query`` is how the tasks were found; it goes to the record."""

    verb: TaskVerb
    reason: str = ""
    options: VerbOptions = field(default_factory=VerbOptions)
    query: str = ""


@dataclass(slots=True)
class Report:
    """What an action did: the tasks it changed, and for each reason the tasks it skipped."""

    changed: int = 0
    skips: dict[str, list[int]] = field(default_factory=dict)
    tasks: list[AbstractTask] = field(default_factory=list)  # those changed, as they were before

    @property
    def skipped(self) -> int:
        return sum(map(len, self.skips.values()))


@dataclass(frozen=True, slots=True)
class Preview:
    """What a request would do, from bounded counts; None where counting took too long."""

    request: ActionRequest
    selected: ApproxCount | None
    eligible: ApproxCount | None
    estimate: int | None = None  # of the selection, by the planner, where it was not counted to its end
    running: ApproxCount | None = None  # of those that would change; None if it was not counted

    @property
    def sentences(self) -> list[str]:
        """The effect and the numbers, in words."""
        lines = [str(self.request.verb.effect)]
        if self.selected is None:
            lines.append(_("More tasks match than could be counted in time."))
        else:
            words = ngettext("%(count)s task matches.", "%(count)s tasks match.", self.selected.number)
            lines.append(words % {"count": self.selected})
        if self.estimate is not None:
            lines.append(_("The database estimates ≈%(number)s.") % {"number": f"{self.estimate:,}"})
        if self.eligible and self.eligible == self.selected:
            lines.append(_("%(count)s would change.") % {"count": self.eligible})
        elif self.eligible is not None:
            reason = self.request.verb.skipped(self.request.options)
            lines.append(
                _("%(count)s would change; the others are skipped: %(reason)s.")
                % {"count": self.eligible, "reason": reason}
            )
        if self.running:
            words = ngettext("%(count)s of them runs now.", "%(count)s of them run now.", self.running.number)
            lines.append(words % {"count": self.running})
        return lines


def preview(tasks: TaskQuerySet, request: ActionRequest) -> Preview:
    """Count what is selected, what would change and, if the verb may end leases, what of it runs; bounded counts."""
    eligible = request.verb.eligible(tasks, request.options)
    ends_leases = Status.PROCESSING in request.verb.sources
    running = bounded_count(eligible.filter(status=Status.PROCESSING)) if ends_leases else None
    return Preview(request, bounded_count(tasks), bounded_count(eligible), running=running)


def act(tasks: TaskQuerySet, request: ActionRequest, actor: Actor) -> Report:
    """Carry out a request on up to 1,000 tasks and record it, in one transaction.

    Raises ``PermissionDenied`` without the verb's permission, and ``OperationRefused`` without a reason that is needed
    or for too many tasks. Tasks that do not fit, or of a queue that the actor may not change, are skipped.
    """
    check(request.verb, request.reason, actor)
    tasks = tasks.using(base_rows(tasks).db)  # statuses are judged where they are written: a replica may lag behind
    # Not ordered by the database: with a limit, it could read the whole table in that order.
    ids = sorted(tasks.order_by().values_list("pk", flat=True)[: MAX_TASKS_PER_ACTION + 1])
    if len(ids) > MAX_TASKS_PER_ACTION:
        raise OperationRefused(
            _("%(verb)s on more than %(most)s tasks is a bulk operation: start one, or narrow the search.")
            % {"verb": request.verb.name, "most": f"{MAX_TASKS_PER_ACTION:,}"}
        )
    return _recorded(tasks.model._default_manager.using(tasks.db).all(), ids, request, actor)


def act_on_ids(tasks: TaskQuerySet, ids: Sequence[int], request: ActionRequest, actor: Actor) -> Report:
    """As ``act``, on those of ``tasks`` with these ids; an id without such a task is skipped with that reason.

    Without an id nothing is done, and nothing is recorded.
    """
    check(request.verb, request.reason, actor)
    if not ids:
        return Report()
    if len(ids) > MAX_TASKS_PER_ACTION:
        words = _("%(verb)s takes up to %(most)s ids at once, not %(number)s.")
        raise OperationRefused(
            words % {"verb": request.verb.name, "most": f"{MAX_TASKS_PER_ACTION:,}", "number": f"{len(ids):,}"}
        )
    if request.verb.name in ONE_TASK_VERBS and len(set(ids)) != 1:
        raise OperationRefused(_("%(verb)s changes one task at a time.") % {"verb": request.verb.name})
    return _recorded(tasks, sorted(set(ids)), request, actor)


def change(tasks: TaskQuerySet, ids: Sequence[int], request: ActionRequest, actor: Actor) -> Report:
    """Change those of these tasks that can be changed, and say why the others cannot. Call it in ``atomic``; no record.

    A task that is not in ``tasks``, or of a queue that the actor may not view, counts as not there.

    Each task that can be changed is read once, and locked by that. Rows that another transaction has locked are
    skipped: an action never waits for a processor's transaction.
    """
    rows = narrow(tasks, actor)
    eligible = request.verb.eligible(rows.filter(pk__in=ids), request.options)
    request.verb.lock_groups(eligible, request.options)
    locked = {row.pk: row for row in _lock(eligible, request.verb)}
    refused = request.verb.refused(list(locked.values()))
    left = [pk for pk in ids if pk not in locked]
    why = _reasons_for_others(rows.filter(pk__in=left), request) if left else {}
    queues = {row.queue for row in locked.values()} | {queue for queue, _reason in why.values()}
    denied = {queue for queue in queues if not request.verb.allowed(actor, queue)}
    report, skips = Report(), defaultdict(list)
    for pk in ids:
        queue, reason = why.get(pk, ("", _("there is no such task")))
        if pk in locked:
            queue, reason = locked[pk].queue, refused.get(pk, "")
        if queue in denied:
            reason = _("not permitted on queue %(queue)s") % {"queue": queue}
        if reason:
            skips[reason].append(pk)
        else:
            report.tasks.append(locked[pk])
    report.changed = request.verb.run(report.tasks, request.options, actor.name) if report.tasks else 0
    report.skips = dict(skips)
    return report


def _recorded(tasks: TaskQuerySet, ids: Sequence[int], request: ActionRequest, actor: Actor) -> Report:
    alias = tasks.db
    request.verb.check(tasks.model, alias, request.options, actor)
    with recorded(alias):
        # First a write: on SQLite it keeps other transactions from changing what is read next.
        entry = record(alias, actor, request.verb, query=request.query, reason=request.reason)
        report = change(tasks, ids, request, actor)
        log(actor, report.tasks, DELETION if request.verb.deletes else CHANGE, note(request))
        queues = {row.queue for row in report.tasks}
        entry.queue = queues.pop() if len(queues) == 1 else ""
        entry.changed, entry.skipped = report.changed, report.skipped
        entry.details = _details(request, report)
        entry.save(using=alias, update_fields=["queue", "changed", "skipped", "details"])
        record_changes(entry, request.verb, report.tasks)
    return report


def _details(request: ActionRequest, report: Report) -> dict[str, Any]:
    """Return what an audit entry keeps of an action: its options, the tasks, and those skipped by reason."""
    found: dict[str, Any] = {
        "task_ids": [row.pk for row in report.tasks][:MAX_IDS_IN_AUDIT],
        "tasks": named(report.tasks),
        "skips": {reason: len(ids) for reason, ids in report.skips.items()},
        "skipped_ids": {reason: ids[:MAX_IDS_IN_AUDIT] for reason, ids in report.skips.items()},
    }
    return found | ({"action": request.verb.words(request.options)} if request.verb.inputs else {})


def note(request: ActionRequest) -> str:
    """Return a request in words, for Django's log."""
    words = request.verb.words(request.options)
    return f"{words} ({request.reason})" if request.reason else words


def _reasons_for_others(tasks: TaskQuerySet, request: ActionRequest) -> dict[int, tuple[str, str]]:
    """Return the queue of each task that could not be locked, and why the verb does not change it."""
    verb = request.verb
    fits = ExpressionWrapper(verb.condition(tasks.model, request.options), output_field=BooleanField())
    wanted = ", ".join(sorted(verb.sources))

    def reason(status: str, *, fits: bool) -> str:
        if status not in verb.sources:
            return _("in %(status)s, not in %(wanted)s") % {"status": status, "wanted": wanted}
        return _("another transaction is changing it") if fits else verb.skipped(request.options)

    read = tasks.annotate(fits=fits).values_list("pk", "queue", "status", "fits")
    return {pk: (queue, reason(status, fits=fits)) for pk, queue, status, fits in read}


def _lock(tasks: TaskQuerySet, verb: TaskVerb) -> TaskQuerySet:
    """Return the rows that no other transaction has locked, with what an action needs; reading them locks them."""
    features = transaction.get_connection(tasks.db).features
    tasks = tasks.only(*columns_of(verb)).order_by("pk")
    if not features.has_select_for_update_skip_locked:
        return tasks
    return tasks.select_for_update(skip_locked=True, of=("self",) * features.has_select_for_update_of)


# -- the record --------------------------------------------------------------------------------------------------------


def record(alias: str, actor: Actor, verb: Verb, **columns: Any) -> AuditEntry:
    """Write an audit entry on the database of the action."""
    return AuditEntry.objects.using(alias).create(
        actor=actor.name[:200], actor_id=actor.key, source=actor.source, verb=verb.name, **columns
    )


def log(actor: Actor, rows: Sequence[Model], flag: int, message: str) -> None:
    """Write Django's log entries, if there is a user and the admin is installed."""
    if actor.user is not None and rows and apps.is_installed("django.contrib.admin"):
        entries: Any = apps.get_model("admin", "LogEntry")
        entries.objects.log_actions(actor.user.pk, rows, flag, message)


@contextmanager
def recorded(alias: str) -> Iterator[None]:
    """A transaction on the tasks' database for an action and its record, inside one on the database of Django's log."""
    installed = apps.is_installed("django.contrib.admin")
    outer = router.db_for_write(apps.get_model("admin", "LogEntry")) if installed else alias
    with transaction.atomic(using=outer), transaction.atomic(using=alias) if outer != alias else nullcontext():
        yield
