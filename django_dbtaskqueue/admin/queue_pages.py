"""Queues: settings and where they come from, pause and resume, purge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import django_filters
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import ImproperlyConfigured
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import permitted, viewer
from django_dbtaskqueue.admin.list_pages import ListAdmin, NamedListAdmin, NameFilter
from django_dbtaskqueue.admin.overview_pages import chart_context
from django_dbtaskqueue.admin.page_actions import PauseForm, PlainForm, ask, bound_form, confirmed, verb_of
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import DURATIONS, setting_text, typed
from django_dbtaskqueue.core.durations import format_age, format_duration, parse_duration
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.db.session import alias_for, model_for
from django_dbtaskqueue.models import BulkOperation, FailureGroup, Queue
from django_dbtaskqueue.operations import bulk, permissions, queue_control, queue_stats
from django_dbtaskqueue.operations.bounded_reads import limits_of, limits_text
from django_dbtaskqueue.operations.search import text_of
from django_dbtaskqueue.operations.search.query import Page
from django_dbtaskqueue.operations.serializers import is_storable
from django_dbtaskqueue.operations.verbs import PURGE, QUEUE_VERBS


def _stats_column(title: permissions.Text, show: Callable[[queue_stats.QueueStats], object]) -> cells.Column:
    return cells.column(title, lambda queue: show(queue.stats))


def _count_column(status: Status | None = None) -> cells.Column:
    """Return a column with the number of tasks, in a status or in all, and a link to them."""

    @admin.display(description=gettext_lazy("TOTAL") if status is None else str(status))
    def cell(page: QueueAdmin, queue: Any) -> str:
        count = queue.stats.total if status is None else queue.stats.statuses[status]
        query = text_of(queue=queue.name, **({} if status is None else {"status": status}))
        return page.link(count, page.url(model_for(queue.name), "changelist", q=query) if count else "")

    return cell


ORDERS: dict[str, tuple[permissions.Text, Callable[[queue_stats.QueueStats], float]]] = {  # the most first
    "oldest": (gettext_lazy("oldest waiting"), lambda row: row.oldest.total_seconds() if row.oldest else 0.0),
    "failed": (gettext_lazy("failed, 1 h"), lambda row: row.failed),
    "run": (gettext_lazy("run p50 / p95"), lambda row: row.run.p95 or 0.0),
    "wait": (gettext_lazy("wait p50 / p95"), lambda row: row.wait.p95 or 0.0),
}


class QueueFilter(NameFilter):
    order = django_filters.ChoiceFilter(
        label=gettext_lazy("Order"),
        choices=[(key, text) for key, (text, _key) in ORDERS.items()],
        empty_label=gettext_lazy("name"),
    )


class QueueAdmin(NamedListAdmin):
    """The queues; a ``Queue`` row is made when the first one is paused."""

    filterset = QueueFilter
    detail_template = "queue"
    row_keys = ("queue", "purge")
    list_across = True
    most_rows = 200  # others are found by name
    empty = gettext_lazy("No queue has this name.")
    list_display = (
        "name", "state", "oldest", "created", "processing", "completed", "error", "poison", "total", "failed", "in_out",
        "run", "wait", "drain", "changed_settings",
    )  # fmt: skip
    page_lines = ("state", "limits", *list_display[2:-1])
    hints: ClassVar = {
        "failed": gettext_lazy("attempts that failed in the last hour"),
        "in_out": gettext_lazy("tasks enqueued and attempts ended per minute, over the last 5 minutes"),
        "run": gettext_lazy("run time of half and of 95 % of the attempts in the last hour"),
        "wait": gettext_lazy("time from due to checkout, of half and of 95 % of the attempts in the last hour"),
    }

    def list_verbs(self, request: HttpRequest) -> Sequence[permissions.Verb]:
        return permitted(request, QUEUE_VERBS.values())

    def act(self, request: HttpRequest) -> HttpResponse:
        if "set" in request.POST:
            return change_settings(self, request)
        if "purge" in request.POST:
            return purge(self, request)
        return act_on_queues(self, request, verb_of(request, QUEUE_VERBS))

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        for queue in rows:
            if not hasattr(queue, "stats"):
                queue.stats = queue_stats.stats_of_queue(queue.name)

    def listed(self, request: HttpRequest) -> Sequence[Queue]:
        """Return the queues with their figures.

        Also those that only have tasks or a living poller: this process may lack the processors of a worker.
        """
        found = queue_stats.overview(only=permissions.visible_queues(viewer(request)))
        return self.with_figures(found, self.get_queryset(request))

    def rows_of(self, filterset: Any) -> list[Queue]:  # type: ignore[override]
        """Return the queues in the order that is asked for."""
        rows = super().rows_of(filterset)
        order = filterset.form.cleaned_data.get("order") if filterset.is_valid() else ""
        return sorted(rows, key=lambda queue: ORDERS[order][1](vars(queue)["stats"]), reverse=True) if order else rows

    def with_figures(self, found: queue_stats.QueuesOverview, rows: QuerySet[Queue]) -> list[Queue]:
        """Return the queues of an overview, with a row or without."""
        stored, queues = stored_queues(rows), []
        for figures in found.queues:
            queue = stored.get(figures.queue) or Queue(name=figures.queue, overrides={})
            vars(queue)["stats"] = figures
            queues.append(queue)
        return queues

    def found(self, rows: Any, page: Page, place: int | None, filterset: Any) -> str:
        text = ngettext("%(number)s queue", "%(number)s queues", len(rows)) % {"number": len(rows)}
        more = _("%(words)s; the first %(shown)s by name: search for others")
        return more % {"words": text, "shown": len(page.rows)} if len(rows) > len(page.rows) else text

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Queue | None:
        """Return the row, or a known queue without one."""
        if not is_storable(object_id) or not viewer(request).sees(object_id):
            return None
        stored = stored_queues(self.get_queryset(request), name=object_id)
        alias = alias_for(object_id, None, write=False)
        if object_id not in stored and (conf.is_known(object_id) or queue_control.is_in_use(object_id, alias)):
            return Queue(name=object_id, overrides={})
        return stored.get(object_id)

    # -- columns -----------------------------------------------------------------------------------------------------

    @admin.display(description=gettext_lazy("state"))
    def state(self, queue: Any) -> str:
        """Show whether the queue is late, served, or paused: by whom, why, and until when."""
        row = queue.stats
        if row.pause:
            html = '{} <div class="quiet dbtq-why">{}</div>'
            return format_html(html, cells.badge("paused", "‖", _("paused")), row.pause.note)
        marks = [cells.badge("late", "✕", _("late"))] if row.late else []
        if row.unserved:
            marks.append(cells.badge("late" if row.stale else "paused", "!", _("no poller")))
        usual = ("running", "▸", _("running")) if row.pollers else ("stopped", "▪", _("no poller"))
        return SafeString(" ".join(marks)) or cells.badge(*usual)

    limits = cells.column(gettext_lazy("limits"), lambda queue: limits_text(limits_of(queue.name)) or cells.EMPTY_VALUE)

    @admin.display(description=gettext_lazy("failed, 1 h"))
    def failed(self, queue: Any) -> str:
        count = queue.stats.failed
        return self.link(cells.number(count), self.url(FailureGroup, "changelist", queue=queue.name) if count else "")

    created, processing, completed, error, poison = map(_count_column, Status)
    total = _count_column()
    in_out = _stats_column(
        gettext_lazy("in / out per min"), lambda row: cells.in_and_out(row.rate_in, row.rate_out, row.rates)
    )
    run = _stats_column(gettext_lazy("run p50 / p95"), lambda row: cells.quantiles_text(row.run))
    wait = _stats_column(gettext_lazy("wait p50 / p95"), lambda row: cells.quantiles_text(row.wait))
    oldest = _stats_column(gettext_lazy("oldest waiting"), lambda row: format_age(row.oldest))
    drain = _stats_column(gettext_lazy("time to drain"), cells.drain_text)

    changed_settings = cells.column(gettext_lazy("changed while running"), lambda queue: changes_of(queue))

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        user, name = request.user, row.name
        said, built_in = list[queue_control.Setting](), list[queue_control.Setting]()
        for one in queue_control.settings_in_force(name, row.changes):
            part = built_in if one.source == "built in" else said
            part.append(replace(one, value=setting_text(one.value), source=_source_text(one.source)))
        return {
            "types": self._types(name),
            "ended": [str(status) for status in TERMINAL],
            "settings": [("", said), (f"{len(built_in)} {_source_text('built in')}", built_in)],
            **chart_context(alias_for(name, None, write=False), viewer(request), name),
            "may_set": permissions.can_operate(user, permissions.CHANGE_SETTINGS, name),
            "may_purge": permissions.can_operate(user, PURGE, name),
        }

    def _types(self, name: str) -> list[dict[str, Any]]:
        model = model_for(name)
        return [
            {
                "name": one.payload_type or _("the queue's default"),
                "url": one.payload_type and self.url(model, "changelist", q=text_of(queue=name, type=one.payload_type)),
                "cells": [cells.number(one.statuses.get(str(status), 0)) for status in TERMINAL],
                "run": cells.quantiles_text(one.run),
                "wait": cells.quantiles_text(one.wait),
            }
            for one in queue_stats.stats_of_types(name)
        ]

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[permissions.Verb]:
        return permitted(request, QUEUE_VERBS.values() if row.stats.paused else [permissions.PAUSE], row.name)


def stored_queues(rows: QuerySet[Queue], **only: str) -> dict[str, Queue]:
    """Return the rows by name, each from the database where its queue lives."""
    homes = {name: alias_for(name, None, write=False) for name in conf.known_queues()}
    found: dict[str, Queue] = {}
    for alias in sorted({rows.db, *homes.values()}):
        found |= {row.name: row for row in rows.using(alias).filter(**only) if homes.get(row.name, alias) == alias}
    return found


def changes_of(queue: Queue) -> str:
    """Return the settings that an operator changed, such as ``lease=5m``, or a dash."""
    return ", ".join(f"{name}={_as_text(name, value)}" for name, value in queue.changes.items()) or cells.EMPTY_VALUE


def _as_text(name: str, value: Any) -> object:
    """Return a stored override as a person writes it. The row holds a duration in ISO 8601."""
    with suppress(ValueError):
        return format_duration(parse_duration(value)) if name in DURATIONS else value
    return value


def _source_text(source: str) -> str:
    in_file = _("the project's settings or settings file")
    return {
        "operator": _("changed here, while running"),
        "settings": in_file if conf.settings().file else _("the project's settings"),
        "processor": _("the processor"),
        "defaults": _("the project's default"),
        "built in": _("built in"),
    }[source]


def _queue_of(page: QueueAdmin, request: HttpRequest, key: str, verb: permissions.Verb) -> Queue:
    """Return the queue that a form names, if the user may use the verb on it."""
    queue = page.get_object(request, request.POST.get(key, "").strip())
    if queue is None:
        raise Http404
    permissions.check_may(verb, viewer(request), queue.name)
    return queue


def change_settings(page: QueueAdmin, request: HttpRequest) -> HttpResponse:
    """Set one setting of a queue; an empty value restores the project's."""
    queue = _queue_of(page, request, "queue", permissions.CHANGE_SETTINGS)
    key, value = (request.POST.get(part, "").strip() for part in ("set", "value"))
    try:
        values = {key: typed(key, value)} if value else {}
        back, reason = [] if value else [key], request.POST.get("reason", "")
        queue_control.change_settings(queue.name, values, viewer(request), reset=back, reason=reason)
    except (ImproperlyConfigured, TypeError, ValueError) as error:
        raise OperationRefused(str(error)) from None
    changed = _("%(key)s is %(value)s now.") if value else _("%(key)s is what the project says again.")
    text = changed % {"key": f"“{key}”", "value": value} + " " + _("Pollers follow within a heartbeat.")
    return page.reply(request, text)


