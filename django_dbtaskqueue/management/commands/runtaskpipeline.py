"""``manage.py runtaskpipeline``: run a job of the data pipeline on this project's database."""

import io
import json
import sys
from argparse import REMAINDER
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

__all__ = ["database_of_alias"]

try:
    from psycopg import pq
except ImportError as error:  # a bare install, and no libpq
    raise SystemExit(f"The pipeline needs psycopg: pip install 'django-dbtaskqueue[spark]'. {error}") from None

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.db.session import Session, model_for
from django_dbtaskqueue.models import Queue as QueueRow, Task
from django_dbtaskqueue.operations.lookup import locations, locations_on
from django_dbtaskqueue.operations.report_page import html_file
from django_dbtaskqueue.pipeline.command_line import USAGE, Face, perform
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.jobs import Argument, write_whole

LIBPQ_OPTIONS = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
LIBPQ_NAMES = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}


class Command(BaseCommand):
    """Parse the name of the job; the job's own command line parses the rest."""

    help = f"Run a job of the data pipeline. {USAGE}\npage FILE.json        write the HTML page of a report's figures"

    _own_process = False  # this process runs only the job, and ends with its exit code

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("job", nargs="?", default="--help", help="list, explain, page, or the name of a job")
        parser.add_argument("arguments", nargs=REMAINDER, help="options of the job")

    def run_from_argv(self, argv: list[str]) -> None:
        self._own_process = True
        super().run_from_argv(argv)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run to the end. In its own process, exit with the job's code; else raise CommandError unless it is 0."""
        if options["job"] == "page":
            self.stdout.write(f"page: {write_page(options['arguments'])}")
            return
        place = (
            Argument("database", "the tasks' database, an alias of DATABASES", metavar="ALIAS"),
            Argument("task_table", "the model of a queue's own task table, such as shipping.parcel", metavar="MODEL"),
        )
        errors = io.StringIO()
        err = sys.stderr if self._own_process else errors
        face = Face("manage.py runtaskpipeline", place, database_of_alias, self.stdout, err, defaults, html_file)
        if code := perform([options["job"], *options["arguments"]], face):
            if self._own_process:
                sys.exit(code)
            raise CommandError(errors.getvalue().strip().splitlines()[-1], returncode=code)


def defaults(job: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that the project's settings give a job; ``given`` are those on the command line."""
    rows = QueueRow.objects.using(conf.settings().database).values_list("name", flat=True)
    known = tuple(sorted({*conf.settings_queues(), *rows})) if job in ("enqueue", "replay") else ()
    chosen = (given.get("task_table") or Task._meta.label).lower()
    guards = {"known_queue": known, "payload_max_bytes": conf.settings().payload_max_bytes}
    if job == "replay":
        return guards
    if job == "enqueue":
        queue = conf.default_settings(given["queue"]) if conf.is_known(given.get("queue", "")) else None
        table = model_for(given["queue"])._meta.label_lower if queue else ""
        if queue and table != chosen:
            reason = f"the tasks of queue {given['queue']!r} are in another table: give --task-table {table}"
            raise JobOptionError("--task-table", reason)
        of_queue = {name: getattr(queue, name) for name in ("max_attempts", "priority", "ttl")} if queue else {}
        return {**guards, **of_queue}
    if job == "erase":
        here = (given.get("database") or conf.settings().database, chosen)
        places = {(alias, model._meta.label_lower) for alias, model in locations()} - {here}
        return {"other_table": tuple(f"{table} in {alias}" for alias, table in sorted(places))}
    if job == "report":
        return {"objective": tuple(f"{queue}={text}" for queue, text in conf.settings().objectives.items())}
    return {"timezone": settings.TIME_ZONE} if job == "forecast" else {}


def write_page(files: Sequence[str]) -> Path:
    """Write the HTML page of a report's figures, a JSON file, beside it, and return where. Raises CommandError."""
    if len(files) != 1:
        raise CommandError("page needs one file: the figures that report, forecast or whatif wrote", returncode=2)
    file = Path(files[0])
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
        write_whole(file.with_suffix(".html"), html_file(str(figures["kind"]), figures))
    except (OSError, ValueError, LookupError, TypeError, PipelineError) as error:
        raise CommandError(f"{file} cannot be made a page: {error}") from error
    return file.with_suffix(".html")


def database_of_alias(alias: str | None, table: str | None = None) -> Database:
    """Return a database of ``DATABASES``, with the task table of the model ``table``. Raises JobOptionError."""
    alias = alias or conf.settings().database
    if alias not in list(connections):
        near = near_match(alias, connections)
        raise JobOptionError("--database", f"{alias!r} is not in DATABASES.{near} Known: {', '.join(connections)}")
    connection, label = connections[alias], (table or Task._meta.label).lower()
    settings = connection.settings_dict
    known = {model._meta.label_lower: model for _alias, model in locations_on(alias)} | {Task._meta.label_lower: Task}
    if label not in known:
        near, names = near_match(label, known), ", ".join(known)
        raise JobOptionError("--task-table", f"{table!r} is no task table of {alias!r}.{near} Known: {names}")
    session = Session.on(alias, known[label])
    if connection.vendor == "sqlite":
        return Database("sqlite", {"dbname": str(settings["NAME"])}, session.sql.tables, session.location)
    if connection.vendor == "postgresql":
        given = {name: value for name, value in settings.get("OPTIONS", {}).items() if name in LIBPQ_OPTIONS}
        given |= {ours: settings[name] for name, ours in LIBPQ_NAMES.items() if settings.get(name)}
        conninfo = {name: str(value) for name, value in given.items()}
        return Database("postgresql", conninfo, session.sql.tables, session.location)
    reason = f"The pipeline reads PostgreSQL and SQLite; {alias!r} is {connection.vendor}"
    raise ImproperlyConfigured(f"{reason}. Name another with --database.")
