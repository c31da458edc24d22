"""Queues: what each is set to and why, and pause and resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_dbtaskqueue.admin.charts import charts
from django_dbtaskqueue.admin.confirm import PauseForm, PlainForm, Question, ask, bound_form, check, confirmed
from django_dbtaskqueue.admin.display import NOTHING, badge, local
from django_dbtaskqueue.admin.filters import NameFilter
from django_dbtaskqueue.admin.lists import SmallListAdmin
from django_dbtaskqueue.admin.overview import row_of
from django_dbtaskqueue.admin.searching import text_of
from django_dbtaskqueue.admin.settings_page import change_settings, changes_of, purge, settings_of
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import alias_for, model_for
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.operations import queue_control
from django_dbtaskqueue.operations.paging import Page, Slice
from django_dbtaskqueue.operations.permissions import Actor, can_operate
from django_dbtaskqueue.operations.stats.queue_stats import stats_of_queue
from django_dbtaskqueue.operations.verbs import CHANGE_SETTINGS, PAUSE, PURGE, QUEUE_VERBS, Verb

MOST_SHOWN = 200  # queues on one page; others are found by name


class QueueAdmin(SmallListAdmin):
    """The queues; a ``Queue`` row is made when the first one is paused."""

    detail_template = "queue"
    list_across = True
    filterset = NameFilter
    empty = gettext_lazy("No queue has this name.")
    list_display = ("name", "state", "pause", "changed_settings", "tasks")
    list_display_links = ("name",)
    ordering = ("name",)
    page_lines = ("state", "pause", "tasks")

    def list_verbs(self, request: HttpRequest) -> Sequence[Verb]:
        """Pause and resume, for those who may; each act asks again."""
        return [verb for verb in QUEUE_VERBS.values() if can_operate(request.user, verb)]

    def act(self, request: HttpRequest) -> HttpResponse:
        """Pause or resume, or change settings from the page of a queue."""
        if "set" in request.POST:
            return change_settings(self, request)
        if "purge" in request.POST:
            return purge(self, request)
        verb = QUEUE_VERBS.get(request.POST.get("action", ""))
        if verb is None:
            raise BadRequest(f"Queues know no act {request.POST.get('action')!r}.")
        return act(self, request, verb) or HttpResponseRedirect(request.get_full_path())

    def look(
        self, request: HttpRequest, filterset: Any, rows: QuerySet[Any], before: int | None, after: int | None
    ) -> Page:
        """Rows, and queues that have none."""
        return Page(Slice(list(rows[:MOST_SHOWN]), None, None))

    def filtered(self, request: HttpRequest) -> Any:
        """All known queues, with a row or without."""
        filterset = super().filtered(request)
        part = filterset.form.cleaned_data.get("name", "") if filterset.is_valid() else ""
        found = all_queues(filterset.queryset)
        return Known(filterset, [queue for queue in found if part.lower() in queue.name.lower()])

    def _number(self, rows: Any, found: Slice, place: int | None) -> str:
        words = ngettext("%(number)s queue", "%(number)s queues", len(rows)) % {"number": len(rows)}
        if len(rows) > len(found.rows):
            return _("%(words)s; the first %(shown)s by name: search for others") % {
                "words": words,
                "shown": len(found.rows),
            }
        return words

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
        return self.link(_("Tasks"), self.url(model_for(queue.name), "changelist", q=text_of(queue=queue.name)))

    @admin.display(description=gettext_lazy("changed while running"))
    def changed_settings(self, queue: Any) -> str:
        """What an operator set."""
        return changes_of(queue) or NOTHING

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Every setting, and where it comes from."""
        user, name = request.user, row.name
        return {
            "rows": [row_of(self, stats_of_queue(name))],
            "statuses": [str(status) for status in Status],
            "settings": settings_of(row),
            "charts": charts(alias_for(name, None, write=False), name),
            "may_set": can_operate(user, CHANGE_SETTINGS, name),
            "may_purge": can_operate(user, PURGE, name),
        }

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Pause, and resume when it is paused."""
        fitting = QUEUE_VERBS.values() if in_effect(row) else [PAUSE]
        return [verb for verb in fitting if can_operate(request.user, verb, row.name)]


class Known:
    """A bound FilterSet whose rows are not all in the database."""

    def __init__(self, filterset: Any, found: list[Queue]) -> None:
        self.form, self.filters, self.queryset = filterset.form, filterset.filters, filterset.queryset
        self._valid, self.qs = filterset.is_valid(), Found(found)

    def is_valid(self) -> bool:
        """Whether the search was understood."""
        return bool(self._valid)


class Found(list[Any]):
    """Queues, where a list of rows is expected."""

    def defer(self, *_columns: str) -> Found:
        """All is read already."""
        return self


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


def act(model_admin: Any, request: HttpRequest, verb: Verb) -> HttpResponse | None:
    """Ask, or once confirmed pause or resume, log it and say what really changed."""
    check(request, verb)
    queues = _selected(model_admin, request)
    fitting = [queue for queue in queues if verb is PAUSE or in_effect(queue)]
    form = bound_form(request, PauseForm if verb is PAUSE else PlainForm)
    if not confirmed(request, form):
        items = [queue.name for queue in queues]
        return ask(model_admin, request, Question(verb, _sentences(queues, fitting), items, form, bool(fitting)))
    names = [queue.name for queue in fitting]
    actor, reason = Actor(request.user, "admin"), form.reason()
    try:
        if verb is PAUSE:
            changed = queue_control.pause_queues(names, actor, reason=reason, until=form.cleaned_data["until"])
        else:
            changed = queue_control.resume_queues(names, actor, reason=reason)
    except TaskQueueError as error:
        model_admin.message_user(request, str(error), messages.ERROR)
        return None
    model_admin.message_user(
        request, _answer(verb, changed, len(queues) - changed), messages.SUCCESS if changed else messages.WARNING
    )
    back = model_admin.back(request)
    return HttpResponseRedirect(back) if back else None


def _selected(page: Any, request: HttpRequest) -> list[Any]:
    """Not the rows the database has: a queue that has none can be selected too."""
    known = list(page.selection(request))
    if request.POST.get("select_across") == "1":
        return known
    ticked = set(request.POST.getlist(ACTION_CHECKBOX_NAME))
    return [queue for queue in known if queue.name in ticked]


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
