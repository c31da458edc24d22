"""``manage.py taskqueue``: what an operator looks at and does, from a terminal or a script."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_dbtaskqueue.core.exceptions import SearchError, SearchTooSlow, TaskQueueError
from django_dbtaskqueue.management.arguments import duration, positive
from django_dbtaskqueue.management.console import doctor, verbs
from django_dbtaskqueue.management.console import index as indexing
from django_dbtaskqueue.management.console import show as reading
from django_dbtaskqueue.management.console.output import Screen
from django_dbtaskqueue.operations.verbs import TASK_VERBS

REFUSED, USAGE, CONFIGURATION, TOO_SLOW = 1, 2, 3, 4
CODES = """\
Exit codes: 0 done; 1 refused, or something is wrong (a task that is not there, an operation that failed, a finding of
the doctor); 2 wrong usage, or a search that cannot be read; 3 wrong configuration; 4 the database did not answer
within DBTASKQUEUE["OPERATIONS_TIMEOUT"]."""
# As operators say them, and as the verbs are named.
VERBS = {"poison": "mark_poison", **{name: name for name in TASK_VERBS if name != "mark_poison"}}


class Command(BaseCommand):
    """Look at queues and tasks, and act on them."""

    help = f"Look at queues and tasks, and act on them. {CODES}"

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the subcommands."""
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

        def add(name: str, words: str) -> CommandParser:
            one: CommandParser = commands.add_parser(name, help=words, description=f"{words} {CODES}")
            one.add_argument("--json", action="store_true", dest="as_json", help="Answer with one JSON document.")
            one.add_argument("--database", metavar="ALIAS", help="Database to look in. Default: that of the queue.")
            return one

        _add_reading(add)
        _add_verbs(add)
        _add_queues(add)
        self._add_rest(add)

    def _add_rest(self, add: Callable[[str, str], CommandParser]) -> None:
        bulk = add("bulk", "List, show, cancel bulk operations, or carry out what is waiting.")
        bulk.add_argument("what", choices=("list", "show", "cancel", "run"))
        bulk.add_argument("number", nargs="?", type=positive)
        bulk.add_argument("--limit", type=positive, metavar="N", help="How many to list (20).")
        bulk.add_argument("--reason", default="", help="Why it is cancelled, for the audit.")
        index = add("index", "Make the index that searches of payloads go by (PostgreSQL). It costs each enqueue.")
        index.add_argument("--queue", metavar="NAME", help="Of this queue's table. Default: the common one.")
        index.add_argument("--drop", action="store_true", help="Take it away.")
        token = add("token", "Make a token for the JSON API; only its hash is kept, in the settings.")
        token.add_argument("user", help="Name of the user whose permissions it carries.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one subcommand; exit with one of the codes in the help."""
        screen = Screen(self.stdout, self.style, as_json=options["as_json"])
        try:
            code = self._run(screen, options)
        except SearchTooSlow as error:
            raise CommandError(str(error), returncode=TOO_SLOW) from error
        except SearchError as error:
            raise CommandError(str(error), returncode=USAGE) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=CONFIGURATION) from error
        except (TaskQueueError, PermissionDenied) as error:
            raise CommandError(str(error), returncode=REFUSED) from error
        except KeyboardInterrupt:
            raise CommandError("Stopped.", returncode=130) from None
        if code:
            sys.exit(code)

    def _run(self, screen: Screen, options: dict[str, Any]) -> int:
        name = options["command"]
        if name in READING:
            return READING[name](screen, options)
        if name == "token":
            return _token(screen, options["user"])
        asked = {**options, "verb": VERBS.get(name, name)}
        return ACTING.get(name, verbs.verb)(screen, asked, self._ask(options))

    def _ask(self, options: dict[str, Any]) -> verbs.Ask:
        """Return how to ask before an act: on a terminal; elsewhere ``--yes`` must have been said."""

        def ask(question: str) -> bool:
            if options["yes"]:
                return True
            if not sys.stdin.isatty():
                raise CommandError("Nobody is there to ask: say --yes, or look first with --dry-run.")
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")

        return ask


