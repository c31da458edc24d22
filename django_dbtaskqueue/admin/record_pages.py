"""Records: of pollers, of what operators did, of failed attempts and their groups, the history, and reports."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import DEFAULT_DB_ALIAS
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _, gettext_lazy, ngettext
from django_filters import CharFilter, ChoiceFilter, OrderingFilter

from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import address_here, may_see, permitted, viewer, when_migrated
from django_dbtaskqueue.admin.list_pages import FilterSet, ListAdmin, QueuePickFilter, SmallListAdmin, part_of_name
from django_dbtaskqueue.admin.page_actions import ACTION_ON_ALL_KEY, PlainForm, ask, bound_form, confirmed, pressed_verb
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import OperationRefused, SearchError
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.models import AbstractTask, Attempt, BulkOperation, FailureGroup, Poller, Task, control
from django_dbtaskqueue.models.readable import as_list
from django_dbtaskqueue.models.tasks import TERMINAL_VALUES
from django_dbtaskqueue.operations import bulk, queue_control
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.permissions import CONTROL_POLLERS, Verb, check_cancel, check_may, label_of, narrow
from django_dbtaskqueue.operations.queue_stats import WINDOWS, new_releases, stats_of_groups
from django_dbtaskqueue.operations.report_page import content_policy, html_file, report_body
from django_dbtaskqueue.operations.search import text_of
from django_dbtaskqueue.operations.search.query import since
from django_dbtaskqueue.operations.serializers import is_storable, message_of, short_error, with_errors
from django_dbtaskqueue.operations.verbs import PUT_BACK, TASK_VERBS

WORK_TIME_S = 2.0  # in which a request carries out steps
MAX_COMMANDED_POLLERS = 500  # in one action
MAX_NAMED_IN_AUDIT = 3  # tasks in a line of the audit
MAX_SHOWN_SKIPS = 100  # steps whose skipped tasks are shown
CHART_FIGURES = ("over_time", "curve")  # of a report
MAX_FIGURES_CHARS = 20_000  # longer figures of a report are not shown as JSON
OPERATION_BADGES = {
    control.WAITING: ("created", "○"),
    control.RUNNING: ("processing", "◐"),
    control.FINISHED: ("completed", "✓"),
    control.CANCELLED: ("stopped", "▪"),
    control.FAILED: ("error", "✕"),
}


class SearchedAdmin(ListAdmin):
    """Rows with a search, shown with the error of a failure group in the place of its fingerprint."""

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        groups = narrow(FailureGroup.objects.using(rows[0]._state.db if rows else None), viewer(request))
        for row, text in zip(rows, with_errors([row.query for row in rows], groups), strict=True):
            row.explained = text


class BulkOperationAdmin(SearchedAdmin):
    detail_template = "operation"
    row_keys = ("operation",)
    filterset = FilterSet.of(
        state=ChoiceFilter(label=gettext_lazy("State"), choices=control.STATES, empty_label=gettext_lazy("any")),
        actor=CharFilter(label=gettext_lazy("Who")),
    )
    empty = gettext_lazy("No bulk operation yet. Tick “all that match” on the task list to begin one.")
    list_display = ("id", "what", "state_badge", "bar", "changed_tasks", "skipped_tasks", "actor", "ordered")
    page_lines = (*list_display[1:6], "reason", "note", "actor", "source", "ordered", "started", "ended")

    def act(self, request: HttpRequest) -> HttpResponse:
        if (operation := self.get_object(request, request.POST.get("operation", ""))) is None:
            raise Http404
        alias = self.get_queryset(request).db
        if "put_back" in request.POST:
            return self._put_back(request, operation)
        if "cancel" in request.POST:
            done = bulk.cancel(operation.pk, request.user, using=alias)
            return self.reply(request, _("It is cancelled.") if done else _("It had ended already."), messages.INFO)
        check_may(bulk.verb_of(operation), viewer(request))
        deadline = clock.monotonic() + WORK_TIME_S
        while bulk.turn(alias) and clock.monotonic() < deadline:
            pass
        return redirect(self.page_of(operation))

    def _put_back(self, request: HttpRequest, operation: BulkOperation) -> HttpResponse:
        check_cancel(operation, bulk.verb_of(operation), viewer(request))
        form = bound_form(request, PlainForm)
        if refusal := bulk.why_not_put_back(operation):
            raise OperationRefused(refusal)
        if not confirmed(request, form):
            text = ngettext("It changed %(count)s task.", "It changed %(count)s tasks.", operation.changed)
            return ask(self, request, PUT_BACK, form, sentences=[text % {"count": cells.number(operation.changed)}])
        back = bulk.put_back(operation, viewer(request), form.cleaned_data["reason"])
        return self.reply(request, _("The bulk operation has started."), address=self.page_of(back))

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        may = False
        with suppress(OperationRefused, PermissionDenied):  # refused: a verb that this release does not know
            check_cancel(row, bulk.verb_of(row), viewer(request))
            may = True
        no_undo = "" if row.state in control.UNFINISHED else bulk.why_not_put_back(row)
        return {
            "title": f"{label_of(row.verb)}: {row.explained}",
            "unfinished": may and row.state in control.UNFINISHED,
            "may_put_back": may and row.state not in control.UNFINISHED and not no_undo,
            "no_undo": no_undo,
            "skips": row.changes.exclude(skip_reason="").order_by("pk")[:MAX_SHOWN_SKIPS],
            "task_url": self.url(Task, "changelist", q="id:"),
        }

    what = cells.column(
        gettext_lazy("what"), lambda row: format_html("{} <code>{}</code>", label_of(row.verb), row.explained)
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
    plural = gettext_lazy("audit entries")
    filterset = QueuePickFilter.of(
        actor=CharFilter(label=gettext_lazy("Who")), verb=CharFilter(label=gettext_lazy("Verb"))
    )
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
    what = cells.column(gettext_lazy("verb"), lambda entry: entry.details.get("action") or label_of(entry.verb))
    changed_tasks = cells.field_column(gettext_lazy("changed"), "changed", cells.number)
    skipped_tasks = cells.field_column(gettext_lazy("skipped"), "skipped", cells.number)
    details_box = cells.column(gettext_lazy("details"), lambda entry: cells.json_box(entry.details or None))

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


class PollerAdmin(SmallListAdmin):
    filterset = FilterSet.of(instance=part_of_name())
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
    finished = cells.field_column(gettext_lazy("attempts ended"), "finished", cells.number)
    failed = cells.field_column(gettext_lazy("attempts failed"), "failed", cells.number)
    applied_box = cells.field_column(gettext_lazy("applied settings"), "applied_settings", cells.box)

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        """Take out what a poller reports of queues that the user may not view."""
        actor = viewer(request)
        for poller in () if actor.sees_all else rows:
            hidden = [name for name in control.queue_names_in(poller.queues) if not actor.sees(name)]
            poller.queues = [one for one in poller.queues if actor.sees(control.queue_names_in([one])[0])]
            poller.running = [one for one in poller.running if actor.sees(control.queue_names_in([one])[0])]
            poller.applied_settings = "" if hidden else poller.applied_settings

    def list_verbs(self, request: HttpRequest) -> Sequence[Verb]:
        return permitted(request, queue_control.POLLER_VERBS.values())

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        return [] if row.state == queue_control.STOPPED_STATE else self.list_verbs(request)

    def act(self, request: HttpRequest) -> HttpResponse:
        verb = pressed_verb(request, queue_control.POLLER_VERBS)
        check_may(CONTROL_POLLERS, viewer(request))
        ticked = filter(is_storable, request.POST.getlist(ACTION_CHECKBOX_NAME)[:MAX_COMMANDED_POLLERS])
        rows = self.get_queryset(request).filter(pk__in=list(ticked))
        running = [poller.instance for poller in rows if poller.state != queue_control.STOPPED_STATE]
        if not confirmed(request, form := bound_form(request, PlainForm)):
            text = ngettext("%(count)s poller would follow.", "%(count)s pollers would follow.", len(running))
            sentences = [text % {"count": len(running)}]
            return ask(self, request, verb, form, sentences=sentences, items=running, possible=bool(running))
        given = {"reason": form.cleaned_data["reason"], "using": rows.db}
        commanded = queue_control.command_pollers(running, verb.name, viewer(request), **given)
        follow = _("%(done)s: they follow within a heartbeat.") % {"done": str(verb.done % {"number": commanded})}
        return self.reply(request, follow, changed=commanded)

    @admin.display(description=gettext_lazy("state"))
    def state_badge(self, poller: Any) -> str:
        if poller.requested_command:
            facts = {"state": poller.state, "command": poller.requested_command}
            return cells.badge("paused", "◌", _("%(state)s, %(command)s requested") % facts)
        if poller.state == queue_control.STOPPED_STATE:
            return cells.badge("stopped", "▪", poller.state)
        if poller.clock - poller.heartbeat_time > control.MISSED_HEARTBEATS * conf.settings().heartbeat:
            return cells.badge("late", "✕", _("%(state)s, late") % {"state": poller.state})
        kind, icon = ("running", "▸") if poller.state == "RUNNING" else ("paused", "◌")
        return cells.badge(kind, icon, poller.state)

    @admin.display(description=gettext_lazy("running"))
    def runs(self, poller: Any) -> str:
        held = [(item["task_id"], item.get("queue")) for item in poller.running if isinstance(item.get("task_id"), int)]
        links = ((self.link(pk, self.queue_url(str(queue), "change", pk)),) for pk, queue in held)
        return format_html_join(", ", "{}", links) or cells.EMPTY_VALUE


def queue_name(item: Any) -> str:
    """Return a queue as a poller reports it: by name, or with its weight when that is not 1."""
    if not isinstance(item, dict):
        return str(item)
    weight = item.get("weight", 1)
    return str(item.get("queue")) if weight == 1 else f"{item.get('queue')}:{weight}"


class TaskIdFilter(QueuePickFilter):
    task_id = CharFilter(label=gettext_lazy("Task"), method="of_task")

    def of_task(self, rows: QuerySet[Any], _name: str, value: str) -> QuerySet[Any]:
        task_id = whole_number(value.strip())
        # With the locations, because the index begins with them.
        tables = [model._meta.label_lower for model in apps.get_models() if issubclass(model, AbstractTask)]
        return rows.none() if task_id is None else rows.filter(location__in=tables, task_id=task_id)


class AttemptAdmin(ListAdmin):
    list_display = ("id", "task_link", "queue", "attempt", "exception", "says", "failed")
    long_columns = ("traceback",)
    filterset = TaskIdFilter.of(
        error_type=CharFilter(label=gettext_lazy("Exception"), lookup_expr="icontains"),
        fingerprint=CharFilter(label=gettext_lazy("Failure group")),
    )
    secrets = ("message_box", "traceback_box")
    page_lines = (
        "task_link", "location", "queue", "attempt", "total_attempt", "poller_instance", "started", "failed",
        "error_type",
    )  # fmt: skip

    exception = cells.column(gettext_lazy("exception"), lambda attempt: short_error(attempt.error_type))
    says = cells.column(gettext_lazy("message"), lambda attempt: message_of(attempt.message))
    failed = cells.age_column(gettext_lazy("failed"), "finish_time")
    message_box = cells.field_column(gettext_lazy("message"), "message", cells.box)
    traceback_box = cells.field_column(gettext_lazy("traceback"), "traceback", cells.box)

    @admin.display(description=gettext_lazy("task"))
    def task_link(self, attempt: Any) -> str:
        return self.link(attempt.task_id, self.task_url(attempt.location, attempt.task_id))


class TaskHistoryAdmin(ListAdmin):
    filterset = TaskIdFilter.of(
        status=ChoiceFilter(
            label=gettext_lazy("Status"),
            choices=[(one, one) for one in TERMINAL_VALUES],
            empty_label=gettext_lazy("any"),
        ),
        reference=CharFilter(label=gettext_lazy("Reference")),
    )
    plural = gettext_lazy("tasks in history")
    secrets = ("process_result_box", "payload_box", "result_box", "context_box")
    list_display = ("id", "task_id", "reference", "queue", "status_badge", "says", "created", "finished", "moved")
    list_display_links = ("id", "reference")
    long_columns = ("payload", "result", "context")
    page_lines = (
        "task_id", "location", "status_badge", "situation", "queue", "reference", "attempts", "poller_instance",
        "created", "started", "finished", "moved",
    )  # fmt: skip

    situation = cells.column(gettext_lazy("now"), lambda task: explain(task).sentence)
    moved = cells.age_column(gettext_lazy("moved"), "moved_time")
    says = cells.column(gettext_lazy("error"), cells.line_of)


def _window(name: str) -> cells.Column:
    title = f"{name[:-1]} {name[-1]}"
    return cells.column(title, lambda row: cells.number(found) if (found := row.figures.failed[name]) else "·")


MAX_NEWS = 4  # links to what is new
MAX_SHOWN_TRACES = 50  # groups of the page with a traceback
MAX_SPOT_VERBS = 2  # buttons of a group in the list; its page has all


def check_since(text: str) -> None:
    """Refuse what is no time as a search has it: ``10:00``, ``1h``, ``2026-11-20``."""
    try:
        since("first_seen", text, DEFAULT_DB_ALIAS)
    except SearchError as error:
        raise ValidationError(str(error)) from None


class FailureFilter(QueuePickFilter):
    error_type = CharFilter(label=gettext_lazy("Exception"), lookup_expr="icontains")
    release = CharFilter(label=gettext_lazy("Release"))
    new = CharFilter(label=gettext_lazy("First seen since"), method="first_seen_since", validators=[check_since])
    sort = OrderingFilter(
        label=gettext_lazy("Order"),
        choices=[
            ("-last_seen", gettext_lazy("last seen")),
            ("-first_seen", gettext_lazy("first seen")),
            ("release", gettext_lazy("release")),
        ],
        fields=["last_seen", "first_seen", "release"],
        empty_label=None,
    )

    def first_seen_since(self, rows: QuerySet[FailureGroup], _name: str, value: str) -> QuerySet[FailureGroup]:
        return rows.filter(since("first_seen", value, rows.db))


class FailureGroupAdmin(SmallListAdmin):
    """Failures by queue, exception, line of the project's code, and message."""

    detail_template = "failure"
    list_template = "failures"
    filterset = FailureFilter
    ordering = ("-last_seen",)
    empty = gettext_lazy("Nothing has failed.")
    list_display = ("failure", "in_1h", "in_24h", "in_7d", "first", "last", "release", "tasks")
    list_display_links = None
    page_lines = ("queue", "error_type", "says", "pattern", "frame", "first", "last", "release", "tasks", "attempts")

    in_1h, in_3h, in_24h, in_3d, in_7d = map(_window, WINDOWS)

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        """Add links to what is new since the last hour, and since each new release."""
        pollers = narrow(Poller.objects.using(self.get_queryset(request).db), viewer(request))
        times = [(_("the last hour"), "1h")]
        for time, release in new_releases(pollers, WINDOWS["7d"]):
            here = cells.local(time)
            words = _("%(release)s came (%(time)s)") % {"release": release, "time": date_format(here, "D H:i")}
            times.append((words, here.replace(tzinfo=None).isoformat(timespec="seconds")))
        links = [(words, address_here(request.path, new=time)) for words, time in reversed(times)]
        return {**super().list_context(request), "news": links[:MAX_NEWS]}

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        alias = self.get_queryset(request).db
        seen = [group.pk for group in rows[:MAX_SHOWN_TRACES] if may_see(request, group)]
        newest = Attempt.objects.filter(fingerprint=OuterRef("pk")).order_by("-pk").values("traceback")[:1]
        found = FailureGroup.objects.using(alias).filter(pk__in=seen).values_list("pk", Subquery(newest))
        traces, stats = dict(found), stats_of_groups([group.pk for group in rows], alias)
        for group, figures in zip(rows, stats, strict=True):
            group.figures = figures
            group.trace, group.verbs = traces.get(group.pk), self.page_verbs(request, group)[:MAX_SPOT_VERBS]

    @admin.display(description=gettext_lazy("failure"))
    def failure(self, group: Any) -> str:
        """Show the error as a link, where it happens, the newest traceback folded, and what can be done at once."""
        quiet, place = '<div class="quiet">{}</div>', (group.queue, group.frame or cells.EMPTY_VALUE)
        parts = [self.title(group), format_html(quiet, format_html("{} · <code>{}</code>", *place))]
        if group.newest and group.message != group.newest:
            parts.append(format_html(quiet, masked_text(group.message)))
        if group.trace:
            html, name = '<details id="{}"><summary>{}</summary>{}</details>', f"dbtq-trace-{group.pk}"
            parts.append(format_html(html, name, _("Newest traceback"), cells.box(group.trace)))
        parts.append(self.buttons(group))
        return format_html_join("", "{}", ((part,) for part in parts))

    @admin.display(description=gettext_lazy("failure"))
    def title(self, group: Any) -> str:
        is_new = group.first_seen and group.clock - group.first_seen < WINDOWS["1h"]
        shown = self.link(self.what(group), self.page_of(group))
        return format_html("<strong>{}</strong> {}", shown, cells.badge("late", "✱", _("new")) if is_new else "")

    @admin.display(description="")
    def buttons(self, group: Any) -> str:
        if not group.verbs or not group.figures.open:
            return ""
        address = self.url(Task, "changelist", q=text_of(fingerprint=group.fingerprint, status=Status.ERROR))
        html = '<button type="submit" form="dbtq-act" formaction="{}" name="{}" value="{}" class="button">{}…</button> '
        rows = ((address, ACTION_ON_ALL_KEY, verb.name, verb.label) for verb in group.verbs)
        return format_html('<div class="dbtq-spot">{}</div>', format_html_join("", html, rows))

    def what(self, group: Any) -> str:
        message = masked_text(group.newest or group.message)
        return f"{short_error(group.error_type)}: {message}" if group.error_type else message or group.fingerprint

    says = cells.column(gettext_lazy("newest message"), lambda group: masked_text(group.newest))
    pattern = cells.column(gettext_lazy("messages of this kind"), lambda group: masked_text(group.message))
    first = cells.age_column(gettext_lazy("first seen"), "first_seen")
    last = cells.age_column(gettext_lazy("last seen"), "last_seen")

    @admin.display(description=gettext_lazy("tasks in ERROR or POISON"))
    def tasks(self, group: Any) -> str:
        found = group.figures.open
        query = text_of(fingerprint=group.fingerprint)
        return self.link(found, self.url(Task, "changelist", q=query)) if found else str(found)

    @admin.display(description=gettext_lazy("failed attempts"))
    def attempts(self, group: Any) -> str:
        return self.link(_("all"), self.url(Attempt, "changelist", fingerprint=group.fingerprint))

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        return permitted(request, [verb for verb in TASK_VERBS.values() if Status.ERROR in verb.sources], row.queue)

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        return {
            "act_url": self.url(Task, "changelist", q=text_of(fingerprint=row.fingerprint, status=Status.ERROR)),
            "windows": row.figures.failed.items(),
            "title": self.what(row),
            "boxes": [(_("newest traceback"), cells.box(row.trace), "traceback")] if row.trace else [],
        }


