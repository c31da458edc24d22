"""``taskqueue schedules`` and ``taskqueue batches``: list them and show one, make and change them, act on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from django.core.management.base import CommandError, CommandParser
from django.utils.timezone import localtime

from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.flow.schedule import SCHEDULE_FIELDS
from django_dbtaskqueue.management import Options, Output
from django_dbtaskqueue.models import Schedule
from django_dbtaskqueue.models.control import MISSED_POLICIES, OVERLAP_POLICIES
from django_dbtaskqueue.operations import related_tasks, schedules
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.schedule_import import OTHER_QUEUES, import_schedules
from django_dbtaskqueue.operations.verbs import json_of

WRITE_WORDS = {"add": schedules.ADD_SCHEDULE, "edit": schedules.EDIT_SCHEDULE}
VERB_WORDS = {name.removesuffix("_schedule"): verb for name, verb in schedules.SCHEDULE_VERBS.items()}
BATCH_WORDS = {name.removesuffix("_batch"): verb for name, verb in related_tasks.BATCH_VERBS.items()}
NOT_ALL_CODE, MISSING_CODE = 1, 2  # exit codes: a schedule was not imported; wrong usage


def add_schedule_arguments(one: CommandParser) -> None:
    """Add the arguments of ``taskqueue schedules``."""
    one.add_argument("what", nargs="?", default="list", choices=("list", "show", "import", *WRITE_WORDS, *VERB_WORDS))
    one.add_argument("name", nargs="?", help="Name of the schedule.")
    one.add_argument(
        "--from", choices=OTHER_QUEUES, dest="source", help="Of import: the queue whose schedules to take over."
    )
    one.add_argument(
        "--queue-of", action="append", default=[], metavar="TASK=QUEUE",
        help="Of import: the queue of a task. Repeat it for more. Default: that of the processor with its dotted path.",
    )  # fmt: skip
    one.add_argument("--dry-run", action="store_true", help="Of import: say what would happen; change nothing.")
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


def _choices(policies: Iterable[tuple[str, object]]) -> str:
    return "; ".join(f"{word} ({label})" for word, label in policies)


def run_schedules(output: Output, options: Options) -> int:
    """Show schedules in words and with their next times; add, import, edit, pause, resume, run, reset, delete them."""
    actor, using, what, name = Actor(), options["database"], options["what"], options["name"]
    if what == "list":
        return _listed(output, schedules.listed(actor, using), actor)
    if what == "import":
        return _import(output, options, actor)
    if not name:
        words = f"Give its name: taskqueue schedules {what} NAME, with a name from taskqueue schedules."
        raise CommandError(words, returncode=MISSING_CODE)
    given: Options = {"reason": options["reason"], "using": using}
    if what in WRITE_WORDS:
        write = schedules.add_schedule if what == "add" else schedules.edit_schedule
        row: Schedule | None = write(name, _values(options), actor, **given)
    elif what in VERB_WORDS:
        row = schedules.act_on_schedule(VERB_WORDS[what], name, actor, **given)
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


def _import(output: Output, options: Options, actor: Actor) -> int:
    """Import; say of each row what became of it. Return 1 if one was not imported."""
    if not options["source"]:
        raise CommandError(f"Add --from {' or --from '.join(OTHER_QUEUES)}.", returncode=MISSING_CODE)
    pairs = [text.partition("=") for text in options["queue_of"]]
    for (task, equals, queue), text in zip(pairs, options["queue_of"], strict=True):
        if not (task and equals and queue):
            raise CommandError(f"--queue-of {text}: write TASK=QUEUE.", returncode=MISSING_CODE)
    queue_of = {task: queue for task, _equals, queue in pairs}
    found = import_schedules(options["source"], queue_of, actor, dry_run=options["dry_run"])
    output.data(masked([asdict(one) for one in found]))
    rows = []
    for one in found:
        made = one.definition
        words = "; ".join([f"{made.cron} {made.timezone} → {made.queue}", *one.notes]) if made else one.reason
        rows.append((one.name, one.timing, f"{one.result}, paused" if made and one.paused else one.result, words))
    if rows:
        output.table(("name", "there", "result", "here"), rows)
    left = sum(one.definition is None for one in found)
    end = " Nothing was changed: --dry-run." if options["dry_run"] else ""
    output.write(f"{len(found) - left} of {len(found)} schedules can be imported." + end)
    return NOT_ALL_CODE if left else 0


def _values(options: Options) -> Options:
    """Return the fields that were given, as a schedule has them."""
    values = {name: options[name] for name in SCHEDULE_FIELDS if options[name] is not None}
    try:
        if "payload" in values:
            values["payload"] = json_of(values["payload"])
        if "priority" in values:
            values["priority"] = int(values["priority"])
    except ValueError as error:
        raise CommandError(str(error), returncode=MISSING_CODE) from None
    return values


def _listed(output: Output, rows: list[Schedule], actor: Actor) -> int:
    if not rows:
        return output.answer([], "There is no schedule. Declare one with @periodic, or: taskqueue schedules add NAME …")
    documents = [schedules.schedule_document(row, actor) for row in rows]
    output.data(documents)
    head = ("name", "state", "when", "queue", "next tick", "last tick", "source")
    output.table(head, [_schedule_line(row, one) for row, one in zip(rows, documents, strict=True)])
    return 0


def _schedule_line(row: Schedule, document: schedules.ScheduleDocument) -> tuple[object, ...]:
    state = "paused" if row.paused else "running" if document["declared"] else "code is gone"
    coming = document["next_times"][0] if document["next_times"] else None
    local = (one and (localtime(one) if one.tzinfo else one) for one in (coming, row.last_time))
    times = [one and f"{one:%Y-%m-%d %H:%M:%S}" for one in local]
    source = f"{row.source}, edited: {', '.join(row.edited)}" if row.edited else row.source
    return (row.name, state, document["words"], row.queue, *times, source)


# -- batches -----------------------------------------------------------------------------------------------------------


def add_batch_arguments(one: CommandParser) -> None:
    """Add the arguments of ``taskqueue batches``."""
    one.add_argument("what", nargs="?", default="list", choices=("list", "show", *BATCH_WORDS))
    one.add_argument("id", nargs="?", help="Id of the batch.")


def run_batches(output: Output, options: Options) -> int:
    """List batches and workflows, show one, cancel all its tasks, or retry those that failed."""
    actor, using, what, pk = Actor(), options["database"], options["what"], options["id"]
    if what == "list":
        documents = related_tasks.batch_documents(related_tasks.listed_batches(actor, using))
        if not documents:
            return output.answer([], "There is no batch. The code makes one with batch() or Workflow.")
        output.data(documents)
        output.table(("id", "name", "created", "ended", "failed", "queues"), [_batch_line(one) for one in documents])
        return 0
    if not pk:
        raise CommandError(f"Give its id: taskqueue batches {what} ID.", returncode=MISSING_CODE)
    row = related_tasks.find_batch(pk, actor, using)
    if row is None:
        raise CommandError(f"There is no batch {pk!r}. taskqueue batches lists them.")
    if what in BATCH_WORDS:
        changed = related_tasks.act_on_batch(BATCH_WORDS[what], row, actor, reason=options["reason"])
        output.write(f"{BATCH_WORDS[what].done % {'number': changed}}.")
    [document] = related_tasks.batch_documents([row])
    output.data(document)
    output.facts({**document, "queues": ", ".join(document["queues"]), **document["statuses"], "statuses": None})
    return 0


def _batch_line(one: related_tasks.BatchDocument) -> tuple[object, ...]:
    statuses = one["statuses"]
    failed = statuses["ERROR"] + statuses["POISON"]
    ended = f"{statuses['COMPLETED'] + failed:,} of {one['total']:,}"
    return (one["id"], one["name"], one["create_time"], ended, failed, ", ".join(one["queues"]))
