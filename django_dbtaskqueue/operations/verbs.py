"""The operator's verbs as data: the admin, the command line and the API all read them here.

Permissions are not checked here: callers ask ``permissions.can_operate`` first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Q
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.core.states import BY_VERB, Status
from django_dbtaskqueue.flow.move import change_locked, lock_groups
from django_dbtaskqueue.flow.retention import finished_before, housekeep
from django_dbtaskqueue.flow.selection import same_rows
from django_dbtaskqueue.models import AbstractTask
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.permissions import VIEW_PAYLOAD, Verb


@dataclass(frozen=True, slots=True)
class HousekeepOptions:
    """The options of ``housekeep``: how long ago a task must have finished, and where it goes."""

    older_than: timedelta = timedelta(days=14)
    to: str = "history"  # or "delete"


@dataclass(frozen=True, slots=True)
class TaskVerb(Verb):
    """A verb over a selection of tasks."""

    ages: bool = False  # asks for ``HousekeepOptions``
    edge: str = ""  # its name in ``status.EDGES``, where that is another

    @property
    def sources(self) -> tuple[Status, ...]:
        """The statuses it acts on; tasks in another are skipped."""
        return BY_VERB[self.edge or self.name].sources

    @property
    def deletes(self) -> bool:
        """Whether the tasks leave the table."""
        return BY_VERB[self.edge or self.name].target is None

    def condition(self, options: HousekeepOptions) -> Q:
        """Return what a task must fulfil for the verb to change it."""
        status = Q(status__in=self.sources)
        return status & finished_before(options.older_than) if self.ages else status

    def eligible(self, tasks: TaskQuerySet, options: HousekeepOptions) -> TaskQuerySet:
        """Return those of ``tasks`` that the verb would change now."""
        return tasks.filter(self.condition(options))

    def lock_groups(self, tasks: TaskQuerySet) -> None:
        """Lock the groups that ``run`` changes. Groups are locked before rows everywhere."""
        if not self.ages:
            lock_groups(tasks, self.edge or self.name)

    def run(self, tasks: Sequence[AbstractTask], options: HousekeepOptions) -> int:
        """Change tasks of one table that this transaction has locked; return how many really changed."""
        if self.ages:
            return housekeep(same_rows(tasks), older_than=options.older_than, to=options.to)
        return change_locked(tasks, self.edge or self.name)

    def skipped(self, options: HousekeepOptions) -> str:
        """Return why a task is skipped, in words."""
        if self.ages and not options.older_than:
            return gettext("not finished")
        if self.ages:
            days = options.older_than.days
            return ngettext(
                "not finished, or finished less than %(days)s day ago",
                "not finished, or finished less than %(days)s days ago",
                days,
            ) % {"days": days}
        return gettext("not in %(statuses)s") % {"statuses": ", ".join(self.sources)}


REPROCESS = TaskVerb(
    name="reprocess",
    label=_("Reprocess"),
    effect=_(
        "The tasks become ready again (ERROR to CREATED), due now, with a new budget of attempts. Their processor runs "
        "again, with all its effects."
    ),
    done=ngettext_lazy("%(number)s task reprocessed", "%(number)s tasks reprocessed", "number"),
    permission="reprocess_task",
)
MARK_POISON = TaskVerb(
    name="mark_poison",
    label=_("Mark as poison"),
    effect=_(
        "The tasks are set aside (ERROR to POISON). Nothing processes them, and reprocess skips them, until an "
        "operator takes them back to ERROR."
    ),
    done=ngettext_lazy("%(number)s task marked as poison", "%(number)s tasks marked as poison", "number"),
    permission="mark_poison_task",
)
UNPOISON = TaskVerb(
    name="unpoison",
    label=_("Poison to error"),
    effect=_("The tasks count as failed again (POISON to ERROR), so that they can be reprocessed."),
    done=ngettext_lazy("%(number)s task taken back to ERROR", "%(number)s tasks taken back to ERROR", "number"),
    permission="unpoison_task",
)
KICK = TaskVerb(
    name="kick",
    label=_("Kick"),
    effect=_(
        "The tasks become ready again (POISON to CREATED), due now, with a new budget of attempts. Their processor "
        "runs again, with all its effects."
    ),
    done=ngettext_lazy("%(number)s task kicked", "%(number)s tasks kicked", "number"),
    permission="kick_task",
)
CANCEL = TaskVerb(
    name="cancel",
    label=_("Cancel"),
    effect=_("The waiting tasks are set aside (CREATED to POISON). Nothing processes them any more."),
    done=ngettext_lazy("%(number)s task cancelled", "%(number)s tasks cancelled", "number"),
    permission="cancel_task",
)
RELEASE = TaskVerb(
    name="release",
    label=_("Release"),
    effect=_(
        "The pollers that hold the tasks lose their leases (PROCESSING to CREATED), and the tasks are due now. The "
        "result of a running processor is discarded, but its effects elsewhere can happen twice."
    ),
    done=ngettext_lazy("%(number)s task released", "%(number)s tasks released", "number"),
    permission="release_task",
    edge="release_all",
)
DELETE = TaskVerb(
    name="delete",
    label=_("Delete"),
    effect=_(
        "The tasks are deleted in any status, and counted as deleted. The result of a running processor is "
        "discarded. This cannot be undone."
    ),
    done=ngettext_lazy("%(number)s task deleted", "%(number)s tasks deleted", "number"),
    permission="delete_task",
    needs_reason=True,
)
PURGE = TaskVerb(
    name="purge",
    label=_("Purge"),
    effect=_("Every task of the queue is deleted in any status, and counted as deleted. This cannot be undone."),
    done=DELETE.done,
    permission="purge_queue",
    edge="delete",
    needs_reason=True,
)
HOUSEKEEP = TaskVerb(
    name="housekeep",
    label=_("Housekeep"),
    effect=_(
        "Finished tasks (COMPLETED, ERROR, POISON) of the given age are moved to the history, or deleted and counted "
        "as deleted."
    ),
    done=ngettext_lazy("%(number)s task housekept", "%(number)s tasks housekept", "number"),
    permission="housekeep_task",
    ages=True,
)
PAUSE = Verb(
    name="pause",
    label=_("Pause"),
    effect=_("From now on no poller takes a task of the queue. Running tasks go on, and tasks can still be enqueued."),
    done=ngettext_lazy("%(number)s queue paused", "%(number)s queues paused", "number"),
    permission="pause_queue",
)
RESUME = Verb(
    name="resume",
    label=_("Resume"),
    effect=_("Pollers take tasks of the queue again, at once."),
    done=ngettext_lazy("%(number)s queue resumed", "%(number)s queues resumed", "number"),
    permission="pause_queue",
)
CHANGE_SETTINGS = Verb(
    name="change_settings",
    label=_("Change settings"),
    effect=_("Every poller applies the new settings of the queue within a heartbeat."),
    done=ngettext_lazy("Settings of %(number)s queue changed", "Settings of %(number)s queues changed", "number"),
    permission="change_queue_settings",
)
CONTROL_POLLERS = Verb(
    name="control_pollers",
    label=_("Control pollers"),
    effect=_("The pollers drain, stop, pause or start again."),
    done=ngettext_lazy("Command sent to %(number)s poller", "Command sent to %(number)s pollers", "number"),
    permission="control_poller",
)
ENQUEUE_COPY = Verb(
    name="enqueue_again",
    label=_("Enqueue again as new"),
    effect=_(
        "A new task is enqueued with the same queue, payload, priority, group, tag, lease, time to live and budget of "
        "attempts, and without a reference. The old task stays as it is. The processor runs again, with all its "
        "effects."
    ),
    done=ngettext_lazy("%(number)s task enqueued", "%(number)s tasks enqueued", "number"),
    permission="add_task",
)
# On ticked tasks, and on all that match a search.
TASK_VERBS: Mapping[str, TaskVerb] = {
    verb.name: verb for verb in (REPROCESS, MARK_POISON, UNPOISON, KICK, CANCEL, RELEASE, HOUSEKEEP, DELETE)
}
QUEUE_VERBS: Mapping[str, Verb] = {verb.name: verb for verb in (PAUSE, RESUME)}
# What can run as a bulk operation.
BULK_VERBS: Mapping[str, TaskVerb] = {**TASK_VERBS, PURGE.name: PURGE}
VERBS: Mapping[str, Verb] = {
    **BULK_VERBS,
    **QUEUE_VERBS,
    **{verb.name: verb for verb in (CHANGE_SETTINGS, CONTROL_POLLERS, VIEW_PAYLOAD)},
}
