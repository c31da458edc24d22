"""Schedules of django-celery-beat and django-q2, as ours. Their own code reads their rows, which stay as they are."""

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any
from zoneinfo import ZoneInfo

from django.apps import apps
from django.db import transaction
from django.utils.timezone import is_naive, make_aware, now

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf.cron import default_zone
from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.exceptions import OperationRefused, TaskQueueError, near_match
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.flow.schedule import SCHEDULE_FIELDS, Definition, home_of, rows_on
from django_dbtaskqueue.operations.actions import recorded
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.schedules import SCHEDULE_VERBS, act_on_schedule, add_schedule

WEEKS_OF_MONTH = [frozenset(range(first, first + 7)) for first in (1, 8, 15, 22)]  # where the first Monday is, …
MONTHS_OF_TYPE = {"M": 1, "BM": 2, "Q": 3, "Y": 12}  # between two runs, by type of a schedule of django-q2
LAST_COMMON_DAY = 28  # the last day that each month has
Row = Any  # of a model of theirs, which publishes no types


class Untranslatable(ValueError):
    """Why a row cannot become one of our schedules."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A row of the other queue, and what became of it: "made", "unchanged", or "not imported" with a reason."""

    name: str
    task: str
    timing: str  # as the other queue says it
    paused: bool = False
    definition: Definition | None = None
    notes: tuple[str, ...] = ()  # what is different here
    result: str = "not imported"
    reason: str = ""


def import_schedules(
    source: str, queue_of: Mapping[str, str], actor: Actor, *, dry_run: bool = False, reason: str = ""
) -> list[Imported]:
    """Make a schedule of each row that can become one. A dry run does so, too, and rolls it back.

    ``queue_of`` has the queues of tasks. The queue of any other task is that of the processor with its dotted path. A
    second import changes nothing. Raises ``OperationRefused`` if the app of the other queue is not installed.
    """
    label, model, row_of, definition_of_row = OTHER_QUEUES[source]
    if not apps.is_installed(label):
        raise OperationRefused(f"{label} is not in INSTALLED_APPS. Leave it there until its schedules are imported.")
    rows = [(row_of(row), row) for row in apps.get_model(label, model)._default_manager.order_by("pk")]
    tasks = {one.task for one, _row in rows}
    for task in queue_of:
        if task not in tasks:
            raise OperationRefused(f"--queue-of {task}: no schedule there has this task.{near_match(task, tasks)}")
    answers: list[Imported] = []
    for one, row in rows:
        try:
            if one.name in {before.name for before in answers}:
                raise Untranslatable("another schedule there has this name")
            made, notes = definition_of_row(row)
            queue, payload_type = _queue(one.task, queue_of)
            made = replace(made, queue=queue, payload_type=payload_type)
            result = _write(one, made, actor, reason or f"imported from {source}", dry_run=dry_run)
            answers.append(replace(one, definition=made, notes=tuple(notes), result=result))
        except Exception as error:  # a row can hold anything, and stops no other
            kind = "" if isinstance(error, TaskQueueError | ValueError) else f"{type(error).__name__}: "
            answers.append(replace(one, reason=masked_text(f"{kind}{error}")))
    return answers


def _write(one: Imported, made: Definition, actor: Actor, reason: str, *, dry_run: bool) -> str:
    alias = home_of(made.queue)
    if (there := rows_on(alias).filter(pk=one.name).first()) is not None:
        before = Definition.of(vars(there))
        if different := [name for name in SCHEDULE_FIELDS if getattr(before, name) != getattr(made, name)]:
            raise Untranslatable(f"there is a schedule with this name here, with another {', '.join(different)}")
        return "unchanged"
    with recorded(alias):
        add_schedule(one.name, asdict(made), actor, reason=reason)
        if one.paused:
            act_on_schedule(SCHEDULE_VERBS["pause_schedule"], one.name, actor, reason=reason)
        if dry_run:
            transaction.set_rollback(True, using=alias)
    return "would be made" if dry_run else "made"


def _queue(task: str, queue_of: Mapping[str, str]) -> tuple[str, str]:
    if task in queue_of:
        return queue_of[task], ""
    found = []
    for queue in registry.queues():
        for processor in registry.processors(queue):
            if processor.name == task:
                types = registry.types_of(queue, [processor])
                found.append((queue, "" if "" in types else types[0]))
    if len(found) != 1:
        known = f"is a processor of {', '.join(queue for queue, _type in found)}" if found else "is not a processor"
        raise Untranslatable(f"{task} {known}: add --queue-of {task}=QUEUE")
    return found[0]


