"""Schedules: one task for each time of a cron text.

A tick is one time of a schedule. Each poller may enqueue its task, in one transaction: it locks the schedule's row,
compares the next tick with the database's clock, enqueues, and writes the tick after it. The reference of the task is
made of name and tick, so that the unique key refuses a second one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import partial

from django.db import connections, transaction
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Now
from django.utils.timezone import make_aware

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.cron import check_timing, ticks
from django_dbtaskqueue.core import codecs, logger
from django_dbtaskqueue.core.columns import TaskOptions
from django_dbtaskqueue.core.durations import Pauses
from django_dbtaskqueue.core.exceptions import TaskQueueError, UnknownQueue
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.flow.enqueue import checked_text, enqueue, row_of
from django_dbtaskqueue.flow.selection import lock_first
from django_dbtaskqueue.models import AbstractTask, Schedule
from django_dbtaskqueue.models.control import CODE, MISSED_POLICIES, OVERLAP_POLICIES, PERSON

MISSED_AFTER = timedelta(seconds=60)  # a tick that is later than this is missed: the schedule's policy decides
MAX_TICKS_AT_ONCE = 100  # that one transaction enqueues tasks for; the newest of more
MAX_SCHEDULE_NAME = 150  # characters: with the tick it is a reference
MAX_SCHEDULES_PER_TURN = MAX_LISTED_SCHEDULES = 500
SCHEDULE_LOOK_S = 3.0  # at most, between two looks for schedules that a person changed
LOCKED_SCHEDULE_S = 0.5  # before the next look at a schedule whose row another transaction has
FAILED_SCHEDULE_S = 5.0, 300.0  # before a schedule whose task was refused is tried again: at first, and at most


def is_gone(row: Schedule, declared: Container[str]) -> bool:
    """Whether a schedule came from the code and the code, which declares these, no longer has it."""
    return row.source == CODE and row.name not in declared


def aware(value: datetime, alias: str) -> datetime:
    """Return a time as read from a schedule's row in UTC. Without USE_TZ it was read without a time zone."""
    if value.tzinfo is None:
        value = make_aware(value) if connections[alias].vendor == "postgresql" else value.replace(tzinfo=UTC)
    return value.astimezone(UTC)


def _stored(value: datetime | None, alias: str) -> datetime | None:
    return None if value is None else Session.on(alias).stored_time(value)


# -- what a schedule is ------------------------------------------------------------------------------------------------


class UnknownPayloadType(UnknownQueue):
    """This process has no processor for the payload type that a schedule names."""

    def __init__(self, name: str, queue: str, known: Collection[str]) -> None:
        self.queue = queue
        types = ", ".join(sorted(known)) or "none"
        TaskQueueError.__init__(
            self, f"payload_type={name!r}: this process has no processor of queue {queue!r} for it. Types: {types}."
        )


@dataclass(frozen=True, slots=True)
class Definition:
    """What a schedule enqueues and when, as code declares it or as a person writes it."""

    queue: str
    cron: str
    timezone: str
    payload: object = None  # plain JSON
    payload_type: str = ""
    priority: int | None = None
    missed: str = "one"
    overlap: str = "allow"

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Definition:
        """Return the definition with these fields, such as those of a row; others have their defaults."""
        return cls(**{name: values[name] for name in SCHEDULE_FIELDS if name in values})  # type: ignore[arg-type]

    def check(self, name: str) -> None:
        """Raise ``ValueError`` or a ``TaskQueueError``, in words, unless a row can hold it and its tasks."""
        if len(checked_text("name", name)) > MAX_SCHEDULE_NAME:
            raise ValueError(f"name={name!r} has over {MAX_SCHEDULE_NAME} characters.")
        check_timing(self.cron, self.timezone)
        for key, known in (("missed", MISSED_POLICIES), ("overlap", OVERLAP_POLICIES)):
            words = [word for word, _label in known]
            if getattr(self, key) not in words:
                raise ValueError(f"{key}={getattr(self, key)!r} must be one of {', '.join(map(repr, words))}.")
        row_of(self.queue, TaskOptions(payload=self.payload, priority=self.priority), conf.default_settings(self.queue))
        self.readable_payload()

    def readable_payload(self) -> object:
        """Return the payload as ``enqueue`` takes it: of its class, where a type is named."""
        if not self.payload_type:
            return self.payload
        known = codecs.expected.get(self.queue, {})
        if self.payload_type not in known:
            raise UnknownPayloadType(self.payload_type, self.queue, known)
        return codecs.decode(known[self.payload_type], self.payload)


