"""Actions of operators on tasks, each with its report and its record: the audit entry and Django's ``LogEntry``.

Pages, commands and the API act through here. Permission and reason are checked before anything is written. The change
and its record are one transaction; if users are in another database, one there and one here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.apps import apps
from django.db import router, transaction
from django.db.models import BooleanField, ExpressionWrapper, Model, QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _, ngettext

from django_dbtaskqueue.core.columns import COPIED, InsertOptions, TaskOptions
from django_dbtaskqueue.core.exceptions import OperationRefused, TaskQueueError
from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import alias_for, model_for, only_alias, row_key
from django_dbtaskqueue.flow.enqueue import enqueue_task
from django_dbtaskqueue.flow.move import locked_groups, not_overfull, set_back
from django_dbtaskqueue.flow.placement import own_fields
from django_dbtaskqueue.flow.selection import free_references, same_rows, with_row_locks
from django_dbtaskqueue.models import AbstractTask, AuditEntry, BulkOperation, FailureGroup, TaskChange
from django_dbtaskqueue.models.control import FINISHED
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, bounded_count
from django_dbtaskqueue.operations.lookup import locations, tasks_on
from django_dbtaskqueue.operations.permissions import Actor, Verb, check, check_there, narrow, sole
from django_dbtaskqueue.operations.verbs import ONE_TASK_VERBS, TaskVerb, VerbOptions

# What an action can change of a task, and "put back as it was" restores.
RESTORED = (
    "queue", "status", "final_status", "attempt", "priority", "ready_time", "next_process_time", "finish_time",
    "expire_time", "poller_instance", "parked_by",
)  # fmt: skip
MAX_ACTIONS_OF_TASK = 100
ABSENT = "(absent)"  # in a difference: the key is not there
Columns = dict[str, Any]


def record_changes(entry: AuditEntry, verb: TaskVerb, tasks: Sequence[AbstractTask]) -> None:
    """Record the tasks of one table that an action just changed; ``tasks`` are as they were before."""
    if not tasks or verb.deletes:
        return
    edited = None
    if verb.name == "edit":
        edited = difference(masked(tasks[0].payload), masked(same_rows(tasks).values_list("payload", flat=True)[0]))
    ids, before = [task.pk for task in tasks], _packed(tasks) if verb.undoable else None
    after_time = same_rows(tasks).values_list("last_update_time", flat=True)[0]
    given = {"before": before, "after_time": after_time, "difference": edited}
    change_of(entry, tasks[0]._meta.label_lower, ids, **given).save(using=entry._state.db)


def change_of(entry: AuditEntry, location: str, ids: list[int], **columns: object) -> TaskChange:
    """Return the record of what an entry did to these tasks of a table, or why it left them."""
    span = {"first_task_id": min(ids), "last_task_id": max(ids), "task_ids": ids}
    return TaskChange(audit=entry, operation_id=entry.operation_id, location=location, **span, **columns)


def difference(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """Return what differs between two JSON values, both masked: the path, before, after."""
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in {**before, **after}}
        return [row for key, pair in pairs.items() for row in difference(*pair, f"{path}.{key}" if path else key)]
    return [] if before == after else [{"path": path, "before": masked(before), "after": masked(after)}]


def actions_on(task: AbstractTask) -> list[TaskChange]:
    """Return what operators did to a task, the newest first, each with its audit entry."""
    here = {"location": task._meta.label_lower, "first_task_id__lte": task.pk, "last_task_id__gte": task.pk}
    near = TaskChange.objects.using(task._state.db).filter(**here, skip_reason="").order_by("-pk")
    found = near.select_related("audit").defer("before")[:MAX_ACTIONS_OF_TASK]
    return [change for change in found if task.pk in change.task_ids]


def restore_tasks(change: TaskChange, tasks: TaskQuerySet, verb: TaskVerb, actor: Actor) -> "ActReport":
    """Put the tasks of a change back as they were, but those that changed since, or that the actor may not change."""
    before = dict(zip(change.task_ids, map(_as_waiting, _unpacked(change, tasks.model)), strict=True))
    rows = tasks.filter(pk__in=change.task_ids)
    now = {task.pk: task for task in rows.only("queue", "reference", "last_update_time")}
    taken = _taken(tasks.model._default_manager.using(tasks.db), now.values(), before) if verb.name == "move" else ()
    skips: dict[str, list[int]] = defaultdict(list)
    wanted = {}
    for pk in change.task_ids:
        to = before[pk]["queue"]
        if pk not in now:
            skips[_("there is no such task")].append(pk)
        elif now[pk].last_update_time != change.after_time:
            skips[_("changed since")].append(pk)
        elif pk in taken:
            skips[_("its reference is taken in its old queue")].append(pk)
        elif denied := [one for one in {now[pk].queue, to} if not verb.allowed(actor, one, to)]:
            skips[_("not permitted on queue %(queue)s") % {"queue": denied[0]}].append(pk)
        else:
            wanted[pk] = before[pk]
    queues = {columns["queue"] for columns in wanted.values()} if verb.name in ("cancel", "move") else ()
    with not_overfull(tasks, queues):
        back = set_back(rows.filter(pk__in=[*wanted]), wanted, lambda row: row.last_update_time == change.after_time)
    if back and verb.name == "move":  # the references are taken no more where the tasks were moved to
        free_references(tasks.db, now[back[0].pk].queue, [row.reference for row in back])
    if missed := sorted(wanted.keys() - {task.pk for task in back}):
        skips[_("another transaction is changing it")] += missed
    return ActReport(len(back), dict(skips), back)


def _as_waiting(before: Columns) -> Columns:
    """Return what a task was, or before its attempt if it ran: an attempt that was ended cannot go on."""
    if before["status"] != Status.PROCESSING:
        return before
    held = {"attempt": max(0, before["attempt"] - 1), "next_process_time": before["ready_time"]}
    return {**before, **held, "poller_instance": None, "start_time": None, "status": Status.CREATED}


def _taken(rows: QuerySet[AbstractTask], tasks: Iterable[AbstractTask], before: Mapping[int, Columns]) -> set[int]:
    """Return the tasks whose reference another task has in the queue they came from."""
    found, wanted = set(), defaultdict[str, dict[str, int]](dict)
    for task in tasks:
        if task.reference is not None:
            wanted[before[task.pk]["queue"]][task.reference] = task.pk
    for queue, ids in wanted.items():
        there = rows.filter(queue=queue, reference__in=ids).values_list("reference", flat=True)
        found |= {ids[reference] for reference in there if reference is not None}
    return found


def _packed(tasks: Sequence[AbstractTask]) -> dict[str, list[Any]]:
    """Return what ``restore_tasks`` needs, by column; a column of equal values holds one."""
    found = {}
    for name in RESTORED:
        values = [getattr(task, name) for task in tasks]
        plain = [value.isoformat() if isinstance(value, datetime) else value for value in values]
        found[name] = plain[:1] if len(set(plain)) == 1 else plain
    return found


def _unpacked(change: TaskChange, model: type[AbstractTask]) -> list[Columns]:
    number, columns = len(change.task_ids), {}
    for name, packed in (change.before or {}).items():
        field: Any = model._meta.get_field(name)
        columns[name] = [field.to_python(value) for value in (packed * number if len(packed) == 1 else packed)]
    return [{name: values[at] for name, values in columns.items()} for at in range(number)]


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
class ActReport:
    """What an action did: how many tasks it changed, and for each reason the ids of those it left as they were."""

    DOCUMENT: ClassVar = ("changed", "skipped", "skips")
    changed: int = 0
    skips: dict[str, list[int]] = field(default_factory=dict)
    tasks: list[AbstractTask] = field(default_factory=list)  # those changed, as they were before
    operation: BulkOperation | None = None  # by which it can be put back

    @property
    def skipped(self) -> int:
        return sum(map(len, self.skips.values()))


@dataclass(frozen=True, slots=True)
class Preview:
    """What a verb would do: a number is None where counting took too long."""

    DOCUMENT: ClassVar = ("query", "selected", "eligible", "running", "estimate", "sentences")
    request: ActionRequest
    selected: ApproxCount | None
    eligible: ApproxCount | None
    estimate: int | None = None  # of the selection, by the planner, where it was not counted to its end
    running: ApproxCount | None = None  # of those that would change; None if it was not counted
    elsewhere: str = ""  # which databases are left out, in words

    @property
    def query(self) -> str:
        return self.request.query

    @property
    def sentences(self) -> list[str]:
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
            words = _("%(count)s would change; the others are skipped: %(reason)s.")
            lines.append(words % {"count": self.eligible, "reason": self.request.verb.skipped(self.request.options)})
        if self.running:
            words = ngettext("%(count)s of them runs now.", "%(count)s of them run now.", self.running.number)
            lines.append(words % {"count": self.running})
        return [*lines, self.elsewhere] if self.elsewhere else lines


def preview(
    tasks: TaskQuerySet, request: ActionRequest, count: Callable[[TaskQuerySet], ApproxCount | None] = bounded_count
) -> Preview:
    """Count what is selected, what would change and, if the verb may end leases, what of it runs; bounded counts."""
    eligible = tasks.filter(request.verb.condition(tasks.model, request.options))
    running = count(eligible.filter(status=Status.PROCESSING)) if Status.PROCESSING in request.verb.sources else None
    return Preview(request, count(tasks), count(eligible), running=running)


def tasks_of(ids: Sequence[int], queue: str, actor: Actor, using: str | None = None) -> TaskQuerySet:
    """Return the tasks of a queue, or of the common table, whose ids are given. Check permissions first.

    Each table has its own ids: raises ``TaskQueueError`` for one of several, if no queue or no shard is named.
    """
    if queue:
        check_there([queue], actor)
        return tasks_on(only_alias(queue, using), model_for(queue)).filter(queue=queue)
    common = alias_for("", using), model_for("")
    for place in {*locations(using)} - {common}:
        if other := narrow(tasks_on(*place).filter(pk__in=ids[:MAX_TASKS_PER_ACTION]), actor).first():
            raise TaskQueueError(f"Queue {other.queue!r} has a task {other.pk} in a table of its own. Name the queue.")
    return tasks_on(*common)


def act_on_ids(tasks: TaskQuerySet, ids: Sequence[int], request: ActionRequest, actor: Actor) -> ActReport:
    """Carry out a request on those of ``tasks`` with these ids, at most 1,000, and record it, in one transaction.

    Raises ``PermissionDenied`` without the verb's permission, and ``OperationRefused`` without a reason that is needed
    or for too many tasks. Skipped with a reason are ids without such a task, tasks that do not fit, and tasks of a
    queue that the actor may not change. Without an id nothing is done, and nothing is recorded.
    """
    check(request.verb, request.reason, actor)
    if not ids:
        return ActReport()
    if len(ids) > MAX_TASKS_PER_ACTION:
        words = _("%(verb)s takes up to %(most)s ids at once, not %(number)s.")
        numbers = {"most": f"{MAX_TASKS_PER_ACTION:,}", "number": f"{len(ids):,}"}
        raise OperationRefused(words % {"verb": request.verb.name, **numbers})
    if request.verb.name in ONE_TASK_VERBS and len(set(ids)) != 1:
        raise OperationRefused(_("%(verb)s changes one task at a time.") % {"verb": request.verb.name})
    alias, verb, ids = tasks.db, request.verb, sorted(set(ids))
    verb.check(tasks.model, alias, request.options, actor)
    with recorded(alias):
        report = change_tasks(tasks, ids, request, actor)
        log(actor, report.tasks, DELETION if verb.deletes else CHANGE, verb.words(request.options, request.reason))
        details, counts = _details(request, report), {"changed": report.changed, "skipped": report.skipped}
        if report.changed and verb.undoable:  # stored as a bulk operation that has ended, it is put back as one
            found = replace(request, query=f"id:{','.join(map(str, ids[:MAX_IDS_IN_AUDIT]))}")
            report.operation = new_operation(
                tasks, found, actor, first_id=ids[0] - 1, last_id=ids[-1], cursor=ids[-1], state=FINISHED,
                estimate=len(ids), skips=details["skips"], start_time=Now(), finish_time=Now(), **counts,
            )  # fmt: skip
        given = {"query": request.query, "reason": request.reason, "operation": report.operation, **counts}
        entry = record(alias, actor, verb, queue=sole({row.queue for row in report.tasks}), details=details, **given)
        record_changes(entry, verb, report.tasks)
    return report


def change_tasks(tasks: TaskQuerySet, ids: Sequence[int], request: ActionRequest, actor: Actor) -> ActReport:
    """Change those of these tasks that can be changed, and say why the others cannot. Call it in ``atomic``; no record.

    A task that is not in ``tasks``, or of a queue that the actor may not view, counts as not there. Rows that another
    transaction has locked are skipped: an action never waits for a processor's transaction.
    """
    rows, verb = narrow(tasks, actor), request.verb
    eligible = rows.filter(verb.condition(rows.model, request.options), pk__in=ids)
    with locked_groups(eligible, verb.edge, {"queue": request.options.queue}):
        restored, payload = () if verb.deletes else RESTORED, ("payload",) if verb.name == "edit" else ()
        columns = ("queue", "status", "group_key", "reference", "fingerprint", "watched", *restored, *payload)
        locked = {row.pk: row for row in with_row_locks(eligible.only(*columns))}
        refused = verb.refused(list(locked.values()))
        left = [pk for pk in ids if pk not in locked]
        why = _reasons_for_others(rows.filter(pk__in=left), request) if left else {}
        queues = {row.queue for row in locked.values()} | {queue for queue, _reason in why.values()}
        denied = {queue for queue in queues if not verb.allowed(actor, queue, request.options.queue)}
        report, skips = ActReport(), defaultdict(list)
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
        report.changed = verb.run(report.tasks, request.options, actor.name) if report.tasks else 0
    report.skips = dict(skips)
    return report


def new_operation(tasks: TaskQuerySet, request: ActionRequest, actor: Actor, **columns: object) -> BulkOperation:
    """Store a bulk operation on a table."""
    return BulkOperation.objects.using(tasks.db).create(
        verb=request.verb.name, query=request.query, reason=request.reason, location=tasks.model._meta.label_lower,
        **{"options": request.options.to_json(), **actor.columns, **columns},
    )  # fmt: skip


def _details(request: ActionRequest, report: ActReport) -> dict[str, Any]:
    """Return what the audit says: the first tasks by id and reference, with the error that each failed of, and more."""
    shown = report.tasks[:MAX_IDS_IN_AUDIT]
    prints = {task.fingerprint for task in shown if task.fingerprint}
    groups = FailureGroup.objects.using(shown[0]._state.db).filter(pk__in=prints) if prints else ()
    errors = {group.pk: group.error_type for group in groups}
    facts = [{"id": t.pk, "reference": t.reference, "error": errors.get(t.fingerprint or "")} for t in shown]
    return {
        "tasks": [{name: value for name, value in one.items() if value} for one in facts],
        "skips": {reason: len(ids) for reason, ids in report.skips.items()},
        "skipped_ids": {reason: ids[:MAX_IDS_IN_AUDIT] for reason, ids in report.skips.items()},
        **({"action": request.verb.words(request.options)} if request.verb.inputs else {}),
    }


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


def record(alias: str, actor: Actor, verb: Verb | str, **columns: object) -> AuditEntry:
    """Write an audit entry on the database of the action. The verb is a word where only the command line has it."""
    return AuditEntry.objects.using(alias).create(verb=getattr(verb, "name", verb), **actor.columns, **columns)


def log(actor: Actor, rows: Sequence[Model], flag: int, message: str) -> None:
    """Write Django's log entries of rows of one table, if there is a user and the admin is installed."""
    if actor.user is not None and rows and apps.is_installed("django.contrib.admin"):
        entry: Any = apps.get_model("admin", "LogEntry")
        kind = apps.get_model("contenttypes", "ContentType").objects.get_for_model(rows[0], for_concrete_model=False)
        facts = {"user_id": actor.user.pk, "content_type": kind, "action_flag": flag, "change_message": message}
        entry.objects.bulk_create(entry(**facts, object_id=row_key(row), object_repr=f"{row!s:.200}") for row in rows)


