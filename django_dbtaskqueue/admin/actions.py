"""Acting on tasks: the question with its numbers and a reason, then the act or the bulk operation, and the answer."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from django_dbtaskqueue.admin.base import id_of
from django_dbtaskqueue.admin.confirm import Question, ask, bound_form, check, confirmed, form_for
from django_dbtaskqueue.core.exceptions import OperationRefused, SearchError
from django_dbtaskqueue.models import AbstractTask, BulkOperation
from django_dbtaskqueue.operations import actions, bulk
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.search.parse import to_text
from django_dbtaskqueue.operations.search.query import tasks_for
from django_dbtaskqueue.operations.verbs import TASK_VERBS, TaskVerb

SHOWN = 20  # tasks named on the confirmation page
SOURCE = "admin"


def act(page: Any, request: HttpRequest) -> HttpResponse:
    """Ask, or once confirmed do it and say what really changed; what was refused stands on the page it came from."""
    verb = TASK_VERBS.get(request.POST.get("action", ""))
    if verb is None:
        raise BadRequest(f"Tasks know no act {request.POST.get('action')!r}.")
    check(request, verb)
    try:
        return _all(page, request, verb) if request.POST.get("select_across") == "1" else _ticked(page, request, verb)
    except (OperationRefused, SearchError) as error:
        page.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())


def _all(page: Any, request: HttpRequest, verb: TaskVerb) -> HttpResponse:
    """All that match the address: a bulk operation."""
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
    operation = bulk.start(verb, search, request.user, form.reason(), source=SOURCE, options=options)
    page.message_user(request, _("The bulk operation has begun."), messages.SUCCESS)
    return HttpResponseRedirect(page.url(BulkOperation, "change", operation.pk) or request.get_full_path())


def _ticked(page: Any, request: HttpRequest, verb: TaskVerb) -> HttpResponse:
    """The rows that were ticked, or the one whose page it is: at once."""
    # Statuses are judged, and rows changed, where they are written: a replica may lag behind.
    model, alias, ids = chosen(page, request)
    form = bound_form(request, form_for(verb))
    options = form.options()
    if not confirmed(request, form):
        tasks = model._default_manager.using(alias).filter(pk__in=ids)
        preview = actions.preview(tasks, actions.ActionRequest(verb, options=options))
        items = [f"{task} · {task.status}" for task in tasks.only("queue", "reference", "status")[:SHOWN]]
        unnamed = len(ids) > SHOWN
        return ask(page, request, Question(verb, preview.sentences[1:], items, form, bool(preview.eligible), unnamed))
    wanted = actions.ActionRequest(verb, form.reason(), options, to_text(page.search_of(request)))
    report = actions.act_on_ids(model, alias, ids, wanted, Actor(request.user, SOURCE))
    page.message_user(request, answer(verb, report), messages.SUCCESS if report.changed else messages.WARNING)
    back = "" if verb.deletes else page.back(request)
    return HttpResponseRedirect(back or request.get_full_path())


def chosen(page: Any, request: HttpRequest) -> tuple[type[AbstractTask], str, list[int]]:
    """Return the table of the tasks that were ticked, the database that is written, and their ids."""
    ids = [id_of(text) for text in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    model = page.model._meta.concrete_model
    return model, router.db_for_write(page.model), [number for number in ids if number is not None]


def answer(verb: TaskVerb, report: actions.Report) -> str:
    """Return what came of an act: what really changed, how many were skipped, and each reason why."""
    done = str(verb.done % {"number": report.changed})
    if not report.skips:
        return f"{done}."
    reasons = ", ".join(f"{reason}: {len(ids)}" for reason, ids in report.skips.items())
    return _("%(done)s, %(count)s skipped (%(reasons)s).") % {
        "done": done,
        "count": report.skipped,
        "reasons": reasons,
    }
