"""Bulk operations and the audit: what operators ordered, and what came of it."""

from __future__ import annotations

from time import monotonic
from typing import Any

from django.contrib import admin
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.base import id_of
from django_dbtaskqueue.admin.confirm import check
from django_dbtaskqueue.admin.display import NOTHING, ago, badge, json_box
from django_dbtaskqueue.admin.filters import AuditFilter, BulkFilter
from django_dbtaskqueue.admin.lists import ListAdmin
from django_dbtaskqueue.models import BulkOperation, Task
from django_dbtaskqueue.models.operations import CANCELLED, FAILED, FINISHED, RUNNING, UNFINISHED, WAITING
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.verbs import VERBS

WORKING = 2.0  # seconds that a request carries out steps
MOST_SKIPS = 100  # steps whose skipped tasks are shown
LOOKS = {
    WAITING: ("created", "○"),
    RUNNING: ("processing", "◐"),
    FINISHED: ("completed", "✓"),
    CANCELLED: ("stopped", "▪"),
    FAILED: ("error", "✕"),
}


def verb_label(name: str) -> str:
    """Return a verb's name as people read it."""
    return str(VERBS[name].label) if name in VERBS else name


def number(value: int | None) -> str:
    """Return a number with its thousands apart."""
    return NOTHING if value is None else number_format(value, force_grouping=True)


class BulkOperationAdmin(ListAdmin):
    """Acts on all that match a search, chunk by chunk."""

    detail_template = "operation"
    filterset = BulkFilter
    empty = gettext_lazy("No bulk operation yet. Tick “all that match” on the task list to begin one.")
    list_display = ("id", "what", "state_badge", "bar", "changed_tasks", "skipped_tasks", "actor", "ordered")
    list_display_links = ("id",)
    page_lines = (
        "what",
        "state_badge",
        "bar",
        "changed_tasks",
        "skipped_tasks",
        "reason",
        "note",
        "actor",
        "way",
        "ordered",
        "started",
        "ended",
    )

    def act(self, request: HttpRequest) -> HttpResponse:
        """Cancel an operation, or carry out steps of the unfinished ones here."""
        number = id_of(request.POST.get("operation", ""))
        operation = None if number is None else self.get_queryset(request).filter(pk=number).first()
        if operation is None:
            raise Http404
        alias = self.get_queryset(request).db
        if "cancel" in request.POST:
            done = bulk.cancel(operation.pk, request.user, using=alias)
            self.message_user(request, _("It is cancelled.") if done else _("It had ended already."))
        else:
            check(request, VERBS[operation.verb])
            deadline = monotonic() + WORKING
            while bulk.turn(alias) and monotonic() < deadline:
                pass
        return HttpResponseRedirect(self.page_of(operation))

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Whether it can still be stopped, and the tasks it passed over."""
        known = VERBS.get(row.verb)
        may = known is not None and can_operate(request.user, known)
        skips = row.skipped_tasks.order_by("pk")[:MOST_SKIPS]
        return {"unfinished": may and row.state in UNFINISHED, "skips": skips, "task_url": self.url(Task, "changelist")}

    @admin.display(description=gettext_lazy("what"))
    def what(self, operation: Any) -> str:
        """The verb and the search it goes by."""
        return format_html("{} <code>{}</code>", verb_label(operation.verb), operation.query)

    @admin.display(description=gettext_lazy("state"))
    def state_badge(self, operation: Any) -> str:
        """Icon, word and colour."""
        kind, icon = LOOKS.get(operation.state, ("unknown", "?"))
        return badge(kind, icon, operation.get_state_display())

    @admin.display(description=gettext_lazy("progress"))
    def bar(self, operation: Any) -> str:
        """How much of the table it has been through."""
        percent = int(100 * operation.progress)
        return format_html(
            '<progress max="100" value="{}" aria-label="{}">{}%</progress> {}%',
            percent,
            _("progress"),
            percent,
            percent,
        )

    @admin.display(description=gettext_lazy("changed"))
    def changed_tasks(self, operation: Any) -> str:
        """So far, of how many that were expected."""
        if operation.estimate is None:
            return number(operation.changed)
        expected = number(operation.estimate) + ("+" if operation.estimate_more else "")
        return _("%(changed)s of %(expected)s") % {"changed": number(operation.changed), "expected": expected}

    @admin.display(description=gettext_lazy("skipped"))
    def skipped_tasks(self, operation: Any) -> str:
        """How many, and the reasons."""
        if not operation.skipped:
            return number(operation.skipped)
        reasons = ", ".join(f"{reason}: {number(count)}" for reason, count in (operation.skips or {}).items())
        return f"{number(operation.skipped)} ({reasons})" if reasons else number(operation.skipped)

    @admin.display(description=gettext_lazy("ordered"))
    def ordered(self, operation: Any) -> str:
        """How long ago."""
        return ago(operation.create_time, operation.clock)

    @admin.display(description=gettext_lazy("ended"))
    def ended(self, operation: Any) -> str:
        """How long ago."""
        return ago(operation.finish_time, operation.clock)


class AuditEntryAdmin(ListAdmin):
    """Who did what, with which search, to how many, and why."""

    several = gettext_lazy("audit entries")

    filterset = AuditFilter
    empty = gettext_lazy("Nobody has acted yet.")
    list_display = ("id", "when", "actor", "what", "target", "changed_tasks", "skipped_tasks", "reason", "way")
    list_display_links = ("id",)
    page_lines = (
        "when",
        "actor",
        "what",
        "target",
        "changed_tasks",
        "skipped_tasks",
        "reason",
        "way",
        "operation_link",
        "details_box",
    )

    @admin.display(description=gettext_lazy("when"))
    def when(self, entry: Any) -> str:
        """How long ago."""
        return ago(entry.time, entry.clock)

    @admin.display(description=gettext_lazy("verb"))
    def what(self, entry: Any) -> str:
        """What was done."""
        return verb_label(entry.verb)

    @admin.display(description=gettext_lazy("to what"))
    def target(self, entry: Any) -> str:
        """The search, or the queue."""
        return format_html("<code>{}</code>", entry.query or entry.queue) if entry.query or entry.queue else NOTHING

    @admin.display(description=gettext_lazy("changed"))
    def changed_tasks(self, entry: Any) -> str:
        """How many rows it really changed."""
        return number(entry.changed)

    @admin.display(description=gettext_lazy("skipped"))
    def skipped_tasks(self, entry: Any) -> str:
        """How many it passed over."""
        return number(entry.skipped)

    @admin.display(description=gettext_lazy("bulk operation"))
    def operation_link(self, entry: Any) -> str:
        """The bulk operation that carried it out."""
        key = entry.operation_id
        return self.link(key, self.url(BulkOperation, "change", key)) if key else NOTHING

    @admin.display(description=gettext_lazy("details"))
    def details_box(self, entry: Any) -> str:
        """What else was written down."""
        return json_box(entry.details or None)
