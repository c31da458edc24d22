"""The confirmation page of an action: permission, preview, a form with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.contrib.admin import helpers
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.timezone import get_current_timezone_name, now
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.admin.frame import frame_context
from django_dbtaskqueue.admin.read_only import ReadOnlyAdmin
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.verbs import REASON_MAX_LENGTH, HousekeepOptions, TaskVerb, Verb

MAX_AGE_DAYS = 36_500


class PlainForm(forms.Form):
    """Asks for an optional reason."""

    reason_required = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"] = forms.CharField(
            label=_("Reason"),
            max_length=REASON_MAX_LENGTH,
            required=self.reason_required,
            widget=forms.TextInput(attrs={"size": 60}),
            help_text=_("For the audit. This cannot be undone, so say why.")
            if self.reason_required
            else _("For the audit."),
        )

    def reason(self) -> str:
        """Return the reason as it was typed."""
        return str(self.cleaned_data["reason"]).strip()

    def options(self) -> HousekeepOptions:
        """Return the retention; only ``HousekeepForm`` asks for it."""
        return HousekeepOptions()


class ReasonForm(PlainForm):
    """Asks for a reason, which is required."""

    reason_required = True


class HousekeepForm(PlainForm):
    """Asks for an age and a destination."""

    days = forms.IntegerField(
        label=_("Finished at least this many days ago"), min_value=0, max_value=MAX_AGE_DAYS, initial=14
    )
    to = forms.ChoiceField(
        label=_("Where the tasks go"),
        choices=(("history", _("Into the history")), ("delete", _("Delete for good"))),
        initial="history",
        widget=forms.RadioSelect,
    )

    def options(self) -> HousekeepOptions:
        """Return the answers; the form's initial values while it is not filled in, or has errors."""
        given = self.cleaned_data if self.is_bound and self.is_valid() else {}
        fields = self.fields
        days = int(given.get("days", fields["days"].initial))
        return HousekeepOptions(timedelta(days=days), given.get("to", fields["to"].initial))


def form_for(verb: TaskVerb) -> type[PlainForm]:
    """Return the form of a verb."""
    if verb.ages:
        return HousekeepForm
    return ReasonForm if verb.needs_reason else PlainForm


class PauseForm(PlainForm):
    """Asks for a reason and an end."""

    until = forms.DateTimeField(
        label=_("Until"),
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["until"].help_text = _("Time zone: %(zone)s. Empty: until a user resumes the queue.") % {
            "zone": get_current_timezone_name()
        }

    def clean_until(self) -> datetime | None:
        """Refuse an end in the past."""
        until: datetime | None = self.cleaned_data["until"]
        if until is not None and until <= now():
            raise forms.ValidationError(_("Give a time in the future, or none."))
        return until


@dataclass(frozen=True, slots=True)
class Question:
    """What a confirmation page shows."""

    verb: Verb
    sentences: Sequence[str]  # the preview
    items: Sequence[str]  # the first of the rows
    form: forms.Form
    possible: bool  # whether anything would change
    unnamed: bool = False  # whether there are more rows than items


def check(request: HttpRequest, verb: Verb, queue: str | None = None) -> None:
    """Raise ``PermissionDenied`` unless the user may use the verb, on this queue or on any."""
    if not can_operate(request.user, verb, queue):
        raise PermissionDenied


def bound_form(request: HttpRequest, kind: type[forms.Form]) -> Any:
    """Return the form as the confirmation page posted it, or an empty one if the page was not shown yet."""
    answered = "confirm" in request.POST or "recount" in request.POST
    return kind(request.POST) if answered else kind()


def confirmed(request: HttpRequest, form: forms.Form) -> bool:
    """Return whether the user confirmed, and the form has no errors."""
    return "confirm" in request.POST and form.is_bound and form.is_valid()


def ask(page: ReadOnlyAdmin, request: HttpRequest, question: Question) -> HttpResponse:
    """Return the confirmation page. It posts to the same address, with the same selection."""
    site = page.admin_site
    context = {
        **site.each_context(request),
        **frame_context(request, site, page.opts.model_name),
        "title": question.verb.label,
        "opts": page.opts,
        "page": page,
        "question": question,
        "selected": request.POST.getlist(helpers.ACTION_CHECKBOX_NAME),
        "checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        "select_across": request.POST.get("select_across") == "1",
        "copy_of": request.POST.get("again", ""),
        "origin": request.POST.get("origin", ""),
        "back": page.back(request),
    }
    request.current_app = site.name
    return TemplateResponse(request, "admin/dbtaskqueue/confirm.html", context)
