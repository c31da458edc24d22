"""What the pages do to tasks, pollers and queues: each asks for a confirmation, then acts, then reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from django_dbtaskqueue.admin.confirmation import (
    PauseForm,
    PlainForm,
    Question,
    ask,
    bound_form,
    check,
    confirmed,
    form_for,
)
from django_dbtaskqueue.admin.list_pages import ListAdmin
from django_dbtaskqueue.admin.read_only import ReadOnlyAdmin, id_of, may_see
from django_dbtaskqueue.core.exceptions import OperationRefused, SearchError, TaskQueueError
from django_dbtaskqueue.flow import enqueue
from django_dbtaskqueue.models import AbstractTask, BulkOperation, Queue
from django_dbtaskqueue.operations import actions, bulk, queue_control
from django_dbtaskqueue.operations.actions import ADDITION, log, record, recorded
from django_dbtaskqueue.operations.permissions import Actor, can_operate
from django_dbtaskqueue.operations.queue_control import POLLER_VERBS, STOPPED_STATE
from django_dbtaskqueue.operations.search import to_text
from django_dbtaskqueue.operations.search.query import tasks_for
from django_dbtaskqueue.operations.verbs import PAUSE, TASK_VERBS, TaskVerb, Verb

MAX_NAMED_TASKS = 20  # on the confirmation page
MAX_COMMANDED_POLLERS = 500  # in one action
AUDIT_SOURCE = "admin"


def act_on_tasks(page: Any, request: HttpRequest) -> HttpResponse:
    """Ask for a confirmation; once confirmed, act and report. A refusal is shown on the page of origin."""
    verb = TASK_VERBS.get(request.POST.get("action", ""))
    if verb is None:
        raise BadRequest(f"Tasks have no action {request.POST.get('action')!r}.")
    check(request, verb)
    try:
        return (
            _act_on_all(page, request, verb)
            if request.POST.get("select_across") == "1"
            else _act_on_ticked(page, request, verb)
        )
    except (OperationRefused, SearchError) as error:
        page.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())


def _act_on_all(page: Any, request: HttpRequest, verb: TaskVerb) -> HttpResponse:
    """Apply the verb to all tasks that match the address, as a bulk operation."""
    search = page.search_of(request)
    if tasks_for(search).model is not page.model._meta.concrete_model:
        raise OperationRefused(_("Name one queue of this table in the search: queue:NAME."))
    form = bound_form(request, form_for(verb))
    options = form.options()
    if not confirmed(request, form):
        preview = bulk.preview(verb, search, options=options)
        possible = preview.eligible is None or bool(preview.eligible)
        sentences = [
            *preview.sentences[1:],
            _("This runs in the background, in steps; its page shows how far it is, and it can be stopped there."),
        ]
        return ask(page, request, Question(verb, sentences, [to_text(search)], form, possible))
    operation = bulk.start(verb, search, request.user, form.reason(), source=AUDIT_SOURCE, options=options)
    page.message_user(request, _("The bulk operation has started."), messages.SUCCESS)
    return HttpResponseRedirect(page.url(BulkOperation, "change", operation.pk) or request.get_full_path())


def _act_on_ticked(page: Any, request: HttpRequest, verb: TaskVerb) -> HttpResponse:
    """Apply the verb to the ticked rows, or to the row of the page, at once."""
    # Read from the database that is written: a replica may lag behind.
    model, alias, ids = ticked_tasks(page, request)
    form = bound_form(request, form_for(verb))
    options = form.options()
    if not confirmed(request, form):
        tasks = model._default_manager.using(alias).filter(pk__in=ids)
        preview = actions.preview(tasks, actions.ActionRequest(verb, options=options))
        items = [f"{task} · {task.status}" for task in tasks.only("queue", "reference", "status")[:MAX_NAMED_TASKS]]
        unnamed = len(ids) > MAX_NAMED_TASKS
        return ask(page, request, Question(verb, preview.sentences[1:], items, form, bool(preview.eligible), unnamed))
    wanted = actions.ActionRequest(verb, form.reason(), options, to_text(page.search_of(request)))
    report = actions.act_on_ids(model, alias, ids, wanted, Actor(request.user, AUDIT_SOURCE))
    page.message_user(request, task_report(verb, report), messages.SUCCESS if report.changed else messages.WARNING)
    back = "" if verb.deletes else page.back(request)
    return HttpResponseRedirect(back or request.get_full_path())


def ticked_tasks(page: Any, request: HttpRequest) -> tuple[type[AbstractTask], str, list[int]]:
    """Return the table of the ticked tasks, the database that is written, and their ids."""
    ids = [id_of(text) for text in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    model = page.model._meta.concrete_model
    return model, router.db_for_write(page.model), [number for number in ids if number is not None]


def task_report(verb: TaskVerb, report: actions.Report) -> str:
    """Return a sentence: how many tasks changed, how many were skipped, and why."""
    done = str(verb.done % {"number": report.changed})
    if not report.skips:
        return f"{done}."
    reasons = ", ".join(f"{reason}: {len(ids)}" for reason, ids in report.skips.items())
    return _("%(done)s, %(count)s skipped (%(reasons)s).") % {
        "done": done,
        "count": report.skipped,
        "reasons": reasons,
    }


def command_pollers(page: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Ask for a confirmation; once confirmed, send the command to the ticked pollers that still run."""
    verb = POLLER_VERBS.get(request.POST.get("action", ""))
    if verb is None:
        raise BadRequest(f"Pollers have no action {request.POST.get('action')!r}.")
    check(request, verb)
    rows = page.get_queryset(request).filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME)[:MAX_COMMANDED_POLLERS])
    running = [poller.instance for poller in rows if poller.state != STOPPED_STATE]
    form = bound_form(request, PlainForm)
    if not confirmed(request, form):
        text = ngettext("%(count)s poller would follow.", "%(count)s pollers would follow.", len(running))
        return ask(page, request, Question(verb, [text % {"count": len(running)}], running, form, bool(running)))
    commanded = queue_control.command_pollers(
        running, verb.name, Actor(request.user, AUDIT_SOURCE), reason=form.reason(), using=rows.db
    )
    done = str(verb.done % {"number": commanded})
    follow = _("%(done)s: they follow within a heartbeat.") % {"done": done}
    page.message_user(request, follow, messages.SUCCESS if commanded else messages.WARNING)
    return HttpResponseRedirect(page.back(request) or request.get_full_path())


