"""Pollers, failed attempts and the history: to be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.display import NOTHING, ago, badge, box
from django_dbtaskqueue.admin.filters import AttemptFilter, HistoryFilter, NameFilter
from django_dbtaskqueue.admin.lists import ListAdmin, SmallListAdmin
from django_dbtaskqueue.admin.poller_actions import tell_pollers
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.models import AbstractTask
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.queue_control import POLLER_VERBS, STOPPED_STATE
from django_dbtaskqueue.operations.serializers import message_of, short_error
from django_dbtaskqueue.operations.verbs import Verb

LATE = 3  # heartbeats missed before a poller counts as late
RUNNING = "RUNNING"  # any other state is on the way to it or away from it


class PollerAdmin(SmallListAdmin):
    """Pollers, as they last reported."""

    filterset = NameFilter
    empty = gettext_lazy("No poller has reported yet. Start one with: manage.py runtaskpoller")

    list_display = (
        "instance",
        "state_badge",
        "heartbeat",
        "version",
        "queue_names",
        "held_of",
        "finished",
        "failed",
        "runs",
    )
    list_display_links = ("instance",)
    ordering = ("-heartbeat_time",)
    page_lines = (
        "instance",
        "host",
        "pid",
        "version",
        "state_badge",
        "heartbeat",
        "started",
        "queue_names",
        "held_of",
        "finished",
        "failed",
        "runs",
        "applied_box",
    )

    def list_verbs(self, request: HttpRequest) -> Sequence[Verb]:
        """What pollers can be told, for those who may."""
        return [verb for verb in POLLER_VERBS.values() if can_operate(request.user, verb)]

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """The same, while it runs."""
        return [] if row.state == STOPPED_STATE else self.list_verbs(request)

    def act(self, request: HttpRequest) -> HttpResponse:
        """Ask, or tell the ticked pollers."""
        return tell_pollers(self, request)

    @admin.display(description=gettext_lazy("state"))
    def state_badge(self, poller: Any) -> str:
        """What it said of itself, and whether it is late."""
        if poller.requested_command:
            facts = {"state": poller.state, "command": poller.requested_command}
            return badge("paused", "◌", _("%(state)s, %(command)s requested") % facts)
        if poller.state == STOPPED_STATE:
            return badge("stopped", "▪", poller.state)
        if is_late(poller):
            return badge("late", "✕", _("%(state)s, late") % {"state": poller.state})
        return badge("running", "▸", poller.state) if poller.state == RUNNING else badge("paused", "◌", poller.state)

    @admin.display(description=gettext_lazy("heartbeat"))
    def heartbeat(self, poller: Any) -> str:
        """How long ago."""
        return ago(poller.heartbeat_time, poller.clock)

    @admin.display(description=gettext_lazy("queues"))
    def queue_names(self, poller: Any) -> str:
        """Which it serves."""
        return ", ".join(map(queue_name, as_list(poller.queues))) or NOTHING

    @admin.display(description=gettext_lazy("held / slots"))
    def held_of(self, poller: Any) -> str:
        """Leases held, of how many it can run at a time."""
        return f"{poller.held}/{poller.slots}"

    @admin.display(description=gettext_lazy("tasks finished"))
    def finished(self, poller: Any) -> str:
        """Since it started."""
        return str(poller.finished)

    @admin.display(description=gettext_lazy("running"))
    def runs(self, poller: Any) -> str:
        """The tasks in hand, as links."""
        links = ((self.link(number, self.url(model, "change", number)),) for number, model in running(poller))
        return format_html_join(", ", "{}", links) or NOTHING

    @admin.display(description=gettext_lazy("applied settings"))
    def applied_box(self, poller: Any) -> str:
        """Runtime overrides it took over."""
        return box(poller.applied_settings)


def is_late(poller: Any) -> bool:
    """Whether the poller missed three heartbeats."""
    return bool(poller.clock - poller.heartbeat_time > LATE * conf.settings().heartbeat)


def as_list(value: Any) -> list[Any]:
    """Return a JSON list as it is, and anything else as empty."""
    return value if isinstance(value, list) else []


def queue_name(item: Any) -> str:
    """Return a queue as a poller reports it: by name, or with its weight when that is not 1."""
    if not isinstance(item, dict):
        return str(item)
    weight = item.get("weight", 1)
    return str(item.get("queue")) if weight == 1 else f"{item.get('queue')}:{weight}"


def running(poller: Any) -> Iterator[tuple[int, type[AbstractTask]]]:
    """Yield the id and the table of each task the poller said it runs."""
    for item in as_list(poller.running):
        if isinstance(item, dict) and isinstance(item.get("task_id"), int):
            yield item["task_id"], model_for(str(item.get("queue")))


class AttemptAdmin(ListAdmin):
    """Failed attempts."""

    list_display = ("id", "task_link", "queue", "attempt", "exception", "says", "failed")
    list_display_links = ("id",)
    long_columns = ("traceback",)
    filterset = AttemptFilter
    secrets = ("message_box", "traceback_box")
    page_lines = (
        "task_link",
        "location",
        "queue",
        "attempt",
        "total_attempt",
        "poller_instance",
        "started",
        "failed",
        "error_type",
    )

    def filtered(self, request: HttpRequest) -> Any:
        """In the tables that this site shows."""
        return located(super().filtered(request), self.admin_site)

    @admin.display(description=gettext_lazy("task"))
    def task_link(self, attempt: Any) -> str:
        """The task it was an attempt of."""
        table = task_tables(self.admin_site).get(attempt.location)
        return self.link(attempt.task_id, self.url(table, "change", attempt.task_id) if table else "")

    @admin.display(description=gettext_lazy("exception"))
    def exception(self, attempt: Any) -> str:
        """Its class, without the module."""
        return short_error(attempt.error_type)

    @admin.display(description=gettext_lazy("message"))
    def says(self, attempt: Any) -> str:
        """Its first line."""
        return message_of(attempt.message)

    @admin.display(description=gettext_lazy("failed"))
    def failed(self, attempt: Any) -> str:
        """How long ago."""
        return ago(attempt.finish_time, attempt.clock)

    @admin.display(description=gettext_lazy("message"))
    def message_box(self, attempt: Any) -> str:
        """All of it."""
        return box(attempt.message)

    @admin.display(description=gettext_lazy("traceback"))
    def traceback_box(self, attempt: Any) -> str:
        """All of it."""
        return box(attempt.traceback)


class TaskHistoryAdmin(ListAdmin):
    """Tasks that left TASKS."""

    filterset = HistoryFilter
    several = gettext_lazy("tasks in history")
    secrets = ("process_result_box", "payload_box", "result_box", "context_box")
    list_display = (
        "id",
        "task_id",
        "reference",
        "queue",
        "status_badge",
        "says",
        "created",
        "finished",
        "moved",
    )
    list_display_links = ("id", "reference")
    long_columns = ("payload", "result", "context")
    page_lines = (
        "task_id",
        "location",
        "status_badge",
        "queue",
        "reference",
        "attempts",
        "poller_instance",
        "created",
        "started",
        "finished",
        "moved",
    )

    def filtered(self, request: HttpRequest) -> Any:
        """In the tables that this site shows."""
        return located(super().filtered(request), self.admin_site)

    @admin.display(description=gettext_lazy("moved"))
    def moved(self, task: Any) -> str:
        """How long ago it left TASKS."""
        return ago(task.moved_time, task.clock)

    @admin.display(description=gettext_lazy("error"))
    def says(self, task: Any) -> str:
        """One line of it; a result is for those who may see payloads, on its page."""
        return "" if task.status == Status.COMPLETED else message_of(task.process_result)


def task_tables(site: admin.AdminSite) -> dict[str, type[AbstractTask]]:
    """Return the task tables this admin site shows, by location. A location in a row is looked up here only."""
    shown: Iterable[Any] = site._registry
    return {model._meta.label_lower: model for model in shown if issubclass(model, AbstractTask)}


def located(filterset: Any, site: admin.AdminSite) -> Any:
    """Return the FilterSet, told which task tables the site shows."""
    filterset.locations = tuple(task_tables(site))
    return filterset
