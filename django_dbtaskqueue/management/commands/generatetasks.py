"""``manage.py generatetasks``: fill the table with generated tasks, to try pages and pollers at size."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.db.session import Session, alias_for
from django_dbtaskqueue.management import exit_codes, positive
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing.loadgen import PREFIX, build

MAX_GENERATED_QUEUES = 99


class Command(BaseCommand):
    """Copy generated tasks into TASKS."""

    help = (
        "Insert generated tasks in every status, with COPY, into queues built-00, built-01 and so on, and analyse the "
        "table. For benchmarks and trials on a database of their own. PostgreSQL only."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tasks", type=positive, default=10_000_000, metavar="N", help="How many (%(default)s).")
        parser.add_argument("--queues", type=positive, default=20, metavar="N", help="Number of queues (%(default)s).")
        parser.add_argument("--database", metavar="ALIAS", help="Database to fill. Default: that of new tasks.")

    @exit_codes()
    def handle(self, *args: Any, **options: Any) -> None:
        session = Session.on(alias_for("", options["database"]))
        alias = session.connection.alias
        if not session.postgresql:
            raise CommandError(f"generatetasks needs PostgreSQL for COPY; {alias} is {session.connection.vendor}.")
        if Task.objects.using(alias).filter(queue__startswith=PREFIX).exists():
            raise CommandError(f"{alias} has queues {PREFIX}… already. Purge them first, or use another database.")
        if options["queues"] > MAX_GENERATED_QUEUES:
            raise CommandError(f"--queues {options['queues']} is too many: at most {MAX_GENERATED_QUEUES}.")
        began = clock.monotonic()

        def progress(done: int) -> None:
            if options["verbosity"] > 1 and done % 1_000_000 == 0:
                self.stdout.write(f"{done:,}")

        build(session, options["tasks"], options["queues"], progress)
        copied = clock.monotonic() - began
        with session.connection.cursor() as cursor:
            cursor.execute(f"VACUUM (ANALYZE) {session.connection.ops.quote_name(Task._meta.db_table)}")
        total = format_seconds(clock.monotonic() - began)
        self.stdout.write(f"{options['tasks']:,} tasks in {format_seconds(copied)}, analysed after {total} in all.")
