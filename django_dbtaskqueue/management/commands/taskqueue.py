"""``manage.py taskqueue``: read queues and tasks, and act on them, from a terminal or a script."""

import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.management.base import BaseCommand, CommandParser

from django_dbtaskqueue.core.exceptions import SearchError, SearchTooSlow, TaskQueueError
from django_dbtaskqueue.management import Output, argument, changes, duration, exit_codes, positive, reading
from django_dbtaskqueue.models.control import MISSED_POLICIES, OPERATE_SCOPE, OVERLAP_POLICIES, SCOPES
from django_dbtaskqueue.operations.permissions import PAUSE
from django_dbtaskqueue.operations.schedule_import import OTHER_QUEUES
from django_dbtaskqueue.operations.verbs import ID_VERBS, ONE_TASK_VERBS, PRIORITY, QUEUE_VERBS, VerbInput, json_of

REFUSED_CODE, USAGE_ERROR_CODE, SETTINGS_CODE, TOO_SLOW_CODE, INTERRUPTED_CODE = 1, 2, 3, 4, 130
CODES: Mapping[type[BaseException], int] = {
    SearchTooSlow: TOO_SLOW_CODE, SearchError: USAGE_ERROR_CODE, ImproperlyConfigured: SETTINGS_CODE,
    TaskQueueError: REFUSED_CODE, PermissionDenied: REFUSED_CODE, KeyboardInterrupt: INTERRUPTED_CODE,
}  # fmt: skip
EXIT_CODES = """\
Exit codes: 0 done; 1 refused, or something is wrong (a task that is not there, an operation that failed, a finding of
the doctor); 2 wrong usage, a search that cannot be read, or a setting that cannot be set; 3 wrong configuration; 4 the
database did not answer within DBTASKQUEUE["OPERATIONS_TIMEOUT"]."""
Run = Callable[[Output, dict[str, Any]], int]  # of a subcommand: its docstring is the help, it returns the exit code
# The subcommand, and the name of its verb.
VERB_OF_COMMAND = {
    {"mark_poison": "poison"}.get(name, name.replace("_", "-")): name for name in ID_VERBS if name != "purge"
}
Option = tuple[str, Mapping[str, Any]]  # of several subcommands: its name, and how argparse reads it
Add = Callable[..., Callable[..., object]]  # of a subcommand: its name, what runs it, and its options
AS_JSON: Option = "--json", {"action": "store_true", "dest": "as_json", "help": "Answer with one JSON document."}
DATABASE: Option = "--database", {"metavar": "ALIAS", "help": "Database to use. Default: that of the queue."}
FILTER: Option = "--filter", {
    "action": "append", "default": [], "metavar": "SEARCH",
    "help": "Such as 'status:ERROR queue:claims age:>10m'. Repeat it for more. A search that begins with a minus: "
    "--filter=-queue:x.",
}  # fmt: skip
REASONED: Option = "--reason", {"default": "", "help": "Why, for the audit; delete and purge need one."}
DRY_RUN: Option = "--dry-run", {"action": "store_true", "help": "Say what would happen; change nothing."}
BACKGROUND: Option = "--background", {"action": "store_true", "help": "Leave the work to the pollers."}
ASKS: Option = "--yes", {"action": "store_true", "help": "Do not ask. Required without a terminal."}
ASKS_NOTHING: Option = "--yes", {**ASKS[1], "help": "Accepted as by the other commands; this one does not ask."}


class Command(BaseCommand):
    """Read queues and tasks, and act on them."""

    help = f"Read queues and tasks, and act on them. {EXIT_CODES}"

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

        def add(name: str, run: Run, *options: Option, text: str = "", **defaults: object) -> Callable[..., object]:
            text = text or " ".join((run.__doc__ or "").split())
            one: CommandParser = commands.add_parser(name, help=text, description=f"{text} {EXIT_CODES}")
            one.set_defaults(**{"run": run, "verb": name, **defaults})
            for option, given in (AS_JSON, *([] if name == "shards" else [DATABASE]), *options):
                one.add_argument(option, **given)
            return lambda name, text="", **given: one.add_argument(name, help=text, **given)

        for add_some in (_add_reading, _add_verbs, _add_queues, _add_rows, _add_schedules):
            add_some(add)

    @exit_codes(CODES)
    def handle(self, *args: Any, **options: Any) -> None:
        output = Output(self.stdout, self.style, self.stderr, as_json=options["as_json"], yes=options.get("yes", False))
        if code := options["run"](output, options):
            sys.exit(code)