READING: dict[str, Callable[[Screen, dict[str, Any]], int]] = {
    "status": reading.status,
    "list": reading.list_tasks,
    "show": reading.show,
    "tail": reading.tail,
    "doctor": doctor.doctor,
    "index": indexing.index,
}
ACTING: dict[str, Callable[[Screen, dict[str, Any], verbs.Ask], int]] = {
    "pause": verbs.pause,
    "resume": verbs.resume,
    "purge": verbs.purge,
    "bulk": verbs.bulk,
}


def _add_reading(add: Callable[[str, str], CommandParser]) -> None:
    status = add("status", "Health in a sentence, then each queue: pause, oldest wait, rates, tasks by status.")
    status.add_argument("--queue", action="append", default=[], metavar="NAME", help="Only this queue; again for more.")
    tasks = add("list", "The newest tasks that match.")
    _filter(tasks)
    tasks.add_argument("--limit", type=positive, metavar="N", help="How many (20).")
    tasks.add_argument("--before", type=positive, metavar="ID", help="Only those enqueued before this one.")
    show = add("show", "One task, in a table or in the history: facts, failed attempts, payload with secrets masked.")
    show.add_argument("task", help="An id, or queue/reference.")
    show.add_argument("--queue", metavar="NAME", help="Only in this queue's table. Default: in all known ones.")
    add("doctor", "What is wrong with queues, pollers, settings and the database, and what helps.")
    tail = add("tail", "Tasks as they are enqueued, and attempts as they fail, until stopped.")
    _filter(tail)
    tail.add_argument(
        "--interval", type=duration, default=timedelta(seconds=2), metavar="TIME", help="Between looks (2s)."
    )
    tail.add_argument("--count", type=positive, metavar="N", help="End after N looks.")


def _add_verbs(add: Callable[[str, str], CommandParser]) -> None:
    for name, verb in VERBS.items():
        one = add(name, str(TASK_VERBS[verb].effect))
        _filter(one)
        one.add_argument(
            "--id", action="append", type=positive, default=[], metavar="N", help="This task; again for more."
        )
        one.add_argument("--limit", type=positive, metavar="N", help="Look at N tasks at most.")
        _acting(one)
        if TASK_VERBS[verb].ages:
            one.add_argument(
                "--older-than",
                type=duration,
                default=timedelta(days=14),
                metavar="TIME",
                help="Finished that long ago (14d).",
            )
            one.add_argument("--to", choices=("history", "delete"), default="history", help="Where they go (history).")


def _add_queues(add: Callable[[str, str], CommandParser]) -> None:
    for name, words in (("pause", "Give no task of a queue to any poller."), ("resume", "Give its tasks again.")):
        one = add(name, words)
        one.add_argument("queue", nargs="+")
        one.add_argument("--reason", default="", help="Why, for the audit and for colleagues.")
        one.add_argument("--dry-run", action="store_true", help="Say what would happen; change nothing.")
        if name == "pause":
            one.add_argument(
                "--for", type=duration, dest="for_time", metavar="TIME", help="Resume by itself after this time."
            )
    purge = add("purge", "Delete every task of a queue, whatever its status.")
    purge.add_argument("queue")
    _acting(purge)
    purge.set_defaults(limit=None)


def _filter(parser: CommandParser) -> None:
    parser.add_argument(
        "--filter", action="append", default=[], metavar="SEARCH",
        help="Such as 'status:ERROR queue:claims age:>10m'; again for more. With a minus at its beginning: "
        "--filter=-queue:x.",
    )  # fmt: skip


def _acting(parser: CommandParser) -> None:
    parser.add_argument("--reason", default="", help="Why, for the audit; delete and purge need one.")
    parser.add_argument("--dry-run", action="store_true", help="Say what would happen; change nothing.")
    parser.add_argument("--yes", action="store_true", help="Do not ask. Needed where there is no terminal.")
    parser.add_argument("--background", action="store_true", help="Leave the work to the pollers.")


def _token(screen: Screen, user: str) -> int:
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    screen.data({"user": user, "token": token, "hash": digest})
    screen.say(f"Send this, and keep it nowhere else:  Authorization: Bearer {token}")
    screen.say(f'Put this into DBTASKQUEUE["API_TOKENS"]:  {{"{user}": "{digest}"}}')
    return 0
