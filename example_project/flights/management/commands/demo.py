"""``manage.py demo``: the whole road of a task, on real data, in one command."""

from __future__ import annotations

import json
import signal
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from django_dbtaskqueue.core.exceptions import TaskQueueError
from example_project.flights import data
from example_project.flights.demo import figures, pollers, road, setup
from example_project.flights.demo.screen import Screen

if TYPE_CHECKING:
    from example_project.flights.demo.pipeline import Engineer

HOST = "127.0.0.1"
ALL = 336_776  # flights of the year
NEXT_PAGES = (
    ("failuregroup/", "why claims failed; Reprocess… sends a group to the pollers again"),
    ("task/?q=status:POISON", "a task that nothing can decide, with its attempts and its payload"),
    ("task/?q=status:COMPLETED", "decided claims, with their results"),
    ("overview/", "all of it live: file a claim at the desk, and watch"),
)


class Command(BaseCommand):
    """Run the flight desk from an empty database to the admin."""

    help = "Files claims for real flights, lets pollers decide them, shows what happened, and serves the admin."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        year = "claims to file, of 336,776 flights; all: of the whole year"
        parser.add_argument("--tasks", type=number_of_tasks, default=20_000, help=year)
        parser.add_argument("--pollers", type=int, default=2, help="poller processes")
        parser.add_argument("--no-spark", dest="spark", action="store_false", help="without the pipeline's part")
        parser.add_argument("--no-serve", dest="serve", action="store_false", help="end after the result")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE, too")
        parser.add_argument("--port", type=int, default=8000, help="the web server's port")

    def handle(self, **options: Any) -> None:
        """Check the options, then run with signals that stop the pollers, too."""
        check(options)
        with signals_interrupt():
            try:
                self.run(Screen(no_color=options["no_color"]), options)
            except KeyboardInterrupt:
                self.stdout.write("Stopped. Nothing is lost: the next demo goes on from here.")
                sys.exit(130)

    def run(self, screen: Screen, options: dict[str, Any]) -> None:
        """Go through the demo's steps."""
        with screen.step("Database", "connecting; an embedded one starts first"):
            database = setup.database()
        screen.say("Database", database)
        with screen.step("Tables", "migrating"):
            call_command("migrate", verbosity=0)
        password = setup.make_operator()
        try:
            with ExitStack() as stack:
                engineer = None
                if options["spark"]:
                    with screen.step("Spark", "starting"):
                        engineer = stack.enter_context(hired())
                result = figures.take(database, road.travel(screen, options["tasks"], options["pollers"], engineer))
        except (data.FlightDataMissing, TaskQueueError, pollers.PollerFailed) as error:
            raise CommandError(str(error)) from error
        screen.table(result)
        if options["json"]:
            options["json"].write_text(json.dumps(result.as_json(), indent=2) + "\n")
        if not result.conservation_ok or result.run.rolled_back_present:
            raise CommandError("The balance is off: tasks were lost, doubled, or survived their rollback.")
        screen.say("Login", f"{setup.OPERATOR} / {password}")
        if options["serve"]:
            serve(screen, options["port"])


def hired() -> AbstractContextManager[Engineer]:
    """Return the data engineer, who needs Spark."""
    try:
        from example_project.flights.demo.pipeline import engineer
    except ModuleNotFoundError as error:
        reason = f'Spark\'s part needs {error.name}: pip install -e ".[demo]", or give --no-spark.'
        raise CommandError(reason) from error
    return engineer()


def number_of_tasks(text: str) -> int:
    """Return how many claims ``--tasks`` asks for."""
    return ALL if text == "all" else int(text)


def serve(screen: Screen, port: int) -> None:
    """Serve the site in this process, with a poller beside it, until Ctrl-C."""
    screen.say("Admin", f"http://{HOST}:{port}/admin/")
    screen.say("Desk", f"http://{HOST}:{port}/")
    screen.say("Next", "log in, and open")
    for page, what in NEXT_PAGES:
        screen.say("", f"http://{HOST}:{port}/admin/dbtaskqueue/{page}  {what}")
    with pollers.running(1):
        call_command("runserver", f"{HOST}:{port}", use_reloader=False, insecure_serving=True)


def check(options: dict[str, Any]) -> None:
    """Refuse at once what would fail after the work is done."""
    for name in ("tasks", "pollers"):
        if options[name] < 1:
            raise CommandError(f"--{name} must be at least 1, not {options[name]}.")
    if options["json"] and not options["json"].resolve().parent.is_dir():
        raise CommandError(f"--json {options['json']}: there is no folder {options['json'].resolve().parent}.")
    if options["serve"]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, options["port"]))
            except (OSError, OverflowError) as error:
                raise CommandError(f"--port {options['port']} cannot be used: {error}. Choose another.") from error


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the demo as Ctrl-C does, so that its pollers end with it."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
