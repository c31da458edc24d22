"""Queues: what waits in them, and pause and resume."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import InvalidPage
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_dbtaskqueue import conf
from django_dbtaskqueue.admin.base import ReadOnlyAdmin
from django_dbtaskqueue.admin.confirm import PauseForm, PlainForm, Question, ask, bound_form, check, confirmed
from django_dbtaskqueue.admin.display import NOTHING, badge, json_box, local
from django_dbtaskqueue.exceptions import TaskQueueError
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.operations.paginators import Count, bounded_counts
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.verbs import PAUSE, QUEUE_VERBS, Verb, pause, resume
from django_dbtaskqueue.session import alias_for, model_for
from django_dbtaskqueue.status import TERMINAL, Status

LIVE = tuple(status for status in Status if status not in TERMINAL)
COUNTING = timedelta(seconds=2)  # of live tasks, and again of finished ones
# What a checkout index can answer; the rest of the table is not read for it.
IN_INDEX = Q(ready_time__isnull=False) | Q(parked_by__isnull=False)


class QueueChangeList(ChangeList):
    """All known queues: the rows of ``Queue``, and those that have none because nobody changed anything yet."""

    model_admin: Any

    def get_results(self, request: HttpRequest) -> None:
        """Put both kinds on the page, with their counts."""
        paginator: Any = self.model_admin.get_paginator(request, all_queues(self.queryset), self.list_per_page)
        try:
            page = list(paginator.page(self.page_num).object_list)
        except InvalidPage:
            raise IncorrectLookupParameters from None
        count_tasks(page)
        self.result_list = page
        self.result_count = paginator.count
        self.show_full_result_count = False
        self.full_result_count = None
        self.show_admin_actions = True
        self.can_show_all = False
        self.multi_page = paginator.num_pages > 1
        self.paginator = paginator


def _action_of(verb: Verb) -> Callable[[Any, HttpRequest, QuerySet[Queue]], HttpResponse | None]:
    def action(model_admin: Any, request: HttpRequest, _rows: QuerySet[Queue]) -> HttpResponse | None:
        return act(model_admin, request, verb)

    action.__name__ = verb.name
    return admin.action(description=verb.label)(action)


def _count_column(status: Status) -> Callable[[Any, Any], str]:
    @admin.display(description=str(status))
    def column(self: Any, queue: Any) -> str:
        count: Count | None = vars(queue)["counts"][status]
        text = "?" if count is None else str(count)
        quiet = count is not None and not count
        address = self.url(model_for(queue.name), "changelist", queue=queue.name, status=status)
        return format_html(
            '<span class="{}">{}</span>', "dbtq-none" if quiet else "dbtq-count", self.link(text, address)
        )

    return column


class QueueAdmin(ReadOnlyAdmin):
    """The queues; a ``Queue`` row is made when the first one is paused."""

    list_display = (
        "name",
        "state",
        "pause",
        "created_tasks",
        "processing_tasks",
        "completed_tasks",
        "error_tasks",
        "poison_tasks",
    )
    ordering = ("name",)
    sortable_by = ()
    actions = [_action_of(verb) for verb in QUEUE_VERBS.values()]  # noqa: RUF012 -- Django reads it
    fields = ("name", "state", "pause", "paused_time", "paused_until", "tasks", "overrides_box", "settings_box")

    created_tasks = _count_column(Status.CREATED)
    processing_tasks = _count_column(Status.PROCESSING)
    completed_tasks = _count_column(Status.COMPLETED)
    error_tasks = _count_column(Status.ERROR)
    poison_tasks = _count_column(Status.POISON)

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Pause and resume, for those who may; each act asks again."""
        return {
            name: action
            for name, action in super().get_actions(request).items()
            if name in QUEUE_VERBS and can_operate(request.user, QUEUE_VERBS[name])
        }

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """The list with the queues that have no row."""
        return QueueChangeList

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Queue | None:
        """The row, or a queue that is known and has none."""
        rows: QuerySet[Queue] = self.get_queryset(request)
        found = {queue.name: queue for queue in all_queues(rows, name=object_id)}
        return found.get(object_id)

    # -- columns -----------------------------------------------------------------------------------------------------

    @admin.display(description=gettext_lazy("state"))
    def state(self, queue: Any) -> str:
        """Running or paused."""
        return badge("paused", "‖", _("paused")) if in_effect(queue) else badge("running", "▸", _("running"))

    @admin.display(description=gettext_lazy("pause"))
    def pause(self, queue: Any) -> str:
        """Who paused it, why, and until when."""
        if not in_effect(queue):
            return NOTHING
        parts = [queue.paused_reason or _("no reason given"), _("by %(who)s") % {"who": queue.paused_by or "?"}]
        if queue.paused_until:
            parts.append(_("until %(time)s") % {"time": f"{local(queue.paused_until):%Y-%m-%d %H:%M}"})
        return ", ".join(parts)

    @admin.display(description=gettext_lazy("tasks"))
    def tasks(self, queue: Any) -> str:
        """All of them, as a link."""
        return self.link(_("Tasks of this queue"), self.url(model_for(queue.name), "changelist", queue=queue.name))

    @admin.display(description=gettext_lazy("runtime overrides"))
    def overrides_box(self, queue: Any) -> str:
        """What an operator changed."""
        return json_box(queue.overrides or None)

    @admin.display(description=gettext_lazy("settings"))
    def settings_box(self, queue: Any) -> str:
        """What the project and the processor say, before the overrides."""
        settings = conf.default_settings(queue.name)
        return json_box({field.name: str(getattr(settings, field.name)) for field in fields(settings)})

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Pause, and resume when it is paused."""
        fitting = QUEUE_VERBS.values() if in_effect(row) else [PAUSE]
        return [verb for verb in fitting if can_operate(request.user, verb)]


def in_effect(queue: Any) -> bool:
    """Whether the queue is paused now, by the database's clock."""
    return queue.paused_time is not None and (queue.paused_until is None or queue.paused_until > queue.clock)


