"""Whether the queues are well: the one judgement that the admin, the command line and the API show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.operations.stats.overview import Overview

MAX_QUEUES_NAMED = 5


@dataclass(frozen=True, slots=True)
class Health:
    """A judgement of all queues."""

    level: str  # "ok", "warned" or "late"
    sentence: str
    notes: Sequence[str]  # what else an operator should know
    late: Sequence[str]  # queues, the latest first; a paused queue is never late
    unserved: Sequence[str]  # queues with tasks that no living poller serves
    paused: Sequence[str]


def health(found: Overview) -> Health:
    """Return how the queues are. The tasks of a paused queue wait on purpose: it is named as paused, not as late."""
    late, unserved = found.late, [row.queue for row in found.queues if row.unserved]
    paused = [row.queue for row in found.queues if row.paused]
    notes = [_("Nothing serves %(queues)s.") % {"queues": _names(unserved)}] if unserved else []
    notes += [_("Paused: %(queues)s.") % {"queues": _names(paused)}] if paused else []
    notes += [_("No poller is running.")] if not found.pollers and not unserved else []
    names = [row.queue for row in late]
    if not late:
        level, sentence = "warned" if notes else "ok", _("All queues are on time.")
        return Health(level, sentence, notes, names, unserved, paused)
    ages = [format_duration(row.oldest or timedelta(0), rough=True) for row in late]
    words = ngettext("%(count)s queue late, oldest %(age)s", "%(count)s queues late, oldest %(age)s", len(late))
    sentence = words % {"count": len(late), "age": ages[0]}
    shown = _names([f"{name} ({age})" for name, age in zip(names, ages, strict=True)])
    return Health("late", sentence, [_("Late: %(queues)s.") % {"queues": shown}, *notes], names, unserved, paused)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_QUEUES_NAMED])
    left = len(names) - MAX_QUEUES_NAMED
    return shown if left <= 0 else _("%(shown)s and %(count)s more") % {"shown": shown, "count": left}
