"""Failure groups: what failed for the same reason, how often lately, and acting on all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.admin.display import ago
from django_dbtaskqueue.admin.filters import FailureFilter
from django_dbtaskqueue.admin.lists import SmallListAdmin
from django_dbtaskqueue.admin.searching import text_of
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Attempt, FailureGroup, Task
from django_dbtaskqueue.operations.paging import Page
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.serializers import masked_text, short_error
from django_dbtaskqueue.operations.stats.trends import WINDOWS, FailureStats, stats_of_groups
from django_dbtaskqueue.operations.verbs import TASK_VERBS, Verb


def _window(name: str) -> Callable[[Any, Any], str]:
    @admin.display(description=f"{name[:-1]} {name[-1]}")
    def column(_page: Any, group: Any) -> str:
        number = figures(group).counts[name]
        return number_format(number, force_grouping=True) if number else "·"

    return column


class FailureGroupAdmin(SmallListAdmin):
    """Failures by queue, exception, place in the project's code and message."""

    detail_template = "failure"
    filterset = FailureFilter
    ordering = ("-last_seen",)
    empty = gettext_lazy("Nothing has failed.")
    list_display = ("what", "queue", "frame", "in_1h", "in_3h", "in_24h", "in_3d", "in_7d", "first", "last", "tasks")
    list_display_links = ("what",)
    page_lines = ("queue", "error_type", "says", "frame", "first", "last", "tasks", "attempts")

    in_1h, in_3h, in_24h, in_3d, in_7d = map(_window, WINDOWS)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The group with its counts."""
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            fill([found])
        return found

    def look(
        self, request: HttpRequest, filterset: Any, rows: QuerySet[Any], before: int | None, after: int | None
    ) -> Page:
        """The groups seen last, with their counts."""
        found = super().look(request, filterset, rows, before, after)
        fill(found.slice.rows)
        return found

    @admin.display(description=gettext_lazy("failure"))
    def what(self, group: Any) -> str:
        """The exception and what it said."""
        said = masked_text(group.message)
        return f"{short_error(group.error_type)}: {said}" if group.error_type else said or group.fingerprint

    @admin.display(description=gettext_lazy("message"))
    def says(self, group: Any) -> str:
        """What it said, with what differs from one failure to the next taken out."""
        return masked_text(group.message)

    @admin.display(description=gettext_lazy("first seen"))
    def first(self, group: Any) -> str:
        """How long ago."""
        return ago(group.first_seen, group.clock)

    @admin.display(description=gettext_lazy("last seen"))
    def last(self, group: Any) -> str:
        """How long ago."""
        return ago(group.last_seen, group.clock)

    @admin.display(description=gettext_lazy("tasks in ERROR or POISON"))
    def tasks(self, group: Any) -> str:
        """The tasks that stand in ERROR or POISON for it."""
        found = figures(group).open
        query = text_of(fingerprint=group.fingerprint)
        return self.link(found, self.url(Task, "changelist", q=query)) if found else str(found)

    @admin.display(description=gettext_lazy("failed attempts"))
    def attempts(self, group: Any) -> str:
        """Each of them, with its traceback."""
        return self.link(_("all"), self.url(Attempt, "changelist", fingerprint=group.fingerprint))

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """What can be done to all its tasks in ERROR."""
        fitting = [verb for verb in TASK_VERBS.values() if Status.ERROR in verb.sources]
        return [verb for verb in fitting if can_operate(request.user, verb, row.queue)]

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """The counts, and where an act on the group is posted to."""
        query = text_of(fingerprint=row.fingerprint, status=Status.ERROR)
        windows = figures(row).counts.items()
        return {"act_url": self.url(Task, "changelist", q=query), "windows": windows, "title": self.what(row)}


def fill(groups: Sequence[FailureGroup]) -> None:
    """Read what goes with the groups of a page, all at once."""
    if groups:
        for group, found in zip(groups, stats_of_groups(groups, str(groups[0]._state.db)), strict=True):
            vars(group)["figures"] = found


def figures(group: FailureGroup) -> FailureStats:
    """Return what ``fill`` read."""
    found: FailureStats = vars(group)["figures"]
    return found