ENQUEUE_COPY = Verb(
    name="enqueue_again",
    label=gettext_lazy("Enqueue again as new"),
    effect=gettext_lazy(
        "A new task with the same queue, payload, priority, group and tag, and without a reference, is enqueued. The "
        "old task stays as it is. The processor runs again, with all its effects."
    ),
    done=ngettext_lazy("%(number)s task enqueued", "%(number)s tasks enqueued", "number"),
    permission="add_task",
)


def can_enqueue(user: Any, task: AbstractTask) -> bool:
    """Return whether the user may enqueue a copy of ``task``."""
    return can_operate(user, ENQUEUE_COPY, task.queue)


def enqueue_copy(page: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Ask for a confirmation; once confirmed, enqueue a copy and show the new task."""
    pk = id_of(request.POST.get("again", ""))
    task = None if pk is None else page.model._default_manager.filter(pk=pk).first()
    if task is None:
        raise Http404
    if not can_enqueue(request.user, task) or not may_see(request, task):
        raise PermissionDenied
    form = bound_form(request, PlainForm)
    if not confirmed(request, form):
        return ask(page, request, Question(ENQUEUE_COPY, [], [str(task)], form, possible=True))
    try:
        fresh = _enqueued(task, Actor(request.user, AUDIT_SOURCE), form.reason())
    except TaskQueueError as error:
        page.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(page.page_of(task))
    page.message_user(request, _("This is the new task."), messages.SUCCESS)
    return HttpResponseRedirect(page.page_of(fresh))


def _enqueued(task: AbstractTask, actor: Actor, reason: str) -> AbstractTask:
    alias = str(task._state.db)
    with recorded(alias):
        fresh = enqueue.enqueue_copy(task)
        details = {"task_id": fresh.pk, "again": task.pk}
        record(alias, actor, ENQUEUE_COPY, queue=task.queue, reason=reason, changed=1, details=details)
        log(actor, [fresh], ADDITION, _("Enqueued again: task %(id)s") % {"id": task.pk})
    return fresh


# -- queues ------------------------------------------------------------------------------------------------------------


def act_on_queues(page: ListAdmin, request: HttpRequest, verb: Verb) -> HttpResponse | None:
    """Ask for a confirmation; once confirmed, pause or resume the queues and report."""
    check(request, verb)
    queues = _selected_queues(page, request)
    fitting = [queue for queue in queues if verb is PAUSE or is_paused(queue)]
    form = bound_form(request, PauseForm if verb is PAUSE else PlainForm)
    if not confirmed(request, form):
        items = [queue.name for queue in queues]
        return ask(page, request, Question(verb, _queue_sentences(queues, fitting), items, form, bool(fitting)))
    names = [queue.name for queue in fitting]
    actor, reason = Actor(request.user, AUDIT_SOURCE), form.reason()
    try:
        if verb is PAUSE:
            changed = queue_control.pause_queues(names, actor, reason=reason, until=form.cleaned_data["until"])
        else:
            changed = queue_control.resume_queues(names, actor, reason=reason)
    except TaskQueueError as error:
        page.message_user(request, str(error), messages.ERROR)
        return None
    page.message_user(
        request, _queue_report(verb, changed, len(queues) - changed), messages.SUCCESS if changed else messages.WARNING
    )
    back = page.back(request)
    return HttpResponseRedirect(back) if back else None


def _selected_queues(page: ListAdmin, request: HttpRequest) -> list[Queue]:
    """Return the selected queues. A queue without a row can be selected, too."""
    known = list(page.selection(request))
    if request.POST.get("select_across") == "1":
        return known
    ticked = set(request.POST.getlist(ACTION_CHECKBOX_NAME))
    return [queue for queue in known if queue.name in ticked]


def _queue_sentences(queues: Sequence[Queue], fitting: Sequence[Queue]) -> list[str]:
    selected = ngettext("%(count)s queue is selected.", "%(count)s queues are selected.", len(queues))
    lines = [selected % {"count": len(queues)}]
    if skipped := len(queues) - len(fitting):
        text = ngettext("%(count)s is skipped: not paused.", "%(count)s are skipped: not paused.", skipped)
        lines.append(text % {"count": skipped})
    return lines


def _queue_report(verb: Verb, changed: int, skipped: int) -> str:
    done = str(verb.done % {"number": changed})
    if not skipped:
        return f"{done}."
    return _("%(done)s, %(count)s skipped: not paused.") % {"done": done, "count": skipped}


def is_paused(queue: Any) -> bool:
    """Return whether the queue is paused now, by the database's clock."""
    return queue.paused_time is not None and (queue.paused_until is None or queue.paused_until > queue.clock)