SCHEDULE_FIELDS = tuple(field.name for field in fields(Definition))


def home_of(queue: str) -> str:
    """Return the database of a queue's schedules: that of its tasks, or its first shard."""
    return aliases_of(queue)[0]


def rows_on(alias: str) -> QuerySet[Schedule]:
    """Return the schedules of a database, each with the database's time as ``clock``."""
    return Schedule.objects.using(alias).annotate(clock=Now())  # type: ignore[no-redef]


def reschedule(row: Schedule, alias: str) -> None:
    """Set the next tick of a row to the first one from now on."""
    check_timing(row.cron, row.timezone)  # SQL may have written it
    row.next_time = _stored(next(ticks(row.cron, row.timezone, aware(row.clock, alias)), None), alias)


# -- what the code declares --------------------------------------------------------------------------------------------


def declare(alias: str, declared: Mapping[str, Definition]) -> None:
    """Write the schedules that the code declares to their rows. A field that a person changed stays."""
    rows = {row.name: row for row in rows_on(alias).filter(name__in=declared)}
    pauses = Pauses[str](*FAILED_SCHEDULE_S)
    for name, definition in declared.items():
        said = asdict(definition)
        with pauses.around(name, partial(_note, alias, name)), transaction.atomic(using=alias):
            if name not in rows:
                row = Schedule(name=name, source=CODE, code=said, **said)
                row.clock = Session.on(alias).now()
                reschedule(row, alias)
                Schedule.objects.using(alias).bulk_create([row], ignore_conflicts=True)
            elif rows[name].code != said or rows[name].source != CODE:
                found = lock_first(rows_on(alias).filter(name=name))
                if found is not None:
                    _follow(found, said, alias)


def _follow(row: Schedule, said: dict[str, object], alias: str) -> None:
    """Change the fields of a row that no person changed to what the code says."""
    before = Definition.of(vars(row))
    if row.source != CODE:  # a person made a schedule with this name: what differs is the person's
        row.edited = [name for name in SCHEDULE_FIELDS if getattr(row, name) != said[name]]
    for name in SCHEDULE_FIELDS:
        if name not in row.edited:
            setattr(row, name, said[name])
    row.source, row.code = CODE, said
    is_due = not row.paused and row.next_time is not None and row.next_time <= row.clock  # that tick is not lost
    if (row.cron, row.timezone) != (before.cron, before.timezone) and not is_due:
        reschedule(row, alias)
    row.save(using=alias)


# -- ticks -------------------------------------------------------------------------------------------------------------


def enqueue_due(alias: str, declared: Collection[str], pauses: Pauses[str] | None = None) -> tuple[float, list[str]]:
    """Enqueue the tasks of all due ticks; return the seconds until the next look, and the queues that got some.

    Schedules of the code are left to processes whose code declares them: without it they stop. One that raises, for
    whatever reason, says so in its note, and rests: its tick stays due.
    """
    ours = Schedule.objects.using(alias).filter(Q(source=PERSON) | Q(name__in=declared), paused=False)
    pauses = pauses or Pauses[str](*FAILED_SCHEDULE_S)
    ours = ours.exclude(name__in=pauses.resting())
    due = ExpressionWrapper(Q(next_time__lte=Now()), output_field=BooleanField())
    rows = ours.exclude(next_time=None).annotate(due=due, now=Now()).order_by("next_time")
    wait, woken = SCHEDULE_LOOK_S, list[str]()
    for name, queue, next_time, now, is_due in rows.values_list("name", "queue", "next_time", "now", "due")[
        :MAX_SCHEDULES_PER_TURN
    ]:
        if not is_due and next_time is not None:
            return min(wait, max(0.0, (next_time - now).total_seconds())), woken
        with pauses.around(name, partial(_note, alias, name)), suppress(UnknownQueue):  # of another code
            number = _tick(alias, name)
            woken += [queue] * bool(number)
            wait = min(wait, LOCKED_SCHEDULE_S if number is None else 0.0)  # there may be another tick by now
    return wait, woken