def _every(pause: timedelta, anchor: datetime) -> Definition:
    """Return the definition for the time ``anchor`` and one time after each pause. In UTC, each pause is the same."""
    since = _utc(anchor)
    seconds = pause // timedelta(seconds=1) if not pause.microseconds else 0
    if 0 < seconds < 60 and 60 % seconds == 0:
        cron = f"{_steps(since.second, seconds, 60)} * * * * *"
    elif 0 < seconds < 3600 and seconds % 60 == 3600 % seconds == 0:
        cron = f"{_steps(since.minute, seconds // 60, 60)} * * * *"
    elif seconds > 0 and seconds % 3600 == 86_400 % seconds == 0:
        cron = f"{since.minute} {_steps(since.hour, seconds // 3600, 24)} * * *"
    elif pause == timedelta(days=7):
        cron = f"{since.minute} {since.hour} * * {since.isoweekday() % 7}"
    else:
        raise Untranslatable(f"every {format_duration(pause)}: a minute, hour, day or week is not a multiple of that")
    return Definition("", cron, "UTC")


def _utc(value: datetime) -> datetime:
    return (make_aware(value) if is_naive(value) else value).astimezone(UTC)


def _steps(first: int, step: int, size: int) -> str:
    if step in (1, size):
        return "*" if step == 1 else str(first)
    return f"{first % step}-{size - 1}/{step}" if first % step else f"*/{step}"


