"""Queues: the overview of all with its charts, the page of each, pause and resume, settings, purge; and the doctor."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.formats import date_format, number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy, ngettext
from django_filters import ChoiceFilter

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import ReadOnlyAdmin, permitted, show_page, viewer
from django_dbtaskqueue.admin.list_pages import COUNT_TIMEOUT, NamedListAdmin, PageTable, table_of
from django_dbtaskqueue.admin.page_actions import PauseForm, PlainForm, ask, bound_form, confirmed, pressed_verb
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import DURATIONS, setting_text, typed
from django_dbtaskqueue.core.durations import format_age, format_duration, format_seconds, parse_duration
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.db.session import alias_for, aliases_of
from django_dbtaskqueue.metrics import CLASSES_PER_DECADE, upper
from django_dbtaskqueue.models import BulkOperation, FailureGroup, Poller, Queue, Task
from django_dbtaskqueue.operations import bulk, permissions, queue_control, queue_stats
from django_dbtaskqueue.operations.bounded_reads import NONE_COUNTED, count_within, limits_of, limits_text
from django_dbtaskqueue.operations.doctor import Finding, examine
from django_dbtaskqueue.operations.related_tasks import awaited
from django_dbtaskqueue.operations.report_page import MAX_HEAT_LEVEL, Chart, Line
from django_dbtaskqueue.operations.search import parse, text_of, to_text
from django_dbtaskqueue.operations.search.query import Page, select, tasks_for
from django_dbtaskqueue.operations.serializers import is_storable
from django_dbtaskqueue.operations.verbs import PURGE, QUEUE_VERBS

CHART_SPAN = timedelta(hours=1)
POINTS_PER_STEP = 5  # of a heat map


def chart_context(using: str, actor: permissions.Actor, queue: str | None = None) -> dict[str, object]:
    """Return the charts and heat maps of the last hour, of one queue, or of all that the actor may view."""
    points = ended_minutes(queue_stats.series(None if queue else using, CHART_SPAN, queue, among=actor.visible_queues))
    times = [_clock(point.time) for point in points]
    throughput = [
        Line(_("completed"), "--dbtq-good", [60 * point.rate_of("completed", "deleted") for point in points]),
        Line(_("failed"), "--dbtq-bad", [60 * point.rate_of("failed", "retried") for point in points]),
        Line(_("poison"), "--dbtq-aside", [60 * point.rate_of("poisoned") for point in points]),
        Line(_("requeued"), "--dbtq-warn", [60 * point.rate_of("reenqueued") for point in points]),
    ]
    latency = [
        Line(_("run p50"), "--dbtq-busy", [point.run.p50 for point in points]),
        Line(_("run p95"), "--dbtq-aside", [point.run.p95 for point in points]),
        Line(_("wait p50"), "--dbtq-good", [point.wait.p50 for point in points]),
        Line(_("wait p95"), "--dbtq-warn", [point.wait.p95 for point in points]),
    ]
    pollers = permissions.narrow(Poller.objects.using(using), actor)
    marks = [
        {"iso": time.isoformat(), "clock": date_format(cells.local(time), "H:i"), "release": release}
        for time, release in queue_stats.new_releases(pollers, CHART_SPAN)
    ]
    outcomes, latencies = _("Attempts per minute, last hour"), _("Run time and wait time in seconds, last hour")
    charts = [
        Chart("throughput", outcomes, times, throughput, _figure, axis="", bars=True, marks=marks),
        Chart("latency", latencies, times, latency, _figure, " s", axis="", marks=marks),
    ]
    maps = [
        heat_map("runs", _("Attempts by run time, last hour"), points),
        heat_map("waits", _("Attempts by wait time, last hour"), points),
    ]
    return {"charts": charts, "maps": [one for one in maps if one["rows"]]}


def heat_map(kind: str, title: str, points: Sequence[queue_stats.Point]) -> dict[str, Any]:
    """Return histograms as a map: of each duration, the longest first, counts by step. Heat is a share of the step."""
    steps = [points[max(end - POINTS_PER_STEP, 0) : end] for end in range(len(points), 0, -POINTS_PER_STEP)][::-1]
    counts = [Counter[int]() for _step in steps]
    for step, found in zip(steps, counts, strict=True):
        for point in step:
            for number, count in getattr(point, kind).items():
                found[max(number - 1, 0) // CLASSES_PER_DECADE] += count
    decades = sorted({decade for found in counts for decade in found})
    rows = []
    for decade in range(decades[-1], decades[0] - 1, -1) if decades else ():
        words = _("up to %(time)s") % {"time": format_seconds(upper(CLASSES_PER_DECADE * (decade + 1)))}
        parts = [(found[decade], found.total() or 1) for found in counts]
        heats = [(cells.number(one) if one else "", math.ceil(MAX_HEAT_LEVEL * one / total)) for one, total in parts]
        rows.append((words, heats))
    return {"name": kind, "title": title, "times": [_clock(step[0].time) for step in steps], "rows": rows}


def _clock(time: datetime) -> str:
    return cells.stamp(time, date_format(cells.local(time), "H:i"))


def ended_minutes(points: list[queue_stats.Point]) -> list[queue_stats.Point]:
    """Leave out the current minute. Pollers have not reported all of it, so it would look as if work had stopped."""
    if any(point.total for point in points[:-1]):
        return points[:-1]
    return points if points[-1].total else []


def _figure(value: float | None) -> str:
    if value is None:
        return cells.EMPTY_VALUE
    return number_format(round(value, 0 if value >= 100 else 1 if value >= 10 else 3), force_grouping=True)


def _count_column(status: Status | None = None) -> cells.Column:

    @admin.display(description=gettext_lazy("TOTAL") if status is None else str(status))
    def cell(page: "QueueAdmin", queue: Any) -> str:
        count = queue.stats.total if status is None else queue.stats.statuses[status]
        query = text_of(queue=queue.name, **({} if status is None else {"status": status}))
        return page.link(count, page.queue_url(queue.name, "changelist", q=query) if count else "")

    return cell


ORDERS: dict[str, tuple[permissions.Text, Callable[[queue_stats.QueueStats], float]]] = {  # the most first
    "oldest": (gettext_lazy("oldest waiting"), lambda row: row.oldest.total_seconds() if row.oldest else 0.0),
    "failed": (gettext_lazy("failed, 1 h"), lambda row: row.failed),
    "run": (gettext_lazy("run p50 / p95"), lambda row: row.run.p95 or 0.0),
    "wait": (gettext_lazy("wait p50 / p95"), lambda row: row.wait.p95 or 0.0),
}


class QueueAdmin(NamedListAdmin):
    """The queues; a ``Queue`` row is made when the first one is paused."""

    filterset = NamedListAdmin.filterset.of(
        order=ChoiceFilter(
            label=gettext_lazy("Order"),
            choices=[(key, text) for key, (text, _key) in ORDERS.items()],
            empty_label=gettext_lazy("name"),
        )
    )
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
            return self._change_setting(request)
        return self._empty(request) if "purge" in request.POST else self._pause_or_resume(request)

    def _queue_of(self, request: HttpRequest, key: str, verb: permissions.Verb) -> Queue:
        if (queue := self.get_object(request, request.POST.get(key, "").strip())) is None:
            raise Http404
        permissions.check_may(verb, viewer(request), queue.name)
        return queue

    def _change_setting(self, request: HttpRequest) -> HttpResponse:
        """Set one setting of a queue; an empty value restores the project's."""
        queue = self._queue_of(request, "queue", permissions.CHANGE_SETTINGS)
        key, value = (request.POST.get(part, "").strip() for part in ("set", "value"))
        try:
            values = {key: typed(key, value)} if value else {}
            back, reason = [] if value else [key], request.POST.get("reason", "")
            queue_control.change_settings(queue.name, values, viewer(request), reset=back, reason=reason)
        except (ImproperlyConfigured, TypeError, ValueError) as error:
            raise OperationRefused(str(error)) from None
        changed = _("%(key)s is %(value)s now.") if value else _("%(key)s is what the project says again.")
        text = changed % {"key": f"“{key}”", "value": value} + " " + _("Pollers follow within a heartbeat.")
        return self.reply(request, text)

    def _empty(self, request: HttpRequest) -> HttpResponse:
        """Start the bulk deletion of every task of a queue, after its name was typed."""
        queue = self._queue_of(request, "purge", PURGE)
        if request.POST.get("typed", "").strip() != queue.name:
            raise OperationRefused(_("Type %(name)s to delete all its tasks.") % {"name": queue.name})
        given = PURGE, text_of(queue=queue.name), request.user, request.POST.get("reason", "")
        started = [bulk.start(*given, alias) for alias in aliases_of(queue.name)]
        address = self.url(BulkOperation, "change", started[0].pk) if len(started) == 1 else ""
        return self.reply(request, _("The bulk operation has started."), address=address)

    def _pause_or_resume(self, request: HttpRequest) -> HttpResponse:
        verb = pressed_verb(request, QUEUE_VERBS)
        permissions.check_may(verb, viewer(request))
        queues: list[Any] = list(self.rows_of(self.filtered(request)))
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
            return ask(self, request, verb, form, sentences=sentences, items=queues, possible=bool(fitting))
        given = {"reason": form.cleaned_data["reason"], "until": form.cleaned_data.get("until")}
        changed = queue_control.apply_to_queues(verb, [queue.name for queue in fitting], viewer(request), **given)
        done, skipped = str(verb.done % {"number": changed}), len(queues) - changed
        words = _("%(done)s, %(count)s skipped: not paused.") if skipped else "%(done)s."
        return self.reply(request, words % {"done": done, "count": skipped}, changed=changed)

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        for queue in rows:
            if not hasattr(queue, "stats"):
                queue.stats = queue_stats.stats_of_queue(queue.name)

    def listed(self, request: HttpRequest) -> Sequence[Queue]:
        """Return also queues that only have tasks or a living poller: this process may lack a worker's processors."""
        return self.with_figures(queue_stats.overview(only=viewer(request).visible_queues), self.get_queryset(request))

    def rows_of(self, filterset: Any) -> list[Queue]:  # type: ignore[override]
        rows = super().rows_of(filterset)
        order = filterset.form.cleaned_data.get("order") if filterset.is_valid() else ""
        return sorted(rows, key=lambda queue: ORDERS[order][1](vars(queue)["stats"]), reverse=True) if order else rows

    def with_figures(self, found: queue_stats.QueuesOverview, rows: QuerySet[Queue]) -> list[Queue]:
        stored = stored_queues(rows)
        queues = [stored.get(one.queue) or Queue(name=one.queue, overrides={}) for one in found.queues]
        for queue, figures in zip(queues, found.queues, strict=True):
            vars(queue)["stats"] = figures
        return queues

    def found(self, rows: Any, page: Page, place: int | None, filterset: Any) -> str:
        text = ngettext("%(number)s queue", "%(number)s queues", len(rows)) % {"number": len(rows)}
        more = _("%(words)s; the first %(shown)s by name: search for others")
        return more % {"words": text, "shown": len(page.rows)} if len(rows) > len(page.rows) else text

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Queue | None:
        if not is_storable(object_id) or not viewer(request).sees(object_id):
            return None
        stored = stored_queues(self.get_queryset(request), name=object_id)
        alias = alias_for(object_id, None, write=False)
        if object_id not in stored and (conf.is_known(object_id) or queue_control.is_in_use(object_id, alias)):
            return Queue(name=object_id, overrides={})
        return stored.get(object_id)

    @admin.display(description=gettext_lazy("state"))
    def state(self, queue: Any) -> str:
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
        address = self.queue_url(queue.name, "changelist", model=FailureGroup, queue=queue.name)
        return self.link(cells.number(count), address if count else "")

    created, processing, completed, error, poison = map(_count_column, Status)
    total = _count_column()
    in_out = cells.column(gettext_lazy("in / out per min"), lambda queue: cells.in_and_out([queue.stats]))
    run = cells.column(gettext_lazy("run p50 / p95"), lambda queue: cells.quantiles_text(queue.stats.run))
    wait = cells.column(gettext_lazy("wait p50 / p95"), lambda queue: cells.quantiles_text(queue.stats.wait))
    oldest = cells.column(gettext_lazy("oldest waiting"), lambda queue: format_age(queue.stats.oldest))
    drain = cells.column(gettext_lazy("time to drain"), lambda queue: cells.drain_text(queue.stats))

    @admin.display(description=gettext_lazy("changed while running"))
    def changed_settings(self, queue: Queue) -> str:
        texts = (f"{name}={_as_text(name, value)}" for name, value in queue.changes.items())  # such as lease=5m
        return ", ".join(texts) or cells.EMPTY_VALUE

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        actor, name = viewer(request), row.name
        said, built_in = list[queue_control.Setting](), list[queue_control.Setting]()
        for one in queue_control.settings_in_force(name, row.changes):
            part = built_in if one.source == "built in" else said
            part.append(replace(one, value=setting_text(one.value), source=_source_text(one.source)))
        return {
            "types": self._types(name),
            "ended": [str(status) for status in TERMINAL],
            "settings": [("", said), (f"{len(built_in)} {_source_text('built in')}", built_in)],
            **chart_context(alias_for(name, None, write=False), actor, name),
            "may_set": actor.may(permissions.CHANGE_SETTINGS, name),
            "may_purge": actor.may(PURGE, name),
        }

    def _types(self, name: str) -> list[dict[str, Any]]:
        return [
            {
                "name": (kind := one.payload_type) or _("the queue's default"),
                "url": kind and self.queue_url(name, "changelist", q=text_of(queue=name, type=kind)),
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
    homes = {name: alias_for(name, None, write=False) for name in conf.settings_queues()}
    found: dict[str, Queue] = {}
    for alias in sorted({rows.db, *homes.values()}):
        found |= {row.name: row for row in rows.using(alias).filter(**only) if homes.get(row.name, alias) == alias}
    return found


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


TO_ANSWER = parse("signal:*")  # tasks that wait for somebody's answer
MAX_HOME_QUEUES, MAX_HOME_FAILURES, MAX_HOME_WAITS = 8, 3, 3  # rows, which fit into one screen
QUEUE_COLUMNS = ("name", "state", "oldest", "created", "processing", "error", "failed", "in_out", "wait", "drain")
FAILURE_COLUMNS = ("title", "queue", "first", "in_1h", "tasks", "buttons")


class OverviewAdmin(ReadOnlyAdmin):
    """The home: what needs an operator, in one screen. Charts have a tab of their own."""

    list_template = "overview"

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        actor, alias = viewer(request), self.get_queryset(request).db
        if "charts" in request.GET:  # the page's other tab
            return chart_context(alias, actor)
        found = queue_stats.overview(only=actor.visible_queues)
        waiting = found.statuses[Status.CREATED]
        oldest = max((row.oldest for row in found.queues if row.oldest is not None), default=None)
        failed = self.link(cells.number(found.failed), self.url(FailureGroup, "changelist"))
        return {
            "health": found.health,
            "cards": [
                (_("waiting"), self.link(waiting, self.url(Task, "changelist", q=text_of(status=Status.CREATED)))),
                (_("oldest waiting"), format_age(oldest)),
                (_("in / out per min"), cells.in_and_out(found.queues)),
                (_("attempts failed in the last hour"), failed),
                (_("pollers alive"), self.link(found.pollers, self.url(Poller, "changelist"))),
            ],
            "failures": self._failures(request),
            "failures_url": self.url(FailureGroup, "changelist"),
            **self._queues(request, found),
            **self._waits(request, alias, found.as_of),
        }

    def _shown_to(self, request: HttpRequest, model: type[Model]) -> Any:
        """Return the site's own page of a model; None if there is none, or the user may not see it."""
        page = self.admin_site._registry.get(model)
        return page if page and page.has_view_permission(request) else None

    def _failures(self, request: HttpRequest) -> PageTable | None:
        if (page := self._shown_to(request, FailureGroup)) is None:
            return None
        groups = page.get_queryset(request).filter(last_seen__gte=Now() - CHART_SPAN)
        rows = list(groups.order_by("-first_seen")[:MAX_HOME_FAILURES])
        page.prepare(request, rows)
        for group in rows:
            group.verbs = group.verbs[:1]
        return table_of(page, rows, columns=FAILURE_COLUMNS, caption=_("Failures of the last hour"), tickable=False)

    def _queues(self, request: HttpRequest, found: queue_stats.QueuesOverview) -> dict[str, Any]:
        """Return a table of the queues that need care, the worst first, and a line on the others."""
        if (page := self._shown_to(request, Queue)) is None:
            return {}
        queues = page.with_figures(found, page.get_queryset(request))
        care = sorted((one for one in queues if one.stats.needs_care), key=lambda one: _care(one.stats))
        quiet = [one.name for one in queues if not one.stats.needs_care]
        text = ngettext("%(count)s queue is quiet: %(names)s.", "%(count)s queues are quiet: %(names)s.", len(quiet))
        shown, caption = care[:MAX_HOME_QUEUES], _("Queues that need care")
        return {
            "queues": table_of(page, shown, columns=QUEUE_COLUMNS, caption=caption, tickable=False),
            "left": len(care) - len(shown),
            "quiet": text % {"count": len(quiet), "names": queue_stats.names_of(quiet)} if quiet else "",
            "queues_url": page.url(Queue, "changelist"),
        }

    def _waits(self, request: HttpRequest, alias: str, now: datetime) -> dict[str, Any]:
        """Return how many tasks wait for somebody's answer, and the first of them: with the signal, and since when."""
        rows = permissions.narrow(select(TO_ANSWER, tasks_for(TO_ANSWER, alias)), viewer(request))
        count = count_within(rows, COUNT_TIMEOUT) if self._shown_to(request, Task) else NONE_COUNTED
        # By time, of those just counted: by id, the server might read the whole table.
        some = rows.order_by("create_time")[:MAX_HOME_WAITS] if count and not count.more else ()
        waits = [
            (self.link(task, self.url(Task, "change", task.pk)), wait.name, cells.ago(wait.create_time, now))
            for task in some
            if (wait := awaited(task))
        ]
        address = self.url(Task, "changelist", q=to_text(TO_ANSWER))
        return {"waits": waits, "waiting": "?" if count is None else str(count) if count else "", "waits_url": address}


def _care(row: queue_stats.QueueStats) -> tuple[Any, ...]:
    """Sort late queues first, then those without a poller, paused ones, and those with the most failures."""
    oldest = row.oldest or timedelta(0)
    return not row.late, row.late and -oldest, not row.unserved, not row.paused, -row.failed, row.queue


FINDING_BADGES = {
    "error": ("error", "✕", gettext_lazy("error")),
    "warning": ("paused", "!", gettext_lazy("warning")),
    "info": ("created", "i", gettext_lazy("note")),
}


class DoctorAdmin(ReadOnlyAdmin):
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        # Before the page's transaction: an error of the database would end it.
        found = [one for one in examine() if all(map(viewer(request).sees, one.queues))]
        return show_page(self, request, ["doctor"], lambda: self._context(found))

    def _context(self, found: list[Finding]) -> dict[str, Any]:
        serious = [finding for finding in found if finding.level != "info"]
        text = ngettext("%(count)s thing needs care.", "%(count)s things need care.", len(serious))
        return {
            "findings": [(one, cells.badge(*FINDING_BADGES[one.level])) for one in found],
            "worst": "" if not serious else "late" if serious[0].level == "error" else "warned",
            "sentence": text % {"count": len(serious)} if serious else _("All is well."),
        }
