"""``manage.py generatetasks``: fill the table with generated tasks, to try pages and pollers at size."""

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import cycle
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.core.failure_signature import signature_of
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db.session import Session, alias_for
from django_dbtaskqueue.management import exit_codes, positive
from django_dbtaskqueue.models import Attempt, FailureGroup, MinuteCount, Task
from django_dbtaskqueue.models.control import FAILURE, OUTCOME

MAX_GENERATED_QUEUES = 99
PREFIX = "built-"
ROWS_PER_BLOCK = 1000  # rows that share their times
CREATION_PERIOD = timedelta(days=30)  # over which the tasks were created
# Of a thousand tasks, as in a table that has been at work for a month.
STATUSES = [PROCESSING] + 3 * [POISON] + 20 * [ERROR] + 100 * [CREATED] + 876 * [COMPLETED]
FAILURE_REASONS = ("no answer from host", "row is locked", "amount is negative", "unknown parcel", "quota used up")
FAILURE_GROUPS = 40  # groups of failures
NULL = r"\N"
COPIED_COLUMNS = (
    "queue_name", "reference_number", "status", "final_status", "attempt", "total_attempt", "priority", "payload",
    "process_result", "fingerprint", "poller_instance", "create_time", "ready_time", "next_process_time",
    "last_update_time", "start_time", "finish_time",
)  # fmt: skip
COPY_SQL = "COPY {table} (" + ", ".join(COPIED_COLUMNS) + ") FROM STDIN"


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


def build(session: Session, number: int, queues: int, progress: Callable[[int], None] = lambda done: None) -> None:
    """Insert ``number`` tasks over ``queues`` queues, ``built-00`` and on in one transaction, and their statistics.

    The first queue has half of all tasks, each next one half of the rest, and the last a handful. PostgreSQL only.
    """
    names = [f"{PREFIX}{one:02}" for one in range(queues)]
    reasons = zip(range(FAILURE_GROUPS), cycle(FAILURE_REASONS), strict=False)
    kinds = [signature_of(f"{reason} {chr(97 + at % 26) * (at // 26 + 1)}", "") for at, reason in reasons]
    now = session.now()
    table = session.connection.ops.quote_name(session.model._meta.db_table)
    with transaction.atomic(using=session.connection.alias):
        # A commit that is not on disk yet keeps the VACUUM after it from marking pages as visible to all.
        session.run("SELECT set_config('synchronous_commit', 'on', true)", {})
        with session.connection.cursor() as cursor, cursor.cursor.copy(COPY_SQL.format(table=table)) as copy:
            for start in range(0, number, ROWS_PER_BLOCK):
                made = now - CREATION_PERIOD * (1 - start / number)
                copy.write("".join(_rows(range(start, min(number, start + ROWS_PER_BLOCK)), names, made, now, kinds)))
                progress(start)
        _counts(session.connection.alias, names, kinds, now)


def _rows(numbers: range, names: list[str], made: datetime, now: datetime, kinds: list[Any]) -> Iterator[str]:
    created, ended = made.isoformat(), min(now, made + timedelta(minutes=2)).isoformat()
    later = (now + timedelta(days=1)).isoformat()
    for number in numbers:
        # Half of all go to the first queue, half of the rest to the second, and what is left to the last.
        leading_zeros = 32 - ((number * 2_654_435_761) % 2**32).bit_length()
        queue, status = names[min(leading_zeros, len(names) - 1)], STATUSES[number * 7919 % len(STATUSES)]
        payload = f'{{"number": {number}, "carrier": "{"UA" if number % 3 else "DL"}"}}'
        head = f"{queue}\tb-{number}\t{status}"
        if status == CREATED:
            due = later if number % 4 else created
            tail = f"{NULL}\t0\t0\t{number % 3}\t{payload}\t{NULL}\t{NULL}\t{NULL}\t{created}\t{due}\t{due}\t{created}"
            yield f"{head}\t{tail}\t{NULL}\t{NULL}\n"
        elif status == PROCESSING:
            tail = f"{NULL}\t1\t1\t0\t{payload}\t{NULL}\t{NULL}\tbuilt:1:1\t{created}\t{created}\t{later}\t{ended}"
            yield f"{head}\t{tail}\t{ended}\t{NULL}\n"
        else:
            kind = kinds[number % FAILURE_GROUPS]
            said = f"{NULL}\t{NULL}" if status == COMPLETED else f"{kind.message}\t{kind.fingerprint}"
            tail = f"{status}\t1\t1\t0\t{payload}\t{said}\tbuilt:1:1\t{created}\t{NULL}\t{ended}\t{ended}"
            yield f"{head}\t{tail}\t{created}\t{ended}\n"


def _counts(alias: str, names: list[str], kinds: list[Any], now: datetime) -> None:
    minute = now.replace(second=0, microsecond=0)
    counts = MinuteCount.objects.using(alias)
    counts.bulk_create(
        [
            MinuteCount(
                kind=OUTCOME, queue=name, name=outcome,
                minute=minute - timedelta(minutes=10 * step if step > 180 else step),
                count=random.randint(1, 500), run_seconds=1.5, wait_seconds=20.0,
                runs={"14": 90, "20": 9, "30": 1}, waits={"30": 50, "34": 50},
            )
            for name in names for step in range(300) for outcome in ("completed", "retried")
        ],
        batch_size=2000,
    )  # fmt: skip
    groups = [
        FailureGroup(
            fingerprint=kind.fingerprint, queue=names[at % len(names)], error_type="built.Error",
            frame="built.tasks:run",
            message=kind.message, first_seen=minute - CREATION_PERIOD, last_seen=minute - timedelta(hours=at),
        )
        for at, kind in enumerate(kinds)
    ]  # fmt: skip
    FailureGroup.objects.using(alias).bulk_create(groups, ignore_conflicts=True)
    hours = [(group, minute - timedelta(hours=hour)) for group in groups for hour in range(168)]
    failed = [MinuteCount(kind=FAILURE, queue=of.queue, name=of.fingerprint, minute=at, count=3) for of, at in hours]
    counts.bulk_create(failed, batch_size=5000)
    Attempt.objects.using(alias).bulk_create(
        [
            Attempt(
                queue=group.queue, task_id=number, attempt=1, total_attempt=1, error_type=group.error_type,
                message=group.message, traceback="made up", fingerprint=group.fingerprint,
            )
            for number, group in enumerate(groups * 25)
        ],
        batch_size=5000,
    )  # fmt: skip
