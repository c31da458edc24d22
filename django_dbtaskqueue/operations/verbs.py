"""The operator's verbs as data: the admin, the command line and the API all read them here.

Nothing here asks who is acting: a face asks ``permissions.can_operate`` first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import Case, F, Q, When
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from django_dbtaskqueue import conf, notifier
from django_dbtaskqueue.exceptions import TaskQueueError, UnknownQueue
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.operations.paginators import Count, bounded_count
from django_dbtaskqueue.querysets import TaskQuerySet
from django_dbtaskqueue.session import Session, alias_for
from django_dbtaskqueue.status import BY_VERB, Status

REASON_LENGTH = 500
IN_EFFECT = Q(paused_time__isnull=False) & (Q(paused_until__isnull=True) | Q(paused_until__gt=Now()))


@dataclass(frozen=True, slots=True)
class Aging:
    """What ``housekeep`` asks for: how long ago a task must have finished, and where it goes."""

    older_than: timedelta = timedelta(days=14)
    to: str = "history"  # or "delete"


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing an operator can do. Texts are translated when they are shown."""

    name: str
    label: Any
    effect: Any  # what happens, in words
    done: Any  # "%(number)s tasks reprocessed"
    permission: str  # codename of the permission it needs


@dataclass(frozen=True, slots=True)
class TaskVerb(Verb):
    """A verb over a selection of tasks."""

    run: Callable[[TaskQuerySet, Aging], int]  # returns the number of tasks really changed
    ages: bool = False  # asks for ``Aging``

    @property
    def sources(self) -> tuple[Status, ...]:
        """The statuses it acts on; tasks in another are skipped."""
        return BY_VERB[self.name].sources

    @property
    def removes(self) -> bool:
        """Whether the tasks leave the table."""
        return BY_VERB[self.name].target is None

    def eligible(self, tasks: TaskQuerySet, aging: Aging) -> TaskQuerySet:
        """Return those of ``tasks`` that ``run`` would change now."""
        ready = tasks.filter(status__in=self.sources)
        if not self.ages:
            return ready
        ended = Coalesce("finish_time", "last_update_time")
        return ready.alias(ended=ended).filter(ended__lte=Now() - aging.older_than)

    def skipped(self, aging: Aging) -> str:
        """Return why a task is skipped, in words."""
        if self.ages and not aging.older_than:
            return _("not finished")
        if self.ages:
            days = aging.older_than.days
            return ngettext(
                "not finished, or finished less than %(days)s day ago",
                "not finished, or finished less than %(days)s days ago",
                days,
            ) % {"days": days}
        return _("not in %(statuses)s") % {"statuses": ", ".join(self.sources)}

    def preview(self, tasks: TaskQuerySet, aging: Aging) -> Preview:
        """Count what is selected and what would change; two bounded counts."""
        return Preview(bounded_count(tasks), bounded_count(self.eligible(tasks, aging)))


@dataclass(frozen=True, slots=True)
class Preview:
    """What a verb would do."""

    selected: Count
    eligible: Count

    @property
    def skipped(self) -> int | None:
        """How many would be skipped; None when there is too much to know."""
        return None if self.selected.more else self.selected.number - self.eligible.number


def _housekeep(tasks: TaskQuerySet, aging: Aging) -> int:
    return tasks.housekeep(older_than=aging.older_than, to=aging.to)


REPROCESS = TaskVerb(
    name="reprocess",
    label=gettext_lazy("Reprocess"),
    effect=gettext_lazy(
        "The tasks go back in line (ERROR to CREATED), due now, with all their attempts. Their processor runs again, "
        "with all it does."
    ),
    done=ngettext_lazy("%(number)s task reprocessed", "%(number)s tasks reprocessed", "number"),
    permission="reprocess_task",
    run=lambda tasks, _aging: tasks.reprocess(),
)
MARK_POISON = TaskVerb(
    name="mark_poison",
    label=gettext_lazy("Mark as poison"),
    effect=gettext_lazy(
        "The tasks are put aside (ERROR to POISON): nothing processes them, and reprocess passes them over, until "
        "somebody takes them back to ERROR."
    ),
    done=ngettext_lazy("%(number)s task marked as poison", "%(number)s tasks marked as poison", "number"),
    permission="mark_poison_task",
    run=lambda tasks, _aging: tasks.mark_poison(),
)
UNPOISON = TaskVerb(
    name="unpoison",
    label=gettext_lazy("Poison to error"),
    effect=gettext_lazy("The tasks count as failed again (POISON to ERROR), so that they can be reprocessed."),
    done=ngettext_lazy("%(number)s task taken back to ERROR", "%(number)s tasks taken back to ERROR", "number"),
    permission="unpoison_task",
    run=lambda tasks, _aging: tasks.unpoison(),
)
HOUSEKEEP = TaskVerb(
    name="housekeep",
    label=gettext_lazy("Housekeep"),
    effect=gettext_lazy(
        "Finished tasks (COMPLETED, ERROR, POISON) of the given age leave the table: into the history, or deleted for "
        "good and counted as deleted."
    ),
    done=ngettext_lazy("%(number)s task housekept", "%(number)s tasks housekept", "number"),
    permission="housekeep_task",
    run=_housekeep,
    ages=True,
)
PAUSE = Verb(
    name="pause",
    label=gettext_lazy("Pause"),
    effect=gettext_lazy(
        "No poller takes a task of the queue from now on. What is being processed goes on, and tasks can still be "
        "enqueued."
    ),
    done=ngettext_lazy("%(number)s queue paused", "%(number)s queues paused", "number"),
    permission="pause_queue",
)
RESUME = Verb(
    name="resume",
    label=gettext_lazy("Resume"),
    effect=gettext_lazy("Pollers take the queue's tasks again, at once."),
    done=ngettext_lazy("%(number)s queue resumed", "%(number)s queues resumed", "number"),
    permission="pause_queue",
)
TASK_VERBS: Mapping[str, TaskVerb] = {verb.name: verb for verb in (REPROCESS, MARK_POISON, UNPOISON, HOUSEKEEP)}
QUEUE_VERBS: Mapping[str, Verb] = {verb.name: verb for verb in (PAUSE, RESUME)}


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
                notifier.after_commit(connections[alias], name)
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
