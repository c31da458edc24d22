"""Schedules: in words, with the next times, and what is wrong with them; and the verbs on them.

The code's values win, field by field, except where a person changed a field. That stays until "Back to the code".
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from itertools import islice
from typing import Annotated, NoReturn
from zoneinfo import ZoneInfo

from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.utils.dates import WEEKDAYS
from django.utils.text import get_text_list
from django.utils.translation import gettext as _, gettext_lazy, ngettext_lazy

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.cron import default_zone, ticks, timing_fault
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.exceptions import OperationRefused, TaskQueueError, near_match
from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.flow import schedule
from django_dbtaskqueue.flow.schedule import SCHEDULE_FIELDS, Definition, aware, home_of, rows_on
from django_dbtaskqueue.models import Schedule
from django_dbtaskqueue.models.control import CODE
from django_dbtaskqueue.operations.actions import ADDITION, CHANGE, DELETION, log, record, recorded
from django_dbtaskqueue.operations.permissions import VIEW_PAYLOAD, Actor, Verb, by_name, check, check_queue, narrow
from django_dbtaskqueue.operations.serializers import Document, RowDocument, is_storable
from django_dbtaskqueue.operations.verbs import with_secrets_of

SHOWN_TIMES = 5
CRON_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
SCHEDULE = RowDocument(
    "Schedule", "A schedule, in words and with its next times; what the code says of the fields in edited.", Schedule,
    (
        "name", "queue", "cron", "timezone", "payload", "payload_type", "priority", "missed", "overlap", "paused",
        "source", "edited", "last_time", "last_task", "note",
    ),
    {"words": str, "next_times": list[datetime], "declared": bool, "code": dict[str, object]},
)  # fmt: skip
ScheduleDocument = Annotated[Document, SCHEDULE]


def declared() -> dict[str, Definition]:
    """Return the schedules that the code declares, by name. Raise ``ImproperlyConfigured`` for one that cannot work."""
    found: dict[str, Definition] = {}
    for name, made in registry.periodics().items():
        where = f"@periodic({made.options['cron']!r})"
        owners = registry.processors_of(made.function) if made.queue is None else ()
        queues = [made.queue] if made.queue is not None else sorted({one.queue for one in owners})
        if len(queues) != 1:
            fault = f"is the processor of {', '.join(queues)}" if queues else "is not a processor"
            raise ImproperlyConfigured(f"{where}: {name} {fault}. Stack it on one @processor, or say queue=.")
        try:
            kind, plain = codecs.encode(made.options["payload"])
            given = {**made.options, "timezone": made.options["timezone"] or default_zone()}
            found[name] = Definition.of({**given, "queue": queues[0], "payload": plain, "payload_type": kind or ""})
            found[name].check(name)
        except (TaskQueueError, ValueError) as error:
            raise ImproperlyConfigured(f"{where} of {name}: {error}") from None
    return found


def homes(using: str | None = None) -> list[str]:
    """Return the databases that have schedules, or the one of them."""
    known = (home_of(name) for name in conf.settings_queues())
    return [alias_for("", using)] if using else list(dict.fromkeys([alias_for("", None), *known]))


def listed(actor: Actor, using: str | None = None) -> list[Schedule]:
    """Return the schedules of queues that the actor may view, by name; at most 500 of a database."""
    found = [row for alias in homes(using) for row in narrow(rows_on(alias), actor)[: schedule.MAX_LISTED_SCHEDULES]]
    return sorted(found, key=lambda row: row.name)


def find_schedule(name: str, actor: Actor, using: str | None = None) -> Schedule | None:
    """Return the schedule with this name; None if it is not there, or the actor may not view its queue."""
    places = homes(using) if is_storable(name) else []
    found = (narrow(rows_on(alias).filter(pk=name), actor).first() for alias in places)
    return next((row for row in found if row is not None), None)


def next_times(row: Schedule) -> list[datetime]:
    """Return the next five ticks, in the schedule's time zone: the one that is stored, and those after it."""
    if row.next_time is None or timing_fault(row.cron, row.timezone):
        return []
    first, zone = aware(row.next_time, str(row._state.db)), ZoneInfo(row.timezone)
    return [one.astimezone(zone) for one in (first, *islice(ticks(row.cron, row.timezone, first), SHOWN_TIMES - 1))]


