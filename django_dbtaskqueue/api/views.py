"""The JSON API over HTTP: tasks, bulk operations, queues, schedules, pollers, failures, the audit and the doctor.

Each view takes its ``ApiCall`` and returns a document; ``urls`` is the table that says what each is sent.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, TypedDict, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.http import Http404
from django.utils import timezone

from django_dbtaskqueue import models
from django_dbtaskqueue.api.routing import ApiCall, may_view
from django_dbtaskqueue.core.columns import LISTED, LONG
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.db.session import alias_for, aliases_of, model_for
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.models.control import queue_names_in
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations import bulk, permissions, queue_stats, schedules as schedule_control, serializers
from django_dbtaskqueue.operations.actions import ActionRequest, ActReport, Preview, act_on_ids, tasks_of
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, bounded_count, statement_timeout
from django_dbtaskqueue.operations.doctor import Finding, examine
from django_dbtaskqueue.operations.explain import Explanation, explain
from django_dbtaskqueue.operations.lookup import aliases_in, elsewhere, locations
from django_dbtaskqueue.operations.queue_control import POLLER_VERBS, apply_to_queues, change_settings, command_pollers
from django_dbtaskqueue.operations.related_tasks import BatchDocument, batch_documents, listed_batches
from django_dbtaskqueue.operations.schedules import ScheduleDocument, schedule_document
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, text_of, to_text
from django_dbtaskqueue.operations.search.query import LOOK_ON_TIME, Page, TaskFilter, look_through, select, tasks_for
from django_dbtaskqueue.operations.serializers import OPERATION, BadInput, Document, OperationDocument, RowDocument
from django_dbtaskqueue.operations.verbs import BULK_VERBS, ID_VERBS, PURGE, QUEUE_VERBS

M = TypeVar("M", bound=Model)
T = TypeVar("T")
MAX_ATTEMPTS = 50
MAX_LISTED_ROWS = 500  # pollers
TASK = RowDocument(
    "Task", "A task with its failed attempts. Payloads and results need the permission to see them.",
    models.Task, LISTED,
    {"message": str, "explanation": Explanation, "attempts": list[serializers.AttemptDocument]},
    (*LONG, "process_result"),
)  # fmt: skip
POLLER = RowDocument(
    "Poller", "A poller as it last reported. Alive: it has not stopped, and has not missed three heartbeats.",
    models.Poller,
    (
        "instance", "host", "pid", "version", "release", "state", "slots", "held", "finished", "failed", "start_time",
        "heartbeat_time", "requested_command",
    ),
    {"alive": bool, "queues": list[str]},
)  # fmt: skip
FAILURE = RowDocument(
    "Failure", "A failure group: attempts that failed, by window, and tasks in ERROR or POISON because of it.",
    models.FailureGroup,
    ("fingerprint", "queue", "error_type", "frame", "message", "newest", "release", "first_seen", "last_seen"),
    serializers.document_types(queue_stats.FailureStats),
)  # fmt: skip
AUDIT = RowDocument(
    "AuditEntry", "One act of an operator.", models.AuditEntry,
    (
        "id", "time", "actor", "source", "verb", "queue", "query", "reason", "changed", "skipped", "details",
        "operation_id",
    ),
)  # fmt: skip
CANCELLED = replace(OPERATION, name="CancelledOperation", more={**OPERATION.more, "cancelled": bool})
FailureDocument = Annotated[Document, FAILURE]


class TaskPage(TypedDict):
    """One page of tasks, the newest first. ``before`` leads to the next page. ``elsewhere``: what is left out.

    A search without an index can end before it has ``limit`` tasks: then ``looked_at`` tasks were read, back to the
    time ``back_to``, and ``before`` goes on from there. ``looked_at`` is null when everything was read.
    """

    query: str
    elsewhere: str
    tasks: list[serializers.TaskSummary]
    before: int | None
    looked_at: int | None
    back_to: datetime | None


class TaskCount(TypedDict):
    """How many tasks match. ``elsewhere``: which databases are left out."""

    query: str
    elsewhere: str
    count: ApproxCount


class OperationPage(TypedDict):
    """Bulk operations, the newest first. ``before`` leads to the next page."""

    operations: list[OperationDocument]
    before: int | None


def tasks(call: ApiCall) -> TaskPage:
    """Search tasks."""
    search, found = _searched(call)
    rows: list[models.AbstractTask] = []
    read, page = 0, Page(rows)
    deadline = clock.monotonic() + LOOK_ON_TIME.total_seconds()
    for page in look_through(search, found.defer(*LONG), call.given["limit"], before=call.given["before"] or None):
        rows, read = rows + page.rows, read + page.window
        if clock.monotonic() > deadline:
            break
    seen = {queue: call.actor.may(permissions.VIEW_PAYLOAD, queue) for queue in {row.queue for row in rows}}
    return {
        "query": to_text(search),
        "elsewhere": elsewhere(search.queues(), found),
        "tasks": [serializers.summary(row, payload=seen[row.queue]) for row in rows],
        "before": page.older,
        "looked_at": read if page.window else None,
        "back_to": page.back_to,
    }


def count_tasks(call: ApiCall) -> TaskCount:
    """Count the tasks that match a search, up to 10,000."""
    search, found = _searched(call)
    with statement_timeout(found.db):
        return {"query": to_text(search), "elsewhere": elsewhere(search.queues(), found), "count": bounded_count(found)}


def task(call: ApiCall, pk: int) -> Annotated[Document, TASK]:
    """Return one task with its failed attempts, and why it does not run; secrets are masked."""
    may_view(call.actor, model_for(call.given["queue"]))
    rows = tasks_of([pk], call.given["queue"], call.actor, call.given["database"])
    found = _there(permissions.narrow(rows, call.actor).filter(pk=pk).annotate(clock=Now()).first(), f"task {pk}.")
    attempts = models.Attempt.objects.using(rows.db).filter(location=rows.model._meta.label_lower, task_id=pk)
    newest = attempts.order_by("-total_attempt")[:MAX_ATTEMPTS]
    payload = call.actor.may(permissions.VIEW_PAYLOAD, found.queue)
    return serializers.detail(found, payload=payload) | {
        "explanation": explain(found),
        "attempts": [serializers.attempt_of(row, payload=payload) for row in newest],
    }


def act_on_task_ids(call: ApiCall, verb: str) -> ActReport:
    """Apply a verb to up to 1,000 tasks at once, in one transaction."""
    known, queue = _verb(verb, ID_VERBS), call.given["queue"]
    permissions.check(known, call.given["reason"], call.actor)
    options, query = known.options_of(call.given), queue and text_of(queue=queue)
    request = ActionRequest(known, call.given["reason"], options, query)
    tasks = tasks_of(call.given["ids"], queue, call.actor, call.given["database"])
    return act_on_ids(tasks, call.given["ids"], request, call.actor)


def preview_search(call: ApiCall, verb: str) -> Preview:
    """Tell what a verb would do to all tasks that match a search. Changes nothing."""
    known = _verb(verb, BULK_VERBS)
    order, search = bulk.request_of(known, call.given["q"], options=known.options_of(call.given))
    may_view(call.actor, tasks_for(search).model)
    permissions.check(order.verb, "previewed", call.actor)
    permissions.check_search(search, call.actor)
    return bulk.preview(order.verb, search, call.given["database"], options=order.options, actor=call.actor)


def act_on_search(call: ApiCall, verb: str) -> OperationDocument:
    """Start a bulk operation on all tasks that match a search. Pollers carry it out."""
    known, given = _verb(verb, BULK_VERBS), call.given
    more = {"options": known.options_of(call.given), "max_tasks": given["limit"], "using": given["database"]}
    return OPERATION.of(bulk.start(known, given["q"], call.actor, given["reason"], **more))


def operations(call: ApiCall) -> OperationPage:
    """List bulk operations; ``queue``: those on the database of this queue, or on its shard ``database``."""
    permissions.check_there(filter(None, [call.given["queue"]]), call.actor)
    found, before = page(_visible(call, models.BulkOperation, "state"), call)
    return {"operations": [OPERATION.of(row) for row in found], "before": before}


def operation(call: ApiCall, pk: int) -> OperationDocument:
    """Return the progress of a bulk operation."""
    return OPERATION.of(_operation(call, pk))


def cancel_operation(call: ApiCall, pk: int) -> Annotated[Document, CANCELLED]:
    """Cancel a bulk operation. What is done stays done."""
    found = _operation(call, pk)
    done = bulk.cancel(pk, call.actor, call.given["reason"], found._state.db)
    found.refresh_from_db()
    return CANCELLED.of(found, cancelled=done)


def put_back_operation(call: ApiCall, pk: int) -> OperationDocument:
    """Order that the tasks which a bulk operation changed become what they were before it."""
    return OPERATION.of(bulk.put_back(_operation(call, pk), call.actor, call.given["reason"]))


def purge_queue(call: ApiCall, queue: str) -> OperationDocument:
    """Start the bulk deletion of every task of a queue."""
    permissions.check_queue(queue, call.actor)
    reason, shard = call.given["reason"], call.given["database"]
    permissions.check(PURGE, reason, call.actor, queue)
    permissions.check_there([queue], call.actor)
    if call.given["confirm"] != queue:
        raise BadInput("confirm", f'must repeat the name, because every task of the queue is deleted: "{queue}".')
    return OPERATION.of(bulk.start(PURGE, text_of(queue=queue), call.actor, reason, shard))


# -- helpers -----------------------------------------------------------------------------------------------------------


def page(rows: QuerySet[M], call: ApiCall) -> tuple[list[M], int | None]:
    """Return a page of rows, the newest first, and the id at which the next page begins."""
    limit, before = call.given["limit"], call.given["before"]
    with statement_timeout(rows.db):
        found = list((rows.filter(pk__lt=before) if before else rows).order_by("-pk")[: limit + 1])
    return found[:limit], found[limit - 1].pk if len(found) > limit else None


def _there(found: T | None, what: str) -> T:
    if not found:
        raise Http404(f"There is no {what}")
    return found


def _visible(call: ApiCall, model: type[M], *fields: str) -> QuerySet[M]:
    alias = alias_for(call.given.get("queue", ""), call.given.get("database"), write=False)
    wanted = {name: call.given[name] for name in fields if call.given[name]}
    return permissions.narrow(model._default_manager.using(alias).filter(**wanted), call.actor)


def _searched(call: ApiCall) -> tuple[Search, TaskQuerySet]:
    given = {name: call.given[name] for name in ("q", *QUALIFIERS) if call.given[name]}
    search = TaskFilter(given, queryset=tasks_for(Search())).checked().search
    tasks = tasks_for(search, call.given["database"])
    may_view(call.actor, tasks.model)
    permissions.check_search(search, call.actor)
    return search, select(search, permissions.narrow(tasks, call.actor))


def _verb(name: str, verbs: Mapping[str, permissions.V]) -> permissions.V:
    return _there(verbs.get(name), f"verb {name!r}; they are {', '.join(verbs)}.")


def _operation(call: ApiCall, pk: int) -> models.BulkOperation:
    queue = call.given["queue"]
    aliases = dict.fromkeys([alias_for(queue, None), *(aliases_of(queue) if queue else aliases_in(locations()))])
    rows = [row for alias in aliases for row in models.BulkOperation.objects.using(alias).filter(pk=pk)]
    found = [row for row in rows if permissions.sees_record(row, call.actor)]
    if len(found) > 1 and not queue:
        raise BadInput("queue", f"must be given: several databases have a bulk operation {pk}.")
    return _there(found, f"bulk operation {pk}.")[0]


# -- monitoring --------------------------------------------------------------------------------------------------------


class QueuePause(TypedDict):
    """A queue, and its pause if it is paused."""

    queue: str
    paused: queue_stats.Pause | None


class QueueList(TypedDict):
    """The health of all queues, and each queue that is known."""

    health: queue_stats.Health
    queues: list[QueuePause]


class QueueDetail(QueuePause):
    """One queue: its figures, its pause, and what operators set while it runs."""

    overrides: dict[str, object]
    stats: queue_stats.QueueStats


class AuditPage(TypedDict):
    """Acts of operators, the newest first. ``before`` leads to the next page."""

    entries: list[Annotated[Document, AUDIT]]
    before: int | None


def health(call: ApiCall) -> queue_stats.Health:
    """Judge all queues: are they on time, served, paused?"""
    return queue_stats.overview(only=call.actor.visible_queues).health


def status(call: ApiCall) -> queue_stats.QueuesOverview:
    """Return the figures of every queue, or of one."""
    found, name = queue_stats.overview(only=call.actor.visible_queues), call.given["queue"]
    permissions.check_there(filter(None, [name]), call.actor)
    return replace(found, queues=queue_stats.with_limits([row for row in found.queues if name in ("", row.queue)]))


def trend(call: ApiCall) -> list[queue_stats.Point]:
    """Return attempts by outcome, run times and waits over time, of every queue or of one."""
    permissions.check_there(filter(None, [name := call.given["queue"]]), call.actor)
    return queue_stats.series(None, call.given["since"], name or None, among=call.actor.visible_queues)


def doctor(call: ApiCall) -> list[Finding]:
    """Examine queues, pollers, settings and the database."""
    return [one for one in examine() if all(map(call.actor.sees, one.queues))]


def queues(call: ApiCall) -> QueueList:
    """Return the health, the known queues, and the pause of each."""
    paused = queue_stats.pauses(_visible(call, models.Queue))
    names = sorted({*known_queues(), *paused}) if call.actor.sees_all else call.actor.visible_queues or []
    return {"health": health(call), "queues": [{"queue": name, "paused": paused.get(name)} for name in names]}


def queue(call: ApiCall, queue: str) -> QueueDetail:
    """Return one queue."""
    _there(call.actor.sees(queue) and queue in permissions.all_queues(), f"queue {queue}.")
    rows = models.Queue.objects.using(alias_for(queue, None, write=False)).filter(pk=queue)
    return {
        "queue": queue,
        "paused": queue_stats.pauses(rows).get(queue),
        "overrides": next((row.changes for row in rows), {}),
        "stats": queue_stats.with_limits([queue_stats.stats_of_queue(queue)])[0],
    }


def act_on_queue(call: ApiCall, queue: str, verb: str) -> int:
    """Pause a queue, for a time, until a time, or until it is resumed; or resume it."""
    known, length, until = _verb(verb, QUEUE_VERBS), call.given["for"], call.given["until"]
    if None not in (length, until):
        raise TaskQueueError("A pause ends after a time (for) or at one (until): give one of both.")
    until = timezone.now() + length if length is not None else until
    return apply_to_queues(known, [queue], call.actor, reason=call.given["reason"], until=until)


def change_queue_settings(call: ApiCall, queue: str) -> dict[str, object]:
    """Set runtime overrides of a queue, and remove others. Pollers follow within a heartbeat."""
    given = call.given
    try:
        return change_settings(queue, given["values"], call.actor, reset=given["reset"], reason=given["reason"])
    except ImproperlyConfigured as error:  # of what was sent, so not the site's fault
        raise TaskQueueError(str(error)) from None


def batches(call: ApiCall) -> list[BatchDocument]:
    """Return the newest batches, and how many tasks of each are in which status."""
    return batch_documents(listed_batches(call.actor))


def schedules(call: ApiCall) -> list[ScheduleDocument]:
    """Return the schedules, in words and with their next times."""
    return [schedule_document(row, call.actor) for row in schedule_control.listed(call.actor)]


def schedule(call: ApiCall, schedule: str) -> ScheduleDocument:
    """Return one schedule."""
    return schedule_document(_schedule(call, schedule), call.actor)


def make_schedule(call: ApiCall, schedule: str) -> ScheduleDocument:
    """Make a schedule."""
    made = schedule_control.add_schedule(schedule, call.given, call.actor, reason=call.given["reason"])
    return schedule_document(made, call.actor)


def change_schedule(call: ApiCall, schedule: str) -> ScheduleDocument:
    """Change fields of a schedule. They win over the code until it is reset."""
    _schedule(call, schedule)
    changed = schedule_control.edit_schedule(schedule, call.given, call.actor, reason=call.given["reason"])
    return schedule_document(changed, call.actor)


def act_on_schedule(call: ApiCall, schedule: str, action: str) -> ScheduleDocument:
    """Pause, resume, run, reset or delete a schedule; return it as it is then, or was."""
    verb = _verb(action, {name.removesuffix("_schedule"): one for name, one in schedule_control.SCHEDULE_VERBS.items()})
    _schedule(call, schedule)
    row = schedule_control.act_on_schedule(verb, schedule, call.actor, reason=call.given["reason"])
    return schedule_document(row, call.actor)


def _schedule(call: ApiCall, name: str) -> models.Schedule:
    return _there(schedule_control.find_schedule(name, call.actor), f"schedule {name}.")


def pollers(call: ApiCall) -> list[Annotated[Document, POLLER]]:
    """Return the pollers as they last reported."""
    rows = _visible(call, models.Poller)
    living = queue_stats.alive(rows.db)
    found = rows.order_by("-heartbeat_time", "pk")[:MAX_LISTED_ROWS]
    names = [list(filter(call.actor.sees, queue_names_in(row.queues))) for row in found]
    return [POLLER.of(row, alive=row.instance in living, queues=one) for row, one in zip(found, names, strict=True)]


def command_poller(call: ApiCall, poller: str, command: str) -> int:
    """Send a command to a poller. It follows at its next heartbeat."""
    verb = _verb(command, POLLER_VERBS)
    given = {"reason": call.given["reason"], "using": alias_for("", None)}
    return _there(command_pollers([poller], verb.name, call.actor, **given), f"running poller {poller}.")


def failures(call: ApiCall) -> list[FailureDocument]:
    """Return failure groups."""
    rows = _visible(call, models.FailureGroup, "queue")
    with statement_timeout(rows.db):
        return _with_stats(rows.order_by("-last_seen", "pk")[: call.given["limit"]])


def failure(call: ApiCall, fingerprint: str) -> FailureDocument:
    """Return one failure group."""
    found = _with_stats(_visible(call, models.FailureGroup).filter(pk=fingerprint))
    return _there(found, f"failure group {fingerprint}.")[0]


def _with_stats(rows: QuerySet[models.FailureGroup]) -> list[FailureDocument]:
    stats = queue_stats.stats_of_groups([row.fingerprint for row in rows], rows.db)
    texts = [{"message": masked_text(row.message), "newest": masked_text(row.newest)} for row in rows]
    documents = map(serializers.as_document, stats)
    return [FAILURE.of(row, **one, **more) for row, one, more in zip(rows, texts, documents, strict=True)]


def audit(call: ApiCall) -> AuditPage:
    """Return who did what."""
    found, before = page(_visible(call, models.AuditEntry, "queue", "actor", "verb"), call)
    return {"entries": [AUDIT.of(row, details=masked(row.details)) for row in found], "before": before}