def all_queues(rows: QuerySet[Queue], **only: str) -> list[Queue]:
    """Return the rows, on every database that has queues, and the known queues without a row, by name."""
    homes = {name: alias_for(name, None, write=False) for name in conf.known_queues()}
    found = {name: _without_row(name) for name in homes}
    for alias in sorted({rows.db, *homes.values()}):
        found |= {row.name: row for row in rows.using(alias).filter(**only) if homes.get(row.name, alias) == alias}
    return [queue for _name, queue in sorted(found.items())]


def _without_row(name: str) -> Queue:
    return Queue(name=name, overrides={}, paused_time=None, paused_until=None, paused_by="", paused_reason="")


def count_tasks(queues: Sequence[Queue]) -> None:
    """Give each queue its ``counts`` by status: two statements per database; None where counting took too long."""
    for alias, of_alias in _by_home(queues).items():
        counts: dict[tuple[str, Status], Count | None] = {}
        for statuses, condition in ((LIVE, IN_INDEX), (TERMINAL, Q())):
            cells = [(queue.name, status) for queue in of_alias for status in statuses]
            selections = [
                model_for(name)._default_manager.using(alias).filter(condition, queue=name, status=status)
                for name, status in cells
            ]
            counts |= zip(cells, bounded_counts(selections, within=COUNTING), strict=True)
        for queue in of_alias:
            vars(queue)["counts"] = {status: counts[queue.name, status] for status in Status}


def _by_home(queues: Iterable[Queue]) -> dict[str, list[Queue]]:
    homes: defaultdict[str, list[Queue]] = defaultdict(list)
    for queue in queues:
        homes[alias_for(queue.name, None, write=False)].append(queue)
    return homes


def act(model_admin: Any, request: HttpRequest, verb: Verb) -> HttpResponse | None:
    """Ask, or once confirmed pause or resume, log it and say what really changed."""
    check(request, verb)
    queues = _selected(model_admin, request)
    fitting = [queue for queue in queues if verb is PAUSE or in_effect(queue)]
    form = bound_form(request, PauseForm if verb is PAUSE else PlainForm)
    if not confirmed(request, form):
        items = [queue.name for queue in queues]
        return ask(model_admin, request, Question(verb, _sentences(queues, fitting), items, form, bool(fitting)))
    try:
        changed = _perform(verb, fitting, form.cleaned_data, request.user)
    except TaskQueueError as error:
        model_admin.message_user(request, str(error), messages.ERROR)
        return None
    model_admin.message_user(
        request, _answer(verb, changed, len(queues) - changed), messages.SUCCESS if changed else messages.WARNING
    )
    back = model_admin.back(request)
    return HttpResponseRedirect(back) if back else None


def _selected(model_admin: Any, request: HttpRequest) -> list[Any]:
    """Not the rows the admin found: a queue that has none can be selected too."""
    known = all_queues(model_admin.get_queryset(request))
    if request.POST.get("select_across") == "1":
        return known
    ticked = set(request.POST.getlist(ACTION_CHECKBOX_NAME))
    return [queue for queue in known if queue.name in ticked]


def _perform(verb: Verb, queues: Sequence[Queue], given: dict[str, Any], user: Any) -> int:
    names = [queue.name for queue in queues]
    with transaction.atomic():
        if verb is PAUSE:
            changed = pause(names, by=user.get_username(), reason=given["reason"], until=given["until"])
        else:
            changed = resume(names)
        LogEntry.objects.log_actions(user.pk, queues, CHANGE, " ".join([str(verb.label), given.get("reason", "")]))
    return changed


def _sentences(queues: Sequence[Queue], fitting: Sequence[Queue]) -> list[str]:
    selected = ngettext("%(count)s queue is selected.", "%(count)s queues are selected.", len(queues))
    lines = [selected % {"count": len(queues)}]
    if skipped := len(queues) - len(fitting):
        text = ngettext("%(count)s is skipped: not paused.", "%(count)s are skipped: not paused.", skipped)
        lines.append(text % {"count": skipped})
    return lines


def _answer(verb: Verb, changed: int, skipped: int) -> str:
    done = str(verb.done % {"number": changed})
    if not skipped:
        return f"{done}."
    return _("%(done)s, %(count)s skipped: not paused.") % {"done": done, "count": skipped}