class PipelineReportAdmin(ListAdmin):
    detail_template = "report"
    filterset = FilterSet.of(kind=CharFilter(label=gettext_lazy("Job")))
    empty = gettext_lazy("No report yet. Make one with: manage.py runtaskpipeline report")
    list_display = ("id", "kind", "made", "span_from", "span_to", "says")
    list_display_links = ("id", "kind")
    long_columns = ("data",)
    page_lines = ("kind", "made", "span_from", "span_to", "summary", "location")

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(when_migrated(self, self.file))
        return [path("<int:pk>/report/", view, name="dbtaskqueue_pipelinereport_report"), *super().get_urls()]

    def file(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Return the report as a file to save: in a sandbox, in which only the file's own scripts run."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, str(pk))
        try:
            html = html_file(row.kind, row.data) if row else ""
        except ValueError as error:
            raise Http404(str(error)) from error
        if not html:
            raise Http404
        return HttpResponse(html, headers={"Content-Security-Policy": f"sandbox allow-scripts; {content_policy()}"})

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        figures = cells.json_box({key: row.data[key] for key in row.data if key not in CHART_FIGURES} or None)
        return {
            "report": report_body(row.kind, row.data),
            "report_url": self.url(self.model, "report", row.pk),
            "figures": figures if len(figures) <= MAX_FIGURES_CHARS else "",
        }

    made = cells.age_column(gettext_lazy("made"), "create_time")
    span_from = cells.column(gettext_lazy("from"), lambda report: cells.stamp(report.since))
    span_to = cells.column(gettext_lazy("to"), lambda report: cells.stamp(report.until))
    says = cells.column(gettext_lazy("summary"), lambda report: message_of(report.summary))
