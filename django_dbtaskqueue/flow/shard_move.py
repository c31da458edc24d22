"""Shard move: waiting tasks of a queue go from one database to another, in batches that survive a kill.

Two databases have no common transaction, so a batch takes three, under a token of its own:

1. Source: mark the tasks. A marked task is parked, so no poller takes it and no verb changes it.
2. Target, while the source's rows are locked: insert the tasks, and write in the ledger that they came.
3. Source: delete the tasks, or take the mark off those that the target did not take.

After a kill the mark names target and token, and the ledger says whether the target has the tasks. The next run
finishes each such batch. A task needs no reference for this: its id in the source is its key in the ledger.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from uuid import uuid4

from django.db import IntegrityError, connections, transaction
from django.db.models import F, Field, JSONField, Q, QuerySet, TextField
from django.db.models.expressions import RawSQL
from django.db.models.functions import Cast, Now
from django.utils.translation import gettext as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.sql.checkout import NO_HANDLER
from django_dbtaskqueue.core.sql.dialects import GROUP, MOVING
from django_dbtaskqueue.core.states import CREATED, PROCESSING
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.flow import groups
from django_dbtaskqueue.flow.placement import route
from django_dbtaskqueue.flow.selection import Tasks, with_row_locks
from django_dbtaskqueue.models import AbstractTask, Attempt, Dependency, Hold, Schedule, Step, UsedReference
from django_dbtaskqueue.models.tasks import SENT

TASKS_PER_SHARD_BATCH = 500
INSERT_ROUNDS = 3  # a producer may enqueue one of the references between the look and the insert
MOVE_LEDGER = "shards move"  # as a queue's name, which none can have: of the ledger's rows that say what has come
ENSURE_DURABLE = (
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)


class Mark(NamedTuple):
    """What ``parked_by`` of a marked task says."""

    target: str
    token: str

    def __str__(self) -> str:
        return f"{MOVING}{self.target} ({self.token})"

    @classmethod
    def read(cls, text: str) -> Mark:
        target, _space, token = text.removeprefix(MOVING).rpartition(" ")
        return cls(target, token.strip("()"))


@dataclass(slots=True)
class Moved:
    """What became of the tasks of a queue."""

    moved: Counter[tuple[str, str]] = field(default_factory=Counter)  # by source and target
    refused: dict[str, list[str]] = field(default_factory=dict)  # why, and which: "alias/id"

    def refuse(self, alias: str, reasons: Iterable[tuple[int, str]]) -> None:
        """Note tasks that stay where they are."""
        for pk, reason in reasons:
            self.refused.setdefault(reason, []).append(f"{alias}/{pk}")


class Candidate(NamedTuple):
    """A waiting task, and where it belongs; ``reason`` says why it cannot go there."""

    pk: int
    group: str | None
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class ShardMove:
    """The move of one queue's waiting tasks. ``target`` None: each task goes where an enqueue would put it now.

    ``note`` writes the audit: called with source, target, one of both, and how many tasks this one's transaction moves.
    """

    queue: str
    target: str | None = None
    behind: bool = False  # a group goes also where it has tasks already: behind them
    at_step: Callable[[str], object] = str  # called between the transactions, with what was done
    note: Callable[[str, str, str, int], object] = lambda *_: None
    report: Moved = field(default_factory=Moved)

    @property
    def model(self) -> type[AbstractTask]:
        return model_for(self.queue)

    def tasks(self, alias: str) -> Tasks:
        """Return the queue's tasks on a database."""
        return self.model._base_manager.using(alias).filter(queue=self.queue)

    def run(self, homes: Sequence[str], sources: Sequence[str], limit: int | None) -> None:
        """Finish the batches that killed runs left, then move the tasks of ``sources``; ``homes`` are the queue's."""
        for source in dict.fromkeys([*sources, *homes]):
            for text in _texts(self.tasks(source).filter(parked_by__startswith=MOVING), "parked_by"):
                self.finish(source, Mark.read(text))
            for target in homes:
                self.close_finished(source, target)
        for source in sources:
            self._move_from(source, limit)

    def _move_from(self, source: str, limit: int | None) -> None:
        last, done = 0, set[str]()
        waiting = self.tasks(source).filter(status=CREATED).exclude(parked_by__startswith=MOVING)
        while limit is None or sum(self.report.moved.values()) < limit:
            left = TASKS_PER_SHARD_BATCH if limit is None else limit - sum(self.report.moved.values())
            found = self.candidates(source, waiting.filter(pk__gt=last), min(left, TASKS_PER_SHARD_BATCH))
            if not found:
                return
            last = found[-1].pk
            wanted = [one for one in found if (one.target != source or one.reason) and one.group not in done]
            done |= {one.group for one in wanted if one.group is not None}
            if not wanted:
                continue
            marks = self.mark(source, wanted)
            self.at_step("marked")
            for mark in marks:
                self.finish(source, mark)

    # -- where a task belongs ------------------------------------------------------------------------------------------

    def candidates(self, alias: str, tasks: Tasks, limit: int | None = None) -> list[Candidate]:
        """Return the first of some waiting tasks with their targets, in the order of their ids."""
        rows = tasks.order_by("pk").values_list("pk", "group_key", "reference", "payload", "payload_type")[:limit]
        return [Candidate(pk, group, *self._placed(alias, *named)) for pk, group, *named in rows]

    def _placed(self, alias: str, reference: str | None, payload: object, kind: str | None) -> tuple[str, str]:
        """Return where a task belongs. Without a reference or a router it may stay on any of the queue's shards."""
        settings, homes = conf.default_settings(self.queue), aliases_of(self.queue)
        if kind is not None and isinstance(payload, dict) and payload.keys() >= {"args", "kwargs"}:
            stays = alias in ((self.target,) if self.target else homes)
            return alias, "" if stays else _("it is a Django task, whose id names its database")
        if self.target is not None or not settings.shards:
            return self.target or homes[0], ""
        if settings.router is None and reference is None and alias in homes:
            return alias, ""
        try:
            return route(settings, reference, payload), ""
        except Exception as error:  # the project's router may raise anything for one task
            return alias, _("the router failed: %(error)s") % {"error": f"{type(error).__name__}: {error}"[:200]}

    # -- 1: mark -------------------------------------------------------------------------------------------------------

    def mark(self, alias: str, found: Sequence[Candidate]) -> list[Mark]:
        """Mark those of the candidates that can move, each group as a whole; return the marks, one for each target."""
        session, keys = Session.on(alias, self.model), {one.group for one in found if one.group is not None}
        marks: dict[str, Mark] = {}
        with transaction.atomic(using=alias):
            _begin(session)
            groups.lock(session, self.queue, keys)
            whole = self.tasks(alias).filter(status=CREATED, group_key__in=keys)
            members = [*(one for one in found if one.group is None), *self.candidates(alias, whole)]
            waiting = self.tasks(alias).filter(status=CREATED, pk__in=[one.pk for one in members])
            read = with_row_locks(waiting).only("pk", "group_key", "parked_by", "watched", "batch")
            reasons = self._reasons(alias, {row.pk: row for row in read}, members)
            self._keep_groups_whole(alias, members, reasons)
            self.report.refuse(alias, reasons.items())
            by_target: dict[str, list[int]] = defaultdict(list)
            for one in members:
                if one.pk not in reasons and one.target != alias:
                    by_target[one.target].append(one.pk)
            for target, ids in by_target.items():
                marks[target] = Mark(target, uuid4().hex[:16])
                self.tasks(alias).filter(pk__in=ids).update(
                    parked_by=str(marks[target]), ready_time=None, last_update_time=Now()
                )
        return list(marks.values())

    def _reasons(self, alias: str, rows: dict[int, AbstractTask], members: Sequence[Candidate]) -> dict[int, str]:
        """Return why tasks cannot move; of several reasons the last one counts."""
        found = {pk: words for pk, row in rows.items() if (words := _reason_of(row))}
        found |= {one.pk: one.reason for one in members if one.reason}
        location = self.model._meta.label_lower
        steps = Step.objects.filter(location=location, task_id__in=[*rows])
        ticks = Schedule.objects.filter(queue=self.queue, overlap="skip", last_task__in=[*rows])
        waits = _("it waits, or waited, for other tasks of this database")
        for related, words in (
            (Dependency.objects.filter(child_location=location, child_id__in=[*rows]).values_list("child_id"), waits),
            (Hold.objects.filter(location=location, task_id__in=[*rows]).values_list("task_id"), waits),
            (steps.exclude(kind=SENT).values_list("task_id"), _("it has steps")),
            (steps.filter(kind=SENT).values_list("task_id"), _("it has signals")),
            (ticks.values_list("last_task"), _("its schedule, which does not overlap, waits for its end")),
        ):
            found |= {pk: words for (pk,) in related.using(alias) if pk}
        gone = _("it has started, or another transaction is changing it")
        return found | dict.fromkeys((one.pk for one in members if one.pk not in rows), gone)

    def _keep_groups_whole(self, alias: str, members: Sequence[Candidate], reasons: dict[int, str]) -> None:
        """Let all tasks of a group stay if one must stay, or if their order would be lost."""
        by_group: dict[str, list[Candidate]] = defaultdict(list)
        for one in members:
            if one.group is not None:
                by_group[one.group].append(one)
        running = self._groups_with(alias, by_group, PROCESSING)
        targets = {one.target for one in members} - {alias}
        there = {target: self._groups_with(target, by_group, CREATED, PROCESSING) for target in targets}
        for group, tasks in by_group.items():
            wanted = {one.target for one in tasks}
            if wanted == {alias}:
                continue
            words = ""
            if group in running:
                words = _("a task of its group runs; try again when it has ended")
            elif len(wanted) > 1:
                words = _("the tasks of its group belong to different databases; name one with --to")
            elif group in there[tasks[0].target] and not self.behind:
                words = _("its group has tasks in %(target)s already, which would run before it; --behind allows that")
                words %= {"target": tasks[0].target}
            elif any(one.pk in reasons for one in tasks):
                words = _("another task of its group cannot move")
            if words:
                for one in tasks:
                    reasons.setdefault(one.pk, words)

    def _groups_with(self, alias: str, keys: Iterable[str], *statuses: str) -> set[str]:
        return set(_texts(self.tasks(alias).filter(group_key__in=list(keys), status__in=statuses), "group_key"))

    # -- 2 and 3: insert, delete ---------------------------------------------------------------------------------------

    def finish(self, alias: str, mark: Mark) -> None:
        """Move the tasks of a mark, wherever a run was killed."""
        if mark.target not in connections.settings:
            words = _("A move to %(alias)s is not finished, and DATABASES has no such alias.")
            raise OperationRefused(words % {"alias": mark.target})
        session, marked = Session.on(alias, self.model), self.tasks(alias).filter(parked_by=str(mark))
        keys = set(_texts(marked, "group_key"))
        with transaction.atomic(using=alias):
            _begin(session)
            groups.lock(session, self.queue, keys)
            names = [one.name for one in _copied_fields(self.model) if isinstance(one, JSONField)]
            texts = {f"{name}_text": Cast(name, TextField()) for name in names}
            rows = list(with_row_locks(marked.defer(*names).annotate(**texts), wait=True))
            came = self._insert(alias, mark, rows)
            self.at_step("inserted")
            left = [row for row in rows if row.pk not in came]
            self._delete(alias, [row for row in rows if row.pk in came])
            if left:
                self._unmark(session, [row.pk for row in left], keys)
                words = _("%(target)s has a task with its reference, or refused it") % {"target": mark.target}
                self.report.refuse(alias, ((row.pk, words) for row in left))
            self.note(alias, mark.target, alias, len(came))
        self.at_step("deleted")
        _ledger(mark.target, alias, mark.token)._raw_delete(mark.target)
        self.report.moved[alias, mark.target] += len(came)

    def close_finished(self, alias: str, target: str) -> None:
        """Delete from the target's ledger the batches whose tasks have left the source: their run was killed after."""
        keys = _ledger(target, alias).values_list("reference", flat=True)
        for token in {key.removeprefix(f"{alias}:").partition(":")[0] for key in keys}:
            if not self.model._base_manager.using(alias).filter(parked_by=str(Mark(target, token))).exists():
                _ledger(target, alias, token)._raw_delete(target)

    def _insert(self, alias: str, mark: Mark, rows: list[AbstractTask]) -> set[int]:
        """Insert rows into the target, or find that a run before has; return the ids that are there."""
        for _round in range(INSERT_ROUNDS):
            with suppress(IntegrityError), transaction.atomic(using=mark.target):
                return self._insert_free(alias, mark, rows)
        return _came(alias, mark)

    def _insert_free(self, alias: str, mark: Mark, rows: list[AbstractTask]) -> set[int]:
        session = Session.on(mark.target, self.model)
        _begin(session)
        groups.lock(session, MOVE_LEDGER, [mark.token])  # the commit of a run that was killed may go on for long
        if known := _came(alias, mark):
            return known
        keys = {row.group_key for row in rows if row.group_key is not None}
        groups.lock(session, self.queue, keys)
        taken = self._taken(mark.target, [row.reference for row in rows if row.reference is not None])
        held = {row.group_key for row in rows if row.reference in taken} - {None}
        free = [row for row in rows if row.reference not in taken and row.group_key not in held]
        new = self.model._base_manager.using(mark.target).bulk_create([self._copy(session, row) for row in free])
        self._copy_beside(alias, mark.target, free, {row.pk: one.pk for row, one in zip(free, new, strict=True)})
        came = [UsedReference(queue=MOVE_LEDGER, reference=f"{alias}:{mark.token}:{row.pk}") for row in free]
        UsedReference.objects.using(mark.target).bulk_create(came)
        groups.regroup(session, self.queue, keys)
        self.note(alias, mark.target, mark.target, len(free))
        notify.wake_after_commit(session.connection, self.queue)
        return {row.pk for row in free}

    def _taken(self, target: str, references: list[str]) -> set[str]:
        """Return the references that the target has: of tasks, or in the ledger of those that stay taken."""
        ledger = UsedReference.objects.using(target).filter(queue=self.queue, reference__in=references)
        live = ledger.filter(Q(expire_time__isnull=True) | Q(expire_time__gt=Now()))
        tasks = self.tasks(target).filter(reference__in=references)
        return {*_texts(tasks, "reference"), *live.values_list("reference", flat=True)}

    def _copy(self, session: Session, row: AbstractTask) -> AbstractTask:
        """Return a new row with the same values. JSON stays text, so that no number changes."""
        cast = "::jsonb" if session.postgresql else ""
        values: dict[str, object] = {}
        for one in _copied_fields(self.model):
            if not isinstance(one, JSONField):
                values[one.attname] = getattr(row, one.attname)
            elif (text := getattr(row, f"{one.name}_text")) is not None:
                values[one.attname] = RawSQL(f"%s{cast}", [text])  # noqa: S611 -- one of two constants
        waits = row.group_key is not None
        values |= {"parked_by": GROUP if waits else None, "ready_time": None if waits else row.next_process_time}
        return self.model(**values)

    def _beside(self, alias: str, rows: list[AbstractTask]) -> tuple[QuerySet[Attempt], QuerySet[UsedReference]]:
        """Return what other tables hold of tasks: their failed attempts, and their references that stay taken."""
        ids, references = [row.pk for row in rows], [row.reference for row in rows if row.reference is not None]
        attempts = Attempt.objects.using(alias).filter(location=self.model._meta.label_lower, task_id__in=ids)
        return attempts, UsedReference.objects.using(alias).filter(queue=self.queue, reference__in=references)

    def _copy_beside(self, alias: str, target: str, rows: list[AbstractTask], new: dict[int, int]) -> None:
        failed, taken = self._beside(alias, rows)
        attempts, used = list(failed), list(taken)
        there = UsedReference.objects.using(target)
        there.filter(queue=self.queue, reference__in=[one.reference for one in used])._raw_delete(target)  # is over
        for one in attempts:
            one.pk, one.task_id = None, new[one.task_id]
        for row in used:
            row.pk = None
        Attempt.objects.using(target).bulk_create(attempts)
        there.bulk_create(used)

    def _delete(self, alias: str, rows: list[AbstractTask]) -> None:
        for found in (*self._beside(alias, rows), self.tasks(alias).filter(pk__in=[row.pk for row in rows])):
            found._raw_delete(alias)

    def _unmark(self, session: Session, ids: list[int], keys: set[str]) -> None:
        rows = self.tasks(session.connection.alias).filter(pk__in=ids)
        rows.filter(group_key__isnull=True).update(parked_by=None, ready_time=F("next_process_time"))
        rows.filter(group_key__isnull=False).update(parked_by=GROUP)
        groups.regroup(session, self.queue, keys)
        notify.wake_after_commit(session.connection, self.queue)