def _field(text: str, values: Collection[int], size: int) -> str:
    """Return a field of a cron text for these values, which the other queue reads from its ``text``."""
    if len(values) == size:
        return "*"
    step = re.fullmatch(r"\*/(\d+)", text)
    if step and int(step[1]) < size:
        return text
    runs = [[pair[1] for pair in run] for _, run in groupby(enumerate(sorted(values)), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _celery_row(row: Row) -> Imported:
    timing = row.interval or row.crontab or row.solar or row.clocked or "no schedule"
    return Imported(row.name, row.task, str(timing), paused=not row.enabled)


def _celery_definition(row: Row) -> tuple[Definition, list[str]]:
    if row.task.startswith("celery."):
        raise Untranslatable("it is a task of Celery itself")
    if row.clocked or row.one_off:
        raise Untranslatable("it runs once: enqueue a task with run_at= instead")
    if row.solar:
        raise Untranslatable("it follows the sun, and a cron text follows the clock")
    if row.expires:
        raise Untranslatable(f"it ends at {_utc(row.expires):%Y-%m-%d %H:%M} UTC, and our schedules have no end")
    if row.start_time and _utc(row.start_time) > now():
        raise Untranslatable(f"it begins at {_utc(row.start_time):%Y-%m-%d %H:%M} UTC: import it then")
    if row.interval:
        pause = timedelta(**{row.interval.period: row.interval.every})
        made = _every(pause, row.last_run_at or row.start_time or row.date_changed)
    elif row.crontab:
        made = _of_crontab(row.crontab)
    else:
        raise Untranslatable("it has no schedule")
    notes = [] if row.priority is None else [f"priority {row.priority} is left out: here the lowest number runs first"]
    if row.expire_seconds is not None:
        notes.append(f"its tasks expired after {row.expire_seconds} s: set ttl of the queue")
    return replace(made, payload=_payload(json.loads(row.args or "[]"), json.loads(row.kwargs or "{}"))), notes


def _of_crontab(row: Row) -> Definition:
    """Return the definition. Celery wants a day that is in both fields of days, cron in either; its Sunday is 0."""
    try:
        found = row.schedule
    except Exception as error:  # what Celery raises for a wrong text has no common class
        raise Untranslatable(f"Celery cannot read it: {error}") from None
    day = _field("", found.day_of_month, 31)
    weekday = _field("", found.day_of_week, 7)
    if day != "*" and weekday != "*":
        weeks = [number for number, days in enumerate(WEEKS_OF_MONTH, 1) if days <= found.day_of_month]
        if frozenset[int]().union(*(WEEKS_OF_MONTH[number - 1] for number in weeks)) != found.day_of_month:
            raise Untranslatable(f"it runs on days that are {day} of the month and {weekday} of the week")
        day, weekday = "*", ",".join(f"{one}#{number}" for number in weeks for one in sorted(found.day_of_week))
    minute, hour = _field(row.minute, found.minute, 60), _field(row.hour, found.hour, 24)
    return Definition("", f"{minute} {hour} {day} {_field('', found.month_of_year, 12)} {weekday}", str(found.tz))


def _payload(args: object, kwargs: object) -> object:
    """Return a payload for arguments: the keyword arguments, if there are no others."""
    return {"args": args, "kwargs": kwargs} if args else kwargs or None


def _q_row(row: Row) -> Imported:
    timing = f"{row.get_schedule_type_display()} {row.cron or row.minutes or ''}".strip()
    return Imported(row.name or f"{row.func} {row.pk}", row.func, timing)


def _q_definition(row: Row) -> tuple[Definition, list[str]]:
    if row.schedule_type == "O":
        raise Untranslatable("it runs once: enqueue a task with run_at= instead")
    if row.repeats >= 0:
        raise Untranslatable(f"it runs {row.repeats} times more, and our schedules have no end")
    if row.next_run is None:
        raise Untranslatable("it has no next run")
    from django_q.conf import Conf

    zone = str(Conf.TIME_ZONE or default_zone())  # without USE_TZ it has none
    if row.schedule_type == "C":
        parts = (row.cron or "").split()
        made = Definition("", " ".join(parts[5:] + parts[:5]), zone)  # croniter has the second at the end
    elif row.schedule_type in ("I", "H"):
        made = _every(timedelta(minutes=(row.minutes or 1) if row.schedule_type == "I" else 60), row.next_run)
    else:
        made = _q_calendar(row.schedule_type, _utc(row.next_run), zone)
    args, kwargs = _q_arguments(row)
    notes = [f"its hook {row.hook} is not called"] if row.hook else []
    if kwargs.pop("q_options", None):
        notes.append("its q_options are left out")
    if row.intended_date_kwarg:
        notes.append(f"{row.intended_date_kwarg} is left out: the reference of the task names the tick")
    return replace(made, payload=_payload(args, kwargs), missed="all" if Conf.CATCH_UP else "one"), notes


def _q_calendar(kind: str, next_run: datetime, zone: str) -> Definition:
    """Return the definition of what runs at the same local time, each day or in each so many months."""
    zone = "UTC" if kind == "Y" else zone  # django-q2 keeps the hour of a yearly one in UTC
    first = next_run.astimezone(ZoneInfo(zone))
    at = f"{first.minute} {first.hour}"
    if kind in ("D", "W"):
        return Definition("", f"{at} * * {first.isoweekday() % 7 if kind == 'W' else '*'}", zone)
    if kind not in MONTHS_OF_TYPE:
        raise Untranslatable("no cron text says every two weeks")
    if max(first.day, next_run.day) > LAST_COMMON_DAY:  # it counts months in UTC
        raise Untranslatable(f"it runs on day {first.day}, which not each month has: day L is the last one")
    months = {(first.month - 1 + MONTHS_OF_TYPE[kind] * number) % 12 + 1 for number in range(12)}
    return Definition("", f"{at} {first.day} {_field('', months, 12)} *", zone)


def _q_arguments(row: Row) -> tuple[list[object], dict[str, object]]:
    """Return the arguments. Their texts are Python: a value or a tuple; a dict, or what stands in a call."""
    args, kwargs = row.args or "()", row.kwargs or "{}"
    try:
        found = ast.literal_eval(args)
        if kwargs.lstrip().startswith("{"):
            named = ast.literal_eval(kwargs)
        else:
            call = ast.parse(f"f({kwargs})", mode="eval").body
            named = {str(one.arg): ast.literal_eval(one.value) for one in getattr(call, "keywords", ())}
        plain = json.loads(json.dumps([found if isinstance(found, tuple) else [found], named]))
    except (SyntaxError, TypeError, ValueError):
        raise Untranslatable(f"its arguments are not JSON: {args}, {kwargs}") from None
    return plain[0], plain[1]


OTHER_QUEUES: Mapping[str, tuple[str, str, Callable[..., Imported], Callable[..., tuple[Definition, list[str]]]]] = {
    "django-celery-beat": ("django_celery_beat", "PeriodicTask", _celery_row, _celery_definition),
    "django-q2": ("django_q", "Schedule", _q_row, _q_definition),
}
