"""Batches and workflows: how far each is, its graph, and the verbs on all of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_dbtaskqueue.admin.list_pages import NameFilter, SmallListAdmin
from django_dbtaskqueue.admin.page_actions import Question, ask, bound_form, check, confirmed
from django_dbtaskqueue.admin.read_only import (
    EMPTY_VALUE,
    age_column,
    column,
    number,
    number_column,
    permitted,
    status_badge,
    viewer,
)
from django_dbtaskqueue.admin.verb_forms import PlainForm
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.flow.batches import counts_of
from django_dbtaskqueue.models import Batch
from django_dbtaskqueue.operations import task_graph
from django_dbtaskqueue.operations.batch_control import BATCH_VERBS, act_on_batch, find_batch, fits, listed
from django_dbtaskqueue.operations.paging import Page
from django_dbtaskqueue.operations.permissions import Verb


class BatchAdmin(SmallListAdmin):
    """The batches, the newest first."""

    detail_template = "batch"
    filterset = NameFilter
    empty = gettext_lazy("No batch. The code makes one with batch() or Workflow.")
    list_display = ("name", "progress", "failed", "tasks", "queue_names", "created")
    list_display_links = ("name",)
    ordering = ("-pk",)
    page_lines = ("progress", "statuses", "queue_names", "callback", "created")

    def rows_of(self, filterset: Any) -> list[Batch]:  # type: ignore[override]  # of several databases
        """Return all batches that match, of every database: a list, with their counts."""
        part = filterset.form.cleaned_data.get("name", "") if filterset.is_valid() else ""
        rows = [row for row in listed(viewer(filterset.request)) if part.lower() in row.name.lower()]
        return _counted(rows)

    def read_page(self, _request: object, _filterset: object, rows: QuerySet[Batch], *_place: int | None) -> Page:
        return Page(list(rows))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Batch | None:
        row = find_batch(object_id, viewer(request))
        return row and _counted([row])[0]

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Return the verbs that would change something, and that the user may use on each queue of the batch."""
        found = [verb for verb in BATCH_VERBS.values() if fits(verb, row.counts)]
        for queue in row.queues:
            found = permitted(request, found, queue)
        return found

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, object]:
        """Add the graph, and the same as a list."""
        graph = task_graph.read(row, viewer(request))
        return {
            "graph": graph,
            "nodes": [
                (
                    node,
                    self.task_url(*node.key),
                    status_badge(node.status or "?"),
                    graph.parents.get(node.key, ()),
                )
                for node in graph.nodes
            ],
            "node_size": (task_graph.NODE_WIDTH, task_graph.NODE_HEIGHT),
            "max_nodes": task_graph.MAX_NODES_DRAWN,
            "task_lists": [
                (name, self.url(model_for(name), "changelist", q=f"batch:{row.pk} queue:{name}")) for name in row.queues
            ],
        }

    def act(self, request: HttpRequest) -> HttpResponse:
        """Ask for a confirmation; once confirmed, act and report."""
        verb = BATCH_VERBS.get(request.POST.get("action", ""))
        if verb is None:
            raise BadRequest("Batches have no such action.")
        row = self.get_object(request, request.POST.get(ACTION_CHECKBOX_NAME, ""))
        if row is None:
            raise Http404
        for queue in row.queues:
            check(request, verb, queue)
        form = bound_form(request, PlainForm)
        if not confirmed(request, form):
            text = ngettext("%(count)s task is in the batch.", "%(count)s tasks are in the batch.", row.total)
            words = text % {"count": number(row.total)}
            return ask(self, request, Question(verb, [words], [str(row)], form, possible=True))
        changed = act_on_batch(verb, row, viewer(request), reason=form.reason())
        level = messages.SUCCESS if changed else messages.WARNING
        return self.reply(request, f"{verb.done % {'number': changed}}.", level, self.back(request))

    # -- columns -----------------------------------------------------------------------------------------------------

    created = age_column(gettext_lazy("created"), "create_time")
    tasks = number_column(gettext_lazy("tasks"), "total")
    queue_names = column(gettext_lazy("queues"), lambda row: ", ".join(row.queues) or EMPTY_VALUE)
    failed = column(gettext_lazy("failed"), lambda row: number(row.counts["ERROR"] + row.counts["POISON"]))
    statuses = column(
        gettext_lazy("statuses"),
        lambda row: (
            ", ".join(f"{number(row.counts[str(one)])} {one}" for one in Status if row.counts[str(one)]) or EMPTY_VALUE
        ),
    )

    @admin.display(description=gettext_lazy("progress"))
    def progress(self, row: Any) -> str:
        """Show how many of the tasks have ended, as a bar."""
        ended = sum(row.counts[str(one)] for one in TERMINAL)
        percent = 100 * ended // row.total if row.total else 100
        html = '<progress max="100" value="{0}" aria-label="{1}">{0}%</progress> {2}'
        text = _("%(ended)s of %(total)s") % {"ended": number(ended), "total": number(row.total)}
        return format_html(html, percent, _("progress"), text)

    @admin.display(description=gettext_lazy("runs at the end"))
    def callback(self, row: Batch) -> str:
        """Link to the task that runs when all others have ended."""
        if row.callback_id is None:
            return EMPTY_VALUE
        return self.link(row.callback_id, self.task_url(row.callback_location, row.callback_id))


def _counted(rows: list[Batch]) -> list[Batch]:
    """Give batches the counts of their tasks: one query for each task table."""
    counts = counts_of(rows)
    for row in rows:
        vars(row)["counts"] = counts[row.pk]
    return rows
