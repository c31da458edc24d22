"""The confirmation page of a verb with its form, and what pages do to tasks: they ask for it, then act, then report."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django import forms
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.functional import lazy
from django.utils.html import format_html
from django.utils.timezone import get_current_timezone_name as zone_name, now
from django.utils.translation import gettext as _, gettext_lazy

from django_dbtaskqueue.admin.frame import ReadOnlyAdmin, frame_of, may_see, viewer
from django_dbtaskqueue.admin.list_pages import ListAdmin
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.db.session import alias_for, aliases_of, model_for
from django_dbtaskqueue.models import AbstractTask, BulkOperation, FailureGroup, Queue
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations import actions, bulk, permissions, verbs
from django_dbtaskqueue.operations.search import Search, to_text
from django_dbtaskqueue.operations.search.query import tasks_for
from django_dbtaskqueue.operations.serializers import with_errors

MAX_OFFERED_QUEUES = 1000
DATE = "date"  # the choice of a pause that ends at a date
MAX_NAMED_TASKS = 20  # on the confirmation page
ACTION_ON_ALL_KEY = "action_on_all"  # a button's name: the action is on all rows that match its address
CARRIED = ("again", "operation", "put_back")  # what a confirmation posts again beside the selection


class PlainForm(forms.Form):
    def __init__(self, *args: Any, reason_required: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"] = forms.CharField(
            label=gettext_lazy("Reason"),
            max_length=permissions.REASON_MAX_LENGTH,
            required=reason_required,
            widget=forms.TextInput(attrs={"size": 60}),
            help_text=gettext_lazy("For the audit. This cannot be undone, so say why.")
            if reason_required
            else gettext_lazy("For the audit."),
        )


class VerbForm(PlainForm):
    """Asks for the inputs of a verb on tasks of a table; for an edit ``task`` is the one."""

    def __init__(
        self, data: Any = None, *, verb: verbs.TaskVerb, table: TaskQuerySet, actor: permissions.Actor, task: Any = None
    ) -> None:
        self.verb = verb
        super().__init__(data, reason_required=verb.needs_reason)
        self.fields.update({one.name: _field(one, table, actor, task) for one in verb.inputs})
        self.order_fields([one.name for one in verb.inputs])

    def clean(self) -> dict[str, Any]:
        """Read each input as the command line and the API do."""
        found = super().clean() or {}
        for one in self.verb.inputs:
            if one.name in found:
                try:
                    given = verbs.json_of(found[one.name] or one.initial or "") if one.is_json else found[one.name]
                    one.read(given)
                    found[one.name] = given
                except ValueError as error:
                    self.add_error(one.name, f"{error}.")
        return found

    def options(self) -> verbs.VerbOptions:
        """Return the answers; initial values while the form is not filled in, or has errors."""
        if self.is_bound and self.is_valid():
            return self.verb.options_of(self.cleaned_data)
        initial = {one.name: one.initial for one in self.verb.inputs}
        return self.verb.options_of(initial) if None not in initial.values() else verbs.VerbOptions()


def _field(
    one: verbs.VerbInput, table: TaskQuerySet, actor: permissions.Actor, task: AbstractTask | None
) -> forms.Field:
    texts: dict[str, Any] = {"label": one.label, "help_text": one.help, "initial": one.initial}
    if one.is_json:
        shown = one.initial or json.dumps(masked(task.payload if task else None), indent=2, ensure_ascii=False)
        area = forms.Textarea(attrs={"rows": min(shown.count("\n") + 3, 30), "cols": 80, "spellcheck": "false"})
        return forms.CharField(**{**texts, "initial": shown}, widget=area, required=one.initial is None)
    if one is verbs.TO_QUEUE:
        made = Queue.objects.using(table.db).order_by("name").values_list("name", flat=True)[:MAX_OFFERED_QUEUES]
        names = sorted(filter(actor.sees, {*conf.settings_queues(), *made}))
        here = (name for name in names if model_for(name) is table.model and table.db in aliases_of(name))
        return forms.ChoiceField(**texts, choices=[("", "---------"), *((name, name) for name in here)])
    if one.choices:
        return forms.ChoiceField(**texts, choices=one.choices, widget=forms.RadioSelect)
    return forms.CharField(**texts, widget=forms.TextInput(attrs={"size": 12}))


class PauseForm(PlainForm):
    for_time = forms.ChoiceField(
        label=gettext_lazy("How long"),
        required=False,
        choices=(
            ("", gettext_lazy("until a user resumes the queue")),
            ("15m", gettext_lazy("15 minutes")),
            ("1h", gettext_lazy("1 hour")),
            (DATE, gettext_lazy("until a date")),
        ),
        widget=forms.RadioSelect,
    )
    until = forms.DateTimeField(
        label=gettext_lazy("Date"),
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text=lazy(lambda: _("Only for “until a date”. Time zone: %(zone)s.") % {"zone": zone_name()}, str)(),
    )

    def clean(self) -> dict[str, Any]:
        """Set ``until`` to the end that was chosen; None: until a user resumes the queue."""
        found = super().clean() or {}
        chosen, until = found.get("for_time", ""), found.get("until")
        if until is not None and until <= now():
            self.add_error("until", gettext_lazy("Give a time in the future, or none."))
        if chosen not in ("", DATE):
            until = now() + parse_length(chosen)
        elif chosen == DATE and until is None and "until" not in self.errors:
            self.add_error("until", gettext_lazy("Give a date."))
        return {**found, "until": until}


def pressed_verb(request: HttpRequest, known: Mapping[str, permissions.V]) -> permissions.V:
    name = request.POST.get(ACTION_ON_ALL_KEY) or request.POST.get("action", "")
    if name not in known:
        raise BadRequest(f"There is no action {name!r} here.")
    return known[name]


def is_on_all(request: HttpRequest) -> bool:
    return request.POST.get("select_across") == "1" or ACTION_ON_ALL_KEY in request.POST


def bound_form(request: HttpRequest, kind: Callable[..., forms.Form]) -> Any:
    """Return the form as the confirmation page posted it, or an empty one if the page was not shown yet."""
    return kind(request.POST) if {"confirm", "recount"} & request.POST.keys() else kind()


def confirmed(request: HttpRequest, form: forms.Form) -> bool:
    return "confirm" in request.POST and form.is_bound and form.is_valid()


def ask(
    page: ReadOnlyAdmin, request: HttpRequest, verb: permissions.Verb, form: forms.Form, **shown: object
) -> HttpResponse:
    """Return the confirmation page. It posts to the same address, with the same selection.

    It shows ``sentences`` (what would happen), ``items`` (the first rows; ``unnamed``: more), a button if ``possible``.
    """
    context = {
        **frame_of(page, request),
        "title": verb.label,
        "verb": verb,
        "form": form,
        "possible": True,
        **shown,
        "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
        "checkbox_name": ACTION_CHECKBOX_NAME,
        "select_across": is_on_all(request),
        "carried": [(name, request.POST[name]) for name in CARRIED if name in request.POST],
        "origin": request.POST.get("origin", ""),
        "back": page.back(request),
    }
    request.current_app = page.admin_site.name
    return TemplateResponse(request, "admin/dbtaskqueue/confirm.html", context)


class TaskPageAdmin(ListAdmin):
    """What a page does to tasks: it asks, acts, and reports."""

    base_search = Search()  # what the page shows without a search

    def search_of(self, request: HttpRequest) -> Search:
        found: Search = self.filtered(request).checked().form.search
        return self.base_search & found if self.base_search.terms else found

    def act(self, request: HttpRequest) -> HttpResponse:
        if "again" in request.POST:
            return self._enqueue_copy(request)
        verb = pressed_verb(request, {**verbs.TASK_VERBS, **verbs.ONE_TASK_VERBS})
        permissions.check_may(verb, actor := viewer(request))
        return (self._act_on_all if is_on_all(request) else self._act_on_ticked)(request, verb, actor)

    def _act_on_all(self, request: HttpRequest, verb: verbs.TaskVerb, actor: permissions.Actor) -> HttpResponse:
        search = self.search_of(request)
        table = tasks_for(search)
        if table.model is not self.model._meta.concrete_model:
            raise OperationRefused(_("Name one queue of this table in the search: queue:NAME."))
        form = bound_form(request, partial(VerbForm, verb=verb, table=table, actor=actor))
        options = form.options()
        if not confirmed(request, form):
            preview = bulk.preview(verb, search, options=options, actor=actor)
            how = _("This runs in the background, in steps. Its page shows how far it is; you can stop it there.")
            undo = _("Afterwards you can put the tasks back as they were, on the same page.") if verb.undoable else ""
            sentences = filter(None, (*preview.sentences[1:], how, undo))
            items = with_errors([to_text(search)], permissions.narrow(FailureGroup.objects.using(table.db), actor))
            possible = preview.eligible is None or bool(preview.eligible)
            return ask(self, request, verb, form, sentences=sentences, items=items, possible=possible)
        operation = bulk.start(verb, search, actor, form.cleaned_data["reason"], options=options)
        address = self.url(BulkOperation, "change", operation.pk)
        return self.reply(request, _("The bulk operation has started."), address=address)

    def _act_on_ticked(self, request: HttpRequest, verb: verbs.TaskVerb, actor: permissions.Actor) -> HttpResponse:
        ids = [pk for text in request.POST.getlist(ACTION_CHECKBOX_NAME) if (pk := whole_number(text)) is not None]
        # Read from the database that is written: a replica may lag behind.
        table = self.model._meta.concrete_model._default_manager.using(alias_for("", None)).all()
        ticked = partial(permissions.narrow, table.filter(pk__in=ids), actor)
        task = ticked().first() if verb.name in verbs.ONE_TASK_VERBS else None
        if task is not None and not may_see(request, task):
            raise OperationRefused(_("To edit a payload you need the permission to see payloads."))
        form = bound_form(request, partial(VerbForm, verb=verb, table=table, actor=actor, task=task))
        options = form.options()
        if not confirmed(request, form):
            preview = actions.preview(ticked(), actions.ActionRequest(verb, options=options))
            items = [
                f"{task} · {task.status}" for task in ticked().only("queue", "reference", "status")[:MAX_NAMED_TASKS]
            ]
            shown = {"sentences": preview.sentences[1:], "items": items, "unnamed": len(ids) > MAX_NAMED_TASKS}
            return ask(self, request, verb, form, **shown, possible=bool(preview.eligible))
        wanted = actions.ActionRequest(verb, form.cleaned_data["reason"], options, to_text(self.search_of(request)))
        done = actions.act_on_ids(table, ids, wanted, actor)
        text = f"{verb.done % {'number': done.changed}}."
        if done.skips:
            reasons = ", ".join(f"{reason}: {len(ids)}" for reason, ids in done.skips.items())
            facts = {"done": text[:-1], "count": done.skipped, "reasons": reasons}
            text = _("%(done)s, %(count)s skipped (%(reasons)s).") % facts
        if done.operation is not None and (address := self.url(BulkOperation, "change", done.operation.pk)):
            text = format_html('{} <a href="{}">{}…</a>', text, address, _("Put back as it was"))
        return self.reply(request, text, address=request.get_full_path() if verb.deletes else "", changed=done.changed)

    def _enqueue_copy(self, request: HttpRequest) -> HttpResponse:
        if (task := self.get_object(request, request.POST.get("again", ""))) is None:
            raise Http404
        actor = viewer(request)
        for verb in (permissions.ENQUEUE_COPY, permissions.VIEW_PAYLOAD):
            permissions.check_may(verb, actor, task.queue)
        if not confirmed(request, form := bound_form(request, PlainForm)):
            return ask(self, request, permissions.ENQUEUE_COPY, form, items=[str(task)])
        with actions.recorded(alias := str(task._state.db)):
            fresh = actions.enqueue_copy(task)
            given = {"reason": form.cleaned_data["reason"], "details": {"task_id": fresh.pk, "again": task.pk}}
            actions.record(alias, actor, permissions.ENQUEUE_COPY, queue=task.queue, changed=1, **given)
            actions.log(actor, [fresh], actions.ADDITION, _("Enqueued again: task %(id)s") % {"id": task.pk})
        return self.reply(request, _("This is the new task."), address=self.page_of(fresh))
