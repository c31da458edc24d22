"""What the lists beside the tasks can be searched by: a few indexed columns each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import django_filters
from django import forms
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.admin.base import id_of
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.models import AuditEntry, BulkOperation, FailureGroup
from django_dbtaskqueue.models.operations import STATES

if TYPE_CHECKING:

    class FilterSet:
        """What the library calls so; it publishes no types."""

        def __init__(self, data: Any, *, queryset: Any, request: Any) -> None: ...

else:
    FilterSet = django_filters.FilterSet


def of_task(rows: QuerySet[Any], term: str, locations: Iterable[str]) -> QuerySet[Any]:
    """Return the rows about the task whose id was typed; for any other text none."""
    number = id_of(term.strip())
    # With the locations, for the index begins with them.
    return rows.none() if number is None else rows.filter(location__in=list(locations), task_id=number)


class AboutTasks(FilterSet):
    """Rows about a task: by its id."""

    task_id = django_filters.CharFilter(label=_("Task"), method="of_task")
    locations: tuple[str, ...] = ()  # the tables that an admin site shows

    def of_task(self, rows: QuerySet[Any], _name: str, value: str) -> QuerySet[Any]:
        """By the id a task has or had."""
        return of_task(rows, value, self.locations)


class AttemptFilter(AboutTasks):
    """Failed attempts."""

    fingerprint = django_filters.CharFilter(label=_("Failure group"))


class HistoryFilter(AboutTasks):
    """Tasks that left TASKS."""

    queue = django_filters.CharFilter(label=_("Queue"))
    status = django_filters.ChoiceFilter(
        label=_("Status"), choices=[(str(status), str(status)) for status in TERMINAL], empty_label=_("any")
    )
    reference = django_filters.CharFilter(label=_("Reference"))


class FailureFilter(FilterSet):
    """Failure groups."""

    queue = django_filters.CharFilter(label=_("Queue"))
    error_type = django_filters.CharFilter(label=_("Exception"), lookup_expr="icontains")

    class Meta:
        model = FailureGroup
        fields = ()


class AuditFilter(FilterSet):
    """Acts."""

    actor = django_filters.CharFilter(label=_("Who"))
    verb = django_filters.CharFilter(label=_("Verb"))
    queue = django_filters.CharFilter(label=_("Queue"))

    class Meta:
        model = AuditEntry
        fields = ()


class BulkFilter(FilterSet):
    """Bulk operations."""

    state = django_filters.ChoiceFilter(label=_("State"), choices=STATES, empty_label=_("any"))
    actor = django_filters.CharFilter(label=_("Who"))

    class Meta:
        model = BulkOperation
        fields = ()


class ReportFilter(FilterSet):
    """Reports of the pipeline."""

    kind = django_filters.CharFilter(label=_("Job"))


class NameFilter(FilterSet):
    """Things that have a name: by a part of it."""

    name = django_filters.CharFilter(
        label=_("Name"), lookup_expr="icontains", widget=forms.TextInput(attrs={"type": "search"})
    )
