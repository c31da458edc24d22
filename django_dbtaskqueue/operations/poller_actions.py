"""What pollers can be told: pause, start, drain, stop. Each follows within a heartbeat, and the act is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_dbtaskqueue.models import Poller
from django_dbtaskqueue.operations.audit import CHANGE, Actor, check, log, record, recorded
from django_dbtaskqueue.operations.verbs import CONTROL_POLLERS, Verb

TOLD = ngettext_lazy("%(number)s poller told", "%(number)s pollers told", "number")
STOPPED = "STOPPED"


def _command(name: str, label: Any, effect: Any) -> Verb:
    return Verb(name=name, label=label, effect=effect, done=TOLD, permission=CONTROL_POLLERS.permission)


POLLER_VERBS: Mapping[str, Verb] = {
    verb.name: verb
    for verb in (
        _command(
            "pause",
            _("Pause"),
            _("The pollers take nothing more until they are started again; what they hold goes on."),
        ),
        _command("start", _("Start"), _("Pollers that were paused take tasks again.")),
        _command(
            "drain",
            _("Drain"),
            _(
                "The pollers take nothing more, give back what has not begun, finish what runs, and end. What keeps "
                "them running (a supervisor, a service manager) may start new ones."
            ),
        ),
        _command(
            "stop",
            _("Stop"),
            _(
                "The pollers end without waiting: async tasks are cancelled, threads left behind; those attempts stay "
                "charged and are made again. What keeps them running may start new ones."
            ),
        ),
    )
}


def tell(instances: Sequence[str], command: str, actor: Actor, *, reason: str = "", using: str = "default") -> int:
    """Tell pollers what to do and record it for each; return the number of those told. One that ended is passed over.

    Raises ``PermissionDenied`` without the permission, and KeyError for a command that is none.
    """
    verb = POLLER_VERBS[command]
    check(verb, reason, actor)
    with recorded(using):
        rows = Poller.objects.using(using).filter(pk__in=instances).exclude(state=STOPPED)
        found = list(rows.select_for_update().order_by("pk"))
        for poller in found:
            details = {"poller": poller.instance, "command": command}
            record(using, actor, CONTROL_POLLERS, reason=reason, changed=1, details=details)
        rows.filter(pk__in=[poller.pk for poller in found]).update(wanted=command)
        log(actor, found, CHANGE, f"{verb.label} {reason}".strip())
    return len(found)
