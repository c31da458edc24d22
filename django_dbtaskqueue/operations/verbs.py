"""The operator's verbs as data, for the admin, the command line and the API. Their callers check permissions first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Self

from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext, gettext_lazy as _, ngettext_lazy

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core.columns import PRIORITIES
from django_dbtaskqueue.core.durations import format_duration, parse_length
from django_dbtaskqueue.core.exceptions import DuplicateTask, OperationRefused
from django_dbtaskqueue.core.json import dumps, is_name, loads_exactly, whole_number
from django_dbtaskqueue.core.masking import MASKED, masked, masked_text
from django_dbtaskqueue.core.states import BY_VERB, Status
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.flow.move import CONDITIONS, change_locked
from django_dbtaskqueue.flow.placement import UNIQUE_OVER_HISTORY, without_spent
from django_dbtaskqueue.flow.port import signal_all
from django_dbtaskqueue.flow.retention import finished_before, housekeep, still_needed
from django_dbtaskqueue.flow.selection import same_rows
from django_dbtaskqueue.models import AbstractTask, UsedReference
from django_dbtaskqueue.operations import permissions
from django_dbtaskqueue.operations.permissions import PAUSE, RESUME, VIEW_PAYLOAD, Actor, Verb, by_name, check_queue

TIMES = {"older_than", "delay"}  # the options that are stored as seconds


@dataclass(frozen=True, slots=True)
class VerbOptions:
    """What the verbs ask for beside the tasks; each verb reads its own (``TaskVerb.inputs``)."""

    older_than: timedelta = timedelta(days=14)  # housekeep: how long ago a task must have finished
    to: str = "history"  # housekeep: or "delete"
    delay: timedelta = timedelta(0)  # snooze
    priority: int = 0
    queue: str = ""  # move: the new queue
    payload: Any = None  # edit
    signal: str = ""  # signal: its name
    data: object = None  # and what it carries

    def to_json(self) -> dict[str, Any]:
        """Return what a bulk operation stores of them: all but the payload."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "payload"}
        return values | {name: values[name].total_seconds() for name in TIMES}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return the options that ``to_json`` stored, and defaults for those that it did not."""
        known = {one.name: stored[one.name] for one in fields(cls) if one.name in stored}
        return cls(**known | {name: timedelta(seconds=known[name]) for name in TIMES & known.keys()})


@dataclass(frozen=True, slots=True)
class VerbInput:
    """An option of a verb as people give it: a field of its form, an option of its command, a key of the API."""

    name: str  # in the form and in the API; with dashes, the command line's option
    field: str  # of ``VerbOptions``
    label: permissions.Text
    help: permissions.Text
    read: Callable[[Any], Any] = lambda given: given  # the value of what was given; ``ValueError`` says what is wrong
    initial: str | None = None  # None: it must be given
    choices: tuple[tuple[str, permissions.Text], ...] = ()
    is_json: bool = False  # the API sends the value itself, forms and commands its text


def _to(given: object) -> str:
    if given not in ("history", "delete"):
        raise ValueError(f'must be "history" or "delete", not {given!r}')
    return str(given)


def positive_length(given: object) -> timedelta:
    """Return a duration of more than 0."""
    if not (found := parse_length(given)):
        raise ValueError(f"{given!r} must be more than 0")
    return found


def _priority(given: object) -> int:
    number = None if isinstance(given, bool) else whole_number(str(given).strip())
    if number is None or not PRIORITIES.least <= number <= PRIORITIES.most:
        raise ValueError(f"{given!r:.50} must be {PRIORITIES.words}")
    return number


def json_of(text: str) -> Any:
    """Return the value of a JSON text; ``ValueError`` says where it is wrong."""
    try:
        return loads_exactly(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"not JSON: {error}") from None


def _name(given: object) -> str:
    name = given.strip() if isinstance(given, str) else given
    if not is_name(name):
        raise ValueError(f"{given!r} must be a name of 1 to 200 characters")
    return name


EXAMPLES = _("Such as 30m, 2h or 14d.")
OLDER_THAN = VerbInput(
    "older_than", "older_than", _("Finished at least this long ago"), EXAMPLES, parse_length, initial="14d"
)
TO = VerbInput(
    "to", "to", _("Where the tasks go"), "", _to, initial="history",
    choices=(("history", _("Into the history")), ("delete", _("Delete for good"))),
)  # fmt: skip
FOR = VerbInput("for", "delay", _("For how long"), EXAMPLES, positive_length)
PRIORITY = VerbInput("priority", "priority", _("New priority"), _("A whole number; lower runs first."), _priority)
TO_QUEUE = VerbInput("to_queue", "queue", _("New queue"), _("Its tasks must be in the same table."), _name)
PAYLOAD = VerbInput(
    "payload", "payload", _("New payload"),
    _("As JSON. A secret is shown as •••: leave it as it is. It keeps its value."), is_json=True,
)  # fmt: skip
SIGNAL_NAME = VerbInput("signal", "signal", _("Name of the signal"), _("What the task waits for."), _name)
SIGNAL_DATA = VerbInput(
    "data", "data", _("Data"), _("As JSON. The processor receives it. Optional."), initial="null", is_json=True
)


def with_secrets_of(stored: Any, edited: Any) -> Any:
    """Return a payload that a person edited as it was shown, masked, with the secrets of the stored one.

    A secret keeps its value, also where its key was left out. Raises ``OperationRefused`` where a secret was changed
    or would be shown from now on, or where the mask stands in the place of none.
    """
    return _with_secrets(stored, masked(stored), edited, "")


def _with_secrets(stored: Any, shown: Any, edited: Any, path: str) -> Any:
    if shown == MASKED != stored:
        if edited != MASKED:  # told alike for the right value: each guess would be an answer
            raise _is_masked(path)
        return stored
    if isinstance(edited, dict):
        held, seen = (stored, shown) if isinstance(shown, dict) else ({}, {})
        return _object_with_secrets(held, seen, edited, path)
    if isinstance(edited, list):
        was, parts = (stored, shown) if isinstance(shown, list) else ([], [])
        if len(was) != len(edited) and parts != was:
            words = gettext("%(path)s holds secrets: its items can be changed only one by one.")
            raise OperationRefused(words % {"path": path})
        trios = zip_longest(was[: len(edited)], parts[: len(edited)], edited)
        items = [_with_secrets(*trio, f"{path}[{at}]") for at, trio in enumerate(trios)]
        again: Any = masked(items)
        if [at for at, one in enumerate(parts) if one == MASKED != was[at] and again[at] != MASKED]:
            raise _is_masked(path or "payload")
        return items
    if isinstance(edited, str) and edited == shown:
        return stored
    if isinstance(edited, str) and MASKED in edited:
        words = gettext("%(path)s holds ••• where the payload has no secret, or another text around it.")
        raise OperationRefused(words % {"path": path or "payload"})
    return edited


def _object_with_secrets(stored: Any, seen: Any, edited: dict[str, Any], path: str) -> dict[str, Any]:
    names, held = dict(zip(seen, stored, strict=True)), dict(zip(seen, stored.values(), strict=True))
    secrets: dict[str, Any] = {key: value for key, value in held.items() if seen[key] == MASKED != value}
    ways = {key: f"{path}.{key}" if path else key for key in (*edited, *secrets)}
    if guessed := [key for key in edited.keys() - names.keys() if MASKED in key or masked_text(key) != key]:
        raise _is_masked(ways[guessed[0]])
    merged = {key: _with_secrets(held.get(key), seen.get(key), value, ways[key]) for key, value in edited.items()}
    merged |= {key: value for key, value in secrets.items() if key not in edited}
    found = {names.get(key, key): value for key, value in merged.items()}  # a key can hold a secret, too
    # The key beside a secret can say that it is one: {"name": "Authorization", "value": "•••"}.
    shown: Any = masked(found)
    again = zip(merged, shown.values(), strict=True)
    if bared := [key for key, value in again if key in secrets and value != MASKED]:
        raise _is_masked(ways[bared[0]])
    return found


def _is_masked(path: str) -> OperationRefused:
    return OperationRefused(gettext("%(path)s is masked and cannot be changed here.") % {"path": path})


@dataclass(frozen=True, slots=True)
class TaskVerb(Verb):
    """A verb over a selection of tasks."""

    permission: str = ""  # if no other is named, NAME_task
    hint: permissions.Text = ""  # one plain line beside its button
    inputs: tuple[VerbInput, ...] = ()
    edge: str = ""  # its name in ``core.states.EDGES``, where that is another
    rare: bool = False  # offered under "More actions" where there are many
    undoable: bool = True  # whether a bulk operation can put its tasks back as they were
    also: tuple[Status, ...] = ()  # further statuses of its tasks, which it does not change
    sources: tuple[Status, ...] = field(init=False)  # the statuses it acts on; tasks in another are skipped
    deletes: bool = field(init=False)  # the tasks leave the table

    def __post_init__(self) -> None:
        permissions.Verb.__post_init__(self)
        edge = BY_VERB[self.edge or self.name]
        for name, value in (
            ("permission", self.permission or f"{self.name}_task"),
            ("edge", edge.verb),
            ("sources", (*edge.sources, *self.also)),
            ("deletes", edge.target is None),
        ):
            object.__setattr__(self, name, value)

    def options_of(self, given: Mapping[str, object]) -> VerbOptions:
        """Read its inputs from what was given by name. Raises ``OperationRefused`` in words."""
        values = {}
        for one in self.inputs:
            value = given.get(one.name, None if one.is_json else one.initial)
            if one.initial is None and ((value is None and not one.is_json) or (one.is_json and one.name not in given)):
                words = gettext("%(verb)s needs %(name)s. %(help)s")
                raise OperationRefused(words % {"verb": self.name, "name": repr(one.name), "help": one.help})
            try:
                values[one.field] = one.read(value)
            except (TypeError, ValueError) as error:
                raise OperationRefused(f"{one.name!r} {error}.") from None
        return VerbOptions(**values)

    def check(self, model: type[AbstractTask], alias: str, options: VerbOptions, actor: Actor) -> None:
        """Raise ``TaskQueueError`` for options that do not fit the table, or the actor."""
        if TO_QUEUE in self.inputs:
            check_queue(options.queue, actor)
            if not actor.may(self, options.queue):
                raise PermissionDenied(gettext("not permitted on queue %(queue)s") % {"queue": options.queue})
            overridden_settings(options.queue, alias)
            if model_for(options.queue) is not model or alias not in aliases_of(options.queue):
                words = gettext("Queue %(queue)s has another table or database: its tasks cannot move there.")
                raise OperationRefused(words % {"queue": options.queue})
        if PAYLOAD in self.inputs or SIGNAL_DATA in self.inputs:
            given = options.payload if PAYLOAD in self.inputs else options.data
            dumps(given, limits=conf.settings().payload_limits)

    def allowed(self, actor: Actor, queue: str, target: str) -> bool:
        """Whether the actor may use it on tasks of a queue, which a move takes to ``target``.

        To edit a payload, a user must be allowed to see it.
        """
        if self is MOVE and not actor.may_bring(queue, target):
            return False
        return actor.may(self, queue) and (self is not EDIT or actor.may(VIEW_PAYLOAD, queue))

    def condition(self, model: type[AbstractTask], options: VerbOptions) -> Q:
        found = Q(status__in=self.sources) & CONDITIONS[self.edge]
        if self is HOUSEKEEP:
            found &= finished_before(options.older_than)
        if self is MOVE:
            there = {"queue": options.queue, "reference": OuterRef("reference")}
            found &= ~Q(queue=options.queue) & ~Q(Exists(model._default_manager.filter(**there)))
            found &= ~Q(Exists(UsedReference._default_manager.filter(**there, expire_time=None)))
        return found

    def refused(self, tasks: Sequence[AbstractTask]) -> dict[int, str]:
        """Return those of the locked tasks that cannot change together with the others, and why."""
        if self is HOUSEKEEP and tasks:
            watched = {task.pk: task.watched for task in tasks}
            words = gettext("another task or a client waits for its end on this database")
            return dict.fromkeys(still_needed(Session.on(str(tasks[0]._state.db), type(tasks[0])), watched), words)
        first = {task.reference or str(task.pk): task.pk for task in reversed(tasks)}
        words = gettext("another task with its reference moves there")
        return dict.fromkeys({task.pk for task in tasks} - {*first.values()}, words) if self is MOVE else {}

    def run(self, tasks: Sequence[AbstractTask], options: VerbOptions, actor: str = "") -> int:
        """Change tasks of one table that this transaction has locked; return how many really changed."""
        if self is HOUSEKEEP:
            return housekeep(same_rows(tasks), older_than=options.older_than, to=options.to)
        if self is SEND_SIGNAL:
            return signal_all(tasks, options.signal, options.data, actor=actor)
        given = {name: getattr(options, name) for name in ("delay", "priority", "queue", "payload")}
        if self is EDIT:
            given["payload"] = with_secrets_of(tasks[0].payload, options.payload)
        if self is not MOVE:
            return change_locked(tasks, self.edge, given)
        alias, references = str(tasks[0]._state.db), [{"reference_number": task.reference} for task in tasks]
        try:
            with transaction.atomic(using=alias):
                if overridden_settings(options.queue, alias).unique_over == UNIQUE_OVER_HISTORY:
                    without_spent(Session.on(alias, type(tasks[0])), options.queue, references, "error")
                return change_locked(tasks, self.name, given)
        except (DuplicateTask, IntegrityError):
            words = gettext("A task with one of these references was enqueued in %(queue)s just now: try again.")
            raise OperationRefused(words % {"queue": options.queue}) from None

    def skipped(self, options: VerbOptions) -> str:
        if self is HOUSEKEEP and not options.older_than:
            return gettext("not finished")
        if self is HOUSEKEEP:
            words = gettext("not finished, or finished less than %(time)s ago")
            return words % {"time": format_duration(options.older_than)}
        words = gettext("not in %(statuses)s") % {"statuses": ", ".join(self.sources)}
        if self is RUN_NOW:
            return gettext("%(reason)s, or parked because no processor runs it") % {"reason": words}
        if self is MOVE:
            facts = {"reason": words, "queue": options.queue}
            return gettext("%(reason)s, or in %(queue)s already, or its reference is taken there") % facts
        return words

    def words(self, options: VerbOptions, reason: str = "") -> str:
        more = f" ({reason})" if reason else ""
        if self is HOUSEKEEP:
            age = gettext("older than %(time)s") % {"time": format_duration(options.older_than)}
            return f"{self.label}: {age}, {options.to}{more}"
        given = [getattr(options, one.field) for one in self.inputs if not one.is_json]
        texts = (format_duration(value) if isinstance(value, timedelta) else str(value) for value in given)
        return ": ".join([str(self.label), *texts]) + more


REPROCESS = TaskVerb(
    "reprocess", _("Retry"),
    _("The tasks become ready again (ERROR to CREATED), due now, with a new budget of attempts. Their processor runs "
      "again, with all its effects."),
    ngettext_lazy("%(number)s task reprocessed", "%(number)s tasks reprocessed", "number"),
    hint=_("runs failed tasks again"),
)  # fmt: skip
MARK_POISON = TaskVerb(
    "mark_poison", _("Discard"),
    _("The tasks are set aside (ERROR to POISON). Nothing processes them, and reprocess skips them, until an operator "
      "takes them back to ERROR."),
    ngettext_lazy("%(number)s task marked as poison", "%(number)s tasks marked as poison", "number"),
    hint=_("sets failed tasks aside, so that a retry of all skips them"),
)  # fmt: skip
UNPOISON = TaskVerb(
    "unpoison", _("Restore"), _("The tasks count as failed again (POISON to ERROR), so that they can be reprocessed."),
    ngettext_lazy("%(number)s task taken back to ERROR", "%(number)s tasks taken back to ERROR", "number"),
    hint=_("counts poison tasks as failed again"),
)  # fmt: skip
KICK = TaskVerb(
    "kick", _("Requeue"),
    _("The tasks become ready again (POISON to CREATED), due now, with a new budget of attempts. Their processor runs "
      "again, with all its effects."),
    ngettext_lazy("%(number)s task reprocessed", "%(number)s tasks reprocessed", "number"), rare=True,
    hint=_("runs poison tasks again"),
)  # fmt: skip
CANCEL = TaskVerb(
    "cancel", _("Cancel"),
    _("The tasks are set aside (CREATED or PROCESSING to POISON). Nothing processes them any more. Those that run are "
      "stopped, except on threads: there the code goes on until it checks. What it returns is discarded."),
    ngettext_lazy("%(number)s task cancelled", "%(number)s tasks cancelled", "number"), rare=True,
    hint=_("sets waiting tasks aside, and stops running ones"),
)  # fmt: skip
RELEASE = TaskVerb(
    "release", _("Release"),
    _("The pollers that hold the tasks lose their leases (PROCESSING to CREATED), and the tasks are due now. The "
      "result of a running processor is discarded, but its effects elsewhere can happen twice."),
    ngettext_lazy("%(number)s task released", "%(number)s tasks released", "number"), rare=True,
    hint=_("takes running tasks from their pollers and makes them due now"), edge="release_all", undoable=False,
)  # fmt: skip
DELETE = TaskVerb(
    "delete", _("Delete"),
    _("The tasks are deleted in any status, and counted as deleted. The result of a running processor is discarded. "
      "This cannot be undone."),
    ngettext_lazy("%(number)s task deleted", "%(number)s tasks deleted", "number"), hint=_("deletes tasks for good"),
    needs_reason=True, undoable=False,
)  # fmt: skip
PURGE = TaskVerb(
    "purge", _("Purge"),
    _("Every task of the queue is deleted in any status, and counted as deleted. This cannot be undone."),
    DELETE.done, hint=_("deletes every task of the queue for good"), permission="purge_queue", edge="delete",
    needs_reason=True, undoable=False,
)  # fmt: skip
HOUSEKEEP = TaskVerb(
    "housekeep", _("Archive"),
    _("Finished tasks (COMPLETED, ERROR, POISON) of the given age are moved to the history, or deleted and counted as "
      "deleted."),
    ngettext_lazy("%(number)s task housekept", "%(number)s tasks housekept", "number"),
    hint=_("moves finished tasks of some age to the history, or deletes them"), inputs=(OLDER_THAN, TO), undoable=False,
)  # fmt: skip
RUN_NOW = TaskVerb(
    "run_now", _("Run now"),
    _("The waiting tasks become due now, also those that are scheduled for later or wait for their next attempt."),
    ngettext_lazy("%(number)s task due now", "%(number)s tasks due now", "number"), rare=True,
    hint=_("makes waiting tasks due now"),
)  # fmt: skip
SNOOZE = TaskVerb(
    "snooze", _("Snooze"), _("No poller takes the waiting tasks until the given time has passed, counted from now."),
    ngettext_lazy("%(number)s task snoozed", "%(number)s tasks snoozed", "number"), rare=True,
    hint=_("lets waiting tasks wait longer"), inputs=(FOR,),
)  # fmt: skip
CHANGE_PRIORITY = TaskVerb(
    "change_priority", _("Change priority"),
    _("The waiting tasks get another priority. In a queue, tasks of a lower number run first."),
    ngettext_lazy("%(number)s task has the priority", "%(number)s tasks have the priority", "number"), rare=True,
    hint=_("lets waiting tasks run earlier or later than others"), inputs=(PRIORITY,),
)  # fmt: skip
MOVE = TaskVerb(
    "move", _("Move to another queue"),
    _("The waiting tasks go to another queue of the same table. That queue's processors run them."),
    ngettext_lazy("%(number)s task moved", "%(number)s tasks moved", "number"), rare=True,
    hint=_("gives waiting tasks to another queue's processors"), inputs=(TO_QUEUE,),
)  # fmt: skip
EDIT = TaskVerb(
    "edit", _("Edit payload and retry"),
    _("The task gets the new payload and becomes ready again (ERROR or POISON to CREATED), due now, with a new budget "
      "of attempts. The difference is kept in the audit."),
    ngettext_lazy("%(number)s payload edited", "%(number)s payloads edited", "number"),
    hint=_("repairs the payload of a failed task and runs it again"), permission="edit_payload_task", inputs=(PAYLOAD,),
    undoable=False,
)  # fmt: skip
PUT_BACK = TaskVerb(  # who may use it: who may use the verb that it puts back
    "put_back", _("Put back as it was"),
    _("The tasks that the bulk operation changed become what they were before it. A task that changed since, for "
      "example because a poller took it, stays as it is."),
    ngettext_lazy("%(number)s task put back", "%(number)s tasks put back", "number"),
    hint=_("gives the tasks the status, times, priority and queue back that they had before"), undoable=False,
)  # fmt: skip
SEND_SIGNAL = TaskVerb(
    "signal", _("Send a signal"),
    _("The tasks get a signal. A task that waits for a signal of this name goes on now; another gets it when it waits "
      "for it."),
    ngettext_lazy("%(number)s task got the signal", "%(number)s tasks got the signal", "number"), rare=True,
    hint=_("lets tasks go on that wait for it"), inputs=(SIGNAL_NAME, SIGNAL_DATA), also=(Status.PROCESSING,),
    undoable=False,
)  # fmt: skip
# On ticked tasks, and on all that match a search.
TASK_VERBS = by_name(
    REPROCESS, MARK_POISON, UNPOISON, HOUSEKEEP, KICK, CANCEL, RUN_NOW, SNOOZE, CHANGE_PRIORITY, MOVE, SEND_SIGNAL,
    RELEASE, DELETE,
)  # fmt: skip
ONE_TASK_VERBS = by_name(EDIT)  # on one task at a time
QUEUE_VERBS = by_name(PAUSE, RESUME)
BULK_VERBS = by_name(*TASK_VERBS.values(), PURGE)  # what can run as a bulk operation
ID_VERBS = by_name(*BULK_VERBS.values(), EDIT)


def bulk_verb(name: str) -> TaskVerb:
    """Return a verb over all tasks that match a search. Raises ``OperationRefused``."""
    if name not in BULK_VERBS:
        words = gettext("There is no verb %(verb)s for tasks; they are %(names)s.")
        raise OperationRefused(words % {"verb": repr(name), "names": ", ".join(BULK_VERBS)})
    return BULK_VERBS[name]
