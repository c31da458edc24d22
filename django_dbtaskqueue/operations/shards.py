"""Shards: how the tasks of a queue lie on its databases, and the move of its waiting tasks between them.

Permission is checked first. Each batch of a move is recorded in the audits of both databases, in its transactions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TypedDict

from django.db import connections
from django.db.models import Count, F
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.sql.dialects import MOVING
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import aliases_of
from django_dbtaskqueue.flow.shard_move import TASKS_PER_SHARD_BATCH, Mark, Moved, ShardMove
from django_dbtaskqueue.models import AuditEntry
from django_dbtaskqueue.operations.actions import record
from django_dbtaskqueue.operations.permissions import Actor, Verb, check, check_queue

MOVE_SHARD = Verb(
    name="move_shard",
    label=gettext_lazy("Move to another database"),
    effect=gettext_lazy(
        "The waiting tasks of the queue go to the database where an enqueue would put them now, or to one that is "
        "named. Running and finished tasks stay."
    ),
    done=ngettext_lazy("%(number)s task moved", "%(number)s tasks moved", "number"),
    permission="move_task",
)


class ShardDocument(TypedDict):
    """The tasks of a queue on one database, as data."""

    database: str
    is_shard: bool  # pollers of the queue look there
    statuses: dict[str, int]
    moving: int  # marked by a move: one runs, or was killed and is finished by the next


def shard_documents(queue: str, actor: Actor, also: Iterable[str] = ()) -> list[ShardDocument]:
    """Return how many tasks a queue has on each of its databases, and on others that are named. It counts them all."""
    homes = _checked(queue, actor, also)
    found: list[ShardDocument] = []
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

    A batch that a killed run left is finished first. ``limit``: begin no batch after so many tasks. Raises
    ``OperationRefused`` for a database that cannot be used.
    """
    homes = _checked(move.queue, actor, [*sources, *([move.target] if move.target else [])])
    check(MOVE_SHARD, reason, actor, move.queue)
    if move.target is not None and move.target not in homes:
        words = _("No poller of %(queue)s looks at database %(alias)s. Its databases are %(homes)s.")
        raise OperationRefused(words % {"queue": move.queue, "alias": move.target, "homes": ", ".join(homes)})
    places = list(dict.fromkeys([*(sources or homes), *homes]))
    _refuse_one_database(places)
    for alias in places:
        connections[alias].ensure_connection()  # one that is down must not be found out after tasks are marked
    run = _Run(move, actor, reason, Moved())
    for source in places:
        for mark in move.unfinished(source):
            run.finish(source, mark)
        for target in homes:
            move.close_finished(source, target)
    for source in sources or homes:
        run.moves_from(source, limit)
    return run.report


class _Run:
    """One run of a move, with its audit entries by (source, target)."""

    def __init__(self, move: ShardMove, actor: Actor, reason: str, report: Moved) -> None:
        self.move, self.actor, self.reason, self.report = move, actor, reason, report
        self._entries: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)

    def moves_from(self, source: str, limit: int | None) -> None:
        """Move the tasks of one database, in the order of their ids."""
        move, last, done = self.move, 0, set[str]()
        waiting = move.tasks(source).filter(status=Status.CREATED).exclude(parked_by__startswith=MOVING)
        while limit is None or sum(self.report.moved.values()) < limit:
            left = TASKS_PER_SHARD_BATCH if limit is None else limit - sum(self.report.moved.values())
            found = move.candidates(source, waiting.filter(pk__gt=last), min(left, TASKS_PER_SHARD_BATCH))
            if not found:
                return
            last = found[-1].pk
            wanted = [one for one in found if (one.target != source or one.reason) and one.group not in done]
            done |= {one.group for one in wanted if one.group is not None}
            if not wanted:
                continue
            marks = move.mark(source, wanted, self.report)
            move.at_step("marked")
            for mark in marks:
                self.finish(source, mark)

    def finish(self, source: str, mark: Mark) -> None:
        """Finish a batch, with its audit entries."""
        entries = self._entries[source, mark.target]
        if mark.target not in connections.settings:
            words = _("A move to %(alias)s is not finished, and DATABASES has no such alias.")
            raise OperationRefused(words % {"alias": mark.target})
        for alias in (source, mark.target):
            if alias not in entries:
                details = {"from": source, "to": mark.target}
                given = {"queue": self.move.queue, "reason": self.reason, "details": details}
                entries[alias] = record(alias, self.actor, MOVE_SHARD, **given).pk

        def note(alias: str, number: int) -> None:
            AuditEntry.objects.using(alias).filter(pk=entries[alias]).update(changed=F("changed") + number)

        self.move.finish(source, mark, self.report, note)


def _checked(queue: str, actor: Actor, named: Iterable[str]) -> tuple[str, ...]:
    """Return the databases of a queue; raise for an unknown queue or database."""
    check_queue(queue, actor)
    homes = aliases_of(queue)
    queue_settings(queue, homes[0])
    for alias in named:
        if alias not in connections.settings:
            words = _("DATABASES has no alias %(alias)s. It has %(known)s.")
            raise OperationRefused(words % {"alias": repr(alias), "known": ", ".join(connections.settings)})
    return homes


def _refuse_one_database(aliases: Sequence[str]) -> None:
    def place(alias: str) -> tuple[str, ...]:
        return tuple(str(connections[alias].settings_dict[name]) for name in ("ENGINE", "HOST", "PORT", "NAME"))

    for one, other in combinations(aliases, 2):
        if place(one) == place(other):
            raise OperationRefused(_("%(one)s and %(other)s are the same database.") % {"one": one, "other": other})
