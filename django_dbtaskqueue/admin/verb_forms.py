"""What a confirmation page asks: the reason, the inputs of a verb, the end of a pause."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from django import forms
from django.utils.timezone import get_current_timezone_name, now
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.db.session import aliases_of, model_for
from django_dbtaskqueue.models import AbstractTask, Queue
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.permissions import REASON_MAX_LENGTH, Actor
from django_dbtaskqueue.operations.verb_inputs import TO_QUEUE, VerbInput, VerbOptions, json_of
from django_dbtaskqueue.operations.verbs import TaskVerb
from django_dbtaskqueue.operations.visibility import visible_names

MAX_OFFERED_QUEUES = 1000
DATE = "date"  # the choice of a pause that ends at a date


class PlainForm(forms.Form):
    """Asks for a reason, which is optional unless the verb needs one."""

    def __init__(self, *args: Any, reason_required: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"] = forms.CharField(
            label=gettext_lazy("Reason"),
            max_length=REASON_MAX_LENGTH,
            required=reason_required,
            widget=forms.TextInput(attrs={"size": 60}),
            help_text=gettext_lazy("For the audit. This cannot be undone, so say why.")
            if reason_required
            else gettext_lazy("For the audit."),
        )

    def reason(self) -> str:
        """Return the reason as it was typed."""
        return str(self.cleaned_data["reason"]).strip()


class VerbForm(PlainForm):
    """Asks for the inputs of a verb on tasks of a table; for an edit ``task`` is the one."""

    def __init__(
        self,
        *args: Any,
        verb: TaskVerb,
        table: TaskQuerySet,
        actor: Actor,
        task: AbstractTask | None = None,
        **kwargs: Any,
    ) -> None:
        self.verb = verb
        super().__init__(*args, reason_required=verb.needs_reason, **kwargs)
        self.fields.update({one.name: _field(one, table, actor, task) for one in verb.inputs})
        self.order_fields([one.name for one in verb.inputs])

    def clean(self) -> dict[str, Any]:
        """Read each input as the command line and the API do."""
        found = super().clean() or {}
        for one in self.verb.inputs:
            if one.name in found:
                try:
                    given = json_of(found[one.name] or one.initial or "") if one.is_json else found[one.name]
                    one.read(given)
                    found[one.name] = given
                except ValueError as error:
                    self.add_error(one.name, f"{error}.")
        return found

    def options(self) -> VerbOptions:
        """Return the answers; initial values while the form is not filled in, or has errors."""
        if self.is_bound and self.is_valid():
            return self.verb.options_of(self.cleaned_data)
        initial = {one.name: one.initial for one in self.verb.inputs}
        return self.verb.options_of(initial) if None not in initial.values() else VerbOptions()


def _field(one: VerbInput, table: TaskQuerySet, actor: Actor, task: AbstractTask | None) -> forms.Field:
    texts: dict[str, Any] = {"label": one.label, "help_text": one.help, "initial": one.initial}
    if one.is_json:
        shown = one.initial or json.dumps(masked(task.payload if task else None), indent=2, ensure_ascii=False)
        area = forms.Textarea(attrs={"rows": min(shown.count("\n") + 3, 30), "cols": 80, "spellcheck": "false"})
        return forms.CharField(**{**texts, "initial": shown}, widget=area, required=one.initial is None)
    if one is TO_QUEUE:
        return forms.ChoiceField(
            **texts, choices=[("", "---------"), *((name, name) for name in _queues(table, actor))]
        )
    if one.choices:
        return forms.ChoiceField(**texts, choices=one.choices, widget=forms.RadioSelect)
    return forms.CharField(**texts, widget=forms.TextInput(attrs={"size": 12}))


def _queues(table: TaskQuerySet, actor: Actor) -> list[str]:
    """Return the known queues of a table that the actor may view."""
    made = Queue.objects.using(table.db).order_by("name").values_list("name", flat=True)[:MAX_OFFERED_QUEUES]
    names = sorted(visible_names({*conf.known_queues(), *made}, actor))
    return [name for name in names if model_for(name) is table.model and table.db in aliases_of(name)]


class PauseForm(PlainForm):
    """Asks for a reason and an end."""

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
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["until"].help_text = gettext_lazy("Only for “until a date”. Time zone: %(zone)s.") % {
            "zone": get_current_timezone_name()
        }

    def clean(self) -> dict[str, Any]:
        """Set ``until`` to the end that was chosen; None: until a user resumes the queue."""
        found = super().clean() or {}
        chosen, until = found.get("for_time", ""), found.get("until")
        if chosen not in ("", DATE):
            until = now() + parse_length(chosen)
        elif chosen == DATE and until is None and "until" not in self.errors:
            self.add_error("until", gettext_lazy("Give a date."))
        return {**found, "until": until}

    def clean_until(self) -> datetime | None:
        """Refuse an end in the past."""
        until: datetime | None = self.cleaned_data["until"]
        if until is not None and until <= now():
            raise forms.ValidationError(gettext_lazy("Give a time in the future, or none."))
        return until
