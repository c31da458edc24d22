"""``taskqueue schedules``: list schedules and show one, make, edit, pause, resume, run, reset and delete them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from django.core.management.base import CommandError, CommandParser
from django.utils.timezone import localtime

from django_dbtaskqueue.flow.schedule import SCHEDULE_FIELDS
from django_dbtaskqueue.management.changes import Options
from django_dbtaskqueue.management.output import Output
from django_dbtaskqueue.models import Schedule
from django_dbtaskqueue.models.control import MISSED_POLICIES, OVERLAP_POLICIES
from django_dbtaskqueue.operations import schedule_control, schedules
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.verb_inputs import json_of

WRITE_WORDS = {"add": schedule_control.ADD_SCHEDULE, "edit": schedule_control.EDIT_SCHEDULE}
VERB_WORDS = {name.removesuffix("_schedule"): verb for name, verb in schedule_control.SCHEDULE_VERBS.items()}
NAME_MISSING_CODE = 2  # exit code: wrong usage


def add_arguments(one: CommandParser) -> None:
    """Add the arguments of the subcommand."""
    one.add_argument("what", nargs="?", default="list", choices=("list", "show", *WRITE_WORDS, *VERB_WORDS))
    one.add_argument("name", nargs="?", help="Name of the schedule.")
    for name, text in (
        ("queue", "Queue of the tasks."),
        ("cron", "Such as '0 7 * * mon-fri': minute hour day month weekday; a sixth in front is the second."),
        ("timezone", "Such as Europe/Madrid. Default: that of the site."),
        ("payload", "Payload of the tasks, as JSON."),
        ("payload-type", "Type of the payload, for a queue with several processors."),
        ("priority", "Priority of the tasks; lower runs first. Default: that of the queue."),
        ("missed", f"What to do with missed ticks: {_choices(MISSED_POLICIES)}."),
        ("overlap", f"While the task before is not finished: {_choices(OVERLAP_POLICIES)}."),
    ):
        one.add_argument(f"--{name}", metavar=name.rpartition("-")[2].upper(), help=text)
    one.add_argument("--reason", default="", help="Why, for the audit.")


def _choices(policies: Iterable[tuple[str, object]]) -> str:
    return "; ".join(f"{word} ({label})" for word, label in policies)


def run(output: Output, options: Options) -> int:
    """List schedules or show one; or write, or act, and show what became of it."""
    actor, using, what, name = Actor(), options["database"], options["what"], options["name"]
    if what == "list":
        return _listed(output, schedules.listed(actor, using), actor)
    if not name:
        words = f"Give its name: taskqueue schedules {what} NAME, with a name from taskqueue schedules."
        raise CommandError(words, returncode=NAME_MISSING_CODE)
    given: Options = {"reason": options["reason"], "using": using}
    if what in WRITE_WORDS:
        write = schedule_control.add_schedule if what == "add" else schedule_control.edit_schedule
        row: Schedule | None = write(name, _values(options), actor, **given)
    elif what in VERB_WORDS:
        row = schedule_control.act_on_schedule(VERB_WORDS[what], name, actor, **given)
    else:
        row = schedules.find(name, actor, using)
    if row is None:
        raise CommandError(f"There is no schedule {name!r}. taskqueue schedules lists them.")
    if what != "show":
        output.write(f"{(WRITE_WORDS | VERB_WORDS)[what].done % {'number': 1}}.")
    document = schedules.schedule_document(row, actor)
    output.data(document)
    times = ", ".join(f"{one:%a %Y-%m-%d %H:%M:%S %Z}" for one in document["next_times"])
    if what not in VERB_WORDS:
        output.facts({**document, "next_times": times, "edited": ", ".join(row.edited)})
    return 0


def _values(options: Options) -> Options:
    """Return the fields that were given, as a schedule has them."""
    values = {name: options[name] for name in SCHEDULE_FIELDS if options[name] is not None}
    try:
        if "payload" in values:
            values["payload"] = json_of(values["payload"])
        if "priority" in values:
            values["priority"] = int(values["priority"])
    except ValueError as error:
        raise CommandError(str(error), returncode=NAME_MISSING_CODE) from None
    return values


def _listed(output: Output, rows: list[Schedule], actor: Actor) -> int:
    documents = [schedules.schedule_document(row, actor) for row in rows]
    output.data(documents)
    if not rows:
        output.write("There is no schedule. Declare one with @periodic, or: taskqueue schedules add NAME …")
        return 0
    head = ("name", "state", "when", "queue", "next tick", "last tick", "source")
    output.table(head, [_line(row, one) for row, one in zip(rows, documents, strict=True)])
    return 0


def _line(row: Schedule, document: schedules.ScheduleDocument) -> tuple[object, ...]:
    state = "paused" if row.paused else "running" if document["declared"] else "code is gone"
    coming = document["next_times"][0] if document["next_times"] else None
    times = [None if one is None else f"{_local(one):%Y-%m-%d %H:%M:%S}" for one in (coming, row.last_time)]
    source = f"{row.source}, edited: {', '.join(row.edited)}" if row.edited else row.source
    return (row.name, state, document["words"], row.queue, *times, source)


def _local(value: datetime) -> datetime:
    return localtime(value) if value.tzinfo else value
