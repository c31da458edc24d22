"""Schedules: when each comes, what the code says, what a person changed; batches: how far each is; their verbs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from django_dbtaskqueue import registry
from django_dbtaskqueue.admin import cells
from django_dbtaskqueue.admin.frame import may_see, permitted, viewer
from django_dbtaskqueue.admin.list_pages import NamedListAdmin
from django_dbtaskqueue.admin.page_actions import PlainForm, ask, bound_form, confirmed, pressed_verb
from django_dbtaskqueue.conf.cron import default_zone
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import alias_for, model_named, row_key
from django_dbtaskqueue.flow.batches import counts_of
from django_dbtaskqueue.flow.schedule import MAX_SCHEDULE_NAME, SCHEDULE_FIELDS, Definition, is_gone
from django_dbtaskqueue.models import Batch, Schedule
from django_dbtaskqueue.models.control import CODE, MISSED_POLICIES, OVERLAP_POLICIES
from django_dbtaskqueue.operations import related_tasks, schedules
from django_dbtaskqueue.operations.permissions import Verb, by_name, check_may
from django_dbtaskqueue.operations.search import text_of
from django_dbtaskqueue.operations.verbs import json_of


class ScheduleForm(PlainForm):
    """Asks for all that a schedule says. ``row`` is the one to edit; None: a new one, which needs a name."""

    def __init__(
        self, data: Mapping[str, object] | None = None, *, row: Schedule | None = None, seen: bool = True
    ) -> None:
        said = asdict(Definition("", "", default_zone()) if row is None else Definition.of(vars(row)))
        shown = json.dumps(masked(said["payload"]), indent=2, ensure_ascii=False)
        super().__init__(data, initial={**said, "payload": shown})
        self.fields.update(forms.fields_for_model(Schedule, SCHEDULE_FIELDS))
        self.fields["cron"].help_text = gettext_lazy(
            "minute hour day month weekday, such as 0 7 * * mon-fri; with a sixth field in front for the second."
        )
        area = forms.Textarea(attrs={"rows": min(shown.count("\n") + 3, 20), "cols": 80, "spellcheck": "false"})
        self.fields["payload"] = forms.CharField(
            label=gettext_lazy("Payload"), widget=area, help_text=gettext_lazy("As JSON.")
        )
        for name, choices in (("missed", MISSED_POLICIES), ("overlap", OVERLAP_POLICIES)):  # without an empty choice
            self.fields[name] = forms.ChoiceField(label=self.fields[name].label, choices=choices)
        if row is None:
            self.fields["name"] = forms.CharField(label=gettext_lazy("Name"), max_length=MAX_SCHEDULE_NAME)
        elif not seen:
            del self.fields["payload"]
        self.order_fields(["name", *SCHEDULE_FIELDS, "reason"])

    def clean_payload(self) -> object:
        try:
            return json_of(self.cleaned_data["payload"])
        except ValueError as error:
            raise forms.ValidationError(f"{error}.") from None


class ScheduleAdmin(NamedListAdmin):
    detail_template = "schedule"
    empty = gettext_lazy("No schedule. Make one here, or declare it in the code with @periodic.")
    list_display = ("name", "state", "when", "queue", "coming", "last", "task", "origin")
    page_lines = (
        "state", "when", "cron", "next_five", "queue", "missed_words", "overlap_words", "priority", "payload_type",
        "last", "task", "note", "origin",
    )  # fmt: skip
    secrets = ("payload_box",)
    most_rows = 10_000  # of one database 500

    def listed(self, request: HttpRequest) -> Sequence[Schedule]:
        return schedules.listed(viewer(request))

    def list_verbs(self, request: HttpRequest) -> Sequence[Verb]:
        return permitted(request, [schedules.ADD_SCHEDULE, *schedules.SCHEDULE_VERBS.values()])

    def page_verbs(self, request: HttpRequest, row: Schedule) -> Sequence[Verb]:
        hidden = {"resume_schedule"} if not row.paused else {"pause_schedule"}
        hidden |= set() if row.edited else {"reset_schedule"}
        hidden |= {"delete_schedule"} if row.source == CODE and row.name in registry.periodics() else set()
        fitting = [verb for verb in schedules.SCHEDULE_VERBS.values() if verb.name not in hidden]
        return permitted(request, [schedules.EDIT_SCHEDULE, *fitting], row.queue)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Schedule | None:
        return schedules.find_schedule(object_id, viewer(request))

    def page_facts(self, request: HttpRequest, row: Schedule) -> dict[str, object]:
        said = schedules.code_of_edited(row, seen=may_see(request, row))
        return {
            "edits": [(self.opts.get_field(name).verbose_name, value) for name, value in said.items()],  # type: ignore[union-attr]
            "of_code": row.source == CODE,
            "declared": not is_gone(row, registry.periodics()),
        }

    def act(self, request: HttpRequest) -> HttpResponse:
        verbs = {**by_name(schedules.ADD_SCHEDULE, schedules.EDIT_SCHEDULE), **schedules.SCHEDULE_VERBS}
        verb = pressed_verb(request, verbs)
        ticked = [self.get_object(request, name) for name in request.POST.getlist(ACTION_CHECKBOX_NAME)]
        rows = [row for row in ticked if row is not None]
        if verb.name in schedules.SCHEDULE_VERBS:
            return self._act(request, verb, rows)
        if verb is schedules.EDIT_SCHEDULE and not rows:
            raise Http404
        return self._write(request, verb, rows[0] if verb is schedules.EDIT_SCHEDULE else None)

    def _act(self, request: HttpRequest, verb: Verb, rows: Sequence[Schedule]) -> HttpResponse:
        check_may(verb, viewer(request))
        if not confirmed(request, form := bound_form(request, PlainForm)):
            words = ngettext("%(count)s schedule is selected.", "%(count)s schedules are selected.", len(rows))
            sentences = [words % {"count": len(rows)}]
            return ask(self, request, verb, form, sentences=sentences, items=rows, possible=bool(rows))
        changed, faults = 0, []
        for row in rows:
            try:
                schedules.act_on_schedule(verb, row.name, viewer(request), reason=form.cleaned_data["reason"])
                changed += 1
            except TaskQueueError as error:
                faults.append(str(error))
        text = " ".join([f"{verb.done % {'number': changed}}.", *faults])
        address = request.get_full_path() if verb.name == "delete_schedule" else ""
        return self.reply(request, text, address=address, changed=changed and not faults)

    def _write(self, request: HttpRequest, verb: Verb, row: Schedule | None) -> HttpResponse:
        check_may(verb, viewer(request), None if row is None else row.queue)
        form = bound_form(request, partial(ScheduleForm, row=row, seen=row is None or may_see(request, row)))
        if confirmed(request, form):
            name = form.cleaned_data["name"] if row is None else row.name
            write = schedules.add_schedule if row is None else schedules.edit_schedule
            try:
                made = write(name, form.cleaned_data, viewer(request), reason=form.cleaned_data["reason"])
                return self.reply(request, f"{verb.done % {'number': 1}}.", address=self.page_of(made))
            except TaskQueueError as error:
                form.add_error(None, str(error))
        return ask(self, request, verb, form, items=[] if row is None else [row])

    coming = cells.age_column(gettext_lazy("next tick"), "next_time")
    last = cells.age_column(gettext_lazy("last tick"), "last_time")
    when = cells.column(gettext_lazy("when"), lambda row: schedules.in_words(row.cron, row.timezone))
    missed_words = cells.column(gettext_lazy("missed ticks"), lambda row: row.get_missed_display())
    overlap_words = cells.column(gettext_lazy("earlier task not finished"), lambda row: row.get_overlap_display())

    @admin.display(description=gettext_lazy("next five"))
    def next_five(self, row: Schedule) -> str:
        times = ((f"{one:%a %Y-%m-%d %H:%M:%S %Z}",) for one in schedules.next_times(row))
        return cells.EMPTY_VALUE if row.paused else format_html_join(SafeString("<br>"), "{}", times)

    @admin.display(description=gettext_lazy("state"))
    def state(self, row: Schedule) -> str:
        if row.paused:
            return cells.badge("paused", "‖", _("paused"))
        if is_gone(row, registry.periodics()):
            return cells.badge("stopped", "▪", _("code is gone"))
        known = ("running", "▸", _("running")) if row.next_time else ("stopped", "▪", _("never comes again"))
        return cells.badge(*known)

    @admin.display(description=gettext_lazy("source"))
    def origin(self, row: Schedule) -> str:
        if row.source != CODE:
            return _("made by a person")
        edited = _("the code; changed by hand: %(fields)s") % {"fields": ", ".join(row.edited)}
        return edited if row.edited else _("the code")

    @admin.display(description=gettext_lazy("last task"))
    def task(self, row: Schedule) -> str:
        return self.link(row.last_task, self.queue_url(row.queue, "change", row.last_task or 0))


class BatchAdmin(NamedListAdmin):
    detail_template = "batch"
    empty = gettext_lazy("No batch. The code makes one with batch() or Workflow.")
    list_display = ("name", "progress", "failed", "tasks", "queue_names", "created")
    page_lines = ("progress", "statuses", "queue_names", "callback", "created")

    def listed(self, request: HttpRequest) -> Sequence[Batch]:
        return related_tasks.listed_batches(viewer(request))

    def prepare(self, request: HttpRequest, rows: Sequence[Any]) -> None:
        for row, counts in zip(rows, counts_of(rows), strict=True):
            vars(row)["counts"] = counts

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Batch | None:
        key = object_id if ":" in object_id else f"{alias_for('', None)}:{object_id}"
        return related_tasks.find_batch(key, viewer(request))

    def key(self, row: Any) -> str:
        return row_key(row)

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[Verb]:
        """Return the verbs that would change something, and that the user may use on each queue of the batch."""
        found = [verb for verb in related_tasks.BATCH_VERBS.values() if related_tasks.fits(verb, row.counts)]
        for queue in row.queues:
            found = permitted(request, found, queue)
        return found

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, object]:
        graph = related_tasks.graph_of(row, viewer(request))
        return {
            "graph": graph,
            "nodes": [(node, self._address(row, node), cells.status_badge(node.status or "?")) for node in graph.nodes],
            "node_size": (related_tasks.NODE_WIDTH, related_tasks.NODE_HEIGHT),
            "max_nodes": related_tasks.MAX_TASKS_DRAWN,
            "task_lists": [
                (name, self.queue_url(name, "changelist", q=f"batch:{row.pk} queue:{name}")) for name in row.queues
            ],
        }

    def _address(self, row: Batch, node: related_tasks.Node) -> str:
        if node.number == 1 or not node.queue:
            return self.task_url(*node.key)
        words = {"batch": row.pk, "queue": node.queue, "status": node.status}
        return self.url(model_named(node.key.location), "changelist", q=text_of(**words))

    def act(self, request: HttpRequest) -> HttpResponse:
        verb = pressed_verb(request, related_tasks.BATCH_VERBS)
        if (row := self.get_object(request, request.POST.get(ACTION_CHECKBOX_NAME, ""))) is None:
            raise Http404
        for queue in row.queues:
            check_may(verb, viewer(request), queue)
        if not confirmed(request, form := bound_form(request, PlainForm)):
            text = ngettext("%(count)s task is in the batch.", "%(count)s tasks are in the batch.", row.total)
            return ask(self, request, verb, form, sentences=[text % {"count": cells.number(row.total)}], items=[row])
        changed = related_tasks.act_on_batch(verb, row, viewer(request), reason=form.cleaned_data["reason"])
        return self.reply(request, f"{verb.done % {'number': changed}}.", changed=changed)

    tasks = cells.field_column(gettext_lazy("tasks"), "total", cells.number)
    queue_names = cells.column(gettext_lazy("queues"), lambda row: ", ".join(row.queues) or cells.EMPTY_VALUE)
    failed = cells.column(gettext_lazy("failed"), lambda row: cells.number(row.counts["ERROR"] + row.counts["POISON"]))

    @admin.display(description=gettext_lazy("statuses"))
    def statuses(self, row: Any) -> str:
        found = ((one, row.counts[str(one)]) for one in Status)
        return ", ".join(f"{cells.number(count)} {one}" for one, count in found if count) or cells.EMPTY_VALUE

    @admin.display(description=gettext_lazy("progress"))
    def progress(self, row: Any) -> str:
        ended = row.total - sum(row.counts[str(one)] for one in (Status.CREATED, Status.PROCESSING))
        percent = 100 * ended // row.total if row.total else 100
        text = _("%(ended)s of %(total)s") % {"ended": cells.number(ended), "total": cells.number(row.total)}
        return cells.progress(percent, text)

    @admin.display(description=gettext_lazy("runs at the end"))
    def callback(self, row: Any) -> str:
        return self.link(row.callback_id, self.task_url(row.callback_location, row.callback_id))