def in_words(cron: str, zone: str) -> str:
    """Return a cron text as a person says it: "every weekday at 07:00 Europe/Madrid". Or what is wrong with it."""
    if fault := timing_fault(cron, zone):
        return fault
    parts = cron.split()
    parts = parts[1:] if len(parts) == 6 and parts[0] == "0" else parts
    if len(parts) == 5 and (words := _common_words(*parts)):
        return f"{words} {zone}"
    from cronsim import CronSim

    text = CronSim(cron, datetime(2024, 1, 1)).explain()
    return f"{text[:1].lower()}{text[1:]} {zone}"


def _common_words(minute: str, hour: str, day: str, month: str, weekday: str) -> str:
    days = _days(day, month, weekday)
    if days and minute.isdecimal() and hour.replace(",", "").isdecimal():
        times = [f"{int(one):02}:{int(minute):02}" for one in hour.split(",") if one]
        return _("%(days)s at %(times)s") % {"days": days, "times": get_text_list(times, _("and"))}
    if (hour, day, month, weekday) != ("*",) * 4:
        return ""
    if minute.isdecimal():
        return _("every hour at minute %(minute)s") % {"minute": int(minute)}
    if minute.removeprefix("*/").isdecimal():
        return _("every %(number)s minutes") % {"number": int(minute[2:])}
    return _("every minute") if minute == "*" else ""


def _days(day: str, month: str, weekday: str) -> str:
    if (day, month, weekday) == ("*", "*", "*"):
        return _("every day")
    if (month, weekday) == ("*", "*") and day.isdecimal():
        return _("on day %(day)s of each month") % {"day": int(day)}
    names = [CRON_DAYS[int(one)] if one in "01234567" else one for one in weekday.upper().split(",") if one]
    if (day, month) != ("*", "*") or not names:
        return ""
    if names in (["MON-FRI"], ["1-5"]):
        return _("every weekday")
    if not set(names) <= set(CRON_DAYS):
        return ""
    shown = [str(WEEKDAYS[(CRON_DAYS.index(one) - 1) % 7]) for one in names]
    return _("every %(days)s") % {"days": get_text_list(shown, _("and"))}


def code_of_edited(row: Schedule, *, seen: bool) -> dict[str, object]:
    """Return what the code says of the fields that a person changed, secrets masked; the payload only if ``seen``."""
    shown = SCHEDULE_FIELDS if seen else {*SCHEDULE_FIELDS} - {"payload"}
    said = {name: (row.code or {}).get(name) for name in row.edited if name in shown}
    return {name: masked(value) if name == "payload" else value for name, value in said.items()}


def schedule_document(row: Schedule, actor: Actor) -> ScheduleDocument:
    """Return a schedule as data, for the command line and the API; secrets are masked."""
    seen = actor.may(VIEW_PAYLOAD, row.queue)
    return SCHEDULE.of(
        row,
        words=in_words(row.cron, row.timezone),
        next_times=[] if row.paused else next_times(row),
        payload=masked(row.payload) if seen else None,
        declared=not schedule.is_gone(row, registry.periodics()),
        code=code_of_edited(row, seen=seen),
    )


@register("dbtaskqueue")
def check_schedules(**_: object) -> Iterator[CheckMessage]:
    """E010: a schedule of the code cannot work. W004: its queue has no processor here."""
    try:
        found = declared()
    except ImproperlyConfigured as error:
        yield Error(str(error), id="dbtaskqueue.E010")
        return
    for name, one in found.items():
        if not registry.processors(one.queue):
            words = f"Schedule {name!r} enqueues to {one.queue!r}, for which this code has no processor."
            hint = "Register a processor for the queue, or correct queue= of @periodic."
            yield Warning(words, hint=hint, id="dbtaskqueue.W004")


