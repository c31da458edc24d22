"""Acts on queues: pause, resume, settings. Permission first; the change and its record are one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django_dbtaskqueue.conf import overrides
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.operations import pause as pausing
from django_dbtaskqueue.operations.audit import CHANGE, Actor, check, log, record, recorded
from django_dbtaskqueue.operations.verbs import CHANGE_SETTINGS, PAUSE, RESUME


def pause(
    queues: Sequence[str], actor: Actor, *, reason: str = "", until: datetime | None = None, using: str | None = None
) -> int:
    """Pause queues as ``pausing.pause`` does, and record it for each."""
    for queue in queues:
        check(PAUSE, reason, actor, queue)
    changed = 0
    for queue in queues:
        alias = alias_for(queue, using)
        with recorded(alias):
            changed += pausing.pause([queue], by=actor.name, reason=reason, until=until, using=alias)
            details = {"until": until.isoformat()} if until else {}
            record(alias, actor, PAUSE, queue=queue, reason=reason, changed=1, details=details)
            log(actor, [Queue(name=queue)], CHANGE, f"{PAUSE.label} {reason}".strip())
    return changed


def resume(queues: Sequence[str], actor: Actor, *, reason: str = "", using: str | None = None) -> int:
    """Resume queues, and record it for each that was paused."""
    for queue in queues:
        check(RESUME, reason, actor, queue)
    changed = 0
    for queue in queues:
        alias = alias_for(queue, using)
        with recorded(alias):
            if pausing.resume([queue], using=alias):
                record(alias, actor, RESUME, queue=queue, reason=reason, changed=1)
                log(actor, [Queue(name=queue)], CHANGE, str(RESUME.label))
                changed += 1
    return changed


def change_settings(
    queue: str,
    values: dict[str, Any],
    actor: Actor,
    *,
    back: Sequence[str] = (),
    reason: str = "",
    using: str | None = None,
) -> dict[str, Any]:
    """Lay ``values`` over a queue's runtime overrides, take those of ``back`` away, record it; return all overrides.

    Raises ``ImproperlyConfigured`` for a setting that is none or a value that cannot be, ``UnknownQueue`` for a queue
    nobody knows. Pollers follow within a heartbeat.
    """
    check(CHANGE_SETTINGS, reason, actor, queue)
    alias = alias_for(queue, using)
    with recorded(alias):
        pausing.ensure_rows([queue], alias)
        row = Queue.objects.using(alias).select_for_update().get(pk=queue)
        before = dict(row.overrides or {})
        row.overrides = {name: value for name, value in {**before, **values}.items() if name not in back}
        conf.overlay(conf.default_settings(queue), row.overrides)
        row.save(using=alias, update_fields=["overrides"])
        details = {"before": before, "after": row.overrides}
        record(alias, actor, CHANGE_SETTINGS, queue=queue, reason=reason, changed=1, details=details)
        log(actor, [row], CHANGE, f"{CHANGE_SETTINGS.label}: {', '.join([*values, *back])}")
    overrides.forget()
    return dict(row.overrides)
