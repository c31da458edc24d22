"""``manage.py taskqueue``: read queues and tasks, and act on them, from a terminal or a script."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_dbtaskqueue.core.exceptions import SearchError, SearchTooSlow, TaskQueueError
from django_dbtaskqueue.db.session import migrated
from django_dbtaskqueue.management import Output, changes, duration, positive, reading
from django_dbtaskqueue.models.control import OPERATE_SCOPE, SCOPES
from django_dbtaskqueue.operations.permissions import PAUSE
from django_dbtaskqueue.operations.verbs import ID_VERBS, ONE_TASK_VERBS, PURGE, QUEUE_VERBS, VerbInput, json_of

REFUSED_CODE, USAGE_ERROR_CODE, SETTINGS_CODE, TOO_SLOW_CODE, INTERRUPTED_CODE = 1, 2, 3, 4, 130
EXIT_CODES = """\
Exit codes: 0 done; 1 refused, or something is wrong (a task that is not there, an operation that failed, a finding of
the doctor); 2 wrong usage, a search that cannot be read, or a setting that cannot be set; 3 wrong configuration; 4 the
database did not answer within DBTASKQUEUE["OPERATIONS_TIMEOUT"]."""
Run = Callable[[Output, dict[str, Any]], int]  # of a subcommand: its docstring is the help, it returns the exit code
# The subcommand, and the name of its verb.
VERB_OF_COMMAND = {
    {"mark_poison": "poison"}.get(name, name.replace("_", "-")): name for name in ID_VERBS if name != PURGE.name
}
Option = tuple[str, Mapping[str, Any]]  # of several subcommands: its name, and how argparse reads it
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

        def add(name: str, run: Run, *options: Option, text: str = "", verb: str = "") -> CommandParser:
            text = text or " ".join((run.__doc__ or "").split())
            one: CommandParser = commands.add_parser(name, help=text, description=f"{text} {EXIT_CODES}")
            one.set_defaults(run=run, verb=verb or name)
            for option, given in (AS_JSON, DATABASE, *options):
                one.add_argument(option, **given)
            return one

        _add_reading(add)
        _add_verbs(add)
        _add_queues(add)
        bulk = add("bulk", changes.bulk, REASONED, ASKS_NOTHING)
        bulk.add_argument("what", choices=("list", "show", "cancel", "put-back", "run"))
        bulk.add_argument("number", nargs="?", type=positive)
        bulk.add_argument("--limit", type=positive, metavar="N", help="How many to list (20).")
        index = add("index", changes.index, ASKS_NOTHING)
        index.add_argument("--queue", metavar="NAME", help="On the table of this queue. Default: the common table.")
        index.add_argument("--drop", action="store_true", help="Drop the index.")
        mask = add("mask", changes.mask, ASKS)
        mask.add_argument("--dry-run", action="store_true", help="Say how many texts hold secrets; change nothing.")
        _add_tokens(add)
        schedule = add("schedules", changes.run_schedules, REASONED, ASKS_NOTHING)
        changes.add_schedule_arguments(schedule)
        shards = add("shards", changes.run, REASONED, ASKS)
        changes.add_arguments(shards)
        shards.add_argument("--limit", type=positive, metavar="N", help="Begin no batch after N tasks are moved.")
        batches = add("batches", changes.run_batches, REASONED)
        changes.add_batch_arguments(batches)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one subcommand; exit with one of the codes in the help."""
        output = Output(self.stdout, self.style, self.stderr, as_json=options["as_json"], yes=options.get("yes", False))
        try:
            with migrated():
                code = options["run"](output, options)
        except SearchTooSlow as error:
            raise CommandError(str(error), returncode=TOO_SLOW_CODE) from error
        except SearchError as error:
            raise CommandError(str(error), returncode=USAGE_ERROR_CODE) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=SETTINGS_CODE) from error
        except (TaskQueueError, PermissionDenied) as error:
            raise CommandError(str(error), returncode=REFUSED_CODE) from error
        except KeyboardInterrupt:
            raise CommandError("Stopped.", returncode=INTERRUPTED_CODE) from None
        if code:
            sys.exit(code)


