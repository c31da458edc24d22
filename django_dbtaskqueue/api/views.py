"""The JSON API: search and count tasks, read one, apply verbs by ids or by a search, pause and start queues."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import F, Model
from django.db.models.functions import Now
from django.http import Http404, HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _

from django_dbtaskqueue.api.auth import ApiError, JsonObject, body, endpoint, typed
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.columns import LONG
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.models import Attempt, BulkOperation, Queue
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations import bulk, queue_control
from django_dbtaskqueue.operations.actions import ActionRequest, act_on_ids
from django_dbtaskqueue.operations.bounded_reads import bounded_count, statement_timeout
from django_dbtaskqueue.operations.permissions import VIEW_PAYLOAD, Actor, check, check_search
from django_dbtaskqueue.operations.queue_control import IN_EFFECT
from django_dbtaskqueue.operations.queue_stats import health, overview
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, of_queue, to_text
from django_dbtaskqueue.operations.search.query import TaskFilter, tasks_for
from django_dbtaskqueue.operations.serializers import attempt_of, detail, operation_document, summary
from django_dbtaskqueue.operations.verbs import BULK_VERBS, HousekeepOptions, TaskVerb

DEFAULT_LIMIT, MAX_LIMIT, MAX_ATTEMPTS = 50, 500, 50


@endpoint("GET")
def tasks(request: HttpRequest, actor: Actor) -> JsonObject:
    """Return the newest tasks that match ``q`` (or a qualifier as a parameter), at most ``limit``, ``before`` an id."""
    task_filter, found = _searched(request, actor)
    limit = min(_number(request, "limit", DEFAULT_LIMIT), MAX_LIMIT)
    if before := _number(request, "before", 0):
        found = found.filter(pk__lt=before)
    with statement_timeout(found.db):
        rows = list(found.defer(*LONG).order_by("-pk")[: limit + 1])
    seen = {queue: actor.may(VIEW_PAYLOAD, queue) for queue in {row.queue for row in rows}}
    return {
        "query": to_text(task_filter.search),
        "tasks": [summary(row, payload=seen[row.queue]) for row in rows[:limit]],
        "before": rows[limit - 1].pk if len(rows) > limit else None,
    }


@endpoint("GET")
def count(request: HttpRequest, actor: Actor) -> JsonObject:
    """Return how many tasks match, counted up to 10,000; ``more``: there are more."""
    task_filter, found = _searched(request, actor)
    with statement_timeout(found.db):
        counted = bounded_count(found)
    return {"query": to_text(task_filter.search), "count": counted.number, "more": counted.more}


@endpoint("GET")
def task(request: HttpRequest, actor: Actor, pk: int) -> JsonObject:
    """Return one task with its failed attempts. Payload, result and traceback need a permission; secrets are masked."""
    rows = _table(request.GET.get("queue", "")).filter(pk=pk)
    _may_view(actor, rows.model)
    found: Any = rows.annotate(clock=Now()).first()
    if found is None:
        raise Http404(f"There is no task {pk}. If its queue has its own table, name the queue: ?queue=…")
    attempts = Attempt.objects.using(rows.db).filter(location=rows.model._meta.label_lower, task_id=pk)
    newest = attempts.order_by("-total_attempt")[:MAX_ATTEMPTS]
    payload = actor.may(VIEW_PAYLOAD, found.queue)
    return detail(found, payload=payload) | {"attempts": [attempt_of(row, payload=payload) for row in newest]}


@endpoint("POST")
def on_ids(request: HttpRequest, actor: Actor, verb: str) -> JsonObject:
    """Apply a verb to up to 1,000 tasks by ``ids``, at once, in one transaction."""
    given = body(request, "ids", "queue", "reason", "older_than", "to")
    ids = typed(given, "ids", list, [])
    if not ids or not all(type(one) is int for one in ids):
        raise ApiError(400, f"'ids' must be a list of whole numbers, and not empty, not {ids!r}.")
    found = _table(typed(given, "queue", str, ""))
    order = ActionRequest(_verb(verb), _reason(given), _retention(given))
    report = act_on_ids(found.model, found.db, ids, order, actor)
    return {"changed": report.changed, "skipped": report.skipped, "skips": report.skips}


@endpoint("POST")
def preview(request: HttpRequest, actor: Actor, verb: str) -> JsonObject:
    """Return what a verb would do to all tasks that match ``q``, from bounded counts. Changes nothing."""
    given = body(request, "q", "older_than", "to")
    order, search = bulk.request_of(_verb(verb), typed(given, "q", str, ""), options=_retention(given))
    _may_view(actor, tasks_for(search).model)
    check(order.verb, "previewed", actor)
    check_search(search, actor)
    seen = bulk.preview(order.verb, search, options=order.options)
    numbers = {"selected": seen.selected, "would_change": seen.eligible}
    return {
        "query": order.query,
        **{name: None if one is None else {"count": one.number, "more": one.more} for name, one in numbers.items()},
        "estimate": seen.estimate,
        "words": seen.sentences,
    }


@endpoint("POST", created=True)
def on_search(request: HttpRequest, actor: Actor, verb: str) -> JsonObject:
    """Start a bulk operation on all tasks that match ``q``. Pollers carry it out."""
    given = body(request, "q", "reason", "older_than", "to", "limit")
    operation = bulk.start(
        _verb(verb), typed(given, "q", str, ""), actor.user, _reason(given),
        source="api", options=_retention(given), max_tasks=typed(given, "limit", int, None),
    )  # fmt: skip
    return operation_document(operation)


@endpoint("GET")
def operation(request: HttpRequest, actor: Actor, pk: int) -> JsonObject:
    """Return the progress of a bulk operation."""
    _may_view(actor, BulkOperation)
    return operation_document(_operation(pk))


@endpoint("POST")
def cancel(request: HttpRequest, actor: Actor, pk: int) -> JsonObject:
    """Cancel a bulk operation. What is done stays done."""
    reason = _reason(body(request, "reason"))
    found = _operation(pk)
    done = bulk.cancel(pk, actor.user, reason, source="api")
    found.refresh_from_db()
    return operation_document(found) | {"cancelled": done}


@endpoint("GET")
def queues(request: HttpRequest, actor: Actor) -> JsonObject:
    """Return the health, the known queues, and the pause of each: since, until, user, reason."""
    _may_view(actor, Queue)
    rows: Any = Queue.objects.using(alias_for("", None, write=False)).filter(IN_EFFECT)
    facts = {"since": F("paused_time"), "until": F("paused_until"), "by": F("paused_by"), "reason": F("paused_reason")}
    paused = {row.pop("name"): row for row in rows.values("name", **facts)[:500]}
    known = [{"queue": name, "paused": paused.get(name)} for name in sorted({*conf.known_queues(), *paused})]
    return {"health": asdict(health(overview())), "queues": known}


@endpoint("POST")
def pause(request: HttpRequest, actor: Actor, queue: str) -> JsonObject:
    """Pause a queue, ``for`` a time such as "30m", ``until`` one, or until it is started."""
    given = body(request, "reason", "for", "until")
    return {"paused": queue_control.pause_queues([queue], actor, reason=_reason(given), until=_until(given))}


@endpoint("POST")
def start(request: HttpRequest, actor: Actor, queue: str) -> JsonObject:
    """End a queue's pause."""
    return {"started": queue_control.resume_queues([queue], actor, reason=_reason(body(request, "reason")))}


