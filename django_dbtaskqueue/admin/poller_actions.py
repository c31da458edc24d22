"""Telling pollers what to do: the question, then the act and what came of it."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.admin.confirm import PlainForm, Question, ask, bound_form, check, confirmed
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_control import POLLER_VERBS, STOPPED_STATE, command_pollers

MOST = 500  # pollers of one act


def tell_pollers(page: Any, request: HttpRequest) -> HttpResponse:
    """Ask, or command_pollers the ticked pollers that still run."""
    verb = POLLER_VERBS.get(request.POST.get("action", ""))
    if verb is None:
        raise BadRequest(f"Pollers know no act {request.POST.get('action')!r}.")
    check(request, verb)
    rows = page.get_queryset(request).filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME)[:MOST])
    running = [poller.instance for poller in rows if poller.state != STOPPED_STATE]
    form = bound_form(request, PlainForm)
    if not confirmed(request, form):
        words = ngettext("%(count)s poller would follow.", "%(count)s pollers would follow.", len(running))
        return ask(page, request, Question(verb, [words % {"count": len(running)}], running, form, bool(running)))
    told = command_pollers(running, verb.name, Actor(request.user, "admin"), reason=form.reason(), using=rows.db)
    text = str(verb.done % {"number": told})
    follow = _("%(done)s: they follow within a heartbeat.") % {"done": text}
    page.message_user(request, follow, messages.SUCCESS if told else messages.WARNING)
    return HttpResponseRedirect(page.back(request) or request.get_full_path())