def purge(page: QueueAdmin, request: HttpRequest) -> HttpResponse:
    """Start the bulk deletion of every task of a queue, after its name was typed."""
    queue = _queue_of(page, request, "purge", PURGE)
    if request.POST.get("typed", "").strip() != queue.name:
        raise OperationRefused(_("Type %(name)s to delete all its tasks.") % {"name": queue.name})
    reason = request.POST.get("reason", "").strip()
    operation = bulk.start(PURGE, text_of(queue=queue.name), request.user, reason)
    address = page.url(BulkOperation, "change", operation.pk)
    return page.reply(request, _("The bulk operation has started."), address=address)


def act_on_queues(page: ListAdmin, request: HttpRequest, verb: permissions.Verb) -> HttpResponse:
    """Ask for a confirmation; once confirmed, pause or resume the queues and report."""
    permissions.check_may(verb, viewer(request))
    queues: list[Any] = list(page.rows_of(page.filtered(request)))
    if request.POST.get("select_across") != "1":
        ticked = set(request.POST.getlist(ACTION_CHECKBOX_NAME))
        queues = [queue for queue in queues if queue.name in ticked]
    fitting = [queue for queue in queues if verb is permissions.PAUSE or queue.stats.paused]
    form = bound_form(request, PauseForm if verb is permissions.PAUSE else PlainForm)
    if not confirmed(request, form):
        selected = ngettext("%(count)s queue is selected.", "%(count)s queues are selected.", len(queues))
        skipped = len(queues) - len(fitting)
        left = ngettext("%(count)s is skipped: not paused.", "%(count)s are skipped: not paused.", skipped)
        sentences = [selected % {"count": len(queues)}, *([left % {"count": skipped}] if skipped else [])]
        return ask(page, request, verb, form, sentences=sentences, items=queues, possible=bool(fitting))
    given = {"reason": form.reason(), "until": form.cleaned_data.get("until")}
    changed = queue_control.apply_to_queues(verb, [queue.name for queue in fitting], viewer(request), **given)
    done, skipped = str(verb.done % {"number": changed}), len(queues) - changed
    words = _("%(done)s, %(count)s skipped: not paused.") if skipped else "%(done)s."
    level = messages.SUCCESS if changed else messages.WARNING
    return page.reply(request, words % {"done": done, "count": skipped}, level)
