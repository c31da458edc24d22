"""What operators change while queues and pollers run: pauses, settings, commands to pollers, the shards of tasks.

A checkout that starts after the commit sees a pause. A poller reads settings and commands at its next heartbeat.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import connections
from django.db.models import Case, Count, F, When
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _, ngettext_lazy

from django_dbtaskqueue.conf import overrides, settings as conf
from django_dbtaskqueue.conf.queue import FIXED_SETTINGS, QUEUE_KEYS, check_name, stored
from django_dbtaskqueue.core.exceptions import OperationRefused, TaskQueueError, UnknownQueue
from django_dbtaskqueue.core.sql.dialects import MOVING
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of, model_for
from django_dbtaskqueue.flow.shard_move import Moved, ShardMove
from django_dbtaskqueue.models import AuditEntry, Limit, Poller, Queue
from django_dbtaskqueue.models.control import IN_EFFECT, queue_names_in
from django_dbtaskqueue.operations import permissions
from django_dbtaskqueue.operations.actions import CHANGE, log, record, recorded
from django_dbtaskqueue.operations.permissions import CHANGE_SETTINGS, CONTROL_POLLERS, PAUSE, Actor, Verb, check
from django_dbtaskqueue.operations.queue_stats import alive
from django_dbtaskqueue.operations.search import text_of
from django_dbtaskqueue.operations.search.query import select
from django_dbtaskqueue.operations.serializers import Document

STOPPED_STATE = "STOPPED"
LAST_PAUSE_YEAR = 2200


def apply_to_queues(
    verb: Verb,
    queues: Sequence[str],
    actor: Actor,
    *,
    reason: str = "",
    until: datetime | None = None,
    using: str | None = None,
) -> int:
    """Do one of ``QUEUE_VERBS`` to queues, on each shard; record each that changed, and return how many did."""
    for queue in queues:
        permissions.check_queue(queue, actor)
        check(verb, reason, actor, queue)
    to_pause, changed = verb is PAUSE, set[str]()
    if until is not None and not to_pause:
        raise OperationRefused(_("Only a pause has an end."))
    for queue, alias in places_of_known(queues, using):
        with recorded(alias):
            done = pause(queue, alias, by=actor.name, reason=reason, until=until) if to_pause else resume(queue, alias)
            if done:
                details = {"until": until.isoformat()} if until else {}
                record(alias, actor, verb, queue=queue, reason=reason, changed=1, details=details)
                log(actor, [Queue(name=queue)], CHANGE, f"{verb.label} {reason}".strip())
                changed.add(queue)
    return len(changed)


def places_of_known(queues: Iterable[str], using: str | None) -> list[tuple[str, str]]:
    """Return each queue with each of its databases; raise ``UnknownQueue`` if one of the queues is unknown."""
    places = [(queue, alias) for queue in queues for alias in aliases_of(queue, using)]
    for queue, alias in places:
        if not conf.is_known(queue) and not is_in_use(queue, alias):
            raise UnknownQueue(queue, conf.settings_queues())
    return places


def change_settings(
    queue: str,
    values: Mapping[str, object],
    actor: Actor,
    *,
    reset: Sequence[str] = (),
    reason: str = "",
    using: str | None = None,
) -> dict[str, object]:
    """Make what ``new_overrides`` returns a queue's overrides, on each shard. Raises ``UnknownQueue``, and as that."""
    permissions.check_queue(queue, actor)
    check(CHANGE_SETTINGS, reason, actor, queue)
    for alias in aliases_of(queue, using):
        with recorded(alias):
            ensure_row(queue, alias)
            row = Queue.objects.using(alias).select_for_update().get(pk=queue)
            before = row.changes
            row.overrides = new_overrides(queue, before, values, reset)
            row.save(using=alias, update_fields=["overrides"])
            Limit.objects.using(alias).filter(queue=queue).update(stamp="")  # count all leases anew
            details = {"before": before, "after": row.overrides}
            record(alias, actor, CHANGE_SETTINGS, queue=queue, reason=reason, changed=1, details=details)
            log(actor, [row], CHANGE, f"{CHANGE_SETTINGS.label}: {', '.join([*values, *reset])}")
    overrides.clear_cache()
    return dict(row.overrides)


def new_overrides(
    queue: str, before: Mapping[str, object], values: Mapping[str, object], reset: Sequence[str] = ()
) -> dict[str, object]:
    """Return overrides with ``values``, without ``reset``. Raises ``ImproperlyConfigured`` for what may not be set."""
    where = str(_("Queue %(name)s") % {"name": queue})
    for name in set(reset).difference(before):
        check_name(name, where=where)
    changed = {**before, **stored(values, where=where, fixed=FIXED_SETTINGS)}
    after = {name: value for name, value in changed.items() if name not in reset}
    conf.overlay(conf.default_settings(queue), after)
    return after


