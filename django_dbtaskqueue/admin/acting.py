"""Acting on tasks: the question with its numbers, the act, the log, and the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.admin.confirm import HousekeepForm, PlainForm, Question, ask, bound_form, check, confirmed
from django_dbtaskqueue.operations.verbs import Aging, Preview, TaskVerb
from django_dbtaskqueue.querysets import TaskQuerySet

SHOWN = 20  # tasks named on the confirmation page
LOGGED = 1000  # an act on more tasks than this is logged as a whole

Action = Callable[[Any, HttpRequest, TaskQuerySet], HttpResponse | None]


def action_of(verb: TaskVerb) -> Action:
    """Return the admin action that carries out a verb."""

    def action(model_admin: Any, request: HttpRequest, tasks: TaskQuerySet) -> HttpResponse | None:
        return act(model_admin, request, tasks, verb)

    action.__name__ = verb.name
    return admin.action(description=verb.label)(action)


def act(model_admin: Any, request: HttpRequest, tasks: TaskQuerySet, verb: TaskVerb) -> HttpResponse | None:
    """Ask, or once confirmed do it, log it and say what really changed."""
    check(request, verb)
    # Statuses are judged, and rows changed, where they are written: a replica may lag behind.
    tasks = tasks.using(router.db_for_write(tasks.model))
    form = bound_form(request, HousekeepForm if verb.ages else PlainForm)
    aging = form.aging() if verb.ages else Aging()
    preview = verb.preview(tasks, aging)
    if not confirmed(request, form):
        items = [f"{task} · {task.status}" for task in tasks.only("queue", "reference", "status")[:SHOWN]]
        sentences = _sentences(verb, preview, aging)
        unnamed = preview.selected.number > SHOWN
        return ask(model_admin, request, Question(verb, sentences, items, form, bool(preview.eligible), unnamed))
    changed = perform(verb, tasks, aging, request.user.pk)
    level = messages.SUCCESS if changed else messages.WARNING
    model_admin.message_user(request, answer(verb, changed, preview, aging), level)
    return None if verb.removes or not model_admin.back(request) else HttpResponseRedirect(model_admin.back(request))


def perform(verb: TaskVerb, tasks: TaskQuerySet, aging: Aging, user_id: Any) -> int:
    """Carry out the verb; return the number of tasks really changed.

    Up to 1,000 tasks the act and a log entry for each of them are one transaction. A larger act is one log entry, and
    is as atomic as the verb itself.
    """
    with transaction.atomic(using=tasks.db):
        found = verb.eligible(tasks, aging).order_by("pk").only("queue", "reference").select_for_update(of=_self(tasks))
        rows = list(found[: LOGGED + 1])
        if len(rows) <= LOGGED:
            chosen = tasks.model._default_manager.using(tasks.db).filter(pk__in=[row.pk for row in rows])
            changed = verb.run(chosen, aging)
            LogEntry.objects.log_actions(user_id, rows, DELETION if verb.removes else CHANGE, _note(verb, aging))
            return changed
    changed = verb.run(tasks, aging)
    _log_whole(verb, tasks, aging, user_id, changed)
    return changed


def _self(tasks: TaskQuerySet) -> tuple[str, ...]:
    return ("self",) if transaction.get_connection(tasks.db).features.has_select_for_update_of else ()


def _log_whole(verb: TaskVerb, tasks: TaskQuerySet, aging: Aging, user_id: Any, changed: int) -> None:
    LogEntry.objects.create(
        user_id=user_id,
        content_type=ContentType.objects.get_for_model(tasks.model, for_concrete_model=False),
        object_repr=str(verb.done % {"number": changed})[:200],
        action_flag=DELETION if verb.removes else CHANGE,
        change_message=_note(verb, aging),
    )


def _note(verb: TaskVerb, aging: Aging) -> str:
    if not verb.ages:
        return str(verb.label)
    return f"{verb.label}: {_('older than %(days)s days') % {'days': aging.older_than.days}}, {aging.to}"


def _sentences(verb: TaskVerb, preview: Preview, aging: Aging) -> list[str]:
    selected = ngettext("%(count)s task is selected.", "%(count)s tasks are selected.", preview.selected.number)
    changing = ngettext("%(count)s would change.", "%(count)s would change.", preview.eligible.number)
    lines = [selected % {"count": preview.selected}, changing % {"count": preview.eligible}]
    reason = verb.skipped(aging)
    if preview.skipped is None:
        lines.append(_("The others are skipped: %(reason)s.") % {"reason": reason})
    elif preview.skipped:
        text = ngettext("%(count)s is skipped: %(reason)s.", "%(count)s are skipped: %(reason)s.", preview.skipped)
        lines.append(text % {"count": preview.skipped, "reason": reason})
    return lines


def answer(verb: TaskVerb, changed: int, preview: Preview, aging: Aging) -> str:
    """Return what came of an act: what really changed, how many were skipped, and why."""
    done = str(verb.done % {"number": changed})
    reason = verb.skipped(aging)
    if preview.selected.more:
        return _("%(done)s; others that were selected: %(reason)s.") % {"done": done, "reason": reason}
    skipped = max(preview.selected.number - changed, 0)
    if not skipped:
        return f"{done}."
    return _("%(done)s, %(count)s skipped: %(reason)s.") % {"done": done, "count": skipped, "reason": reason}