def _note(alias: str, name: str, error: Exception) -> None:
    kind = "" if isinstance(error, TaskQueueError | ValueError) else f"{type(error).__name__}: "
    rows, text = Schedule.objects.using(alias).filter(name=name), masked_text(f"{kind}{error}")[:500]
    if not rows.filter(note=text).exists():
        rows.update(note=text)
        logger.warning("Schedule %s: its task was refused, trying again: %s", name, text)


def _tick(alias: str, name: str) -> int | None:
    """Enqueue the tasks of a schedule that is due, and move it on; return their number. None: another has the row."""
    with transaction.atomic(using=alias):
        row = lock_first(rows_on(alias).filter(name=name, paused=False, next_time__lte=Now()))
        if row is None or row.next_time is None:
            return None
        check_timing(row.cron, row.timezone)
        now = aware(row.clock, alias)
        found, following = _due_ticks(row, aware(row.next_time, alias), now)
        chosen = _by_policy(row, found, now)
        row.note = f"{len(found) - len(chosen)} missed" if len(found) > len(chosen) else ""
        if row.overlap == "skip" and chosen:
            chosen = chosen[-1:]
            if is_unfinished(row, alias):
                chosen, row.note = [], "skipped: the task before it was not finished"
        for tick in chosen:
            row.last_task = enqueue_scheduled(row, f"{name}@{tick:%Y-%m-%dT%H:%M:%SZ}", alias).pk
        row.last_time, row.next_time = _stored(found[-1], alias), _stored(following, alias)
        row.save(using=alias, update_fields=["last_time", "next_time", "last_task", "note"])
    return len(chosen)


def _due_ticks(row: Schedule, first: datetime, now: datetime) -> tuple[list[datetime], datetime | None]:
    """Return the newest ticks from ``first`` to ``now``, and the one after them. A long time costs no more."""
    span = MISSED_AFTER
    while True:
        begin = max(first, now - span)
        found = deque([first] if begin == first else [], maxlen=MAX_TICKS_AT_ONCE)
        following = None
        for tick in ticks(row.cron, row.timezone, begin):
            if tick > now:
                following = tick
                break
            found.append(tick)
        if begin == first or len(found) == MAX_TICKS_AT_ONCE:
            return list(found), following
        span *= 4


def _by_policy(row: Schedule, found: list[datetime], now: datetime) -> list[datetime]:
    """Return the ticks that get a task: those that are not missed, and of the others what the policy says."""
    on_time = [tick for tick in found if now - tick <= MISSED_AFTER]
    if row.missed == "all":
        return found
    return on_time if on_time or row.missed == "skip" else found[-1:]


def is_unfinished(row: Schedule, alias: str) -> bool:
    """Whether the last task of a schedule waits or runs. The table may have another task of this id, after an edit."""
    tasks = model_for(row.queue)._default_manager.using(alias).filter(pk=row.last_task or 0)
    return tasks.filter(reference__startswith=f"{row.name}@").exclude(status__in=TERMINAL).exists()


def enqueue_scheduled(row: Schedule, reference: str, alias: str) -> AbstractTask:
    """Enqueue a task of a schedule. One that is there with this reference stays alone."""
    payload = Definition.of(vars(row)).readable_payload()
    return enqueue(row.queue, reference, payload, priority=row.priority, on_duplicate="ignore", using=alias)
