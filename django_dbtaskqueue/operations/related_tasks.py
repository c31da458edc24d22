"""What a task has done in its steps, what it waits for, and what waits for it. Each question reads a bounded number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.outcomes import SIGNAL
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.flow.dependencies import TaskKey
from django_dbtaskqueue.flow.parents import rows_of
from django_dbtaskqueue.models import AbstractTask, Dependency, Step
from django_dbtaskqueue.models.tasks import SLEEP, WAIT
from django_dbtaskqueue.operations.permissions import Actor

MAX_RELATED_SHOWN = 50  # parents, and children, on the page of a task
MAX_PARENTS_NAMED = 3  # in the sentence that says what a task waits for
COUNTED_RELATED = 10_000  # how far parents and children are counted
MAX_STEPS_SHOWN = 200  # the last ones
ROUNDING = timedelta(seconds=1)  # the step and the task took their times from two statements


@dataclass(frozen=True, slots=True)
class RelatedTask:
    """A parent or a child. ``status`` is "" for one that is gone; ``queue`` is "" for one of a hidden queue."""

    location: str
    id: int
    name: str
    queue: str
    reference: str | None
    status: str
    open: bool  # the child still waits for the parent


@dataclass(frozen=True, slots=True)
class RelatedTasks:
    """The first parents or children of a task, and how many there are: counted no further than 10,000."""

    tasks: Sequence[RelatedTask]
    number: int

    @property
    def more(self) -> int:
        """How many are not among ``tasks``."""
        return self.number - len(self.tasks)


def waits_for(task: AbstractTask, alias: str) -> tuple[str, Mapping[str, object]]:
    """Return what a held task waits for, as a sentence and as facts."""
    edges = _edges(task, alias, "child").filter(outcome__isnull=True)
    found = _read(edges.order_by("pk")[:MAX_PARENTS_NAMED], alias, "parent", None)
    number = edges[:COUNTED_RELATED].count()
    facts = {"parents": {str(one.id): one.status or "?" for one in found}, "number": number}
    if not found:
        return _(
            "The task waits for a parent that was deleted. Cancel it; then Kick runs it without its parents."
        ), facts
    named = ", ".join(f"{one.id} ({one.status or '?'})" for one in found)
    if number > len(found):
        named = _("%(named)s and %(more)s more") % {"named": named, "more": f"{number - len(found):,}"}
    text = ngettext("The task waits for task %(named)s.", "The task waits for tasks %(named)s.", number)
    text %= {"named": named}
    if any(one.status in TERMINAL for one in found):
        text += " " + _("A parent that failed has to complete after all: reprocess it.")
    return text, facts


def parents_of(task: AbstractTask, actor: Actor) -> RelatedTasks:
    """Return what a task waits for, or waited for."""
    return _related(task, "child", "parent", actor)


def children_of(task: AbstractTask, actor: Actor) -> RelatedTasks:
    """Return what waits for a task, or waited for it."""
    return _related(task, "parent", "child", actor)


def _related(task: AbstractTask, here: str, there: str, actor: Actor) -> RelatedTasks:
    alias = str(task._state.db)
    edges = _edges(task, alias, here)
    found = _read(edges.order_by("pk")[:MAX_RELATED_SHOWN], alias, there, actor)
    number = edges[:COUNTED_RELATED].count() if len(found) == MAX_RELATED_SHOWN else len(found)
    return RelatedTasks(found, number)


def _edges(task: AbstractTask, alias: str, here: str) -> QuerySet[Dependency]:
    of = {f"{here}_location": task._meta.label_lower, f"{here}_id": task.pk}
    return Dependency.objects.using(alias).filter(**of)


def _read(edges: QuerySet[Dependency], alias: str, there: str, actor: Actor | None) -> list[RelatedTask]:
    pairs = [(TaskKey(getattr(one, f"{there}_location"), getattr(one, f"{there}_id")), one) for one in edges]
    rows = rows_of({key for key, _edge in pairs}, alias)
    found = []
    for key, edge in pairs:
        queue, reference, status, _result = rows.get(key, ("", None, "", None))
        hidden = actor is not None and queue and not actor.sees(queue)
        name = edge.name if there == "parent" and not hidden else ""
        shown = ("", None) if hidden else (queue, reference)
        found.append(RelatedTask(*key, name, *shown, status, edge.outcome is None))
    return found


# -- steps -------------------------------------------------------------------------------------------------------------


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
