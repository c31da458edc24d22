"""Who acts, whether they may, and the record of it: the audit and Django's ``LogEntry``."""

from __future__ import annotations

import getpass
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.db.models import Model
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.models import AuditEntry
from django_dbtaskqueue.operations.permissions import can_operate, search_fault
from django_dbtaskqueue.operations.search.parse import Search
from django_dbtaskqueue.operations.verbs import REASON_LENGTH, Verb

ADDITION, CHANGE, DELETION = 1, 2, 3  # Django's action flags; the admin need not be installed


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, and by which way. Without a user it is the command line: who can run it can do everything."""

    user: Any = None
    way: str = "command"

    @property
    def name(self) -> str:
        """The user's name; of the command line, the system's user."""
        return str(self.user.get_username()) if self.user is not None else _system_user()

    @property
    def key(self) -> str:
        """The user's primary key as text, or nothing."""
        return "" if self.user is None else str(self.user.pk)

    def may(self, verb: Verb, queue: str | None = None) -> bool:
        """Whether the actor may use the verb, on a queue or at all."""
        return self.user is None or can_operate(self.user, verb, queue)


def check(verb: Verb, reason: str, actor: Actor, queue: str | None = None) -> None:
    """Raise ``PermissionDenied`` or ``OperationRefused`` unless the actor may begin, with this reason."""
    if not actor.may(verb, queue):
        words = _("%(who)s may not use %(verb)s on queue %(queue)s.") if queue else _("%(who)s may not use %(verb)s.")
        raise PermissionDenied(words % {"who": actor.name, "verb": verb.name, "queue": queue})
    if verb.needs_reason and not reason.strip():
        words = _("%(verb)s needs a reason, for it cannot be undone: say why, for the audit.")
        raise OperationRefused(words % {"verb": verb.name})
    if len(reason) > REASON_LENGTH:
        words = _("A reason has up to %(most)s characters, not %(number)s.")
        raise OperationRefused(words % {"most": REASON_LENGTH, "number": len(reason)})


def check_search(search: Search, actor: Actor) -> None:
    """Raise ``PermissionDenied`` unless the actor may see what the search tells of payloads."""
    if fault := search_fault(actor.user, search):
        raise PermissionDenied(fault)


def record(alias: str, actor: Actor, verb: Verb, **columns: Any) -> AuditEntry:
    """Write an audit entry on the database of the act."""
    return AuditEntry.objects.using(alias).create(
        actor=actor.name[:200], user_key=actor.key, way=actor.way, verb=verb.name, **columns
    )


def log(actor: Actor, rows: Sequence[Model], flag: int, message: str) -> None:
    """Write Django's log entries, where there is a user and the admin is installed."""
    if actor.user is not None and rows and apps.is_installed("django.contrib.admin"):
        entries: Any = apps.get_model("admin", "LogEntry")
        entries.objects.log_actions(actor.user.pk, rows, flag, message)


@contextmanager
def recorded(alias: str) -> Iterator[None]:
    """A transaction on the tasks' database, inside one on the database of Django's log, for an act and its record."""
    installed = apps.is_installed("django.contrib.admin")
    outer = router.db_for_write(apps.get_model("admin", "LogEntry")) if installed else alias
    with transaction.atomic(using=outer), transaction.atomic(using=alias):
        yield


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "command line"
