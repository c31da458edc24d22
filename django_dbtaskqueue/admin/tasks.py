"""Tasks: the list, the page of one task, and what can be done to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.acting import action_of
from django_dbtaskqueue.admin.base import QueueFilter, ReadOnlyAdmin, StatusFilter, id_of
from django_dbtaskqueue.admin.display import NOTHING, ago, stamp, summary
from django_dbtaskqueue.models import AbstractTask, Attempt, Poller, Queue
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.verbs import IN_EFFECT, TASK_VERBS, Verb
from django_dbtaskqueue.session import alias_for
from django_dbtaskqueue.status import Status

LONG = ("payload", "result", "context")
MOST_ATTEMPTS = 50  # failed attempts on the page of a task
OPTIONAL = ("payload_type", "group_key", "tag", "parked_by")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a task, or will."""

    time: datetime
    shown: str
    what: str
    note: str = ""


class TaskAdmin(ReadOnlyAdmin):
    """A task table. Rows change by the verbs only: by hand they would break the flow."""

    change_form_template = "admin/dbtaskqueue/task/change_form.html"  # also for tables of other apps

    list_display = ("id", "reference", "queue_link", "status_badge", "attempts", "says", "when", "created")
    list_display_links = ("id", "reference")
    list_filter = (StatusFilter, QueueFilter)
    sortable_by = ("id",)
    filters_by = ("status", "queue", "reference", "id")
    long_columns = LONG
    search_fields = ("id", "reference")
    search_help_text = gettext_lazy("An id, a reference, or how references begin")
    actions = [action_of(verb) for verb in TASK_VERBS.values()]  # noqa: RUF012 -- Django reads it

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Only the verbs this user has the permission for; each act asks again."""
        return {
            name: action
            for name, action in super().get_actions(request).items()
            if name in TASK_VERBS and can_operate(request.user, TASK_VERBS[name])
        }

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find by id or whole reference; when there is none, by how a reference begins. Never by payload."""
        term = search_term.strip()
        if not term:
            return queryset, False
        number = id_of(term)
        exact = queryset.filter(Q(reference=term) | Q(pk__in=[] if number is None else [number]))
        return (exact if exact.exists() else queryset.filter(reference__startswith=term)), False

    # -- columns -----------------------------------------------------------------------------------------------------

    @admin.display(description=gettext_lazy("queue"))
    def queue_link(self, task: Any) -> str:
        """The queue, as a link to its tasks."""
        return self.link(task.queue, self.url(self.model, "changelist", queue=task.queue))

    @admin.display(description=gettext_lazy("when"))
    def when(self, task: Any) -> str:
        """When it can be taken, how long it is held, or when it ended."""
        if task.parked_by:
            return _("parked")
        if task.status == Status.CREATED:
            return _within(_("due %(time)s"), ago(task.next_process_time, task.clock))
        if task.status == Status.PROCESSING:
            over = task.next_process_time <= task.clock
            words = _("lease ran out %(time)s") if over else _("lease ends %(time)s")
            return _within(words, ago(task.next_process_time, task.clock))
        return _within(_("finished %(time)s"), ago(task.finish_time or task.last_update_time, task.clock))

    @admin.display(description=gettext_lazy("result or error"))
    def says(self, task: Any) -> str:
        """One line of it."""
        return summary(task.process_result)

    # -- the page of one task ----------------------------------------------------------------------------------------

    @admin.display(description=gettext_lazy("now"))
    def situation(self, task: Any) -> str:
        """Where the task stands, in a sentence."""
        when = ago(task.next_process_time, task.clock)
        if task.status == Status.PROCESSING:
            over = task.next_process_time <= task.clock
            return _within(_over(task) if over else _("Being processed; the lease ends %(time)s."), when)
        if task.status == Status.CREATED:
            return self._waiting(task, when)
        return _within(_("Finished %(time)s."), ago(task.finish_time or task.last_update_time, task.clock))

    def _waiting(self, task: Any, when: str) -> str:
        if task.parked_by:
            return _("Parked: %(reason)s.") % {"reason": task.parked_by}
        if Queue.objects.using(alias_for(task.queue, None, write=False)).filter(IN_EFFECT, name=task.queue).exists():
            return _("In line, but the queue is paused.")
        if task.next_process_time <= task.clock:
            return _within(_("Due %(time)s, waiting for a poller."), when)
        return _within(_("In line, due %(time)s."), when)

    @admin.display(description=gettext_lazy("poller"))
    def poller(self, task: Any) -> str:
        """Who holds it, or held it last."""
        if not task.poller_instance:
            return NOTHING
        known = Poller.objects.filter(pk=task.poller_instance).exists()
        return self.link(task.poller_instance, self.url(Poller, "change", task.poller_instance) if known else "")

    @admin.display(description=gettext_lazy("attempts"))
    def attempts_made(self, task: Any) -> str:
        """The three counters, in words."""
        return _("%(attempt)s of %(most)s; taken %(total)s times in all, put back %(reenqueued)s times") % {
            "attempt": task.attempt,
            "most": task.max_attempts,
            "total": task.total_attempt,
            "reenqueued": task.reenqueue_attempt,
        }

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """What there is to say of this task; columns that are empty for most tasks only when they are not."""
        filled = [name for name in OPTIONAL if obj is not None and getattr(obj, name)]
        names = ["status_badge", "situation", "queue_link", "reference", "attempts_made", "poller", "priority", *filled]
        boxes = ["process_result_box", "payload_box", "result_box"]
        boxes += ["context_box"] if obj is not None and obj.context else []
        return ((None, {"fields": names}), (gettext_lazy("Data"), {"fields": boxes}))

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """The verbs that apply to the task's status and that the user may use."""
        return [verb for verb in TASK_VERBS.values() if row.status in verb.sources and can_operate(request.user, verb)]

    def page_facts(self, row: Any) -> dict[str, Any]:
        """The failed attempts and the timeline."""
        failed = list(failed_attempts(row))
        return {"failed": failed, "events": timeline(row, failed)}


