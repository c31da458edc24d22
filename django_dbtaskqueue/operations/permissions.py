"""Permissions: every page, command and API call asks here before it acts.

Each verb has its own permission, and none implies another. ``DBTASKQUEUE["CAN_OPERATE"]`` narrows it per queue.
``DBTASKQUEUE["CAN_VIEW"]`` hides queues: no list, count, chart, answer or verb has what a user may not view.
"""

import os
import pwd
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

from django.core.exceptions import PermissionDenied
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils.translation import gettext as _, gettext_lazy, ngettext_lazy

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.columns import LONG
from django_dbtaskqueue.core.exceptions import OperationRefused, SearchError, UnknownQueue
from django_dbtaskqueue.core.masking import is_masked
from django_dbtaskqueue.db.session import aliases_of, model_for
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.flow.selection import Rows
from django_dbtaskqueue.models import AuditEntry, Batch, BulkOperation, Poller, Queue, SavedSearch
from django_dbtaskqueue.models.control import queue_names_in
from django_dbtaskqueue.operations.bounded_reads import queue_names
from django_dbtaskqueue.operations.search import Search, parse
from django_dbtaskqueue.operations.search.values import Text as Text

APP = "dbtaskqueue"
REASON_MAX_LENGTH = 500  # characters
MAX_ROWS_JUDGED_ONE_BY_ONE = 2000  # pollers, saved searches, bulk operations
LABELS: dict[str, Text] = {}  # of all verbs, by name
V = TypeVar("V", bound="Verb")


