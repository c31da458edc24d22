"""Tasks over HTTP: search and count them, read one, apply verbs by ids or by a search, follow bulk operations.

Each view takes its ``Call`` and returns a document; ``urls`` is the table that says what each is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, TypedDict, TypeVar

from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.http import Http404
from django.utils.translation import gettext as _

from django_dbtaskqueue.api.routing import Call
from django_dbtaskqueue.core.columns import LONG
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.models import AbstractTask, Attempt, BulkOperation
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.actions import ActionRequest, act_on_ids
from django_dbtaskqueue.operations.bounded_reads import ApproxCount, bounded_count, statement_timeout
from django_dbtaskqueue.operations.bounds import BadInput
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.paging import LOOK_ON_TIME, Page, look_through
from django_dbtaskqueue.operations.permissions import VIEW_PAYLOAD, Actor, check, check_search
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, of_queue, to_text
from django_dbtaskqueue.operations.search.query import TaskFilter, tasks_for
from django_dbtaskqueue.operations.serializers import (
    Document,
    OperationDocument,
    attempt_of,
    detail,
    operation_document,
    summary,
)
from django_dbtaskqueue.operations.verb_inputs import VerbOptions
from django_dbtaskqueue.operations.verbs import BULK_VERBS, ID_VERBS, PURGE, TaskVerb
from django_dbtaskqueue.operations.visibility import check_queue, check_there, narrow, sees_operation

M = TypeVar("M", bound=Model)
MAX_ATTEMPTS = 50
TaskSummary = Annotated[Document, "TaskSummary"]
TaskDetail = Annotated[Document, "Task"]


class TaskPage(TypedDict):
    """One page of tasks, the newest first. ``before`` leads to the next page.

    A search without an index can end before it has ``limit`` tasks: then ``looked_at`` tasks were read, back to the
    time ``back_to``, and ``before`` goes on from there. ``looked_at`` is null when everything was read.
    """

    query: str
    tasks: list[TaskSummary]
    before: int | None
    looked_at: int | None
    back_to: datetime | None


class BoundedCount(TypedDict):
    """A number of tasks; ``more``: there are more than were counted."""

    count: int
    more: bool


class TaskCount(BoundedCount):
    """How many tasks match; ``more``: there are more than were counted."""

    query: str


class ActionReport(TypedDict):
    """What an action did: ``skips`` has the ids of the tasks it left as they were, by reason."""

    changed: int
    skipped: int
    skips: dict[str, list[int]]


class PreviewDocument(TypedDict):
    """What a verb would do. A number is None where counting took too long."""

    query: str
    selected: BoundedCount | None
    would_change: BoundedCount | None
    estimate: int | None
    words: list[str]


class OperationPage(TypedDict):
    """Bulk operations, the newest first. ``before`` leads to the next page."""

    operations: list[OperationDocument]
    before: int | None


class CancelledOperation(OperationDocument):
    """The operation; ``cancelled``: it had not ended."""

    cancelled: bool


def tasks(call: Call) -> TaskPage:
    """Search tasks."""
    task_filter, found = _searched(call)
    rows: list[AbstractTask] = []
    read, page = 0, Page(rows)
    deadline = clock.monotonic() + LOOK_ON_TIME.total_seconds()
    before = call.given["before"] or None
    for page in look_through(task_filter.search, found.defer(*LONG), call.given["limit"], before=before):
        rows, read = rows + page.rows, read + page.window
        if clock.monotonic() > deadline:
            break
    seen = {queue: call.actor.may(VIEW_PAYLOAD, queue) for queue in {row.queue for row in rows}}
    return {
        "query": to_text(task_filter.search),
        "tasks": [summary(row, payload=seen[row.queue]) for row in rows],
        "before": page.older,
        "looked_at": read if page.window else None,
        "back_to": page.back_to,
    }


def count_tasks(call: Call) -> TaskCount:
    """Count the tasks that match a search, up to 10,000."""
    task_filter, found = _searched(call)
    with statement_timeout(found.db):
        counted = bounded_count(found)
    return {"query": to_text(task_filter.search), "count": counted.number, "more": counted.more}


def task(call: Call, pk: int) -> TaskDetail:
    """Return one task with its failed attempts, and why it does not run; secrets are masked."""
    rows = _table(call)
    may_view(call.actor, rows.model)
    found: AbstractTask | None = narrow(rows, call.actor).filter(pk=pk).annotate(clock=Now()).first()
    if found is None:
        raise Http404(f"There is no task {pk}. If its queue has its own table, name the queue: ?queue=…")
    attempts = Attempt.objects.using(rows.db).filter(location=rows.model._meta.label_lower, task_id=pk)
    newest = attempts.order_by("-total_attempt")[:MAX_ATTEMPTS]
    payload = call.actor.may(VIEW_PAYLOAD, found.queue)
    return detail(found, payload=payload) | {
        "explanation": explain(found),
        "attempts": [attempt_of(row, payload=payload) for row in newest],
    }


def act_on_task_ids(call: Call, verb: str) -> ActionReport:
    """Apply a verb to up to 1,000 tasks at once, in one transaction."""
    known, queue = _verb(verb, ID_VERBS), call.given["queue"]
    if queue:
        check(known, call.given["reason"], call.actor)
        check_there([queue], call.actor)
    tasks, query = _table(call), to_text(of_queue(queue)) if queue else ""
    request = ActionRequest(known, call.given["reason"], _options(call, known), query)
    report = act_on_ids(tasks.filter(queue=queue) if queue else tasks, call.given["ids"], request, call.actor)
    return {"changed": report.changed, "skipped": report.skipped, "skips": report.skips}


def preview_search(call: Call, verb: str) -> PreviewDocument:
    """Tell what a verb would do to all tasks that match a search. Changes nothing."""
    known = _verb(verb)
    order, search = bulk.request_of(known, call.given["q"], options=_options(call, known))
    may_view(call.actor, tasks_for(search).model)
    check(order.verb, "previewed", call.actor)
    check_search(search, call.actor)
    seen = bulk.preview(order.verb, search, options=order.options, actor=call.actor)
    return {
        "query": order.query,
        "selected": _bounded(seen.selected),
        "would_change": _bounded(seen.eligible),
        "estimate": seen.estimate,
        "words": seen.sentences,
    }


def act_on_search(call: Call, verb: str) -> OperationDocument:
    """Start a bulk operation on all tasks that match a search. Pollers carry it out."""
    known = _verb(verb)
    operation = bulk.start(
        known, call.given["q"], call.actor, call.given["reason"],
        options=_options(call, known), max_tasks=call.given["limit"],
    )  # fmt: skip
    return operation_document(operation)


def operations(call: Call) -> OperationPage:
    """List bulk operations."""
    may_view(call.actor, BulkOperation)
    rows = narrow(BulkOperation.objects.using(alias_for("", None)).all(), call.actor)
    if call.given["state"]:
        rows = rows.filter(state=call.given["state"])
    found, before = page(rows, call)
    return {"operations": [operation_document(row) for row in found], "before": before}


def operation(call: Call, pk: int) -> OperationDocument:
    """Return the progress of a bulk operation."""
    may_view(call.actor, BulkOperation)
    return operation_document(_operation(call, pk))


def cancel_operation(call: Call, pk: int) -> CancelledOperation:
    """Cancel a bulk operation. What is done stays done."""
    found = _operation(call, pk)
    done = bulk.cancel(pk, call.actor, call.given["reason"])
    found.refresh_from_db()
    return {**operation_document(found), "cancelled": done}


def put_back_operation(call: Call, pk: int) -> OperationDocument:
    """Order that the tasks which a bulk operation changed become what they were before it."""
    return operation_document(bulk.put_back(_operation(call, pk).pk, call.actor, call.given["reason"]))


def purge_queue(call: Call, queue: str) -> OperationDocument:
    """Start the bulk deletion of every task of a queue."""
    check_queue(queue, call.actor)
    check(PURGE, call.given["reason"], call.actor, queue)
    check_there([queue], call.actor)
    if call.given["confirm"] != queue:
        raise BadInput("confirm", f'must repeat the name, because every task of the queue is deleted: "{queue}".')
    return operation_document(bulk.start("purge", of_queue(queue), call.actor, call.given["reason"]))


# -- helpers -----------------------------------------------------------------------------------------------------------


def page(rows: QuerySet[M], call: Call) -> tuple[list[M], int | None]:
    """Return a page of rows, the newest first, and the id at which the next page begins."""
    limit, before = call.given["limit"], call.given["before"]
    with statement_timeout(rows.db):
        found = list((rows.filter(pk__lt=before) if before else rows).order_by("-pk")[: limit + 1])
    return found[:limit], found[limit - 1].pk if len(found) > limit else None


def may_view(actor: Actor, model: type[Model]) -> None:
    """Check the permission of the model: the table of a queue has its own."""
    permission = f"{model._meta.app_label}.view_{model._meta.model_name}"
    if actor.user is not None and not actor.user.has_perm(permission):
        text = _("%(who)s needs the permission %(permission)s.")
        raise PermissionDenied(text % {"who": actor.name, "permission": permission})


def _searched(call: Call) -> tuple[TaskFilter, TaskQuerySet]:
    given = {name: call.given[name] for name in ("q", *QUALIFIERS) if call.given[name]}
    search = TaskFilter(given, queryset=tasks_for(Search())).checked().search
    tasks = tasks_for(search)
    may_view(call.actor, tasks.model)
    check_search(search, call.actor)
    task_filter = TaskFilter(given, queryset=narrow(tasks, call.actor)).checked()
    return task_filter, task_filter.qs


def _table(call: Call) -> TaskQuerySet:
    queue = call.given["queue"]
    return tasks_for(of_queue(queue) if queue else Search(), write=True)


def _verb(name: str, verbs: Mapping[str, TaskVerb] = BULK_VERBS) -> TaskVerb:
    if name not in verbs:
        raise Http404(f"There is no verb {name!r}; they are {', '.join(verbs)}.")
    return verbs[name]


def _operation(call: Call, pk: int) -> BulkOperation:
    found = BulkOperation.objects.using(alias_for("", None)).filter(pk=pk).first()
    if found is None or not sees_operation(found, call.actor):
        raise Http404(f"There is no bulk operation {pk}.")
    return found


def _options(call: Call, verb: TaskVerb) -> VerbOptions:
    sent = {one.name: call.given[one.name] for one in verb.inputs}
    return verb.options_of({name: value for name, value in sent.items() if value is not None})


def _bounded(count: ApproxCount | None) -> BoundedCount | None:
    return None if count is None else {"count": count.number, "more": count.more}