def _add_reading(add: Add) -> None:
    status = add("status", reading.status)
    status("--queue", "Only this queue. Repeat it for more.", action="append", default=[], metavar="NAME")
    add("settings", changes.show_settings)("queue")
    tasks = add("list", reading.list_tasks, FILTER)
    tasks("--limit", "How many (20).", type=positive, default=20, metavar="N")
    tasks("--before", "Only tasks with a smaller id.", type=positive, metavar="ID")
    show = add("show", reading.show)
    show("task", "An id, or queue/reference.")
    show("--queue", "Only in this queue's table. Default: in all known ones.", metavar="NAME")
    add("doctor", reading.doctor)
    tail = add("tail", reading.tail, FILTER)
    tail("--interval", "Between queries (2s).", type=duration, default=timedelta(seconds=2), metavar="TIME")
    tail("--count", "End after N queries.", type=positive, metavar="N")


def _add_verbs(add: Add) -> None:
    for name, verb in VERB_OF_COMMAND.items():
        many, text = verb not in ONE_TASK_VERBS, str(ID_VERBS[verb].effect)
        options = (REASONED, DRY_RUN, ASKS, *([BACKGROUND, FILTER] if many else []))
        one = add(name, changes.verb, *options, text=text, verb=verb, filter=[], limit=None, background=False)
        if many:
            one("--limit", "Stop after N matching tasks.", type=positive, metavar="N")
        text = "This task. Repeat it for more." if many else "This task."
        one("--id", text, action="append", type=positive, default=[], metavar="N")
        one("--queue", "The queue of --id.", dest="of_queue", default="", metavar="NAME")
        for given in ID_VERBS[verb].inputs:
            _add_input(one, given)


def _add_input(add: Callable[..., object], given: VerbInput) -> None:
    """Add an option of a verb, read as its form and the API read it."""
    more = f"One of {', '.join(name for name, _label in given.choices)}. " if given.choices else ""
    initial = f"({given.initial})" if given.initial else ""
    text = f"{given.label}. {more}{given.help} {initial}".strip().replace("%", "%%")
    read = argument(lambda text: given.read(json_of(text) if given.is_json else text))
    asked = {"dest": given.field, "required": given.initial is None, "default": given.initial}
    add(f"--{given.name.replace('_', '-')}", text, type=read, metavar=given.name.rpartition("_")[2].upper(), **asked)


def _add_queues(add: Add) -> None:
    for name, verb in QUEUE_VERBS.items():
        one = add(name, changes.queue_verb, REASONED, DRY_RUN, ASKS_NOTHING, text=str(verb.effect))
        one("queue", nargs="+")
        if verb is PAUSE:
            one("--for", "End the pause after this time.", type=duration, dest="for_time", metavar="TIME")
    one = add("set", changes.set_settings, REASONED, DRY_RUN, ASKS_NOTHING)
    one("queue")
    one("values", "Such as max_running=5, rate=100/s or rate=none.", nargs="*", metavar="NAME=VALUE")
    text = "Take a setting back to what the code and the project's settings say. Repeat it for more."
    one("--reset", text, action="append", default=[], metavar="NAME")
    add("purge", changes.purge, REASONED, DRY_RUN, ASKS, BACKGROUND, limit=None)("queue")
    index = add("index", changes.index, ASKS_NOTHING)
    index("--queue", "On the table of this queue. Default: the common table.", metavar="NAME")
    index("--drop", "Drop the index.", action="store_true")
    mask = add("mask", changes.mask, ASKS)
    mask("--dry-run", "Say how many texts hold secrets; change nothing.", action="store_true")
    shards = add("shards", changes.shards, REASONED, ASKS)  # it is about all databases of a queue
    shards("what", choices=("show", "move"))
    shards("queue")
    text = "Move from this database, such as one that is not a shard any more. Repeat it for more. Default: all shards."
    shards("--from", text, action="append", default=[], dest="sources", metavar="ALIAS")
    text = "Move to this database. Default: to where an enqueue of the same task would put it now."
    shards("--to", text, metavar="ALIAS")
    text = "Move groups also to where they have tasks already. Those that come run after them."
    shards("--behind", text, action="store_true")
    shards("--limit", "Begin no batch after N tasks are moved.", type=positive, metavar="N")