def _add_reading(add: Callable[..., CommandParser]) -> None:
    status = add("status", reading.status)
    text = "Only this queue. Repeat it for more."
    status.add_argument("--queue", action="append", default=[], metavar="NAME", help=text)
    one = add("settings", changes.show_settings)
    one.add_argument("queue")
    tasks = add("list", reading.list_tasks, FILTER)
    tasks.add_argument("--limit", type=positive, metavar="N", help="How many (20).")
    tasks.add_argument("--before", type=positive, metavar="ID", help="Only tasks with a smaller id.")
    show = add("show", reading.show)
    show.add_argument("task", help="An id, or queue/reference.")
    show.add_argument("--queue", metavar="NAME", help="Only in this queue's table. Default: in all known ones.")
    add("doctor", reading.doctor)
    tail = add("tail", reading.tail, FILTER)
    pause = timedelta(seconds=2)
    tail.add_argument("--interval", type=duration, default=pause, metavar="TIME", help="Between queries (2s).")
    tail.add_argument("--count", type=positive, metavar="N", help="End after N queries.")


def _add_verbs(add: Callable[..., CommandParser]) -> None:
    for name, verb in VERB_OF_COMMAND.items():
        many = verb not in ONE_TASK_VERBS
        options = (REASONED, DRY_RUN, ASKS, BACKGROUND, *([FILTER] if many else []))
        one = add(name, changes.verb, *options, text=str(ID_VERBS[verb].effect), verb=verb)
        if many:
            one.add_argument("--limit", type=positive, metavar="N", help="Stop after N matching tasks.")
        else:
            one.set_defaults(filter=[], limit=None)
        text = "This task. Repeat it for more." if many else "This task."
        one.add_argument("--id", action="append", type=positive, default=[], metavar="N", help=text)
        for given in ID_VERBS[verb].inputs:
            _add_input(one, given)


def _add_input(parser: CommandParser, given: VerbInput) -> None:
    """Add an option of a verb, read as its form and the API read it."""

    def read(text: str) -> object:
        try:
            return given.read(json_of(text) if given.is_json else text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    more = f"One of {', '.join(name for name, _label in given.choices)}. " if given.choices else ""
    initial = f"({given.initial})" if given.initial else ""
    parser.add_argument(
        f"--{given.name.replace('_', '-')}", dest=given.field, type=read, required=given.initial is None,
        default=given.initial, help=f"{given.label}. {more}{given.help} {initial}".strip().replace("%", "%%"),
        metavar=given.name.rpartition("_")[2].upper(),
    )  # fmt: skip


def _add_queues(add: Callable[..., CommandParser]) -> None:
    for name, verb in QUEUE_VERBS.items():
        one = add(name, changes.queue_verb, REASONED, DRY_RUN, ASKS_NOTHING, text=str(verb.effect))
        one.add_argument("queue", nargs="+")
        if verb is PAUSE:
            text = "End the pause after this time."
            one.add_argument("--for", type=duration, dest="for_time", metavar="TIME", help=text)
    one = add("set", changes.set_settings, REASONED, DRY_RUN, ASKS_NOTHING)
    one.add_argument("queue")
    one.add_argument("values", nargs="*", metavar="NAME=VALUE", help="Such as max_running=5, rate=100/s or rate=none.")
    text = "Take a setting back to what the code and the project's settings say. Repeat it for more."
    one.add_argument("--reset", action="append", default=[], metavar="NAME", help=text)
    purge = add("purge", changes.purge, REASONED, DRY_RUN, ASKS, BACKGROUND)
    purge.add_argument("queue")
    purge.set_defaults(limit=None)


def _add_tokens(add: Callable[..., CommandParser]) -> None:
    token = add("token", changes.make, ASKS_NOTHING)
    token.add_argument("user", help="Name of the user whose permissions the token has.")
    scopes = [name for name, _label in SCOPES]
    token.add_argument("--scope", choices=scopes, default=OPERATE_SCOPE, help="read: it changes nothing (operate).")
    token.add_argument("--queue", action="append", default=[], metavar="NAME", help="Only this queue. Repeat for more.")
    token.add_argument("--expires", type=duration, metavar="TIME", help="It ends after this time, such as 90d.")
    token.add_argument("--note", default="", help="What it is for.")
    ended = add("tokens", changes.show, ASKS_NOTHING)
    ended.add_argument("--revoke", type=positive, metavar="N", help="Delete this token: it is refused from now on.")
