"""``manage.py housekeeptasks``: move finished tasks to the history, and delete what is older than its retention."""

from argparse import SUPPRESS
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.management import exit_codes, positive_duration, wrong_usage
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.operations.permissions import Actor, check_there

NEVER_TEXT = "never"
AGE_OPTIONS = {
    "completed": "COMPLETED tasks stay in the table",
    "error": "ERROR tasks stay there",
    "poison": "POISON tasks stay there",
    "history": "tasks stay in the history, before they are deleted and counted",
    "attempts": "records of failed attempts stay",
    "audit": "the audit and bulk operations that have ended stay",
}


class Command(BaseCommand):
    """One complete run of housekeeping. It is safe at any time, also twice at once."""

    help = (
        "Move finished tasks to the history, delete old rows of the history and the audit, and create the history's "
        "next partitions. The settings (KEEP_COMPLETED and so on) give the ages that no option gives. Batches are "
        "small and wait for no lock."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        for name, what in AGE_OPTIONS.items():
            text = f'How long {what}, such as "7d" or "12h"; "never": without limit.'
            parser.add_argument(f"--{name}", type=age, metavar="AGE", default=SUPPRESS, help=text)
        parser.add_argument("--queue", action="append", metavar="NAME", help="Only this queue. Repeat it for more.")
        parser.add_argument("--database", metavar="ALIAS", help="Only this database. Default: all with queues.")
        parser.add_argument("--delete", action="store_true", help="Delete and count, instead of moving to the history.")
        text = 'End after this time, such as "10m".'
        parser.add_argument("--within", type=positive_duration, metavar="TIME", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        given = {name: options[name] for name in AGE_OPTIONS if name in options}
        if options["queue"] and (unfit := [f"--{name}" for name in ("history", "attempts", "audit") if name in given]):
            raise wrong_usage(f"{', '.join(unfit)} would delete rows of all queues. Leave it out, or --queue.")
        try:
            with exit_codes():
                ages = replace(RetentionPolicy.of_settings(), **given)
                check_there(options["queue"] or (), Actor())
                to = "delete" if options["delete"] else "history"
                report = Housekeeper().turn(
                    ages, using=options["database"], queues=options["queue"], to=to, within=options["within"]
                )
        except DatabaseError as error:
            raise CommandError(f"The database did not answer: {error}".strip(), returncode=4) from error
        if options["verbosity"]:
            self.stdout.write(f"Done: {report}.")
            if options["verbosity"] > 1:
                shown = [f"{name} {format_duration(age) if age else NEVER_TEXT}" for name, age in asdict(ages).items()]
                self.stdout.write(f"Ages: {', '.join(shown)}")
        if report.failed:
            raise CommandError(f"Not done: {'; '.join(report.failed)}")


def age(text: str) -> timedelta | None:
    """Return the value of an option that is an age: a duration, or None for no limit."""
    return None if text == NEVER_TEXT else positive_duration(text)