def _add_rows(add: Add) -> None:
    bulk = add("bulk", changes.bulk, REASONED, ASKS_NOTHING)
    bulk("what", nargs="?", default="list", choices=("list", "show", "cancel", "put-back", "run"))
    bulk("name", nargs="?", type=positive, metavar="number")
    bulk("--limit", "How many to list (20).", type=positive, default=20, metavar="N")
    batches = add("batches", changes.run_batches, REASONED)
    batches("what", nargs="?", default="list", choices=("list", "show", *changes.BATCH_WORDS))
    batches("name", "Id of the batch.", nargs="?", metavar="id")
    token = add("token", changes.make_token, ASKS_NOTHING)
    token("user", "Name of the user whose permissions the token has.")
    scopes = [name for name, _label in SCOPES]
    token("--scope", "read: it changes nothing (operate).", choices=scopes, default=OPERATE_SCOPE)
    token("--queue", "Only this queue. Repeat for more.", action="append", default=[], metavar="NAME")
    token("--expires", "It ends after this time, such as 90d.", type=duration, metavar="TIME")
    token("--note", "What it is for.", default="")
    tokens = add("tokens", changes.tokens, ASKS_NOTHING)
    tokens("--revoke", "Delete this token: it is refused from now on.", type=positive, metavar="N")


def _add_schedules(add: Add) -> None:
    one = add("schedules", changes.run_schedules, REASONED, ASKS_NOTHING)
    acts = ("list", "show", "import", *changes.WRITE_WORDS, *changes.VERB_WORDS)
    one("what", nargs="?", default="list", choices=acts)
    one("name", "Name of the schedule.", nargs="?")
    one("--from", "Of import: the queue whose schedules to take over.", choices=OTHER_QUEUES, default=SUPPRESS)
    text = "Of import: the queue of a task. Repeat it for more. Default: that of the processor with its dotted path."
    one("--queue-of", text, action="append", default=SUPPRESS, metavar="TASK=QUEUE")
    one("--dry-run", "Of import: say what would happen; change nothing.", action="store_true", default=SUPPRESS)
    priority = argument(lambda text: None if text == "null" else PRIORITY.read(text))
    read = {"payload": argument(json_of), "priority": priority}
    for name, text in (
        ("queue", "Queue of the tasks."),
        ("cron", "Such as '0 7 * * mon-fri': minute hour day month weekday; a sixth in front is the second."),
        ("timezone", "Such as Europe/Madrid. Default: that of the site."),
        ("payload", "Payload of the tasks, as JSON."),
        ("payload-type", "Type of the payload, for a queue with several processors."),
        ("priority", "Priority of the tasks; lower runs first. Default, or null: that of the queue."),
        ("missed", f"What to do with missed ticks: {_choices(MISSED_POLICIES)}."),
        ("overlap", f"While the task before is not finished: {_choices(OVERLAP_POLICIES)}."),
    ):
        one(f"--{name}", text, type=read.get(name, str), default=SUPPRESS, metavar=name.rpartition("-")[2].upper())


def _choices(policies: Iterable[tuple[str, object]]) -> str:
    return "; ".join(f"{word} ({label})" for word, label in policies)
