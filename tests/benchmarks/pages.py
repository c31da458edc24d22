"""How long the operations pages take at size: ``python -m tests.benchmarks.pages --tasks 10000000``.

Builds the tasks with ``generatetasks`` in a PostgreSQL of its own, kept in ``--folder`` for the next time, and asks for
each page in turns, through Django's whole stack. Prints how many of the rows that match one page shows, the time that
95 % of the requests stayed within, the CPU time of Python, and the statements of one request, those that begin and end
transactions among them. A search that goes on by itself has also the time until its first row. Nobody else should use
the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

import psycopg

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from tests.benchmarks.report import BEGIN, END, put_into, table

# What a server on such a machine would be set to; commits of the builder need not survive a crash.
SETTINGS = {"synchronous_commit": "off", "max_wal_size": "8GB", "shared_buffers": "2GB", "checkpoint_timeout": "30min"}
NAME = "pages"
GOAL = 300  # ms
TASKS = "/admin/dbtaskqueue/task/"
PAGES = {
    "Overview": "/admin/dbtaskqueue/overview/",
    "Tasks": TASKS,
    "Tasks, an old page": f"{TASKS}?before={{middle}}",
    "Tasks: a status": f"{TASKS}?q=status:ERROR",
    "Tasks: a status of most": f"{TASKS}?q=status:COMPLETED",
    "Tasks: waiting": f"{TASKS}?q=status:CREATED",
    "Tasks: being processed": f"{TASKS}?q=status:PROCESSING",
    "Tasks: a large queue": f"{TASKS}?q=queue:built-00",
    "Tasks: a small queue": f"{TASKS}?q=queue:built-{{small:02}}",
    "Tasks: a small queue and a status": f"{TASKS}?q=queue:built-{{small:02}}+status:ERROR",
    "Tasks: a large queue and a status": f"{TASKS}?q=queue:built-00+status:ERROR",
    "Tasks: a reference": f"{TASKS}?q=ref:b-77777",
    "Tasks: a failure": f"{TASKS}?q=fingerprint:{{fingerprint}}",
    "Tasks: an age": f"{TASKS}?q=status:ERROR+age:>10d",
    "Tasks: leases that ran out": f"{TASKS}?q=is:stale",
    "Tasks: due": f"{TASKS}?q=is:due",
    "Tasks: scheduled": f"{TASKS}?q=is:scheduled",
    "Tasks: a part of an error": f"{TASKS}?q=error:quota",
    "Tasks: a part of no error": f"{TASKS}?q=error:Timeout",
    "Tasks: attempts made": f"{TASKS}?q=attempt:>=3",
    "Tasks: a value in payloads": f"{TASKS}?q=payload.number:77777",
    "Tasks: a value in a queue's payloads": f"{TASKS}?q=queue:built-00+payload.number:-1",
    "Tasks: a poller": f"{TASKS}?q=poller:nobody",
    "Tasks: old ones": f"{TASKS}?q=age:>25d",
    "Tasks: all but a queue's": f"{TASKS}?q=-queue:built-00",
    "Task": f"{TASKS}{{middle}}/change/",
    "Failures": "/admin/dbtaskqueue/failuregroup/",
    "Failure": "/admin/dbtaskqueue/failuregroup/{fingerprint}/change/",
    "Poison": "/admin/dbtaskqueue/poisontask/",
    "Poison of a queue": "/admin/dbtaskqueue/poisontask/?q=queue:built-03",
    "Queues": "/admin/dbtaskqueue/queue/",
    "Queue": "/admin/dbtaskqueue/queue/built-00/change/",
    "Pollers": "/admin/dbtaskqueue/poller/",
    "Bulk operations": "/admin/dbtaskqueue/bulkoperation/",
    "Audit": "/admin/dbtaskqueue/auditentry/",
    "History": "/admin/dbtaskqueue/taskhistory/",
    "Attempts": "/admin/dbtaskqueue/attempt/",
    "Doctor": "/admin/dbtaskqueue/doctor/",
}


def main() -> None:
    """Build what is not there, measure, print."""
    options = _options()
    server = EmbeddedPostgres.start(options.folder, settings=SETTINGS)
    url = urlsplit(server.url)._replace(path=f"/{NAME}").geturl()
    _database(server.url)
    os.environ |= {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    import django

    django.setup()
    django.conf.settings.ALLOWED_HOSTS = ["testserver"]
    _fill(options.tasks)
    report = _report(options, server.binaries.version, _measured(options.rounds))
    print(report)
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pages", description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000_000, help="How many tasks (%(default)s).")
    parser.add_argument("--rounds", type=int, default=40, help="Requests of each page (%(default)s).")
    default = Path(tempfile.gettempdir()) / f"dbtaskqueue-pages-{os.getuid()}"
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help=f"Put the table into a page, between {BEGIN} and {END}."
    )
    parser.add_argument("--folder", type=Path, default=default, help="Where the database lives (%(default)s).")
    return parser.parse_args()


def _database(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [NAME]).fetchone():
            connection.execute(f"CREATE DATABASE {NAME}")


def _fill(tasks: int) -> None:
    from django.core.management import call_command
    from django.db import connection

    from django_dbtaskqueue.models import Queue

    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("SELECT reltuples FROM pg_class WHERE relname = 'dbtaskqueue_task'")
        there = cursor.fetchone()[0]
    if there < 0.9 * tasks:
        call_command("flush", verbosity=0, interactive=False)
        call_command("generatetasks", tasks=tasks, verbosity=2)
    Queue.objects.get_or_create(name="built-00")  # a queue that is known has a page


WARM = 3  # requests of each page that do not count


@dataclass(frozen=True)
class Measured:
    """A page, as it answered."""

    name: str
    code: int
    queries: int
    took: list[float]  # ms
    cpu: list[float]  # ms, of this process: without the database
    answer: Answer


@dataclass(frozen=True)
class Answer:
    """What a list page shows of its search, once it has gone on to the first row or to the end."""

    rows: int | None = None  # None: not a list
    of: int | None = None  # all that match
    pages: int = 1  # asked for until then
    took: float = 0.0  # ms

    def __str__(self) -> str:
        if self.rows is None:
            return ""
        return f"{self.rows}" if self.of is None else f"{self.rows} of {self.of:,}"


def _measured(rounds: int) -> Iterator[Measured]:
    client = _client()
    pages = {name: page.format(**_places()) for name, page in PAGES.items()}
    times: dict[str, list[float]] = {name: [] for name in pages}
    cpu: dict[str, list[float]] = {name: [] for name in pages}
    codes, queries = {}, {name: _queries(client, page) for name, page in pages.items()}
    for turn in range(rounds + WARM):
        for name, page in pages.items():
            began, used = perf_counter(), process_time()
            codes[name] = client.get(page).status_code
            if turn >= WARM:
                times[name].append(1000 * (perf_counter() - began))
                cpu[name].append(1000 * (process_time() - used))
    for name, took in times.items():
        yield Measured(name, codes[name], queries[name], took, cpu[name], _answer(client, pages[name]))


def _answer(client: Any, page: str) -> Answer:
    """Ask for a list until it shows a row or has looked at everything, as the browser does."""
    began, asked, address = perf_counter(), 0, page
    while address:
        found, asked = client.get(address).context_data, asked + 1
        if "slice" not in found:
            return Answer()
        rows, address = len(found["slice"].rows), found.get("look_on_url")
        address = None if rows else address and f"{address}&_live=1"
    took, filterset = 1000 * (perf_counter() - began), found["filterset"]
    if not hasattr(filterset, "search") or "before=" in page:
        return Answer(rows, None, asked, took)
    return Answer(rows, filterset.qs.order_by().count(), asked, took)


def _queries(client: Any, page: str) -> int:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as captured:
        client.get(page)
    return len(captured)


def _client() -> Any:
    from django.contrib.auth.models import User
    from django.test import Client

    user = User.objects.filter(username=NAME).first() or User.objects.create_superuser(NAME)
    client = Client()
    client.force_login(user)
    return client


def _places() -> dict[str, Any]:
    from django_dbtaskqueue.models import FailureGroup, Task

    newest = Task.objects.order_by("-pk").values_list("pk", flat=True)[0]
    group = FailureGroup.objects.order_by("fingerprint").values_list("pk", flat=True)[0]
    return {"middle": newest // 2, "small": 15, "fingerprint": group}


def _report(options: argparse.Namespace, version: str, measured: Iterator[Measured]) -> str:
    words = f"PostgreSQL {version}, {options.tasks:,} tasks, {os.cpu_count()} cores, {options.rounds} requests of each."
    rows = []
    for page in measured:
        most = statistics.quantiles(page.took, n=20)[-1]
        note = f"answers {page.code}" if page.code != 200 else "too slow" if most > GOAL else ""
        if page.answer.pages > 1:
            note = f"first row or end after {page.answer.took / 1000:.1f} s"
        figures = (statistics.median(page.took), most, max(page.took), statistics.quantiles(page.cpu, n=20)[-1])
        rows.append([page.name, str(page.answer), *(f"{one:.0f}" for one in figures), str(page.queries), note])
    heads = ["page", "rows shown", "median ms", "p95 ms", "longest ms", "p95 CPU ms", "statements", ""]
    return f"{words}\n\n{table(heads, rows)}\n"


if __name__ == "__main__":
    main()
