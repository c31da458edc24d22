"""What the page of a queue can do beside pausing: change a setting while pollers run, delete every task."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from django_dbtaskqueue.admin.confirm import check
from django_dbtaskqueue.admin.searching import text_of
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import DURATIONS, PLACE, QueueSettings, stored
from django_dbtaskqueue.core.durations import format_duration, parse_duration
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.retry import describe
from django_dbtaskqueue.models import BulkOperation, Queue
from django_dbtaskqueue.operations import bulk, queue_control
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.verbs import CHANGE_SETTINGS, PURGE

FIXED = (*PLACE, "strategy", "router", "paused")  # where tasks live cannot change; pausing has a page of its own


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a queue as its page shows it."""

    name: str
    value: str
    source: str
    here: bool  # set by an operator
    open: bool  # can be


def settings_of(queue: Queue) -> list[Setting]:
    """Return every setting in force and where it comes from."""
    base = conf.default_settings(queue.name)
    overrides = queue.overrides or {}
    try:
        found = conf.overlay(base, overrides)
    except ImproperlyConfigured:
        found = base
    return [
        Setting(
            field.name,
            shown(getattr(found, field.name)),
            _source(queue.name, field.name, overrides),
            field.name in overrides,
            field.name not in FIXED,
        )
        for field in fields(QueueSettings)
    ]


def changes_of(queue: Queue) -> str:
    """Return what an operator changed, such as ``lease=5m``."""
    return ", ".join(f"{name}={_changed(name, value)}" for name, value in (queue.overrides or {}).items())


def _changed(name: str, value: Any) -> Any:
    """Return a stored override as people write it. A row keeps a duration in ISO 8601."""
    with suppress(ValueError):
        return format_duration(parse_duration(value)) if name in DURATIONS else value
    return value


def _source(queue: str, name: str, overrides: dict[str, Any]) -> str:
    settings = conf.settings()
    if name in overrides:
        return _("changed here, while running")
    if name in settings.queues.get(queue, {}):
        return _("the project's settings or settings file") if settings.file else _("the project's settings")
    if name in conf.declared().get(queue, {}):
        return _("the processor")
    return _("the project's default") if name in settings.defaults else _("built in")


def shown(value: Any) -> str:
    """Return a setting's value as people write it."""
    if isinstance(value, timedelta):
        return format_duration(value)
    return describe(value) if callable(value) else str(value)


def change_settings(page: Any, request: HttpRequest) -> HttpResponse:
    """Set one setting of one queue, or with an empty value go back to what the project says; log it."""
    name, key, value = (request.POST.get(part, "").strip() for part in ("queue", "set", "value"))
    queue = page.get_object(request, name)
    if queue is None:
        raise Http404
    check(request, CHANGE_SETTINGS, queue.name)
    try:
        values: dict[str, Any] = {}
        if value:
            values = stored({key: _read(key, value)}, where=_("Queue %(name)s") % {"name": name}, fixed=FIXED)
        back, reason = [] if value else [key], request.POST.get("reason", "")
        queue_control.change_settings(name, values, Actor(request.user, "admin"), reset=back, reason=reason)
    except (ImproperlyConfigured, OperationRefused, TypeError, ValueError) as error:
        page.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(page.page_of(queue))
    said = _("%(key)s is %(value)s now.") if value else _("%(key)s is what the project says again.")
    text = said % {"key": key, "value": value}
    page.message_user(request, text + " " + _("Pollers follow within a heartbeat."), messages.SUCCESS)
    return HttpResponseRedirect(page.page_of(queue))


def purge(page: Any, request: HttpRequest) -> HttpResponse:
    """Order the deletion of every task of a queue whose name was typed once more."""
    name = request.POST.get("purge", "")
    queue = page.get_object(request, name)
    if queue is None:
        raise Http404
    check(request, PURGE, name)
    if request.POST.get("typed", "").strip() != name:
        page.message_user(request, _("Type %(name)s to delete all its tasks.") % {"name": name}, messages.ERROR)
        return HttpResponseRedirect(page.page_of(queue))
    try:
        reason = request.POST.get("reason", "").strip()
        operation = bulk.start(PURGE, text_of(queue=name), request.user, reason)
    except OperationRefused as error:
        page.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(page.page_of(queue))
    page.message_user(request, _("The bulk operation has begun."), messages.SUCCESS)
    return HttpResponseRedirect(page.url(BulkOperation, "change", operation.pk) or page.page_of(queue))


def _read(key: str, value: str) -> Any:
    """Return what was typed as its type: a number, a switch, none, or text."""
    if value.lower() in ("none", "null"):
        return None
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.isdecimal() and key not in DURATIONS else value
