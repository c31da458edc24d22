"""Pollers, bulk operations and the audit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import django_filters
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import may_see, permitted, viewer
from django_dbtaskqueue.admin.list_pages import FilterSet, ListAdmin, QueuePickFilter, SmallListAdmin, part_of_name
from django_dbtaskqueue.admin.page_actions import PlainForm, ask, bound_form, confirmed, verb_of
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.models import BulkOperation, FailureGroup, Task, control
from django_dbtaskqueue.models.readable import as_list
from django_dbtaskqueue.operations import bulk, queue_control
from django_dbtaskqueue.operations.permissions import CONTROL_POLLERS, Actor, Verb, check_cancel, check_may, narrow
from django_dbtaskqueue.operations.queue_control import POLLER_VERBS, STOPPED_STATE
from django_dbtaskqueue.operations.schedules import SCHEDULE_VERBS
from django_dbtaskqueue.operations.serializers import is_storable, short_error, with_errors
from django_dbtaskqueue.operations.verbs import PUT_BACK, VERBS

WORK_TIME_S = 2.0  # in which a request carries out steps
MAX_COMMANDED_POLLERS = 500  # in one action
MAX_NAMED_IN_AUDIT = 3  # tasks in a line of the audit
MAX_SHOWN_SKIPS = 100  # steps whose skipped tasks are shown
RUNNING_STATE = "RUNNING"  # of a poller; it starts or stops in any other state
OPERATION_BADGES = {
    control.WAITING: ("created", "○"),
    control.RUNNING: ("processing", "◐"),
    control.FINISHED: ("completed", "✓"),
    control.CANCELLED: ("stopped", "▪"),
    control.FAILED: ("error", "✕"),
}


class AuditFilter(QueuePickFilter):
    actor = django_filters.CharFilter(label=gettext_lazy("Who"))
    verb = django_filters.CharFilter(label=gettext_lazy("Verb"))


class BulkFilter(FilterSet):
    state = django_filters.ChoiceFilter(
        label=gettext_lazy("State"), choices=control.STATES, empty_label=gettext_lazy("any")
    )
    actor = django_filters.CharFilter(label=gettext_lazy("Who"))


def verb_label(name: str) -> str:
    verb = {**VERBS, **SCHEDULE_VERBS, PUT_BACK.name: PUT_BACK}.get(name)
    return str(verb.label) if verb else name


class SearchedAdmin(ListAdmin):
    """Rows with a search, shown with the error of a failure group in the place of its fingerprint."""

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        groups = narrow(FailureGroup.objects.using(rows[0]._state.db if rows else None), viewer(request))
        texts = with_errors([row.query for row in rows], groups)
        for row, text in zip(rows, texts, strict=True):
            row.explained = text


class BulkOperationAdmin(SearchedAdmin):
    """Actions on all tasks that match a search, in steps."""

    detail_template = "operation"
    row_keys = ("operation",)
    filterset = BulkFilter
    empty = gettext_lazy("No bulk operation yet. Tick “all that match” on the task list to begin one.")
    list_display = ("id", "what", "state_badge", "bar", "changed_tasks", "skipped_tasks", "actor", "ordered")
    page_lines = (*list_display[1:6], "reason", "note", "actor", "source", "ordered", "started", "ended")

    def act(self, request: HttpRequest) -> HttpResponse:
        """Cancel an operation, or carry out steps of unfinished operations in this request."""
        operation = self.get_object(request, request.POST.get("operation", ""))
        if operation is None:
            raise Http404
        alias = self.get_queryset(request).db
        if "put_back" in request.POST:
            return self._put_back(request, operation, alias)
        if "cancel" in request.POST:
            done = bulk.cancel(operation.pk, request.user, using=alias)
            return self.reply(request, _("It is cancelled.") if done else _("It had ended already."), messages.INFO)
        check_may(bulk.verb_of(operation), viewer(request))
        deadline = clock.monotonic() + WORK_TIME_S
        while bulk.turn(alias) and clock.monotonic() < deadline:
            pass
        return redirect(self.page_of(operation))

    def _put_back(self, request: HttpRequest, operation: BulkOperation, alias: str) -> HttpResponse:
        """Ask for a confirmation; once confirmed, order that its tasks become what they were."""
        check_cancel(operation, bulk.verb_of(operation), viewer(request))
        form = bound_form(request, PlainForm)
        if refusal := bulk.why_not_put_back(operation):
            raise OperationRefused(refusal)
        if not confirmed(request, form):
            text = ngettext("It changed %(count)s task.", "It changed %(count)s tasks.", operation.changed)
            sentences = [text % {"count": cells.number(operation.changed)}]
            return ask(self, request, PUT_BACK, form, sentences=sentences)
        back = bulk.put_back(operation.pk, request.user, form.reason(), alias)
        return self.reply(request, _("The bulk operation has started."), address=self.page_of(back))

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        may = str(row.options.get("verb", row.verb)) in VERBS and can_cancel(row, viewer(request))
        no_undo = "" if row.state in control.UNFINISHED else bulk.why_not_put_back(row)
        return {
            "title": f"{verb_label(row.verb)}: {row.explained}",
            "unfinished": may and row.state in control.UNFINISHED,
            "may_put_back": may and row.state not in control.UNFINISHED and not no_undo,
            "no_undo": no_undo,
            "skips": row.changes.exclude(skip_reason="").order_by("pk")[:MAX_SHOWN_SKIPS],
            "task_url": self.url(Task, "changelist"),
        }

    what = cells.column(
        gettext_lazy("what"), lambda row: format_html("{} <code>{}</code>", verb_label(row.verb), row.explained)
    )
    ordered = cells.age_column(gettext_lazy("ordered"), "create_time")
    ended = cells.age_column(gettext_lazy("ended"), "finish_time")

    @admin.display(description=gettext_lazy("state"))
    def state_badge(self, operation: Any) -> str:
        kind, icon = OPERATION_BADGES.get(operation.state, ("unknown", "?"))
        return cells.badge(kind, icon, operation.get_state_display())

    bar = cells.column(gettext_lazy("progress"), lambda operation: cells.progress(int(100 * operation.progress)))

    @admin.display(description=gettext_lazy("changed"))
    def changed_tasks(self, operation: Any) -> str:
        if operation.estimate is None or operation.estimate < operation.changed:  # more came to match meanwhile
            return cells.number(operation.changed)
        expected = cells.number(operation.estimate) + ("+" if operation.estimate_more else "")
        return _("%(changed)s of %(expected)s") % {"changed": cells.number(operation.changed), "expected": expected}

    @admin.display(description=gettext_lazy("skipped"))
    def skipped_tasks(self, operation: Any) -> str:
        reasons = ", ".join(f"{reason}: {cells.number(count)}" for reason, count in operation.skips.items())
        number = cells.number(operation.skipped)
        return f"{number} ({reasons})" if operation.skipped and reasons else number


class AuditEntryAdmin(SearchedAdmin):
    """The audit: user, verb, search, numbers and reason of each action."""

    plural = gettext_lazy("audit entries")

    filterset = AuditFilter
    empty = gettext_lazy("No action yet.")
    list_display = ("id", "when", "actor", "what", "target", "changed_tasks", "skipped_tasks", "reason", "source")
    page_lines = (*list_display[1:], "operation_link", "details_box")

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Add what changed in an edited payload, for users who may see payloads."""
        changes = row.changes.filter(difference__isnull=False).values_list("difference", flat=True)
        shown = list(changes[:1]) if may_see(request, row) else []
        boxes = [(_("changes of the payload"), cells.json_box(one), "difference") for one in shown]
        return {"title": f"{row.actor}: {self.what(row)} {row.explained or row.queue}", "boxes": boxes}

    when = cells.age_column(gettext_lazy("when"), "time")
    what = cells.column(gettext_lazy("verb"), lambda entry: entry.details.get("action") or verb_label(entry.verb))
    changed_tasks = cells.number_column(gettext_lazy("changed"), "changed")
    skipped_tasks = cells.number_column(gettext_lazy("skipped"), "skipped")
    details_box = cells.box_column(gettext_lazy("details"), "details", lambda details: cells.json_box(details or None))

    @admin.display(description=gettext_lazy("to what"))
    def target(self, entry: Any) -> str:
        """Show the first tasks with their errors; of a bulk operation, its search; else the queue."""
        tasks = [one for one in as_list(entry.details.get("tasks")) if isinstance(one, dict) and "id" in one]
        skipped = entry.details.get("skipped_ids")
        ids = [pk for some in (skipped.values() if isinstance(skipped, dict) else ()) for pk in as_list(some)]
        names = [self._name_of(entry, one) for one in tasks or [{"id": pk} for pk in ids]][:MAX_NAMED_IN_AUDIT]
        if not names or (entry.operation_id and not tasks):
            text = entry.explained or entry.queue
            return format_html("<code>{}</code>", text) if text else cells.EMPTY_VALUE
        shown = format_html_join(", ", "{}", ((name,) for name in names))
        left = (entry.changed if tasks else len(ids)) - len(names)
        more = _("and %(count)s more") % {"count": cells.number(left)}
        return format_html("{} {}", shown, more) if left > 0 else shown

    def _name_of(self, entry: Any, task: dict[str, Any]) -> str:
        model = model_for(entry.queue) if entry.queue else Task
        name = self.link(task.get("reference") or task["id"], self.url(model, "change", task["id"]))
        return format_html("{} ({})", name, short_error(task["error"])) if task.get("error") else name

    @admin.display(description=gettext_lazy("bulk operation"))
    def operation_link(self, entry: Any) -> str:
        return self.link(entry.operation_id, self.url(BulkOperation, "change", entry.operation_id))


