"""Pause and resume queues: for every checkout that starts after the commit, anywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

from django.db import connections, transaction
from django.db.models import Case, F, Q, When
from django.db.models.functions import Now

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import TaskQueueError, UnknownQueue
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, alias_for
from django_dbtaskqueue.models import Queue

REASON_LENGTH = 500
IN_EFFECT = Q(paused_time__isnull=False) & (Q(paused_until__isnull=True) | Q(paused_until__gt=Now()))


def pause(
    queues: Iterable[str], *, by: str, reason: str = "", until: datetime | None = None, using: str | None = None
) -> int:
    """Pause queues until ``until``, or until somebody resumes them; return the number of queues now paused by this.

    Holds for every checkout that starts after the commit, anywhere. A queue that is paused already stays paused since
    when it was, with the new reason and end. Atomic per database. Raises ``UnknownQueue``, and ``TaskQueueError`` for
    an end that is not in the future by the database's clock.
    """
    changed = 0
    for alias, names in _by_alias(queues, using).items():
        with transaction.atomic(using=alias):
            ensure_rows(names, alias)
            end = None if until is None else _stored(until, alias)
            changed += (
                Queue.objects.using(alias)
                .filter(name__in=names)
                .update(
                    paused_time=Case(When(IN_EFFECT, then=F("paused_time")), default=Now()),
                    paused_until=end,
                    paused_by=by[:200],
                    paused_reason=reason[:REASON_LENGTH],
                )
            )
    return changed


def resume(queues: Iterable[str], *, using: str | None = None) -> int:
    """Resume queues and wake their pollers; return the number that really were paused. Atomic per database."""
    changed = 0
    for alias, names in _by_alias(queues, using).items():
        with transaction.atomic(using=alias):
            paused = Queue.objects.using(alias).filter(IN_EFFECT, name__in=names)
            changed += paused.update(paused_time=None, paused_until=None, paused_by="", paused_reason="")
            for name in names:
                notify.after_commit(connections[alias], name)
    return changed


def ensure_rows(names: Iterable[str], alias: str) -> None:
    """Make the ``Queue`` rows of known queues that have none yet; raise ``UnknownQueue`` for a queue nobody knows."""
    wanted = set(names)
    rows = Queue.objects.using(alias)
    missing = wanted - set(rows.filter(name__in=wanted).values_list("name", flat=True))
    known = set(conf.known_queues())
    for name in sorted(missing - known):
        raise UnknownQueue(name, known)
    rows.bulk_create([Queue(name=name) for name in sorted(missing)], ignore_conflicts=True)


def _by_alias(queues: Iterable[str], using: str | None) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(set(queues)):
        found[alias_for(name, using)].append(name)
    return found


def _stored(until: datetime, alias: str) -> datetime:
    """Return the end of a pause as the database's clock will be compared with it."""
    session = Session.on(alias)
    if session.is_past(until):
        raise TaskQueueError(
            f"A pause until {until} would end before it begins, by the clock of database {alias!r}. "
            "Give a later time, or none to pause until somebody resumes the queue."
        )
    return session.stored_time(until)