@endpoint("POST", created=True)
def purge(request: HttpRequest, actor: Actor, queue: str) -> JsonObject:
    """Start the bulk deletion of every task of a queue; ``confirm`` repeats its name."""
    given = body(request, "confirm", "reason")
    if given.get("confirm") != queue:
        raise ApiError(400, f'This deletes every task of the queue. Say so: "confirm": "{queue}".')
    return operation_document(bulk.start("purge", of_queue(queue), actor.user, _reason(given), source="api"))


# -- reading a request -------------------------------------------------------------------------------------------------


def _searched(request: HttpRequest, actor: Actor) -> tuple[TaskFilter, TaskQuerySet]:
    for name in request.GET:
        if name not in ("q", "limit", "before", *QUALIFIERS):
            raise ApiError(400, f"There is no parameter {name!r}: put a search into q, such as ?q=status:ERROR.")
    search = TaskFilter(request.GET, queryset=tasks_for(Search())).checked().search
    tasks = tasks_for(search)
    _may_view(actor, tasks.model)
    check_search(search, actor)
    task_filter = TaskFilter(request.GET, queryset=tasks).checked()
    return task_filter, task_filter.qs


def _may_view(actor: Actor, model: type[Model]) -> None:
    """Check the permission of the model: the table of a queue has its own."""
    permission = f"{model._meta.app_label}.view_{model._meta.model_name}"
    if actor.user is not None and not actor.user.has_perm(permission):
        text = _("%(who)s needs the permission %(permission)s.")
        raise PermissionDenied(text % {"who": actor.name, "permission": permission})


def _table(queue: str) -> TaskQuerySet:
    return tasks_for(of_queue(queue) if queue else Search(), write=True)


def _verb(name: str) -> TaskVerb:
    if name not in BULK_VERBS:
        raise Http404(f"There is no verb {name!r}; they are {', '.join(BULK_VERBS)}.")
    return BULK_VERBS[name]


def _operation(pk: int) -> BulkOperation:
    found = BulkOperation.objects.using(alias_for("", None)).filter(pk=pk).first()
    if found is None:
        raise Http404(f"There is no bulk operation {pk}.")
    return found


def _reason(given: JsonObject) -> str:
    return str(typed(given, "reason", str, ""))


def _retention(given: JsonObject) -> HousekeepOptions:
    older_than = conf.duration(given.get("older_than", "14d"), where="'older_than'")
    to = given.get("to", "history")
    if to not in ("history", "delete"):
        raise ApiError(400, f'\'to\' must be "history" or "delete", not {to!r}.')
    return HousekeepOptions(max(older_than, timedelta(0)), to)


def _until(given: JsonObject) -> datetime | None:
    if "for" in given:
        return timezone.now() + conf.duration(given["for"], where="'for'")
    if "until" not in given:
        return None
    try:
        until = datetime.fromisoformat(str(given["until"]))
    except ValueError:
        raise ApiError(400, f"'until' must be a time such as 2026-11-20T08:00+00:00, not {given['until']!r}.") from None
    return until if until.tzinfo else timezone.make_aware(until)


def _number(request: HttpRequest, name: str, default: int) -> int:
    text = request.GET.get(name, str(default))
    if not text.isdecimal() or len(text) > 18:
        raise ApiError(400, f"{name!r} must be a whole number, not {text!r}.")
    return int(text)
