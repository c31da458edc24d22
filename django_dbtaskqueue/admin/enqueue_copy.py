"""Enqueue a task again as a new one: the same work in a new row; the old one stays as it is."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_dbtaskqueue.admin.base import id_of, may_see
from django_dbtaskqueue.admin.confirm import PlainForm, Question, ask, bound_form, confirmed
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.flow.enqueue import enqueue_copy
from django_dbtaskqueue.models import AbstractTask
from django_dbtaskqueue.operations.actions import ADDITION, log, record, recorded
from django_dbtaskqueue.operations.permissions import Actor, can_operate
from django_dbtaskqueue.operations.verbs import Verb

ENQUEUE_AGAIN = Verb(
    name="enqueue_again",
    label=gettext_lazy("Enqueue again as new"),
    effect=gettext_lazy(
        "A new task with the same queue, payload, priority, group and tag, and no reference, is put in line. The old "
        "one stays as it is. The processor runs with all it does."
    ),
    done=ngettext_lazy("%(number)s task enqueued", "%(number)s tasks enqueued", "number"),
    permission="add_task",
)


def can_enqueue(user: Any, task: Any) -> bool:
    """Whether the user may enqueue what ``task`` carries."""
    return can_operate(user, ENQUEUE_AGAIN, task.queue)


def enqueue_again(page: Any, request: HttpRequest) -> HttpResponse:
    """Ask, or once confirmed enqueue, record it and show the new task."""
    pk = id_of(request.POST.get("again", ""))
    task = None if pk is None else page.model._default_manager.filter(pk=pk).first()
    if task is None:
        raise Http404
    if not can_enqueue(request.user, task) or not may_see(request, task):
        raise PermissionDenied
    form = bound_form(request, PlainForm)
    if not confirmed(request, form):
        return ask(page, request, Question(ENQUEUE_AGAIN, [], [str(task)], form, possible=True))
    try:
        fresh = _enqueued(task, Actor(request.user, "admin"), form.reason())
    except TaskQueueError as error:
        page.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(page.page_of(task))
    page.message_user(request, _("This is the new task."), messages.SUCCESS)
    return HttpResponseRedirect(page.page_of(fresh))


def _enqueued(task: AbstractTask, actor: Actor, reason: str) -> AbstractTask:
    alias = str(task._state.db)
    with recorded(alias):
        fresh = enqueue_copy(task)
        details = {"task_id": fresh.pk, "again": task.pk}
        record(alias, actor, ENQUEUE_AGAIN, queue=task.queue, reason=reason, changed=1, details=details)
        log(actor, [fresh], ADDITION, _("Enqueued again: task %(id)s") % {"id": task.pk})
    return fresh