def pause(queue: str, alias: str, *, by: str, reason: str = "", until: datetime | None = None) -> int:
    """Pause a queue until ``until``, or until an operator resumes it; return 1.

    Holds for every checkout that starts after the commit, anywhere. A queue that is paused already stays paused since
    when it was, with the new reason and end. Raises ``UnknownQueue``, and ``TaskQueueError`` for an end in the past.
    """
    ensure_row(queue, alias)
    session = Session.on(alias)
    if until is not None and until.year > LAST_PAUSE_YEAR:
        raise TaskQueueError(f"A pause until {until} is too long: it ends in the year {LAST_PAUSE_YEAR} at the latest.")
    if until is not None and session.is_past(until):
        raise TaskQueueError(
            f"A pause until {until} would end before it begins, by the clock of database {alias!r}. "
            "Give a later time, or none to pause until an operator resumes the queue."
        )
    end = None if until is None else session.stored_time(until)  # as the database's clock will be compared with it
    return Queue.objects.using(alias).filter(pk=queue).update(
        paused_time=Case(When(IN_EFFECT, then=F("paused_time")), default=Now()), paused_until=end,
        paused_by=by[:200], paused_reason=reason,
    )  # fmt: skip


def resume(queue: str, alias: str) -> int:
    """Resume a queue and wake its pollers; return 1 if it really was paused, or 0."""
    paused = Queue.objects.using(alias).filter(IN_EFFECT, pk=queue)
    changed = paused.update(paused_time=None, paused_until=None, paused_by="", paused_reason="")
    notify.wake_after_commit(connections[alias], queue)
    return changed


def ensure_row(queue: str, alias: str) -> None:
    """Make the ``Queue`` row of a queue that has none yet; raise ``UnknownQueue`` for an unknown queue.

    A queue that this process has no processor for is known, too, if a living poller serves it or it has a task.
    """
    places_of_known([queue], alias)
    Queue.objects.using(alias).bulk_create([Queue(name=queue)], ignore_conflicts=True)


def is_in_use(name: str, alias: str) -> bool:
    """Whether a queue has its row, a living poller serves it, or it has a task."""
    rows = Queue.objects.using(alias).filter(pk=name)
    tasks = select(text_of(queue=name), model_for(name)._default_manager.using(alias).all())
    return rows.exists() or any(name in served for served in alive(alias).values()) or tasks.exists()


POLLER_VERBS: Mapping[str, Verb] = {
    name: replace(CONTROL_POLLERS, name=name, label=label, effect=effect)
    for name, label, effect in (
        ("pause", _("Pause"), _("The pollers take no more tasks until they are started again; running tasks go on.")),
        ("start", _("Start"), _("Pollers that were paused take tasks again.")),
        ("drain", _("Drain"), _(
            "The pollers take no more tasks, return the tasks that have not begun, finish the running ones, and "
            "end. A supervisor or service manager may start new pollers."
        )),
        ("stop", _("Stop"), _(
            "The pollers end without waiting: async tasks are cancelled and threads are abandoned. Their attempts "
            "count and are repeated. A supervisor or service manager may start new pollers."
        )),
    )
}  # fmt: skip


def command_pollers(
    instances: Sequence[str], command: str, actor: Actor, *, reason: str = "", using: str = "default"
) -> int:
    """Send a command to pollers and record it for each; return how many got it. A poller that has ended is skipped.

    Raises ``PermissionDenied`` without the permission on each queue that the pollers serve, and KeyError for an unknown
    command. A poller of queues that the actor may not view counts as not there.
    """
    verb = POLLER_VERBS[command]
    check(CONTROL_POLLERS, reason, actor)
    with recorded(using):
        running = Poller.objects.using(using).filter(pk__in=instances).exclude(state=STOPPED_STATE)
        rows = permissions.narrow(running, actor)
        found = list(rows.select_for_update().order_by("pk"))
        for poller in found:
            queues = queue_names_in(poller.queues)
            for queue in filter(actor.sees, queues):  # a hidden one is not named
                check(CONTROL_POLLERS, "", actor, queue)
            if not all(map(actor.sees, queues)):
                words = _("%(poller)s also serves queues that you may not control.")
                raise PermissionDenied(words % {"poller": poller.instance})
            details = {"poller": poller.instance, "command": command}
            record(using, actor, CONTROL_POLLERS, reason=reason, changed=1, details=details)
        rows.filter(pk__in=[poller.pk for poller in found]).update(requested_command=command)
        log(actor, found, CHANGE, f"{verb.label} {reason}".strip())
    return len(found)