def failed_attempts(task: AbstractTask) -> QuerySet[Attempt]:
    """Return the last failed attempts of a task, the newest first."""
    location = task._meta.label_lower
    return Attempt.objects.filter(location=location, task_id=task.pk).order_by("-total_attempt")[:MOST_ATTEMPTS]


def timeline(task: Any, failed: list[Attempt]) -> list[Event]:
    """Return what is known to have happened to a task and what is to come, in order of time."""
    known: list[tuple[datetime | None, Any, str]] = [
        (task.create_time, _("created"), ""),
        (task.ready_time if task.status == Status.CREATED else None, _("in line from"), ""),
        (task.start_time, _("last taken"), task.poller_instance or ""),
        (task.next_process_time if task.status == Status.PROCESSING else None, _("lease ends"), ""),
        (task.finish_time, _("finished"), task.status),
        (task.expire_time, _("expires"), ""),
    ]
    known += [(row.finish_time, _("attempt %(n)s failed") % {"n": row.attempt}, _error(row)) for row in failed]
    events = [Event(time, stamp(time), what, note) for time, what, note in known if time is not None]
    return sorted(events, key=lambda event: event.time)


def _error(attempt: Attempt) -> str:
    return summary(f"{attempt.error_type}: {attempt.message}" if attempt.error_type else attempt.message)


def _over(task: Any) -> str:
    if task.attempt < task.max_attempts:
        return _("The lease ran out %(time)s: the next checkout takes the task over.")
    return _("The lease ran out %(time)s on the last attempt: a poller will write ERROR.")


def _within(words: str, time: str) -> str:
    """Put a ``<time>`` into a sentence."""
    before, _placeholder, after = words.partition("%(time)s")
    return format_html("{}{}{}", before, time, after)