ADD_SCHEDULE = Verb(
    "add_schedule", gettext_lazy("New schedule"), gettext_lazy("From its next tick on, pollers enqueue its tasks."),
    ngettext_lazy("%(number)s schedule made", "%(number)s schedules made", "number"), "add_schedule",
)  # fmt: skip
EDIT_SCHEDULE = Verb(
    "edit_schedule", gettext_lazy("Edit"),
    gettext_lazy("What you change here wins over the code, until you choose “Back to the code”."),
    ngettext_lazy("%(number)s schedule changed", "%(number)s schedules changed", "number"), "change_schedule",
)  # fmt: skip
SCHEDULE_VERBS = by_name(
    Verb(
        "pause_schedule", gettext_lazy("Pause"),
        gettext_lazy("No task is enqueued until the schedule is resumed. Ticks of the pause are not made up for."),
        ngettext_lazy("%(number)s schedule paused", "%(number)s schedules paused", "number"), "change_schedule",
    ),
    Verb(
        "resume_schedule", gettext_lazy("Resume"), gettext_lazy("The next tick is the first one from now on."),
        ngettext_lazy("%(number)s schedule resumed", "%(number)s schedules resumed", "number"), "change_schedule",
    ),
    Verb(
        "run_schedule", gettext_lazy("Run now"),
        gettext_lazy("One task is enqueued at once, also of a paused schedule. The next tick stays as it is."),
        ngettext_lazy("%(number)s task enqueued", "%(number)s tasks enqueued", "number"), "run_schedule",
    ),
    Verb(
        "reset_schedule", gettext_lazy("Back to the code"),
        gettext_lazy("What was changed by hand is dropped: the schedule is as the code says, and follows it."),
        ngettext_lazy("%(number)s schedule follows the code", "%(number)s schedules follow the code", "number"),
        "change_schedule",
    ),
    Verb(
        "delete_schedule", gettext_lazy("Delete"),
        gettext_lazy("The schedule goes; its tasks stay. What the code declares cannot be deleted: pause it."),
        ngettext_lazy("%(number)s schedule deleted", "%(number)s schedules deleted", "number"), "delete_schedule",
    ),
)  # fmt: skip


def act_on_schedule(verb: Verb, name: str, actor: Actor, *, reason: str = "", using: str | None = None) -> Schedule:
    """Pause, resume, run, reset or delete a schedule; return the row. Raises as ``add_schedule`` does."""
    row = _found(name, actor, using)
    check(verb, reason, actor, row.queue)
    alias = str(row._state.db)
    with recorded(alias):
        row = _locked(name, alias)
        try:
            _change(row, verb.name, alias)
        except ValueError as error:
            raise OperationRefused(str(error)) from None
        details = {"schedule": name, **({"task_id": row.last_task} if verb.name == "run_schedule" else {})}
        record(alias, actor, verb, queue=row.queue, reason=reason, changed=1, details=details)
        log(actor, [row], DELETION if verb.name == "delete_schedule" else CHANGE, f"{verb.label} {reason}".strip())
    return row


def _found(name: str, actor: Actor, using: str | None) -> Schedule:
    if (row := find_schedule(name, actor, using)) is None:
        hint = near_match(name, [one.name for one in listed(actor, using)])
        raise OperationRefused(_("There is no schedule %(name)s.") % {"name": repr(name)} + hint)
    return row


def _locked(name: str, alias: str) -> Schedule:
    if (row := rows_on(alias).select_for_update().filter(pk=name).first()) is None:
        raise OperationRefused(_("There is no schedule %(name)s.") % {"name": repr(name)})
    return row


def _refuse(words: str, row: Schedule) -> NoReturn:
    raise OperationRefused(words % {"name": row.name})


def _change(row: Schedule, verb: str, alias: str) -> None:
    if verb == "delete_schedule":
        if row.source == CODE and row.name in registry.periodics():
            _refuse(_("The code declares %(name)s, and would make it again. Pause it, or remove its @periodic."), row)
        rows_on(alias).filter(pk=row.pk).delete()
        return
    if verb == "pause_schedule":
        if row.paused:
            _refuse(_("%(name)s is paused already."), row)
        row.paused = True
    elif verb == "resume_schedule":
        if not row.paused:
            _refuse(_("%(name)s is not paused."), row)
        row.paused = False
        schedule.reschedule(row, alias)
    elif verb == "run_schedule":
        if row.overlap == "skip" and schedule.is_unfinished(row, alias):
            _refuse(_("The task before is not finished, and %(name)s does not overlap."), row)
        now = aware(row.clock, alias)
        row.last_task = schedule.enqueue_scheduled(row, f"{row.name}@run {now.isoformat()}", alias).pk
    else:
        if not row.code or not row.edited:
            _refuse(_("Nothing of %(name)s was changed by hand."), row)
        _set(row, Definition.of(row.code), alias)
    row.save(using=alias)