# Each batch of a move is recorded in the audits of both databases, in its transactions.

MOVE_SHARD = Verb(
    "move_shard", _("Move to another database"),
    _("The waiting tasks of the queue go to the database where an enqueue would put them now, or to one that is named. "
      "Running and finished tasks stay."),
    ngettext_lazy("%(number)s task moved", "%(number)s tasks moved", "number"), "move_task",
)  # fmt: skip


def shard_documents(queue: str, actor: Actor, also: Iterable[str] = ()) -> list[Document]:
    """Return how many tasks a queue has on each of its databases, and on others that are named. It counts them all.

    ``is_shard``: pollers of the queue look there. ``moving``: marked by a move, which runs or was killed.
    """
    homes = _checked(queue, actor, also)
    found: list[Document] = []
    for alias in dict.fromkeys([*homes, *also]):
        tasks = ShardMove(queue).tasks(alias)
        counts = dict(tasks.order_by().values_list("status").annotate(number=Count("pk")))
        statuses = {str(status): counts.get(str(status), 0) for status in Status}
        moving = tasks.filter(parked_by__startswith=MOVING).count()
        found.append({"database": alias, "is_shard": alias in homes, "statuses": statuses, "moving": moving})
    return found


def move_shards(
    move: ShardMove, actor: Actor, *, sources: Sequence[str] = (), limit: int | None = None, reason: str = ""
) -> Moved:
    """Move waiting tasks of a queue from its databases, or from ``sources``, to where they belong; see ``ShardMove``.

    ``limit``: begin no batch after so many tasks. Raises ``OperationRefused`` for a database that cannot be used.
    """
    homes = _checked(move.queue, actor, [*sources, *([move.target] if move.target else [])])
    check(MOVE_SHARD, reason, actor, move.queue)
    if move.target is not None and move.target not in homes:
        words = _("No poller of %(queue)s looks at database %(alias)s. Its databases are %(homes)s.")
        raise OperationRefused(words % {"queue": move.queue, "alias": move.target, "homes": ", ".join(homes)})
    alias_of: dict[tuple[str, ...], str] = {}
    for alias in dict.fromkeys([*sources, *homes]):
        connections[alias].ensure_connection()  # one that is down must not be found out after tasks are marked
        place = tuple(str(connections[alias].settings_dict[name]) for name in ("ENGINE", "HOST", "PORT", "NAME"))
        if (one := alias_of.setdefault(place, alias)) != alias:
            raise OperationRefused(_("%(one)s and %(other)s are the same database.") % {"one": one, "other": alias})
    entries: dict[tuple[str, str, str], int] = {}

    def note(source: str, target: str, alias: str, number: int) -> None:
        entry = AuditEntry.objects.using(alias).filter(pk=entries.get((source, target, alias), 0))
        if not entry.update(changed=F("changed") + number):
            given = {"queue": move.queue, "reason": reason, "details": {"from": source, "to": target}}
            entries[source, target, alias] = record(alias, actor, MOVE_SHARD, changed=number, **given).pk

    replace(move, note=note).run(homes, sources or homes, limit)
    return move.report


def _checked(queue: str, actor: Actor, named: Iterable[str]) -> tuple[str, ...]:
    permissions.check_queue(queue, actor)
    homes = aliases_of(queue)
    overrides.overridden_settings(queue, homes[0])
    for alias in named:
        alias_for(queue, alias)  # refuses one that is not there
    return homes


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a queue in force. ``source``: operator, settings, processor, defaults, or built in."""

    name: str
    value: object
    source: str
    changed: bool  # by an operator, or by the program that made the queue at runtime
    changeable: bool  # by an operator


def settings_in_force(queue: str, values: Mapping[str, object]) -> list[Setting]:
    """Return every setting of a queue with ``values``, its row's overrides, laid over; invalid ones are not applied."""
    base = conf.default_settings(queue)
    try:
        found = conf.overlay(base, values)
    except ImproperlyConfigured:
        found = base
    settings, declared = conf.settings(), conf.declarations()
    layers: dict[str, Mapping[str, object]] = {"operator": values, "settings": settings.queues.get(queue, {})}
    layers |= {"processor": declared.get(queue, {}), "defaults": settings.defaults}
    said = {name: source for source, given in reversed(layers.items()) for name in given}  # the first one stays
    return [
        Setting(name, getattr(found, name), said.get(name, "built in"), name in values, name not in FIXED_SETTINGS)
        for name in QUEUE_KEYS
    ]
