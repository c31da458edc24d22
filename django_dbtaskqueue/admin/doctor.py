"""The doctor: what is wrong with the queue and its database, in words, each with what helps."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.admin.base import ReadOnlyAdmin
from django_dbtaskqueue.admin.display import badge
from django_dbtaskqueue.admin.pages import show
from django_dbtaskqueue.operations.doctor import Finding, examine

LOOKS = {"error": ("error", "✕"), "warning": ("paused", "!"), "info": ("created", "i")}


class DoctorAdmin(ReadOnlyAdmin):
    """A page of findings."""

    view_permission = "view_queue"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """All findings, the worst first."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        # Before the page's transaction, which a question that the database refuses would end.
        found = examine(self.get_queryset(request).db)
        return show(self, request, "doctor", lambda: self._facts(found))

    def _facts(self, found: list[Finding]) -> dict[str, Any]:
        serious = [finding for finding in found if finding.level != "info"]
        words = ngettext("%(count)s thing needs care.", "%(count)s things need care.", len(serious))
        return {
            "findings": [
                {"level": one.level, "badge": badge(*LOOKS[one.level], level_word(one.level)), "words": one.words}
                | {"remedy": one.remedy, "id": one.id}
                for one in found
            ],
            "worst": "" if not serious else "late" if serious[0].level == "error" else "warned",
            "sentence": words % {"count": len(serious)} if serious else _("All is well."),
        }


def level_word(level: str) -> str:
    """Return a finding's level as people read it."""
    return {"error": _("error"), "warning": _("warning"), "info": _("note")}[level]