@contextmanager
def recorded(alias: str) -> Iterator[None]:
    """A transaction on the tasks' database for an action and its record, inside one on the database of Django's log.

    On SQLite it begins with a write, which keeps other transactions from changing what the action reads.
    """
    installed = apps.is_installed("django.contrib.admin")
    outer = router.db_for_write(apps.get_model("admin", "LogEntry")) if installed else alias
    with transaction.atomic(using=outer), transaction.atomic(using=alias) if outer != alias else nullcontext():
        if not transaction.get_connection(alias).features.has_select_for_update_skip_locked:
            AuditEntry.objects.using(alias).filter(pk=0).update(changed=0)
        yield


def enqueue_copy(task: AbstractTask) -> AbstractTask:
    """Insert a new task with all that was enqueued with ``task`` but its reference, due now, with the same ``ttl``."""
    given = {column.option: getattr(task, column.name) for column in COPIED if column.option}
    given["lease"] = None if task.lease_seconds is None else timedelta(seconds=task.lease_seconds)
    given["columns"] = {name: getattr(task, name) for name, one in own_fields(type(task)).items() if not one.generated}
    # The time to live counts from the due time, in whose place a task that runs or has completed has its lease's end.
    due = {"PROCESSING": task.ready_time, "COMPLETED": task.create_time}.get(task.status) or task.next_process_time
    given["ttl"] = None if task.expire_time is None else max(timedelta(0), task.expire_time - due)
    # The payload is JSON already, so its type cannot be seen from it; and the budget is no argument.
    stored = {column.db: getattr(task, column.name) for column in COPIED if not column.option}
    return enqueue_task(task.queue, TaskOptions(**given), InsertOptions(using=str(task._state.db)), stored)
