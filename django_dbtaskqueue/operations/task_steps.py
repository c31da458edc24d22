"""What operators see of the steps of a task: what it has done, and what it waits for."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils.translation import gettext as _

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.outcomes import SIGNAL
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AbstractTask, Step
from django_dbtaskqueue.models.tasks import SLEEP, WAIT

MAX_STEPS_SHOWN = 200  # the last ones
ROUNDING = timedelta(seconds=1)  # the step and the task took their times from two statements


def steps_of(task: AbstractTask) -> list[Step]:
    """Return the last steps of a task, in their order."""
    rows = Step.objects.using(task._state.db).filter(location=task._meta.label_lower, task_id=task.pk)
    return list(rows.order_by("-position")[:MAX_STEPS_SHOWN])[::-1]


def awaited(task: AbstractTask) -> Step | None:
    """Return the wait for a signal that a task, which has not ended, has begun; None if it waits for none."""
    last = _last(task)
    return last if last is not None and last.kind == WAIT else None


def suspension(task: AbstractTask, now: datetime) -> tuple[str, str, dict[str, object]] | None:
    """Return why a waiting task sleeps or waits for a signal, as a code, a sentence and facts; None if it does not."""
    last = _last(task) if task.status == Status.CREATED and task.total_attempt else None
    if last is None:
        return None
    until = last.until_time
    left = None if until is None else format_duration(max(until, now) - now, rough=True)
    if until is not None and until <= now:
        return None
    if last.kind == SLEEP:
        text = _("The task sleeps. It goes on in %(left)s.") % {"left": left}
        return "sleeping", text, {"until": until}
    facts = {"signal": last.name, "since": last.create_time, "until": until}
    text = _("The task has waited for the signal %(signal)s for %(time)s.")
    if until is not None:
        text = _("The task has waited for the signal %(signal)s for %(time)s. Without it, it goes on in %(left)s.")
    words = {"signal": last.name, "time": format_duration(now - last.create_time, rough=True), "left": left}
    return "signal", text % words, facts


def _last(task: AbstractTask) -> Step | None:
    if task.status not in (Status.CREATED, Status.PROCESSING):
        return None
    rows = Step.objects.using(task._state.db).filter(location=task._meta.label_lower, task_id=task.pk)
    last = rows.order_by("-position").first()
    return last if last is not None and last.kind in (SLEEP, WAIT) and _lasts(task, last) else None


def _lasts(task: AbstractTask, step: Step) -> bool:
    """Whether a sleep or a wait still lasts, but for its time: a signal, or an operator, makes the task due."""
    if task.status != Status.CREATED or task.parked_by == SIGNAL:
        return True
    return step.until_time is not None and task.next_process_time > step.until_time - ROUNDING