def _begin(session: Session) -> None:
    """Let the commit wait for the disk, on which the other database relies; on SQLite, lock before the first read."""
    if session.postgresql:
        session.run(ENSURE_DURABLE, {})
    else:
        _ledger(session.connection.alias, "")._raw_delete(session.connection.alias)


def _reason_of(row: AbstractTask) -> str:
    """Return why a task cannot move by its own row; "" if it can."""
    if row.batch is not None:
        return _("it belongs to a batch, which is on one database")
    if row.watched is not None:
        return _("another task or a client waits for its end on this database")
    parked = row.parked_by or GROUP
    is_free = parked == GROUP or parked.startswith(NO_HANDLER)
    return "" if is_free else _("it is parked: %(reason)s") % {"reason": parked}


def _texts(tasks: Tasks, column: str) -> list[str]:
    """Return the values of a column but NULL, each once."""
    found = tasks.filter(**{f"{column}__isnull": False}).order_by().values_list(column, flat=True).distinct()
    return cast("list[str]", list(found))


def _copied_fields(model: type[AbstractTask]) -> list[Field[object, object]]:
    fields = cast("list[Field[object, object]]", model._meta.concrete_fields)
    return [one for one in fields if not one.primary_key and not getattr(one, "generated", False)]


def _ledger(target: str, *key: str) -> QuerySet[UsedReference]:
    return UsedReference.objects.using(target).filter(queue=MOVE_LEDGER, reference__startswith=":".join([*key, ""]))


def _came(alias: str, mark: Mark) -> set[int]:
    """Return the ids, in the source, of the tasks of a mark that the target has."""
    keys = _ledger(mark.target, alias, mark.token).values_list("reference", flat=True)
    return {int(key.rpartition(":")[2]) for key in keys}