class PollerFilter(FilterSet):
    instance = part_of_name()


class PollerAdmin(SmallListAdmin):
    """Pollers, as they last reported."""

    filterset = PollerFilter
    empty = gettext_lazy("No poller has reported yet. Start one with: manage.py runtaskpoller")

    list_display = (
        "instance", "state_badge", "heartbeat", "version", "queue_names", "held_of", "finished", "failed", "runs",
    )  # fmt: skip
    ordering = ("-heartbeat_time",)
    page_lines = (*list_display, "host", "pid", "release", "started", "applied_box")

    heartbeat = cells.age_column(gettext_lazy("heartbeat"), "heartbeat_time")
    queue_names = cells.column(
        gettext_lazy("queues"), lambda poller: ", ".join(map(queue_name, poller.queues)) or cells.EMPTY_VALUE
    )
    held_of = cells.column(gettext_lazy("held / slots"), lambda poller: f"{poller.held}/{poller.slots}")
    finished = cells.number_column(gettext_lazy("attempts ended"), "finished")
    failed = cells.number_column(gettext_lazy("attempts failed"), "failed")
    applied_box = cells.box_column(gettext_lazy("applied settings"), "applied_settings", cells.box)

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        """Take out what a poller reports of queues that the user may not view."""
        actor = viewer(request)
        for poller in () if actor.sees_all else rows:
            hidden = [name for name in control.queue_names_in(poller.queues) if not actor.sees(name)]
            poller.queues = [one for one in poller.queues if actor.sees(control.queue_names_in([one])[0])]
            poller.running = [one for one in poller.running if actor.sees(control.queue_names_in([one])[0])]
            poller.applied_settings = "" if hidden else poller.applied_settings

    def list_verbs(self, request: HttpRequest) -> Sequence[Verb]:
        return permitted(request, POLLER_VERBS.values())

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        return [] if row.state == STOPPED_STATE else self.list_verbs(request)

    def act(self, request: HttpRequest) -> HttpResponse:
        """Ask for a confirmation; once confirmed, send the command to the ticked pollers that still run."""
        verb = verb_of(request, POLLER_VERBS)
        check_may(CONTROL_POLLERS, viewer(request))
        ticked = filter(is_storable, request.POST.getlist(ACTION_CHECKBOX_NAME)[:MAX_COMMANDED_POLLERS])
        rows = self.get_queryset(request).filter(pk__in=list(ticked))
        running = [poller.instance for poller in rows if poller.state != STOPPED_STATE]
        form = bound_form(request, PlainForm)
        if not confirmed(request, form):
            text = ngettext("%(count)s poller would follow.", "%(count)s pollers would follow.", len(running))
            sentences = [text % {"count": len(running)}]
            return ask(self, request, verb, form, sentences=sentences, items=running, possible=bool(running))
        commanded = queue_control.command_pollers(
            running, verb.name, viewer(request), reason=form.reason(), using=rows.db
        )
        done = str(verb.done % {"number": commanded})
        follow = _("%(done)s: they follow within a heartbeat.") % {"done": done}
        return self.reply(request, follow, messages.SUCCESS if commanded else messages.WARNING)

    @admin.display(description=gettext_lazy("state"))
    def state_badge(self, poller: Any) -> str:
        if poller.requested_command:
            facts = {"state": poller.state, "command": poller.requested_command}
            return cells.badge("paused", "◌", _("%(state)s, %(command)s requested") % facts)
        if poller.state == STOPPED_STATE:
            return cells.badge("stopped", "▪", poller.state)
        if poller.clock - poller.heartbeat_time > control.MISSED_HEARTBEATS * conf.settings().heartbeat:
            return cells.badge("late", "✕", _("%(state)s, late") % {"state": poller.state})
        kind, icon = ("running", "▸") if poller.state == RUNNING_STATE else ("paused", "◌")
        return cells.badge(kind, icon, poller.state)

    @admin.display(description=gettext_lazy("running"))
    def runs(self, poller: Any) -> str:
        held = [(item["task_id"], item.get("queue")) for item in poller.running if isinstance(item.get("task_id"), int)]
        links = ((self.link(pk, self.url(model_for(str(queue)), "change", pk)),) for pk, queue in held)
        return format_html_join(", ", "{}", links) or cells.EMPTY_VALUE


def can_cancel(operation: BulkOperation, actor: Actor) -> bool:
    with suppress(PermissionDenied):
        check_cancel(operation, bulk.verb_of(operation), actor)
        return True
    return False


def queue_name(item: Any) -> str:
    """Return a queue as a poller reports it: by name, or with its weight when that is not 1."""
    if not isinstance(item, dict):
        return str(item)
    weight = item.get("weight", 1)
    return str(item.get("queue")) if weight == 1 else f"{item.get('queue')}:{weight}"