class User(Protocol):
    """What is asked of the site's user model."""

    @property
    def pk(self) -> object: ...
    def get_username(self) -> str: ...
    def has_perm(self, perm: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing an operator can do. Texts are translated when they are shown."""

    name: str
    label: Text
    effect: Text  # what happens, in words; empty where no page asks
    done: Text  # "%(number)s tasks reprocessed"; empty where no page says so
    permission: str  # codename of the permission it needs
    needs_reason: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        LABELS[self.name] = self.label


def label_of(verb: str) -> str:
    """Return the label of a verb by its name; of one that this release does not know, its name."""
    return str(LABELS.get(verb, verb))


def by_name(*verbs: V) -> Mapping[str, V]:
    """Return verbs by their names."""
    return {verb.name: verb for verb in verbs}


VIEW_PAYLOAD = Verb("view_payload", gettext_lazy("See payloads"), "", "", "view_payload")
PAUSE = Verb(
    "pause", gettext_lazy("Pause"),
    gettext_lazy("From now on no poller takes a task of the queue. Running tasks go on, and tasks can still be "
                 "enqueued."),
    ngettext_lazy("%(number)s queue paused", "%(number)s queues paused", "number"), "pause_queue",
)  # fmt: skip
RESUME = Verb(
    "resume", gettext_lazy("Resume"), gettext_lazy("Pollers take tasks of the queue again, at once."),
    ngettext_lazy("%(number)s queue resumed", "%(number)s queues resumed", "number"), "pause_queue",
)  # fmt: skip
CHANGE_SETTINGS = Verb(
    "change_settings", gettext_lazy("Change settings"),
    gettext_lazy("Every poller applies the new settings of the queue within a heartbeat."), "", "change_queue_settings",
)  # fmt: skip
CONTROL_POLLERS = Verb(
    "control_pollers", gettext_lazy("Control pollers"), "",
    ngettext_lazy("Command sent to %(number)s poller", "Command sent to %(number)s pollers", "number"),
    "control_poller",
)  # fmt: skip
ENQUEUE_COPY = Verb(
    "enqueue_again", gettext_lazy("Enqueue again as new"),
    gettext_lazy("A new task is enqueued with the same queue, payload, priority, group, tag, lease, time to live and "
                 "budget of attempts, and without a reference. The old task stays as it is. The processor runs again, "
                 "with all its effects."), "", "add_task",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scope:
    """What a token leaves of its user's permissions."""

    operate: bool = True  # False: it reads only
    queues: tuple[str, ...] = ()  # the only queues it sees; empty: those of its user


@dataclass(frozen=True)
class Actor:
    """The user who acts, and where the action comes from. Without a user it is the command line: it may do all."""

    user: User | None = None
    source: str = "command"
    scope: Scope = Scope()

    @cached_property
    def name(self) -> str:
        return str(self.user.get_username()) if self.user is not None else _system_user()

    @cached_property
    def columns(self) -> dict[str, str]:
        """What a record of an action says of who did it."""
        key = "" if self.user is None else str(self.user.pk)
        return {"actor": self.name[:200], "actor_id": key, "source": self.source}

    @property
    def key(self) -> str:
        return self.columns["actor_id"]

    def may(self, verb: Verb, queue: str | None = None) -> bool:
        """Whether the user has the verb's own permission; on a queue, whether token and rules allow it there, too."""
        if self.user is None:
            return True
        if (not self.scope.operate and verb != VIEW_PAYLOAD) or not self.user.has_perm(f"{APP}.{verb.permission}"):
            return False
        return queue is None or (self.sees(queue) and _allows("CAN_OPERATE", self.user, verb.name, queue))

    def may_bring(self, queue: str, target: str) -> bool:
        """Whether payloads of a queue may get to another: not to where the user may see them, if they may not here."""
        return self.may(VIEW_PAYLOAD, queue) or not self.may(VIEW_PAYLOAD, target)

    def sees(self, queue: str) -> bool:
        """Whether no token and no rule hides a queue. The permissions of the models are asked for besides."""
        in_scope = not self.scope.queues or queue in self.scope.queues
        return self.user is None or (in_scope and _allows("CAN_VIEW", self.user, queue))

    @cached_property
    def sees_all(self) -> bool:
        return self.user is None or (not self.scope.queues and conf.settings().can_view is None)

    @cached_property
    def visible_queues(self) -> list[str] | None:
        """The queues that the actor may view; None: all of them, without a question to the database."""
        return None if self.sees_all else list(filter(self.sees, self.scope.queues or all_queues()))


def check(verb: Verb, reason: str, actor: Actor, queue: str | None = None) -> None:
    """Raise ``PermissionDenied`` or ``OperationRefused`` unless the actor may begin, with this reason."""
    check_may(verb, actor, queue)
    if verb.needs_reason and not reason.strip():
        words = _("%(verb)s needs a reason, because it cannot be undone. The reason is kept in the audit.")
        raise OperationRefused(words % {"verb": verb.name})
    if len(reason) > REASON_MAX_LENGTH:
        words = _("A reason has at most %(most)s characters, not %(number)s.")
        raise OperationRefused(words % {"most": REASON_MAX_LENGTH, "number": len(reason)})


def check_may(verb: Verb, actor: Actor, queue: str | None = None) -> None:
    """Raise ``PermissionDenied`` unless the actor may use the verb, on this queue or on any."""
    if not actor.may(verb, queue):
        words = _("%(who)s may not use %(verb)s on queue %(queue)s.") if queue else _("%(who)s may not use %(verb)s.")
        raise PermissionDenied(words % {"who": actor.name, "verb": verb.name, "queue": queue})


def check_search(search: Search, actor: Actor) -> None:
    """Raise ``PermissionDenied`` unless the actor may see what the search reveals of payloads."""
    if fault := search_fault(actor, search):
        raise PermissionDenied(fault)


def all_queues() -> list[str]:
    """Return every queue that is known, has a ``Queue`` row, or has tasks."""
    known = known_queues()
    places = {(alias, model_for(name)) for name in ("", *known) for alias in aliases_of(name)}
    return sorted(known.union(*map(queue_names, places)))


def masked_fault(search: Search) -> str:
    """Return why nobody may ask for this search, also on the command line; empty: it names no masked key."""
    hidden = ", ".join([one.name for one in search.terms if is_masked(one.name)])
    text = _("%(keys)s cannot be searched: the values are masked, and matches would reveal them.")
    return text % {"keys": hidden} if hidden else ""


def search_fault(who: User | Actor | None, search: Search) -> str:
    """Return why a user may not ask for this search, or nothing: its matches can reveal what payloads contain.

    Such a search needs ``view_payload`` in each queue that it names; when it names none, in all that are known. The
    command line (None) may search for everything. ``select`` refuses what ``masked_fault`` names, whoever asks.
    """
    actor = who if isinstance(who, Actor) else Actor(who)
    if actor.user is None or not any(one.name.partition(".")[0] in ("error", *LONG) for one in search.terms):
        return ""
    if fault := masked_fault(search):
        return fault
    if not actor.may(VIEW_PAYLOAD):
        return _("Searching in payloads, results and errors needs the permission to see them.")
    # What it may not view, a search does not look in.
    ruled = all_queues() if conf.settings().can_operate is not None else ()
    queues = search.queues() or filter(actor.sees, ruled)
    if all(actor.may(VIEW_PAYLOAD, queue) for queue in queues):
        return ""
    return _(
        "You may not see the payloads of all queues this search looks in. Name a queue that you may see: queue:NAME."
    )


def _allows(key: str, *given: object) -> bool:
    """Ask a rule of the project; without a rule all is allowed."""
    if (path := getattr(conf.settings(), key.lower())) is None:
        return True
    return bool(conf.imported(f'DBTASKQUEUE["{key}"]={path!r}', path)(*given))


@cache
def _system_user() -> str:
    """Return the name of the process's account. ``LOGNAME`` and ``USER`` could be anybody's."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return f"uid {os.geteuid()}"


def narrow(rows: Rows, actor: Actor) -> Rows:
    """Return those of ``rows`` that the actor may view."""
    return rows if actor.sees_all else rows.filter(_condition(rows, actor.visible_queues or [], actor))


def check_queue(queue: str, actor: Actor) -> None:
    """Raise ``UnknownQueue`` for a queue that is hidden, or not there: only visible ones are named."""
    names = actor.visible_queues
    if names is not None and queue not in names:
        raise UnknownQueue(queue, names)


def check_there(queues: Iterable[str], actor: Actor) -> None:
    """Raise ``UnknownQueue`` for a queue that is not there, or hidden. Call it after the check of permissions."""
    asked = [queue for queue in queues if not (conf.is_known(queue) and actor.sees(queue))]
    names = [*filter(actor.sees, all_queues())] if asked else []
    for queue in asked:
        if queue not in names:
            raise UnknownQueue(queue, names)


def queues_in(text: str) -> tuple[str, ...]:
    """Return the queues that a stored search names; none of one that can no longer be read."""
    try:
        return parse(text).queues()
    except SearchError:
        return ()


def sole(queues: Collection[str]) -> str:
    """Return the one queue that a record is about, or nothing."""
    return next(iter(queues)) if len(queues) == 1 else ""


def sees_search(text: str, actor: Actor) -> bool:
    """Whether a search that somebody wrote names queues, and the actor may view each of them."""
    queues = queues_in(text)
    return actor.sees_all or (bool(queues) and all(map(actor.sees, queues)))


def sees_record(record: BulkOperation | AuditEntry, actor: Actor) -> bool:
    """Whether the actor may view a record: it is about queues that they may view, or they did it."""
    if isinstance(record, BulkOperation):
        return sees_search(record.query, actor) or owns(record, actor)
    return actor.sees_all or (bool(record.queue) and actor.sees(record.queue)) or owns(record, actor)


def _condition(rows: QuerySet[Any], names: list[str], actor: Actor) -> Q:
    model, seen = rows.model, set(names)
    own = Q(pk__in=[]) if actor.scope.queues else Q(actor_id=actor.key)  # a token of some queues is not its user
    judged: Mapping[type, tuple[tuple[str, ...], Callable[..., object]]] = {
        Poller: (("queues",), lambda queues: seen & {*queue_names_in(queues)}),
        Batch: (("queues",), lambda queues: queues and {*queues} <= seen),  # its counts are about all of its queues
        SavedSearch: (("owner", "query"), lambda owner, text: owner == actor.name or sees_search(text, actor)),
    }
    if model in judged:
        columns, is_seen = judged[model]
        found = rows.values_list("pk", *columns)[:MAX_ROWS_JUDGED_ONE_BY_ONE]
        return Q(pk__in=[pk for pk, *values in found if is_seen(*values)])
    if model is BulkOperation:  # the audit names the queue of one that is about one queue
        entries = AuditEntry.objects.using(rows.db).filter(operation=OuterRef("pk"))
        several = rows.filter(Exists(entries.filter(queue=""))).order_by("-pk").values_list("pk", "query")
        visible = [pk for pk, text in several[:MAX_ROWS_JUDGED_ONE_BY_ONE] if sees_search(text, actor)]
        return Q(Exists(entries.filter(queue__in=names))) | Q(pk__in=visible) | own
    if issubclass(model, Queue):
        return Q(name__in=names)
    if model is AuditEntry:
        return Q(queue__in=names) | own
    if any(field.name == "queue" for field in model._meta.concrete_fields):
        return Q(queue__in=names)
    return Q(pk__in=[])  # about all queues together, such as a report of the pipeline


def owns(record: BulkOperation | AuditEntry, actor: Actor) -> bool:
    """Whether the actor did it. A token of some queues is not its user."""
    return bool(record.actor_id) and record.actor_id == actor.key and not actor.scope.queues


def check_cancel(operation: BulkOperation, verb: Verb, actor: Actor) -> None:
    """Raise ``PermissionDenied`` unless the actor may cancel an operation with this verb, or put its tasks back."""
    queues = queues_in(operation.query)
    check(verb, "cancelled", actor)
    if actor.user is None or (not queues and owns(operation, actor)):
        return
    for queue in queues or all_queues():
        check_may(verb, actor, queue)