def _set(row: Schedule, new: Definition, alias: str) -> None:
    """Set a definition in a row, note what differs from the code, and set the next tick if its times changed."""
    old = Definition.of(vars(row))
    for name in SCHEDULE_FIELDS:
        setattr(row, name, getattr(new, name))
    said = Definition.of(row.code) if row.code else new
    row.edited = [name for name in SCHEDULE_FIELDS if getattr(new, name) != getattr(said, name)]
    if row.next_time is None or (old.cron, old.timezone) != (new.cron, new.timezone):
        schedule.reschedule(row, alias)


def add_schedule(
    name: str, values: Mapping[str, object], actor: Actor, *, reason: str = "", using: str | None = None
) -> Schedule:
    """Make a schedule of a person. Raises ``OperationRefused``, ``UnknownQueue``, ``PermissionDenied``."""
    new = Definition.of({"queue": "", "cron": "", "timezone": default_zone(), **values})
    taken = is_storable(name) and any(rows_on(home).filter(pk=name).exists() for home in homes(using))
    _check_new(name, new, actor, ADD_SCHEDULE, reason, using)
    alias = home_of(new.queue)
    with recorded(alias):
        row, made = rows_on(alias).get_or_create(name=name, defaults={"queue": new.queue, "cron": new.cron})
        if taken or not made:
            raise OperationRefused(_("There is a schedule %(name)s already.") % {"name": repr(name)})
        row = _locked(name, alias)
        _set(row, new, alias)
        row.save(using=alias)
        record(alias, actor, ADD_SCHEDULE, queue=new.queue, reason=reason, changed=1, details={"schedule": name})
        log(actor, [row], ADDITION, str(ADD_SCHEDULE.label))
    return row


def edit_schedule(
    name: str, values: Mapping[str, object], actor: Actor, *, reason: str = "", using: str | None = None
) -> Schedule:
    """Change fields of a schedule. They stay as the person wrote them, whatever the code says. Raises as ``add``."""
    row = _found(name, actor, using)
    alias = str(row._state.db)
    check(EDIT_SCHEDULE, reason, actor, row.queue)
    if "payload" in values and not actor.may(VIEW_PAYLOAD, row.queue):
        raise PermissionDenied(_("To edit a payload you need the permission to see payloads."))
    with recorded(alias):
        row = _locked(name, alias)
        queue = row.queue
        old = Definition.of(vars(row))
        new = Definition.of({**asdict(old), **values})
        if "payload" in values:
            new = replace(new, payload=with_secrets_of(row.payload, values["payload"]))
        _check_new(name, new, actor, EDIT_SCHEDULE, reason, alias)
        if not actor.may_bring(queue, new.queue):
            raise PermissionDenied(_("not permitted on queue %(queue)s") % {"queue": queue})
        _set(row, new, alias)
        row.save(using=alias)
        before, after = asdict(old), asdict(new)
        changes = {key: [before[key], after[key]] for key in SCHEDULE_FIELDS if before[key] != after[key]}
        if "payload" in changes:
            changes["payload"] = []  # the audit is for users who may not see payloads, too
        details = {"schedule": name, "changes": changes}
        record(alias, actor, EDIT_SCHEDULE, queue=queue, reason=reason, changed=1, details=details)
        log(actor, [row], CHANGE, f"{EDIT_SCHEDULE.label}: {', '.join(changes)}")
    return row


def _check_new(name: str, new: Definition, actor: Actor, verb: Verb, reason: str, alias: str | None) -> None:
    check_queue(new.queue, actor)
    check(verb, reason, actor, new.queue)
    overridden_settings(new.queue, home := home_of(new.queue))
    if alias not in (None, home):
        raise OperationRefused(_("Queue %(queue)s is in another database.") % {"queue": new.queue})
    try:
        new.check(name)
    except ValueError as error:
        raise OperationRefused(str(error)) from None
